/* sumsq and sumpow: leaf sums against long double and against the documented order; the same words
 * for any cut at leaves, number of threads and instruction set. */
#include "test_flat_common.h"

static double term(double value, double p)
{
    double power = fabs(value), result = 1;
    if (p != rint(p))
        return pow(power, p);
    for (unsigned rest = (unsigned)p; rest; rest /= 2, power *= power)
        result *= rest % 2 ? power : 1;
    return result;
}

/* A leaf in the order the kernels promise, element by element. */
static double leaf_reference(const void *x, size_t begin, size_t numel, fsdpc_dtype dtype, double p)
{
    double partial[16] = {0};
    for (size_t i = 0; i < numel; i++) {
        double value = element(x, begin + i, dtype);
        partial[i % 16] += term(value, p);
    }
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++)
            partial[j] += partial[j + half];
    return partial[0];
}

static fsdpc_exact_sum sum_of(rig *r, const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                              double p)
{
    fsdpc_exact_sum sum = {{0}, 0, 0};
    if (p == 0) /* the kernel of its own */
        CHECK_OK(r->ops->sumsq(x, dtype, numel, leaf, &sum, &r->stream));
    else
        CHECK_OK(r->ops->sumpow(x, dtype, numel, leaf, p, &sum, &r->stream));
    fsdpc_exact_sum_normalize(&sum);
    return sum;
}

static void test_case(rig *r, fsdpc_dtype dtype, size_t numel, size_t leaf, double p)
{
    double power = p == 0 ? 2 : p;
    void *x = test_alloc(numel * fsdpc_dtype_bytes(dtype));
    fill_random(x, numel, dtype, numel + leaf);
    fsdpc_exact_sum whole = sum_of(r, x, dtype, numel, leaf, p), reference = {{0}, 0, 0};
    long double total = 0;
    for (size_t at = 0; at < numel; at += leaf)
        fsdpc_exact_sum_add(
            &reference, leaf_reference(x, at, leaf < numel - at ? leaf : numel - at, dtype, power));
    for (size_t i = 0; i < numel; i++) {
        long double value = fabsl((long double)element(x, i, dtype)), total_term = 1;
        for (double rest = power; rest >= 1; rest--)
            total_term *= value;
        total += power == rint(power) ? total_term : total_term * sqrtl(value); /* 2.5 */
    }
    fsdpc_exact_sum_normalize(&reference);
    CHECK_NOTE(memcmp(&whole, &reference, sizeof whole) == 0, "%s, %zu elements, leaf %zu, p %g",
               fsdpc_dtype_name(dtype), numel, leaf, p);
    double value = fsdpc_exact_sum_value(&whole);
    CHECK(fabsl((long double)value - total) <= 1e-13L * total);

    uint64_t state = numel;
    fsdpc_exact_sum cut = {{0}, 0, 0};
    for (size_t at = 0, take; at < numel; at += take) {
        take = leaf * (1 + random_bits(&state) % (numel / leaf / 3 + 2));
        take = take > numel - at ? numel - at : take;
        fsdpc_exact_sum part = sum_of(r, at_element(x, at, dtype), dtype, take, leaf, p);
        fsdpc_exact_sum_merge(&cut, &part);
    }
    fsdpc_exact_sum_normalize(&cut);
    CHECK(memcmp(&cut, &whole, sizeof cut) == 0);
    free(x);
}

/* Leaves of one element, whose sizes are up to 2^spread apart: the same words as one by one. */
static void test_spread(rig *r, fsdpc_dtype dtype, int spread, double middle)
{
    enum { NUMEL = 3000 };
    uint64_t state = (uint64_t)spread;
    void *x = test_alloc(NUMEL * sizeof(double));
    for (size_t i = 0; i < NUMEL; i++) {
        int exponent = (int)(random_bits(&state) % (uint64_t)(spread + 1)) - spread;
        double value = ldexp(random_value(&state), exponent) * middle;
        value = random_bits(&state) % 8 ? value : 0;
        if (dtype == FSDPC_F64)
            ((double *)x)[i] = value;
        else
            ((float *)x)[i] = (float)value;
    }
    for (size_t numel = 1; numel < NUMEL; numel = numel * 3 / 2 + 1) {
        fsdpc_exact_sum sum = sum_of(r, x, dtype, numel, 1, 0), reference = {{0}, 0, 0};
        for (size_t i = 0; i < numel; i++)
            fsdpc_exact_sum_add(&reference, term(element(x, i, dtype), 2));
        fsdpc_exact_sum_normalize(&reference);
        CHECK_NOTE(memcmp(&sum, &reference, sizeof sum) == 0,
                   "%s, %zu elements over 2^%d around %g", fsdpc_dtype_name(dtype), numel, spread,
                   middle);
    }
    free(x);
}

