/* cast, accumulate, scale and equal: every pair of dtypes, every path, sizes, cuts, alignment. */
#include "test_flat_common.h"

/* Bit patterns that conversions get wrong. */
static const uint32_t hard_f32[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x000116c2, 0x7f7fffff,
    0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001, 0x7fffffff, 0x3f800000, 0x3f808000,
    0x3f818000, 0x3f80ffff, 0x3f807fff, 0x3f808001, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000,
    0x38800000, 0x387fffff, 0x33000000, 0x33000001, 0x32ffffff, 0x33800000, 0x33c00000, 0x38000fff,
    0x7f7f8000, 0x7f7f7fff, 0x3f801000, 0x3f803000, 0x3f802fff, 0xb8001001};
enum { HARD = sizeof hard_f32 / sizeof hard_f32[0] };

/* Casts of hard and random numbers equal the scalar twins bit for bit, and rounding done by
 * dividing. */
static void test_cast_bits(rig *r)
{
    enum { N = 40000 };
    float *src = test_alloc(N * sizeof *src), *back = test_alloc(N * sizeof *back);
    uint16_t *bf16 = test_alloc(N * 2), *f16 = test_alloc(N * 2);
    uint64_t state = 1;
    for (size_t i = 0; i < N; i++)
        src[i] = fsdpc_f32_from_bits(i < HARD ? hard_f32[i] : (uint32_t)random_bits(&state));
    for (size_t i = N / 2; i < N; i++) /* in fp16's range */
        src[i] = (float)(random_value(&state) * ldexp(1, (int)(random_bits(&state) % 40) - 24));
    CHECK_OK(r->ops->cast(bf16, FSDPC_BF16, src, FSDPC_F32, N, &r->stream));
    CHECK_OK(r->ops->cast(f16, FSDPC_F16, src, FSDPC_F32, N, &r->stream));
    for (size_t i = 0; i < N; i++) {
        double x = (double)src[i];
        CHECK_NOTE(bf16[i] == fsdpc_f32_to_bf16(src[i]), "%a", x);
        CHECK_NOTE(f16[i] == fsdpc_f32_to_f16(src[i]), "%a", x);
        CHECK_NOTE(same_value(element(bf16, i, FSDPC_BF16), round_as(x, FSDPC_BF16)), "%a", x);
        CHECK_NOTE(same_value(element(f16, i, FSDPC_F16), round_as(x, FSDPC_F16)), "%a", x);
    }
    for (size_t i = 0; i < N; i++)
        f16[i] = (uint16_t)i, bf16[i] = (uint16_t)(i * 2 + 1);
    CHECK_OK(r->ops->cast(back, FSDPC_F32, f16, FSDPC_F16, N, &r->stream));
    for (size_t i = 0; i < N; i++)
        CHECK(fsdpc_f32_bits(back[i]) == fsdpc_f32_bits(fsdpc_f16_to_f32(f16[i])));
    CHECK_OK(r->ops->cast(back, FSDPC_F32, bf16, FSDPC_BF16, N, &r->stream));
    for (size_t i = 0; i < N; i++)
        CHECK(fsdpc_f32_bits(back[i]) == (uint32_t)bf16[i] << 16);
    free(src), free(back), free(bf16), free(f16);
}

/* From fp64 a value is rounded once: these are ties after a first rounding to fp32, but not before.
 */
static void test_cast_f64_once(rig *r)
{
    const double above_tie = 1 + 0x1p-8 + 0x1p-40, below_tie = 1 + 0x3p-8 - 0x1p-40;
    const double f16_above = 1 + 0x1p-11 + 0x1p-40, tiny = 0x1p-25 + 0x1p-60;
    const double src[] = {above_tie, below_tie, f16_above, tiny, -above_tie, 1e300, -1e-300, NAN};
    uint16_t out[8];
    CHECK_OK(r->ops->cast(out, FSDPC_BF16, src, FSDPC_F64, 8, &r->stream));
    for (size_t i = 0; i < 8; i++)
        CHECK(same_value(element(out, i, FSDPC_BF16), round_as(src[i], FSDPC_BF16)));
    CHECK(out[0] == 0x3f81 && out[1] == 0x3f81);
    CHECK_OK(r->ops->cast(out, FSDPC_F16, src, FSDPC_F64, 8, &r->stream));
    for (size_t i = 0; i < 8; i++)
        CHECK(same_value(element(out, i, FSDPC_F16), round_as(src[i], FSDPC_F16)));
    CHECK(out[2] == 0x3c01 && out[3] == 1);
}

