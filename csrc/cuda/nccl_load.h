/* Opens NCCL at run time; it is never linked.
 *
 * A process must not have two copies: each would have its own view of devices and peers, and
 * torch's collectives would share neither with ours. The copy already in the process (torch's) is
 * therefore tried first. Next are the library at a given path and then the bare name, which the
 * plugin's run path resolves to pip's nvidia packages before the system's folders. If torch is
 * imported later, it finds our copy by the same name.
 *
 * Opening needs no GPU. Once opened, the library stays open. Opening NCCL also sets its environment
 * variables (nccl_env.c).
 */
#ifndef FSDPC_CUDA_NCCL_LOAD_H
#define FSDPC_CUDA_NCCL_LOAD_H

#include "base/log.h"
#include "base/status.h"
#include "cuda/nccl_abi.h"

typedef struct fsdpc_nccl {
    int version;   /* 22809 is 2.28.9 */
    bool was_here; /* it was already in the process, and may have been used */
#define X(result, name, parameters) result(*name) parameters;
    FSDPC_NCCL_SYMBOLS(X)
    FSDPC_NCCL_OPTIONAL(X) /* NULL if it lacks the function */
#undef X
} fsdpc_nccl;

/* `path` may be NULL. Returns FSDPC_ERR_UNSUPPORTED, with the loader's message or the missing
 * feature, if NCCL is not found or too old. Before 2.26, NCCL cannot order several communicators'
 * operations. `several_hosts`: loopback does not connect the ranks. `log` receives a warning if the
 * environment is set too late; NULL: a later opening reports it. */
fsdpc_status fsdpc_nccl_open(const char *path, bool several_hosts, const fsdpc_log *log,
                             fsdpc_nccl *out);

/* Translates an NCCL error to a status with the message "NCCL failed to <what>: <its text>".
 * Returns FSDPC_ERR_PEER if another rank, or the connection to it, caused the failure. */
fsdpc_status fsdpc_nccl_check(const fsdpc_nccl *nccl, fsdpc_nccl_result result, const char *what);

/* Opens NCCL and describes it, for example "NCCL 2.28.9 at /usr/lib/libnccl.so.2". */
fsdpc_status fsdpc_nccl_describe(const char *path, char *text, size_t bytes);

#endif
