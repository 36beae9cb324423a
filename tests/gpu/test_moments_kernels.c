/* Moments of rows and affine maps of rows on the GPU against the CPU's, whose sums have another
 * order. */
#include "gpu_rig.h"

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const size_t shapes[][2] = {{0, 5},   {1, 1},    {6, 1},   {3, 7},   {5, 64},
                                   {2, 100}, {4, 5003}, {4, 520}, {300, 33}};
enum { FLOATS = 4, SHAPES = 9 };

/* `with`: bits for shift, y, b and c */
static void check_rows(fsdpc_dtype dtype, size_t rows, size_t cols, unsigned with)
{
    size_t numel = rows * cols, values = rows % 2 ? rows : rows / 2;
    fsdpc_dtype wide = dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    buffer x = buffer_random(dtype, numel, 0), y = buffer_random(dtype, numel, 0);
    buffer out = buffer_poison(dtype, numel, 0), moments = buffer_poison(wide, 2 * rows, 0);
    buffer sums = buffer_poison(wide, 2 * rows, 0), v[4];
    for (int i = 0; i < 4; i++)
        v[i] = buffer_random(wide, values, 0);
    fsdpc_row_moments_args m = {.dtype = dtype, .rows = rows, .cols = cols, .values = values};
    fsdpc_row_affine_args a = {.dtype = dtype, .rows = rows, .cols = cols, .values = values};
    for (int side = 0; side < 2; side++) {
        fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
        const fsdpc_nn_ops *ops = stream->device->nn;
#define AT(buffer) (side ? (buffer).on_gpu : (buffer).on_cpu)
        m.x = AT(x), m.dy = NULL, m.shift = AT(v[0]), m.out = AT(moments);
        CHECK_OK(ops->row_moments(&m, stream));
        m.dy = AT(y), m.shift = with & 1 ? AT(v[0]) : NULL, m.out = AT(sums);
        CHECK_OK(ops->row_moments(&m, stream));
        a.x = AT(x), a.a = AT(v[1]), a.out = AT(out), a.shift = m.shift;
        a.y = with & 2 ? AT(y) : NULL, a.b = with & 4 ? AT(v[2]) : NULL;
        a.c = with & 8 ? AT(v[3]) : NULL;
        CHECK_OK(ops->row_affine(&a, stream));
#undef AT
    }
    check_close(&moments, (double)cols, 8, "moments of rows");
    check_close(&sums, 4 + (double)cols, 8, "sums over rows");
    check_close(&out, 8, 8, "affine map of rows");
    buffer *all[] = {&x, &y, &out, &moments, &sums, &v[0], &v[1], &v[2], &v[3]};
    for (size_t b = 0; b < 9; b++)
        buffer_fini(all[b]);
}

static void test_rows(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SHAPES; n++)
            for (unsigned with = 0; with < 16; with += 5)
                check_rows(floats[d], shapes[n][0], shapes[n][1], (with + (unsigned)n) % 16);
}

static void test_dtypes(void)
{
    fsdpc_row_moments_args m = {.dtype = FSDPC_I32};
    fsdpc_row_affine_args a = {.dtype = FSDPC_BOOL};
    CHECK_FAILS(gpu_stream->device->nn->row_moments(&m, gpu_stream), FSDPC_ERR_DTYPE, "int32");
    CHECK_FAILS(gpu_stream->device->nn->row_affine(&a, gpu_stream), FSDPC_ERR_DTYPE, "bool");
}

int main(void)
{
    static const rig_test_fn tests[] = {test_rows, test_dtypes};
    return rig_main("test_moments_kernels", tests, sizeof tests / sizeof tests[0]);
}
