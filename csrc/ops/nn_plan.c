/* Argument checks and work plans of the nn kernels: decisions made once per call.
 *
 * Indices are checked before a kernel starts. Kernels then read them without checks, and an
 * invalid index leaves the outputs unchanged. Plans depend only on shapes, never on the number of
 * threads.
 */
#include "ops/nn_internal.h"

#include <math.h>

void fsdpc_nn_sum_plan_init(nn_sum_plan *plan, const fsdpc_sum_args *args)
{
    size_t shape[FSDPC_MAX_DIMS];
    bool reduced[FSDPC_MAX_DIMS];
    int ndim = 0;
    for (int d = 0; d < args->ndim; d++) { /* x is dense: neighbours always merge */
        if (args->shape[d] == 1)
            continue;
        if (ndim && reduced[ndim - 1] == args->reduced[d]) {
            shape[ndim - 1] *= args->shape[d];
        } else {
            shape[ndim] = args->shape[d];
            reduced[ndim++] = args->reduced[d];
        }
    }
    *plan = (nn_sum_plan){.args = args, .inner = 1, .inner_kept = true};
    if (ndim) {
        plan->inner = shape[ndim - 1];
        plan->inner_kept = !reduced[ndim - 1];
    }
    size_t stride = plan->inner;
    size_t strides[FSDPC_MAX_DIMS];
    for (int d = ndim - 2; d >= 0; stride *= shape[d--])
        strides[d] = stride;
    for (int d = 0; d < ndim - 1; d++) {
        nn_box *box = reduced[d] ? &plan->reduced : &plan->kept;
        box->shape[box->ndim] = shape[d];
        box->stride[0][box->ndim++] = strides[d];
    }
    plan->outer = nn_box_numel(&plan->kept);
    plan->folds = nn_box_numel(&plan->reduced);
}

size_t fsdpc_nn_copy_plan_init(nn_copy_plan *plan)
{
    const fsdpc_copy_args *args = plan->args;
    nn_box *box = &plan->box;
    box->ndim = args->ndim;
    box->base[1] = args->src_first;
    for (int d = 0; d < args->ndim; d++) { /* insertion sort by descending destination stride */
        int at = d;
        for (; at > 0 && box->stride[0][at - 1] < args->stride_dst[d]; at--) {
            box->shape[at] = box->shape[at - 1];
            box->stride[0][at] = box->stride[0][at - 1];
            box->stride[1][at] = box->stride[1][at - 1];
        }
        box->shape[at] = args->shape[d];
        box->stride[0][at] = args->stride_dst[d];
        box->stride[1][at] = args->stride_src[d];
    }
    size_t numel = nn_box_numel(box);
    if (numel)
        nn_box_collapse(box);
    return numel;
}

bool fsdpc_nn_copy_plan_turn(nn_copy_plan *plan)
{
    nn_box *box = &plan->box;
    int dense = -1;
    for (int d = 0; d < box->ndim - 1; d++)
        if (box->stride[1][d] == 1)
            dense = d;
    if (dense < 0)
        return false;
    nn_box old = *box;
    for (int d = dense; d < box->ndim - 2; d++) {
        box->shape[d] = old.shape[d + 1];
        box->stride[0][d] = old.stride[0][d + 1];
        box->stride[1][d] = old.stride[1][d + 1];
    }
    int to = box->ndim - 2;
    box->shape[to] = old.shape[dense];
    box->stride[0][to] = old.stride[0][dense];
    box->stride[1][to] = old.stride[1][dense];
    return true;
}

static fsdpc_status check_id_dtype(fsdpc_dtype dtype, const char *what)
{
    if (dtype != FSDPC_I32 && dtype != FSDPC_I64)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s are int32 or int64, not %s: cast first", what,
                          fsdpc_dtype_name(dtype));
    return FSDPC_OK;
}

/* Returns the largest id, treating negative ids as larger than all others. */
static uint64_t most_id(const fsdpc_embedding_args *args)
{
    const int32_t *narrow = args->ids;
    const int64_t *wide = args->ids;
    uint64_t most = 0;
    if (args->id_dtype == FSDPC_I32)
        for (size_t i = 0; i < args->count; i++)
            most = (uint64_t)narrow[i] > most ? (uint64_t)narrow[i] : most;
    else
        for (size_t i = 0; i < args->count; i++)
            most = (uint64_t)wide[i] > most ? (uint64_t)wide[i] : most;
    return most;
}

