/* Fulls of a shard group of one rank, in memory of a frontend whose users may write masters at
 * any time.
 *
 * Such a rank is the only reader of its slices, and it would have to compare published slices with
 * the masters before each step.  It therefore publishes nothing.  A full is a cast of the masters,
 * made when the unit begins to use it; its memory is returned after the use.  This is what FSDP2
 * does on one rank.  With publishing, SmolLM3-3B under torch on an H200 always had 5.8 GiB of
 * published parameters, and spent 4.9 of 464 ms comparing them.  If no cast is needed, the masters
 * themselves are the full.
 *
 * A write between a forward and its backward is an error in the backward, which casts the weights
 * again.  If the frontend does not see the write (for example, through `.data`), the new values are
 * used, as in FSDP2.
 */
#include "engine/full.h"

bool fsdpc_unit_fulls_are_lent(const fsdpc_unit *unit)
{
    return unit->root && unit->root->full == &fsdpc_full_lent;
}

bool fsdpc_unit_reads_masters(const fsdpc_unit *unit)
{
    if (!fsdpc_unit_fulls_are_lent(unit))
        return false;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        if (unit->groups[g].param_dtype != unit->groups[g].plan->dtype)
            return false;
    }
    return true;
}

void fsdpc_unit_place_fulls(fsdpc_unit *unit, void *const *groups)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].full = unit->groups[g].own_slices = groups[g];
}

static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    if (fsdpc_unit_reads_masters(unit)) /* on one rank, shard and full have the same layout */
        group->full = group->own_slices =
            fsdpc_unit_masters(unit, group, &group->plan->bands[0], 0);
    return FSDPC_OK;
}

static fsdpc_status reveal(fsdpc_unit *unit)
{
    size_t bytes;
    if (fsdpc_unit_reads_masters(unit))
        return fsdpc_unit_end_step(unit);
    if (!unit->full_room.take)
        return fsdpc_fail(FSDPC_ERR_STATE, "the model of unit '%s' was deleted", unit->name);
    FSDPC_TRY(unit->full_room.take(unit->full_room.of));
    return fsdpc_full_cast(unit, &bytes);
}

static void hide(fsdpc_unit *unit)
{
    bool taken = false; /* otherwise it was about to be used, but was not */
    if (fsdpc_unit_reads_masters(unit))
        return;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        taken |= unit->groups[g].full != NULL;
        unit->groups[g].full = unit->groups[g].own_slices = NULL;
    }
    if (taken && unit->full_room.give)
        unit->full_room.give(unit->full_room.of);
}

const fsdpc_full_ops fsdpc_full_lent = {
    .name = "lent",
    .at_use = true,
    .place = place,
    .remove = hide,
    .reveal = reveal,
    .hide = hide,
};
