/* What the files that join csrc/ckpt to Python share. */
#ifndef FSDPC_PY_PY_CKPT_H
#define FSDPC_PY_PY_CKPT_H

#include "py/py_engine.h"

#include "base/fs.h"
#include "ckpt/pieces.h"
#include "ckpt/safetensors.h"

/* A Python callable (call, path) as a hook, or none for None; borrows it.  What it raises becomes
 * the call's failure. */
fsdpc_fs fsdpc_py_fs(PyObject *hook);

/* The same pieces in host memory (`mirrored`, as many), whose block the caller gives back with
 * fsdpc_mem_free; nothing is copied yet.  For pieces of a remote device. */
fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *pieces, size_t n,
                                  fsdpc_ckpt_piece *mirrored, void **host_out);
/* The values of one into the other, waited for. */
fsdpc_status fsdpc_py_ckpt_copy(fsdpc_runtime *runtime, const fsdpc_ckpt_piece *to,
                                const fsdpc_ckpt_piece *from, size_t n);

#endif
