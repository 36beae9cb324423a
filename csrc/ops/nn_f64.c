/* F64 (and, for powers, integer) forms of the elementwise and data movement kernels.
 *
 * Plain loops in double, for precise gradient checks. The corresponding fp32 forms are in
 * nn_unary_body.h, nn_binary_body.h, nn_gate_body.h, nn_sum_body.h and nn_embedding_body.h.
 */
#include "ops/nn_internal.h"

#include <math.h>

#define RULE static
#define RULE_T double
#include "ops/nn_unary_rules_body.h"

void fsdpc_nn_unary_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_unary_args *args = arg;
    const double *x = args->x, s = args->scalar;
    double *out = args->out;
    switch (args->kind) { /* one loop per kind: the compiler vectorises most */
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        for (size_t i = first; i < last; i++)                                                      \
            out[i] = unary_value(FSDPC_UNARY_##name, x[i], s);                                     \
        break;
        FSDPC_UNARY_TABLE(X)
#undef X
    }
}

void fsdpc_nn_unary_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_unary_args *args = arg;
    const double *x = args->x, *y = args->y, *dy = args->dy, s = args->scalar;
    double *out = args->out;
    switch (args->kind) {
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        for (size_t i = first; i < last; i++)                                                      \
            out[i] = unary_slope(FSDPC_UNARY_##name,                                               \
                                 fsdpc_unary_reads_x(FSDPC_UNARY_##name) ? x[i] : 0,               \
                                 fsdpc_unary_reads_y(FSDPC_UNARY_##name) ? y[i] : 0, dy[i], s);    \
        break;
        FSDPC_UNARY_TABLE(X)
#undef X
    }
}

void fsdpc_nn_swiglu_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_swiglu_args *args = arg;
    const double *gate = args->gate, *up = args->up;
    for (size_t i = first; i < last; i++)
        ((double *)args->out)[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

void fsdpc_nn_swiglu_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_swiglu_args *args = arg;
    for (size_t i = first; i < last; i++) {
        double gate = ((const double *)args->gate)[i], up = ((const double *)args->up)[i];
        double dout = ((const double *)args->dout)[i], s = sigmoid(gate);
        ((double *)args->dgate)[i] = dout * up * s * (1 + gate * (1 - s));
        ((double *)args->dup)[i] = dout * gate * s;
    }
}

static int64_t pow_i64(int64_t a, int64_t b) /* wraps */
{
    uint64_t y = 1, power = (uint64_t)a;
    if (b < 0)
        return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    for (; b; b >>= 1, power *= power)
        y *= b & 1 ? power : 1;
    return (int64_t)y;
}

void fsdpc_nn_power_wide(const void *arg, size_t first, size_t last)
{
    const nn_binary_plan *plan = arg;
    const fsdpc_binary_args *args = plan->args;
    for (size_t i = first; i < last; i++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->box, 0, i, at);
        if (args->dtype == FSDPC_F64) {
            ((double *)args->out)[i] =
                pow(((const double *)args->a)[at[0]], ((const double *)args->b)[at[1]]);
            continue;
        }
        int64_t value = pow_i64(fsdpc_nn_load_id(args->a, at[0], args->dtype),
                                fsdpc_nn_load_id(args->b, at[1], args->dtype));
        if (args->dtype == FSDPC_I32)
            ((int32_t *)args->out)[i] = (int32_t)value;
        else
            ((int64_t *)args->out)[i] = value;
    }
}

enum { WIDE_RUN = 512, WIDE_SUMS = 8 };

/* Returns n elements of x (or their squares), starting at `at`, in double, either in place or
 * copied to the block. */
static const double *wide_run(double *block, const fsdpc_sum_args *args, size_t at, size_t n)
{
    const double *x = block;
    if (args->dtype == FSDPC_F64) {
        x = (const double *)args->x + at;
    } else {
        fsdpc_nn_cast_row(block, FSDPC_F64, 0, 1, args->x, args->dtype, at, 1, n, false);
    }
    for (size_t i = 0; args->squares && i < n; i++)
        block[i] = x[i] * x[i];
    return args->squares ? block : x;
}

static void sum_finish_wide(const fsdpc_sum_args *args, size_t i, double total)
{
    total *= args->scale;
    if (args->accumulate)
        total += fsdpc_nn_load_f64(args->out, i, args->out_dtype);
    fsdpc_nn_store_f64(args->out, i, args->out_dtype, total);
}

/* Computes n outputs of one row, adding x's rows concurrently. */
static void sum_columns_wide(const nn_sum_plan *plan, size_t x_at, size_t first, size_t n)
{
    double total[WIDE_RUN] = {0}, block[WIDE_RUN];
    for (size_t fold = 0; fold < plan->folds; fold++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->reduced, 0, fold, at);
        const double *x = wide_run(block, plan->args, x_at + at[0], n);
        for (size_t c = 0; c < n; c++)
            total[c] += x[c];
    }
    for (size_t c = 0; c < n; c++)
        sum_finish_wide(plan->args, first + c, total[c]);
}

