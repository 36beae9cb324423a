/* Blocked attention, forward and backward; compiled once per instruction set.
 *
 * Scores are computed transposed, S^T = K Q^T, with one row per key and the 64 queries of a block
 * in its lanes. Maxima and sums over keys are then plain vector operations, the causal mask is a
 * prefix of a row, and only Q's block needs a transpose. In the same way O^T = V^T P^T and dQ^T =
 * K^T dS^T; dV = P^T dO and dK = dS^T Q already have one row per key. Operands are packed as units
 * (attention_units.h); if these are pairs, P^T is packed in both layouts as it is computed.
 *
 * Softmax raises the references m, and rescales the output so far, only if P would exceed 2^8 in
 * some lane. m is thus not always the maximum, which only changes rounding: P is at most 2^8, and
 * the sum is at least about 1. Exponents are base 2, with scale * log2 e folded in. Hidden scores
 * are -inf before exp2. m is initially finite, so rows that see no keys have sum 0 and no NaN.
 *
 * The sign of scale is applied to T(Q), so that hidden scores are -inf even if scale is negative.
 *
 * With a mask, scores are scaled before the mask is added, and c is then 1 (attention_mask.h).
 * Backward subtracts m and the log of l separately, because a mask's large numbers would absorb the
 * log in lse. Blocks that a mask or a window hides completely are skipped.
 */
#ifndef FSDPC_OPS_ATTENTION_BODY_H
#define FSDPC_OPS_ATTENTION_BODY_H

#include <stdalign.h>

#include "base/size.h"
#include "ops/attention_kernels.h"
#include "ops/attention_mask.h"
#include "ops/attention_softmax.h"

/* Values derived from the arguments. */
typedef struct attention_plan {
    size_t dn, du;       /* length of a padded row, in elements and in units */
    size_t out_rows;     /* rows of O^T and dQ^T */
    size_t keys;         /* tokens_k, padded */
    size_t group;        /* query heads per key-value head */
    float c;             /* |scale| log2 e; 1 for scale 0 */
    float left;          /* c, or 1 if scores were already scaled for a mask */
    uint32_t keep, flip; /* give T(Q) the sign of scale, or clear it if scale is 0 */
} attention_plan;

static attention_plan make_plan(const fsdpc_attention_args *x)
{
    uint32_t sign = ATTENTION_PAIR == 2 ? 0x80008000u : 0x80000000u;
    attention_plan plan = {
        .dn = fsdpc_round_up(x->dim, 16 * ATTENTION_PAIR),
        .out_rows = fsdpc_round_up(x->dim, 16),
        .keys = fsdpc_round_up(x->tokens_k, KEYS),
        .group = x->kv_heads ? x->heads / x->kv_heads : 0,
        .c = x->scale == 0 ? 1 : (float)(fabs(x->scale) * 1.4426950408889634),
        .keep = x->scale == 0 ? 0 : UINT32_MAX,
        .flip = x->scale < 0 ? sign : 0,
    };
    plan.du = plan.dn / ATTENTION_PAIR;
    plan.left = x->mask ? 1 : plan.c;
    return plan;
}

/* Allocates `count` four-byte items from the scratch buffer, or only counts them if `base` is
 * NULL. */
static void *carve(char *base, size_t *used, size_t count)
{
    void *at = base ? base + *used : NULL;
    *used += fsdpc_round_up(count * 4, 64);
    return at;
}

static size_t offset_of(const size_t stride[3], size_t b, size_t t, size_t h)
{
    return b * stride[0] + t * stride[1] + h * stride[2];
}

/* -- packing ----------------------------------------------------------------------------------- */

#if ATTENTION_PAIR == 2
/* For each block of KEYS keys, packs the transpose of I(X), out_rows x KEYS / 2, for sums over
 * keys. `temporary` holds a block's I(X). */
static void pack_summed(const attention_plan *plan, unit *to, const unit *rows, size_t keys,
                        unit *temporary)
{
    for (size_t k0 = 0; k0 < keys; k0 += KEYS) {
        interleave_rows(temporary, rows + k0 * plan->du, KEYS, plan->dn);
        transpose_units(to + k0 / 2 * plan->dn, KEYS / 2, temporary, plan->dn, KEYS / 2, plan->dn,
                        UINT32_MAX, 0);
    }
}
#endif

