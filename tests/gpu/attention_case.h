/* What tests of attention ask kernels for: sizes, and contiguous q, k, v and out of them. */
#ifndef FSDPC_TESTS_GPU_ATTENTION_CASE_H
#define FSDPC_TESTS_GPU_ATTENTION_CASE_H

#include "ops/nn_ops.h"

typedef struct attention_case {
    size_t batch, tokens_q, tokens_k, heads, kv_heads, dim;
    bool causal;
    double scale;
} attention_case;

static inline void strides_set(size_t stride[3], size_t tokens, size_t heads, size_t dim)
{
    stride[0] = tokens * heads * dim;
    stride[1] = heads * dim;
    stride[2] = dim;
}

/* Without addresses. */
static inline fsdpc_attention_args attention_args_of(attention_case c, fsdpc_dtype dtype)
{
    fsdpc_attention_args args = {.dtype = dtype,
                                 .batch = c.batch,
                                 .tokens_q = c.tokens_q,
                                 .tokens_k = c.tokens_k,
                                 .heads = c.heads,
                                 .kv_heads = c.kv_heads,
                                 .dim = c.dim,
                                 .scale = c.scale,
                                 .causal = c.causal};
    strides_set(args.stride_q, c.tokens_q, c.heads, c.dim);
    strides_set(args.stride_out, c.tokens_q, c.heads, c.dim);
    strides_set(args.stride_k, c.tokens_k, c.kv_heads, c.dim);
    strides_set(args.stride_v, c.tokens_k, c.kv_heads, c.dim);
    return args;
}

#endif