fsdpc_status fsdpc_nn_embedding_check(const fsdpc_embedding_args *args)
{
    FSDPC_TRY(check_id_dtype(args->id_dtype, "ids of an embedding"));
    if (args->count == 0 || most_id(args) < args->rows)
        return FSDPC_OK;
    for (size_t i = 0; i < args->count; i++) {
        int64_t id = fsdpc_nn_load_id(args->ids, i, args->id_dtype);
        if ((uint64_t)id >= args->rows)
            return fsdpc_fail(
                FSDPC_ERR_INDEX,
                "id %lld at index %zu of an embedding of %zu rows: ids are 0 to rows - 1",
                (long long)id, i, args->rows);
    }
    return FSDPC_OK;
}

void fsdpc_nn_embedding_sort(nn_embedding_plan *plan)
{
    const fsdpc_embedding_args *args = plan->args;
    memset(plan->starts, 0, (args->rows + 1) * sizeof *plan->starts);
    for (size_t i = 0; i < args->count; i++)
        plan->starts[fsdpc_nn_load_id(args->ids, i, args->id_dtype)]++;
    size_t end = 0;
    for (size_t row = 0; row <= args->rows; row++) { /* for now, starts[row] is the row's end */
        end += plan->starts[row];
        plan->starts[row] = end;
    }
    for (size_t i = args->count; i-- > 0;)
        plan->order[--plan->starts[fsdpc_nn_load_id(args->ids, i, args->id_dtype)]] = i;
}

fsdpc_status fsdpc_nn_cross_entropy_check(const fsdpc_cross_entropy_args *args, size_t *count_out)
{
    FSDPC_TRY(check_id_dtype(args->id_dtype, "targets of a cross entropy"));
    size_t count = 0;
    for (size_t row = 0; row < args->rows; row++) {
        int64_t target = fsdpc_nn_load_id(args->targets, row, args->id_dtype);
        if (target == args->ignore_index)
            continue;
        if ((uint64_t)target >= args->cols)
            return fsdpc_fail(FSDPC_ERR_INDEX,
                              "target %lld at row %zu of a cross entropy over %zu classes: targets "
                              "are 0 to classes - 1, or ignore_index (%lld)",
                              (long long)target, row, args->cols, (long long)args->ignore_index);
        count++;
    }
    *count_out = count;
    return FSDPC_OK;
}

static double row_loss(const fsdpc_cross_entropy_args *args, size_t row)
{
    int64_t target = fsdpc_nn_load_id(args->targets, row, args->id_dtype);
    if (target == args->ignore_index)
        return 0;
    double x = fsdpc_nn_load_f64(args->logits, row * args->cols + (size_t)target, args->dtype);
    if (!args->lse)
        return -x;
    double lse = (double)args->lse[row], smoothing = (double)args->smoothing;
    if (args->means)
        x = (1 - smoothing) * x + smoothing * (double)args->means[row];
    return lse - x + (double)args->z_loss * lse * lse;
}

void fsdpc_nn_cross_entropy_mean(const fsdpc_cross_entropy_args *args, size_t count)
{
    double total = 0;
    for (size_t row = 0; row < args->rows; row++) {
        double loss = row_loss(args, row);
        if (args->losses)
            args->losses[row] = (float)loss;
        total += loss;
    }
    if (!args->loss)
        return;
    fsdpc_loss_sum sum = {0};
    if (args->accumulate)
        sum = *args->sum;
    if (count) /* the mean of no rows is NaN */
        sum.total += (double)(float)(total / (double)count) * (double)count;
    sum.count = args->sums ? 1 : sum.count + count;
    *args->sum = sum;
    *args->loss = sum.count ? (float)(sum.total / (double)sum.count) : NAN;
}

double fsdpc_nn_loss_scale(const fsdpc_loss_sum *sum, const float *dloss)
{
    return sum->count ? (double)*dloss / (double)sum->count : 0;
}
