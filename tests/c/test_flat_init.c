/* init: values by absolute index, moments, bounds, and logarithm, sine and cosine against libm. */
#include "test_flat_common.h"

#include "base/random.h"

static const double pi = 3.14159265358979323846;

/* Element i by libm. */
static double normal_reference(uint64_t seed, uint64_t stream, uint64_t i)
{
    fsdpc_philox block = fsdpc_philox_block(seed, stream, i / 4);
    const uint32_t *words = block.x + i % 4 / 2 * 2;
    double radius = sqrt(-2 * log(((double)words[0] + 1) * 0x1p-32));
    double angle = 2 * pi * (double)words[1] * 0x1p-32;
    return i % 2 ? radius * sin(angle) : radius * cos(angle);
}

static void test_normal(rig *r)
{
    enum { N = 200000 };
    double *x = test_alloc(N * 8), sum = 0, squares = 0, fourth = 0, worst = 0;
    fsdpc_init_args args = {x, FSDPC_F64, N, FSDPC_INIT_NORMAL, 0, 1, 42, 7, 0};
    CHECK_OK(r->ops->init(&args, &r->stream));
    for (size_t i = 0; i < N; i++) {
        worst = fmax(worst, fabs(x[i] - normal_reference(42, 7, i)));
        sum += x[i], squares += x[i] * x[i], fourth += x[i] * x[i] * x[i] * x[i];
    }
    CHECK_NOTE(worst < 1e-11, "%g", worst);
    CHECK_NOTE(fabs(sum / N) < 0.01 && fabs(squares / N - 1) < 0.015 && fabs(fourth / N - 3) < 0.15,
               "%g %g %g", sum / N, squares / N, fourth / N);
    args.a = 5, args.b = 0.5;
    double *moved = test_alloc(N * 8);
    args.dst = moved;
    CHECK_OK(r->ops->init(&args, &r->stream));
    for (size_t i = 0; i < N; i++)
        CHECK(moved[i] == 5 + 0.5 * x[i]);
    free(x), free(moved);
}

static void test_uniform(rig *r, fsdpc_dtype dtype, double a, double b)
{
    enum { N = 60000 };
    void *x = test_alloc(N * 8);
    fsdpc_init_args args = {x, dtype, N, FSDPC_INIT_UNIFORM, a, b, 1, 2, 3};
    CHECK_OK(r->ops->init(&args, &r->stream));
    double sum = 0, low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < N; i++) {
        double value = element(x, i, dtype);
        sum += value, low = fmin(low, value), high = fmax(high, value);
    }
    CHECK_NOTE(low >= round_as(a, dtype) && high < b, "%s: %a .. %a", fsdpc_dtype_name(dtype), low,
               high);
    CHECK(fabs(sum / N - (a + b) / 2) < 0.01 * (b - a));
    CHECK(low < a + 0.01 * (b - a) && high > b - 0.01 * (b - a));
    free(x);
}

/* Any slice has the bits of the same slice of the whole; dtypes round the same fp64 value once. */
static void test_slices(rig *r, fsdpc_init_kind kind, fsdpc_dtype dtype)
{
    enum { N = 100003 };
    size_t size = fsdpc_dtype_bytes(dtype);
    char *whole = test_alloc(N * size), *part = test_alloc(N * size);
    double *wide = test_alloc(N * 8);
    const uint64_t first = (UINT64_C(1) << 40) + 3; /* beyond 2^32 blocks, and not at one's start */
    fsdpc_init_args args = {whole, dtype, N, kind, -0.5, 1.5, 9, 1000, first};
    CHECK_OK(r->ops->init(&args, &r->stream));
    args.dst = wide, args.dtype = FSDPC_F64;
    CHECK_OK(r->ops->init(&args, &r->stream));
    if (kind == FSDPC_INIT_NORMAL)
        for (size_t i = 0; i < N; i++)
            CHECK(element(whole, i, dtype) == round_as(wide[i], dtype));
    uint64_t state = 1;
    args.dtype = dtype;
    for (size_t at = 0, take; at < N; at += take) {
        take = 1 + random_bits(&state) % 5000;
        take = take > N - at ? N - at : take;
        args.dst = part + at * size, args.numel = take, args.first = first + at;
        CHECK_OK(r->ops->init(&args, &r->stream));
    }
    CHECK(memcmp(whole, part, N * size) == 0);
    args.dst = part, args.numel = N, args.first = first;
    uint64_t *other = kind == FSDPC_INIT_NORMAL ? &args.seed : &args.stream;
    *other += 1;
    CHECK_OK(r->ops->init(&args, &r->stream));
    CHECK((memcmp(whole, part, N * size) == 0) == (kind == FSDPC_INIT_CONSTANT));
    free(whole), free(part), free(wide);
}

