/* Attention against a plain double-precision reference, over shapes, layouts, dtypes, instruction
 * sets and thread counts.
 *
 * Tolerances are absolute, as a part of the largest value of the reference (or 1, if that is more):
 * sums of products cancel, so elements near zero carry the error of their neighbours. F32 2e-5:
 * some 300 rounded additions of 6e-8 and exponents of about 1e1. BF16 and F16: half a unit of
 * rounding of the result, 2^-9 (2^-12), plus for BF16 the rounding of P, dS and out before they are
 * used: 2^-6 in all (seen: 0.6 of it).
 */
#include "ops/attention.h"

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "base/size.h"
#include "check.h"

/* LARGE: the least finite number where a query should not look, and rows of nothing else. */
typedef enum mask_kind { NO_MASK, BOOL_MASK, ADDED_MASK, LARGE_MASK } mask_kind;

typedef struct test_case {
    size_t batch, tokens_q, tokens_k, heads, kv_heads, dim;
    bool causal, heads_first; /* (B, H, T, D) in memory, else (B, T, H, D) with gaps */
    double scale;
    fsdpc_dtype dtype;
    size_t window;
    mask_kind mask;
    size_t mask_shape[4]; /* B, H, Tq, Tk, or 1 */
} test_case;

enum { Q, K, V, OUT, DOUT, DQ, DK, DV, TENSORS };

typedef struct test_data {
    fsdpc_attention_args args;
    size_t numel[TENSORS];
    void *raw[TENSORS];             /* dtype, strided */
    double *exact[TENSORS];         /* same places */
    double *exact_lse, *exact_mask; /* what is added */
} test_data;

static double get(const void *base, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F64:
        return ((const double *)base)[i];
    case FSDPC_F32:
        return ((const float *)base)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)base)[i]);
    default:
        return fsdpc_f16_to_f32(((const uint16_t *)base)[i]);
    }
}

static void put(void *base, size_t i, fsdpc_dtype dtype, double x)
{
    if (dtype == FSDPC_F64)
        ((double *)base)[i] = x;
    else if (dtype == FSDPC_F32)
        ((float *)base)[i] = (float)x;
    else
        ((uint16_t *)base)[i] =
            dtype == FSDPC_BF16 ? fsdpc_f32_to_bf16((float)x) : fsdpc_f32_to_f16((float)x);
}

/* About normal: the sum of four uniform numbers. */
static double noise(uint64_t *state)
{
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(*state >> 40) / 16777216.0 - 0.5;
    }
    return sum * 1.7;
}

static size_t set_strides(const test_case *c, size_t tokens, size_t heads, size_t stride[3])
{
    size_t gap = c->heads_first ? 0 : 3; /* rows that do not touch, so that overruns show */
    stride[1] = c->heads_first ? c->dim : heads * (c->dim + gap);
    stride[2] = c->heads_first ? tokens * c->dim : c->dim + gap;
    stride[0] = tokens * heads * (c->dim + gap);
    return c->batch * stride[0];
}

