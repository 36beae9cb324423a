/* What the files that join csrc/ckpt to Python share. */
#ifndef FSDPC_BIND_ENGINE_CKPT_H
#define FSDPC_BIND_ENGINE_CKPT_H

#include "bind/engine.h"

#include "base/fs.h"
#include "ckpt/pieces.h"
#include "ckpt/safetensors.h"

/* A Python callable (call, path) as a hook, or none for None; borrows it.  What it raises becomes
 * the call's failure. */
fsdpc_fs fsdpc_py_fs(PyObject *hook);

/* Reads (file, tensor, Tensor, dtype in the file, offset, bytes behind); -1 with an exception. */
int fsdpc_py_ckpt_piece(PyObject *item, size_t n_files, size_t n_tensors, fsdpc_ckpt_piece *out);

/* Host memory for pieces of a remote device. */
typedef struct fsdpc_py_ckpt_host {
    void *memory;
    bool pinned;
} fsdpc_py_ckpt_host;

/* The same pieces in host memory (`mirrored`, as many), whose block the caller gives back by
 * unmirroring; nothing is copied yet.  `repeats`: there will be others of the same size. */
fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *pieces, size_t n,
                                  bool repeats, fsdpc_ckpt_piece *mirrored,
                                  fsdpc_py_ckpt_host *out);
void fsdpc_py_ckpt_unmirror(fsdpc_runtime *runtime,
                            fsdpc_py_ckpt_host *host); /* all zero is fine */
/* The values of one into the other, waited for. */
fsdpc_status fsdpc_py_ckpt_copy(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *to,
                                const fsdpc_ckpt_piece *from, size_t n);

#endif
