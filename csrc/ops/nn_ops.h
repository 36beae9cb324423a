/* Neural network kernels, forward and backward.
 *
 * There is one table per device and instruction set; callers use stream->device->nn through
 * fsdpc_nn_ops_of(). Tensors are dense and row-major unless strides are given; strides and lengths
 * are in elements. Float dtypes are F32 and BF16 (fast), F16 (by upcast) and F64 (portable). All
 * inner arithmetic is fp32 (F64 for F64); results are rounded to their dtype once. A gradient's
 * target is (pointer, dtype, accumulate), where accumulate means adding to the target's contents.
 * Zero lengths are always allowed. Results do not depend on the number of threads. All pointers,
 * even those to single numbers, are to device memory, so the host does not wait for a kernel.
 */
#ifndef FSDPC_OPS_NN_OPS_H
#define FSDPC_OPS_NN_OPS_H

#include "device/device.h"
#include "ops/gemm.h"
#include "ops/weight_code.h"

enum { FSDPC_MAX_DIMS = 8 };

/* X(name, text);  s is the scalar argument */
#define FSDPC_UNARY_TABLE(X)                                                                       \
    X(NEG, "neg")                                                                                  \
    X(ABS, "abs")                                                                                  \
    X(EXP, "exp")                                                                                  \
    X(LOG, "log")                                                                                  \
    X(SQRT, "sqrt")                                                                                \
    X(TANH, "tanh")                                                                                \
    X(SIGMOID, "sigmoid")                                                                          \
    X(GELU_TANH, "gelu_tanh") /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */                \
    X(GELU_ERF, "gelu_erf")   /* 0.5 x (1 + erf(x / sqrt 2)) */                                    \
    X(SILU, "silu")                                                                                \
    X(RELU, "relu")                                                                                \
    X(RSQRT, "rsqrt") /* 1 / sqrt(x) */                                                            \
    X(SIN, "sin")                                                                                  \
    X(COS, "cos")                                                                                  \
    X(LOG1P, "log1p") /* log(1 + x) */                                                             \
    X(EXPM1, "expm1") /* e^x - 1 */                                                                \
    X(ERF, "erf")                                                                                  \
    X(SIGN, "sign")               /* NaN stays */                                                  \
    X(SOFTPLUS, "softplus")       /* log(1 + e^x) */                                               \
    X(CLAMP_MIN, "clamp_min")     /* x < s ? s : x */                                              \
    X(CLAMP_MAX, "clamp_max")     /* x > s ? s : x */                                              \
    X(HUBER, "huber")             /* |x| < s ? x^2 / (2 s) : |x| - s / 2 */                        \
    X(ADD_SCALAR, "add_scalar")   /* x + s */                                                      \
    X(MUL_SCALAR, "mul_scalar")   /* x * s */                                                      \
    X(RSUB_SCALAR, "rsub_scalar") /* s - x */                                                      \
    X(RDIV_SCALAR, "rdiv_scalar") /* s / x */                                                      \
    X(POW_SCALAR, "pow_scalar")   /* x ^ s */

typedef enum fsdpc_unary {
#define X(name, text) FSDPC_UNARY_##name,
    FSDPC_UNARY_TABLE(X)
#undef X
} fsdpc_unary;

/* X(name, text);  comparisons last: their results are BOOL */
#define FSDPC_BINARY_TABLE(X)                                                                      \
    X(ADD, "add")                                                                                  \
    X(SUB, "sub")                                                                                  \
    X(MUL, "mul")                                                                                  \
    X(DIV, "div")                                                                                  \
    X(POW, "pow")         /* a ^ b; for integers with negative b: 0, unless a is 1 or -1 */        \
    X(MAXIMUM, "maximum") /* NaN if either is */                                                   \
    X(MINIMUM, "minimum")                                                                          \
    X(MASK, "mask") /* b (BOOL) ? a : -0.0, so that the sum of two masked tensors selects */       \
    X(KEEP, "keep") /* b (BOOL) ? a : 0 */                                                         \
    X(EQ, "eq")                                                                                    \
    X(NE, "ne")                                                                                    \
    X(LT, "lt")                                                                                    \
    X(LE, "le")                                                                                    \
    X(GT, "gt")                                                                                    \
    X(GE, "ge")

typedef enum fsdpc_binary {
#define X(name, text) FSDPC_BINARY_##name,
    FSDPC_BINARY_TABLE(X)
#undef X
} fsdpc_binary;