/* -- products over a block of keys ------------------------------------------------------------- */

/* A block of keys. The upper half of the queries may see all of the block's keys, the lower half
 * only the first `full` (rounded up). Half of the hidden scores on a causal mask's diagonal are
 * therefore never computed. */
typedef struct key_block {
    size_t k0, keys, full;
} key_block;

static key_block next_keys(const fsdpc_attention_args *x, size_t q0, size_t k0, size_t visible)
{
    size_t lower = fsdpc_attention_visible(x, q0 + QUERIES / 2 - 1);
    key_block block = {.k0 = k0};
    block.keys = fsdpc_round_up(fsdpc_min_size(visible - k0, KEYS), KEY_STEP);
    block.full = lower > k0 ? fsdpc_min_size(fsdpc_round_up(lower - k0, KEY_STEP), block.keys) : 0;
    return block;
}

/* Returns the start of the first block of keys that a query in the block at q0 may see. */
static size_t first_block(const fsdpc_attention_args *x, size_t q0)
{
    return fsdpc_attention_first(x, q0) / KEYS * KEYS;
}

/* c (keys x 64) = X Y^T from R(X) of all keys and T(Y); entries excluded by `full` are
 * unchanged. */
static void gemm_scores(const attention_plan *plan, key_block block, const unit *rows,
                        const unit *columns, float *c)
{
    const size_t half = QUERIES / 2;
    gemm_shape shape = {block.full, QUERIES, plan->du, plan->du, 1, QUERIES, QUERIES, false};
    rows += block.k0 * plan->du;
    gemm(&shape, rows, columns, c);
    shape.m = block.keys - block.full;
    shape.n = half;
    gemm(&shape, rows + block.full * plan->du, columns + half, c + block.full * QUERIES + half);
}

/* c (out_rows x 64) = or += X^T B over the keys of the block. `summed` is from pack_summed or,
 * with single units, is R(X), transposed by its strides; b is keys / PAIR x 64. */
static void gemm_summed(const attention_plan *plan, key_block block, const unit *summed,
                        const unit *b, float *c, bool accumulate)
{
    const size_t half = QUERIES / 2;
    gemm_shape shape = {
        plan->out_rows, QUERIES,   block.keys / ATTENTION_PAIR, 1, plan->dn, QUERIES,
        QUERIES,        accumulate};
    if (ATTENTION_PAIR == 2) {
        shape.a_row = KEYS / 2;
        shape.a_col = 1;
    }
    summed += block.k0 / ATTENTION_PAIR * plan->dn;
    if (block.full == block.keys) {
        gemm(&shape, summed, b, c);
        return;
    }
    shape.n = half;
    gemm(&shape, summed, b + half, c + half);
    shape.k = block.full / ATTENTION_PAIR;
    gemm(&shape, summed, b, c);
}

/* c (all keys x dn) += A B over the block's queries, from R(A) (keys x 64) and I(B) (64 x dn). */
static void gemm_by_key(const attention_plan *plan, key_block block, const unit *a, const unit *b,
                        float *c)
{
    const size_t summed = QUERIES / ATTENTION_PAIR, half = summed / 2;
    gemm_shape shape = {block.full, plan->dn, summed, summed, 1, plan->dn, plan->dn, true};
    c += block.k0 * plan->dn;
    gemm(&shape, a, b, c);
    shape.m = block.keys - block.full;
    shape.k = half;
    gemm(&shape, a + block.full * summed + half, b + half * plan->dn, c + block.full * plan->dn);
}

/* -- results ----------------------------------------------------------------------------------- */

/* Multiplies lane t of `from` (out_rows x 64) by factor[t], rounds it, and writes it to row t of
 * `to`. */
