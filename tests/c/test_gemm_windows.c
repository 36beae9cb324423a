/* Products with patches of images have the bits of products with the same numbers as a matrix, on
 * every instruction set, whatever the blocks; and tiles of few rows have the bits of others. */
#include "nn_rig.h"
#include "ops/gemm.h"

static const fsdpc_patches cases[] = {
    {1, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, {0, 0}},
    {3, {5, 9}, {3, 2}, {5, 8}, {1, 1}, {1, 1}, {-1, 0}},
    {2, {7, 40}, {3, 3}, {4, 21}, {2, 2}, {1, 2}, {-1, -3}},
    {2, {6, 11}, {2, 3}, {6, 12}, {1, 1}, {-1, -2}, {1, 3}}, /* turned around, as gradients */
    {4, {3, 3}, {2, 2}, {9, 9}, {1, 1}, {3, 3}, {-5, -7}},   /* patches of zeros alone */
    {1, {1, 700}, {1, 5}, {1, 233}, {1, 3}, {1, 1}, {0, -2}},
    {100, {20, 20}, {3, 3}, {20, 20}, {1, 1}, {1, 1}, {-1, -1}}, /* several blocks of all */
    {3, {4, 4}, {0, 2}, {4, 4}, {1, 1}, {1, 1}, {0, 0}},
};

/* The matrix, by its definition. */
static buffer matrix_of(const fsdpc_patches *w, const buffer *image, size_t first)
{
    size_t cols = fsdpc_patches_cols(w), at = 0;
    buffer matrix = buffer_make(image->dtype, fsdpc_patches_rows(w) * cols);
    for (size_t c = 0; c < w->channels; c++)
        for (size_t i = 0; i < w->kernel[0]; i++)
            for (size_t j = 0; j < w->kernel[1]; j++)
                for (size_t place = 0; place < cols; place++) {
                    ptrdiff_t y = (ptrdiff_t)(place / w->places[1]) * w->step[0] +
                                  (ptrdiff_t)i * w->spread[0] + w->origin[0];
                    ptrdiff_t x = (ptrdiff_t)(place % w->places[1]) * w->step[1] +
                                  (ptrdiff_t)j * w->spread[1] + w->origin[1];
                    bool inside = y >= 0 && y < (ptrdiff_t)w->image[0] && x >= 0 &&
                                  x < (ptrdiff_t)w->image[1];
                    size_t from = (c * w->image[0] + (size_t)y) * w->image[1] + (size_t)x;
                    buffer_set(&matrix, at++, inside ? buffer_get(image, first + from) : 0);
                }
    return matrix;
}

static void try_product(nn_rig *rig, const fsdpc_patches *w, fsdpc_dtype dtype, size_t m,
                        bool trans_b)
{
    enum { BATCH = 2 };
    size_t rows = fsdpc_patches_rows(w), cols = fsdpc_patches_cols(w);
    fsdpc_gemm_args args = {.m = m, .dtype = dtype, .c_dtype = dtype, .trans_b = trans_b};
    args.n = args.ldc = trans_b ? rows : cols;
    args.k = args.lda = trans_b ? cols : rows;
    size_t numel = w->channels * w->image[0] * w->image[1], c_numel = m * args.n;
    buffer a = buffer_noise(dtype, m * args.k, 1, -1, 1);
    buffer image = buffer_noise(dtype, BATCH * numel, 2, -1, 1);
    buffer c = buffer_noise(dtype, BATCH * c_numel, 3, -1, 1);
    buffer want = buffer_noise(dtype, c_numel, 3, -1, 1), bias = buffer_noise(dtype, m, 4, -1, 1);
    args.a = a.data;
    args.b = image.data;
    args.c = c.data;
    args.batch = BATCH;
    args.stride_b = numel;
    args.stride_c = c_numel;
    args.patches = w;
    bool with_bias = !trans_b && (dtype == FSDPC_F32 || dtype == FSDPC_F64);
    args.bias = with_bias ? bias.data : NULL;
    CHECK_OK(rig->ops->gemm(&args, rig->stream));
    buffer_check(rig, &c, "windows");
    args.bias = NULL;
    args.patches = NULL;
    args.batch = 0;
    args.c = want.data;
    args.ldb = cols;
    for (size_t z = 0; z < BATCH; z++) {
        buffer matrix = matrix_of(w, &image, z * numel);
        args.b = matrix.data;
        CHECK_OK(rig->ops->gemm(&args, rig->stream));
        size_t differ = 0;
        for (size_t i = 0; i < c_numel; i++) {
            double plain = buffer_get(&want, i);
            if (with_bias && dtype == FSDPC_F32)
                plain = (float)plain + (float)buffer_get(&bias, i / args.n);
            else if (with_bias)
                plain += buffer_get(&bias, i / args.n);
            differ += buffer_get(&c, z * c_numel + i) != plain;
        }
        CHECK_NOTE(differ == 0, "%s %s case %zu, m %zu, trans %d: %zu differ",
                   fsdpc_isa_name(rig->isa), fsdpc_dtype_name(dtype), (size_t)(w - cases), m,
                   trans_b, differ);
        buffer_free(&matrix);
    }
    buffer_free(&a);
    buffer_free(&image);
    buffer_free(&c);
    buffer_free(&want);
    buffer_free(&bias);
}

