/* NCCL, opened at run time and never linked.
 *
 * A process must not have two copies: each would keep its own idea of the devices and the peers,
 * and torch's collectives would meet ours in neither.  So the copy that the process already has
 * (torch's) comes before any other; then the library at a given path; then the bare name, which the
 * plugin's run path looks for in pip's nvidia packages before the system is asked.  torch, imported
 * later, finds by that same name the copy that is there.
 *
 * Opening needs no GPU.  An opened library stays open.
 */
#ifndef FSDPC_CUDA_NCCL_LOAD_H
#define FSDPC_CUDA_NCCL_LOAD_H

#include <stddef.h>

#include "base/status.h"

#if defined(FSDPC_NCCL) /* there was a header when the plugin was built */

#include <nccl.h>

/* What is called of it. */
#define FSDPC_NCCL_SYMBOLS(X)                                                                      \
    X(ncclGetVersion)                                                                              \
    X(ncclGetErrorString)                                                                          \
    X(ncclGetUniqueId)

typedef struct fsdpc_nccl {
    int version; /* 22809 is 2.28.9 */
#define X(name) __typeof__(&name) name;
    FSDPC_NCCL_SYMBOLS(X)
#undef X
} fsdpc_nccl;

/* `path` may be NULL.  FSDPC_ERR_UNSUPPORTED, with what the loader said, if there is none. */
fsdpc_status fsdpc_nccl_open(const char *path, fsdpc_nccl *out);

/* NCCL's error as ours: "NCCL failed to <what>: <its text>". */
fsdpc_status fsdpc_nccl_check(const fsdpc_nccl *nccl, ncclResult_t result, const char *what);

#endif

/* Opens it and says which it is: "NCCL 2.28.9 at /usr/lib/libnccl.so.2". */
fsdpc_status fsdpc_nccl_describe(const char *path, char *text, size_t bytes);

#endif