static double *row(double *base, const size_t stride[3], size_t b, size_t t, size_t h)
{
    return base + b * stride[0] + t * stride[1] + h * stride[2];
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* One query of the reference; backward uses its own out, unrounded. */
static void reference_row(const fsdpc_attention_args *x, const double *bias, double *const e[],
                          double *lse, double *p, size_t b, size_t h, size_t t)
{
    size_t kv = h / (x->heads / x->kv_heads), n = 0;
    double *q = row(e[Q], x->stride_q, b, t, h), *out = row(e[OUT], x->stride_out, b, t, h);
    double *dout = row(e[DOUT], x->stride_out, b, t, h), *dq = row(e[DQ], x->stride_q, b, t, h);
    double top = -INFINITY, sum = 0;
    for (size_t j = 0; j < x->tokens_k; j++) {
        long behind = (long)t + (long)x->tokens_k - (long)x->tokens_q - (long)j;
        if (x->causal && behind < 0)
            break;
        size_t at = b * x->stride_mask[0] + h * x->stride_mask[1] + t * x->stride_mask[2] +
                    j * x->stride_mask[3];
        bool hidden = (bias && bias[at] == -INFINITY) || (x->window && behind >= (long)x->window);
        p[n] = x->scale * dot(q, row(e[K], x->stride_k, b, j, kv), x->dim);
        p[n] = hidden ? -INFINITY : p[n] + (bias ? bias[at] : 0);
        top = fmax(top, p[n++]);
    }
    for (size_t j = 0; j < n && top > -INFINITY; j++)
        sum += exp(p[j] - top);
    lse[(b * x->heads + h) * x->tokens_q + t] = sum > 0 ? top + log(sum) : -INFINITY;
    for (size_t j = 0; j < n; j++) {
        p[j] = sum > 0 ? exp(p[j] - top) / sum : 0;
        for (size_t i = 0; i < x->dim; i++)
            out[i] += p[j] * row(e[V], x->stride_v, b, j, kv)[i];
    }
    double mean = dot(out, dout, x->dim);
    for (size_t j = 0; j < n; j++) {
        double ds = p[j] * (dot(dout, row(e[V], x->stride_v, b, j, kv), x->dim) - mean) * x->scale;
        for (size_t i = 0; i < x->dim; i++) {
            row(e[DV], x->stride_v, b, j, kv)[i] += p[j] * dout[i];
            row(e[DK], x->stride_k, b, j, kv)[i] += ds * q[i];
            dq[i] += ds * row(e[K], x->stride_k, b, j, kv)[i];
        }
    }
}

static void *checked_calloc(size_t count, size_t bytes)
{
    void *p = calloc(count + 16, bytes);
    if (!p)
        abort();
    return p;
}

/* The mask, half of it seen, one row in five hidden whole, and no query's keys 128 and up of
 * others. */
static void make_mask(test_data *d, const test_case *c, uint64_t *seed)
{
    fsdpc_attention_args *x = &d->args;
    const size_t *shape = c->mask_shape;
    size_t stride = 1;
    for (int i = 4; i-- > 0; stride *= shape[i])
        x->stride_mask[i] = shape[i] == 1 ? 0 : stride;
    bool wide = c->dtype == FSDPC_F64;
    fsdpc_dtype added = wide ? FSDPC_F64 : c->dtype == FSDPC_F16 ? FSDPC_F32 : c->dtype;
    x->mask_dtype = c->mask == BOOL_MASK ? FSDPC_BOOL : added;
    void *mask = checked_calloc(stride, 8);
    d->exact_mask = checked_calloc(stride, sizeof(double));
    double out = c->mask != LARGE_MASK ? -INFINITY : added == FSDPC_BF16 ? -0x1.fep127 : -FLT_MAX;
    for (size_t i = 0; i < stride; i++) {
        size_t key = i % shape[3], query = i / shape[3] % shape[2];
        bool seen = noise(seed) > 0 && query % 5 != 3 && key < 128;
        double bias = !seen ? out : c->mask == ADDED_MASK ? noise(seed) : 0;
        if (c->mask == BOOL_MASK)
            ((uint8_t *)mask)[i] = seen;
        else
            put(mask, i, added, bias);
        d->exact_mask[i] = c->mask == BOOL_MASK ? bias : get(mask, i, added);
    }
    x->mask = mask;
}

static void data_init(test_data *d, const test_case *c, double spread)
{
    memset(d, 0, sizeof *d);
    fsdpc_attention_args *x = &d->args;
    *x = (fsdpc_attention_args){.dtype = c->dtype,
                                .batch = c->batch,
                                .tokens_q = c->tokens_q,
                                .tokens_k = c->tokens_k,
                                .heads = c->heads,
                                .kv_heads = c->kv_heads,
                                .dim = c->dim,
                                .scale = c->scale,
                                .causal = c->causal,
                                .window = c->window};
    d->numel[Q] = d->numel[DQ] = set_strides(c, c->tokens_q, c->heads, x->stride_q);
    d->numel[OUT] = d->numel[DOUT] = set_strides(c, c->tokens_q, c->heads, x->stride_out);
    d->numel[K] = d->numel[DK] = set_strides(c, c->tokens_k, c->kv_heads, x->stride_k);
    d->numel[V] = d->numel[DV] = set_strides(c, c->tokens_k, c->kv_heads, x->stride_v);
    uint64_t seed = c->tokens_q * 31 + c->dim;
    for (int i = 0; i < TENSORS; i++) {
        d->raw[i] = checked_calloc(d->numel[i], fsdpc_dtype_bytes(c->dtype));
        d->exact[i] = checked_calloc(d->numel[i], sizeof(double));
        bool input = i == Q || i == K || i == V || i == DOUT;
        for (size_t n = 0; n < d->numel[i]; n++) {
            put(d->raw[i], n, c->dtype, input ? noise(&seed) * (i == Q ? spread : 1) : NAN);
            d->exact[i][n] = input ? get(d->raw[i], n, c->dtype) : 0;
        }
    }
    if (c->mask != NO_MASK)
        make_mask(d, c, &seed);
    size_t rows = c->batch * c->heads * c->tokens_q;
    d->exact_lse = checked_calloc(rows, sizeof(double));
    x->lse = checked_calloc(2 * rows, sizeof(float));
    x->q = d->raw[Q], x->k = d->raw[K], x->v = d->raw[V], x->out = d->raw[OUT];
    x->dout = d->raw[DOUT], x->dq = d->raw[DQ], x->dk = d->raw[DK], x->dv = d->raw[DV];
    double *p = checked_calloc(c->tokens_k, sizeof *p);
    for (size_t b = 0; b < c->batch; b++)
        for (size_t h = 0; h < c->heads; h++)
            for (size_t t = 0; t < c->tokens_q; t++)
                reference_row(x, d->exact_mask, d->exact, d->exact_lse, p, b, h, t);
    free(p);
}

static void data_fini(test_data *d)
{
    for (int i = 0; i < TENSORS; i++) {
        free(d->raw[i]);
        free(d->exact[i]);
    }
    free(d->exact_lse);
    free(d->exact_mask);
    free((void *)(uintptr_t)d->args.mask);
    free(d->args.lse);
}

static fsdpc_mem *memory;
static fsdpc_team *two_threads;

static void run_both(const fsdpc_attention_args *x, fsdpc_isa isa, fsdpc_team *team)
{
    fsdpc_device device = {.mem = memory, .team = team, .isa = isa};
    fsdpc_stream stream = {.device = &device, .name = "test"};
    CHECK_OK(fsdpc_attention_cpu(x, &stream));
    CHECK_OK(fsdpc_attention_backward_cpu(x, &stream));
}

static double tolerance_of(fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F64:
        return 1e-12;
    case FSDPC_F32:
        return 2e-5;
    case FSDPC_F16:
        return 0x1p-10;
    default:
        return 0x1p-6;
    }
}