/* Computes one output from eight partial sums, which each cover every eighth element and are added
 * in order. */
static double sum_runs_wide(const nn_sum_plan *plan, size_t x_at)
{
    double sums[WIDE_SUMS] = {0}, block[WIDE_RUN], total = 0;
    for (size_t fold = 0; fold < plan->folds; fold++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->reduced, 0, fold, at);
        for (size_t c = 0, n; c < plan->inner; c += n) {
            n = fsdpc_min_size(WIDE_RUN, plan->inner - c);
            const double *x = wide_run(block, plan->args, x_at + at[0] + c, n);
            size_t i = 0;
            for (; i + WIDE_SUMS <= n; i += WIDE_SUMS)
                for (size_t k = 0; k < WIDE_SUMS; k++)
                    sums[k] += x[i + k];
            for (; i < n; i++)
                total += x[i];
        }
    }
    for (size_t k = 0; k < WIDE_SUMS; k++)
        total += sums[k];
    return total;
}

void fsdpc_nn_sum_wide(const void *arg, size_t first, size_t last)
{
    const nn_sum_plan *plan = arg;
    size_t at[NN_OPERANDS];
    for (size_t i = first, n = 1; i < last; i += n) {
        if (plan->inner_kept) {
            size_t col = i % plan->inner;
            n = fsdpc_min_size(WIDE_RUN, fsdpc_min_size(plan->inner - col, last - i));
            nn_box_offsets(&plan->kept, 0, i / plan->inner, at);
            sum_columns_wide(plan, at[0] + col, i, n);
        } else {
            nn_box_offsets(&plan->kept, 0, i, at);
            sum_finish_wide(plan->args, i, sum_runs_wide(plan, at[0]));
        }
    }
}

void fsdpc_nn_embedding_backward_wide(const void *arg, size_t first, size_t last)
{
    const nn_embedding_plan *plan = arg;
    const fsdpc_embedding_args *args = plan->args;
    for (size_t row = first; row < last; row++) {
        if (plan->starts[row] == plan->starts[row + 1] && args->accumulate)
            continue;
        for (size_t c = 0; c < args->dim; c++) {
            double total = 0;
            for (size_t k = plan->starts[row]; k < plan->starts[row + 1]; k++)
                total += fsdpc_nn_load_f64(args->dout, plan->order[k] * args->dim + c, args->dtype);
            size_t at = row * args->dim + c;
            if (args->accumulate)
                total += fsdpc_nn_load_f64(args->dtable, at, args->dtable_dtype);
            fsdpc_nn_store_f64(args->dtable, at, args->dtable_dtype, total);
        }
    }
}

void fsdpc_nn_rotary_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_rotary_args *args = arg;
    size_t half = args->dim / 2;
    for (size_t row = first; row < last; row++)
        for (size_t head = 0; head < args->heads; head++)
            for (size_t i = 0; i < half; i++) {
                size_t at = (row * args->heads + head) * args->dim + i;
                size_t angle = row % args->tokens * half + i;
                double a = ((const double *)args->x)[at], b = ((const double *)args->x)[at + half];
                double cosine = args->cosines[angle];
                double sine = args->inverse ? -args->sines[angle] : args->sines[angle];
                ((double *)args->y)[at] = a * cosine - b * sine;
                ((double *)args->y)[at + half] = b * cosine + a * sine;
            }
}
