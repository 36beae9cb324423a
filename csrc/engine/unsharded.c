/* Code shared by all implementations of unsharded parameters: creation order, watched addresses and
 * dropping. */
#include "engine/unsharded.h"

#include "base/fault.h"
#include "engine/acts.h"
#include "engine/codec_error.h"
#include "engine/order.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_unsharded_own_slices(fsdpc_root *root)
{
    size_t bytes = 0;
    unsigned char *at;
    for (int i = 0; i < root->n_units; i++)
        for (int g = 0; g < root->units[i]->layout->n_groups; g++)
            bytes += fsdpc_plan_slice_bytes(root->units[i]->groups[g].plan,
                                            root->units[i]->groups[g].param_dtype);
    FSDPC_TRY(fsdpc_param_buffer_own(root->param_buffer, bytes, &at));
    for (int i = 0; i < root->n_units; i++)
        for (int g = 0; g < root->units[i]->layout->n_groups; g++) {
            fsdpc_unit_group *group = &root->units[i]->groups[g];
            group->own_slices = at;
            at += fsdpc_plan_slice_bytes(group->plan, group->param_dtype);
        }
    return FSDPC_OK;
}

/* Runs in the fault handler, so it only reads memory. */
static const char *name_at(const void *owner, const void *address)
{
    const fsdpc_unit *unit = owner;
    uintptr_t at = (uintptr_t)address;
    for (int p = 0; p < unit->layout->n_params; p++) {
        const fsdpc_place *place = &unit->layout->params[p];
        const fsdpc_unit_group *group = &unit->groups[place->group];
        size_t element = fsdpc_dtype_bytes(group->param_dtype);
        uintptr_t begin = (uintptr_t)group->unsharded + place->unsharded_offset * element;
        if (at >= begin && at - begin < place->numel * element)
            return place->name;
    }
    return NULL; /* padding */
}

fsdpc_status fsdpc_unsharded_create(fsdpc_root *root, const bool *encloses)
{
    if (root->unsharded->create)
        FSDPC_TRY(root->unsharded->create(root, encloses));
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        for (int g = 0; g < unit->layout->n_groups; g++) {
            fsdpc_unit_group *group = &unit->groups[g];
            FSDPC_TRY(root->unsharded->place(unit, group));
            if (!group->unsharded)
                continue;
            fsdpc_fault_announce(&(fsdpc_fault_range){.begin = group->unsharded,
                                                      .bytes = fsdpc_unsharded_bytes(group),
                                                      .rank = root->comm->world_rank,
                                                      .unit = unit->name,
                                                      .owner = unit,
                                                      .name = name_at});
        }
    }
    return FSDPC_OK;
}

void fsdpc_unsharded_remove(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        fsdpc_fault_withdraw(unit->groups[g].unsharded, unit);
    if (unit->root->unsharded && unit->root->unsharded->remove)
        unit->root->unsharded->remove(unit);
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].unsharded = unit->groups[g].target = unit->groups[g].own_slices = NULL;
}

fsdpc_status fsdpc_unsharded_cast(fsdpc_unit *unit, size_t *bytes_out)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    size_t bytes = 0;
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            const unsigned char *from = fsdpc_unit_masters(unit, group, band, band->shard_offset);
            FSDPC_TRY(
                fsdpc_flat_cast(fsdpc_unsharded_own_slice(unit, group, band, band->shard_offset),
                                group->param_dtype, from, group->plan->dtype, band->numel, main));
            bytes += band->numel * fsdpc_dtype_bytes(group->param_dtype);
        }
    }
    *bytes_out = bytes;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unsharded_round(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_codec codec = fsdpc_codec_now(unit, FSDPC_CODED_GATHER);
    const fsdpc_codec_error *error = fsdpc_gather_error(unit);
    for (int g = 0; codec != FSDPC_CODEC_EXACT && g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            fsdpc_codec_rows rows = fsdpc_unsharded_rows(group, band);
            FSDPC_TRY(fsdpc_codec_round(
                codec, &rows, fsdpc_unsharded_own_slice(unit, group, band, band->shard_offset),
                error, main));
        }
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_unsharded_settle(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++)
        FSDPC_TRY(fsdpc_comm_order(&unit->groups[g].gather, main));
    return FSDPC_OK;
}

void fsdpc_unsharded_drop(fsdpc_unit *unit)
{
    if (unit->state == FSDPC_UNIT_SHARDED || unit->held)
        return;
    bool read = unit->state == FSDPC_UNIT_UNSHARDED;
    unit->state = FSDPC_UNIT_SHARDED;
    fsdpc_root_trace(unit, FSDPC_TRACE_RESHARD, 0, unit->root->model->in_backward);
    if (unit->root->unsharded->hide)
        unit->root->unsharded->hide(unit);
    if (read)
        fsdpc_order_released(unit);
}
