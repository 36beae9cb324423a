/* Ranks share a parameter buffer that contains the unsharded parameters of all units and stays
 * mapped read-only for the whole run. */
#include "engine/unsharded.h"

fsdpc_status fsdpc_unsharded_place_in_param_buffer(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    group->unsharded = (unsigned char *)unit->root->param_buffer->read + group->param_buffer_offset;
    return FSDPC_OK;
}

/* See Note [spread masters] in unit.c. */
static fsdpc_status place(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    FSDPC_TRY(fsdpc_unsharded_place_in_param_buffer(unit, group));
    return fsdpc_unit_join_param_buffer(unit, group, unit->root->param_buffer);
}

const fsdpc_unsharded_ops fsdpc_unsharded_shared = {
    .name = "shared",
    .place = place,
    .remove = fsdpc_unit_leave_param_buffer,
};