static inline bool fsdpc_binary_compares(fsdpc_binary kind)
{
    return kind >= FSDPC_BINARY_EQ;
}

/* MASK or KEEP: b is BOOL */
static inline bool fsdpc_binary_masks(fsdpc_binary kind)
{
    return kind == FSDPC_BINARY_MASK || kind == FSDPC_BINARY_KEEP;
}

/* Return whether backward reads y or x, respectively; unused arguments may be NULL. */
static inline bool fsdpc_unary_reads_y(fsdpc_unary kind)
{
    return kind == FSDPC_UNARY_EXP || kind == FSDPC_UNARY_SQRT || kind == FSDPC_UNARY_TANH ||
           kind == FSDPC_UNARY_SIGMOID || kind == FSDPC_UNARY_RELU || kind == FSDPC_UNARY_RSQRT ||
           kind == FSDPC_UNARY_EXPM1;
}

static inline bool fsdpc_unary_reads_x(fsdpc_unary kind)
{
    return !fsdpc_unary_reads_y(kind) && kind != FSDPC_UNARY_NEG && kind != FSDPC_UNARY_SIGN &&
           kind != FSDPC_UNARY_ADD_SCALAR && kind != FSDPC_UNARY_MUL_SCALAR &&
           kind != FSDPC_UNARY_RSUB_SCALAR;
}

typedef struct fsdpc_unary_args {
    fsdpc_unary kind;
    fsdpc_dtype dtype;
    size_t numel;
    double scalar;
    const void *x;
    const void *y;  /* backward only: the forward's result */
    const void *dy; /* backward only */
    void *out;      /* forward: y; backward: dx = dy * f'(x); may be x or dy */
} fsdpc_unary_args;

/* A matrix product followed by GELU_TANH. Forward: before = A'B' + bias, C = gelu(before).
 * Backward does both steps at once, with A'B' as the gradient of gelu's result: C = A'B'
 * gelu'(before). Kernels may round to dtype between the two steps, so results may differ by that
 * one rounding. C is dense and has the inputs' dtype; batches and accumulation are not
 * supported. */
typedef struct fsdpc_gemm_gelu_args {
    fsdpc_gemm_args gemm;
    bool backward;
    void *before; /* (m, n) of dtype, dense; forward: written, unless NULL; backward: read */
} fsdpc_gemm_gelu_args;

typedef struct fsdpc_binary_args {
    fsdpc_binary kind;
    fsdpc_dtype dtype; /* of a, b and, except in comparisons, out; DIV: floats; comparisons: any;
                        * others: also I32 and I64; masks: b is BOOL */
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];                              /* of out, which is dense */
    size_t stride_a[FSDPC_MAX_DIMS], stride_b[FSDPC_MAX_DIMS]; /* 0 broadcasts */
    const void *a, *b;
    void *out;
} fsdpc_binary_args;

/* out (dense over the kept dimensions, in order) = scale * sum of x over the other dimensions.
 * Used for sums, means and the gradients of broadcasts. I64 input gives an I64 result, which wraps
 * around; scale must then be 1. */
typedef struct fsdpc_sum_args {
    fsdpc_dtype dtype, out_dtype;
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    bool reduced[FSDPC_MAX_DIMS];
    double scale;
    const void *x;
    void *out;
    bool accumulate;
    bool squares; /* of x^2 instead */
} fsdpc_sum_args;

/* out[i] = x[0] + ... + x[i] along the middle dimension, or from i to the end (reverse); in double
 * and rounded once, integers wrap. */
typedef struct fsdpc_cumsum_args {
    fsdpc_dtype dtype; /* a float dtype, I32 or I64 */
    size_t outer, extent, inner;
    bool reverse;
    const void *x;
    void *out; /* not x */
} fsdpc_cumsum_args;

/* dst[i] = cast(src[i]) over a strided box; used for transpose, slice, concat, expand and casts
 * between any two dtypes (float to integer truncates). */
typedef struct fsdpc_copy_args {
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    size_t stride_dst[FSDPC_MAX_DIMS], stride_src[FSDPC_MAX_DIMS];
    fsdpc_dtype dst_dtype, src_dtype;
    void *dst;
    const void *src;
    bool accumulate; /* dst += */
    size_t
        src_first; /* first element of the box in src: strides may then be negative, modulo 2^64 */
} fsdpc_copy_args;