FSDPC_INLINE void write_lanes_as(void *to, size_t first, size_t stride, const float *from,
                                 const float *factor, size_t rows, size_t dim, fsdpc_dtype dtype)
{
    for (size_t t0 = 0; t0 < rows; t0 += FSDPC_LANES)
        for (size_t d = 0; d < dim; d += FSDPC_LANES) {
            fsdpc_vf v[FSDPC_LANES], by = fsdpc_vf_load(factor + t0);
#pragma GCC unroll 16
            for (int i = 0; i < FSDPC_LANES; i++)
                v[i] = by * fsdpc_vf_load(from + (d + (size_t)i) * QUERIES + t0);
            transpose_square(v);
            size_t n = fsdpc_min_size(dim - d, FSDPC_LANES);
#pragma GCC unroll 16
            for (size_t i = 0; i < FSDPC_LANES; i++) {
                if (t0 + i >= rows)
                    break;
                size_t at = first + (t0 + i) * stride + d;
                if (n == FSDPC_LANES)
                    fsdpc_vf_store_as(to, at, dtype, v[i]);
                else
                    fsdpc_vf_store_as_n(to, at, dtype, v[i], n);
            }
        }
}

static void write_lanes(void *to, size_t first, size_t stride, const float *from,
                        const float *factor, size_t rows, size_t dim, fsdpc_dtype dtype)
{
    if (ATTENTION_PAIR == 2 || dtype == FSDPC_BF16)
        write_lanes_as(to, first, stride, from, factor, rows, dim, FSDPC_BF16);
    else if (dtype == FSDPC_F16)
        write_lanes_as(to, first, stride, from, factor, rows, dim, FSDPC_F16);
    else
        write_lanes_as(to, first, stride, from, factor, rows, dim, FSDPC_F32);
}

/* Multiplies the rows of `from` (rows x dn) by `factor`, rounds them, and writes them to the rows
 * of `to`. */
static void write_rows(void *to, size_t first, size_t stride, const float *from, size_t dn,
                       float factor, size_t rows, size_t dim, fsdpc_dtype dtype)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t d = 0; d < dim; d += FSDPC_LANES)
            fsdpc_vf_store_as_n(to, first + r * stride + d, dtype,
                                fsdpc_vf_load(from + r * dn + d) * factor,
                                fsdpc_min_size(dim - d, FSDPC_LANES));
}

/* -- forward ----------------------------------------------------------------------------------- */

typedef struct forward_scratch {
    unit *k_rows, *values;    /* R(K); V for gemm_summed */
    unit *rows, *columns;     /* of a block of queries: R(Q), T(Q) */
    float *scores;            /* KEYS x 64 */
    unit *probabilities;      /* KEYS / PAIR x 64; with single units, scores */
    float *out;               /* O^T, out_rows x 64 */
    unit *v_rows, *temporary; /* with pairs: R(V), I(V) of a block */
    float *bias;              /* with a mask: as scores */
} forward_scratch;

static size_t carve_forward(const fsdpc_attention_args *x, char *base, forward_scratch *s)
{
    attention_plan plan = make_plan(x);
    size_t used = 0;
    s->k_rows = carve(base, &used, plan.keys * plan.du);
    s->values = carve(base, &used, plan.keys * plan.du);
    s->rows = carve(base, &used, QUERIES * plan.du);
    s->columns = carve(base, &used, QUERIES * plan.du);
    s->scores = carve(base, &used, KEYS * QUERIES);
    s->out = carve(base, &used, QUERIES * plan.out_rows);
    s->probabilities = (unit *)s->scores;
    s->v_rows = s->values;
    if (ATTENTION_PAIR == 2) {
        s->probabilities = carve(base, &used, KEYS / 2 * QUERIES);
        s->v_rows = carve(base, &used, plan.keys * plan.du);
        s->temporary = carve(base, &used, KEYS / 2 * plan.dn);
    }
    s->bias = carve(base, &used, x->mask ? KEYS * QUERIES : 0);
    return used;
}

static size_t forward_bytes(const fsdpc_attention_args *x)
{
    forward_scratch s;
    return carve_forward(x, NULL, &s);
}

static void finish_forward(const fsdpc_attention_args *x, const fsdpc_attention_run *run, size_t q0,
                           const softmax_state *state, const float *out)
{
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    float *lse = x->lse + (run->batch * x->heads + run->head) * x->tokens_q + q0;
    size_t rows = x->batch * x->heads * x->tokens_q;
    alignas(64) float inverse[QUERIES] = {0};
    for (size_t i = 0; i < queries; i++) {
        bool empty = state->l[i] == 0;
        inverse[i] = empty ? 0 : 1 / state->l[i];
        float reference = x->mask ? 0 : state->m[i] * 0.6931471806f;
        lse[i] = empty ? -INFINITY : reference + logf(state->l[i]);
        if (x->mask)
            lse[rows + i] = state->m[i];
    }
    write_lanes(x->out, offset_of(x->stride_out, run->batch, q0, run->head), x->stride_out[1], out,
                inverse, queries, x->dim, x->dtype);
}

