/* Clipping in two steps: one small collective for the norm, no pass for the scale.
 *
 * The norm costs one read of the gradient shards and an all-reduce of 70 integers.  The scale is
 * not applied here: it is a factor that the optimizer multiplies in while it reads the gradients
 * anyway. A NaN or infinity anywhere makes the norm NaN or infinite, on all ranks alike.
 */
#include "engine/clip.h"

#include <math.h>

#include "ops/flat_ops.h"

static fsdpc_status add_unit(fsdpc_unit *unit, fsdpc_exact_sum *sum)
{
    fsdpc_stream inline_stream = {.device = unit->device, .name = "inline"};
    for (int i = 0; i < unit->layout->n_params; i++) {
        fsdpc_piece piece;
        void *grad;
        FSDPC_TRY(fsdpc_unit_grad(unit, i, &piece, &grad));
        if (!grad || piece.numel == 0)
            continue;
        const fsdpc_place *place = &unit->layout->params[i];
        FSDPC_TRY(fsdpc_flat_sumsq(grad, unit->groups[place->group].grad_dtype, piece.numel,
                                   place->leaf_numel, sum, &inline_stream));
    }
    return FSDPC_OK;
}

/* Adds up the sums of the ranks of one shard group. */
static fsdpc_status reduce_sum(fsdpc_comm *comm, fsdpc_exact_sum *sum)
{
    fsdpc_exact_sum_normalize(sum);
    if (comm->size == 1)
        return FSDPC_OK;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .unit = -1,
                     .what = "gradient norm",
                     .dtype = FSDPC_I64,
                     .send = sum,
                     .recv = sum,
                     .numel = FSDPC_EXACT_SUM_WORDS};
    fsdpc_trace_add(comm->trace, FSDPC_TRACE_COLLECTIVE, -1, sizeof *sum, 0, 0);
    return fsdpc_comm_run(comm, &op);
}

fsdpc_status fsdpc_clip_sum(fsdpc_unit *const *units, int n_units, fsdpc_exact_sum *sum_io)
{
    for (int i = 0; i < n_units; i++) {
        fsdpc_comm *comm = units[i]->mesh.shard;
        bool seen = false;
        for (int j = 0; j < i && !seen; j++)
            seen = units[j]->mesh.shard == comm;
        if (seen)
            continue;
        fsdpc_exact_sum sum = {0};
        for (int j = i; j < n_units; j++) {
            if (units[j]->mesh.shard == comm)
                FSDPC_TRY(add_unit(units[j], &sum));
        }
        FSDPC_TRY(reduce_sum(comm, &sum));
        fsdpc_exact_sum_merge(sum_io, &sum);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_clip_norm(fsdpc_unit *const *units, int n_units, double *norm_out)
{
    fsdpc_exact_sum sum = {0};
    FSDPC_TRY(fsdpc_clip_sum(units, n_units, &sum));
    *norm_out = sqrt(fsdpc_exact_sum_value(&sum));
    return FSDPC_OK;
}

void fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm)
{
    double scale = max_norm / (norm + 1e-6);
    if (!(scale < 1))
        return; /* also when the norm is NaN: the caller decides what that means */
    for (int i = 0; i < n_units; i++) {
        if (units[i]->grad_live)
            units[i]->pending_scale *= scale;
    }
}
