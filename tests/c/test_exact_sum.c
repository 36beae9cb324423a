/* Exact sums against integers, long double, and themselves in other orders. */
#include "check.h"

#include <float.h>
#include <math.h>

#include "ops/exact_sum.h"

#define RULE static inline
#include "ops/exact_sum_rules_body.h"
#undef RULE

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ *state >> 29;
}

static double sum_of(const double *values, size_t n)
{
    fsdpc_exact_sum sum = {{0}, 0, 0};
    for (size_t i = 0; i < n; i++)
        fsdpc_exact_sum_add(&sum, values[i]);
    return fsdpc_exact_sum_value(&sum);
}

/* One value of every kind must come back as it went in. */
static void test_single_values(void)
{
    const double values[] = {0,
                             1,
                             3,
                             0.1,
                             DBL_MAX,
                             DBL_MIN,
                             0x1p-52,
                             0x1p-1022,
                             0x1p-1074,
                             0x3p-1074,
                             0x1.8p-1073,
                             0x1p1023,
                             DBL_MIN / 2,
                             DBL_MIN - 0x1p-1074,
                             0x1.fffffffffffffp-1,
                             1e300,
                             1e-300};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        CHECK_NOTE(sum_of(&values[i], 1) == values[i], "%a", values[i]);
    uint64_t state = 1;
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = next(&state) & 0x7fffffffffffffffu;
        double value;
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            CHECK_NOTE(sum_of(&value, 1) == value, "%a", value);
    }
    double minus_zero = -0.0;
    CHECK(sum_of(&minus_zero, 1) == 0);
    CHECK(sum_of(NULL, 0) == 0);
}

/* fp64 addition of two numbers rounds once too. */
static void test_pairs(void)
{
    uint64_t state = 2;
    for (int i = 0; i < 200000; i++) {
        uint64_t bits[2] = {next(&state) & 0x7fffffffffffffffu, 0};
        uint64_t near = (next(&state) % 130) << 52; /* exponents that overlap, mostly */
        bits[1] = (bits[0] > near ? bits[0] - near : near) ^ (next(&state) & 0xfffffffffffffu);
        if (i % 3 == 0) /* many trailing zeros: ties */
            bits[0] &= ~UINT64_C(0xffffff), bits[1] &= ~UINT64_C(0xffffffff);
        if (i % 7 == 0) /* near the bottom, subnormals included */
            bits[0] &= 0x003fffffffffffffu, bits[1] &= 0x003fffffffffffffu;
        double pair[2];
        memcpy(pair, bits, sizeof pair);
        if (isfinite(pair[0]) && isfinite(pair[1]))
            CHECK_NOTE(sum_of(pair, 2) == pair[0] + pair[1], "%a + %a", pair[0], pair[1]);
    }
}

static void test_rounding_of_many(void)
{
    /* 2^53 + 1 is a tie: down to even; anything more goes up; 2^53 + 3 is a tie: up to even */
    const double tie_down[] = {0x1p53, 1}, above[] = {0x1p53, 1, 0x1p-1074};
    const double tie_up[] = {0x1p53, 2, 1}, carry[] = {0x1.fffffffffffffp52, 0.5};
    CHECK(sum_of(tie_down, 2) == 0x1p53);
    CHECK(sum_of(above, 3) == 0x1p53 + 2);
    CHECK(sum_of(tie_up, 3) == 0x1p53 + 4);
    CHECK(sum_of(carry, 2) == 0x1p53);
    const double overflow[] = {DBL_MAX, DBL_MAX}, edge[] = {DBL_MAX, 0x1p970}; /* half an ulp */
    const double under[] = {DBL_MAX, 0x1.fffffffffffffp969};
    CHECK(isinf(sum_of(overflow, 2)));
    CHECK(isinf(sum_of(edge, 2)));
    CHECK(sum_of(under, 2) == DBL_MAX);
    double tiny[3000];
    for (int i = 0; i < 3000; i++)
        tiny[i] = 0x1p-1074;
    CHECK(sum_of(tiny, 3000) == 3000 * 0x1p-1074);
}

/* Integers below 2^40, a million of them: the sum is known exactly. */
static void test_integers(void)
{
    fsdpc_exact_sum sum = {{0}, 0, 0};
    uint64_t state = 3, total = 0;
    for (int i = 0; i < 1000000; i++) {
        uint64_t value = next(&state) >> 24;
        total += value;
        fsdpc_exact_sum_add(&sum, (double)value);
    }
    CHECK(fsdpc_exact_sum_value(&sum) == (double)total);
    CHECK(total > UINT64_C(1) << 57); /* so the sum did have bits to round away */
}

