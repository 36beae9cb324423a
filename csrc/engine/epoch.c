/* Epochs keep the parameter buffer consistent with the masters.
 *
 * docs/design/communication.md explains the protocol, and tests/model models it. In short, a rank
 * that arrives in an epoch has finished all reads of earlier epochs. Once all ranks have arrived,
 * none is reading, and ranks whose masters changed may write. If no masters changed on any rank,
 * all ranks continue immediately.
 *
 * An optimizer's epoch always changes masters. Each rank copies in its slices without waiting for
 * the others. The next reader begins another epoch, and a rank arrives in that epoch only after
 * finishing its copy-in. Waiting for that arrival is therefore enough.
 *
 * If a unit's step stays pending until the unit is needed, its slices are copied in only then. In
 * that case the epoch tells all ranks that the copy-in will come later. Each unit's next gather
 * then completes only after every rank has posted it, and a rank posts it only after writing its
 * slices.
 *
 * An interrupt may end a wait between the arrival and the end of an epoch. The peers rely on the
 * announcement, so the next epoch first completes the interrupted one from the stage that it
 * reached. An interrupted optimizer step cannot be completed without its pass, so it closes the
 * communicator.
 *
 * An exception on any rank turns the next epoch into a reset on all ranks: each drops its execution
 * order, so all continue from the same state. If the exception was raised in a backward, ranks also
 * drop unreduced gradients, which may be incomplete. A forward produces no gradients, so those of
 * earlier micro-steps are kept.
 *
 * The roots of a model begin their epochs one after the other, on every rank in the same order. A
 * reset travels from one root's ranks to those of the next.
 */
#include "engine/epoch.h"

#include <stdio.h>
#include <string.h>

#include "engine/acts.h"
#include "engine/fill.h"
#include "engine/unsharded.h"
#include "engine/gather.h"
#include "engine/order.h"
#include "engine/reduce.h"

const char *fsdpc_epoch_text(uint32_t kind)
{
    static const char *const texts[] = {
#define X(name, text) [FSDPC_EPOCH_##name] = text,
        FSDPC_EPOCH_KIND_TABLE(X)
#undef X
    };
    return kind < sizeof texts / sizeof *texts ? texts[kind] : "something unknown";
}

/* Completes any gathers in flight, since a rank must finish its reads before it arrives. Units that
 * stay unsharded after backward remain so until weights change. */
static fsdpc_status begin_sharded(fsdpc_root *root)
{
    FSDPC_TRY(fsdpc_reduce_wait_all(root)); /* needed only after an interrupted backward or one that
                                             * is not the last */
    memset(root->pool_turn, 0, sizeof root->pool_turn); /* each step uses the same buffers as the
                                                         * last one */
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        FSDPC_TRY(fsdpc_unsharded_settle(unit));
        if (unit->settings.reshard_after_backward || unit->state == FSDPC_UNIT_GATHERING)
            fsdpc_unsharded_drop(unit);
    }
    return FSDPC_OK;
}

/* Returns whether masters may differ from the parameter buffer (if there is one), because other
 * code may have written them. */
static bool is_in_doubt(const fsdpc_unit *unit)
{
    bool copied_in = !unit->root->unsharded->at_use || unit->state == FSDPC_UNIT_UNSHARDED;
    return unit->foreign && !unit->dirty && copied_in && !fsdpc_unit_reads_masters(unit);
}

static fsdpc_status compare_all(const fsdpc_root *root, bool *equal_io)
{
    for (int i = 0; i < root->n_units; i++) {
        if (is_in_doubt(root->units[i]))
            FSDPC_TRY(fsdpc_gather_compare(root->units[i], &equal_io[i]));
    }
    return FSDPC_OK;
}

/* Compares the masters of all units on a remote device, waiting only once. */
static fsdpc_status compare_all_there(const fsdpc_root *root, bool *equal_io)
{
    fsdpc_device *device = root->device;
    fsdpc_stream *main = fsdpc_device_main(device);
    size_t bytes = (size_t)root->n_units * sizeof *equal_io;
    void *there;
    FSDPC_TRY(fsdpc_device_alloc(device, FSDPC_MEM_OTHER, bytes, &there));
    fsdpc_status status = fsdpc_device_copy(device, there, equal_io, bytes, main);
    if (status == FSDPC_OK)
        status = compare_all(root, there);
    if (status == FSDPC_OK)
        status = fsdpc_device_copy(device, equal_io, there, bytes, main);
    if (status == FSDPC_OK)
        status = fsdpc_stream_sync(main);
    fsdpc_device_free(device, there);
    return status;
}

static fsdpc_status find_changes(fsdpc_root *root, uint32_t *bits_io)
{
    int in_doubt = 0;
    for (int i = 0; i < root->n_units; i++) {
        root->equal[i] = true;
        in_doubt += is_in_doubt(root->units[i]);
    }
    if (in_doubt > 0)
        FSDPC_TRY(root->device->remote ? compare_all_there(root, root->equal)
                                       : compare_all(root, root->equal));
    for (int i = 0; i < root->n_units; i++) {
        root->units[i]->dirty |= !root->equal[i];
        if (root->units[i]->dirty)
            *bits_io |= FSDPC_EPOCH_CHANGED;
    }
    return FSDPC_OK;
}

