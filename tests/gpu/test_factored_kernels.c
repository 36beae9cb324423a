/* Adafactor's passes over a matrix, on the GPU and on the CPU: the same bits.
 *
 * Matrices have columns and rows that fill no warp, and are stacks or parts of one. One has a NaN
 * and an infinity.
 */
#include "gpu_rig.h"

typedef struct matrix {
    size_t rows, cols, rows_per_matrix, first_row;
} matrix;

static const matrix matrices[] = {
    {1, 1, 1, 0},        {3, 70, 9, 2},  {200, 33, 200, 0},
    {65, 300, 1000, 64}, {96, 17, 8, 0}, {5, 1, 1, 0},
};
static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16};

static void run(fsdpc_factored_args on_cpu, fsdpc_factored_args on_gpu)
{
    CHECK_OK(cpu_stream->device->flat->factored(&on_cpu, cpu_stream));
    CHECK_OK(gpu_stream->device->flat->factored(&on_gpu, gpu_stream));
}

/* Arrays by column that begin as zeros. */
static buffer zeros(fsdpc_dtype dtype, size_t numel)
{
    buffer b = buffer_make(dtype, numel, 0);
    memset(b.on_cpu, 0, numel * fsdpc_dtype_bytes(dtype));
    buffer_send(&b);
    return b;
}

static void check_columns(const matrix *m, fsdpc_factored_args args, const buffer *g)
{
    size_t cols = (m->rows + m->rows_per_matrix - 1) / m->rows_per_matrix * m->cols;
    buffer most = zeros(FSDPC_F32, cols), sums = zeros(FSDPC_I64, cols);
    buffer units = buffer_make(FSDPC_F64, cols, 0);
    fsdpc_factored_args there = args;
    args.pass = there.pass = FSDPC_FACTORED_MOST;
    args.grad = g->on_cpu, there.grad = g->on_gpu;
    args.most = most.on_cpu, there.most = most.on_gpu;
    run(args, there);
    check_same_bits(&most, "largest magnitudes");
    for (size_t i = 0; i < cols; i++)
        ((double *)units.on_cpu)[i] =
            fsdpc_factored_unit(((float *)most.on_cpu)[i], m->rows_per_matrix);
    buffer_send(&units);
    args.pass = there.pass = FSDPC_FACTORED_SUMS;
    args.units = units.on_cpu, there.units = units.on_gpu;
    args.sums = sums.on_cpu, there.sums = sums.on_gpu;
    run(args, there);
    const int64_t *got = buffer_fetch(&sums), *want = sums.on_cpu;
    for (size_t i = 0; i < cols; i++)
        if (isfinite(((float *)most.on_cpu)[i])) /* other columns' sums mean nothing */
            CHECK(got[i] == want[i]);
    buffer_fini(&most);
    buffer_fini(&sums);
    buffer_fini(&units);
}

static void check_rows(const matrix *m, fsdpc_factored_args args, const buffer *g)
{
    size_t cols = (m->first_row + m->rows) / m->rows_per_matrix * m->cols + m->cols;
    buffer sums = buffer_poison(FSDPC_F64, m->rows, 0),
           by_row = buffer_random(FSDPC_F32, m->rows, 0);
    buffer by_col = buffer_random(FSDPC_F32, cols, 0);
    buffer out = buffer_poison(FSDPC_F32, m->rows * m->cols, 0);
    fsdpc_factored_args there = args;
    args.pass = there.pass = FSDPC_FACTORED_ROWS;
    args.grad = g->on_cpu, there.grad = g->on_gpu;
    args.row_sums = sums.on_cpu, there.row_sums = sums.on_gpu;
    run(args, there);
    check_same_bits(&sums, "sums of rows");
    args.pass = there.pass = FSDPC_FACTORED_UPDATE;
    args.by_row = by_row.on_cpu, there.by_row = by_row.on_gpu;
    args.by_col = by_col.on_cpu, there.by_col = by_col.on_gpu;
    args.first_row = there.first_row = m->first_row;
    args.most_factor = there.most_factor = 0.25f;
    args.out = out.on_cpu, there.out = out.on_gpu;
    run(args, there);
    check_same_bits(&out, "an update");
    buffer_fini(&sums);
    buffer_fini(&by_row);
    buffer_fini(&by_col);
    buffer_fini(&out);
}

static void test_passes(void)
{
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            const matrix *m = &matrices[i];
            buffer g = buffer_random(dtypes[d], m->rows * m->cols, 0);
            if (i == 2) {
                element_set(g.on_cpu, 40, dtypes[d], NAN);
                element_set(g.on_cpu, 80, dtypes[d], INFINITY);
                buffer_send(&g);
            }
            fsdpc_factored_args args = {.grad_dtype = dtypes[d],
                                        .scale = i % 2 ? 0.3f : 1,
                                        .rows = m->rows,
                                        .cols = m->cols,
                                        .rows_per_matrix = m->rows_per_matrix};
            check_columns(m, args, &g);
            check_rows(m, args, &g);
            buffer_fini(&g);
        }
}

int main(void)
{
    static const rig_test_fn tests[] = {test_passes};
    return rig_main("test_factored_kernels", tests, sizeof tests / sizeof tests[0]);
}
