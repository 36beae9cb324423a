/* Gathers a unit with one operation per group, each of which also checks that all ranks have posted
 * the same one. If ranks share a parameter buffer, the operation copies nothing; otherwise it
 * collects all ranks' slices into the unit's unsharded parameters (unsharded.h).
 *
 * Copy-in writes this rank's slices of the unsharded parameters from its masters, either casting or
 * copying them. Copy-in is legal only after all ranks have arrived in an epoch and before this rank
 * reports its copy-in (epoch.h). After an optimizer's step, a rank may copy in until it posts the
 * next gather, which then waits for all ranks.
 */
#include "engine/gather.h"

#include <string.h>

#include "engine/acts.h"
#include "engine/codec_error.h"
#include "engine/unsharded.h"
#include "engine/order.h"
#include "ops/flat_ops.h"

static fsdpc_status post_group(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    fsdpc_root *root = unit->root;
    fsdpc_coll op = {.kind = FSDPC_COLL_GATHER,
                     .unit = unit->id,
                     .what = unit->name,
                     .dtype = group->param_dtype,
                     .epoch = root->param_buffer->epoch,
                     .stream = root->gather_stream,
                     .slices = group->plan->bands,
                     .n_slices = group->plan->n_bands,
                     .send = group->own_slices,
                     .recv = group->target,
                     .param_buffer = root->param_buffer,
                     .offset = group->param_buffer_offset,
                     .codec = fsdpc_codec_now(unit, FSDPC_CODED_GATHER),
                     .after_copy_in = unit->copy_in_later};
    return fsdpc_comm_post(root->comm, &op, &group->gather);
}

fsdpc_status fsdpc_gather_post(fsdpc_unit *unit, bool in_backward)
{
    if (unit->state != FSDPC_UNIT_SHARDED)
        return FSDPC_OK;
    /* The unit may have been gathered ahead and never used. */
    FSDPC_TRY(fsdpc_unsharded_settle(unit));
    FSDPC_TRY(fsdpc_unit_advance(unit));
    if (unit->root->comm->size > 1 && unit->layout->n_groups > 0) {
        size_t bytes = 0;
        if (unit->root->unsharded->make_room)
            FSDPC_TRY(unit->root->unsharded->make_room(unit));
        FSDPC_TRY(fsdpc_order_gather(unit));
        for (int g = 0; g < unit->layout->n_groups; g++) {
            FSDPC_TRY(post_group(unit, &unit->groups[g]));
            bytes += fsdpc_unsharded_bytes(&unit->groups[g]);
        }
        fsdpc_root_trace(unit, FSDPC_TRACE_GATHER, bytes, in_backward);
    }
    unit->copy_in_later = false;
    unit->state = FSDPC_UNIT_GATHERING;
    return FSDPC_OK;
}

fsdpc_status fsdpc_gather_wait(fsdpc_unit *unit, bool in_backward)
{
    if (unit->state == FSDPC_UNIT_UNSHARDED)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_gather_post(unit, in_backward));
    fsdpc_root *root = unit->root;
    FSDPC_TRY(fsdpc_unsharded_settle(unit));
    if (root->unsharded->reveal)
        FSDPC_TRY(root->unsharded->reveal(unit));
    if (root->comm->size > 1 && unit->layout->n_groups > 0)
        fsdpc_root_trace(unit, FSDPC_TRACE_GATHER_DONE, 0, in_backward);
    unit->state = FSDPC_UNIT_UNSHARDED;
    return FSDPC_OK;
}

fsdpc_status fsdpc_gather_copy_in(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    size_t bytes = 0;
    if (!root->unsharded->at_use)
        FSDPC_TRY(fsdpc_unsharded_cast(unit, &bytes));
    fsdpc_unit_drop_copies(unit);
    fsdpc_root_trace(unit, FSDPC_TRACE_COPY_IN, bytes, root->model->in_backward);
    FSDPC_TRY(fsdpc_unsharded_seal(unit));
    unit->dirty = false;
    return FSDPC_OK;
}

/* Compares a slice that was rounded after the copy-in with what its masters are rounded to. */
static fsdpc_status compare_rounded(const fsdpc_unit *unit, const fsdpc_unit_group *group,
                                    const fsdpc_slice *band, bool *equal_io)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_codec_rows rows = fsdpc_unsharded_rows(group, band);
    void *rounded;
    FSDPC_TRY(fsdpc_device_alloc(unit->device, FSDPC_MEM_OTHER,
                                 rows.numel * fsdpc_dtype_bytes(rows.dtype), &rounded));
    fsdpc_status status = fsdpc_flat_cast(rounded, rows.dtype,
                                          fsdpc_unit_masters(unit, group, band, band->shard_offset),
                                          group->plan->dtype, rows.numel, main);
    if (status == FSDPC_OK)
        status = fsdpc_codec_round(fsdpc_codec_now(unit, FSDPC_CODED_GATHER), &rows, rounded, NULL,
                                   main);
    if (status == FSDPC_OK)
        status = fsdpc_flat_equal(fsdpc_unsharded_own_slice(unit, group, band, band->shard_offset),
                                  rows.dtype, rounded, rows.dtype, rows.numel, equal_io, main);
    fsdpc_device_free(unit->device, rounded);
    return status;
}

fsdpc_status fsdpc_gather_compare(const fsdpc_unit *unit, bool *equal_io)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        for (size_t i = 0; i < group->plan->n_bands; i++) {
            const fsdpc_slice *band = &group->plan->bands[i];
            if (fsdpc_unsharded_rounds(fsdpc_codec_now(unit, FSDPC_CODED_GATHER), group, band)) {
                FSDPC_TRY(compare_rounded(unit, group, band, equal_io));
                continue;
            }
            FSDPC_TRY(fsdpc_flat_equal(
                fsdpc_unsharded_own_slice(unit, group, band, band->shard_offset),
                group->param_dtype, fsdpc_unit_masters(unit, group, band, band->shard_offset),
                group->plan->dtype, band->numel, equal_io, main));
        }
    }
    return FSDPC_OK;
}