static void test_not_numbers(rig *r)
{
    float x[200] = {1, 2};
    fsdpc_exact_sum sum = {{0}, 0, 0};
    x[150] = -INFINITY;
    CHECK_OK(r->ops->sumsq(x, FSDPC_F32, 200, 64, &sum, &r->stream));
    CHECK(sum.infinities == 1 && isinf(fsdpc_exact_sum_value(&sum)));
    x[199] = NAN;
    CHECK_OK(r->ops->sumsq(x, FSDPC_F32, 200, 64, &sum, &r->stream)); /* adds to what is there */
    CHECK(sum.infinities == 2 && sum.nans == 1 && isnan(fsdpc_exact_sum_value(&sum)));
    x[150] = x[199] = 0, x[0] = 0x1p-149f, x[1] = 3e38f; /* their squares leave fp32's range */
    memset(&sum, 0, sizeof sum);
    CHECK_OK(r->ops->sumsq(x, FSDPC_F32, 1, 64, &sum, &r->stream));
    CHECK(fsdpc_exact_sum_value(&sum) == 0x1p-298);
    CHECK_OK(r->ops->sumsq(x + 1, FSDPC_F32, 1, 64, &sum, &r->stream));
    CHECK(fsdpc_exact_sum_value(&sum) == (double)x[1] * (double)x[1]);
    CHECK_FAILS(r->ops->sumsq(x, FSDPC_F32, 1, 0, &sum, &r->stream), FSDPC_ERR_VALUE, "leaf");
    CHECK_FAILS(r->ops->sumsq(x, FSDPC_I64, 1, 64, &sum, &r->stream), FSDPC_ERR_DTYPE, "int64");

    const double powers[] = {1, 2, 3, 0.5};
    for (int k = 0; k < 4; k++) {
        x[0] = -2, x[1] = 0, x[70] = -NAN, x[130] = INFINITY;
        memset(&sum, 0, sizeof sum);
        CHECK_OK(r->ops->sumpow(x, FSDPC_F32, 64, 64, powers[k], &sum, &r->stream));
        CHECK(fsdpc_exact_sum_value(&sum) == pow(2, powers[k]));
        CHECK_OK(r->ops->sumpow(x, FSDPC_F32, 200, 64, powers[k], &sum, &r->stream));
        CHECK(sum.nans == 1 && sum.infinities == 1 && isnan(fsdpc_exact_sum_value(&sum)));
    }
    const double refused[] = {0, -1, INFINITY, NAN};
    for (int k = 0; k < 4; k++)
        CHECK_FAILS(r->ops->sumpow(x, FSDPC_F32, 1, 64, refused[k], &sum, &r->stream),
                    FSDPC_ERR_VALUE, "above 0");
    CHECK_FAILS(r->ops->sumpow(x, FSDPC_U8, 1, 64, 1, &sum, &r->stream), FSDPC_ERR_DTYPE, "uint8");
    CHECK_FAILS(r->ops->sumpow(x, FSDPC_F32, 1, 0, 1, &sum, &r->stream), FSDPC_ERR_VALUE, "leaf");
}

int main(void)
{
    const size_t leaves[] = {1, 7, 16, 50, 64, 1000, 4096, 300000};
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        for (size_t d = 0; d < 4; d++)
            for (size_t s = 0; s < SIZES; s++)
                for (size_t l = 0; l < sizeof leaves / sizeof leaves[0]; l++) {
                    test_case(&r, all_floats[d], some_sizes[s], leaves[l], 0);
                    test_case(&r, all_floats[d], some_sizes[s], leaves[l], 1);
                    if (some_sizes[s] != LARGE_NUMEL || leaves[l] == 50 || leaves[l] == 64) {
                        test_case(&r, all_floats[d], some_sizes[s], leaves[l], 2);
                        test_case(&r, all_floats[d], some_sizes[s], leaves[l], 2.5);
                        test_case(&r, all_floats[d], some_sizes[s], leaves[l], 3);
                        test_case(&r, all_floats[d], some_sizes[s], leaves[l], 6);
                    }
                }
        static const int spreads[] = {0, 3, 10, 20, 26, 40, 130};
        for (int s = 0; s < 7; s++) {
            test_spread(&r, FSDPC_F32, spreads[s], 0x1p20);
            test_spread(&r, FSDPC_F64, spreads[s], 1);
            test_spread(&r, FSDPC_F64, 8 * spreads[s], 0x1p500);
            test_spread(&r, FSDPC_F64, spreads[s], 0x1p-490); /* squares: around the smallest */
        }
        test_not_numbers(&r);
        rig_fini(&r);
    }
    return check_report("flat_sumsq");
}