/* Announces what this rank is about to do. */
static fsdpc_status announce(fsdpc_root *root, fsdpc_epoch_kind kind, const fsdpc_unit *called,
                             uint32_t bits)
{
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->held)
            bits |= FSDPC_EPOCH_HELD;
        if ((root->units[i]->puts_off || root->units[i]->copy_in_later) &&
            kind == FSDPC_EPOCH_OPTIM)
            bits |= FSDPC_EPOCH_COPY_IN_LATER;
    }
    if (root->needs_reset)
        bits |= root->drops ? FSDPC_EPOCH_RESET | FSDPC_EPOCH_DROP : FSDPC_EPOCH_RESET;
    root->note = (fsdpc_epoch_note){
        .bits = bits,
        .kind = (uint32_t)kind,
        .unit = called->id,
        .steps = root->steps,
    };
    if (!root->captured)
        FSDPC_TRY(fsdpc_param_buffer_arrive(root->param_buffer, &root->note));
    fsdpc_trace_add(root->trace, FSDPC_TRACE_EPOCH, called->id, 0, root->param_buffer->epoch, 0);
    root->epoch_progress = FSDPC_EPOCH_AT_ARRIVED;
    return FSDPC_OK;
}

/* Keeps the stage if a wait was interrupted, so that the epoch can be resumed; any other error ends
 * the epoch. */
static fsdpc_status keep_progress(fsdpc_root *root, fsdpc_status status)
{
    if (status != FSDPC_OK && status != FSDPC_ERR_INTERRUPT)
        root->epoch_progress = FSDPC_EPOCH_AT_IDLE;
    return status;
}

/* Reads the peers' announcements and decides whether the parameter buffer must be written. */
static fsdpc_status decide(fsdpc_root *root, const fsdpc_unit *called)
{
    fsdpc_epoch_note all = root->note;
    if (!root->captured)
        FSDPC_TRY(keep_progress(
            root, fsdpc_param_buffer_epoch_wait(root->param_buffer, called->name, &all)));
    if (all.bits & FSDPC_EPOCH_RESET)
        fsdpc_exec_order_clear(&root->model->exec_order);
    if (all.bits & FSDPC_EPOCH_DROP)
        fsdpc_fill_drop_failed(root);
    if (root->next) { /* ranks of other meshes learn of it too */
        root->next->needs_reset |= (all.bits & FSDPC_EPOCH_RESET) != 0;
        root->next->drops |= (all.bits & FSDPC_EPOCH_DROP) != 0;
    }
    root->needs_reset = root->drops = false;
    root->epoch_progress =
        all.bits & FSDPC_EPOCH_CHANGED ? FSDPC_EPOCH_AT_WRITING : FSDPC_EPOCH_AT_IDLE;
    if (root->epoch_progress != FSDPC_EPOCH_AT_WRITING)
        return FSDPC_OK;
    root->generation++;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unsharded_drop(root->units[i]);
        if (root->note.kind == FSDPC_EPOCH_OPTIM)
            root->units[i]->copy_in_later = all.bits & FSDPC_EPOCH_COPY_IN_LATER;
    }
    return FSDPC_OK;
}

/* Call only while no rank reads the parameter buffer. */
static fsdpc_status copy_in_dirty(fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->dirty)
            FSDPC_TRY(fsdpc_gather_copy_in(root->units[i]));
    }
    return FSDPC_OK;
}

/* Advances an epoch from its current stage to its end. */
static fsdpc_status complete(fsdpc_root *root, const fsdpc_unit *called)
{
    if (root->epoch_progress == FSDPC_EPOCH_AT_ARRIVED)
        FSDPC_TRY(decide(root, called));
    if (root->epoch_progress == FSDPC_EPOCH_AT_WRITING) {
        FSDPC_TRY(copy_in_dirty(root));
        FSDPC_TRY(fsdpc_order_copied_in(root));
        if (!root->captured)
            FSDPC_TRY(fsdpc_param_buffer_copied_in(root->param_buffer));
        root->epoch_progress = root->captured ? FSDPC_EPOCH_AT_IDLE : FSDPC_EPOCH_AT_COPIED_IN;
    }
    if (root->epoch_progress == FSDPC_EPOCH_AT_COPIED_IN)
        FSDPC_TRY(
            keep_progress(root, fsdpc_param_buffer_copy_in_wait(root->param_buffer, called->name)));
    root->epoch_progress = FSDPC_EPOCH_AT_IDLE;
    return FSDPC_OK;
}

/* Call before a new epoch. Completes those of the model's other roots too, because peers that wait
 * in them do not arrive in the new one. It is not an error if all ranks refused the interrupted
 * epoch because weights changed under unshard(). */