static void forward_block(const fsdpc_attention_args *x, const attention_plan *plan,
                          const fsdpc_attention_run *run, size_t q0, const forward_scratch *s)
{
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    size_t visible = fsdpc_attention_visible(x, q0 + queries - 1);
    alignas(64) softmax_state state;
    for (int i = 0; i < QUERIES; i++) {
        state.m[i] = -FLT_MAX;
        state.l[i] = 0;
    }
    pack_rows(s->rows, plan->dn, x->q, offset_of(x->stride_q, run->batch, q0, run->head),
              x->stride_q[1], queries, QUERIES, x->dim, x->dtype);
    transpose_units(s->columns, QUERIES, s->rows, plan->du, QUERIES, plan->du, plan->keep,
                    plan->flip);
    bool begun = false; /* out already holds a sum */
    for (size_t k0 = first_block(x, q0); k0 < visible; k0 += KEYS) {
        key_block block = next_keys(x, q0, k0, visible);
        if (x->mask && !load_mask(x, run->batch, run->head, q0, k0, block.keys, s->bias))
            continue;
        gemm_scores(plan, block, s->k_rows, s->columns, s->scores);
        if (x->mask)
            apply_mask(s->bias, NULL, block.keys, plan->c, s->scores);
        hide_scores(x, q0, k0, block.keys, s->scores);
        raise_reference(&state, s->scores, block.keys, plan->left, s->out,
                        begun ? plan->out_rows : 0);
        make_probabilities(&state, s->scores, block.keys, plan->left, s->probabilities);
        gemm_summed(plan, block, s->values, s->probabilities, s->out, begun);
        begun = true;
    }
    if (!begun)
        memset(s->out, 0, plan->out_rows * QUERIES * sizeof *s->out);
    finish_forward(x, run, q0, &state, s->out);
}

static void forward(const fsdpc_attention_args *x, const fsdpc_attention_run *run, void *scratch)
{
    attention_plan plan = make_plan(x);
    forward_scratch s;
    carve_forward(x, scratch, &s);
    size_t kv_head = run->head / plan.group, visible = fsdpc_attention_visible(x, run->last - 1);
    size_t padded = fsdpc_round_up(visible, KEYS);
    gemm_begin();
    pack_rows(s.k_rows, plan.dn, x->k, offset_of(x->stride_k, run->batch, 0, kv_head),
              x->stride_k[1], visible, padded, x->dim, x->dtype);
    pack_rows(s.v_rows, plan.dn, x->v, offset_of(x->stride_v, run->batch, 0, kv_head),
              x->stride_v[1], visible, padded, x->dim, x->dtype);
#if ATTENTION_PAIR == 2
    pack_summed(&plan, s.values, s.v_rows, padded, s.temporary);
#endif
    for (size_t q0 = run->first; q0 < run->last; q0 += QUERIES)
        forward_block(x, &plan, run, q0, &s);
    gemm_end();
}

/* -- backward ---------------------------------------------------------------------------------- */

typedef struct backward_scratch {
    unit *k_rows, *v_rows, *k_summed;            /* R(K), R(V), K for gemm_summed */
    float *dk, *dv;                              /* keys x dn */
    unit *q_rows, *q_columns, *q_pairs;          /* of a block of queries: R(Q), T(Q), I(Q) */
    unit *dout_rows, *dout_columns, *dout_pairs; /* and of dO */
    float *scores, *dscores;                     /* S^T, dP^T: KEYS x 64 */
    unit *p_rows, *ds_rows, *ds_pairs;           /* R(P^T), R(dS^T), I(dS^T) */
    float *dq;                                   /* dQ^T, out_rows x 64 */
    unit *temporary;                             /* with pairs: I(K) of a block */
    float *bias;                                 /* with a mask: as scores */
} backward_scratch;

