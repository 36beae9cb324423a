/* Moments of rows against long double, affine maps of rows against double. */
#include "nn_rig.h"

static fsdpc_dtype of_rows(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
}

typedef struct rows_case {
    fsdpc_dtype dtype;
    size_t rows, cols;
    size_t values; /* of rows, which repeat */
    double mean;
} rows_case;

static double inner(const rows_case *n, double size)
{
    return size * (n->dtype == FSDPC_F64 ? 0x1p-52 : 0x1p-23);
}

static void check_moments(nn_rig *rig, const rows_case *n, const buffer *x, const buffer *out)
{
    for (size_t row = 0; row < n->rows; row++) {
        long double mean = 0, square = 0;
        for (size_t c = 0; c < n->cols; c++)
            mean += buffer_get(x, row * n->cols + c) / (long double)n->cols;
        for (size_t c = 0; c < n->cols; c++) {
            long double away = buffer_get(x, row * n->cols + c) - mean;
            square += away * away;
        }
        check_near(rig, "mean of a row", n->dtype, row, buffer_get(out, row), (double)mean,
                   inner(n, fabs(n->mean) + 1));
        check_near(rig, "squares of a row", n->dtype, n->rows + row, buffer_get(out, n->rows + row),
                   (double)square,
                   inner(n, (8 + 0.3 * sqrt((double)n->cols)) * (double)square + 1e-6));
    }
}

static void check_products(nn_rig *rig, const rows_case *n, const buffer *const io[3],
                           const buffer *out)
{
    const buffer *x = io[0], *dy = io[1], *shift = io[2];
    for (size_t row = 0; row < n->rows; row++) {
        long double sum = 0, product = 0;
        double size = 0;
        for (size_t c = 0; c < n->cols; c++) {
            double d = buffer_get(dy, row * n->cols + c);
            double away = buffer_get(x, row * n->cols + c) - buffer_get(shift, row % n->values);
            sum += d;
            product += (long double)d * away;
            size += fabs(d) * (fabs(away) + 1 + fabs(n->mean) * 0.1);
        }
        check_near(rig, "sum of dy", n->dtype, row, buffer_get(out, row), (double)sum,
                   inner(n, 4 * size));
        check_near(rig, "sum of products", n->dtype, n->rows + row, buffer_get(out, n->rows + row),
                   product, inner(n, 4 * size));
    }
}

static void test_moments(nn_rig *rig, rows_case n)
{
    size_t numel = n.rows * n.cols;
    buffer x = buffer_noise(n.dtype, numel, 1, n.mean - 2, n.mean + 2);
    buffer dy = buffer_noise(n.dtype, numel, 2, -1, 1);
    buffer shift = buffer_noise(of_rows(n.dtype), n.values, 3, n.mean - 0.1, n.mean + 0.1);
    buffer out = buffer_make(of_rows(n.dtype), 2 * n.rows);
    fsdpc_row_moments_args args = {.dtype = n.dtype, .rows = n.rows, .cols = n.cols};
    args.values = n.values, args.x = x.data, args.out = out.data;
    CHECK_OK(rig->ops->row_moments(&args, rig->stream));
    buffer_check(rig, &out, "moments of rows");
    check_moments(rig, &n, &x, &out);
    args.dy = dy.data, args.shift = shift.data;
    CHECK_OK(rig->ops->row_moments(&args, rig->stream));
    buffer_check(rig, &out, "sums over rows");
    check_products(rig, &n, (const buffer *const[]){&x, &dy, &shift}, &out);
    buffer *all[] = {&x, &dy, &shift, &out};
    for (size_t i = 0; i < 4; i++)
        buffer_free(all[i]);
}

