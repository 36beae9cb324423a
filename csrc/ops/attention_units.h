/* The units of attention's small matrix products, and the conversion of rows to units.
 *
 * With ATTENTION_PAIR 1, a unit is a float, and F32, BF16 and F16 rows are converted as they are
 * packed. With ATTENTION_PAIR 2, a unit is two bf16 values that are adjacent along the dimension
 * that a product sums over; this supports only BF16. A matrix X (rows x d) is packed in up to three
 * layouts, all padded with zeros:
 *
 *   R(X)  rows x du            pairs along d: X's rows unchanged
 *   T(X)  du x rows            R(X) transposed
 *   I(X)  rows / PAIR x dn     pairs along rows: rows 2r and 2r + 1 interleaved
 *
 * dn is d rounded up, du = dn / PAIR. With PAIR 1, I(X) and R(X) are the same.
 */
#ifndef FSDPC_OPS_ATTENTION_UNITS_H
#define FSDPC_OPS_ATTENTION_UNITS_H

#include "ops/vec.h"

#if ATTENTION_PAIR == 2
typedef uint32_t unit;
#else
typedef float unit;
#endif

/* The shape of C (m x n) = or += A B, with k in units; see the gemm headers. */
typedef struct gemm_shape {
    size_t m, n, k;
    size_t a_row, a_col, b_row, c_row; /* units, units, units, floats */
    bool accumulate;
} gemm_shape;

FSDPC_INLINE fsdpc_vf unit_load(const unit *p)
{
    return fsdpc_vf_load((const float *)(const void *)p);
}

FSDPC_INLINE void unit_store(unit *p, fsdpc_vf v)
{
    fsdpc_vf_store((float *)(void *)p, v);
}

/* -- rows -------------------------------------------------------------------------------------- */

FSDPC_INLINE void pack_row_as(unit *to, size_t dn, const void *base, size_t first, size_t dim,
                              fsdpc_dtype dtype)
{
#if ATTENTION_PAIR == 2
    (void)dtype;
    const uint16_t *from = (const uint16_t *)base + first;
    size_t i = 0;
    for (; i + 32 <= dim; i += 32) /* constant size: a call for each short row would be slow */
        memcpy(to + i / 2, from + i, 32 * sizeof *from);
    if (i < dn) {
        memset(to + i / 2, 0, (dn - i) * sizeof *from);
        memcpy(to + i / 2, from + i, (dim - i) * sizeof *from);
    }
#else
    size_t i = 0;
    for (; i + FSDPC_LANES <= dim; i += FSDPC_LANES)
        fsdpc_vf_store(to + i, fsdpc_vf_load_as(base, first + i, dtype));
    for (; i < dn; i++)
        to[i] = i < dim ? fsdpc_f32_load_as(base, first + i, dtype) : 0;
#endif
}

FSDPC_INLINE void pack_rows_as(unit *to, size_t dn, const void *base, size_t first, size_t stride,
                               size_t rows, size_t dim, fsdpc_dtype dtype)
{
    for (size_t r = 0; r < rows; r++)
        pack_row_as(to + r * (dn / ATTENTION_PAIR), dn, base, first + r * stride, dim, dtype);
}

/* Packs R(X) for `rows` rows, which start at element `first` of base, followed by zero rows up to
 * `padded`. */
static void pack_rows(unit *to, size_t dn, const void *base, size_t first, size_t stride,
                      size_t rows, size_t padded, size_t dim, fsdpc_dtype dtype)
{
    if (ATTENTION_PAIR == 2 || dtype == FSDPC_BF16)
        pack_rows_as(to, dn, base, first, stride, rows, dim, FSDPC_BF16);
    else if (dtype == FSDPC_F16)
        pack_rows_as(to, dn, base, first, stride, rows, dim, FSDPC_F16);
    else
        pack_rows_as(to, dn, base, first, stride, rows, dim, FSDPC_F32);
    size_t du = dn / ATTENTION_PAIR;
    memset(to + rows * du, 0, (padded - rows) * du * sizeof *to);
}