static size_t carve_backward(const fsdpc_attention_args *x, char *base, backward_scratch *s)
{
    attention_plan plan = make_plan(x);
    size_t used = 0;
    s->k_rows = carve(base, &used, plan.keys * plan.du);
    s->v_rows = carve(base, &used, plan.keys * plan.du);
    s->dk = carve(base, &used, plan.keys * plan.dn);
    s->dv = carve(base, &used, plan.keys * plan.dn);
    s->q_rows = carve(base, &used, QUERIES * plan.du);
    s->q_columns = carve(base, &used, QUERIES * plan.du);
    s->dout_rows = carve(base, &used, QUERIES * plan.du);
    s->dout_columns = carve(base, &used, QUERIES * plan.du);
    s->scores = carve(base, &used, KEYS * QUERIES);
    s->dscores = carve(base, &used, KEYS * QUERIES);
    s->dq = carve(base, &used, QUERIES * plan.out_rows);
    if (ATTENTION_PAIR == 2) {
        s->k_summed = carve(base, &used, plan.keys * plan.du);
        s->q_pairs = carve(base, &used, QUERIES * plan.du);
        s->dout_pairs = carve(base, &used, QUERIES * plan.du);
        s->p_rows = carve(base, &used, KEYS * QUERIES / 2);
        s->ds_rows = carve(base, &used, KEYS * QUERIES / 2);
        s->ds_pairs = carve(base, &used, KEYS * QUERIES / 2);
        s->temporary = carve(base, &used, KEYS / 2 * plan.dn);
    } else {
        s->k_summed = s->k_rows;
        s->q_pairs = s->q_rows;
        s->dout_pairs = s->dout_rows;
        s->p_rows = (unit *)s->scores;
        s->ds_rows = s->ds_pairs = (unit *)s->dscores;
    }
    s->bias = carve(base, &used, x->mask ? KEYS * QUERIES : 0);
    return used;
}

static size_t backward_bytes(const fsdpc_attention_args *x)
{
    backward_scratch s;
    return carve_backward(x, NULL, &s);
}

/* Loads a query block's lse and D, and also m if there is a mask. */
static void load_gradient_state(const fsdpc_attention_args *x, size_t b, size_t h, size_t q0,
                                gradient_state *state)
{
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    size_t rows = x->batch * x->heads * x->tokens_q;
    const float *lse = x->lse + (b * x->heads + h) * x->tokens_q + q0;
    for (size_t i = 0; i < QUERIES; i++) {
        state->lse[i] = INFINITY;
        state->mean[i] = 0;
        state->m[i] = x->mask && i < queries ? lse[rows + i] : 0;
    }
    for (size_t i = 0; i < queries; i++) {
        size_t at = offset_of(x->stride_out, b, q0 + i, h);
        fsdpc_vf sum = (fsdpc_vf){0};
        for (size_t d = 0; d < x->dim; d += FSDPC_LANES) {
            size_t n = fsdpc_min_size(x->dim - d, FSDPC_LANES);
            sum = fsdpc_vf_fma(fsdpc_vf_load_as_n(x->out, at + d, x->dtype, n),
                               fsdpc_vf_load_as_n(x->dout, at + d, x->dtype, n), sum);
        }
        if (lse[i] != -INFINITY) {
            state->lse[i] = lse[i] * 1.4426950409f;
            state->mean[i] = fsdpc_vf_sum(sum);
        }
    }
}

static void pack_queries(const fsdpc_attention_args *x, const attention_plan *plan, size_t b,
                         size_t h, size_t q0, const backward_scratch *s)
{
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    pack_rows(s->q_rows, plan->dn, x->q, offset_of(x->stride_q, b, q0, h), x->stride_q[1], queries,
              QUERIES, x->dim, x->dtype);
    pack_rows(s->dout_rows, plan->dn, x->dout, offset_of(x->stride_out, b, q0, h), x->stride_out[1],
              queries, QUERIES, x->dim, x->dtype);
    transpose_units(s->q_columns, QUERIES, s->q_rows, plan->du, QUERIES, plan->du, plan->keep,
                    plan->flip);
    transpose_units(s->dout_columns, QUERIES, s->dout_rows, plan->du, QUERIES, plan->du, UINT32_MAX,
                    0);
#if ATTENTION_PAIR == 2
    interleave_rows(s->q_pairs, s->q_rows, QUERIES, plan->dn);
    interleave_rows(s->dout_pairs, s->dout_rows, QUERIES, plan->dn);
#endif
}

