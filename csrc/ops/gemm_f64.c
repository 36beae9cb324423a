/* The fp64 matrix product, in tiles of 4 x 8 sums in plain vectors; it is meant for checks and
 * tests rather than speed.
 *
 * It has the structure of the fp32 kernels but uses no specific instruction set; sums are fp64
 * throughout and are rounded once, when stored to C (F64 or F32).
 */
#include <string.h>

#include "ops/gemm_path.h"

enum { MR = 4, NR = 8 };

typedef double f64x2 __attribute__((vector_size(16)));

static void pack(double *panel, size_t width, const fsdpc_gemm_operand *from, size_t first,
                 size_t count, size_t k_first, size_t k_count)
{
    const double *data = from->data;
    size_t k_step = from->along_k ? 1 : from->ld, line_step = from->along_k ? from->ld : 1;
    for (size_t k = 0; k < k_count; k++)
        for (size_t j = 0; j < width; j++)
            panel[k * width + j] =
                j < count ? data[(first + j) * line_step + (k_first + k) * k_step] : 0;
}

static void pack_a(void *panel, const fsdpc_gemm_operand *a, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack(panel, MR, a, first, count, k_first, k_count);
}

static void pack_b(void *panel, const fsdpc_gemm_operand *b, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack(panel, NR, b, first, count, k_first, k_count);
}

static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_prefetch *prefetch)
{
    (void)prefetch;
    const double *pa = a, *pb = b;
    for (int half = 0; half < NR; half += 4) { /* eight sums at a time fit sixteen registers */
        f64x2 sum[MR][2] = {{{0}}};
        for (int i = 0; i < MR && resume; i++)
            memcpy(sum[i], (double *)sums + i * NR + half, sizeof sum[i]);
        for (size_t k = 0; k < k_count; k++) {
            f64x2 b0, b1;
            memcpy(&b0, pb + k * NR + half, sizeof b0);
            memcpy(&b1, pb + k * NR + half + 2, sizeof b1);
            for (int i = 0; i < MR; i++) {
                f64x2 x = {pa[k * MR + (size_t)i], pa[k * MR + (size_t)i]};
                sum[i][0] += x * b0;
                sum[i][1] += x * b1;
            }
        }
        for (int i = 0; i < MR; i++)
            memcpy((double *)sums + i * NR + half, sum[i], sizeof sum[i]);
    }
}

static void finish(const fsdpc_gemm_target *t, const void *sums)
{
    for (size_t i = 0; i < t->rows; i++)
        for (size_t j = 0; j < t->cols; j++) {
            double sum = ((const double *)sums)[i * NR + j];
            if (t->bias)
                sum += ((const double *)t->bias)[t->bias_by_row ? i : j];
            size_t at = i * t->ldc + j;
            if (t->dtype == FSDPC_F64)
                ((double *)t->c)[at] = t->accumulate ? ((double *)t->c)[at] + sum : sum;
            else
                ((float *)t->c)[at] = (float)(t->accumulate ? ((float *)t->c)[at] + sum : sum);
        }
}

const fsdpc_gemm_path fsdpc_gemm_f64_portable = {
    .name = "f64 portable",
    .mr = MR,
    .nr = NR,
    .kc = 256,
    .blocks = 1,
    .nc = 256,
    .b_bytes = 512 << 10,
    .element_bytes = sizeof(double),
    .sum_bytes = sizeof(double),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
};
