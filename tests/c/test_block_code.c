/* Block codes against a definition without bit tricks; coded steps against fp32 steps of what their
 * states decode to; on every path, in any parts. */
#include "test_flat_common.h"

enum { MOST = 64 * 320, MAX_BLOCKS = MOST };

static const size_t rows[] = {64, 100, 256, 320, 515};
enum { ROWS = sizeof rows / sizeof rows[0] };

/* The inverse of R (block_code.h): log2(x) between powers of 2 is a straight line. */
static double root_of(double x)
{
    int exponent;
    double mantissa = frexp(x, &exponent); /* [0.5, 1) */
    double log = (exponent - 1 + (2 * mantissa - 1)) / 4, whole = floor(log);
    return ldexp(1 + (log - whole), (int)whole);
}

static double power_of(double root)
{
    int exponent;
    double mantissa = frexp(root, &exponent);
    double log = (exponent - 1 + (2 * mantissa - 1)) * 4, whole = floor(log);
    return ldexp(1 + (log - whole), (int)whole);
}

static void check_codes(const fsdpc_code_args *a)
{
    const double levels = a->code == FSDPC_CODE_ROOT8 ? 127 : 255;
    size_t block = 0;
    for (size_t at = 0, n; at < a->numel; at += n, block++) {
        size_t left = a->row - at % a->row;
        n = left < FSDPC_CODE_BLOCK ? left : FSDPC_CODE_BLOCK;
        float most = 0;
        for (size_t i = at; i < at + n; i++)
            most = fmaxf(most, fabsf(a->values[i]));
        CHECK(a->maxima[block] == (most < 0x1p-120f ? 0 : most));
        for (size_t i = at; i < at + n && most >= 0x1p-120f; i++) {
            double share = fabs((double)a->values[i]) / (double)most;
            double q = share > 0 ? levels * root_of(share) : 0;
            int got = a->code == FSDPC_CODE_ROOT8 ? (int8_t)a->codes[i] : a->codes[i];
            double wanted =
                a->code == FSDPC_CODE_ROOT8 ? copysign(q, (double)a->values[i]) : fmax(q, 1);
            CHECK_NOTE(fabs(got - wanted) < 0.5001, "%g of %g: level %d, not %g",
                       (double)a->values[i], (double)most, got, wanted);
        }
    }
}

static void check_decoded(const fsdpc_code_args *a, const float *decoded)
{
    const double levels = a->code == FSDPC_CODE_ROOT8 ? 127 : 255;
    for (size_t i = 0; i < a->numel; i++) {
        size_t in_row = i % a->row;
        size_t block = i / a->row * fsdpc_code_blocks(a->row, a->row) + in_row / FSDPC_CODE_BLOCK;
        int q = a->code == FSDPC_CODE_ROOT8 ? (int8_t)a->codes[i] : a->codes[i];
        double wanted = q == 0 ? 0 : power_of(abs(q) / levels) * (double)a->maxima[block];
        wanted = q < 0 ? -wanted : wanted;
        CHECK_NOTE(fabs((double)decoded[i] - wanted) <= 2e-6 * fabs(wanted), "level %d: %g, not %g",
                   q, (double)decoded[i], wanted);
    }
}

/* ---- codes of messages ---- */

/* Returns the number that a byte stands for, as a share of the scale. */
static double share_of(fsdpc_code code, uint8_t byte)
{
    if (code != FSDPC_CODE_FP8)
        return (int8_t)byte / (code == FSDPC_CODE_INT8 ? 127.0 : 7.0);
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    double magnitude = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa, -9);
    return (byte & 0x80 ? -magnitude : magnitude) / 448;
}

/* Returns the smallest distance of a share to any level. */
static double nearest(fsdpc_code code, double share)
{
    double least = 1;
    for (int byte = 0; byte < 256; byte++) {
        bool is_level = code == FSDPC_CODE_INT8   ? byte != 128
                        : code == FSDPC_CODE_INT4 ? abs((int8_t)byte) <= 7
                                                  : (byte & 0x7f) != 0x7f;
        if (is_level)
            least = fmin(least, fabs(share - share_of(code, (uint8_t)byte)));
    }
    return least;
}