typedef struct fsdpc_softmax_args {
    fsdpc_dtype dtype;
    size_t rows, cols;
    bool log;
    const void *x;  /* forward */
    const void *y;  /* backward: the forward's result */
    const void *dy; /* backward */
    void *out;      /* y, or dx */
    bool slopes; /* forward: gradients of lse; NaN for an element of +inf, 0 for its neighbours */
    void *lse;   /* forward, or NULL: (rows) of dtype, log-sum-exp, written instead of y; -inf for a
                  * row of -inf or an empty row */
} fsdpc_softmax_args;

/* RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * w;  LayerNorm (Ba et al. 2016):
 * y = (x - mean) / sqrt(var + eps) * w + b. The tensors x, y, w and b all have `dtype`. */
typedef struct fsdpc_norm_args {
    bool layer; /* false: RMSNorm */
    fsdpc_dtype dtype;
    size_t rows, cols;
    double eps;
    const void *x, *weight, *bias; /* weight, bias (cols) may be NULL */
    void *y;                       /* forward */
    float *mean, *rstd;    /* (rows), written forward, read backward; mean unused for RMSNorm */
    const void *dy;        /* backward from here on */
    void *dx;              /* NULL: not needed; like the next two, overwritten or added to */
    void *dweight, *dbias; /* dgrad_dtype */
    fsdpc_dtype dgrad_dtype;
    bool dx_accumulate, dweight_accumulate, dbias_accumulate;
} fsdpc_norm_args;

/* Row moments. out (2, rows), F32 (F64 for F64), receives each row's mean, then its sum of squared
 * distances from the mean. If dy is given, out receives the sums of dy, then of dy * (x - shift).
 * Row r uses the value of `shift` at index r % values. */
typedef struct fsdpc_row_moments_args {
    fsdpc_dtype dtype; /* of x and dy */
    size_t rows, cols;
    size_t values;
    const void *x, *dy;
    const void *shift; /* with dy: (values) of out's dtype; NULL: 0 */
    void *out;
} fsdpc_row_moments_args;

/* out = (x - shift) * a + y * b + c, where row r uses value r % values of shift, a, b and c. */
typedef struct fsdpc_row_affine_args {
    fsdpc_dtype dtype; /* of x, y and out */
    size_t rows, cols;
    size_t values;
    const void *x, *y;     /* y may be NULL */
    const void *shift, *a; /* (values) of F32 (F64 with F64); shift NULL: 0 */
    const void *b, *c;     /* NULL: 1, 0 */
    void *out;             /* may be x or y */
} fsdpc_row_affine_args;

/* Rotary embedding (Su et al. 2021), with halves rotated as in transformers' LLaMA checkpoints.
 * For i < D/2, y[i] = x[i] cos - x[i + D/2] sin, y[i + D/2] = x[i + D/2] cos + x[i] sin. */
typedef struct fsdpc_rotary_args {
    fsdpc_dtype dtype;
    size_t batch, tokens, heads, dim; /* x and y are (B, T, H, D), dense */
    const float *cosines, *sines;     /* (T, D/2) */
    bool inverse;                     /* rotate back: the backward */
    const void *x;
    void *y; /* may be x */
} fsdpc_rotary_args;

/* softmax(scale * Q K^T + mask) V, where head h of Q reads head h / (heads / kv_heads) of K and V.
 * Blocked as in FlashAttention (Dao et al. 2022): no T x T matrix is stored. With causal attention,
 * query t of Tq sees keys up to t + (Tk - Tq); with a window, only its own and the window - 1 keys
 * before it. The last dimension is dense; the other strides are {batch, token, head}.
 *
 * A bool mask specifies whether a query sees a key; a float mask is added to the scaled products.
 * The output of a query that sees no key is zero. Only the CPU and the null device support windows
 * and masks. */
typedef struct fsdpc_attention_args {
    fsdpc_dtype dtype;
    size_t batch, tokens_q, tokens_k, heads, kv_heads, dim;
    double scale;
    bool causal;
    size_t window; /* 0: none; otherwise requires causal */
    const void *q, *k, *v;
    size_t stride_q[3], stride_k[3], stride_v[3], stride_out[3];
    const void *mask;       /* or NULL */
    fsdpc_dtype mask_dtype; /* BOOL or a float dtype; F64 inputs: BOOL or F64, others: not F64 */
    size_t stride_mask[4];  /* {batch, head, query, key}, 0 if shared; key: 0 or 1 */
    void *out;              /* forward: written; backward: read */
    /* (B, H, Tq): log-sum-exp; written forward, read backward. With a mask, (2, B, H, Tq): the log
     * of the sum of exponentials relative to a reference, then the reference, both in base 2. */
    float *lse;
    const void *dout;   /* backward from here on; strides as out */
    void *dq, *dk, *dv; /* strides as q, k, v; written, not added to */
} fsdpc_attention_args;

