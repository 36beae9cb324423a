/* Combines sums of powers into norms, and computes clipping factors from them, by the same rules as
 * on the CPU.
 *
 * A single thread suffices for a few hundred operations on 560 bytes, between kernels that read
 * whole shards.
 */
#include "common.cuh"

#define RULE __device__ __forceinline__
#include "ops/exact_sum_rules_body.h"
#include "ops/flat_norm_rules_body.h"
#undef RULE

static __global__ void norm_join_kernel(fsdpc_norm_join_args args)
{
    norm_join(&args);
}

static __global__ void norm_value_kernel(const fsdpc_norm *norm, double p, double *out)
{
    *out = norm_value(norm, p);
}

static __global__ void clip_kernel(fsdpc_clip_args args)
{
    clip(&args);
}

extern "C" fsdpc_status fsdpc_cuda_norm_join(const fsdpc_norm_join_args *args, fsdpc_stream *stream)
{
    FSDPC_LAUNCH(norm_join_kernel, 1, 1, 0, fsdpc_cuda_queue_of(stream), *args);
    return launched("a join of norms");
}

extern "C" fsdpc_status fsdpc_cuda_norm_value(const fsdpc_norm *norm, double p, double *out,
                                              fsdpc_stream *stream)
{
    FSDPC_LAUNCH(norm_value_kernel, 1, 1, 0, fsdpc_cuda_queue_of(stream), norm, p, out);
    return launched("a norm's value");
}

extern "C" fsdpc_status fsdpc_cuda_clip(const fsdpc_clip_args *args, fsdpc_stream *stream)
{
    FSDPC_LAUNCH(clip_kernel, 1, 1, 0, fsdpc_cuda_queue_of(stream), *args);
    return launched("clipping");
}