static void check_linear(const fsdpc_code_args *a, const float *decoded)
{
    size_t block = 0;
    for (size_t at = 0, n; at < a->numel; at += n, block++) {
        size_t left = a->row - at % a->row, most_n = fsdpc_code_block(a->code);
        float most = 0, scale = a->maxima[block];
        n = left < most_n ? left : most_n;
        for (size_t i = at; i < at + n; i++)
            most = fmaxf(most, fabsf(a->values[i]));
        CHECK(most < 0x1p-120f ? scale == 0 : scale >= most && scale <= most * (1 + 0x1p-15f));
        for (size_t i = at; i < at + n; i += i % 16 ? 7 : 1) {
            double share = scale > 0 ? (double)a->values[i] / (double)scale : 0;
            double stands_for = share_of(a->code, a->codes[i]);
            CHECK_NOTE(fabs(share - stands_for) <= nearest(a->code, share) + 1e-7,
                       "%g of %g is byte %d", (double)a->values[i], (double)scale, a->codes[i]);
            CHECK(fabsf(decoded[i] - (float)(stands_for * (double)scale)) <=
                  0x1p-23f * fabsf(decoded[i]));
            CHECK(fabsf(a->values[i]) < most || scale == 0 || fabsf(decoded[i]) == scale);
        }
    }
}

static void round_through(float *values, size_t numel, fsdpc_dtype dtype)
{
    for (size_t i = 0; i < numel; i++)
        values[i] = dtype == FSDPC_BF16  ? fsdpc_bf16_to_f32(fsdpc_f32_to_bf16(values[i]))
                    : dtype == FSDPC_F16 ? fsdpc_f16_to_f32(fsdpc_f32_to_f16(values[i]))
                                         : values[i];
}

/* What was decoded, and perhaps rounded, is encoded and decoded to the same numbers, from any
 * magnitude on. */
static void test_linear(rig *r, const rig *portable, fsdpc_code code, size_t row, fsdpc_dtype dtype)
{
    const float magnitudes[] = {1, 0x1p-110f, 0x1p100f, 3e-7f};
    size_t numel = MOST / row * row;
    float *values = test_alloc(MOST * sizeof *values), *once = test_alloc(MOST * sizeof *once);
    float *scales = test_alloc(MAX_BLOCKS * sizeof *scales),
          *other = test_alloc(sizeof(float) * MOST);
    uint8_t *codes = test_alloc(MOST), *others = test_alloc(MOST);
    for (int m = 0; m < (dtype == FSDPC_F16 ? 1 : 4); m++) {
        fill_random(values, numel, FSDPC_F32, row + 1);
        for (size_t i = 0; i < numel; i++)
            values[i] *= magnitudes[dtype == FSDPC_F16 ? 3 : m] * (i % 7 ? 1 : 1e-3f);
        for (size_t i = 0; i < row; i++)
            values[i] = i % 2 ? 0 : 0x1p-125f;
        round_through(values, numel, dtype);
        fsdpc_code_args a = {code, values, codes, scales, numel, row};
        fsdpc_code_args b = {code, values, others, other, numel, row};
        CHECK_OK(r->ops->encode(&a, &r->stream));
        CHECK_OK(portable->ops->encode(&b, (fsdpc_stream *)&portable->stream));
        CHECK(memcmp(codes, others, numel) == 0);
        a.values = once;
        CHECK_OK(r->ops->decode(&a, &r->stream));
        a.values = values;
        check_linear(&a, once);
        round_through(once, numel, dtype);
        a.values = once;
        CHECK_OK(r->ops->encode(&a, &r->stream));
        a.values = other;
        CHECK_OK(r->ops->decode(&a, &r->stream));
        round_through(other, numel, dtype);
        CHECK(memcmp(once, other, numel * sizeof *once) == 0);
    }
    free(values), free(once), free(scales), free(other), free(codes), free(others);
}

/* No element of a block with a NaN or an infinity is finite afterwards. */
static void test_linear_nonfinite(rig *r, fsdpc_code code)
{
    float values[300], scales[8];
    uint8_t codes[300];
    for (int kind = 0; kind < 3; kind++) {
        fill_random(values, 300, FSDPC_F32, 5);
        values[17] = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
        fsdpc_code_args a = {code, values, codes, scales, 300, 300};
        CHECK_OK(r->ops->encode(&a, &r->stream));
        CHECK_OK(r->ops->decode(&a, &r->stream));
        for (size_t i = 0; i < 300; i++)
            CHECK(isfinite(values[i]) == (i >= fsdpc_code_block(code)));
    }
}