/* `with`: bits for y, shift, b and c */
static void test_affine(nn_rig *rig, rows_case n, unsigned with)
{
    size_t numel = n.rows * n.cols;
    fsdpc_dtype dtype = of_rows(n.dtype);
    buffer x = buffer_noise(n.dtype, numel, 1, n.mean - 2, n.mean + 2);
    buffer y = buffer_noise(n.dtype, numel, 2, -1, 1), out = buffer_make(n.dtype, numel);
    buffer shift = buffer_noise(dtype, n.values, 3, n.mean - 0.1, n.mean + 0.1);
    buffer a = buffer_noise(dtype, n.values, 4, -2, 2), b = buffer_noise(dtype, n.values, 5, -2, 2);
    buffer c = buffer_noise(dtype, n.values, 6, -1, 1);
    fsdpc_row_affine_args args = {.dtype = n.dtype, .rows = n.rows, .cols = n.cols};
    args.values = n.values, args.x = x.data, args.a = a.data, args.out = out.data;
    args.y = with & 1 ? y.data : NULL, args.shift = with & 2 ? shift.data : NULL;
    args.b = with & 4 ? b.data : NULL, args.c = with & 8 ? c.data : NULL;
    CHECK_OK(rig->ops->row_affine(&args, rig->stream));
    buffer_check(rig, &out, "affine map of rows");
    for (size_t i = 0; i < numel; i++) {
        size_t v = i / n.cols % n.values;
        double away = buffer_get(&x, i) - (args.shift ? buffer_get(&shift, v) : 0);
        double want = away * buffer_get(&a, v) + (args.c ? buffer_get(&c, v) : 0);
        want += args.y ? buffer_get(&y, i) * (args.b ? buffer_get(&b, v) : 1) : 0;
        check_near(rig, "affine map of rows", n.dtype, i, buffer_get(&out, i), want,
                   tolerance(n.dtype, want, 2 * fabs(away) + 4, 2));
    }
    args.out = x.data; /* in place */
    CHECK_OK(rig->ops->row_affine(&args, rig->stream));
    CHECK(numel == 0 || memcmp(x.data, out.data, numel * fsdpc_dtype_bytes(n.dtype)) == 0);
    buffer *all[] = {&x, &y, &out, &shift, &a, &b, &c};
    for (size_t i = 0; i < 7; i++)
        buffer_free(all[i]);
}

static void test_edges(nn_rig *rig)
{
    float x[9] = {0}, out[2] = {5, 5};
    fsdpc_row_moments_args args = {.dtype = FSDPC_F32, .rows = 1, .x = x, .out = out};
    CHECK_OK(rig->ops->row_moments(&args, rig->stream)); /* of no columns */
    CHECK(out[0] == 0 && out[1] == 0);
    args.cols = 9;
    x[8] = NAN;
    CHECK_OK(rig->ops->row_moments(&args, rig->stream));
    CHECK(isnan(out[0]) && isnan(out[1]));
    args.dtype = FSDPC_I32;
    CHECK_FAILS(rig->ops->row_moments(&args, rig->stream), FSDPC_ERR_DTYPE, "int32");
    fsdpc_row_affine_args affine = {.dtype = FSDPC_U8};
    CHECK_FAILS(rig->ops->row_affine(&affine, rig->stream), FSDPC_ERR_DTYPE, "uint8");
}

static void suite(nn_rig *rig)
{
    const size_t shapes[][3] = {{0, 5, 1},  {1, 1, 1},    {6, 1, 2},    {5, 3, 5},   {6, 16, 3},
                                {4, 33, 4}, {70, 513, 7}, {2, 4097, 1}, {3, 9001, 3}};
    for (size_t d = 0; d < 4; d++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int far = 0; far < 2; far++) {
                rows_case n = {float_dtypes[d], shapes[s][0], shapes[s][1], shapes[s][2],
                               far ? 1000 : 0.5};
                test_moments(rig, n);
                test_affine(rig, n, (unsigned)(5 * s + 3 * d + 7 * (size_t)far) % 16);
            }
    for (unsigned with = 0; with < 16; with++)
        test_affine(rig, (rows_case){FSDPC_BF16, 6, 37, 3, 0.5}, with);
    test_edges(rig);
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_moments");
}
