/* Only ranks that compute on CPUs keep gradients in files. Their main stream runs in the calling
 * thread, so all earlier work is already complete.
 *
 * A pending step may have updated the unit without using all of its gradients, and the step's pass
 * may still be reading the unused ones. The unit is therefore removed from the pass before its
 * gradients are written.
 */
#include "engine/grad_file.h"

void fsdpc_grad_file_release(const fsdpc_unit *unit)
{
    for (int g = 0; fsdpc_unit_is_shared(unit) && g < unit->n_trained; g++)
        if (unit->groups[g].grad_extent)
            fsdpc_extent_forget(unit->groups[g].grad_extent);
}

fsdpc_status fsdpc_grad_file_open(const fsdpc_unit *unit, bool keep)
{
    keep = keep && !fsdpc_unit_is_shared(unit);
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_extent *extent = unit->groups[g].grad_extent;
        if (!extent)
            continue;
        FSDPC_TRY(fsdpc_pass_leave(extent));
        if (keep)
            FSDPC_TRY(fsdpc_extent_written(extent, 0, extent->numel));
        else
            fsdpc_extent_forget(extent);
    }
    return FSDPC_OK;
}

void fsdpc_grad_file_seal(const fsdpc_unit *unit)
{
    for (int g = 0; !fsdpc_unit_is_shared(unit) && g < unit->n_trained; g++)
        if (unit->groups[g].grad_extent)
            fsdpc_extent_seal(unit->groups[g].grad_extent);
}

fsdpc_status fsdpc_grad_file_check(const fsdpc_unit *unit, int param, bool write)
{
    fsdpc_extent *extent = unit->groups[unit->layout->params[param].group].grad_extent;
    fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    if (!extent || local.numel == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_pass_leave(extent));
    fsdpc_grad_file_release(unit);
    return (write ? fsdpc_extent_written : fsdpc_extent_check)(extent, local.shard_offset,
                                                               local.numel);
}
