/* Integer sums, exact modulo 2^64, so every order gives the same bits. */
#include "ops/nn_internal.h"

enum { COLS = 512 };

/* Computes neighbouring outputs, adding x's rows concurrently. */
static void sum_columns(const nn_sum_plan *plan, const uint64_t *x, uint64_t *out, size_t n)
{
    uint64_t total[COLS] = {0};
    for (size_t fold = 0; fold < plan->folds; fold++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->reduced, 0, fold, at);
        for (size_t c = 0; c < n; c++)
            total[c] += x[at[0] + c];
    }
    for (size_t c = 0; c < n; c++)
        out[c] = total[c];
}

static uint64_t sum_runs(const nn_sum_plan *plan, const uint64_t *x)
{
    uint64_t total = 0;
    for (size_t fold = 0; fold < plan->folds; fold++) {
        size_t at[NN_OPERANDS];
        nn_box_offsets(&plan->reduced, 0, fold, at);
        for (size_t c = 0; c < plan->inner; c++)
            total += x[at[0] + c];
    }
    return total;
}

void fsdpc_nn_sum_i64(const void *arg, size_t first, size_t last)
{
    const nn_sum_plan *plan = arg;
    const uint64_t *x = plan->args->x;
    uint64_t *out = plan->args->out;
    for (size_t i = first, n; i < last; i += n) {
        size_t col = plan->inner_kept ? i % plan->inner : 0, at[NN_OPERANDS];
        n = plan->inner_kept ? fsdpc_min_size(COLS, fsdpc_min_size(plan->inner - col, last - i))
                             : 1;
        nn_box_offsets(&plan->kept, 0, plan->inner_kept ? i / plan->inner : i, at);
        if (plan->inner_kept)
            sum_columns(plan, x + at[0] + col, out + i, n);
        else
            out[i] = sum_runs(plan, x + at[0]);
    }
}
