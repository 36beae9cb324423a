/* Declarations shared by the files that expose csrc/ckpt to Python. */
#ifndef FSDPC_BIND_ENGINE_CKPT_H
#define FSDPC_BIND_ENGINE_CKPT_H

#include "bind/engine.h"

#include "base/fs.h"
#include "ckpt/shards.h"
#include "ckpt/safetensors.h"

/* Wraps a Python callable (call, path), which is borrowed, as a hook; None gives an empty hook. An
 * exception raised by the callable makes the call fail. */
fsdpc_fs fsdpc_py_fs(PyObject *hook);

/* Parses a list of (name, dtype, shape) tuples, whose strings are borrowed; returns -1 with an
 * exception on failure. */
int fsdpc_py_ckpt_tensors(PyObject *list, fsdpc_st_tensor *out);

/* Parses (tensor, first element, Tensor) into a shard with no file location; returns -1 with an
 * exception on failure. */
int fsdpc_py_ckpt_shard(PyObject *item, size_t n_tensors, fsdpc_ckpt_shard *out);

/* Host memory for the shards of a remote device. */
typedef struct fsdpc_py_ckpt_host {
    void *memory;
    bool pinned;
} fsdpc_py_ckpt_host;

/* Describes the same `n` shards in host memory (`mirrored`) without copying anything yet. The
 * caller frees the block with unmirror. `repeats`: more mirrors of the same size will follow. */
fsdpc_status fsdpc_py_ckpt_mirror(fsdpc_runtime *runtime, const fsdpc_ckpt_shard *shards, size_t n,
                                  bool repeats, fsdpc_ckpt_shard *mirrored,
                                  fsdpc_py_ckpt_host *out);
void fsdpc_py_ckpt_unmirror(fsdpc_runtime *runtime,
                            fsdpc_py_ckpt_host *host); /* may be all zeros */
/* Copies the values of `from` into `to` and waits for the copy. */
fsdpc_status fsdpc_py_ckpt_copy(fsdpc_runtime *runtime, const fsdpc_ckpt_shard *to,
                                const fsdpc_ckpt_shard *from, size_t n);

#endif
