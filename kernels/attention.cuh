/* Declarations shared by the attention kernels: addresses, the causal mask, and the entry points of
 * both families.
 *
 * attention_tiles.cu and attention_tiles_backward.cu multiply blocks of 64 queries by blocks of 64
 * keys on tensor cores. These kernels support bf16 and fp16 heads of at most 128 elements whose
 * rows are 16-byte aligned. attention.cu handles all other cases, one warp per row, in the dtype's
 * wide type.
 */
#ifndef FSDPC_KERNELS_ATTENTION_CUH
#define FSDPC_KERNELS_ATTENTION_CUH

#include "dtype.cuh"

template <typename T>
__host__ __device__ __forceinline__ T *row_of(const void *base, const size_t (&stride)[3], size_t b,
                                              size_t t, size_t h)
{
    return (T *)base + b * stride[0] + t * stride[1] + h * stride[2];
}

/* Returns the number of keys, counted from the first, that query t sees. */
__device__ __forceinline__ size_t visible_keys(const fsdpc_attention_args &a, size_t t)
{
    if (!a.causal)
        return a.tokens_k;
    size_t end = t + 1 + a.tokens_k;
    end = end <= a.tokens_q ? 0 : end - a.tokens_q;
    return end < a.tokens_k ? end : a.tokens_k;
}

/* Returns the index of the first query that sees key j, or a value of at least tokens_q if none
 * does. */
__device__ __forceinline__ size_t first_query(const fsdpc_attention_args &a, size_t j)
{
    if (!a.causal || j + a.tokens_q < a.tokens_k)
        return 0;
    return j + a.tokens_q - a.tokens_k;
}

/* Per-query data, each (B, H, Tq), that backward needs in addition to lse: delta = dot(dout, out)
 * and, for F64, a more precise log-sum-exp. */
template <typename W> struct attention_rows {
    W *delta, *lse;
};

/* attention_tiles.cu, attention_tiles_backward.cu */
bool attention_tiles_take(const fsdpc_attention_args *a, bool backward);
fsdpc_status attention_tiles(const fsdpc_attention_args *a, const fsdpc_cuda_queue *queue);
fsdpc_status attention_tiles_backward(const fsdpc_attention_args *a, const float *delta,
                                      const fsdpc_cuda_queue *queue);

#endif
