/* absmax and clamp against plain loops, on every path, at any alignment, with NaN and infinity. */
#include "test_flat_common.h"

static void test_case(rig *r, fsdpc_dtype dtype, size_t numel, size_t shift)
{
    size_t bytes = fsdpc_dtype_bytes(dtype);
    void *memory = test_alloc((numel + shift) * bytes), *x = at_element(memory, shift, dtype);
    fill_random(x, numel, dtype, numel + 7);
    double expect = 0, most = 0;
    for (size_t i = 0; i < numel; i++)
        expect = fmax(expect, fabs(element(x, i, dtype)));
    CHECK_OK(r->ops->absmax(x, dtype, numel, &most, &r->stream));
    CHECK_NOTE(most == expect, "%s %zu: %a, not %a", fsdpc_dtype_name(dtype), numel, most, expect);
    most = 1e4;
    CHECK_OK(r->ops->absmax(x, dtype, numel, &most, &r->stream));
    CHECK(most == 1e4); /* the larger of the two */

    uint64_t state = numel;
    for (int trial = 0; numel > 0 && trial < 8; trial++) { /* anywhere, tails included */
        size_t at = trial == 0 ? numel - 1 : random_bits(&state) % numel;
        const double poisons[] = {-INFINITY, (double)NAN, -(double)NAN};
        double before = element(x, at, dtype), poison = poisons[trial % 3];
        set_element(x, at, dtype, poison);
        most = 0;
        CHECK_OK(r->ops->absmax(x, dtype, numel, &most, &r->stream));
        CHECK(isnan(poison) ? isnan(most) && !signbit(most) : most == INFINITY);
        set_element(x, at, dtype, before);
    }
    free(memory);
}

static void test_clamp(rig *r, fsdpc_dtype dtype, size_t numel, double limit)
{
    size_t bytes = fsdpc_dtype_bytes(dtype);
    void *x = test_alloc(numel * bytes), *before = test_alloc(numel * bytes);
    fill_random(x, numel, dtype, numel + 3);
    const double poisons[] = {(double)NAN, INFINITY, -INFINITY, -0.0, 1e30};
    for (size_t i = 0; i < 5 && i * 11 < numel; i++)
        set_element(x, i * 11, dtype, round_as(poisons[i], dtype));
    memcpy(before, x, numel * bytes);
    CHECK_OK(r->ops->clamp(x, dtype, numel, limit, &r->stream));
    double cut = round_as(limit, dtype);
    for (size_t i = 0; i < numel; i++) {
        double was = element(before, i, dtype), is = element(x, i, dtype);
        double expect = was > cut ? cut : was < -cut ? -cut : was;
        CHECK_NOTE(same_value(is, expect), "%s %zu of %zu at %g: %a became %a",
                   fsdpc_dtype_name(dtype), i, numel, limit, was, is);
    }
    free(x);
    free(before);
}

static void test_refused(rig *r)
{
    float x[2] = {1, 2};
    double most = 0;
    CHECK_FAILS(r->ops->absmax(x, FSDPC_I32, 1, &most, &r->stream), FSDPC_ERR_DTYPE, "int32");
    CHECK_FAILS(r->ops->clamp(x, FSDPC_I32, 1, 1, &r->stream), FSDPC_ERR_DTYPE, "int32");
    CHECK_FAILS(r->ops->clamp(x, FSDPC_F32, 1, -1, &r->stream), FSDPC_ERR_VALUE, "-1");
    CHECK_FAILS(r->ops->clamp(x, FSDPC_F32, 1, (double)NAN, &r->stream), FSDPC_ERR_VALUE, "nan");

    fsdpc_flat_ops without = {.name = "little"};
    fsdpc_exact_sum sum = {{0}, 0, 0};
    r->device.flat = &without;
    CHECK_FAILS(fsdpc_flat_sumpow(x, FSDPC_F32, 2, 64, 1, &sum, &r->stream), FSDPC_ERR_UNSUPPORTED,
                "'little' have no sums of powers");
    CHECK_FAILS(fsdpc_flat_absmax(x, FSDPC_F32, 2, &most, &r->stream), FSDPC_ERR_UNSUPPORTED,
                "maxima");
    CHECK_FAILS(fsdpc_flat_clamp(x, FSDPC_F32, 2, 1, &r->stream), FSDPC_ERR_UNSUPPORTED, "clamp");
    r->device.flat = r->ops;
    CHECK(x[0] == 1 && x[1] == 2);
}

int main(void)
{
    const double limits[] = {0, 0.1, 0.25, 1e5, INFINITY};
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        for (size_t d = 0; d < 4; d++)
            for (size_t s = 0; s < SIZES; s++) {
                for (size_t shift = 0; shift < 3; shift++)
                    test_case(&r, all_floats[d], some_sizes[s], shift);
                for (size_t l = 0; l < sizeof limits / sizeof limits[0]; l++)
                    test_clamp(&r, all_floats[d], some_sizes[s], limits[l]);
            }
        test_refused(&r);
        rig_fini(&r);
    }
    return check_report("flat_magnitude");
}