/* Any order, any cuts, any grouping of merges: the same words and the same double. */
static void test_cuts(void)
{
    enum { N = 20000 };
    static double values[N];
    uint64_t state = 4;
    for (int i = 0; i < N; i++)
        values[i] = ldexp((double)(next(&state) >> 11), (int)(next(&state) % 400) - 250);
    fsdpc_exact_sum whole = {{0}, 0, 0};
    for (int i = 0; i < N; i++)
        fsdpc_exact_sum_add(&whole, values[i]);
    fsdpc_exact_sum_normalize(&whole);
    for (int trial = 0; trial < 50; trial++) {
        fsdpc_exact_sum total = {{0}, 0, 0};
        for (int end = N; end > 0;) {
            int begin = end - 1 - (int)(next(&state) % 3000);
            begin = begin < 0 ? 0 : begin;
            fsdpc_exact_sum part = {{0}, 0, 0};
            for (int i = begin; i < end; i++)
                fsdpc_exact_sum_add(&part, values[i]);
            if (trial % 2)
                fsdpc_exact_sum_normalize(&part);
            fsdpc_exact_sum_merge(&total, &part);
            end = begin;
        }
        double unnormalized = fsdpc_exact_sum_value(&total);
        fsdpc_exact_sum_normalize(&total);
        CHECK(memcmp(&total, &whole, sizeof total) == 0);
        CHECK(unnormalized == fsdpc_exact_sum_value(&whole));
    }
    double plain = 0;
    for (int i = 0; i < N; i++)
        plain += values[i];
    CHECK(fabs(plain - fsdpc_exact_sum_value(&whole)) <= 1e-12 * plain);
}

/* Words as full as the contract allows: 2^31 additions of the largest digits. */
static void test_room_for_carries(void)
{
    fsdpc_exact_sum sum = {{0}, 0, 0};
    for (int d = 0; d < 66; d++)
        sum.digits[d] = INT64_C(0xffffffff) << 31;
    fsdpc_exact_sum one = {{0}, 0, 0};
    for (int d = 0; d < 66; d++)
        one.digits[d] = 0xffffffff;
    fsdpc_exact_sum_normalize(&sum);
    /* 2^31 (2^(32*66) - 1) = all ones in digits 1..65, shifted by 31 */
    CHECK(sum.digits[0] == INT64_C(0x80000000));
    for (int d = 1; d < 66; d++)
        CHECK(sum.digits[d] == 0xffffffff);
    CHECK(sum.digits[66] == 0x7fffffff && sum.digits[67] == 0);
    CHECK(isinf(fsdpc_exact_sum_value(&sum)) && isinf(fsdpc_exact_sum_value(&one)));
}

static void test_not_numbers(void)
{
    const double with_nan[] = {1, NAN, INFINITY}, with_inf[] = {1, INFINITY, 2}, below[] = {5, -1};
    CHECK(isnan(sum_of(with_nan, 3)));
    CHECK(isinf(sum_of(with_inf, 3)) && sum_of(with_inf, 3) > 0);
    CHECK(isnan(sum_of(below, 2)));
    fsdpc_exact_sum a = {{0}, 0, 0}, b = {{0}, 0, 0};
    fsdpc_exact_sum_add(&a, 1);
    fsdpc_exact_sum_add(&b, INFINITY);
    fsdpc_exact_sum_add(&b, INFINITY);
    fsdpc_exact_sum_merge(&a, &b);
    CHECK(a.infinities == 2 && a.nans == 0 && isinf(fsdpc_exact_sum_value(&a)));
}

/* Shifting the sum is summing shifted values. */
static void test_shift(void)
{
    enum { N = 300 };
    uint64_t state = 5;
    for (int trial = 0; trial < 200; trial++) {
        int bits = trial < 4 ? (int[]){0, 32, -32, 64}[trial] : (int)(next(&state) % 401) - 200;
        fsdpc_exact_sum plain = {{0}, 0, 0}, shifted = plain;
        for (int i = 0; i < N; i++) {
            double value = ldexp((double)(next(&state) >> 11), (int)(next(&state) % 600) - 400);
            fsdpc_exact_sum_add(&plain, value);
            fsdpc_exact_sum_add(&shifted, ldexp(value, bits));
        }
        exact_sum_shift(&plain, bits);
        fsdpc_exact_sum_normalize(&shifted);
        CHECK_NOTE(memcmp(&plain, &shifted, sizeof plain) == 0, "by %d", bits);
    }
    fsdpc_exact_sum sum = {{0}, 2, 1};
    fsdpc_exact_sum_add(&sum, 0x3p-1074);
    exact_sum_shift(&sum, -1); /* 1.5: the half is cut off */
    CHECK(sum.nans == 2 && sum.infinities == 1);
    sum.nans = sum.infinities = 0;
    CHECK(fsdpc_exact_sum_value(&sum) == 0x1p-1074);
    exact_sum_shift(&sum, 40);
    CHECK(fsdpc_exact_sum_value(&sum) == 0x1p-1034);
    exact_sum_shift(&sum, 5000);
    CHECK(isinf(fsdpc_exact_sum_value(&sum)));
}

int main(void)
{
    test_single_values();
    test_pairs();
    test_rounding_of_many();
    test_integers();
    test_cuts();
    test_room_for_carries();
    test_not_numbers();
    test_shift();
    return check_report("exact_sum");
}
