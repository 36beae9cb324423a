/* Newton-Schulz iterations, as three matrix products each.
 *
 *     G = X X'        (side x side; X' X if X has more rows than columns)
 *     P = b G + c G G
 *     X = a X + P X   (a X + X P if X has more rows than columns)
 *
 * G and P are symmetric, so no matrix is transposed in memory. Everything but the norm's value is
 * computed by the device's kernels.
 *
 * In fp32, X alternates between the caller's matrix and the work memory. In bf16, X, G and P are
 * factors of products; sums are in fp32, for which the caller's matrix has room, and are rounded
 * where torch.optim.Muon rounds them: X before and after its division by a rounded norm, G, P, and
 * a X + P X. The polynomial amplifies the rounding of each product by up to a, so results in fp32
 * and bf16 agree to a few bf16 units of the largest element.
 */
#include "ops/orthogonal.h"

#include <math.h>

#include "base/size.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

/* One iteration's products. G and P are (side, side). */
typedef struct shapes {
    size_t rows, cols, side;
    bool tall;
    fsdpc_dtype dtype; /* of factors; products are fp32 */
} shapes;

/* Computes a product in fp32, dense in C. */
static fsdpc_status multiply(const shapes *s, fsdpc_gemm_args args, fsdpc_stream *stream)
{
    args.dtype = s->dtype;
    args.c_dtype = FSDPC_F32;
    args.ldc = args.n;
    args.batch = 1;
    return fsdpc_nn_ops_of(stream)->gemm(&args, stream);
}

/* g = X X', or X' X if X is tall */
static fsdpc_status make_gram(const shapes *s, const void *x, float *g, fsdpc_stream *stream)
{
    const fsdpc_gemm_args args = {.m = s->side,
                                  .n = s->side,
                                  .k = s->tall ? s->rows : s->cols,
                                  .a = x,
                                  .lda = s->cols,
                                  .trans_a = s->tall,
                                  .b = x,
                                  .ldb = s->cols,
                                  .trans_b = !s->tall,
                                  .c = g};
    return multiply(s, args, stream);
}

/* p = G G */
static fsdpc_status square(const shapes *s, const void *g, float *p, fsdpc_stream *stream)
{
    const fsdpc_gemm_args args = {.m = s->side,
                                  .n = s->side,
                                  .k = s->side,
                                  .a = g,
                                  .lda = s->side,
                                  .b = g,
                                  .ldb = s->side,
                                  .c = p};
    return multiply(s, args, stream);
}

/* to += P X, or X P if X is tall */
static fsdpc_status add_product(const shapes *s, const void *p, const void *x, float *to,
                                fsdpc_stream *stream)
{
    const fsdpc_gemm_args args = {.m = s->rows,
                                  .n = s->cols,
                                  .k = s->side,
                                  .a = s->tall ? x : p,
                                  .lda = s->tall ? s->cols : s->side,
                                  .b = s->tall ? p : x,
                                  .ldb = s->cols,
                                  .c = to,
                                  .accumulate = true};
    return multiply(s, args, stream);
}

static fsdpc_status scale(float *x, size_t numel, double factor, fsdpc_stream *stream)
{
    return fsdpc_flat_scale(x, FSDPC_F32, numel, factor, NULL, NULL, stream);
}

/* to = b g + c to, in fp32; multiplies g too. */
static fsdpc_status combine(const fsdpc_orthogonal_args *args, float *g, float *to, size_t numel,
                            fsdpc_stream *stream)
{
    FSDPC_TRY(scale(g, numel, args->b, stream));
    FSDPC_TRY(scale(to, numel, args->c, stream));
    return fsdpc_flat_accumulate(to, FSDPC_F32, g, FSDPC_F32, numel, stream);
}

static fsdpc_status iterate_f32(const fsdpc_orthogonal_args *args, const shapes *s,
                                fsdpc_stream *stream)
{
    const size_t numel = s->rows * s->cols, squares = s->side * s->side;
    float *from = args->x, *to = args->work;
    float *g = args->work + numel, *p = g + squares;
    for (int step = 0; step < args->steps; step++) {
        FSDPC_TRY(make_gram(s, from, g, stream));
        FSDPC_TRY(square(s, g, p, stream));
        FSDPC_TRY(combine(args, g, p, squares, stream));
        FSDPC_TRY(fsdpc_flat_cast(to, FSDPC_F32, from, FSDPC_F32, numel, stream));
        FSDPC_TRY(scale(to, numel, args->a, stream));
        FSDPC_TRY(add_product(s, p, from, to, stream));
        float *swapped = from;
        from = to;
        to = swapped;
    }
    return from == args->x ? FSDPC_OK
                           : fsdpc_flat_cast(args->x, FSDPC_F32, from, FSDPC_F32, numel, stream);
}