/* Every pair of dtypes and size; then the same in random cuts, which move the alignment too. */
static void test_pair(rig *r, fsdpc_dtype dst_dtype, fsdpc_dtype src_dtype, size_t numel)
{
    size_t bytes = numel * fsdpc_dtype_bytes(dst_dtype);
    void *src = test_alloc(numel * fsdpc_dtype_bytes(src_dtype)), *dst = test_alloc(bytes + 1);
    void *cut = test_alloc(bytes), *before = test_alloc(bytes);
    fill_random(src, numel, src_dtype, 7);
    fill_random(before, numel, dst_dtype, 8);
    ((char *)dst)[bytes] = 77; /* nothing may be written past the end */

    CHECK_OK(r->ops->cast(dst, dst_dtype, src, src_dtype, numel, &r->stream));
    size_t wrong = 0;
    for (size_t i = 0; i < numel; i++)
        wrong += !same_value(element(dst, i, dst_dtype),
                             round_as(element(src, i, src_dtype), dst_dtype));
    CHECK_NOTE(wrong == 0, "%zu of %zu", wrong, numel);
    bool equal = true;
    CHECK_OK(r->ops->equal(dst, dst_dtype, src, src_dtype, numel, &equal, &r->stream));
    CHECK(equal);

    memcpy(dst, before, bytes);
    CHECK_OK(r->ops->accumulate(dst, dst_dtype, src, src_dtype, numel, &r->stream));
    bool f64 = dst_dtype == FSDPC_F64 || src_dtype == FSDPC_F64;
    wrong = 0;
    for (size_t i = 0; i < numel; i++) {
        double sum = element(before, i, dst_dtype) + element(src, i, src_dtype);
        wrong += !same_value(element(dst, i, dst_dtype),
                             round_as(f64 ? sum : (double)(float)sum, dst_dtype));
    }
    CHECK_NOTE(wrong == 0, "%zu of %zu", wrong, numel);
    CHECK(((char *)dst)[bytes] == 77);

    memcpy(cut, before, bytes);
    uint64_t state = numel;
    for (size_t at = 0, n; at < numel; at += n) {
        n = 1 + random_bits(&state) % (numel / 3 + 20);
        n = n > numel - at ? numel - at : n;
        CHECK_OK(r->ops->accumulate(at_element(cut, at, dst_dtype), dst_dtype,
                                    at_element(src, at, src_dtype), src_dtype, n, &r->stream));
    }
    CHECK(memcmp(cut, dst, bytes) == 0);
    free(src), free(dst), free(cut), free(before);
}

static bool equals(rig *r, const void *dst, fsdpc_dtype dtype, const float *src, size_t numel)
{
    bool equal = true;
    CHECK_OK(r->ops->equal(dst, dtype, src, FSDPC_F32, numel, &equal, &r->stream));
    return equal;
}

/* One bit anywhere makes a difference; NaN with equal bits does not. */
static void test_equal(rig *r)
{
    const size_t places[] = {0, 1, 4095, 4096, 100000, LARGE_NUMEL - 1};
    float *src = test_alloc(LARGE_NUMEL * 4);
    uint32_t *same = test_alloc(LARGE_NUMEL * 4);
    uint16_t *half = test_alloc(LARGE_NUMEL * 2);
    fill_random(src, LARGE_NUMEL, FSDPC_F32, 3);
    src[5] = NAN, src[6] = -0.0f;
    memcpy(same, src, LARGE_NUMEL * 4);
    CHECK_OK(r->ops->cast(half, FSDPC_BF16, src, FSDPC_F32, LARGE_NUMEL, &r->stream));
    CHECK(equals(r, same, FSDPC_F32, src, LARGE_NUMEL));
    CHECK(equals(r, half, FSDPC_BF16, src, LARGE_NUMEL));
    for (size_t k = 0; k < sizeof places / sizeof places[0]; k++) {
        same[places[k]] ^= 1, half[places[k]] ^= 1;
        CHECK_NOTE(!equals(r, same, FSDPC_F32, src, LARGE_NUMEL), "element %zu", places[k]);
        CHECK_NOTE(!equals(r, half, FSDPC_BF16, src, LARGE_NUMEL), "element %zu", places[k]);
        same[places[k]] ^= 1, half[places[k]] ^= 1;
    }
    bool found = false; /* a difference that was found before stays */
    CHECK_OK(r->ops->equal(same, FSDPC_F32, src, FSDPC_F32, LARGE_NUMEL, &found, &r->stream));
    CHECK(!found);
    same[6] = 0; /* +0 and -0 are equal numbers and different bits */
    CHECK(!equals(r, same, FSDPC_F32, src, LARGE_NUMEL));
    CHECK(equals(r, NULL, FSDPC_F32, NULL, 0));
    free(src), free(same), free(half);
}

