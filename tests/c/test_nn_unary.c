/* Unary functions: against libm in double, slopes against central differences, exp in ulps. */
#include "nn_rig.h"

#include "base/team.h"

static double value(fsdpc_unary kind, double x, double s)
{
    const double k = sqrt(2 / M_PI);
    switch (kind) {
    case FSDPC_UNARY_NEG:
        return -x;
    case FSDPC_UNARY_ABS:
        return fabs(x);
    case FSDPC_UNARY_EXP:
        return exp(x);
    case FSDPC_UNARY_LOG:
        return log(x);
    case FSDPC_UNARY_SQRT:
        return sqrt(x);
    case FSDPC_UNARY_TANH:
        return tanh(x);
    case FSDPC_UNARY_SIGMOID:
        return 1 / (1 + exp(-x));
    case FSDPC_UNARY_GELU_TANH:
        return 0.5 * x * (1 + tanh(k * (x + 0.044715 * x * x * x)));
    case FSDPC_UNARY_GELU_ERF:
        return 0.5 * x * (1 + erf(x / sqrt(2)));
    case FSDPC_UNARY_SILU:
        return x / (1 + exp(-x));
    case FSDPC_UNARY_RELU:
        return x > 0 ? x : 0;
    case FSDPC_UNARY_RSQRT:
        return 1 / sqrt(x);
    case FSDPC_UNARY_SIN:
        return sin(x);
    case FSDPC_UNARY_COS:
        return cos(x);
    case FSDPC_UNARY_LOG1P:
        return log1p(x);
    case FSDPC_UNARY_EXPM1:
        return expm1(x);
    case FSDPC_UNARY_ERF:
        return erf(x);
    case FSDPC_UNARY_SIGN:
        return x > 0 ? 1 : x < 0 ? -1 : 0;
    case FSDPC_UNARY_SOFTPLUS:
        return log1p(exp(x));
    case FSDPC_UNARY_CLAMP_MIN:
        return fmax(x, s);
    case FSDPC_UNARY_CLAMP_MAX:
        return fmin(x, s);
    case FSDPC_UNARY_HUBER:
        return fabs(x) < s ? x * x / (2 * s) : fabs(x) - s / 2;
    case FSDPC_UNARY_ADD_SCALAR:
        return x + s;
    case FSDPC_UNARY_MUL_SCALAR:
        return x * s;
    case FSDPC_UNARY_RSUB_SCALAR:
        return s - x;
    case FSDPC_UNARY_RDIV_SCALAR:
        return s / x;
    case FSDPC_UNARY_POW_SCALAR:
        return pow(x, s);
    }
    return NAN;
}

static double slope(fsdpc_unary kind, double x, double s)
{
    double h = 1e-6;
    return (value(kind, x + h, s) - value(kind, x - h, s)) / (2 * h);
}

static bool positive_only(fsdpc_unary kind)
{
    return kind == FSDPC_UNARY_LOG || kind == FSDPC_UNARY_SQRT || kind == FSDPC_UNARY_RDIV_SCALAR ||
           kind == FSDPC_UNARY_POW_SCALAR || kind == FSDPC_UNARY_RSQRT || kind == FSDPC_UNARY_LOG1P;
}

