/* Ranks share a wire that contains the fulls of all units, mapped read-only, for the whole run. */
#include "engine/full.h"

fsdpc_status fsdpc_full_place_in_wire(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    group->full = (unsigned char *)unit->root->wire->read + group->wire_offset;
    return FSDPC_OK;
}

/* See Note [spread masters] in unit.c. */
static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    FSDPC_TRY(fsdpc_full_place_in_wire(unit, group));
    return fsdpc_unit_join_wire(unit, group, unit->root->wire);
}

const fsdpc_full_ops fsdpc_full_shared = {
    .name = "shared",
    .place = place,
    .remove = fsdpc_unit_leave_wire,
};
