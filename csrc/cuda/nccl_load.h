/* NCCL, opened at run time and never linked.
 *
 * A process must not have two copies: each would keep its own view of devices and peers, and
 * torch's collectives would meet ours in neither.  So the copy that the process already has
 * (torch's) comes before any other.  Then come the library at a given path, and the bare name,
 * which the plugin's run path looks for in pip's nvidia packages before the system's folders.
 * torch, imported later, finds the present copy by that same name.
 *
 * Opening needs no GPU.  An opened library stays open, and its environment is set (nccl_env.c).
 */
#ifndef FSDPC_CUDA_NCCL_LOAD_H
#define FSDPC_CUDA_NCCL_LOAD_H

#include "base/log.h"
#include "base/status.h"
#include "cuda/nccl_abi.h"

typedef struct fsdpc_nccl {
    int version;   /* 22809 is 2.28.9 */
    bool was_here; /* the process had it, and may have used it */
#define X(result, name, parameters) result(*name) parameters;
    FSDPC_NCCL_SYMBOLS(X)
    FSDPC_NCCL_OPTIONAL(X) /* NULL where there is none */
#undef X
} fsdpc_nccl;

/* `path` may be NULL.  FSDPC_ERR_UNSUPPORTED, with what the loader said, if there is none, or with
 * what it lacks; one older than 2.26 lacks the order of several communicators' operations.
 * `several_hosts`: of ranks that loopback does not join.  `log` hears of an environment that comes
 * too late; NULL: a later opening says so. */
fsdpc_status fsdpc_nccl_open(const char *path, bool several_hosts, const fsdpc_log *log,
                             fsdpc_nccl *out);

/* NCCL's error as ours: "NCCL failed to <what>: <its text>".  FSDPC_ERR_PEER where the fault is
 * another rank's, or of the way there. */
fsdpc_status fsdpc_nccl_check(const fsdpc_nccl *nccl, fsdpc_nccl_result result, const char *what);

/* Opens it and says which it is: "NCCL 2.28.9 at /usr/lib/libnccl.so.2". */
fsdpc_status fsdpc_nccl_describe(const char *path, char *text, size_t bytes);

/* ---- nccl_env.c ---- */

/* What opening says of the environment, to NCCL and, if it is too late, to `log`. */
fsdpc_status fsdpc_nccl_environment(const fsdpc_nccl *nccl, bool several_hosts,
                                    const fsdpc_log *log);
/* Lets NCCL take ranks that share a GPU, which it does from 2.30 on; before the first channel. */
fsdpc_status fsdpc_nccl_allow_sharing(void);

#endif
