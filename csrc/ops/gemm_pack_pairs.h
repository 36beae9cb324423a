/* Packs bf16 for the instructions that multiply pairs of k, vdpbf16ps and TDPBF16PS.
 *
 * The unit is a block of 16 lines and 32 k. A pair is elements k and k + 1 (k even) of one line, in
 * one 32-bit word with k in the low half. A block is written as [pair][line] or [line][pair].
 * Depending on the operand's memory layout, this takes a plain move, an interleave or a transpose
 * of words. Missing lines and missing k are filled with zeros.
 */
#ifndef FSDPC_OPS_GEMM_PACK_PAIRS_H
#define FSDPC_OPS_GEMM_PACK_PAIRS_H

#include "ops/gemm_pack.h"

enum { BLOCK_LINES = 16, BLOCK_K = 32, BLOCK_PAIRS = 16 };

typedef struct block {
    const fsdpc_gemm_operand *from;
    size_t first, lines;     /* lines <= 16; 0: all zeros */
    size_t k_first, k_count; /* k_count <= 32 */
} block;

FSDPC_INLINE const uint16_t *block_at(const block *b, size_t line, size_t k)
{
    const uint16_t *data = b->from->data;
    return b->from->along_k ? data + (b->first + line) * b->from->ld + b->k_first + k
                            : data + (b->k_first + k) * b->from->ld + b->first + line;
}

/* For memory that is contiguous along k, moves each line's words unchanged. */
FSDPC_INLINE void move_rows(uint32_t *to, const block *b)
{
    __mmask32 mask = b->k_count >= 32 ? 0xffffffffu : (1u << b->k_count) - 1;
    for (size_t j = 0; j < BLOCK_LINES; j++) {
        __m512i v = _mm512_setzero_si512();
        if (j < b->lines)
            v = _mm512_maskz_loadu_epi16(mask, block_at(b, j, 0));
        _mm512_storeu_si512(to + j * BLOCK_PAIRS, v);
    }
}

/* For memory that is contiguous along lines, interleaves rows k and k + 1 into words. */
FSDPC_INLINE void weave_pairs(uint32_t *to, size_t to_stride, const block *b)
{
    __mmask16 mask = (__mmask16)((1u << b->lines) - 1);
    for (size_t i = 0; i < BLOCK_PAIRS; i++) {
        __m512i v = _mm512_setzero_si512();
        if (2 * i < b->k_count && b->lines)
            v = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, block_at(b, 0, 2 * i)));
        if (2 * i + 1 < b->k_count && b->lines) {
            __m512i odd =
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, block_at(b, 0, 2 * i + 1)));
            v = _mm512_or_si512(v, _mm512_slli_epi32(odd, 16));
        }
        _mm512_storeu_si512(to + i * to_stride, v);
    }
}

/* Does the same for two neighbouring blocks, up to 32 lines, so that each cache line is read only
 * once. Rows are often pages apart, so the hardware does not prefetch them. The next 32 k are
 * therefore prefetched, and the next 32 lines, which are read after a whole panel, are prefetched
 * to L2. */
FSDPC_INLINE void weave_two(uint32_t *to, uint32_t *to_next, const block *b, size_t lines)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __mmask32 mask = lines >= 32 ? 0xffffffffu : (1u << lines) - 1;
    for (size_t i = 0; i < BLOCK_PAIRS; i++) {
        __m512i even = _mm512_setzero_si512(), odd = even;
        if (2 * i < b->k_count)
            even = _mm512_maskz_loadu_epi16(mask, block_at(b, 0, 2 * i));
        if (2 * i + 1 < b->k_count)
            odd = _mm512_maskz_loadu_epi16(mask, block_at(b, 0, 2 * i + 1));
        _mm_prefetch((const char *)block_at(b, 0, 2 * i + BLOCK_K), _MM_HINT_T0);
        _mm_prefetch((const char *)block_at(b, 0, 2 * i + 1 + BLOCK_K), _MM_HINT_T0);
        _mm_prefetch((const char *)block_at(b, BLOCK_K, 2 * i), _MM_HINT_T1);
        _mm_prefetch((const char *)block_at(b, BLOCK_K, 2 * i + 1), _MM_HINT_T1);
        even = _mm512_permutexvar_epi64(order, even);
        odd = _mm512_permutexvar_epi64(order, odd);
        _mm512_storeu_si512(to + i * BLOCK_LINES, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to_next + i * BLOCK_LINES, _mm512_unpackhi_epi16(even, odd));
    }
}

FSDPC_INLINE void pairs_block(uint32_t *to, size_t to_stride, const block *b)
{
    if (!b->from->along_k) {
        weave_pairs(to, to_stride, b);
    } else if (b->lines == BLOCK_LINES && b->k_count == BLOCK_K) {
        for (size_t j = 0; j < BLOCK_LINES; j++)
            _mm_prefetch((const char *)block_at(b, j + 2 * BLOCK_LINES, 0), _MM_HINT_T1);
        transpose_square(to, to_stride, block_at(b, 0, 0), b->from->ld * sizeof(uint16_t));
    } else {
        _Alignas(64) uint32_t copy[BLOCK_LINES * BLOCK_PAIRS];
        move_rows(copy, b);
        transpose_square(to, to_stride, copy, BLOCK_PAIRS * sizeof(uint32_t));
    }
}

/* Returns the block of a panel that begins at line j and index k, both relative to the panel. A
 * full panel uses whole blocks if the operand has more lines: see Note [whole vectors] in
 * gemm_pack.h. */
FSDPC_INLINE block block_of(const fsdpc_gemm_operand *from, size_t width, size_t first,
                            size_t count, size_t k_first, size_t k_count, size_t j, size_t k)
{
    if (count == width)
        count = fsdpc_min_size(fsdpc_round_up(width, BLOCK_LINES), from->lines - first);
    return (block){.from = from,
                   .first = first + j,
                   .lines = j < count ? fsdpc_min_size(count - j, BLOCK_LINES) : 0,
                   .k_first = k_first + k,
                   .k_count = fsdpc_min_size(k_count - k, BLOCK_K)};
}

/* Most tiles are whole bf16 tiles, which the conversion instruction rounds. The instruction treats
 * subnormals as zero, but vdpbf16ps and TDPBF16PS leave none in the sums. Its other results have
 * the same bits as base/dtype.h, as do those of finish_f32 (the test of extremes verifies this).
 * Rounding with integer operations here cost 12 % of a product at n = 512 and 8 % at n = 1024.
 * Tiles with a bias or an accumulated C, which may contain subnormals, use finish_f32. */
FSDPC_INLINE void finish_pairs(const fsdpc_gemm_target *t, const float *sums, size_t nr)
{
    enum { WIDTH = 32 };
    if (t->dtype != FSDPC_BF16 || t->bias || t->accumulate || t->cols != WIDTH || nr != WIDTH) {
        finish_f32(t, sums, nr);
        return;
    }
    uint16_t *c = t->c;
    for (size_t i = 0; i < t->rows; i++, c += t->ldc, sums += WIDTH)
        _mm512_storeu_si512(
            c, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums + 16), _mm512_load_ps(sums)));
}

#endif
