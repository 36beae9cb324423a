/* One block of attention's mask operand, transposed and in base 2 like the scores.
 *
 * Scores have keys as rows and queries as lanes (attention_body.h), but masks have queries as rows.
 * Each block is therefore transposed in vector-sized squares, or broadcast if all queries share a
 * row. bool becomes 0 or -inf. Added floats are clamped to at least -FLT_MAX, so only -inf hides a
 * key. If the mask is the lowest finite number for all of a query's keys, the query attends to all
 * of them equally, as in PyTorch.
 */
#ifndef FSDPC_OPS_ATTENTION_MASK_H
#define FSDPC_OPS_ATTENTION_MASK_H

#include "ops/attention_softmax.h"

/* Loads n elements starting at `at`; other lanes are undefined. */
FSDPC_INLINE fsdpc_vf mask_load(const void *mask, size_t at, size_t n, fsdpc_dtype dtype)
{
    const fsdpc_vf hidden = fsdpc_vf_splat(-INFINITY);
    if (dtype == FSDPC_BOOL) {
        uint8_t seen[16] = {0};
        memcpy(seen, (const uint8_t *)mask + at, n);
#if defined(FSDPC_VEC_AVX512)
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)seen);
        return (fsdpc_vf)_mm512_mask_mov_ps((__m512)hidden, _mm_test_epi8_mask(bytes, bytes),
                                            _mm512_setzero_ps());
#elif defined(FSDPC_VEC_AVX2)
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)seen);
        fsdpc_vi lanes = (fsdpc_vi)_mm256_cvtepu8_epi32(bytes);
        return fsdpc_vf_select(lanes != 0, (fsdpc_vf){0}, hidden);
#else
        fsdpc_vi lanes = {seen[0], seen[1], seen[2], seen[3]};
        return fsdpc_vf_select(lanes != 0, (fsdpc_vf){0}, hidden);
#endif
    }
    fsdpc_vf v =
        FSDPC_WHOLE(n) ? fsdpc_vf_load_as(mask, at, dtype) : fsdpc_vf_load_as_n(mask, at, dtype, n);
    fsdpc_vf bias = fsdpc_vf_max(fsdpc_vf_splat(-FLT_MAX), v * 1.4426950408889634f); /* NaN stays */
    return fsdpc_vf_select(v == hidden, hidden, bias);
}

/* Loads a square of queries by keys, of which only the first `queries` rows and `keys` columns
 * exist. */
FSDPC_INLINE void mask_square(const fsdpc_attention_args *x, size_t at, size_t queries, size_t keys,
                              fsdpc_vf v[FSDPC_LANES], fsdpc_dtype dtype)
{
    size_t by_query = x->stride_mask[2], by_key = x->stride_mask[3];
    if (queries >= FSDPC_LANES && keys == FSDPC_LANES && by_key == 1) {
#pragma GCC unroll 16
        for (size_t i = 0; i < FSDPC_LANES; i++)
            v[i] = mask_load(x->mask, at + i * by_query, FSDPC_LANES, dtype);
    } else {
        for (size_t i = 0; i < FSDPC_LANES; i++) {
            v[i] = fsdpc_vf_splat(-INFINITY);
            if (i < queries)
                v[i] = mask_load(x->mask, at + i * by_query, by_key ? keys : 1, dtype);
            if (by_key == 0)
                v[i] = fsdpc_vf_splat(v[i][0]);
        }
    }
    transpose_square(v);
}

FSDPC_INLINE bool load_mask_as(const fsdpc_attention_args *x, size_t at, size_t queries,
                               size_t keys, float *bias, fsdpc_dtype dtype)
{
    fsdpc_vi seen = (fsdpc_vi){0};
    if (x->stride_mask[2] == 0) {
        for (size_t j = 0; j < keys; j++) {
            fsdpc_vf all = mask_load(x->mask, at + j * x->stride_mask[3], 1, dtype);
            all = fsdpc_vf_splat(all[0]);
            seen |= all != -INFINITY;
            for (int lane = 0; lane < QUERIES; lane += FSDPC_LANES)
                fsdpc_vf_store(bias + j * QUERIES + lane, all);
        }
    } else {
        for (size_t i = 0; i < QUERIES; i += FSDPC_LANES)
            for (size_t j = 0; j < keys; j += FSDPC_LANES) {
                fsdpc_vf v[FSDPC_LANES];
                mask_square(x, at + i * x->stride_mask[2] + j * x->stride_mask[3],
                            queries > i ? queries - i : 0, fsdpc_min_size(keys - j, FSDPC_LANES), v,
                            dtype);
#pragma GCC unroll 16
                for (size_t r = 0; r < FSDPC_LANES; r++) {
                    seen |= v[r] != -INFINITY;
                    fsdpc_vf_store(bias + (j + r) * QUERIES + i, v[r]);
                }
            }
    }
    return fsdpc_vf_max_lane(fsdpc_vf_select(seen, fsdpc_vf_splat(1), (fsdpc_vf){0})) != 0;
}

/* Loads the mask of keys k0 .. k0 + keys for the queries starting at q0 into bias (keys x 64),
 * without keys beyond the last. Returns whether any query sees any of these keys. */
static bool load_mask(const fsdpc_attention_args *x, size_t b, size_t h, size_t q0, size_t k0,
                      size_t keys, float *bias)
{
    size_t at = b * x->stride_mask[0] + h * x->stride_mask[1] + q0 * x->stride_mask[2] +
                k0 * x->stride_mask[3];
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    keys = fsdpc_min_size(keys, x->tokens_k - k0);
    switch (x->mask_dtype) {
    case FSDPC_BOOL:
        return load_mask_as(x, at, queries, keys, bias, FSDPC_BOOL);
    case FSDPC_BF16:
        return load_mask_as(x, at, queries, keys, bias, FSDPC_BF16);
    case FSDPC_F16:
        return load_mask_as(x, at, queries, keys, bias, FSDPC_F16);
    default:
        return load_mask_as(x, at, queries, keys, bias, FSDPC_F32);
    }
}

/* Replaces the scores by c S + bias - m in base 2; a NULL m (64) means 0. */
static void apply_mask(const float *bias, const float *m, size_t keys, float c, float *s)
{
    const fsdpc_vf factor = fsdpc_vf_splat(c), hidden = fsdpc_vf_splat(-INFINITY);
    for (size_t lane = 0; lane < QUERIES; lane += FSDPC_LANES) {
        fsdpc_vf reference = m ? fsdpc_vf_load(m + lane) : (fsdpc_vf){0};
        for (size_t j = 0; j < keys; j++) {
            fsdpc_vf added = fsdpc_vf_load(bias + j * QUERIES + lane);
            float *at = s + j * QUERIES + lane;
            fsdpc_vf y = fsdpc_vf_fma(fsdpc_vf_load(at), factor, added) - reference;
            fsdpc_vf_store(at, fsdpc_vf_select(added == hidden, hidden, y));
        }
    }
}

#endif
