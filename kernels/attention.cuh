/* What the attention kernels share: addresses, the causal mask, and the two families' entries.
 *
 * Two families.  attention_tiles.cu and attention_tiles_backward.cu multiply blocks of 64 queries
 * by blocks of 64 keys on tensor cores; they take bf16 and fp16 heads of at most 128 elements whose
 * rows begin at 16 bytes.  attention.cu takes everything else, a warp a row, in the dtype's wide
 * type.
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

/* How many keys query t sees: the first so many. */
__device__ __forceinline__ size_t visible_keys(const fsdpc_attention_args &a, size_t t)
{
    if (!a.causal)
        return a.tokens_k;
    size_t end = t + 1 + a.tokens_k;
    end = end <= a.tokens_q ? 0 : end - a.tokens_q;
    return end < a.tokens_k ? end : a.tokens_k;
}

/* The first query that sees key j; tokens_q or more if none does. */
__device__ __forceinline__ size_t first_query(const fsdpc_attention_args &a, size_t j)
{
    if (!a.causal || j + a.tokens_q < a.tokens_k)
        return 0;
    return j + a.tokens_q - a.tokens_k;
}

/* What backward needs of every query beside lse: delta = dot(dout, out), and for F64 a log-sum-exp
 * of more digits than lse holds.  (B, H, Tq) each. */
template <typename W> struct attention_rows {
    W *delta, *lse;
};

/* attention_tiles.cu, attention_tiles_backward.cu */
bool attention_tiles_take(const fsdpc_attention_args *a, bool backward);
fsdpc_status attention_tiles(const fsdpc_attention_args *a, const fsdpc_cuda_queue *queue);
fsdpc_status attention_tiles_backward(const fsdpc_attention_args *a, const float *delta,
                                      const fsdpc_cuda_queue *queue);

#endif
