/* Passes of Adafactor over matrices and stacks, against plain loops in fp64; the same bits on every
 * path, with any number of threads, and of any order of parts. */
#include "test_flat_common.h"

#include "ops/flat_cpu.h"

enum { MOST_NUMEL = 300 * 130 };

typedef struct shape {
    size_t rows, cols, rows_per_matrix;
} shape;

static const shape shapes[] = {{1, 1, 1},  {7, 3, 7},    {40, 130, 40}, {300, 130, 300},
                               {12, 3, 3}, {60, 33, 20}, {4, 2500, 4},  {9, 64, 9}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };
static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

typedef struct arrays {
    float grad[MOST_NUMEL], most[MOST_NUMEL], by_row[MOST_NUMEL], by_col[MOST_NUMEL];
    float out[MOST_NUMEL];
    double units[MOST_NUMEL], row_sums[MOST_NUMEL];
    uint64_t sums[MOST_NUMEL];
    unsigned char stored[MOST_NUMEL * sizeof(float)];
} arrays;

/* Gradients whose magnitudes spread over 2^40. */
static void fill(arrays *a, const shape *s, fsdpc_dtype dtype)
{
    for (size_t i = 0; i < s->rows * s->cols; i++) {
        float size = dtype == FSDPC_F16 ? 1 : ldexpf(1, (int)(i % s->cols % 41) - 20);
        a->grad[i] = (float)((i * 7919) % 2003) / 1000 * size - size;
        fsdpc_f64_store_as(a->stored, i, dtype, (double)a->grad[i]);
        a->grad[i] = (float)fsdpc_f64_load_as(a->stored, i, dtype);
    }
    for (size_t i = 0; i < s->rows; i++)
        a->by_row[i] = (float)(i % 5) + 0.25f;
    for (size_t j = 0; j < s->rows / s->rows_per_matrix * s->cols; j++)
        a->by_col[j] = (float)(j % 7) + 0.5f;
}

/* Runs all passes, the first three over two parts if `cut` is not 0. */
static void run_passes(rig *r, arrays *a, const shape *s, fsdpc_dtype dtype, float scale,
                       size_t cut)
{
    fsdpc_factored_args args = {.grad_dtype = dtype,
                                .scale = scale,
                                .cols = s->cols,
                                .rows_per_matrix = s->rows_per_matrix,
                                .most = a->most,
                                .units = a->units,
                                .sums = a->sums,
                                .most_factor = 12,
                                .by_col = a->by_col};
    size_t columns = s->rows / s->rows_per_matrix * s->cols;
    memset(a->most, 0, sizeof a->most);
    memset(a->sums, 0, sizeof a->sums);
    for (int pass = FSDPC_FACTORED_MOST; pass <= FSDPC_FACTORED_UPDATE; pass++) {
        for (size_t j = 0; pass == FSDPC_FACTORED_SUMS && j < columns; j++)
            a->units[j] = fsdpc_factored_unit(a->most[j], s->rows_per_matrix);
        args.pass = (fsdpc_factored_pass)pass;
        for (size_t begin = cut, end = s->rows, n = 0; n < (cut ? 2u : 1u); n++) {
            args.rows = end - begin;
            args.first_row = begin;
            args.grad = a->stored + begin * s->cols * fsdpc_dtype_bytes(dtype);
            args.row_sums = a->row_sums + begin;
            args.by_row = a->by_row + begin;
            args.out = a->out + begin * s->cols;
            CHECK_OK(r->ops->factored(&args, &r->stream));
            end = begin; /* the last rows come first */
            begin = 0;
        }
    }
}

static void check_columns(const arrays *a, const shape *s, float scale)
{
    for (size_t m = 0; m < s->rows / s->rows_per_matrix; m++) {
        for (size_t j = 0; j < s->cols; j++) {
            float most = 0;
            double sum = 0;
            for (size_t i = 0; i < s->rows_per_matrix; i++) {
                float g = a->grad[(m * s->rows_per_matrix + i) * s->cols + j] * scale;
                most = fmaxf(most, fabsf(g));
                sum += (double)g * (double)g;
            }
            size_t at = m * s->cols + j;
            double got = (double)(int64_t)a->sums[at] / a->units[at];
            CHECK(a->most[at] == most);
            CHECK_NOTE(fabs(got - sum) <= 1e-13 * sum, "column %zu: %g, not %g", at, got, sum);
        }
    }
}

static void check_rows(const arrays *a, const shape *s, float scale)
{
    for (size_t i = 0; i < s->rows; i++) {
        double sum = 0;
        for (size_t j = 0; j < s->cols; j++) {
            float g = a->grad[i * s->cols + j] * scale;
            float factor = a->by_row[i] * a->by_col[i / s->rows_per_matrix * s->cols + j];
            CHECK(a->out[i * s->cols + j] == g * (factor > 12 ? 12 : factor));
            sum += (double)g * (double)g;
        }
        CHECK_NOTE(fabs(a->row_sums[i] - sum) <= 1e-13 * sum, "row %zu: %g, not %g", i,
                   a->row_sums[i], sum);
    }
}

static void check_nonfinite(rig *r, arrays *a)
{
    const shape s = {8, 20, 8};
    fill(a, &s, FSDPC_F32);
    ((float *)(void *)a->stored)[3 * 20 + 5] = NAN;
    ((float *)(void *)a->stored)[4 * 20 + 6] = -INFINITY;
    a->by_row[7] = NAN;
    run_passes(r, a, &s, FSDPC_F32, 1, 0);
    CHECK(isnan(a->most[5]) && isinf(a->most[6]) && isfinite(a->most[7]));
    CHECK(isnan(a->row_sums[3]) && isinf(a->row_sums[4]) && isfinite(a->row_sums[5]));
    CHECK(isnan(a->out[3 * 20 + 5]) && isnan(a->out[7 * 20]) && isfinite(a->out[3 * 20 + 4]));
}

int main(void)
{
    static arrays wanted, got;
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    rig portable;
    rig_init(&portable, FSDPC_ISA_PORTABLE, 1);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        for (size_t i = 0; i < SHAPES * DTYPES; i++) {
            const shape *s = &shapes[i / DTYPES];
            fsdpc_dtype dtype = dtypes[i % DTYPES];
            bool one = s->rows == s->rows_per_matrix;
            fill(&wanted, s, dtype);
            run_passes(&portable, &wanted, s, dtype, 0.3f, 0);
            check_columns(&wanted, s, 0.3f);
            check_rows(&wanted, s, 0.3f);
            fill(&got, s, dtype);
            run_passes(&r, &got, s, dtype, 0.3f, one ? s->rows / 3 : 0);
            CHECK(memcmp(&wanted, &got, sizeof got) == 0);
        }
        check_nonfinite(&r, &got);
        memset(&got, 0, sizeof got);
        memset(&wanted, 0, sizeof wanted);
        rig_fini(&r);
    }
    rig_fini(&portable);
    return check_report("factored");
}
