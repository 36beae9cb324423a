/* Single-pass optimizer steps, which read the gradient, update parameter and states, and write the
 * parameter buffer.
 *
 * Included by flat_cpu_body.h. The rules (step_rules.h) are computed in fp32 vectors, with scalars
 * that are computed once in fp64 and rounded to fp32. The common case in training has specialised
 * loops (step_run): fp32 states, fp32 or bf16 parameters, and no parameter buffer or one in fp32 or
 * bf16. All other cases are processed block by block in L1 (step_blocks). Dtypes other than fp32
 * are widened into buffers, stepped there, and written back, so a step is still one pass over
 * memory.
 *
 * The value copied in is the cast of the stored (rounded) parameter, so parameter buffer and master
 * are `equal` directly after the step.
 */

typedef struct step_scalars {
#define X(field) float field;
    FSDPC_STEP_SCALARS(X)
#undef X
    bool copy_gradient, nesterov;
} step_scalars;

static step_scalars step_prepare(const fsdpc_step_args *a)
{
    fsdpc_step_scalars k = fsdpc_step_prepare(a);
    if (a->grad_scale_at)
        k.grad_scale *= *a->grad_scale_at;
    return (step_scalars){
#define X(field) .field = (float)k.field,
        FSDPC_STEP_SCALARS(X)
#undef X
            .copy_gradient = k.copy_gradient,
        .nesterov = k.nesterov,
    };
}

#define STEP_FN FSDPC_INLINE
#define STEP_REAL float
#define STEP_VALUE fsdpc_vf
#define STEP_SCALARS step_scalars