/* X and G, and later P, in bf16 share the first part of the work memory, as large as X in fp32. */
static fsdpc_status iterate_bf16(const fsdpc_orthogonal_args *args, const shapes *s,
                                 fsdpc_stream *stream)
{
    const size_t numel = s->rows * s->cols, squares = s->side * s->side;
    uint16_t *x = (uint16_t *)(void *)args->work, *g = x + numel;
    float *whole = args->x, *wide_g = args->work + numel, *p = wide_g + squares;
    FSDPC_TRY(fsdpc_flat_cast(x, FSDPC_BF16, whole, FSDPC_F32, numel, stream));
    for (int step = 0; step < args->steps; step++) {
        FSDPC_TRY(make_gram(s, x, wide_g, stream));
        FSDPC_TRY(fsdpc_flat_cast(g, FSDPC_BF16, wide_g, FSDPC_F32, squares, stream));
        FSDPC_TRY(square(s, g, p, stream));
        FSDPC_TRY(fsdpc_flat_cast(wide_g, FSDPC_F32, g, FSDPC_BF16, squares, stream));
        FSDPC_TRY(combine(args, wide_g, p, squares, stream));
        FSDPC_TRY(fsdpc_flat_cast(g, FSDPC_BF16, p, FSDPC_F32, squares, stream)); /* P */
        FSDPC_TRY(fsdpc_flat_cast(whole, FSDPC_F32, x, FSDPC_BF16, numel, stream));
        FSDPC_TRY(scale(whole, numel, args->a, stream));
        FSDPC_TRY(add_product(s, g, x, whole, stream));
        FSDPC_TRY(fsdpc_flat_cast(x, FSDPC_BF16, whole, FSDPC_F32, numel, stream));
    }
    return fsdpc_flat_cast(whole, FSDPC_F32, x, FSDPC_BF16, numel, stream);
}

/* Divides X by its norm. The host waits for a remote device's sum. */
static fsdpc_status normalize(const fsdpc_orthogonal_args *args, const shapes *s,
                              fsdpc_stream *stream)
{
    fsdpc_device *device = stream->device;
    const size_t numel = s->rows * s->cols;
    const uintptr_t align = _Alignof(fsdpc_norm) - 1; /* the work memory may be aligned less */
    fsdpc_norm here, *squares = (fsdpc_norm *)(((uintptr_t)args->work + align) & ~align);
    FSDPC_TRY(fsdpc_device_fill(device, squares, 0, sizeof *squares, stream));
    FSDPC_TRY(fsdpc_flat_sumsq(args->x, FSDPC_F32, numel, s->cols, &squares->sum, stream));
    FSDPC_TRY(fsdpc_device_copy(device, &here, squares, sizeof here, NULL));
    const double norm = sqrt(fsdpc_exact_sum_value(&here.sum));
    double divisor = isfinite(norm) ? fmax(norm, args->eps) : NAN;
    if (args->in_bf16)
        divisor = fsdpc_bf16_to_f32(fsdpc_f32_to_bf16((float)divisor));
    return scale(args->x, numel, 1 / divisor, stream);
}

fsdpc_status fsdpc_orthogonalize(const fsdpc_orthogonal_args *args, fsdpc_stream *stream)
{
    const size_t numel = args->rows * args->cols;
    const shapes s = {.rows = args->rows,
                      .cols = args->cols,
                      .side = fsdpc_min_size(args->rows, args->cols),
                      .tall = args->rows > args->cols,
                      .dtype = args->in_bf16 ? FSDPC_BF16 : FSDPC_F32};
    if (numel == 0)
        return FSDPC_OK;
    if (args->in_bf16) {
        FSDPC_TRY(fsdpc_flat_cast(args->work, FSDPC_BF16, args->x, FSDPC_F32, numel, stream));
        FSDPC_TRY(fsdpc_flat_cast(args->x, FSDPC_F32, args->work, FSDPC_BF16, numel, stream));
    }
    FSDPC_TRY(normalize(args, &s, stream));
    FSDPC_TRY((args->in_bf16 ? iterate_bf16 : iterate_f32)(args, &s, stream));
    return scale(args->x, numel, args->scale, stream);
}