static double worst_of[FSDPC_DTYPE_COUNT];

/* Elements inside rows must be close; gaps between rows must be untouched (NaN). */
static void compare(const test_data *d, int i, const size_t stride[3], size_t tokens, size_t heads,
                    const char *what)
{
    static const char *const names[TENSORS] = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"};
    const fsdpc_attention_args *x = &d->args;
    double top = 1, worst = 0;
    size_t wrong = 0, finite = 0;
    for (size_t n = 0; n < d->numel[i]; n++) {
        top = fmax(top, fabs(d->exact[i][n]));
        finite += !isnan(get(d->raw[i], n, x->dtype));
    }
    for (size_t b = 0; b < x->batch; b++)
        for (size_t t = 0; t < tokens; t++)
            for (size_t h = 0; h < heads; h++)
                for (size_t e = 0; e < x->dim; e++) {
                    size_t at = b * stride[0] + t * stride[1] + h * stride[2] + e;
                    double error = fabs(get(d->raw[i], at, x->dtype) - d->exact[i][at]) / top;
                    worst = fmax(worst, error);
                    wrong += !(error <= tolerance_of(x->dtype));
                }
    worst_of[x->dtype] = fmax(worst_of[x->dtype], worst);
    CHECK_NOTE(wrong == 0, "%s %s: %zu wrong, worst %g", what, names[i], wrong, worst);
    CHECK_NOTE(finite == x->batch * tokens * heads * x->dim, "%s %s: wrote beside its rows", what,
               names[i]);
}

