/* Packing into fp32 panels, and finishing tiles: one source, compiled once per instruction set.
 *
 * An fp32 panel is [k][width]. Operands of any float dtype except F64 are widened during packing.
 * If memory is contiguous along k, packing is a transpose, performed in squares of SQUARE x SQUARE
 * 32-bit words. Partial squares and other dtypes are first copied to a small zero-padded buffer.
 */
#ifndef FSDPC_OPS_GEMM_PACK_H
#define FSDPC_OPS_GEMM_PACK_H

#include "ops/gemm_path.h"
#include "ops/vec.h"

enum { SQUARE = FSDPC_LANES };

#if defined(FSDPC_VEC_AVX512)

/* Stores word j of row i of the transposed square: to[i * to_stride + j] = row j, word i of `from`,
 * whose rows are from_bytes apart.
 *
 * The half rows of j and j + 8 share a register from the start, so 48 shuffles suffice (whole rows
 * need 64).
 */
FSDPC_INLINE void transpose_square(uint32_t *to, size_t to_stride, const void *from,
                                   size_t from_bytes)
{
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (size_t half = 0; half < 2; half++) {
        __m512i row[8], pair[8], quad[8];
        for (size_t j = 0; j < 8; j++) {
            const char *p = (const char *)from + j * from_bytes + 32 * half;
            row[j] =
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)),
                                   _mm256_loadu_si256((const __m256i *)(p + 8 * from_bytes)), 1);
        }
        for (size_t j = 0; j < 8; j += 2) {
            pair[j] = _mm512_unpacklo_epi32(row[j], row[j + 1]);
            pair[j + 1] = _mm512_unpackhi_epi32(row[j], row[j + 1]);
        }
        for (size_t j = 0; j < 8; j += 4) {
            quad[j] = _mm512_unpacklo_epi64(pair[j], pair[j + 2]);
            quad[j + 1] = _mm512_unpackhi_epi64(pair[j], pair[j + 2]);
            quad[j + 2] = _mm512_unpacklo_epi64(pair[j + 1], pair[j + 3]);
            quad[j + 3] = _mm512_unpackhi_epi64(pair[j + 1], pair[j + 3]);
        }
        /* ascending, see Note [whole vectors] */
        uint32_t *out = to + 8 * half * to_stride;
        for (size_t i = 0; i < 4; i++, out += to_stride)
            _mm512_storeu_si512(out, _mm512_permutex2var_epi64(quad[i], even, quad[i + 4]));
        for (size_t i = 0; i < 4; i++, out += to_stride)
            _mm512_storeu_si512(out, _mm512_permutex2var_epi64(quad[i], odd, quad[i + 4]));
    }
}
#elif defined(FSDPC_VEC_AVX2)

FSDPC_INLINE void transpose_square(uint32_t *to, size_t to_stride, const void *from,
                                   size_t from_bytes)
{
    const char *row = from;
    for (int piece = 0; piece < 2; piece++) {
        __m256 z[4];
        for (int q = 0; q < 4; q++) {
            const char *p = row + (size_t)q * from_bytes + 16 * piece;
            z[q] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)p)),
                                        _mm_loadu_ps((const float *)(p + 4 * from_bytes)), 1);
        }
        __m256d low01 = (__m256d)_mm256_unpacklo_ps(z[0], z[1]);
        __m256d low23 = (__m256d)_mm256_unpacklo_ps(z[2], z[3]);
        __m256d top01 = (__m256d)_mm256_unpackhi_ps(z[0], z[1]);
        __m256d top23 = (__m256d)_mm256_unpackhi_ps(z[2], z[3]);
        float *out = (float *)to + 4 * (size_t)piece * to_stride;
        _mm256_storeu_ps(out, (__m256)_mm256_unpacklo_pd(low01, low23));
        _mm256_storeu_ps(out + to_stride, (__m256)_mm256_unpackhi_pd(low01, low23));
        _mm256_storeu_ps(out + 2 * to_stride, (__m256)_mm256_unpacklo_pd(top01, top23));
        _mm256_storeu_ps(out + 3 * to_stride, (__m256)_mm256_unpackhi_pd(top01, top23));
    }
}
#else

FSDPC_INLINE void transpose_square(uint32_t *to, size_t to_stride, const void *from,
                                   size_t from_bytes)
{
    for (int j = 0; j < SQUARE; j++) {
        uint32_t word[SQUARE];
        memcpy(word, (const char *)from + (size_t)j * from_bytes, sizeof word);
        for (int i = 0; i < SQUARE; i++)
            to[(size_t)i * to_stride + (size_t)j] = word[i];
    }
}
#endif