static void test_scale(rig *r, fsdpc_dtype dtype, size_t numel)
{
    void *x = test_alloc(numel * fsdpc_dtype_bytes(dtype));
    void *before = test_alloc(numel * fsdpc_dtype_bytes(dtype));
    fill_random(before, numel, dtype, 11);
    memcpy(x, before, numel * fsdpc_dtype_bytes(dtype));
    int nonfinite = 0;
    const float by = 0.3f;
    CHECK_OK(r->ops->scale(x, dtype, numel, by, NULL, &nonfinite, &r->stream));
    CHECK(nonfinite == 0);
    size_t wrong = 0;
    for (size_t i = 0; i < numel; i++) {
        double product = element(before, i, dtype) * (double)by;
        product = dtype == FSDPC_F64 ? product : (double)(float)product;
        wrong += !same_value(element(x, i, dtype), round_as(product, dtype));
    }
    CHECK_NOTE(wrong == 0, "%zu of %zu", wrong, numel);
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < 3 && numel; k++) {
        size_t place = (numel - 1) * k / 2;
        set_element(x, place, dtype, bad[k]);
        nonfinite = 0;
        CHECK_OK(r->ops->scale(x, dtype, numel, 1, NULL, &nonfinite, &r->stream));
        CHECK(nonfinite == 1 && !isfinite(element(x, place, dtype)));
        set_element(x, place, dtype, 0);
    }
    nonfinite = 5; /* left alone when all is well */
    CHECK_OK(r->ops->scale(x, dtype, numel, 2, NULL, &nonfinite, &r->stream));
    CHECK(nonfinite == 5);
    CHECK_OK(r->ops->scale(x, dtype, numel, 2, NULL, NULL, &r->stream));
    free(x), free(before);
}

/* Long aligned outputs are written past the cache: same bits, also at ragged ends. */
static void test_streamed(rig *r)
{
    enum { N = (1 << 20) + 77 };
    float *src = test_alloc(N * 4);
    char *dst = aligned_alloc(64, N * 4 + 64 - N * 4 % 64);
    uint64_t state = 5;
    for (size_t i = 0; i < N; i++)
        src[i] = fsdpc_f32_from_bits((uint32_t)random_bits(&state));
    for (size_t offset = 0; offset <= 4; offset += 4) {
        size_t wrong = 0, n = N - offset;
        CHECK_OK(r->ops->cast(dst + offset, FSDPC_BF16, src, FSDPC_F32, n, &r->stream));
        for (size_t i = 0; i < n; i++)
            wrong += ((uint16_t *)(void *)(dst + offset))[i] != fsdpc_f32_to_bf16(src[i]);
        CHECK_OK(r->ops->cast(dst + offset, FSDPC_F16, src, FSDPC_F32, n, &r->stream));
        for (size_t i = 0; i < n; i++)
            wrong += ((uint16_t *)(void *)(dst + offset))[i] != fsdpc_f32_to_f16(src[i]);
        CHECK_NOTE(wrong == 0, "%zu", wrong);
        CHECK_OK(r->ops->cast(dst + offset, FSDPC_F32, src, FSDPC_F32, n, &r->stream));
        CHECK(memcmp(dst + offset, src, n * 4) == 0);
        CHECK_OK(r->ops->cast(dst + offset, FSDPC_BF16, src, FSDPC_BF16, n + 1, &r->stream));
        CHECK(memcmp(dst + offset, src, n * 2 + 2) == 0);
    }
    free(src), free(dst);
}

static void test_refusals(rig *r)
{
    float x[4] = {0};
    bool equal = true;
    CHECK_FAILS(r->ops->cast(x, FSDPC_I32, x, FSDPC_F32, 1, &r->stream), FSDPC_ERR_DTYPE, "int32");
    CHECK_FAILS(r->ops->accumulate(x, FSDPC_F32, x, FSDPC_BOOL, 1, &r->stream), FSDPC_ERR_DTYPE,
                "bool");
    CHECK_FAILS(r->ops->scale(x, FSDPC_U8, 1, 1, NULL, NULL, &r->stream), FSDPC_ERR_DTYPE, "uint8");
    CHECK_FAILS(r->ops->equal(x, FSDPC_F32, x, FSDPC_I64, 1, &equal, &r->stream), FSDPC_ERR_DTYPE,
                "int64");
    CHECK_FAILS(r->ops->cast(x, FSDPC_F64, x, FSDPC_F32, 1, &r->stream), FSDPC_ERR_VALUE,
                "in place");
    CHECK_OK(r->ops->cast(x, FSDPC_BF16, x, FSDPC_F16, 8, &r->stream));
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        test_cast_bits(&r);
        test_cast_f64_once(&r);
        for (size_t s = 0; s < SIZES; s++)
            for (size_t d = 0; d < 4; d++) {
                test_scale(&r, all_floats[d], some_sizes[s]);
                for (size_t e = 0; e < 4; e++)
                    test_pair(&r, all_floats[d], all_floats[e], some_sizes[s]);
            }
        test_equal(&r);
        test_streamed(&r);
        test_refusals(&r);
        rig_fini(&r);
    }
    CHECK(strcmp(fsdpc_flat_ops_cpu(FSDPC_ISA_PORTABLE)->name, "portable") == 0);
    return check_report("flat_cast");
}
