/* Pooling on every path against double: values, and gradients by the definition. */
#include "nn_rig.h"

typedef struct shape {
    size_t planes, image[2], kernel[2], stride[2], padding[2];
} shape;

static const shape shapes[] = {
    {3, {8, 70}, {2, 2}, {2, 2}, {0, 0}},
    {2, {7, 41}, {3, 3}, {2, 2}, {1, 1}}, /* windows share elements */
    {2, {5, 37}, {2, 3}, {1, 1}, {0, 2}},
    {1, {9, 66}, {1, 4}, {4, 3}, {0, 1}},
    {2, {2, 3}, {3, 2}, {1, 2}, {4, 5}}, /* padding beyond the kernel: windows without elements */
    {1, {1, 9000}, {1, 5}, {1, 2}, {0, 2}}, /* several tiles */
    {1, {90, 90}, {3, 3}, {2, 1}, {0, 1}},
    {0, {4, 4}, {2, 2}, {2, 2}, {0, 0}},
};

static fsdpc_pool_args args_of(const shape *s, bool max, fsdpc_dtype dtype)
{
    fsdpc_pool_args args = {.max = max, .dtype = dtype, .planes = s->planes};
    for (int d = 0; d < 2; d++) {
        args.image[d] = s->image[d];
        args.kernel[d] = s->kernel[d];
        args.stride[d] = s->stride[d];
        args.padding[d] = s->padding[d];
        args.places[d] = (s->image[d] + 2 * s->padding[d] - s->kernel[d]) / s->stride[d] + 1;
    }
    return args;
}

/* The window's value, and its slopes times dy added to dx. */
static double window(const fsdpc_pool_args *args, const buffer *x, size_t plane, size_t place,
                     double dy, double *dx)
{
    double all = args->max ? -INFINITY : 0, count = (double)(args->kernel[0] * args->kernel[1]);
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < args->kernel[0]; i++)
        for (size_t j = 0; j < args->kernel[1]; j++) {
            size_t r = place / args->places[1] * args->stride[0] + i;
            size_t c = place % args->places[1] * args->stride[1] + j;
            if (r < args->padding[0] || r >= args->padding[0] + args->image[0] ||
                c < args->padding[1] || c >= args->padding[1] + args->image[1])
                continue;
            size_t at = (plane * args->image[0] + r - args->padding[0]) * args->image[1] + c -
                        args->padding[1];
            double value = buffer_get(x, at);
            if (!args->max) {
                all += value / count;
                dx[at] += dy / count;
            } else if (value > all) {
                all = value;
                best = at;
            }
        }
    if (best != SIZE_MAX)
        dx[best] += dy;
    return all;
}

static void test_shape(nn_rig *rig, const shape *s, bool max, fsdpc_dtype dtype)
{
    fsdpc_pool_args args = args_of(s, max, dtype);
    size_t windows = args.places[0] * args.places[1], pixels = s->image[0] * s->image[1];
    buffer x = buffer_noise(dtype, s->planes * pixels, 1, -4, 4);
    buffer dy = buffer_noise(dtype, s->planes * windows, 2, -1, 1);
    buffer y = buffer_make(dtype, s->planes * windows), dx = buffer_make(dtype, s->planes * pixels);
    double *slopes = calloc(s->planes * pixels + 1, sizeof *slopes);
    args.x = x.data;
    args.y = y.data;
    args.dy = dy.data;
    args.dx = dx.data;
    CHECK_OK(rig->ops->pool(&args, rig->stream));
    buffer_check(rig, &y, "pool");
    CHECK_OK(rig->ops->pool_backward(&args, rig->stream));
    buffer_check(rig, &dx, "pool backward");
    for (size_t i = 0; i < s->planes * windows; i++) {
        double want = window(&args, &x, i / windows, i % windows, buffer_get(&dy, i), slopes);
        double tol = max ? 0 : tolerance(dtype, want, 4, 30);
        check_near(rig, max ? "max" : "mean", dtype, i, buffer_get(&y, i), want, tol);
    }
    for (size_t i = 0; i < s->planes * pixels; i++)
        check_near(rig, max ? "slope of max" : "slope of mean", dtype, i, buffer_get(&dx, i),
                   slopes[i], tolerance(dtype, slopes[i], 4, 12));
    free(slopes);
    buffer_free(&x);
    buffer_free(&dy);
    buffer_free(&y);
    buffer_free(&dx);
}

static void suite(nn_rig *rig)
{
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int max = 0; max < 2; max++)
            for (int d = 0; d < 4; d++)
                test_shape(rig, &shapes[s], max, float_dtypes[d]);
    fsdpc_pool_args bad = {.dtype = FSDPC_I32};
    CHECK_FAILS(rig->ops->pool(&bad, rig->stream), FSDPC_ERR_DTYPE, "pooling");
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("nn_pool");
}