/* Transposes a square whose source is partial or not F32, after widening it into a zero-padded
 * copy. */
FSDPC_INLINE void transpose_widened(float *to, size_t width, const fsdpc_gemm_operand *from,
                                    size_t first, size_t lines, size_t k_first, size_t k_count,
                                    fsdpc_dtype dtype)
{
    _Alignas(64) float copy[SQUARE][SQUARE];
    if (lines < SQUARE)
        memset(copy, 0, sizeof copy);
    for (size_t j = 0; j < lines; j++) {
        size_t at = (first + j) * from->ld + k_first;
        if (k_count == SQUARE)
            fsdpc_vf_store(copy[j], fsdpc_vf_load_as(from->data, at, dtype));
        else
            fsdpc_vf_store(copy[j], fsdpc_vf_load_as_n(from->data, at, dtype, k_count));
    }
    transpose_square((uint32_t *)to, width, copy, sizeof copy[0]);
}

/* Transposes a whole bf16 square of twice the depth: it transposes words that hold two k, then
 * splits and widens them. */
FSDPC_INLINE void transpose_pairs(float *to, size_t width, const uint16_t *from, size_t ld)
{
    _Alignas(64) uint32_t words[SQUARE * SQUARE];
    transpose_square(words, SQUARE, from, ld * sizeof *from);
    for (size_t i = 0; i < SQUARE; i++, to += 2 * width) {
        fsdpc_vu word = (fsdpc_vu)fsdpc_vf_load((const float *)words + i * SQUARE);
        fsdpc_vf_store(to, (fsdpc_vf)(word << 16));
        fsdpc_vf_store(to + width, (fsdpc_vf)(word & 0xffff0000u));
    }
}

/* Prefetches lines in address order, starting at `first`, because squares read one cache line from
 * each of many rows, which hardware does not prefetch. `done` elements were requested before. */
FSDPC_INLINE void prefetch_panel(const fsdpc_gemm_operand *from, size_t first, size_t done,
                                 size_t count, size_t bytes)
{
    const char *at = (const char *)from->data + (first * from->ld + done) * bytes;
    for (size_t byte = 0; byte < count * bytes; byte += 64)
        __builtin_prefetch(at + byte, 0, 2);
}

/* Note [whole vectors]. Panels of A are 14 or 6 lines wide, whereas vectors have 16 or 8 lanes.
 * Packers store whole vectors in order of ascending k, so that the next row overwrites elements
 * beyond the width (the panel has space after its last row). The values of these elements do not
 * matter, so a full panel also reads whole vectors, which extend into the next panel's lines if the
 * operand has them. */
FSDPC_INLINE void pack_f32_as(float *panel, size_t width, const fsdpc_gemm_operand *from,
                              size_t first, size_t count, size_t k_first, size_t k_count,
                              fsdpc_dtype dtype)
{
    if (count == width) /* see Note [whole vectors] */
        count = fsdpc_min_size(fsdpc_round_up(width, FSDPC_LANES), from->lines - first);
    if (!from->along_k) {
        for (size_t k = 0; k < k_count; k++) {
            size_t at = (k_first + k) * from->ld + first;
            /* rows are often pages apart, which hardware does not prefetch */
            size_t next = (at + 16 * from->ld) * (dtype == FSDPC_F32 ? 4 : 2);
            __builtin_prefetch((const char *)from->data + next);
            __builtin_prefetch((const char *)from->data + next + 64);
            for (size_t j = 0; j < width; j += FSDPC_LANES) {
                size_t left = j < count ? count - j : 0;
                fsdpc_vf v = {0};
                if (left >= FSDPC_LANES)
                    v = fsdpc_vf_load_as(from->data, at + j, dtype);
                else if (left)
                    v = fsdpc_vf_load_as_n(from->data, at + j, dtype, left);
                fsdpc_vf_store(panel + k * width + j, v);
            }
        }
        return;
    }
    size_t bytes = dtype == FSDPC_F32 ? 4 : 2;
    for (size_t k = 0, depth; k < k_count; k += depth) {
        bool pairs = dtype == FSDPC_BF16 && k_count - k >= 2 * SQUARE;
        depth = pairs ? 2 * SQUARE : fsdpc_min_size(k_count - k, SQUARE);
        for (size_t j = 0; j < width; j += SQUARE) {
            size_t lines = j < count ? fsdpc_min_size(count - j, SQUARE) : 0;
            float *to = panel + k * width + j;
            const char *at =
                (const char *)from->data + ((first + j) * from->ld + k_first + k) * bytes;
            if (from->streams)
                prefetch_panel(from, first + width, (k_first + k) * width + j * depth,
                               SQUARE * depth, bytes);
            if (pairs && lines == SQUARE)
                transpose_pairs(to, width, (const uint16_t *)at, from->ld);
            else if (dtype == FSDPC_F32 && lines == SQUARE && depth == SQUARE)
                transpose_square((uint32_t *)to, width, at, from->ld * sizeof(float));
            else
                for (size_t i = 0; i < depth; i += SQUARE)
                    transpose_widened(to + i * width, width, from, first + j, lines,
                                      k_first + k + i, fsdpc_min_size(depth - i, SQUARE), dtype);
        }
    }
}