/* Pooling over windows of images; each pair is {height, width}. Padding is never the maximum and
 * counts as zeros in the mean. The maximum is NaN if any element is NaN; among equal maxima, the
 * first is selected. Supported only on the CPU and the null device. */
typedef struct fsdpc_pool_args {
    bool max; /* otherwise the mean */
    fsdpc_dtype dtype;
    size_t planes; /* images x channels */
    size_t image[2], kernel[2], stride[2], padding[2];
    size_t places[2]; /* windows: y and dy are (planes, places), x and dx (planes, image) */
    const void *x;    /* forward; backward only for max */
    void *y;          /* forward */
    const void *dy;   /* backward */
    void *dx;
} fsdpc_pool_args;

typedef struct fsdpc_embedding_args {
    fsdpc_dtype dtype;       /* of table and out; forward: any */
    fsdpc_dtype id_dtype;    /* I32 or I64 */
    size_t count, rows, dim; /* ids, table rows, elements of a row */
    const void *ids;
    const void *table; /* forward (rows, dim) */
    void *out;         /* forward (count, dim) */
    const void *dout;  /* backward (count, dim) of dtype */
    void *dtable;      /* backward (rows, dim) of dtable_dtype; summed in order of ids, in fp32 */
    fsdpc_dtype dtable_dtype;
    bool accumulate; /* false: rows without ids are zeroed */
} fsdpc_embedding_args;

/* The sum of row losses so far, in device memory. */
typedef struct fsdpc_loss_sum {
    double total;   /* each call adds its mean, rounded to fp32, times its rows */
    uint64_t count; /* rows that counted; 1 if the loss is their sum */
} fsdpc_loss_sum;

/* A row's loss is
 *
 *     lse - (1 - smoothing) * logits[target] - smoothing * mean(logits) + z_loss * lse^2,
 *
 * which is -log softmax(logits)[target] by default; it is 0 if the target is ignore_index. The
 * loss is the mean over the other rows, or with `sums` their sum. The mean of no rows is NaN, as
 * in PyTorch. Rows may be passed in several consecutive calls on a stream, which add to one sum.
 */
typedef struct fsdpc_cross_entropy_args {
    fsdpc_dtype dtype; /* of logits and dlogits */
    fsdpc_dtype id_dtype;
    size_t rows, cols;
    const void *logits;
    const void *targets; /* (rows) */
    int64_t ignore_index;
    float *lse;      /* (rows), written forward, read backward; NULL: logits are
                          * log-probabilities, as returned by log_softmax */
    float smoothing; /* 0 if lse is NULL, as is z_loss */
    float z_loss;
    float *means;         /* (rows), written forward: each row's mean; NULL without smoothing */
    float *losses;        /* forward: (rows), or NULL */
    float *loss;          /* forward: the loss of the current sum; may be NULL, if losses is not */
    fsdpc_loss_sum *sum;  /* written forward; read backward, unless dloss is NULL */
    bool accumulate;      /* forward: add to the sum */
    bool sums;            /* forward: `loss` is the rows' sum */
    const float *dloss;   /* backward: its gradient; NULL: compute that of the row sum */
    const float *dlosses; /* backward: (rows) gradients of `losses`, instead of dloss; or NULL */
    float softcap;        /* backward: unless 0, logits are softcap * tanh(x / softcap), and
                            * dlogits is x's gradient */
    void *dlogits;        /* backward; may be logits */
} fsdpc_cross_entropy_args;

/* Converts a gradient of the sum of row losses to that of their mean: out = x * *dloss /
 * sum->count, or x * 0 if no row counted. */
typedef struct fsdpc_loss_gradient_args {
    fsdpc_dtype dtype;
    size_t numel;
    const fsdpc_loss_sum *sum;
    const float *dloss;
    const void *x;
    void *out; /* may be x */
} fsdpc_loss_gradient_args;

/* The dropout key of a captured step, whose replays draw the same values as the steps they
 * replace. */
typedef struct fsdpc_dropout_key {
    uint64_t seed;
    uint64_t shift; /* added to streams */
} fsdpc_dropout_key;

/* out[i] = keep(i) ? x[i] / (1 - p) : 0, where word i of Philox stream (seed, stream) determines
 * keep, so backward is the same call on dy. */
