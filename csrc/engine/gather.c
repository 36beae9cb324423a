/* Gathering: a look at the wire where ranks share it, a collective where they do not.
 *
 * Over shared memory a gather copies nothing: the wire holds every full all the time, and the
 * operation only lets the ranks check that they agree on what they do.  Where a gather moves bytes
 * (slots.h) it brings the slices that ranks have published into the unit's memory.  In no-alias
 * mode the unit has memory of its own instead (full.c), out of reach whenever the unit is sharded,
 * and a gather copies: slower, but whoever reads a full too early or too late dies at that place.
 *
 * Publishing writes this rank's slices of a full from its masters, a cast or a copy.  It is legal
 * only between the arrival of all ranks in an epoch and the own publication of it (root.c).
 */
#include "engine/gather.h"

#include <string.h>

#include "engine/acts.h"
#include "engine/full.h"
#include "engine/order.h"
#include "engine/slots.h"
#include "ops/flat_ops.h"

static fsdpc_status post_group(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    fsdpc_root *root = unit->root;
    fsdpc_coll op = {.kind = FSDPC_COLL_GATHER,
                     .unit = unit->id,
                     .what = unit->name,
                     .dtype = group->wire_dtype,
                     .epoch = root->wire->epoch,
                     .stream = root->gather_stream,
                     .slices = group->plan->bands,
                     .n_slices = group->plan->n_bands,
                     .wire = root->wire,
                     .offset = group->wire_offset};
    if (group->published) {
        op.send = group->published;
        op.recv = fsdpc_full_target(unit, group);
    }
    return fsdpc_comm_post(root->comm, &op, &group->gather);
}

fsdpc_status fsdpc_gather_post(fsdpc_unit *unit, bool in_backward)
{
    if (unit->state != FSDPC_UNIT_SHARDED)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_full_settle(unit)); /* one that was gathered ahead and never used */
    if (unit->root->comm->size > 1 && unit->layout->n_groups > 0) {
        size_t bytes = 0;
        FSDPC_TRY(fsdpc_slot_take(unit));
        if (unit->root->overlaps)
            FSDPC_TRY(fsdpc_order_gather(unit));
        for (int g = 0; g < unit->layout->n_groups; g++) {
            FSDPC_TRY(post_group(unit, &unit->groups[g]));
            bytes += fsdpc_full_bytes(&unit->groups[g]);
        }
        fsdpc_root_trace(unit, FSDPC_TRACE_GATHER, bytes, in_backward);
    }
    unit->state = FSDPC_UNIT_GATHERING;
    return FSDPC_OK;
}

fsdpc_status fsdpc_gather_wait(fsdpc_unit *unit, bool in_backward)
{
    if (unit->state == FSDPC_UNIT_FULL)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_gather_post(unit, in_backward));
    fsdpc_root *root = unit->root;
    FSDPC_TRY(fsdpc_full_settle(unit));
    FSDPC_TRY(fsdpc_full_reveal(unit));
    if (root->comm->size > 1 && unit->layout->n_groups > 0)
        fsdpc_root_trace(unit, FSDPC_TRACE_GATHER_DONE, 0, in_backward);
    unit->state = FSDPC_UNIT_FULL;
    return FSDPC_OK;
}

fsdpc_status fsdpc_gather_publish(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    size_t bytes = 0;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            if (band->owner >= 0 && band->owner != root->comm->rank)
                continue;
            const unsigned char *from =
                group->master + band->shard_offset * fsdpc_dtype_bytes(group->plan->dtype);
            FSDPC_TRY(fsdpc_flat_cast(fsdpc_full_published(unit, group, band, band->shard_offset),
                                      group->wire_dtype, from, group->plan->dtype, band->numel,
                                      main));
            bytes += band->numel * fsdpc_dtype_bytes(group->wire_dtype);
        }
    }
    fsdpc_root_trace(unit, FSDPC_TRACE_PUBLISH, bytes, root->in_backward);
    unit->dirty = false;
    return FSDPC_OK;
}

fsdpc_status fsdpc_gather_changed(fsdpc_unit *unit, bool *changed_out)
{
    *changed_out = unit->dirty;
    if (unit->dirty || !unit->foreign)
        return FSDPC_OK;
    fsdpc_root *root = unit->root;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            if (band->owner >= 0 && band->owner != root->comm->rank)
                continue;
            bool equal;
            FSDPC_TRY(fsdpc_flat_equal(
                fsdpc_full_published(unit, group, band, band->shard_offset), group->wire_dtype,
                group->master + band->shard_offset * fsdpc_dtype_bytes(group->plan->dtype),
                group->plan->dtype, band->numel, &equal, main));
            if (!equal) {
                *changed_out = unit->dirty = true;
                return FSDPC_OK;
            }
        }
    }
    return FSDPC_OK;
}
