/* Copies: every pair of dtypes, slices, transposes, permutations, accumulation; sums over
 * dimensions. */
#include "nn_rig.h"

static const fsdpc_dtype all_dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64,
                                         FSDPC_I32, FSDPC_I64,  FSDPC_U8,  FSDPC_BOOL};

static double cast_reference(double x, fsdpc_dtype to)
{
    buffer one = buffer_make(to, 1);
    if (to == FSDPC_BOOL)
        buffer_set(&one, 0, x != 0);
    else
        buffer_set(&one, 0, x); /* C's conversions; the values used are in range */
    double y = buffer_get(&one, 0);
    buffer_free(&one);
    return y;
}

static void test_cast(nn_rig *rig, fsdpc_dtype to, fsdpc_dtype from, size_t numel, bool accumulate)
{
    buffer src = buffer_noise(from, numel, 1, 0, from == FSDPC_BOOL ? 2 : 100);
    buffer dst = buffer_noise(to, numel, 2, 0, to == FSDPC_BOOL ? 2 : 100);
    buffer old = buffer_noise(to, numel, 2, 0, to == FSDPC_BOOL ? 2 : 100);
    fsdpc_copy_args args = {1, {numel}, {1}, {1}, to, from, dst.data, src.data, accumulate, 0};
    CHECK_OK(rig->ops->copy(&args, rig->stream));
    buffer_check(rig, &dst, "cast");
    for (size_t i = 0; i<numel; i += numel> 1000 ? 7 : 1) {
        double sum = buffer_get(&src, i) + (accumulate ? buffer_get(&old, i) : 0);
        check_near(rig, "cast", to, i, buffer_get(&dst, i), cast_reference(sum, to), 0);
    }
    buffer_free(&src);
    buffer_free(&dst);
    buffer_free(&old);
}

/* All 65536 16-bit patterns widened, and fp32 values around every one of them narrowed. */
static void test_half_bits(nn_rig *rig, fsdpc_dtype half)
{
    enum { N = 65536 };
    static uint16_t bits[N], back[N];
    static float wide[N];
    for (size_t i = 0; i < N; i++)
        bits[i] = (uint16_t)i;
    fsdpc_copy_args widen = {1, {N}, {1}, {1}, FSDPC_F32, half, wide, bits, false, 0};
    CHECK_OK(rig->ops->copy(&widen, rig->stream));
    size_t wrong = 0;
    for (size_t i = 0; i < N; i++) {
        float want = half == FSDPC_BF16 ? fsdpc_bf16_to_f32(bits[i]) : fsdpc_f16_to_f32(bits[i]);
        wrong += fsdpc_f32_bits(want) != fsdpc_f32_bits(wide[i]);
    }
    CHECK_NOTE(wrong == 0, "%s: %zu wrong widened bits", rig->ops->name, wrong);
    const int32_t shifts[] = {0, 1, -1, 0x8000, 0x7fff, 0x8001, 0x1000, 0xfff, 0x1001};
    fsdpc_copy_args narrow = {1, {N}, {1}, {1}, half, FSDPC_F32, back, wide, false, 0};
    for (size_t s = 0; s < 9; s++) {
        for (size_t i = 0; i < N; i++) {
            uint32_t base = half == FSDPC_BF16 ? (uint32_t)i << 16
                                               : fsdpc_f32_bits(fsdpc_f16_to_f32((uint16_t)i));
            wide[i] = fsdpc_f32_from_bits(base + (uint32_t)shifts[s]);
        }
        CHECK_OK(rig->ops->copy(&narrow, rig->stream));
        for (size_t i = 0; i < N; i++)
            wrong += back[i] !=
                     (half == FSDPC_BF16 ? fsdpc_f32_to_bf16(wide[i]) : fsdpc_f32_to_f16(wide[i]));
    }
    CHECK_NOTE(wrong == 0, "%s: %zu wrong narrowed bits", rig->ops->name, wrong);
}