typedef struct coded {
    float values[MOST], maxima[MAX_BLOCKS];
    uint8_t codes[MOST];
} coded;

static void test_codes(rig *r, const rig *portable, fsdpc_code code, size_t row)
{
    coded *mine = test_alloc(sizeof *mine), *other = test_alloc(sizeof *other);
    float *again = test_alloc(MOST * sizeof *again);
    size_t numel = MOST / row * row;
    fill_random(mine->values, numel, FSDPC_F32, row);
    for (size_t i = 0; i < numel && code == FSDPC_CODE_UROOT8; i++)
        mine->values[i] *= mine->values[i];
    for (size_t i = 0; i < row; i++) /* blocks of zeros, and of numbers that count as zeros */
        mine->values[i] = i % 2 ? 0 : 0x1p-125f;
    memcpy(other, mine, sizeof *mine);
    fsdpc_code_args a = {code, mine->values, mine->codes, mine->maxima, numel, row};
    fsdpc_code_args b = {code, other->values, other->codes, other->maxima, numel, row};
    CHECK_OK(r->ops->encode(&a, &r->stream));
    CHECK_OK(portable->ops->encode(&b, (fsdpc_stream *)&portable->stream));
    CHECK(memcmp(mine, other, sizeof *mine) == 0);
    check_codes(&a);
    a.values = again;
    CHECK_OK(r->ops->decode(&a, &r->stream));
    check_decoded(&a, again);
    b.values = again; /* what is decoded has the same codes */
    CHECK_OK(r->ops->encode(&b, &r->stream));
    CHECK(memcmp(mine->codes, other->codes, sizeof mine->codes) == 0);
    CHECK(memcmp(mine->maxima, other->maxima, sizeof mine->maxima) == 0);
    free(mine);
    free(other);
    free(again);
}

/* ---- steps ---- */

typedef struct optimizer {
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
} optimizer;

static const optimizer optimizers[] = {
    {FSDPC_OPTIM_ADAMW,
     {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1}},
    {FSDPC_OPTIM_SGD, {.lr = 1e-2, .momentum = 0.9}},
    {FSDPC_OPTIM_LION, {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99}},
    {FSDPC_OPTIM_RMSPROP, {.lr = 1e-2, .alpha = 0.9, .eps = 1e-8, .momentum = 0.5}},
};

typedef struct memory {
    float param[MOST], grad[MOST], copy_in[MOST];
    coded states[2];
} memory;

static fsdpc_step_args args_for(memory *m, const optimizer *o, size_t numel, size_t row)
{
    return (fsdpc_step_args){
        .kind = o->kind,
        .hyper = o->hyper,
        .param = m->param,
        .grad = m->grad,
        .states = {m->states[0].codes, m->states[1].codes},
        .state_dtype = FSDPC_U8,
        .maxima = {m->states[0].maxima, m->states[1].maxima},
        .code_row = row,
        .copy_in = m->copy_in,
        .numel = numel,
        .grad_scale = 0.5,
        .step = 1,
        .copy_gradient = true,
    };
}

/* Decodes, steps in fp32, encodes. */
static void step_apart(rig *r, const fsdpc_step_args *args, memory *m)
{
    fsdpc_step_args a = *args;
    a.state_dtype = FSDPC_F32;
    for (int back = 0; back < 2; back++) {
        for (int s = 0; s < fsdpc_optim_states(a.kind, &a.hyper); s++) {
            coded *c = &m->states[s];
            fsdpc_code_args code = {fsdpc_state_code(a.kind, &a.hyper, s),
                                    c->values,
                                    c->codes,
                                    c->maxima,
                                    a.numel,
                                    a.code_row};
            CHECK_OK(back ? r->ops->encode(&code, &r->stream) : r->ops->decode(&code, &r->stream));
            a.states[s] = c->values;
        }
        if (!back)
            CHECK_OK(r->ops->step(&a, &r->stream));
    }
}

static void step_in_rows(rig *r, const fsdpc_step_args *whole)
{
    uint64_t random = whole->numel;
    size_t row = whole->code_row, left = whole->numel / row, at = 0;
    while (left > 0) {
        size_t take = 1 + random_bits(&random) % left;
        fsdpc_step_args a = *whole;
        a.param = (float *)a.param + at;
        a.grad = (const float *)a.grad + at;
        a.copy_in = (float *)a.copy_in + at;
        for (int s = 0; s < 2; s++) {
            a.states[s] = (uint8_t *)a.states[s] + at;
            a.maxima[s] += fsdpc_code_blocks(at, row);
        }
        a.numel = take * row;
        CHECK_OK(r->ops->step(&a, &r->stream));
        at += take * row;
        left -= take;
    }
}

