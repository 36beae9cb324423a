/* Unsharded parameters of a single-rank shard group, in memory provided by a frontend whose users
 * may write to the masters at any time.
 *
 * Such a rank is the only reader of its slices, and it would have to compare them with the masters
 * before each step. It therefore copies nothing in. The unsharded parameters are cast from the
 * masters when the unit is about to be used, and their memory is returned after use. FSDP2 does the
 * same on one rank. With a copy-in, SmolLM3-3B under torch on an H200 kept 5.8 GiB of unsharded
 * parameters at all times and spent 4.9 ms of each 464 ms step comparing them. If no cast is
 * needed, the masters themselves are the unsharded parameters.
 *
 * If masters are written between a forward and its backward, the backward fails, because it would
 * cast the new weights. If the frontend does not see the write (for example, through `.data`), the
 * new values are used, as in FSDP2.
 */
#include "engine/unsharded.h"

bool fsdpc_unit_unsharded_in_frontend(const fsdpc_unit *unit)
{
    return unit->root && unit->root->unsharded == &fsdpc_unsharded_frontend;
}

bool fsdpc_unit_reads_masters(const fsdpc_unit *unit)
{
    if (!fsdpc_unit_unsharded_in_frontend(unit))
        return false;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        if (group->param_dtype != group->plan->dtype)
            return false;
        for (size_t i = 0; unit->gather_codec != FSDPC_CODEC_EXACT && i < group->plan->n_bands; i++)
            if (fsdpc_unsharded_rounds(unit->gather_codec, group, &group->plan->bands[i]))
                return false;
    }
    return true;
}

void fsdpc_unit_place_unsharded(fsdpc_unit *unit, void *const *groups)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].unsharded = unit->groups[g].own_slices = groups[g];
}

static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    /* On a single rank, the shard and the unsharded parameters have the same layout. */
    if (fsdpc_unit_reads_masters(unit))
        group->unsharded = group->own_slices =
            fsdpc_unit_masters(unit, group, &group->plan->bands[0], 0);
    return FSDPC_OK;
}

static fsdpc_status reveal(fsdpc_unit *unit)
{
    size_t bytes;
    if (fsdpc_unit_reads_masters(unit))
        return fsdpc_unit_end_step(unit);
    if (!unit->frontend_memory.take)
        return fsdpc_fail(FSDPC_ERR_STATE, "the model of unit '%s' was deleted", unit->name);
    FSDPC_TRY(unit->frontend_memory.take(unit->frontend_memory.of));
    FSDPC_TRY(fsdpc_unsharded_cast(unit, &bytes));
    return fsdpc_unsharded_round(unit);
}

static void hide(fsdpc_unit *unit)
{
    bool taken = false; /* otherwise it was about to be used, but was not */
    if (fsdpc_unit_reads_masters(unit))
        return;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        taken |= unit->groups[g].unsharded != NULL;
        unit->groups[g].unsharded = unit->groups[g].own_slices = NULL;
    }
    if (taken && unit->frontend_memory.give)
        unit->frontend_memory.give(unit->frontend_memory.of);
}

const fsdpc_unsharded_ops fsdpc_unsharded_frontend = {
    .name = "frontend",
    .at_use = true,
    .place = place,
    .remove = hide,
    .reveal = reveal,
    .hide = hide,
};