static void test_kind(nn_rig *rig, fsdpc_unary kind, fsdpc_dtype dtype, size_t numel)
{
    bool positive = positive_only(kind);
    buffer x = buffer_noise(dtype, numel, 1, positive ? 0.3 : -5, 5);
    buffer y = buffer_make(dtype, numel), dx = buffer_make(dtype, numel);
    buffer dy = buffer_noise(dtype, numel, 2, -1, 1);
    fsdpc_unary_args args = {kind, dtype, numel, 1.5, x.data, NULL, NULL, y.data};
    CHECK_OK(rig->ops->unary(&args, rig->stream));
    buffer_check(rig, &y, "unary");
    fsdpc_unary_args back = {kind, dtype, numel, 1.5, x.data, y.data, dy.data, dx.data};
    CHECK_OK(rig->ops->unary_backward(&back, rig->stream));
    buffer_check(rig, &dx, "unary backward");
    for (size_t i = 0; i<numel; i += numel> 1000 ? 37 : 1) {
        double at = buffer_get(&x, i), want = value(kind, at, 1.5), up = buffer_get(&dy, i);
        check_near(rig, "unary", dtype, i, buffer_get(&y, i), want,
                   tolerance(dtype, want, fabs(want) + fabs(at), 4));
        /* formulas that read y see it rounded: to 8 bits for bf16 */
        double rounded = fabs(buffer_get(&y, i) - want) * (4 + fabs(slope(kind, at, 1.5)));
        double want_dx = up * slope(kind, at, 1.5);
        check_near(rig, "slope", dtype, i, buffer_get(&dx, i), want_dx,
                   tolerance(dtype, want_dx, 8, 8) + 2 * rounded + 1e-9 * (10 + fabs(want_dx)));
    }
    fsdpc_unary_args in_place = {kind, dtype, numel, 1.5, x.data, NULL, NULL, x.data};
    CHECK_OK(rig->ops->unary(&in_place, rig->stream));
    CHECK(numel == 0 || memcmp(x.data, y.data, numel * fsdpc_dtype_bytes(dtype)) == 0);
    buffer_free(&x);
    buffer_free(&y);
    buffer_free(&dx);
    buffer_free(&dy);
}

static double ulps(float got, double want)
{
    if (isnan(want) || isinf((float)want))
        return (isnan(got) && isnan(want)) || got == (float)want ? 0 : 1e9;
    int exponent;
    frexp(want, &exponent);
    return fabs(got - want) / fmax(ldexp(1, exponent - 24), 0x1p-149);
}

/* Every exponent, both signs, infinities and NaN among them. */
static void test_accuracy(nn_rig *rig)
{
    enum { N = 4096 };
    static float x[N], y[N];
    const struct {
        fsdpc_unary kind;
        double limit;
    } cases[] = {{FSDPC_UNARY_EXP, 2}, {FSDPC_UNARY_TANH, 3},  {FSDPC_UNARY_ERF, 3},
                 {FSDPC_UNARY_LOG, 2}, {FSDPC_UNARY_LOG1P, 2}, {FSDPC_UNARY_EXPM1, 2},
                 {FSDPC_UNARY_SIN, 2}, {FSDPC_UNARY_COS, 2},   {FSDPC_UNARY_POW_SCALAR, 1}};
    uint32_t stride = 4099;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        double worst = 0;
        uint32_t bits = 0;
        for (size_t block = 0; block < 0x100000000u / N / stride + 1; block++) {
            for (size_t i = 0; i < N; i++, bits += stride)
                x[i] = fsdpc_f32_from_bits(bits);
            fsdpc_unary_args args = {cases[k].kind, FSDPC_F32, N, 2.5, x, NULL, NULL, y};
            CHECK_OK(rig->ops->unary(&args, rig->stream));
            for (size_t i = 0; i < N; i++)
                worst = fmax(worst, ulps(y[i], value(cases[k].kind, x[i], 2.5)));
        }
        CHECK_NOTE(worst <= cases[k].limit, "%s kind %d: %g ulp", rig->ops->name, cases[k].kind,
                   worst);
    }
}