static void compare_lse(const test_data *d, const char *what)
{
    const fsdpc_attention_args *x = &d->args;
    double tolerance =
        x->dtype == FSDPC_BF16 ? 2e-5 : 5e-6; /* products of bf16 are exact in fp32 */
    size_t wrong = 0;
    for (size_t i = 0; i < x->batch * x->heads * x->tokens_q; i++) {
        double exact = d->exact_lse[i];
        wrong += exact == -INFINITY
                     ? x->lse[i] != -INFINITY
                     : !(fabs(x->lse[i] - exact) <= tolerance * fmax(1, fabs(exact)));
    }
    CHECK_NOTE(wrong == 0, "%s: %zu of lse wrong", what, wrong);
}

static void try_case(const test_case *c, double spread)
{
    static unsigned cases;
    if (SANITIZED && cases++ % 4) /* it takes 20 times as long there */
        return;
    test_data d;
    data_init(&d, c, spread);
    const fsdpc_attention_args *x = &d.args;
    void *one[TENSORS];
    for (fsdpc_isa isa = 0; isa <= fsdpc_isa_best(); isa++) {
        char what[200];
        snprintf(what, sizeof what,
                 "%s %s B%zu Tq%zu Tk%zu H%zu/%zu D%zu%s%s scale %g window %zu mask %d %zu %zu",
                 fsdpc_isa_name(isa), fsdpc_dtype_name(c->dtype), c->batch, c->tokens_q,
                 c->tokens_k, c->heads, c->kv_heads, c->dim, c->causal ? " causal" : "",
                 c->heads_first ? " BHTD" : " BTHD", c->scale, c->window, (int)c->mask,
                 c->mask_shape[2], c->mask_shape[3]);
        run_both(x, isa, NULL);
        compare(&d, OUT, x->stride_out, x->tokens_q, x->heads, what);
        compare(&d, DQ, x->stride_q, x->tokens_q, x->heads, what);
        compare(&d, DK, x->stride_k, x->tokens_k, x->kv_heads, what);
        compare(&d, DV, x->stride_v, x->tokens_k, x->kv_heads, what);
        if (!x->mask)
            compare_lse(&d, what);
        for (int i = OUT; i < TENSORS; i++) {
            size_t bytes = d.numel[i] * fsdpc_dtype_bytes(c->dtype);
            one[i] = checked_calloc(bytes, 1);
            memcpy(one[i], d.raw[i], bytes);
        }
        run_both(x, isa, two_threads);
        for (int i = OUT; i < TENSORS; i++) {
            size_t bytes = d.numel[i] * fsdpc_dtype_bytes(c->dtype);
            CHECK_NOTE(memcmp(one[i], d.raw[i], bytes) == 0, "%s: threads changed bits", what);
            free(one[i]);
        }
    }
    data_fini(&d);
}

static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};

static void test_lengths(void)
{
    static const size_t lengths[] = {0, 1, 7, 63, 64, 65, 127, 129, 256};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int causal = 0; causal < 2; causal++)
            for (int t = 0; t < 4; t++) {
                test_case c = {.batch = 1,
                               .tokens_q = lengths[i],
                               .tokens_k = lengths[i],
                               .heads = 2,
                               .kv_heads = 1,
                               .dim = 64,
                               .causal = causal,
                               .scale = 0.125,
                               .dtype = dtypes[t]};
                c.heads_first = i & 1;
                try_case(&c, 1);
            }
}