FSDPC_INLINE void pack_f32(float *panel, size_t width, const fsdpc_gemm_operand *from, size_t first,
                           size_t count, size_t k_first, size_t k_count)
{
    if (from->dtype == FSDPC_F32)
        pack_f32_as(panel, width, from, first, count, k_first, k_count, FSDPC_F32);
    else if (from->dtype == FSDPC_BF16)
        pack_f32_as(panel, width, from, first, count, k_first, k_count, FSDPC_BF16);
    else
        pack_f32_as(panel, width, from, first, count, k_first, k_count, FSDPC_F16);
}

/* -- finishing --------------------------------------------------------------------------------- */

FSDPC_INLINE void finish_vector(const fsdpc_gemm_target *t, const float *sums, size_t at, size_t n,
                                fsdpc_dtype dtype, const float *bias, bool accumulate)
{
    fsdpc_vf v = fsdpc_vf_load(sums);
    if (bias)
        v += fsdpc_vf_load(bias);
    if (n >= FSDPC_LANES) {
        if (accumulate)
            v += fsdpc_vf_load_as(t->c, at, dtype);
        fsdpc_vf_store_as(t->c, at, dtype, v);
    } else if (n) {
        if (accumulate)
            v += fsdpc_vf_load_as_n(t->c, at, dtype, n);
        fsdpc_vf_store_as_n(t->c, at, dtype, v, n);
    }
}

FSDPC_INLINE void finish_row(const fsdpc_gemm_target *t, size_t i, const float *sums, size_t nr,
                             size_t cols, fsdpc_dtype dtype, const float *bias, bool accumulate)
{
    for (size_t j = 0; j < nr; j += FSDPC_LANES)
        finish_vector(t, sums + i * nr + j, i * t->ldc + j, j < cols ? cols - j : 0, dtype,
                      bias ? bias + j : NULL, accumulate);
}

FSDPC_INLINE void finish_rows(const fsdpc_gemm_target *t, const float *sums, size_t nr, size_t cols,
                              fsdpc_dtype dtype, const float *bias, bool accumulate)
{
    for (size_t i = 0; i < t->rows; i++)
        finish_row(t, i, sums, nr, cols, dtype, bias, accumulate);
}

/* Nearly all tiles are whole and have no bias; these use a loop without branches. */
FSDPC_INLINE void finish_as(const fsdpc_gemm_target *t, const float *sums, size_t nr,
                            fsdpc_dtype dtype)
{
    enum { MOST_COLS = 32 };
    _Alignas(64) float bias[MOST_COLS];
    if (t->bias && t->bias_by_row) {
        for (size_t i = 0; i < t->rows; i++) {
            fsdpc_vf all = fsdpc_vf_splat(fsdpc_f32_load_as(t->bias, i, t->bias_dtype));
            for (size_t j = 0; j < nr; j += FSDPC_LANES)
                fsdpc_vf_store(bias + j, all);
            finish_row(t, i, sums, nr, t->cols, dtype, bias, t->accumulate);
        }
        return;
    }
    for (size_t j = 0; t->bias && j < t->cols; j += FSDPC_LANES)
        fsdpc_vf_store(bias + j, fsdpc_vf_load_as_n(t->bias, j, t->bias_dtype,
                                                    fsdpc_min_size(t->cols - j, FSDPC_LANES)));
    if (t->bias || t->cols < nr)
        finish_rows(t, sums, nr, t->cols, dtype, t->bias ? bias : NULL, t->accumulate);
    else if (t->accumulate)
        finish_rows(t, sums, nr, nr, dtype, NULL, true);
    else
        finish_rows(t, sums, nr, nr, dtype, NULL, false);
}

/* c = round(sums + bias + c) */
FSDPC_INLINE void finish_f32(const fsdpc_gemm_target *target, const void *sums, size_t nr)
{
    if (target->dtype == FSDPC_F32)
        finish_as(target, sums, nr, FSDPC_F32);
    else if (target->dtype == FSDPC_BF16)
        finish_as(target, sums, nr, FSDPC_BF16);
    else
        finish_as(target, sums, nr, FSDPC_F16);
}

#endif
