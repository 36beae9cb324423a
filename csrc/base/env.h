/* Environment variables: one table, read once per context.
 *
 * This table and docs/environment.md list every variable that the library reads (a lint compares
 * the two). A variable that is set but empty counts as not set. A value that does not parse, or
 * an unknown variable that starts with FSDPC_, is an error that names the variable and the accepted
 * values.
 */
#ifndef FSDPC_BASE_ENV_H
#define FSDPC_BASE_ENV_H

#include <stdbool.h>

#include "base/status.h"

/* X(field, type, variable, default, lowest, highest, purpose); types: real, integer, flag, text */
#define FSDPC_ENV_TABLE(X)                                                                         \
    X(timeout_s, real, "FSDPC_TIMEOUT_S", 300, 0.01, 1e9, "deadline of every wait, seconds")       \
    X(notice_s, real, "FSDPC_NOTICE_S", 10, 0.01, 1e9,                                             \
      "a rank that waits says for whom after this many seconds")                                   \
    X(watch_s, real, "FSDPC_WATCH", 8, 0, 1e6,                                                     \
      "seconds of silence after which another host counts as gone; 0: no watch")                   \
    X(watch_port, integer, "FSDPC_WATCH_PORT", 0, 0, 65535,                                        \
      "port at which rank 0 waits for other hosts' watches; 0: a free one")                        \
    X(watch_address, text, "FSDPC_WATCH_ADDRESS", "", 0, 0,                                        \
      "address for that, if not one that rank 0 finds")                                            \
    X(no_alias, flag, "FSDPC_NO_ALIAS", 0, 0, 1,                                                   \
      "private, protected memory for unsharded parameters (finds reads after reshard)")            \
    X(threads, integer, "FSDPC_THREADS", 0, 0, 4096,                                               \
      "threads of a rank; 0 means OMP_NUM_THREADS, else cores / ranks")                            \
    X(isa, text, "FSDPC_ISA", "auto", 0, 0,                                                        \
      "kernels to use: auto, portable, avx2, avx512, avx512bf16, amx")                             \
    X(cudnn, integer, "FSDPC_CUDNN", 2, 0, 2,                                                      \
      "attention on GPUs: 0 our kernels; 1 cuDNN's, in a fixed order; 2 faster, without one")      \
    X(log, integer, "FSDPC_LOG", 1, 0, 3, "0 silent, 1 warnings, 2 notes, 3 everything")           \
    X(trace, integer, "FSDPC_TRACE", 4096, 0, 16777216, "events kept by the trace ring")

typedef double fsdpc_env_real;
typedef long fsdpc_env_integer;
typedef bool fsdpc_env_flag;
typedef const char *fsdpc_env_text; /* borrowed from the environment: copy it if it must live
                                     * longer */

typedef struct fsdpc_env {
#define X(field, type, variable, fallback, lowest, highest, text) fsdpc_env_##type field;
    FSDPC_ENV_TABLE(X)
#undef X
} fsdpc_env;

/* Variables of the launcher, Python, the build or the tests, which the check for unknown names must
 * accept. */
#define FSDPC_ENV_FOREIGN                                                                          \
    "FSDPC_CUDA", "FSDPC_CUDA_ARCHS", "FSDPC_CUDA_PLUGIN", "FSDPC_MPI", "FSDPC_WERROR",            \
        "FSDPC_NCCL_LIB", "FSDPC_RANK_SOCKET", "FSDPC_RUN_ID", "FSDPC_LAUNCHER_PID",               \
        "FSDPC_NEWS_FD", "FSDPC_TEST_GPU", "FSDPC_TEST_SEED", "FSDPC_COMMIT", "FSDPC_FAULT",       \
        "FSDPC_FAULT_ENABLE", "FSDPC_BENCH_RECORD"

fsdpc_status fsdpc_env_read(fsdpc_env *out);

#endif