static void test_dims(void)
{
    static const size_t dims[] = {0, 1, 8, 17, 48, 80, 128};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int first = 0; first < 2; first++)
            for (int t = 0; t < 4; t++) {
                test_case c = {.batch = 2,
                               .tokens_q = 70,
                               .tokens_k = 70,
                               .heads = 3,
                               .kv_heads = 3,
                               .dim = dims[i],
                               .causal = true,
                               .heads_first = first,
                               .scale = 0.2,
                               .dtype = dtypes[t]};
                try_case(&c, 1);
            }
}

/* Queries at the end of longer keys, queries that see nothing, and neither keys nor queries. */
static void test_unequal_lengths(void)
{
    static const size_t pairs[][2] = {{1, 200}, {33, 161}, {200, 64}, {130, 1}, {5, 0}, {0, 5}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int causal = 0; causal < 2; causal++)
            for (int t = 0; t < 4; t++) {
                test_case c = {.batch = 1,
                               .tokens_q = pairs[i][0],
                               .tokens_k = pairs[i][1],
                               .heads = 4,
                               .kv_heads = 2,
                               .dim = 32,
                               .causal = causal,
                               .scale = 0.18,
                               .dtype = dtypes[t]};
                try_case(&c, 1);
            }
}

static void test_groups(void)
{
    static const size_t heads[][2] = {{1, 1}, {6, 2}, {5, 1}, {4, 4}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (int t = 0; t < 2; t++) {
            test_case c = {.batch = 2,
                           .tokens_q = 100,
                           .tokens_k = 100,
                           .heads = heads[i][0],
                           .kv_heads = heads[i][1],
                           .dim = 64,
                           .causal = true,
                           .scale = 0.125,
                           .dtype = dtypes[t]};
            try_case(&c, 1);
        }
}

/* Scores whose maximum moves by more than 2^8 from block to block; scales of either sign and zero.
 */
static void test_scales(void)
{
    static const double scales[] = {-0.125, 0, 1.0};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
        for (int t = 0; t < 4; t++) {
            test_case c = {.batch = 1,
                           .tokens_q = 150,
                           .tokens_k = 280,
                           .heads = 1,
                           .kv_heads = 1,
                           .dim = 64,
                           .causal = true,
                           .scale = scales[i],
                           .dtype = dtypes[t]};
            try_case(&c, 1);
        }
    test_case c = {.batch = 1,
                   .tokens_q = 200,
                   .tokens_k = 400,
                   .heads = 1,
                   .kv_heads = 1,
                   .dim = 64,
                   .scale = 1,
                   .dtype = FSDPC_F64};
    try_case(&c, 20);
}

/* Masks of every kind that broadcast over any dimension, causal too, with a scale of zero too. */
static void test_masks(void)
{
    static const size_t sizes[][2] = {{1, 200}, {70, 130}, {130, 257}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t over = 0; over < 16; over += i ? 5 : 1)
            for (mask_kind kind = BOOL_MASK; kind <= LARGE_MASK; kind++) {
                test_case c = {.batch = 2,
                               .tokens_q = sizes[i][0],
                               .tokens_k = sizes[i][1],
                               .heads = 2,
                               .kv_heads = 1,
                               .dim = 17,
                               .causal = over % 5 == 1,
                               .heads_first = true,
                               .scale = over == 9           ? 0
                                        : kind == BOOL_MASK ? -0.2
                                                            : 0.2,
                               .mask = kind};
                size_t whole[] = {c.batch, c.heads, c.tokens_q, c.tokens_k};
                for (int d = 0; d < 4; d++)
                    c.mask_shape[d] = over >> d & 1 ? 1 : whole[d];
                for (int t = 0; t < 4; t++) {
                    c.dtype = dtypes[t];
                    if (i < 2 ||
                        (over + (size_t)kind) % 4 == (size_t)t) /* the large ones are slow */
                        try_case(&c, 1);
                }
            }
}

/* Windows of one key up to nearly all, of queries at the end of longer keys, and under a mask. */
static void test_windows(void)
{
    static const size_t windows[] = {1, 5, 64, 130, 399, 401};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int t = 0; t < 4; t++) {
            test_case c = {.batch = 1,
                           .tokens_q = i % 2 ? 400 : 133,
                           .tokens_k = 400,
                           .heads = 2,
                           .kv_heads = 1,
                           .dim = 32,
                           .causal = true,
                           .scale = 0.2,
                           .dtype = dtypes[t],
                           .window = windows[i]};
            try_case(&c, 1);
            if (i % 4 != (size_t)t)
                continue;
            c.mask = BOOL_MASK;
            c.mask_shape[0] = c.mask_shape[1] = 1;
            c.mask_shape[2] = c.tokens_q;
            c.mask_shape[3] = c.tokens_k;
            try_case(&c, 1);
        }
}

