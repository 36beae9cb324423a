/* Newton-Schulz iterations, as three matrix products each.
 *
 *     G = X X'        (side x side; X' X if X has more rows than columns)
 *     P = G G         then, element by element, P = a I + b G + c P
 *     X = P X         (X P if X has more rows than columns)
 *
 * Adding a I to P replaces a pass over X, which is the larger matrix. G and P are symmetric, so no
 * matrix is transposed in memory. X alternates between the caller's matrix and the work memory.
 *
 * torch.optim.Muon computes the same iterations in bf16. Its polynomial amplifies the rounding of
 * each product by up to a, so results in fp32 and bf16 agree to a few bf16 units of the largest
 * element.
 */
#include "ops/orthogonal.h"

#include <math.h>
#include <string.h>

#include "base/size.h"
#include "ops/gemm.h"

/* Returns the sum of squares. Eight sums, whose number is fixed, allow vectors. */
static double sum_squares(const float *x, size_t numel)
{
    enum { LANES = 8 };
    double sums[LANES] = {0}, total = 0;
    size_t i = 0;
    for (; i + LANES <= numel; i += LANES) {
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)x[i + (size_t)lane] * (double)x[i + (size_t)lane];
    }
    for (; i < numel; i++)
        total += (double)x[i] * (double)x[i];
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* p = a I + b g + c p */
static void add_powers(const fsdpc_orthogonal_args *args, const float *g, float *p, size_t side)
{
    const float a = (float)args->a, b = (float)args->b, c = (float)args->c;
    for (size_t i = 0; i < side * side; i++)
        p[i] = b * g[i] + c * p[i];
    for (size_t i = 0; i < side; i++)
        p[i * side + i] += a;
}

static fsdpc_status iterate(const fsdpc_orthogonal_args *args, const float *x, float *to, float *g,
                            float *p, fsdpc_stream *stream)
{
    const size_t rows = args->rows, cols = args->cols;
    const bool tall = rows > cols;
    const size_t side = tall ? cols : rows;
    fsdpc_gemm_args product = {.dtype = FSDPC_F32, .c_dtype = FSDPC_F32, .batch = 1};
    product.m = product.n = product.ldc = side;
    product.k = tall ? rows : cols;
    product.a = product.b = x;
    product.lda = product.ldb = cols;
    product.trans_a = tall;
    product.trans_b = !tall;
    product.c = g;
    FSDPC_TRY(fsdpc_gemm_cpu(&product, stream));
    product.k = product.lda = product.ldb = side;
    product.a = product.b = g;
    product.trans_a = product.trans_b = false;
    product.c = p;
    FSDPC_TRY(fsdpc_gemm_cpu(&product, stream));
    add_powers(args, g, p, side);
    product.m = rows;
    product.n = product.ldc = cols;
    product.a = tall ? x : p;
    product.lda = tall ? cols : side;
    product.b = tall ? p : x;
    product.ldb = cols;
    product.c = to;
    return fsdpc_gemm_cpu(&product, stream);
}

fsdpc_status fsdpc_orthogonalize(const fsdpc_orthogonal_args *args, fsdpc_stream *stream)
{
    const size_t numel = args->rows * args->cols, side = fsdpc_min_size(args->rows, args->cols);
    float *from = args->x, *to = args->work;
    float *g = args->work + numel, *p = g + side * side;
    if (numel == 0)
        return FSDPC_OK;
    const double squares = sum_squares(from, numel);
    const double inverse = isfinite(squares) ? 1 / fmax(sqrt(squares), args->eps) : NAN;
    for (size_t i = 0; i < numel; i++)
        from[i] = (float)((double)from[i] * inverse);
    for (int step = 0; step < args->steps; step++) {
        FSDPC_TRY(iterate(args, from, to, g, p, stream));
        float *swapped = from;
        from = to;
        to = swapped;
    }
    const float scale = (float)args->scale;
    for (size_t i = 0; i < numel; i++)
        args->x[i] = from[i] * scale;
    return FSDPC_OK;
}
