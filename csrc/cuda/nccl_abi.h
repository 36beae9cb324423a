/* The types, codes and functions of NCCL's binary interface that we use, as of 2.18.
 *
 * These declarations make the plugin the same wherever it is built, with or without nccl.h;
 * tests/gpu/test_nccl.py checks them against a real header. We only declare the first fields of the
 * versioned config. NCCL reads `size` bytes and uses its own defaults for fields that `version` did
 * not have. `size` and `version` must therefore match an NCCL version whose config ends at our last
 * field: 2.17, or 2.31 to set the launch order of posts.
 */
#ifndef FSDPC_CUDA_NCCL_ABI_H
#define FSDPC_CUDA_NCCL_ABI_H

#include <cuda_runtime_api.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

typedef enum fsdpc_nccl_result {
    FSDPC_NCCL_SUCCESS = 0,
    FSDPC_NCCL_SYSTEM_ERROR = 2,
    FSDPC_NCCL_INVALID_ARGUMENT = 4,
    FSDPC_NCCL_INVALID_USAGE = 5,
    FSDPC_NCCL_REMOTE_ERROR = 6,
    FSDPC_NCCL_IN_PROGRESS = 7,
} fsdpc_nccl_result;

typedef enum fsdpc_nccl_type {
    FSDPC_NCCL_UINT8 = 1,
    FSDPC_NCCL_INT32 = 2,
    FSDPC_NCCL_INT64 = 4,
    FSDPC_NCCL_FLOAT16 = 6,
    FSDPC_NCCL_FLOAT32 = 7,
    FSDPC_NCCL_FLOAT64 = 8,
    FSDPC_NCCL_BFLOAT16 = 9,
} fsdpc_nccl_type;

typedef enum fsdpc_nccl_red {
    FSDPC_NCCL_SUM = 0,
    FSDPC_NCCL_MAX = 2,
    FSDPC_NCCL_MIN = 3,
} fsdpc_nccl_red;

typedef struct fsdpc_nccl_id {
    char internal[128];
} fsdpc_nccl_id;

typedef struct ncclComm *fsdpc_nccl_comm;
typedef struct ncclWindow_vidmem *fsdpc_nccl_window;

enum { FSDPC_NCCL_WIN_COLL_SYMMETRIC = 1 };

/* The first version whose config has a field for the launch order. */
enum { FSDPC_NCCL_LAUNCH_ORDER_FIELD = 23100 };

/* ncclConfig_t of 2.31; INT_MIN and NULL: NCCL decides. */
typedef struct fsdpc_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
    int shapes[3]; /* of kernels */
    const char *net;
    int split_share, traffic_class; /* 2.17 ends before these */
    const char *name;
    int collnet, cta_policy, shrink_share, nvls_ctas;
    int channels_per_peer, link_centric, graph_usage; /* 2.27 ends before these */
    int rma_contexts, p2p_peers, graph_ordering, launch_order;
    int rma_signals, rma_eager, host_cft;
} fsdpc_nccl_config;

/* Returns a nonblocking config for NCCL's `version`. */
static inline fsdpc_nccl_config fsdpc_nccl_nonblocking(int version)
{
    const int unset = INT_MIN;
    bool ordered = version >= FSDPC_NCCL_LAUNCH_ORDER_FIELD;
    return (fsdpc_nccl_config){
        .size = ordered ? sizeof(fsdpc_nccl_config) : offsetof(fsdpc_nccl_config, split_share),
        .magic = 0xcafebeef,
        .version = ordered ? 23100 : 21700,
        .blocking = 0,
        .shapes = {unset, unset, unset},
        .split_share = unset,
        .traffic_class = unset,
        .collnet = unset,
        .cta_policy = unset,
        .shrink_share = unset,
        .nvls_ctas = unset,
        .channels_per_peer = unset,
        .link_centric = unset,
        .graph_usage = unset,
        .rma_contexts = unset,
        .p2p_peers = unset,
        .graph_ordering = unset,
        .launch_order = 1,
        .rma_signals = unset,
        .rma_eager = unset,
        .host_cft = unset,
    };
}

/* X(result, name, parameters) */
#define FSDPC_NCCL_SYMBOLS(X)                                                                      \
    X(fsdpc_nccl_result, ncclGetVersion, (int *version))                                           \
    X(const char *, ncclGetErrorString, (fsdpc_nccl_result result))                                \
    X(fsdpc_nccl_result, ncclGetUniqueId, (fsdpc_nccl_id * id))                                    \
    X(fsdpc_nccl_result, ncclCommInitRankConfig,                                                   \
      (fsdpc_nccl_comm * comm, int size, fsdpc_nccl_id id, int rank, fsdpc_nccl_config *config))   \
    X(fsdpc_nccl_result, ncclCommGetAsyncError, (fsdpc_nccl_comm comm, fsdpc_nccl_result * out))   \
    X(fsdpc_nccl_result, ncclCommFinalize, (fsdpc_nccl_comm comm))                                 \
    X(fsdpc_nccl_result, ncclCommDestroy, (fsdpc_nccl_comm comm))                                  \
    X(fsdpc_nccl_result, ncclCommAbort, (fsdpc_nccl_comm comm))                                    \
    X(fsdpc_nccl_result, ncclGroupStart, (void))                                                   \
    X(fsdpc_nccl_result, ncclGroupEnd, (void))                                                     \
    X(fsdpc_nccl_result, ncclAllGather,                                                            \
      (const void *send, void *recv, size_t send_numel, fsdpc_nccl_type type,                      \
       fsdpc_nccl_comm comm, cudaStream_t stream))                                                 \
    X(fsdpc_nccl_result, ncclReduceScatter,                                                        \
      (const void *send, void *recv, size_t recv_numel, fsdpc_nccl_type type, fsdpc_nccl_red red,  \
       fsdpc_nccl_comm comm, cudaStream_t stream))                                                 \
    X(fsdpc_nccl_result, ncclAllReduce,                                                            \
      (const void *send, void *recv, size_t numel, fsdpc_nccl_type type, fsdpc_nccl_red red,       \
       fsdpc_nccl_comm comm, cudaStream_t stream))                                                 \
    X(fsdpc_nccl_result, ncclSend,                                                                 \
      (const void *send, size_t numel, fsdpc_nccl_type type, int peer, fsdpc_nccl_comm comm,       \
       cudaStream_t stream))                                                                       \
    X(fsdpc_nccl_result, ncclRecv,                                                                 \
      (void *recv, size_t numel, fsdpc_nccl_type type, int peer, fsdpc_nccl_comm comm,             \
       cudaStream_t stream))                                                                       \
    X(fsdpc_nccl_result, ncclBroadcast,                                                            \
      (const void *send, void *recv, size_t numel, fsdpc_nccl_type type, int root,                 \
       fsdpc_nccl_comm comm, cudaStream_t stream))

/* The same list, for functions that an old NCCL may lack; windows were added in 2.27. */
#define FSDPC_NCCL_OPTIONAL(X)                                                                     \
    X(fsdpc_nccl_result, ncclCommRegister,                                                         \
      (fsdpc_nccl_comm comm, void *memory, size_t bytes, void **handle_out))                       \
    X(fsdpc_nccl_result, ncclCommDeregister, (fsdpc_nccl_comm comm, void *handle))                 \
    X(fsdpc_nccl_result, ncclCommWindowRegister,                                                   \
      (fsdpc_nccl_comm comm, void *memory, size_t bytes, fsdpc_nccl_window *out, int flags))       \
    X(fsdpc_nccl_result, ncclCommWindowDeregister, (fsdpc_nccl_comm comm, fsdpc_nccl_window window))

#endif
