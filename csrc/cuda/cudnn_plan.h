/* cuDNN attention plans for C: a table that kernels/cudnn_plan.cpp fills in.
 *
 * cuDNN's graphs are described in C++ (cudnn_frontend.h, header-only). kernels/cudnn_plan.cpp is
 * therefore compiled into the plugin only if tools/cuda_build.py finds those headers; otherwise the
 * table's address is NULL. On failure, `why` receives the reason, truncated to `bytes` bytes.
 */
#ifndef FSDPC_CUDA_CUDNN_PLAN_H
#define FSDPC_CUDA_CUDNN_PLAN_H

#include "ops/nn_ops.h"

enum { FSDPC_CUDNN_WHY_BYTES = 256 };

typedef struct fsdpc_cudnn fsdpc_cudnn; /* cuDNN on one device */
typedef struct fsdpc_cudnn_plan fsdpc_cudnn_plan;

/* The key of a plan, with fields as in fsdpc_attention_args. Compared as bytes: no padding. */
typedef struct fsdpc_cudnn_shape {
    size_t batch, tokens_q, tokens_k, heads, kv_heads, dim;
    size_t stride_q[3], stride_k[3], stride_v[3], stride_out[3];
    uint64_t scale_bits; /* bits of the double: compared as bytes */
    uint32_t dtype;
    bool causal, backward, any_order; /* any_order: backward may sum in the fastest order */
    uint8_t unused;
} fsdpc_cudnn_shape;

typedef struct fsdpc_cudnn_ops {
    /* Opens libcudnn, preferring a copy already in the process; a version of 92801 means 9.28.1. */
    bool (*open)(size_t *version_out, char *why, size_t bytes);

    /* Creates a handle for the calling thread's current device; call it after open() has
     * succeeded. */
    bool (*create)(fsdpc_cudnn **out, char *why, size_t bytes);
    void (*destroy)(fsdpc_cudnn *cudnn); /* after all of its plans */

    /* Fails if cuDNN does not support the shape. This call is slow and must not be made in a
     * capture. */
    bool (*plan_create)(fsdpc_cudnn *cudnn, const fsdpc_cudnn_shape *shape, fsdpc_cudnn_plan **out,
                        size_t *workspace_bytes_out, char *why, size_t bytes);
    void (*plan_destroy)(fsdpc_cudnn_plan *plan);
    /* Enqueues the plan; it reads only the addresses from `args`. */
    bool (*plan_run)(fsdpc_cudnn *cudnn, fsdpc_cudnn_plan *plan, const fsdpc_attention_args *args,
                     void *workspace, fsdpc_stream *stream, char *why, size_t bytes);
} fsdpc_cudnn_ops;

extern const fsdpc_cudnn_ops fsdpc_cudnn_table __attribute__((weak, visibility("hidden")));

#endif
