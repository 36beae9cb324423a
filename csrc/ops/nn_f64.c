/* F64 (and, for powers, integer) forms of the element-wise and moving kernels.
 *
 * Plain loops in double: they exist so that gradients can be checked to many digits, not to be
 * fast. The fp32 forms beside which these stand are in nn_unary_body.h, nn_binary_body.h,
 * nn_gate_body.h, nn_sum_body.h and nn_embedding_body.h.
 */
#include "ops/nn_internal.h"

#include <math.h>

#define RULE static
#define RULE_T double
#include "ops/nn_unary_rules_body.h"

void fsdpc_nn_unary_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_unary_args *args = arg;
    const double *x = args->x;
    for (size_t i = first; i < last; i++)
        ((double *)args->out)[i] = unary_value(args->kind, x[i], args->scalar);
}

void fsdpc_nn_unary_backward_f64(const void *arg, size_t first, size_t last)
{
    const fsdpc_unary_args *args = arg;
    const double *x = fsdpc_unary_reads_x(args->kind) ? args->x : NULL;
    const double *y = fsdpc_unary_reads_y(args->kind) ? args->y : NULL;
    for (size_t i = first; i < last; i++)
        ((double *)args->out)[i] = unary_slope(args->kind, x ? x[i] : 0, y ? y[i] : 0,
                                               ((const double *)args->dy)[i], args->scalar);
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

static double binary_f64(fsdpc_binary kind, double a, double b)
{
    switch (kind) {
    case FSDPC_BINARY_ADD:
        return a + b;
    case FSDPC_BINARY_SUB:
        return a - b;
    case FSDPC_BINARY_MUL:
        return a * b;
    case FSDPC_BINARY_DIV:
        return a / b;
    case FSDPC_BINARY_POW:
        return pow(a, b);
    case FSDPC_BINARY_MAXIMUM:
        return a > b || a != a ? a : b;
    case FSDPC_BINARY_MINIMUM:
        return a < b || a != a ? a : b;
    default:
        break;
    }
    return a;
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

void fsdpc_nn_binary_wide(const void *arg, size_t first, size_t last)
{
    const nn_binary_plan *plan = arg;
    const fsdpc_binary_args *args = plan->args;
    for (size_t i = first; i < last; i++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->box, 0, i, at);
        if (args->dtype == FSDPC_F64) {
            ((double *)args->out)[i] = binary_f64(args->kind, ((const double *)args->a)[at[0]],
                                                  ((const double *)args->b)[at[1]]);
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

void fsdpc_nn_sum_wide(const void *arg, size_t first, size_t last)
{
    const nn_sum_plan *plan = arg;
    const fsdpc_sum_args *args = plan->args;
    size_t kept_inner = plan->inner_kept ? plan->inner : 1;
    size_t run = plan->inner_kept ? 1 : plan->inner;
    for (size_t i = first; i < last; i++) {
        size_t base[NN_OPERANDS], fold_at[NN_OPERANDS];
        nn_box_offsets(&plan->kept, 0, i / kept_inner, base);
        double total = 0;
        for (size_t fold = 0; fold < plan->folds; fold++) {
            nn_box_offsets(&plan->reduced, 0, fold, fold_at);
            for (size_t c = 0; c < run; c++)
                total += fsdpc_nn_load_f64(args->x, base[0] + fold_at[0] + i % kept_inner + c,
                                           args->dtype);
        }
        total *= args->scale;
        if (args->accumulate)
            total += fsdpc_nn_load_f64(args->out, i, args->out_dtype);
        fsdpc_nn_store_f64(args->out, i, args->out_dtype, total);
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