static void test_steps(rig *r, rig *portable, const optimizer *o, size_t row, fsdpc_dtype dtype)
{
    memory *m[3];
    size_t numel = MOST / row * row;
    for (int k = 0; k < 3; k++) {
        m[k] = test_alloc(sizeof *m[k]);
        fill_random(m[k]->param, numel, dtype, 1);
    }
    for (int step = 1; step <= 3; step++) {
        for (int k = 0; k < 3; k++) {
            fill_random(m[k]->grad, numel, dtype, (uint64_t)step);
            fsdpc_step_args a = args_for(m[k], o, numel, row);
            a.param_dtype = a.grad_dtype = a.copy_in_dtype = dtype;
            a.step = step, a.copy_gradient = step == 1;
            if (k == 0 && dtype == FSDPC_F32)
                step_in_rows(r, &a);
            else if (k == 1)
                step_apart(portable, &a, m[k]);
            else
                CHECK_OK(r->ops->step(&a, &r->stream));
        }
    }
    for (int k = 1; k < 3; k++) {
        CHECK(memcmp(m[0]->param, m[k]->param, sizeof m[0]->param) == 0);
        CHECK(memcmp(m[0]->copy_in, m[k]->copy_in, sizeof m[0]->copy_in) == 0);
        for (int s = 0; s < 2; s++) {
            const coded *c = &m[0]->states[s], *d = &m[k]->states[s];
            CHECK(memcmp(c->codes, d->codes, sizeof c->codes) == 0);
            CHECK(memcmp(c->maxima, d->maxima, sizeof c->maxima) == 0);
        }
    }
    for (int k = 0; k < 3; k++)
        free(m[k]);
}

static void test_nonfinite(rig *r)
{
    memory *m = test_alloc(sizeof *m);
    fsdpc_step_args a = args_for(m, &optimizers[0], 512, 256);
    for (size_t i = 0; i < 512; i++)
        m->grad[i] = i == 3 ? NAN : 1;
    CHECK_OK(r->ops->step(&a, &r->stream));
    CHECK(isnan(m->states[0].maxima[0]) && isfinite(m->states[0].maxima[1]));
    a.step = 2;
    m->grad[3] = 1;
    CHECK_OK(r->ops->step(&a, &r->stream));
    for (size_t i = 0; i < 512; i++) /* of the whole block: its numbers are lost */
        CHECK(isnan(m->param[i]) == (i < 256));
    free(m);
}

static void test_refused(rig *r)
{
    memory *m = test_alloc(sizeof *m);
    fsdpc_step_args a = args_for(m, &optimizers[0], 512, 200);
    CHECK_FAILS(r->ops->step(&a, &r->stream), FSDPC_ERR_VALUE, "not whole rows of 200");
    a.code_row = 256;
    a.hyper.amsgrad = true;
    CHECK_FAILS(r->ops->step(&a, &r->stream), FSDPC_ERR_DTYPE, "uint8");
    free(m);
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    rig portable;
    rig_init(&portable, FSDPC_ISA_PORTABLE, 1);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        for (int i = 0; i < ROWS; i++) {
            test_codes(&r, &portable, FSDPC_CODE_ROOT8, rows[i]);
            test_codes(&r, &portable, FSDPC_CODE_UROOT8, rows[i]);
            for (fsdpc_code code = FSDPC_CODE_INT8; code <= FSDPC_CODE_INT4; code++) {
                test_linear(&r, &portable, code, rows[i], FSDPC_F32);
                test_linear(&r, &portable, code, rows[i], FSDPC_BF16);
                test_linear(&r, &portable, code, rows[i], FSDPC_F16);
                test_linear_nonfinite(&r, code);
            }
            for (size_t o = 0; o < sizeof optimizers / sizeof optimizers[0]; o++) {
                test_steps(&r, &portable, &optimizers[o], rows[i], FSDPC_F32);
                test_steps(&r, &portable, &optimizers[o], rows[i], FSDPC_BF16);
            }
        }
        test_nonfinite(&r);
        test_refused(&r);
        rig_fini(&r);
    }
    rig_fini(&portable);
    return check_report("block_code");
}