static void backward_block(const fsdpc_attention_args *x, const attention_plan *plan, size_t b,
                           size_t h, size_t q0, const backward_scratch *s)
{
    size_t queries = fsdpc_min_size(x->tokens_q - q0, QUERIES);
    size_t visible = fsdpc_attention_visible(x, q0 + queries - 1);
    alignas(64) gradient_state state;
    load_gradient_state(x, b, h, q0, &state);
    pack_queries(x, plan, b, h, q0, s);
    bool begun = false; /* dq already holds a sum */
    for (size_t k0 = first_block(x, q0); k0 < visible; k0 += KEYS) {
        key_block block = next_keys(x, q0, k0, visible);
        if (x->mask && !load_mask(x, b, h, q0, k0, block.keys, s->bias))
            continue;
        gemm_scores(plan, block, s->k_rows, s->q_columns, s->scores);
        gemm_scores(plan, block, s->v_rows, s->dout_columns, s->dscores);
        if (x->mask)
            apply_mask(s->bias, state.m, block.keys, plan->c, s->scores);
        hide_scores(x, q0, k0, block.keys, s->scores);
#if ATTENTION_PAIR == 2
        make_gradients(&state, s->scores, s->dscores, block.keys, plan->left, s->p_rows, s->ds_rows,
                       s->ds_pairs);
#else
        make_gradients(&state, s->scores, s->dscores, block.keys, plan->left);
#endif
        gemm_by_key(plan, block, s->p_rows, s->dout_pairs, s->dv);
        gemm_by_key(plan, block, s->ds_rows, s->q_pairs, s->dk);
        gemm_summed(plan, block, s->k_summed, s->ds_pairs, s->dq, begun);
        begun = true;
    }
    if (!begun)
        memset(s->dq, 0, plan->out_rows * QUERIES * sizeof *s->dq);
    alignas(64) float factor[QUERIES];
    for (int i = 0; i < QUERIES; i++)
        factor[i] = (float)x->scale;
    write_lanes(x->dq, offset_of(x->stride_q, b, q0, h), x->stride_q[1], s->dq, factor, queries,
                x->dim, x->dtype);
}

static void backward(const fsdpc_attention_args *x, size_t b, size_t kv_head, void *scratch)
{
    attention_plan plan = make_plan(x);
    backward_scratch s;
    carve_backward(x, scratch, &s);
    size_t k_at = offset_of(x->stride_k, b, 0, kv_head),
           v_at = offset_of(x->stride_v, b, 0, kv_head);
    gemm_begin();
    pack_rows(s.k_rows, plan.dn, x->k, k_at, x->stride_k[1], x->tokens_k, plan.keys, x->dim,
              x->dtype);
    pack_rows(s.v_rows, plan.dn, x->v, v_at, x->stride_v[1], x->tokens_k, plan.keys, x->dim,
              x->dtype);
#if ATTENTION_PAIR == 2
    pack_summed(&plan, s.k_summed, s.k_rows, plan.keys, s.temporary);
#endif
    memset(s.dk, 0, plan.keys * plan.dn * sizeof *s.dk);
    memset(s.dv, 0, plan.keys * plan.dn * sizeof *s.dv);
    for (size_t h = kv_head * plan.group; h < (kv_head + 1) * plan.group; h++)
        for (size_t q0 = 0; q0 < x->tokens_q; q0 += QUERIES)
            backward_block(x, &plan, b, h, q0, &s);
    gemm_end();
    write_rows(x->dk, k_at, x->stride_k[1], s.dk, plan.dn, (float)x->scale, x->tokens_k, x->dim,
               x->dtype);
    write_rows(x->dv, v_at, x->stride_v[1], s.dv, plan.dn, 1, x->tokens_k, x->dim, x->dtype);
}

const fsdpc_attention_kernels ATTENTION_KERNELS = {
    .name = ATTENTION_NAME,
    .forward_bytes = forward_bytes,
    .forward = forward,
    .backward_bytes = backward_bytes,
    .backward = backward,
};

#endif
