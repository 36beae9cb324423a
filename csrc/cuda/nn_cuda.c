/* The GPU's table of neural network kernels. Each entry checks its arguments before calling the
 * launcher.
 *
 * The CPU's kernels perform the same argument checks. Kernels report data errors (ids and targets
 * out of range) at the next sync. Products use cuBLASLt if it is available and supports them, and
 * the plain kernel otherwise (gemm_cublaslt.h). Attention uses cuDNN if it is requested, is
 * available and supports the shape (attention_cudnn.h).
 */
#include "cuda/attention_cudnn.h"
#include "cuda/gemm_cublaslt.h"
#include "cuda/kernel_tables.h"
#include "cuda/kernels.h"

static fsdpc_status check_float(fsdpc_dtype dtype, const char *what)
{
    if (dtype <= FSDPC_F64)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE, "%s takes a float dtype, not %s: cast first", what,
                      fsdpc_dtype_name(dtype));
}

static fsdpc_status check_ids(fsdpc_dtype dtype, const char *what)
{
    if (dtype == FSDPC_I32 || dtype == FSDPC_I64)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE, "%s are int32 or int64, not %s: cast first", what,
                      fsdpc_dtype_name(dtype));
}

/* Defines a table slot that checks the dtype and launches the kernel. */
#define FLOAT_SLOT(name, args_type, what)                                                          \
    static fsdpc_status name(const args_type *args, fsdpc_stream *stream)                          \
    {                                                                                              \
        FSDPC_TRY(check_float(args->dtype, (what)));                                               \
        return fsdpc_cuda_##name(args, stream);                                                    \
    }

FLOAT_SLOT(unary, fsdpc_unary_args, "a unary function")
FLOAT_SLOT(unary_backward, fsdpc_unary_args, "a unary function")
FLOAT_SLOT(softmax, fsdpc_softmax_args, "softmax")
FLOAT_SLOT(softmax_backward, fsdpc_softmax_args, "softmax")
FLOAT_SLOT(norm, fsdpc_norm_args, "a norm")
FLOAT_SLOT(row_moments, fsdpc_row_moments_args, "moments")
FLOAT_SLOT(row_affine, fsdpc_row_affine_args, "an affine map")
FLOAT_SLOT(swiglu, fsdpc_swiglu_args, "swiglu")
FLOAT_SLOT(swiglu_backward, fsdpc_swiglu_args, "swiglu")

/* On a GPU, functional.conv2d and pooling are composed from other operations. */
static fsdpc_status no_patches(void)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "windows of images in one kernel on a GPU; fsdpc.functional composes them");
}

static fsdpc_status pool(const fsdpc_pool_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return no_patches();
}

static fsdpc_status check_gemm(const fsdpc_gemm_args *g)
{
    FSDPC_TRY(check_float(g->dtype, "a matrix product"));
    if (g->patches)
        return no_patches();
    if (g->c_dtype != g->dtype && g->c_dtype != FSDPC_F32)
        return fsdpc_fail(
            FSDPC_ERR_DTYPE, "a matrix product of %s cannot be written as %s: use %s or float32",
            fsdpc_dtype_name(g->dtype), fsdpc_dtype_name(g->c_dtype), fsdpc_dtype_name(g->dtype));
    size_t a_rows = g->trans_a ? g->k : g->m, a_cols = g->trans_a ? g->m : g->k;
    size_t b_rows = g->trans_b ? g->n : g->k, b_cols = g->trans_b ? g->k : g->n;
    if ((a_rows > 1 && g->lda < a_cols) || (b_rows > 1 && g->ldb < b_cols) ||
        (g->m > 1 && g->ldc < g->n))
        return fsdpc_fail(
            FSDPC_ERR_SHAPE,
            "rows overlap in a product of (%zu, %zu) and (%zu, %zu): lda %zu, ldb %zu, "
            "ldc %zu must not be less than the rows they hold",
            g->m, g->k, g->k, g->n, g->lda, g->ldb, g->ldc);
    return FSDPC_OK;
}

static fsdpc_status gemm(const fsdpc_gemm_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_gemm(args));
    return fsdpc_cuda_gemm(args, stream);
}

static fsdpc_status gemm_gelu(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_gemm(&args->gemm));
    return fsdpc_cuda_gemm_gelu(args, stream);
}

static fsdpc_status binary(const fsdpc_binary_args *args, fsdpc_stream *stream)
{
    bool is_int = args->dtype == FSDPC_I32 || args->dtype == FSDPC_I64;
    if (!is_int && !fsdpc_binary_compares(args->kind))
        FSDPC_TRY(check_float(args->dtype, "arithmetic"));
    else if (args->kind == FSDPC_BINARY_DIV)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "division of %s: cast to a float dtype first",
                          fsdpc_dtype_name(args->dtype));
    return fsdpc_cuda_binary(args, stream);
}

