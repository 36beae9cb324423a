/* Kernels of neural networks that compute nothing: the table of device_null.
 *
 * Every call is accepted and memory is neither read nor written, so a model of any size runs its
 * schedule in no time.  One function per type of arguments serves forward and backward.
 */
#include "ops/nn_ops.h"

#define ACCEPT(name)                                                                               \
    static fsdpc_status null_##name(const fsdpc_##name##_args *args, fsdpc_stream *stream)         \
    {                                                                                              \
        (void)args, (void)stream;                                                                  \
        return FSDPC_OK;                                                                           \
    }

ACCEPT(gemm)
ACCEPT(gemm_gelu)
ACCEPT(unary)
ACCEPT(binary)
ACCEPT(sum)
ACCEPT(copy)
ACCEPT(softmax)
ACCEPT(norm)
ACCEPT(rotary)
ACCEPT(attention)
ACCEPT(embedding)
ACCEPT(cross_entropy)
ACCEPT(loss_gradient)
ACCEPT(dropout)
ACCEPT(swiglu)

static const fsdpc_nn_ops null_ops = {
    .name = "null",
    .gemm = null_gemm,
    .gemm_gelu = null_gemm_gelu,
    .unary = null_unary,
    .unary_backward = null_unary,
    .binary = null_binary,
    .sum = null_sum,
    .copy = null_copy,
    .softmax = null_softmax,
    .softmax_backward = null_softmax,
    .norm = null_norm,
    .norm_backward = null_norm,
    .rotary = null_rotary,
    .attention = null_attention,
    .attention_backward = null_attention,
    .embedding = null_embedding,
    .embedding_backward = null_embedding,
    .cross_entropy = null_cross_entropy,
    .cross_entropy_backward = null_cross_entropy,
    .loss_gradient = null_loss_gradient,
    .dropout = null_dropout,
    .swiglu = null_swiglu,
    .swiglu_backward = null_swiglu,
};

const fsdpc_nn_ops *fsdpc_nn_ops_null(void)
{
    return &null_ops;
}