/* Fused on every path: if the compiler's baseline lacks the instruction, the equally exact libm
 * function is called out of line. */
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
STEP_FN fsdpc_vf step_fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    return fsdpc_vf_fma(a, b, c);
}
#else
static __attribute__((noinline)) fsdpc_vf step_fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    for (int i = 0; i < FSDPC_LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

STEP_FN fsdpc_vf step_fused_by(fsdpc_vf a, float b, fsdpc_vf c)
{
    return step_fused(a, fsdpc_vf_splat(b), c);
}

STEP_FN fsdpc_vf step_root(fsdpc_vf a)
{
    return fsdpc_vf_sqrt(a);
}

STEP_FN fsdpc_vf step_sign(fsdpc_vf a)
{
    fsdpc_vf sign = fsdpc_vf_copysign(fsdpc_vf_splat(1.0f), a);
    return fsdpc_vf_select((a == 0.0f) | (a != a), a, sign);
}

STEP_FN fsdpc_vf step_most(fsdpc_vf a, fsdpc_vf b)
{
    return fsdpc_vf_select((a > b) | (a != a), a, b);
}

#include "ops/step_rules.h"

typedef struct step_memory {
    void *param;
    const void *grad;
    float *states[FSDPC_OPTIM_MAX_STATES];
    void *copy_in;
} step_memory;

typedef struct step_part_args {
    const fsdpc_step_args *a;
    step_scalars k;
    fsdpc_step_rule rule;
    bool stream_copy_in;
} step_part_args;

/* Parameters of a vector step, all compile-time constants; NO_COPY_IN marks a step without a
 * parameter buffer. */
enum { NO_COPY_IN = FSDPC_DTYPE_COUNT };

typedef struct step_kind {
    fsdpc_step_rule rule;
    fsdpc_dtype param, grad;
    int copy_in;
    bool stream_copy_in; /* write the parameter buffer past the cache */
} step_kind;

/* Steps elements i .. i + n - 1 and returns their stored values, which are written to the parameter
 * buffer. */
FSDPC_INLINE fsdpc_vf step_vector(const step_memory *at, const step_scalars *k, size_t i,
                                  step_kind kind, size_t n)
{
    const int n_states = fsdpc_rule_states(kind.rule);
    fsdpc_vf s[FSDPC_OPTIM_MAX_STATES] = {0};
    for (int state = 0; state < n_states; state++)
        s[state] = fsdpc_vf_load_n(at->states[state] + i, n);
    fsdpc_vf p = step_by_rule(kind.rule, k, fsdpc_vf_load_as_n(at->param, i, kind.param, n),
                              fsdpc_vf_load_as_n(at->grad, i, kind.grad, n), s);
    for (int state = 0; state < n_states; state++)
        fsdpc_vf_store_n(at->states[state] + i, s[state], n);
    if (kind.rule != FSDPC_RULE_AVERAGE)
        fsdpc_vf_store_as_n(at->param, i, kind.param, p, n);
    return kind.param == FSDPC_BF16 ? fsdpc_vf_from_bf16(fsdpc_vf_to_bf16(p)) : p;
}

FSDPC_INLINE void step_run(const step_memory *memory, const step_scalars *scalars, size_t begin,
                           size_t end, step_kind kind)
{
    const step_memory at = *memory;
    const step_scalars k = *scalars;
    const fsdpc_dtype copy_in = (fsdpc_dtype)(kind.copy_in == NO_COPY_IN ? 0 : kind.copy_in);
    size_t i = begin;
    for (; i + 2 * FSDPC_LANES <= end; i += 2 * FSDPC_LANES) {
        fsdpc_vf low = step_vector(&at, &k, i, kind, FSDPC_LANES);
        fsdpc_vf high = step_vector(&at, &k, i + FSDPC_LANES, kind, FSDPC_LANES);
        if (kind.copy_in != NO_COPY_IN)
            store_pair(at.copy_in, i, copy_in, low, high, kind.stream_copy_in);
    }
    if (kind.stream_copy_in)
        stream_end();
    for (size_t left; i < end; i += left) {
        left = fsdpc_min_size(FSDPC_LANES, end - i);
        fsdpc_vf p = step_vector(&at, &k, i, kind, left);
        if (kind.copy_in != NO_COPY_IN)
            fsdpc_vf_store_as_n(at.copy_in, i, copy_in, p, left);
    }
}

/* -- common combinations ----------------------------------------------------------------------- */

/* X(rule, parameter, gradient) */
#define STEP_RUNS(X)                                                                               \
    X(FSDPC_RULE_ADAM, F32, F32)                                                                   \
    X(FSDPC_RULE_ADAM, F32, BF16)                                                                  \
    X(FSDPC_RULE_ADAM, BF16, F32)                                                                  \
    X(FSDPC_RULE_ADAM, BF16, BF16)                                                                 \
    X(FSDPC_RULE_SGD, F32, F32)                                                                    \
    X(FSDPC_RULE_SGD, BF16, F32)                                                                   \
    X(FSDPC_RULE_MOMENTUM, F32, F32)                                                               \
    X(FSDPC_RULE_MOMENTUM, BF16, F32)                                                              \
    X(FSDPC_RULE_LION, F32, F32)                                                                   \
    X(FSDPC_RULE_LION, BF16, F32)

#define STEP_CASE(rule, param, grad)                                                               \
    ((int)(rule)*FSDPC_DTYPE_COUNT * FSDPC_DTYPE_COUNT + FLAT_PAIR(param, grad))

static bool step_has_run(const fsdpc_step_args *a, fsdpc_step_rule rule)
{
    if (a->state_dtype != FSDPC_F32 && fsdpc_rule_states(rule) > 0)
        return false;
    if (a->copy_in && a->copy_in_dtype != FSDPC_F32 && a->copy_in_dtype != FSDPC_BF16)
        return false;
    switch (STEP_CASE(rule, a->param_dtype, a->grad_dtype)) {
#define X(R, P, G) case STEP_CASE(R, FSDPC_##P, FSDPC_##G):
        STEP_RUNS(X)
#undef X
        return true;
    default:
        return false;
    }
}

FSDPC_INLINE void step_copied_in(const step_part_args *args, size_t begin, size_t end,
                                 fsdpc_step_rule rule, fsdpc_dtype param, fsdpc_dtype grad)
{
    const fsdpc_step_args *a = args->a;
    const step_memory at = {a->param, a->grad, {a->states[0], a->states[1]}, a->copy_in};
    if (!a->copy_in) {
        step_run(&at, &args->k, begin, end, (step_kind){rule, param, grad, NO_COPY_IN, false});
    } else if (a->copy_in_dtype == FSDPC_F32 && args->stream_copy_in) {
        step_run(&at, &args->k, begin, end, (step_kind){rule, param, grad, FSDPC_F32, true});
    } else if (a->copy_in_dtype == FSDPC_F32) {
        step_run(&at, &args->k, begin, end, (step_kind){rule, param, grad, FSDPC_F32, false});
    } else if (args->stream_copy_in) {
        step_run(&at, &args->k, begin, end, (step_kind){rule, param, grad, FSDPC_BF16, true});
    } else {
        step_run(&at, &args->k, begin, end, (step_kind){rule, param, grad, FSDPC_BF16, false});
    }
}

static void step_run_part(void *arg, size_t begin, size_t end)
{
    const step_part_args *args = arg;
    switch (STEP_CASE(args->rule, args->a->param_dtype, args->a->grad_dtype)) {
#define X(R, P, G)                                                                                 \
    case STEP_CASE(R, FSDPC_##P, FSDPC_##G):                                                       \
        step_copied_in(args, begin, end, R, FSDPC_##P, FSDPC_##G);                                 \
        break;
        STEP_RUNS(X)
#undef X
    }
}

/* -- everything else, block by block ----------------------------------------------------------- */

enum { STEP_BLOCK = 512 }; /* six buffers of it fill half of L1 */

/* Returns an array's elements, beginning at `at`, as fp32, either in place or as a copy in
 * `buffer`. */
static float *widened(float *buffer, const void *base, fsdpc_dtype dtype, size_t at, size_t n)
{
    if (dtype == FSDPC_F32)
        return (float *)fsdpc_flat_at(base, at, dtype);
    cast_range(buffer, FSDPC_F32, fsdpc_flat_at(base, at, dtype), dtype, n, false);
    return buffer;
}

static void step_block(fsdpc_step_rule rule, const step_memory *at, const step_scalars *k, size_t n)
{
    switch (rule) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        step_run(at, k, 0, n,                                                                      \
                 (step_kind){FSDPC_RULE_##NAME, FSDPC_F32, FSDPC_F32, NO_COPY_IN, false});         \
        break;
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
}

/* The low half of an element's random word is used to round the first state, and the high half to
 * round the other states. amsgrad's maximum is v or the stored maximum, so it becomes v's rounded
 * value or stays unchanged. */
static void store_rounded(const fsdpc_step_args *a, int n_states, float (*states)[STEP_BLOCK],
                          size_t at, size_t n)
{
    uint32_t words[STEP_BLOCK + 2 * PHILOX_WORDS];
    uint64_t stream = (uint64_t)a->number << 32 | (uint32_t)a->step;
    const uint32_t *random = random_words(words, a->seed, stream, a->first + at, n);
    for (int s = 0; s < n_states; s++) {
        round_stochastically(states[s], random, s == 0 ? 0 : 16, n);
        cast_range(fsdpc_flat_at(a->states[s], at, FSDPC_BF16), FSDPC_BF16, states[s], FSDPC_F32, n,
                   false);
    }
}

static void step_blocks_part(void *arg, size_t begin, size_t end)
{
    const step_part_args *args = arg;
    const fsdpc_step_args *a = args->a;
    const int n_states = fsdpc_rule_states(args->rule);
    float param[STEP_BLOCK], grad[STEP_BLOCK], states[FSDPC_OPTIM_MAX_STATES][STEP_BLOCK];
    for (size_t at = begin, n; at < end; at += n) {
        n = fsdpc_min_size(STEP_BLOCK, end - at);
        step_memory memory = {
            .param = widened(param, a->param, a->param_dtype, at, n),
            .grad = widened(grad, a->grad, a->grad_dtype, at, n),
        };
        for (int s = 0; s < n_states; s++)
            memory.states[s] = widened(states[s], a->states[s], a->state_dtype, at, n);
        step_block(args->rule, &memory, &args->k, n);
        void *stored = fsdpc_flat_at(a->param, at, a->param_dtype);
        if (a->param_dtype != FSDPC_F32)
            cast_range(stored, a->param_dtype, param, FSDPC_F32, n, false);
        if (a->copy_in)
            cast_range(fsdpc_flat_at(a->copy_in, at, a->copy_in_dtype), a->copy_in_dtype, stored,
                       a->param_dtype, n, false);
        if (n_states > 0 && a->state_dtype == FSDPC_BF16)
            store_rounded(a, n_states, states, at, n);
    }
}

#include "ops/block_code_body.h"
#include "ops/flat_step_coded_body.h"

static void step_f64_part(void *arg, size_t begin, size_t end)
{
    fsdpc_flat_step_f64(((const step_part_args *)arg)->a, begin, end);
}

static fsdpc_status flat_step(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_step(a));
    step_part_args args = {a, step_prepare(a), fsdpc_step_rule_of(a),
                           a->copy_in && can_stream(a->copy_in, a->numel)};
    fsdpc_flat_range_fn part = step_blocks_part;
    size_t unit = 64;
    if (a->param_dtype == FSDPC_F64)
        part = step_f64_part;
    else if (a->state_dtype == FSDPC_U8 && fsdpc_rule_states(args.rule) > 0)
        part = step_coded_part, unit = a->code_row;
    else if (step_has_run(a, args.rule))
        part = step_run_part;
    fsdpc_flat_split(stream, a->numel, unit, part, &args);
    return FSDPC_OK;
}