static fsdpc_status sum(const fsdpc_sum_args *args, fsdpc_stream *stream)
{
    if (args->dtype != FSDPC_I64 || args->out_dtype != FSDPC_I64) {
        FSDPC_TRY(check_float(args->dtype, "a sum"));
        FSDPC_TRY(check_float(args->out_dtype, "a sum's result"));
    }
    return fsdpc_cuda_sum(args, stream);
}

static fsdpc_status cumsum(const fsdpc_cumsum_args *args, fsdpc_stream *stream)
{
    if (args->dtype != FSDPC_I32 && args->dtype != FSDPC_I64)
        FSDPC_TRY(check_float(args->dtype, "a cumulative sum"));
    return fsdpc_cuda_cumsum(args, stream);
}

static fsdpc_status norm_backward(const fsdpc_norm_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "a norm"));
    if (args->dweight || args->dbias)
        FSDPC_TRY(check_float(args->dgrad_dtype, "a norm's gradient"));
    return fsdpc_cuda_norm_backward(args, stream);
}

static fsdpc_status rotary(const fsdpc_rotary_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "rotary embedding"));
    if (args->dim % 2)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "rotary embedding of %zu elements a head: make it even",
                          args->dim);
    return fsdpc_cuda_rotary(args, stream);
}

static fsdpc_status check_attention(const fsdpc_attention_args *args)
{
    FSDPC_TRY(check_float(args->dtype, "attention"));
    if (args->kv_heads == 0 ? args->heads != 0 : args->heads % args->kv_heads != 0)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "%zu query heads do not divide among %zu key-value heads; make heads a "
                          "multiple of kv_heads",
                          args->heads, args->kv_heads);
    if (args->mask || args->window)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "attention with a mask or window in one kernel on a GPU; "
                          "functional.scaled_dot_product_attention composes it");
    return FSDPC_OK;
}

static fsdpc_status attention(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_attention(args));
    bool done;
    FSDPC_TRY(fsdpc_cuda_attention_cudnn(args, false, stream, &done));
    return done ? FSDPC_OK : fsdpc_cuda_attention(args, stream);
}

static fsdpc_status attention_backward(const fsdpc_attention_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_attention(args));
    bool done;
    FSDPC_TRY(fsdpc_cuda_attention_cudnn(args, true, stream, &done));
    return done ? FSDPC_OK : fsdpc_cuda_attention_backward(args, stream);
}

static fsdpc_status embedding(const fsdpc_embedding_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_ids(args->id_dtype, "ids of an embedding"));
    return fsdpc_cuda_embedding(args, stream);
}

static fsdpc_status embedding_backward(const fsdpc_embedding_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "an embedding"));
    FSDPC_TRY(check_float(args->dtable_dtype, "an embedding's gradient"));
    FSDPC_TRY(check_ids(args->id_dtype, "ids of an embedding"));
    return fsdpc_cuda_embedding_backward(args, stream);
}

static fsdpc_status dequantize(const fsdpc_dequantize_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "a quantised weight"));
    return fsdpc_cuda_dequantize(args, stream);
}

static fsdpc_status cross_entropy(const fsdpc_cross_entropy_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "cross entropy"));
    FSDPC_TRY(check_ids(args->id_dtype, "targets of a cross entropy"));
    return fsdpc_cuda_cross_entropy(args, stream);
}

static fsdpc_status cross_entropy_backward(const fsdpc_cross_entropy_args *args,
                                           fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "cross entropy"));
    FSDPC_TRY(check_ids(args->id_dtype, "targets of a cross entropy"));
    return fsdpc_cuda_cross_entropy_backward(args, stream);
}

static fsdpc_status loss_gradient(const fsdpc_loss_gradient_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "a loss's gradient"));
    return fsdpc_cuda_loss_gradient(args, stream);
}

static fsdpc_status dropout(const fsdpc_dropout_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_float(args->dtype, "dropout"));
    if (!(args->p >= 0 && args->p <= 1))
        return fsdpc_fail(FSDPC_ERR_VALUE, "dropout with p = %g: p is a probability, 0 to 1",
                          args->p);
    return fsdpc_cuda_dropout(args, stream);
}

const fsdpc_nn_ops fsdpc_nn_ops_cuda = {
    .name = "cuda",
    .gemm = gemm,
    .gemm_gelu = gemm_gelu,
    .unary = unary,
    .unary_backward = unary_backward,
    .binary = binary,
    .sum = sum,
    .cumsum = cumsum,
    .copy = fsdpc_cuda_copy,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .norm = norm,
    .norm_backward = norm_backward,
    .row_moments = row_moments,
    .row_affine = row_affine,
    .rotary = rotary,
    .attention = attention,
    .attention_backward = attention_backward,
    .pool = pool,
    .pool_backward = pool,
    .embedding = embedding,
    .embedding_backward = embedding_backward,
    .dequantize = dequantize,
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .loss_gradient = loss_gradient,
    .dropout = dropout,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
};