typedef struct fsdpc_dropout_args {
    fsdpc_dtype dtype;
    size_t numel;
    double p;
    uint64_t seed, stream, first;
    const void *x;
    void *out;
    const fsdpc_dropout_key *key; /* NULL, or in device memory; its seed then replaces the other */
} fsdpc_dropout_args;

/* SwiGLU (Shazeer 2020): out = silu(gate) * up */
typedef struct fsdpc_swiglu_args {
    fsdpc_dtype dtype;
    size_t numel;
    const void *gate, *up;
    void *out;        /* forward */
    const void *dout; /* backward */
    void *dgate, *dup;
} fsdpc_swiglu_args;

typedef struct fsdpc_nn_ops {
    const char *name;
    fsdpc_status (*gemm)(const fsdpc_gemm_args *args, fsdpc_stream *stream);
    fsdpc_status (*gemm_gelu)(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream);
    fsdpc_status (*unary)(const fsdpc_unary_args *args, fsdpc_stream *stream);
    fsdpc_status (*unary_backward)(const fsdpc_unary_args *args, fsdpc_stream *stream);
    fsdpc_status (*binary)(const fsdpc_binary_args *args, fsdpc_stream *stream);
    fsdpc_status (*sum)(const fsdpc_sum_args *args, fsdpc_stream *stream);
    fsdpc_status (*cumsum)(const fsdpc_cumsum_args *args, fsdpc_stream *stream);
    fsdpc_status (*copy)(const fsdpc_copy_args *args, fsdpc_stream *stream);
    fsdpc_status (*softmax)(const fsdpc_softmax_args *args, fsdpc_stream *stream);
    fsdpc_status (*softmax_backward)(const fsdpc_softmax_args *args, fsdpc_stream *stream);
    fsdpc_status (*norm)(const fsdpc_norm_args *args, fsdpc_stream *stream);
    fsdpc_status (*norm_backward)(const fsdpc_norm_args *args, fsdpc_stream *stream);
    fsdpc_status (*row_moments)(const fsdpc_row_moments_args *args, fsdpc_stream *stream);
    fsdpc_status (*row_affine)(const fsdpc_row_affine_args *args, fsdpc_stream *stream);
    fsdpc_status (*rotary)(const fsdpc_rotary_args *args, fsdpc_stream *stream);
    fsdpc_status (*attention)(const fsdpc_attention_args *args, fsdpc_stream *stream);
    fsdpc_status (*attention_backward)(const fsdpc_attention_args *args, fsdpc_stream *stream);
    fsdpc_status (*pool)(const fsdpc_pool_args *args, fsdpc_stream *stream);
    fsdpc_status (*pool_backward)(const fsdpc_pool_args *args, fsdpc_stream *stream);
    fsdpc_status (*embedding)(const fsdpc_embedding_args *args, fsdpc_stream *stream);
    fsdpc_status (*embedding_backward)(const fsdpc_embedding_args *args, fsdpc_stream *stream);
    fsdpc_status (*dequantize)(const fsdpc_dequantize_args *args, fsdpc_stream *stream);
    fsdpc_status (*cross_entropy)(const fsdpc_cross_entropy_args *args, fsdpc_stream *stream);
    fsdpc_status (*cross_entropy_backward)(const fsdpc_cross_entropy_args *args,
                                           fsdpc_stream *stream);
    fsdpc_status (*loss_gradient)(const fsdpc_loss_gradient_args *args, fsdpc_stream *stream);
    fsdpc_status (*dropout)(const fsdpc_dropout_args *args, fsdpc_stream *stream);
    fsdpc_status (*swiglu)(const fsdpc_swiglu_args *args, fsdpc_stream *stream);
    fsdpc_status (*swiglu_backward)(const fsdpc_swiglu_args *args, fsdpc_stream *stream);
} fsdpc_nn_ops;

/* Returns the CPU's table for an instruction set (the best kernels up to that set). */
const fsdpc_nn_ops *fsdpc_nn_ops_cpu(fsdpc_isa isa);

/* A fallback for the gemm_gelu slot, composed of the table's gemm and unary, if no better kernel
 * exists or supports the arguments. */
fsdpc_status fsdpc_gemm_gelu_by_parts(const fsdpc_gemm_gelu_args *args, fsdpc_stream *stream);

/* Returns device_null's table, whose kernels compute nothing and always succeed. */
const fsdpc_nn_ops *fsdpc_nn_ops_null(void);

static inline const fsdpc_nn_ops *fsdpc_nn_ops_of(const fsdpc_stream *stream)
{
    return stream->device->nn;
}

#endif