/* Fixed bits: initial weights must not change between versions or machines. */
static void test_known_bits(rig *r)
{
    double x[6];
    fsdpc_init_args args = {x, FSDPC_F64, 6, FSDPC_INIT_NORMAL, 0, 1, 42, 7, 0};
    CHECK_OK(r->ops->init(&args, &r->stream));
    const double known[] = {0x1.10adba649d66dp+0, -0x1.a29299a32ad1fp-1, -0x1.512068366703cp-1,
                            0x1.22037d3c33124p+0, -0x1.50833f5f254b2p-2, 0x1.4f858bfa01f1cp-2};
    for (int i = 0; i < 6; i++)
        CHECK_NOTE(x[i] == known[i], "%d: %a", i, x[i]);
}

/* Every instruction set has the bits of the first. */
static void test_same_bits(rig *r)
{
    enum { N = 100003 };
    static double of_first[N];
    double *x = test_alloc(N * sizeof *x);
    fsdpc_init_args args = {x, FSDPC_F64, N, FSDPC_INIT_NORMAL, 0.1, 0.7, 3, 5, 1};
    CHECK_OK(r->ops->init(&args, &r->stream));
    if (of_first[0] == 0)
        memcpy(of_first, x, sizeof of_first);
    CHECK(memcmp(of_first, x, sizeof of_first) == 0);
    free(x);
}

static void test_constant_and_refusals(rig *r)
{
    float x[17] = {0};
    fsdpc_init_args args = {x, FSDPC_F32, 16, FSDPC_INIT_CONSTANT, 0.1, 0, 0, 0, 0};
    CHECK_OK(r->ops->init(&args, &r->stream));
    for (int i = 0; i < 16; i++)
        CHECK(x[i] == 0.1f);
    CHECK(x[16] == 0);
    args.kind = FSDPC_INIT_UNIFORM;
    CHECK_FAILS(r->ops->init(&args, &r->stream), FSDPC_ERR_VALUE, "lower bound");
    args.kind = FSDPC_INIT_NORMAL, args.b = -1;
    CHECK_FAILS(r->ops->init(&args, &r->stream), FSDPC_ERR_VALUE, "deviation");
    args.dtype = FSDPC_I32;
    CHECK_FAILS(r->ops->init(&args, &r->stream), FSDPC_ERR_DTYPE, "int32");
    args = (fsdpc_init_args){x, FSDPC_F32, 16, FSDPC_INIT_UNIFORM, 2, 2, 0, 0, 0};
    CHECK_OK(r->ops->init(&args, &r->stream)); /* an empty interval is its bound */
    CHECK(x[0] == 2 && x[15] == 2);
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        test_normal(&r);
        test_known_bits(&r);
        test_same_bits(&r);
        test_constant_and_refusals(&r);
        for (size_t d = 0; d < 4; d++) {
            test_uniform(&r, all_floats[d], 0, 1);
            test_uniform(&r, all_floats[d], -3, -1);
            test_uniform(&r, all_floats[d], -2, 0);
            test_uniform(&r, all_floats[d], -0.1, 0.3);
            test_slices(&r, FSDPC_INIT_CONSTANT, all_floats[d]);
            test_slices(&r, FSDPC_INIT_NORMAL, all_floats[d]);
            test_slices(&r, FSDPC_INIT_UNIFORM, all_floats[d]);
        }
        rig_fini(&r);
    }
    return check_report("flat_init");
}
