/* Operations on a block of scores between attention's products: the mask, the running softmax and
 * its gradient. Rows are keys; the 64 lanes of a row are queries.
 */
#ifndef FSDPC_OPS_ATTENTION_SOFTMAX_H
#define FSDPC_OPS_ATTENTION_SOFTMAX_H

#include <float.h>

#include "ops/attention_kernels.h"
#include "ops/attention_units.h"

enum {
    QUERIES = FSDPC_ATTENTION_QUERIES,
    KEYS = FSDPC_ATTENTION_KEYS,
    QUERY_VECTORS = QUERIES / FSDPC_LANES,
    KEY_STEP = 16 * ATTENTION_PAIR, /* the number of keys in a block is rounded up to this */
};

/* A query block's running softmax: P = 2^(c S - m); l is the sum of P over keys. */
typedef struct softmax_state {
    float m[QUERIES], l[QUERIES];
} softmax_state;

/* Returns 2^x for x <= 127, or 0 below -126, because subnormals are slow; preserves NaN. The
 * relative error is 7.5e-8, or 2.6e-6 with pairs, because P is rounded to 8 bits anyway. */
FSDPC_INLINE fsdpc_vf exp2_lanes(fsdpc_vf x)
{
#if defined(FSDPC_VEC_AVX512)
    __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    fsdpc_vf n =
        (fsdpc_vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const fsdpc_vf magic = fsdpc_vf_splat(0x1.8p23f);
    x = fsdpc_vf_max(fsdpc_vf_splat(-127.0f), x);
    x = fsdpc_vf_min(fsdpc_vf_splat(127.0f), x);
    fsdpc_vf n = (x + magic) - magic;
#endif
    fsdpc_vf r = x - n;
#if ATTENTION_PAIR == 2
    fsdpc_vf p = fsdpc_vf_splat(9.570101968e-3f);
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(5.591786076e-2f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(2.402474483e-1f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(6.931218147e-1f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(9.999992614e-1f));
#else
    fsdpc_vf p = fsdpc_vf_splat(1.327647205e-3f);
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(9.675541385e-3f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(5.550713274e-2f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(2.402211972e-1f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(6.931469671e-1f));
    p = fsdpc_vf_fma(p, r, fsdpc_vf_splat(1.000000072f));
#endif
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);
#else
    return p * (fsdpc_vf)((__builtin_convertvector(n, fsdpc_vi) + 127) << 23);
#endif
}

/* Sets scores of keys k0 .. k0 + keys to -inf for queries in the block at q0 that must not see
 * them. */
static void hide_scores(const fsdpc_attention_args *x, size_t q0, size_t k0, size_t keys, float *s)
{
    size_t visible = fsdpc_attention_visible(x, q0); /* visible to all of the block's queries */
    for (size_t j = visible > k0 ? visible - k0 : 0; j < keys; j++) {
        /* Query q sees q + 1 + tokens_k - tokens_q keys, so queries below k0 + j + tokens_q -
         * tokens_k do not see key k0 + j. */
        size_t hidden = QUERIES, edge = k0 + j + x->tokens_q;
        if (k0 + j < x->tokens_k && edge < q0 + QUERIES + x->tokens_k)
            hidden = edge - q0 - x->tokens_k;
        for (size_t i = 0; i < hidden; i++)
            s[j * QUERIES + i] = -INFINITY;
    }
    if (fsdpc_attention_first(x, q0 + QUERIES - 1) <= k0)
        return;
    for (size_t i = 0; i < QUERIES; i++) {
        size_t first = fsdpc_attention_first(x, q0 + i);
        for (size_t j = 0; j < keys && k0 + j < first; j++)
            s[j * QUERIES + i] = -INFINITY;
    }
}

/* If a score exceeds P's range, raises m and rescales l and the contents of o (rows x 64). */
static void raise_reference(softmax_state *state, const float *s, size_t keys, float c, float *o,
                            size_t rows)
{
    fsdpc_vf top[QUERY_VECTORS], beyond = (fsdpc_vf){0};
    for (int v = 0; v < QUERY_VECTORS; v++)
        top[v] = fsdpc_vf_splat(-INFINITY);
    for (size_t j = 0; j < keys; j++)
        for (int v = 0; v < QUERY_VECTORS; v++)
            top[v] = fsdpc_vf_max(top[v], fsdpc_vf_load(s + j * QUERIES + v * FSDPC_LANES));
    for (int v = 0; v < QUERY_VECTORS; v++) {
        top[v] = top[v] * c;
        fsdpc_vi over = top[v] > fsdpc_vf_load(state->m + v * FSDPC_LANES) + 8.0f;
        beyond = fsdpc_vf_select(over, fsdpc_vf_splat(1.0f), beyond);
    }
    if (fsdpc_vf_max_lane(beyond) == 0)
        return;
    for (int v = 0; v < QUERY_VECTORS; v++) {
        float *m = state->m + v * FSDPC_LANES, *l = state->l + v * FSDPC_LANES;
        fsdpc_vf old = fsdpc_vf_load(m), now = fsdpc_vf_max(top[v], old);
        fsdpc_vf factor = exp2_lanes(old - now);
        fsdpc_vf_store(m, now);
        fsdpc_vf_store(l, fsdpc_vf_load(l) * factor);
        for (size_t r = 0; r < rows; r++) {
            float *lanes = o + r * QUERIES + v * FSDPC_LANES;
            fsdpc_vf_store(lanes, fsdpc_vf_load(lanes) * factor);
        }
    }
}

/* Computes I(P^T) from the scores s, and adds P's sum to l. p may be s. */
static void make_probabilities(softmax_state *state, const float *s, size_t keys, float c, unit *p)
{
    for (int v = 0; v < QUERY_VECTORS; v++) {
        fsdpc_vf factor = fsdpc_vf_splat(c);
        fsdpc_vf minus_m = -fsdpc_vf_load(state->m + v * FSDPC_LANES);
        fsdpc_vf even_sum = (fsdpc_vf){0}, odd_sum = even_sum;
        const float *from = s + v * FSDPC_LANES;
        unit *to = p + v * FSDPC_LANES;
        for (size_t j = 0; j < keys; j += 2, from += 2 * QUERIES) {
            fsdpc_vf even = exp2_lanes(fsdpc_vf_fma(fsdpc_vf_load(from), factor, minus_m));
            fsdpc_vf odd = exp2_lanes(fsdpc_vf_fma(fsdpc_vf_load(from + QUERIES), factor, minus_m));
            even_sum += even;
            odd_sum += odd;
#if ATTENTION_PAIR == 2
            unit_store(to, pair_rows(even, odd));
            to += QUERIES;
#else
            unit_store(to, even);
            unit_store(to + QUERIES, odd);
            to += 2 * QUERIES;
#endif
        }
        float *l = state->l + v * FSDPC_LANES;
        fsdpc_vf_store(l, fsdpc_vf_load(l) + (even_sum + odd_sum));
    }
}

/* A query block's state in backward. */
typedef struct gradient_state {
    float lse[QUERIES];  /* base 2; +inf if a query sees no keys or is padding, so that P = 0 */
    float mean[QUERIES]; /* D = rowsum(dO * O) */
    float m[QUERIES];    /* with a mask, the reference of scores; otherwise 0 */
} gradient_state;

#if ATTENTION_PAIR == 2

/* Computes R(P^T), R(dS^T) and I(dS^T) from s = S^T and dp = dP^T; dS = P (dP - D). */
static void make_gradients(const gradient_state *state, const float *s, const float *dp,
                           size_t keys, float c, unit *p_rows, unit *ds_rows, unit *ds_pairs)
{
    fsdpc_vf factor = fsdpc_vf_splat(c);
    for (int v = 0; v < QUERY_VECTORS; v += 2) {
        fsdpc_vf lse[2], mean[2];
        for (int w = 0; w < 2; w++) {
            lse[w] = -fsdpc_vf_load(state->lse + (v + w) * FSDPC_LANES);
            mean[w] = fsdpc_vf_load(state->mean + (v + w) * FSDPC_LANES);
        }
        for (size_t j = 0; j < keys; j += 2) {
            fsdpc_vf ds[2][2]; /* row, vector */
#pragma GCC unroll 2
            for (size_t r = 0; r < 2; r++) {
                fsdpc_vf p[2];
#pragma GCC unroll 2
                for (size_t w = 0; w < 2; w++) {
                    size_t at = (j + r) * QUERIES + ((size_t)v + w) * FSDPC_LANES;
                    p[w] = exp2_lanes(fsdpc_vf_fma(fsdpc_vf_load(s + at), factor, lse[w]));
                    ds[r][w] = p[w] * (fsdpc_vf_load(dp + at) - mean[w]);
                }
                size_t row = (j + r) * (QUERIES / 2) + (size_t)v * (FSDPC_LANES / 2);
                unit_store(p_rows + row, pair_lanes(p[0], p[1]));
                unit_store(ds_rows + row, pair_lanes(ds[r][0], ds[r][1]));
            }
            unit *pairs = ds_pairs + j / 2 * QUERIES + v * FSDPC_LANES;
            unit_store(pairs, pair_rows(ds[0][0], ds[1][0]));
            unit_store(pairs + FSDPC_LANES, pair_rows(ds[0][1], ds[1][1]));
        }
    }
}

#else

/* s = S^T becomes P^T, dp = dP^T becomes dS^T, dS = P (dP - D). */
static void make_gradients(const gradient_state *state, float *s, float *dp, size_t keys, float c)
{
    fsdpc_vf factor = fsdpc_vf_splat(c);
    for (int v = 0; v < QUERY_VECTORS; v++) {
        fsdpc_vf lse = -fsdpc_vf_load(state->lse + v * FSDPC_LANES);
        fsdpc_vf mean = fsdpc_vf_load(state->mean + v * FSDPC_LANES);
        for (size_t j = 0; j < keys; j++) {
            size_t at = j * QUERIES + (size_t)v * FSDPC_LANES;
            fsdpc_vf p = exp2_lanes(fsdpc_vf_fma(fsdpc_vf_load(s + at), factor, lse));
            fsdpc_vf_store(s + at, p);
            fsdpc_vf_store(dp + at, p * (fsdpc_vf_load(dp + at) - mean));
        }
    }
}

#endif

#endif