static void test_saturation(nn_rig *rig)
{
    float x[6] = {NAN, INFINITY, -INFINITY, 3e9f, -1.9f, 256.5f};
    int32_t i32[6];
    int64_t i64[6];
    uint8_t u8[6];
    fsdpc_copy_args args = {1, {6}, {1}, {1}, FSDPC_I32, FSDPC_F32, i32, x, false, 0};
    CHECK_OK(rig->ops->copy(&args, rig->stream));
    CHECK(i32[0] == 0 && i32[1] == INT32_MAX && i32[2] == INT32_MIN && i32[3] == INT32_MAX);
    CHECK(i32[4] == -1 && i32[5] == 256);
    args.dst = i64;
    args.dst_dtype = FSDPC_I64;
    CHECK_OK(rig->ops->copy(&args, rig->stream));
    CHECK(i64[0] == 0 && i64[1] == INT64_MAX && i64[2] == INT64_MIN && i64[3] == 3000000000);
    args.dst = u8;
    args.dst_dtype = FSDPC_U8;
    CHECK_OK(rig->ops->copy(&args, rig->stream));
    CHECK(u8[0] == 0 && u8[1] == 255 && u8[2] == 0 && u8[4] == 0 && u8[5] == 255);
    int64_t big[2] = {(int64_t)1 << 62 | 1, -5}, same[2];
    fsdpc_copy_args exact = {1, {2}, {1}, {1}, FSDPC_I64, FSDPC_I64, same, big, false, 0};
    CHECK_OK(rig->ops->copy(&exact, rig->stream));
    CHECK(memcmp(big, same, sizeof big) == 0);
}

/* dst dense over shape; src the same elements with its dimensions in another order */
static void test_permute(nn_rig *rig, fsdpc_dtype to, fsdpc_dtype from, int ndim,
                         const size_t *shape, const int *order, bool accumulate)
{
    fsdpc_copy_args args = {.ndim = ndim, .dst_dtype = to, .src_dtype = from};
    args.accumulate = accumulate;
    size_t numel = 1, src_numel = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        args.shape[d] = shape[d];
        args.stride_dst[d] = numel;
        numel *= shape[d];
        args.stride_src[order[d]] = src_numel;
        src_numel *= shape[order[d]];
    }
    buffer src = buffer_noise(from, numel, 3, 0, from == FSDPC_BOOL ? 2 : 100),
           dst = buffer_noise(to, numel, 4, 0, 100);
    buffer old = buffer_noise(to, numel, 4, 0, 100);
    args.src = src.data;
    args.dst = dst.data;
    CHECK_OK(rig->ops->copy(&args, rig->stream));
    buffer_check(rig, &dst, "permute");
    size_t wrong = 0;
    for (size_t i = 0; i < numel; i++) {
        size_t at = 0, rest = i;
        for (int d = ndim - 1; d >= 0; rest /= shape[d--])
            at += rest % shape[d] * args.stride_src[d];
        double want = buffer_get(&src, at) + (accumulate ? buffer_get(&old, i) : 0);
        wrong += buffer_get(&dst, i) != cast_reference(want, to);
    }
    CHECK_NOTE(wrong == 0, "%s: %zu of %zu wrong, %s to %s", rig->ops->name, wrong, numel,
               fsdpc_dtype_name(from), fsdpc_dtype_name(to));
    buffer_free(&src);
    buffer_free(&dst);
    buffer_free(&old);
}

static void test_strided_destination(nn_rig *rig)
{
    float dst[12] = {0}, src[4] = {1, 2, 3, 4};
    fsdpc_copy_args args = {2, {2, 2}, {6, 2}, {2, 1}, FSDPC_F32, FSDPC_F32, dst, src, false, 0};
    CHECK_OK(rig->ops->copy(&args, rig->stream)); /* into columns 0 and 2 of rows 0 and 2 */
    const float want[12] = {1, 0, 2, 0, 0, 0, 3, 0, 4, 0, 0, 0};
    CHECK(memcmp(dst, want, sizeof want) == 0);
    fsdpc_copy_args expand = {2, {3, 4}, {4, 1}, {0, 1}, FSDPC_F32, FSDPC_F32, dst, src, false, 0};
    CHECK_OK(rig->ops->copy(&expand, rig->stream));
    for (size_t i = 0; i < 12; i++)
        CHECK(dst[i] == src[i % 4]);
    fsdpc_copy_args repeat = {2, {4, 3}, {3, 1}, {1, 0}, FSDPC_F32, FSDPC_F32, dst, src, false, 0};
    CHECK_OK(rig->ops->copy(&repeat, rig->stream));
    for (size_t i = 0; i < 12; i++)
        CHECK(dst[i] == src[i / 3]);
    uint16_t halves[44], from[2] = {0x3f80, 0xbf81}; /* in rows longer than a vector */
    fsdpc_copy_args wide = {2,          {2, 22}, {22, 1}, {1, 0}, FSDPC_BF16,
                            FSDPC_BF16, halves,  from,    false,  0};
    CHECK_OK(rig->ops->copy(&wide, rig->stream));
    for (size_t i = 0; i < 44; i++)
        CHECK(halves[i] == from[i / 22]);
}