/* The first rows of a product, alone: the tiles differ with how many there are. */
static void test_few_rows(nn_rig *rig)
{
    enum { M = 70, N = 45, K = 1600 };
    buffer a = buffer_noise(FSDPC_F32, M * K, 5, -1, 1),
           b = buffer_noise(FSDPC_F32, K * N, 6, -1, 1);
    buffer whole = buffer_make(FSDPC_F32, M * N), part = buffer_make(FSDPC_F32, M * N);
    fsdpc_gemm_args args = {.m = M,
                            .n = N,
                            .k = K,
                            .a = a.data,
                            .lda = K,
                            .b = b.data,
                            .ldb = N,
                            .c = whole.data,
                            .ldc = N};
    CHECK_OK(rig->ops->gemm(&args, rig->stream));
    args.c = part.data;
    for (args.m = 5; args.m < 50; args.m += 4) {
        CHECK_OK(rig->ops->gemm(&args, rig->stream));
        CHECK_NOTE(memcmp(whole.data, part.data, args.m * N * sizeof(float)) == 0, "%s: %zu rows",
                   fsdpc_isa_name(rig->isa), args.m);
    }
    buffer_free(&a);
    buffer_free(&b);
    buffer_free(&whole);
    buffer_free(&part);
}

static void test_refusal(nn_rig *rig)
{
    float x[32] = {0};
    const fsdpc_patches w = {1, {2, 2}, {1, 1}, {2, 2}, {1, 1}, {1, 1}, {0, 0}};
    fsdpc_gemm_args args = {
        .m = 1, .n = 4, .k = 2, .a = x, .lda = 2, .b = x + 8, .c = x + 16, .ldc = 4, .patches = &w};
    CHECK_FAILS(rig->ops->gemm(&args, rig->stream), FSDPC_ERR_SHAPE, "(1, 4), B is (2, 4)");
}

static void suite(nn_rig *rig)
{
    static const size_t counts[] = {5, 16, 33};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int d = 0; d < 4; d++)
            for (int trans_b = 0; trans_b < 2; trans_b++) {
                /* up to four rows or columns have kernels of their own, which add in other orders
                 */
                size_t n = trans_b ? fsdpc_patches_rows(&cases[i]) : fsdpc_patches_cols(&cases[i]);
                for (int m = 0; m < 3 && (n > 4 || n == 0); m++)
                    try_product(rig, &cases[i], float_dtypes[d], counts[m], trans_b);
            }
    test_few_rows(rig);
    test_refusal(rig);
}

int main(void)
{
    nn_rig_up_to(fsdpc_isa_best(), suite);
    return check_report("gemm_patches");
}
