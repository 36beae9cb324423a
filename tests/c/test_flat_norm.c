/* Joining, reading and clipping by norms against the norms of scaled elements themselves. */
#include "test_flat_common.h"

enum { NUMEL = 1000, LEAF = 64 };

static void add(rig *r, fsdpc_norm *norm, double p, const double *x, size_t numel)
{
    if (isinf(p))
        CHECK_OK(fsdpc_flat_absmax(x, FSDPC_F64, numel, &norm->magnitude, &r->stream));
    else
        CHECK_OK(fsdpc_flat_sumpow(x, FSDPC_F64, numel, LEAF, p, &norm->sum, &r->stream));
}

/* Elements of two halves, the second one's times 2^exponent: before, or in the join. */
static void test_join(rig *r, double p, int exponent)
{
    static double x[NUMEL], scaled[NUMEL];
    uint64_t state = 7;
    for (size_t i = 0; i < NUMEL; i++) {
        x[i] = ldexp((double)(int64_t)random_bits(&state) * 0x1p-63, -(int)(i % 9));
        scaled[i] = ldexp(x[i], i < NUMEL / 2 ? 0 : exponent);
    }
    fsdpc_norm whole = {.largest = 0}, half = whole, rest = whole;
    add(r, &whole, p, scaled, NUMEL / 2);
    add(r, &whole, p, scaled + NUMEL / 2, NUMEL / 2);
    add(r, &half, p, x, NUMEL / 2);
    add(r, &rest, p, x + NUMEL / 2, NUMEL / 2);
    fsdpc_norm_join_args args = {.into = &half, .from = &rest, .p = p, .exponent = exponent};
    CHECK_OK(fsdpc_flat_norm_join(&args, &r->stream));
    args = (fsdpc_norm_join_args){.into = &whole, .p = p};
    CHECK_OK(fsdpc_flat_norm_join(&args, &r->stream));
    CHECK_NOTE(memcmp(&whole, &half, sizeof whole) == 0, "p %g, exponent %d", p, exponent);
    double value;
    if (p == 3) {
        CHECK_FAILS(fsdpc_flat_norm_value(&half, p, &value, &r->stream), FSDPC_ERR_VALUE,
                    "p is 1, 2 or inf, not 3");
        return;
    }
    long double want = 0;
    for (size_t i = 0; i < NUMEL; i++) {
        long double term = fabsl((long double)scaled[i]);
        want = isinf(p) ? fmaxl(want, term) : want + (p == 2 ? term * term : term);
    }
    CHECK_OK(fsdpc_flat_norm_value(&half, p, &value, &r->stream));
    want = p == 2 ? sqrtl(want) : want;
    CHECK_NOTE(fabsl((long double)value - want) <= 0x1p-51L * want, "p %g: %a", p, value);
}

static void test_clip(rig *r)
{
    double norm = 4, factors[3] = {0.5, 0.5, 0.5};
    fsdpc_clip_args args = {.norm = &norm, .max_norm = 1, .n = 2, .pending = 2};
    args.factors[0] = &factors[0], args.factors[1] = &factors[1];
    CHECK_OK(fsdpc_flat_clip(&args, &r->stream));
    double factor = 1 / (4 + 1e-6);
    CHECK(factors[0] == factor && factors[1] == 0.5 * factor && factors[2] == 0.5);
    args.pending = 0;
    norm = 0.5; /* below the limit */
    CHECK_OK(fsdpc_flat_clip(&args, &r->stream));
    CHECK(factors[0] == 1 && factors[1] == 1);
    norm = INFINITY;
    CHECK_OK(fsdpc_flat_clip(&args, &r->stream));
    CHECK(factors[0] == 0);
    norm = NAN; /* every gradient becomes NaN, as in PyTorch */
    CHECK_OK(fsdpc_flat_clip(&args, &r->stream));
    CHECK(isnan(factors[0]));
}

/* A factor in memory is one with the factor beside it, and rounded once with it. */
static void test_scale_at(rig *r)
{
    float x[2] = {3, -5}, y[2] = {3, -5};
    const double at = 0.1;
    CHECK_OK(fsdpc_flat_scale(x, FSDPC_F32, 2, 0.3, &at, NULL, &r->stream));
    CHECK_OK(fsdpc_flat_scale(y, FSDPC_F32, 2, 0.3 * 0.1, NULL, NULL, &r->stream));
    CHECK(memcmp(x, y, sizeof x) == 0 && x[0] == 3 * (float)(0.3 * 0.1));
}

int main(void)
{
    static const double powers[] = {1, 2, INFINITY};
    static const int exponents[] = {0, -1, -16, 5, -300};
    rig r;
    rig_init(&r, fsdpc_isa_best(), 1);
    for (int p = 0; p < 3; p++)
        for (int e = 0; e < 5; e++)
            test_join(&r, powers[p], exponents[e]);
    test_join(&r, 3, 0);
    test_clip(&r);
    test_scale_at(&r);
    rig_fini(&r);
    return check_report("flat_norm");
}
