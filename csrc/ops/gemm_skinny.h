/* Products with at most four rows: one source, compiled once per instruction set.
 *
 * Such products (generation, a single column) read every weight only once, so packing would double
 * the work. Instead, x is widened to fp32 once, and each element of w is read once, in memory
 * order. If w is contiguous along k, a column of the product is a dot product: 4 x 16 partial sums
 * over k in a fixed order. If w is contiguous along columns, sums of up to STRIP columns stay in L1
 * while rows of w are added four at a time. Neither result depends on how the columns are split.
 */
#ifndef FSDPC_OPS_GEMM_SKINNY_H
#define FSDPC_OPS_GEMM_SKINNY_H

#include "ops/gemm_path.h"
#include "ops/vec.h"

enum { STRIP = 1024 };

FSDPC_INLINE void skinny_store(const fsdpc_gemm_skinny *p, size_t row, size_t col, float sum)
{
    size_t at = row * p->c_row + col * p->c_col;
    if (p->bias)
        sum += fsdpc_f32_load_as(p->bias, row * p->bias_row + col * p->bias_col, p->w.dtype);
    if (p->accumulate)
        sum += fsdpc_f32_load_as(p->c, at, p->c_dtype);
    fsdpc_f32_store_as(p->c, at, p->c_dtype, sum);
}

FSDPC_INLINE void skinny_dots(const fsdpc_gemm_skinny *p, size_t first, size_t count, size_t rows,
                              fsdpc_dtype dtype)
{
    enum { AT_ONCE = 4 * FSDPC_LANES };
    for (size_t col = first; col < first + count; col++) {
        size_t line = col * p->w.ld, k = 0;
        fsdpc_vf sums[FSDPC_GEMM_SKINNY][4] = {{{0}}};
        for (; k + AT_ONCE <= p->k; k += AT_ONCE)
            for (size_t u = 0; u < 4; u++) {
                size_t at = k + u * FSDPC_LANES;
                fsdpc_vf w = fsdpc_vf_load_as(p->w.data, line + at, dtype);
                for (size_t r = 0; r < rows; r++)
                    sums[r][u] = fsdpc_vf_fma(fsdpc_vf_load(p->x + r * p->k + at), w, sums[r][u]);
            }
        for (; k < p->k; k += FSDPC_LANES) {
            size_t n = fsdpc_min_size(p->k - k, FSDPC_LANES);
            fsdpc_vf w = fsdpc_vf_load_as_n(p->w.data, line + k, dtype, n);
            for (size_t r = 0; r < rows; r++)
                sums[r][0] = fsdpc_vf_fma(fsdpc_vf_load_n(p->x + r * p->k + k, n), w, sums[r][0]);
        }
        for (size_t r = 0; r < rows && r < p->rows; r++)
            skinny_store(p, r, col,
                         fsdpc_vf_sum((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])));
    }
}

/* sums[r][j] += x[r][k] w[k][j] for `depth` (at most 4) rows of w */
FSDPC_INLINE void skinny_add_rows(float (*sums)[STRIP], const fsdpc_gemm_skinny *p, size_t k,
                                  size_t depth, size_t first, size_t count, size_t rows,
                                  fsdpc_dtype dtype)
{
    for (size_t j = 0; j < count; j += FSDPC_LANES) {
        size_t n = fsdpc_min_size(count - j, FSDPC_LANES);
        fsdpc_vf w[4];
        for (size_t d = 0; d < depth; d++) {
            size_t at = (k + d) * p->w.ld + first + j;
            w[d] = n == FSDPC_LANES ? fsdpc_vf_load_as(p->w.data, at, dtype)
                                    : fsdpc_vf_load_as_n(p->w.data, at, dtype, n);
        }
        for (size_t r = 0; r < rows; r++) {
            fsdpc_vf sum = fsdpc_vf_load(sums[r] + j);
            for (size_t d = 0; d < depth; d++)
                sum = fsdpc_vf_fma(fsdpc_vf_splat(p->x[r * p->k + k + d]), w[d], sum);
            fsdpc_vf_store(sums[r] + j, sum);
        }
    }
}

FSDPC_INLINE void skinny_sums(const fsdpc_gemm_skinny *p, size_t first, size_t count, size_t rows,
                              fsdpc_dtype dtype)
{
    _Alignas(64) float sums[FSDPC_GEMM_SKINNY][STRIP];
    for (size_t col = first; col < first + count; col += STRIP) {
        size_t n = fsdpc_min_size(first + count - col, STRIP), k = 0;
        memset(sums, 0, rows * sizeof sums[0]);
        for (; k + 4 <= p->k; k += 4)
            skinny_add_rows(sums, p, k, 4, col, n, rows, dtype);
        for (; k < p->k; k++)
            skinny_add_rows(sums, p, k, 1, col, n, rows, dtype);
        for (size_t r = 0; r < p->rows; r++)
            for (size_t j = 0; j < n; j++)
                skinny_store(p, r, col + j, sums[r][j]);
    }
}

/* A single row, as in generation, has its own code; two to four rows are computed as four, for
 * which the caller pads x with zeros. */
FSDPC_INLINE void skinny_as(const fsdpc_gemm_skinny *p, size_t first, size_t count,
                            fsdpc_dtype dtype)
{
    if (p->w.along_k && p->rows == 1)
        skinny_dots(p, first, count, 1, dtype);
    else if (p->w.along_k)
        skinny_dots(p, first, count, FSDPC_GEMM_SKINNY, dtype);
    else if (p->rows == 1)
        skinny_sums(p, first, count, 1, dtype);
    else
        skinny_sums(p, first, count, FSDPC_GEMM_SKINNY, dtype);
}

FSDPC_INLINE void skinny_product(const fsdpc_gemm_skinny *p, size_t first, size_t count)
{
    if (p->w.dtype == FSDPC_F32)
        skinny_as(p, first, count, FSDPC_F32);
    else if (p->w.dtype == FSDPC_BF16)
        skinny_as(p, first, count, FSDPC_BF16);
    else
        skinny_as(p, first, count, FSDPC_F16);
}

#endif
