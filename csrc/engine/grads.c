/* What reductions leave in the gradient shards, until zero_grad.
 *
 * Zeroing touches no memory: it only says that the shards hold nothing, and that a reduction in
 * flight is not wanted.
 */
#include "engine/grads.h"

#include <string.h>

#include "engine/fill.h"
#include "engine/micro.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_micro_fold(unit));
    if (!fsdpc_unit_is_scaled(unit))
        return FSDPC_OK;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(fsdpc_flat_scale(group->grad, group->grad_dtype, group->plan->shard_numel,
                                   unit->pending_scale, fsdpc_unit_scale_at(unit), NULL, main));
    }
    unit->pending_scale = 1;
    unit->clipped = false;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, fsdpc_piece *piece_out, void **out)
{
    if (!fsdpc_unit_has_grad(unit, param)) {
        *out = NULL;
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_unit_apply_scale(unit));
    *out = fsdpc_unit_grad_rows(unit, param, piece_out);
    return FSDPC_OK;
}

void fsdpc_unit_zero_grad(fsdpc_unit *unit)
{
    unit->grad_live = unit->partial_live = unit->folded = false;
    memset(unit->grads, FSDPC_GRAD_NONE, (size_t)unit->layout->n_params);
    unit->n_sums = 0;
    unit->pending_scale = 1;
    unit->clipped = false;
    unit->forget = unit->reduction != FSDPC_REDUCTION_NONE;
    if (unit->root && !unit->root->in_backward)
        fsdpc_fill_drop(unit); /* what was accumulated without synchronising */
}