/* A NaN in one query stays in that query's rows. */
static void test_nan_stays(void)
{
    test_case c = {.batch = 1,
                   .tokens_q = 96,
                   .tokens_k = 96,
                   .heads = 1,
                   .kv_heads = 1,
                   .dim = 64,
                   .causal = true,
                   .heads_first = true,
                   .scale = 0.125};
    for (int t = 0; t < 2; t++) {
        c.dtype = dtypes[t];
        test_data d;
        data_init(&d, &c, 1);
        put(d.raw[Q], 40 * 64 + 5, c.dtype, NAN);
        for (fsdpc_isa isa = 0; isa <= fsdpc_isa_best(); isa++) {
            run_both(&d.args, isa, NULL);
            size_t wrong = 0;
            for (size_t n = 0; n < d.numel[OUT]; n++)
                wrong += isnan(get(d.raw[OUT], n, c.dtype)) != (n / 64 == 40);
            CHECK_NOTE(wrong == 0, "%s: %zu", fsdpc_isa_name(isa), wrong);
        }
        data_fini(&d);
    }
}

static void test_refusals(void)
{
    fsdpc_device device = {.mem = memory, .isa = FSDPC_ISA_PORTABLE};
    fsdpc_stream stream = {.device = &device, .name = "test"};
    fsdpc_attention_args x = {.dtype = FSDPC_I32, .heads = 2, .kv_heads = 2};
    CHECK_FAILS(fsdpc_attention_cpu(&x, &stream), FSDPC_ERR_DTYPE, "int32");
    x.dtype = FSDPC_F32;
    x.heads = 3;
    CHECK_FAILS(fsdpc_attention_cpu(&x, &stream), FSDPC_ERR_SHAPE, "3 query heads");
    CHECK_FAILS(fsdpc_attention_backward_cpu(&x, &stream), FSDPC_ERR_SHAPE, "3 query heads");
    x.heads = 2;
    x.window = 4;
    CHECK_FAILS(fsdpc_attention_cpu(&x, &stream), FSDPC_ERR_VALUE, "make it causal");
    x.mask = "";
    x.mask_dtype = FSDPC_F64;
    CHECK_FAILS(fsdpc_attention_cpu(&x, &stream), FSDPC_ERR_DTYPE, "mask of float64");
}

int main(void)
{
    CHECK_OK(fsdpc_mem_create(&memory));
    CHECK_OK(fsdpc_team_create(2, &two_threads));
    test_lengths();
    test_dims();
    test_unequal_lengths();
    test_groups();
    test_scales();
    test_masks();
    test_windows();
    test_nan_stays();
    test_refusals();
    for (int t = 0; t < 4; t++)
        printf("%s: worst error %.3g of the largest value\n", fsdpc_dtype_name(dtypes[t]),
               worst_of[dtypes[t]]);
    fsdpc_team_destroy(two_threads);
    fsdpc_mem_destroy(memory);
    return check_report("attention");
}