static fsdpc_status complete_interrupted(fsdpc_root *root)
{
    for (root = root->model->first; root; root = root->next) {
        fsdpc_status status = complete(root, root->units[0]);
        if (status != FSDPC_ERR_STATE)
            FSDPC_TRY(status);
    }
    return FSDPC_OK;
}

/* Fails inside another model's capture, since a graph contains the step of only one model. */
static fsdpc_status check_capture(const fsdpc_root *root)
{
    if (!root->device->capturing || root->captured)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "'%s' runs inside the captured step of another model: a graph holds the step "
                      "of one",
                      root->units[0]->name);
}

fsdpc_status fsdpc_root_epoch(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_unit *called,
                              uint32_t bits)
{
    FSDPC_TRY(check_capture(root));
    FSDPC_TRY(complete_interrupted(root));
    FSDPC_TRY(begin_sharded(root));
    FSDPC_TRY(find_changes(root, &bits));
    FSDPC_TRY(announce(root, kind, called, bits));
    return complete(root, called);
}

fsdpc_status fsdpc_model_epoch(fsdpc_model *model, fsdpc_epoch_kind kind, fsdpc_unit *called,
                               uint32_t bits)
{
    for (fsdpc_root *root = model->first; root; root = root->next)
        FSDPC_TRY(fsdpc_root_epoch(root, kind, called, bits));
    return FSDPC_OK;
}

/* The peers take the step that this rank announced but did not apply to its rows, so no rank may
 * continue. */
static void close_half_step(fsdpc_root *root, const char *what)
{
    char text[160];
    snprintf(text, sizeof text,
             "rank %d was interrupted in %s that others may have taken; go on from the last "
             "checkpoint",
             root->comm->world_rank, what);
    fsdpc_root_abort(root, text);
}

fsdpc_status fsdpc_root_write_begin(fsdpc_root *root)
{
    const char *inside = fsdpc_model_inside(root->model);
    if (inside)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "an optimizer stepped inside %s of '%s': the weights are fixed there",
                          inside, root->units[0]->name);
    FSDPC_TRY(check_capture(root));
    FSDPC_TRY(complete_interrupted(root));
    FSDPC_TRY(begin_sharded(root));
    fsdpc_comm_locate(root->comm, "an optimizer's step", root->units[0]->name);
    root->steps++;
    FSDPC_TRY(
        announce(root, FSDPC_EPOCH_OPTIM, root->units[0], FSDPC_EPOCH_CHANGED | FSDPC_EPOCH_STEP));
    fsdpc_status status = decide(root, root->units[0]);
    if (status == FSDPC_ERR_INTERRUPT)
        close_half_step(root, fsdpc_epoch_text(FSDPC_EPOCH_OPTIM));
    FSDPC_TRY(status);
    return copy_in_dirty(root);
}

fsdpc_status fsdpc_root_write_end(fsdpc_root *root)
{
    fsdpc_comm_locate(root->comm, "user code", "");
    if (root->epoch_progress != FSDPC_EPOCH_AT_WRITING) /* begin failed */
        return FSDPC_OK;
    root->epoch_progress = FSDPC_EPOCH_AT_IDLE;
    fsdpc_status status = fsdpc_order_copied_in(root);
    if (!root->captured)
        FSDPC_KEEP_FIRST(status, fsdpc_param_buffer_copied_in(root->param_buffer));
    return status;
}

static fsdpc_status end_all(fsdpc_root *root)
{
    FSDPC_TRY(begin_sharded(root));
    for (int i = 0; i < root->n_units; i++)
        fsdpc_unsharded_drop(root->units[i]);
    return FSDPC_OK;
}

fsdpc_status fsdpc_root_agree(fsdpc_root *root, fsdpc_epoch_kind kind, fsdpc_status status)
{
    char text[512];
    const char *what = fsdpc_epoch_text((uint32_t)kind);
    fsdpc_epoch_note all;
    if (status == FSDPC_OK)
        status = end_all(root);
    snprintf(text, sizeof text, "%s", status == FSDPC_OK ? "" : fsdpc_last_error());
    FSDPC_TRY(complete_interrupted(root));
    FSDPC_TRY(announce(root, kind, root->units[0], status == FSDPC_OK ? 0 : FSDPC_EPOCH_REFUSED));
    fsdpc_status met =
        fsdpc_param_buffer_epoch_wait(root->param_buffer, root->units[0]->name, &all);
    root->epoch_progress = FSDPC_EPOCH_AT_IDLE;
    if (met == FSDPC_ERR_INTERRUPT)
        close_half_step(root, what);
    FSDPC_TRY(met);
    if (status != FSDPC_OK)
        fsdpc_fail(status, "%s", text);
    if (all.bits & FSDPC_EPOCH_REFUSED)
        status = fsdpc_comm_agree(root->comm, status, what);
    return root->replicate ? fsdpc_comm_agree(root->replicate, status, what) : status;
}
