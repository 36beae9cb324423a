/* Neural network kernels that compute nothing: device_null's table.
 *
 * Every call is accepted, and memory is neither read nor written, so a model of any size can be
 * scheduled almost instantly. One function per argument type serves forward and backward.
 *
 * Operations in matrix products and attention are counted as real kernels would execute them.
 * With causal attention, half of the operations are counted; with a window, only those for visible
 * keys; with a mask, all of them. Attention's forward consists of two products, and its backward of
 * five, because it recomputes the scores. Memory-bound operations count as zero.
 */
#include "ops/nn_ops.h"

#define ACCEPT(name)                                                                               \
    static fsdpc_status null_##name(const fsdpc_##name##_args *args, fsdpc_stream *stream)         \
    {                                                                                              \
        (void)args, (void)stream;                                                                  \
        return FSDPC_OK;                                                                           \
    }

static fsdpc_status null_gemm(const fsdpc_gemm_args *args, fsdpc_stream *stream)
{
    double batch = args->batch ? (double)args->batch : 1;
    fsdpc_device_null_add_flops(stream->device,
                                2 * batch * (double)args->m * (double)args->n * (double)args->k);
    return FSDPC_OK;
}

static fsdpc_status null_gemm_gelu(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream)
{
    return null_gemm(&args->gemm, stream);
}

static fsdpc_status attend(const fsdpc_attention_args *args, fsdpc_stream *stream, int products)
{
    double q = (double)args->tokens_q, k = (double)args->tokens_k;
    double pairs = args->causal ? q * (k - (q - 1) / 2) : q * k;
    if (args->window && (double)args->window < k) { /* queries before k - window see fewer keys */
        double window = (double)args->window, early = window - 1 - (k - q);
        early = early < 0 ? 0 : early;
        pairs = q * window - early * (early + 1) / 2;
    }
    fsdpc_device_null_add_flops(stream->device, 2 * products * pairs * (double)args->batch *
                                                    (double)args->heads * (double)args->dim);
    return FSDPC_OK;
}

static fsdpc_status null_attention(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    return attend(args, stream, 2);
}

static fsdpc_status null_attention_backward(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    return attend(args, stream, 5);
}

ACCEPT(unary)
ACCEPT(binary)
ACCEPT(sum)
ACCEPT(copy)
ACCEPT(cumsum)
ACCEPT(softmax)
ACCEPT(norm)
ACCEPT(row_moments)
ACCEPT(row_affine)
ACCEPT(rotary)
ACCEPT(pool)
ACCEPT(embedding)
ACCEPT(dequantize)
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
    .cumsum = null_cumsum,
    .copy = null_copy,
    .softmax = null_softmax,
    .softmax_backward = null_softmax,
    .norm = null_norm,
    .norm_backward = null_norm,
    .row_moments = null_row_moments,
    .row_affine = null_row_affine,
    .rotary = null_rotary,
    .attention = null_attention,
    .attention_backward = null_attention_backward,
    .pool = null_pool,
    .pool_backward = null_pool,
    .embedding = null_embedding,
    .embedding_backward = null_embedding,
    .dequantize = null_dequantize,
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