static void test_special(nn_rig *rig)
{
    float x[5] = {-INFINITY, INFINITY, NAN, -0.0f, 0.0f}, y[5], dx[5], dy[5] = {1, 1, 1, 1, 1};
    fsdpc_unary_args args = {FSDPC_UNARY_EXP, FSDPC_F32, 5, 0, x, NULL, NULL, y};
    CHECK_OK(rig->ops->unary(&args, rig->stream));
    CHECK(y[0] == 0 && y[1] == INFINITY && isnan(y[2]) && y[3] == 1 && y[4] == 1);
    args.kind = FSDPC_UNARY_TANH;
    CHECK_OK(rig->ops->unary(&args, rig->stream));
    CHECK(y[0] == -1 && y[1] == 1 && isnan(y[2]) && signbit(y[3]) && !signbit(y[4]));
    args.kind = FSDPC_UNARY_RELU;
    CHECK_OK(rig->ops->unary(&args, rig->stream));
    CHECK(y[0] == 0 && y[1] == INFINITY && isnan(y[2]) && y[4] == 0);
    fsdpc_unary_args back = {FSDPC_UNARY_ABS, FSDPC_F32, 5, 0, x, NULL, dy, dx};
    CHECK_OK(rig->ops->unary_backward(&back, rig->stream));
    CHECK(dx[0] == -1 && dx[1] == 1 && dx[3] == 0 && dx[4] == 0);
    back = (fsdpc_unary_args){FSDPC_UNARY_POW_SCALAR, FSDPC_F32, 5, 0, x, NULL, dy, dx};
    CHECK_OK(rig->ops->unary_backward(&back, rig->stream));
    CHECK(dx[3] == 0 && dx[4] == 0);
    for (int odd = 0; odd < 4;
         odd++) { /* -0 stays; so does each lane whatever its neighbours are */
        const fsdpc_unary kinds[] = {FSDPC_UNARY_SIN, FSDPC_UNARY_LOG1P, FSDPC_UNARY_EXPM1,
                                     FSDPC_UNARY_TANH};
        float row[40], found[40], last;
        for (int i = 0; i < 40; i++)
            row[i] = i % 7 == 3 ? -0.0f : i % 7 == 5 ? 1e6f : (float)i / 41;
        fsdpc_unary_args of = {kinds[odd], FSDPC_F32, 40, 0, row, NULL, NULL, found};
        CHECK_OK(rig->ops->unary(&of, rig->stream));
        CHECK(found[3] == 0 && signbit(found[3]));
        for (size_t i = 0; i < 40; i++) {
            fsdpc_unary_args alone = {kinds[odd], FSDPC_F32, 1, 0, row + i, NULL, NULL, &last};
            CHECK_OK(rig->ops->unary(&alone, rig->stream));
            CHECK(memcmp(&last, found + i, sizeof last) == 0);
        }
    }
    args.dtype = FSDPC_I32;
    CHECK_FAILS(rig->ops->unary(&args, rig->stream), FSDPC_ERR_DTYPE, "int32");
}

/* Powers of everything special by everything special, as the C library has them. */
static void test_powers(nn_rig *rig)
{
    const float bases[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, -1e-40f, -1, -2, 1, 3, 10};
    const double exponents[] = {0, 1,        2,         2.5, -1,   -2,      3,
                                5, INFINITY, -INFINITY, NAN, 1e10, 16777217};
    float y[12];
    for (size_t e = 0; e < sizeof exponents / sizeof *exponents; e++) {
        fsdpc_unary_args args = {
            FSDPC_UNARY_POW_SCALAR, FSDPC_F32, 12, exponents[e], bases, NULL, NULL, y};
        CHECK_OK(rig->ops->unary(&args, rig->stream));
        for (size_t i = 0; i < 12; i++) {
            float want = powf(bases[i], (float)exponents[e]);
            CHECK_NOTE((isnan(want) && isnan(y[i])) || memcmp(&want, y + i, sizeof want) == 0,
                       "%s %g ^ %g: %g instead of %g", rig->ops->name, bases[i], exponents[e], y[i],
                       want);
        }
    }
}

static void suite(nn_rig *rig)
{
    const size_t sizes[] = {0, 1, 5, 16, 1000, 100003};
    for (size_t d = 0; d < 4; d++)
        for (size_t n = 0; n < 6; n++)
            for (int kind = 0; kind <= FSDPC_UNARY_POW_SCALAR; kind++)
                test_kind(rig, (fsdpc_unary)kind, float_dtypes[d], sizes[n]);
    test_accuracy(rig);
    test_special(rig);
    test_powers(rig);
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_unary");
}