/* Rows, columns and both backwards, and one element everywhere, of every width. */
static void test_backwards(nn_rig *rig, fsdpc_dtype dtype)
{
    enum { ROWS = 7, COLS = 45 };
    buffer src = buffer_noise(dtype, ROWS * COLS, 9, 0, 2), dst = buffer_make(dtype, ROWS * COLS);
    for (int kind = 0; kind < 5; kind++) {
        bool rows = kind & 1, cols = kind & 2, one = kind == 4;
        fsdpc_copy_args args = {.ndim = 2,
                                .shape = {ROWS, COLS},
                                .stride_dst = {COLS, 1},
                                .stride_src = {one    ? 0
                                               : rows ? (size_t)-COLS
                                                      : COLS,
                                               one    ? 0
                                               : cols ? (size_t)-1
                                                      : 1},
                                .dst_dtype = dtype,
                                .src_dtype = dtype,
                                .dst = dst.data,
                                .src = src.data,
                                .src_first =
                                    (rows ? (ROWS - 1) * COLS : 0) + (cols ? COLS - 1 : 0)};
        CHECK_OK(rig->ops->copy(&args, rig->stream));
        buffer_check(rig, &dst, "backwards");
        for (size_t i = 0; i < ROWS * COLS; i++) {
            size_t r = rows ? ROWS - 1 - i / COLS : i / COLS;
            size_t c = cols ? COLS - 1 - i % COLS : i % COLS;
            CHECK(buffer_get(&dst, i) == buffer_get(&src, one ? 0 : r * COLS + c));
        }
    }
    buffer_free(&src);
    buffer_free(&dst);
}

static void suite(nn_rig *rig)
{
    for (size_t d = 0; d < 8; d++)
        test_backwards(rig, all_dtypes[d]);
    const size_t sizes[] = {0, 1, 9, 300, 50003};
    for (size_t to = 0; to < 8; to++)
        for (size_t from = 0; from < 8; from++)
            for (size_t n = 0; n < 5; n++)
                for (int accumulate = 0; accumulate < 2; accumulate++)
                    if (!accumulate || (all_dtypes[to] != FSDPC_BOOL && n < 4))
                        test_cast(rig, all_dtypes[to], all_dtypes[from], sizes[n], accumulate);
    test_half_bits(rig, FSDPC_BF16);
    test_half_bits(rig, FSDPC_F16);
    test_saturation(rig);
    const size_t flat[][2] = {{1, 1}, {16, 16}, {3, 5}, {37, 65}, {128, 64}, {257, 190}};
    for (size_t s = 0; s < 6; s++)
        for (size_t d = 0; d < 8; d++)
            test_permute(rig, all_dtypes[d], all_dtypes[d], 2, flat[s], (int[]){1, 0}, false);
    const size_t deep[4] = {2, 19, 3, 33};
    const int orders[][4] = {{0, 2, 1, 3}, {0, 2, 3, 1}, {3, 2, 1, 0}, {1, 0, 3, 2}, {2, 3, 0, 1}};
    for (size_t o = 0; o < 5; o++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            test_permute(rig, FSDPC_F32, FSDPC_F32, 4, deep, orders[o], accumulate);
            test_permute(rig, FSDPC_BF16, FSDPC_BF16, 4, deep, orders[o], accumulate);
            test_permute(rig, FSDPC_BF16, FSDPC_F32, 4, deep, orders[o], accumulate);
            test_permute(rig, FSDPC_F64, FSDPC_BF16, 4, deep, orders[o], accumulate);
        }
    test_strided_destination(rig);
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_copy");
}