/* -- transposes -------------------------------------------------------------------------------- */

/* Returns a0 b0 a1 b1 ... of the lower halves, and of the upper halves. */
#if defined(FSDPC_VEC_AVX512)
#define ZIP_LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
enum { TRANSPOSE_ROUNDS = 4 };
#elif defined(FSDPC_VEC_AVX2)
#define ZIP_LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_UPPER 4, 12, 5, 13, 6, 14, 7, 15
enum { TRANSPOSE_ROUNDS = 3 };
#else
#define ZIP_LOWER 0, 4, 1, 5
#define ZIP_UPPER 2, 6, 3, 7
enum { TRANSPOSE_ROUNDS = 2 };
#endif

/* Transposes a square of vectors by rounds of the perfect shuffle. */
FSDPC_INLINE void transpose_square(fsdpc_vf v[FSDPC_LANES])
{
    fsdpc_vf w[FSDPC_LANES];
#pragma GCC unroll 4
    for (int round = 0; round < TRANSPOSE_ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < FSDPC_LANES / 2; i++) {
            fsdpc_vf a = v[i], b = v[i + FSDPC_LANES / 2];
            w[2 * i] = __builtin_shufflevector(a, b, ZIP_LOWER);
            w[2 * i + 1] = __builtin_shufflevector(a, b, ZIP_UPPER);
        }
#pragma GCC unroll 16
        for (int i = 0; i < FSDPC_LANES; i++)
            v[i] = w[i];
    }
}

/* to (cols x rows) = transpose of from (rows x cols), both multiples of 16. Each unit's bits are
 * ANDed with `keep` and XORed with `flip`. */
static void transpose_units(unit *to, size_t to_row, const unit *from, size_t from_row, size_t rows,
                            size_t cols, uint32_t keep, uint32_t flip)
{
    for (size_t r = 0; r < rows; r += FSDPC_LANES)
        for (size_t c = 0; c < cols; c += FSDPC_LANES) {
            fsdpc_vf v[FSDPC_LANES];
#pragma GCC unroll 16
            for (int i = 0; i < FSDPC_LANES; i++)
                v[i] = unit_load(from + (r + (size_t)i) * from_row + c);
            transpose_square(v);
#pragma GCC unroll 16
            for (int i = 0; i < FSDPC_LANES; i++)
                unit_store(to + (c + (size_t)i) * to_row + r,
                           (fsdpc_vf)(((fsdpc_vu)v[i] & keep) ^ flip));
        }
}

#if ATTENTION_PAIR == 2

/* 16 lanes each of two rows: unit i holds (low[i], high[i]) rounded to bf16. The instruction
 * flushes subnormals to zero, which is negligible for probabilities and their gradients. */
FSDPC_INLINE fsdpc_vf pair_rows(fsdpc_vf low, fsdpc_vf high)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (fsdpc_vf)_mm512_permutexvar_epi16(order, (__m512i)both);
}

/* Rounds 32 neighbours of a row to bf16: units (0, 1), (2, 3) ... */
FSDPC_INLINE fsdpc_vf pair_lanes(fsdpc_vf first, fsdpc_vf second)
{
    return (fsdpc_vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

/* Computes I(X) from R(X); `rows` must be even and dn a multiple of 32. */
static void interleave_rows(unit *to, const unit *from, size_t rows, size_t dn)
{
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    size_t du = dn / 2;
    for (size_t r = 0; r < rows; r += 2, from += 2 * du, to += dn)
        for (size_t c = 0; c < du; c += 16) {
            __m512i even = (__m512i)unit_load(from + c), odd = (__m512i)unit_load(from + du + c);
            unit_store(to + 2 * c, (fsdpc_vf)_mm512_permutex2var_epi16(even, low, odd));
            unit_store(to + 2 * c + 16, (fsdpc_vf)_mm512_permutex2var_epi16(even, high, odd));
        }
}

#endif

#endif
