/* The schedule: when units are gathered, resharded and reduced.
 *
 *     pre_forward    gather
 *     post_forward   reshard
 *     pre_backward   gather
 *     post_backward  reduce, reshard
 *
 * Everything happens on demand: a unit is gathered when it is needed, so any order of calls is
 * correct if all ranks make the same calls. The execution order only allows units to be gathered
 * ahead of demand.
 *
 * The execution order. The first step with gradients records each (unit, phase) in order. As long
 * as later steps repeat this order, the next `prefetch` entries are gathered before the current
 * unit computes. At the first entry that differs, the execution order is cut off and the remainder
 * of the step is recorded again. A permanent switch to another branch therefore costs one on-demand
 * step; taking a branch just once costs two.
 *
 * Only post_backward releases weights; the arrival of all gradients does not. A frozen layer after
 * the last trainable one still needs its weight to compute the gradient of its input.
 *
 * A gradient may arrive after its unit's reduction was posted (if a unit is used twice); it opens
 * another reduction, which adds to the first. Buffers that are still open at the end of backward
 * are posted then, in unit order.
 *
 * Rank-dependent units (such as experts that no data on some ranks selects) take part even if they
 * did not run. All of them are gathered when an epoch begins and stay unsharded until the next; the
 * execution order omits them. Their gradients (zeros if they have none) are reduced at the end of
 * backward.
 *
 * A forward inside backward is a recomputation (activation checkpointing): it begins no epoch and
 * does not reshard.
 */
#include "engine/sched.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "engine/acts.h"
#include "engine/agree.h"
#include "engine/epoch.h"
#include "engine/fill.h"
#include "engine/unsharded.h"
#include "engine/gather.h"
#include "engine/grads.h"
#include "engine/reduce.h"
#include "ops/flat_ops.h"
#include "engine/root_internal.h"

static fsdpc_status append(fsdpc_exec_order *exec_order, fsdpc_exec_entry entry)
{
    if (exec_order->length == exec_order->capacity) {
        size_t capacity = exec_order->capacity ? 2 * exec_order->capacity : 64;
        fsdpc_exec_entry *entries = realloc(exec_order->entries, capacity * sizeof entry);
        if (!entries)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the schedule of %zu entries",
                              capacity);
        exec_order->entries = entries;
        exec_order->capacity = capacity;
    }
    exec_order->entries[exec_order->length++] = entry;
    exec_order->position = exec_order->length;
    return FSDPC_OK;
}

static void begin_step(fsdpc_exec_order *exec_order)
{
    if (exec_order->following && exec_order->ended && exec_order->position < exec_order->length)
        exec_order->length = exec_order->position; /* the last step was shorter: gather no more than
                                                    * it did */
    exec_order->following = exec_order->complete;
    if (!exec_order->complete)
        exec_order->length = 0;
    exec_order->position = 0;
    exec_order->ended = false;
}

/* Records that a unit is being used, by following the execution order or appending to it. */
static fsdpc_status note_use(fsdpc_root *root, const fsdpc_unit *unit, bool backward)
{
    fsdpc_exec_order *exec_order = &root->exec_order;
    if (unit->settings.rank_dependent)
        return FSDPC_OK;
    fsdpc_exec_entry entry = {.unit = unit->id, .backward = backward};
    if (exec_order->following) {
        if (exec_order->position < exec_order->length &&
            exec_order->entries[exec_order->position].unit == entry.unit &&
            exec_order->entries[exec_order->position].backward == entry.backward) {
            exec_order->position++;
            return FSDPC_OK;
        }
        exec_order->following = exec_order->complete = false;
        exec_order->length = exec_order->position;
    }
    return append(exec_order, entry);
}

/* If ranks share a parameter buffer, gathering ahead moves no bytes; if slices are copied in later,
 * it would also wait for steps that can overlap with compute. */
static bool comes_too_early(const fsdpc_unit *unit)
{
    const fsdpc_comm *comm = unit->root->comm;
    return unit->copy_in_later && comm->host_size == comm->size;
}

/* Gathers ahead the units that the user chose or, by default, those that come next in the execution
 * order. */
static fsdpc_status gather_ahead(fsdpc_root *root, const fsdpc_unit *unit, bool backward)
{
    const fsdpc_exec_order *exec_order = &root->exec_order;
    if (unit->settings.rank_dependent)
        return FSDPC_OK;
    if (unit->ahead[backward]) {
        for (int i = 0; i < unit->n_ahead[backward]; i++) {
            if (fsdpc_unsharded_has_room(unit->ahead[backward][i]) &&
                !comes_too_early(unit->ahead[backward][i]))
                FSDPC_TRY(fsdpc_gather_post(unit->ahead[backward][i], backward));
        }
        return FSDPC_OK;
    }
    if (!exec_order->following)
        return FSDPC_OK;
    size_t end = exec_order->position + (size_t)root->prefetch;
    for (size_t i = exec_order->position; i < end && i < exec_order->length; i++) {
        fsdpc_unit *next = root->units[exec_order->entries[i].unit];
        if (!fsdpc_unsharded_has_room(next) || comes_too_early(next))
            break; /* no further than memory allows */
        FSDPC_TRY(fsdpc_gather_post(next, exec_order->entries[i].backward));
    }
    return FSDPC_OK;
}

/* On every rank, gathers the units that any rank may need; call when an epoch has begun. */
static fsdpc_status gather_rank_dependent(fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->settings.rank_dependent)
            FSDPC_TRY(fsdpc_gather_wait(root->units[i], root->in_backward));
    }
    return FSDPC_OK;
}

uint64_t fsdpc_unit_generation(const fsdpc_unit *unit)
{
    return unit->root ? unit->root->generation : 0;
}

fsdpc_status fsdpc_unit_check_generation(const fsdpc_unit *unit, uint64_t generation)
{
    bool written = unit->root && unit->root->unsharded->at_use && unit->dirty;
    if (generation == fsdpc_unit_generation(unit) && !written)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "the weights of unit '%s' changed between forward and backward: run backward "
                      "before the optimizer steps, or forward again",
                      unit->name);
}

fsdpc_status fsdpc_pre_forward(fsdpc_unit *unit, bool grad)
{
    fsdpc_root *root = unit->root;
    bool outermost = root->forward_depth == 0 && !root->in_backward;
    if (outermost && root->holds && grad)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "a forward with gradients of '%s' inside hold(): run it under no_grad() or "
            "after hold()",
            unit->name);
    fsdpc_comm_locate(root->comm, root->in_backward ? "backward" : "forward", unit->name);
    if (outermost && !root->holds) {
        FSDPC_TRY(fsdpc_root_epoch(root, FSDPC_EPOCH_FORWARD, unit, grad ? FSDPC_EPOCH_GRAD : 0));
        if (grad) {
            begin_step(&root->exec_order);
            fsdpc_root_begin_acts(root);
        }
        FSDPC_TRY(gather_rank_dependent(root));
    }
    bool recording = grad && !root->in_backward;
    if (recording)
        FSDPC_TRY(note_use(root, unit, false));
    FSDPC_TRY(fsdpc_gather_wait(unit, root->in_backward));
    if (recording || unit->ahead[0])
        FSDPC_TRY(gather_ahead(root, unit, false));
    root->forward_depth++;
    unit->running++;
    fsdpc_root_trace(unit, FSDPC_TRACE_FORWARD, 0, root->in_backward);
    return FSDPC_OK;
}

fsdpc_status fsdpc_post_forward(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    root->forward_depth--;
    unit->running -= unit->running > 0;
    fsdpc_root_trace(unit, FSDPC_TRACE_FORWARD_END, 0, root->in_backward);
    bool inner = unit->running > 0; /* a method of the unit called its forward */
    if (!inner && !root->in_backward && fsdpc_unit_reshards(unit))
        fsdpc_unsharded_drop(unit);
    if (root->forward_depth == 0 && !root->in_backward)
        fsdpc_comm_locate(root->comm, "user code", "");
    return FSDPC_OK;
}

fsdpc_status fsdpc_pre_backward(fsdpc_unit *unit, uint64_t generation)
{
    fsdpc_root *root = unit->root;
    FSDPC_TRY(fsdpc_unit_check_generation(unit, generation));
    if (root->epoch_progress != FSDPC_EPOCH_AT_IDLE)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the backward of unit '%s' after a forward was interrupted while weights "
                          "were being copied in: run forward again",
                          unit->name);
    if (!root->in_backward)
        FSDPC_TRY(fsdpc_trainable_agree(root));
    root->backwards += !root->in_backward;
    root->in_backward = root->notes_acts = true;
    if (unit->in_backward)
        return FSDPC_OK;
    unit->in_backward = true;
    fsdpc_comm_locate(root->comm, "backward", unit->name);
    FSDPC_TRY(fsdpc_reduce_progress(root));
    FSDPC_TRY(note_use(root, unit, true));
    FSDPC_TRY(fsdpc_gather_wait(unit, true));
    FSDPC_TRY(gather_ahead(root, unit, true));
    fsdpc_root_trace(unit, FSDPC_TRACE_BACKWARD, 0, true);
    return FSDPC_OK;
}

/* Returns whether filled gradients are reduced at the end of this backward or stay in the
 * buffer. */
static bool reduces_now(const fsdpc_unit *unit)
{
    const fsdpc_root *root = unit->root;
    bool replicas_alone = root->reduce_comm == root->replicate;
    return unit->settings.deterministic ||
           (unit->settings.requires_sync &&
            (unit->settings.requires_all_reduce || !replicas_alone));
}

fsdpc_status fsdpc_post_backward(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    if (!unit->in_backward)
        return FSDPC_OK;
    unit->in_backward = false;
    fsdpc_root_trace(unit, FSDPC_TRACE_BACKWARD_END, 0, true);
    if (unit->settings.rank_dependent)
        return fsdpc_reduce_progress(root);
    if (reduces_now(unit))
        FSDPC_TRY(fsdpc_reduce_post(unit));
    if (unit->settings.reshard_after_backward)
        fsdpc_unsharded_drop(unit);
    return fsdpc_reduce_progress(root);
}

fsdpc_status fsdpc_grad_target_of(fsdpc_unit *unit, int param, void **data_out,
                                  fsdpc_dtype *dtype_out, bool *accumulate_out)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    if (!unit->root || !unit->root->in_backward)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a gradient of parameter '%s' outside the backward of unit '%s'",
                          place->name, unit->name);
    FSDPC_TRY(fsdpc_reduce_carry_on(unit->root));
    FSDPC_TRY(fsdpc_reduce_open(unit));
    *data_out = unit->buffer->data + group->reduce_offset +
                place->unsharded_offset * fsdpc_dtype_bytes(group->reduce_dtype);
    *dtype_out = group->reduce_dtype;
    *accumulate_out = unit->filled[param];
    unit->n_filled += !unit->filled[param];
    unit->filled[param] = true;
    return FSDPC_OK;
}

bool fsdpc_grad_is_open(const fsdpc_unit *unit)
{
    return unit->buffer != NULL;
}

fsdpc_status fsdpc_grad_add(fsdpc_unit *unit, int param, const void *data)
{
    const fsdpc_place *place = &unit->layout->params[param];
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_dtype from = unit->groups[place->group].param_dtype, to = from;
    void *target = NULL;
    bool accumulate = false;
    FSDPC_TRY(fsdpc_grad_target_of(unit, param, &target, &to, &accumulate));
    if (accumulate)
        return fsdpc_flat_accumulate(target, to, data, from, place->numel, main);
    return fsdpc_flat_cast(target, to, data, from, place->numel, main);
}

bool fsdpc_grad_is_posted(const fsdpc_unit *unit)
{
    return unit->reduction != FSDPC_REDUCTION_NONE;
}

fsdpc_status fsdpc_grad_wait(fsdpc_unit *unit)
{
    return fsdpc_reduce_wait(unit);
}

/* Call after recording a whole step: checks that all ranks recorded the same order. */
static fsdpc_status complete_record(fsdpc_root *root)
{
    const fsdpc_exec_order *exec_order = &root->exec_order;
    uint32_t crc = 0;
    for (size_t i = 0; i < exec_order->length; i++) {
        int32_t entry[2] = {exec_order->entries[i].unit, exec_order->entries[i].backward};
        crc = fsdpc_crc32c(crc, entry, sizeof entry);
    }
    /* the maximum and, negated, the minimum of both */
    int64_t length = (int64_t)exec_order->length, marks[4] = {length, crc, -length, -(int64_t)crc};
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .unit = -1,
                     .what = "schedule",
                     .dtype = FSDPC_I64,
                     .op = FSDPC_RED_MAX,
                     .send = marks,
                     .recv = marks,
                     .numel = 4};
    if (root->comm->size > 1)
        FSDPC_TRY(fsdpc_comm_run(root->comm, &op));
    if (marks[0] != -marks[2] || marks[1] != -marks[3])
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "ranks ran the units of '%s' in different orders: this one recorded %zu "
                          "uses, others %lld to %lld; every rank must take the same branches",
                          root->units[0]->name, exec_order->length, (long long)-marks[2],
                          (long long)marks[0]);
    root->exec_order.complete = true;
    return FSDPC_OK;
}

/* In deterministic mode, backwards without synchronisation reduce too, and hide their sums until
 * one synchronises, even if it adds nothing. */
static void reveal(fsdpc_unit *unit)
{
    bool all = unit->settings.requires_all_reduce || !unit->root->replicate;
    if (!unit->settings.requires_sync || !all)
        return;
    unit->hidden = false;
    unit->grad_live |= unit->micro.n > 0 && unit->reduction == FSDPC_REDUCTION_NONE;
}

fsdpc_status fsdpc_backward_end(fsdpc_root *root)
{
    fsdpc_comm_locate(root->comm, "end of backward", root->units[0]->name);
    for (int i = root->n_units - 1; i >= 0; i--) {
        fsdpc_unit *unit = root->units[i];
        FSDPC_TRY(fsdpc_post_backward(unit));
        if (!reduces_now(unit))
            continue;
        if (unit->settings.rank_dependent && unit->reduce_bytes > 0)
            FSDPC_TRY(fsdpc_reduce_open(unit)); /* zeros, if the unit did not run */
        FSDPC_TRY(fsdpc_reduce_post(unit));     /* including gradients that came after the unit's
                                                 * backward ended */
    }
    FSDPC_TRY(fsdpc_reduce_post_rest(root));
    FSDPC_TRY(fsdpc_backward_agree(root));
    if (root->is_last_backward)
        FSDPC_TRY(fsdpc_reduce_wait_all(root));
    for (int i = 0; i < root->n_units; i++) {
        reveal(root->units[i]);
        root->units[i]->keeps = root->units[i]->buffer != NULL;
        root->units[i]->fresh = false;
    }
    root->in_backward = false;
    root->exec_order.ended = true;
    fsdpc_root_end_acts(root);
    fsdpc_status status = FSDPC_OK;
    if (!root->exec_order.following && root->exec_order.length > 0)
        status = complete_record(root);
    fsdpc_comm_locate(root->comm, "user code", "");
    return status;
}

fsdpc_status fsdpc_unshard_begin(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    if (root->forward_depth == 0 && !root->in_backward && !root->holds) {
        FSDPC_TRY(fsdpc_root_epoch(root, FSDPC_EPOCH_UNSHARD, unit, 0));
        FSDPC_TRY(gather_rank_dependent(root));
    }
    FSDPC_TRY(fsdpc_gather_post(unit, root->in_backward));
    unit->held++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unshard_wait(fsdpc_unit *unit)
{
    return unit->held ? fsdpc_gather_wait(unit, unit->root->in_backward) : FSDPC_OK;
}

fsdpc_status fsdpc_reshard(fsdpc_unit *unit)
{
    if (unit->held > 0)
        unit->held--;
    if (unit->root)
        fsdpc_unsharded_drop(unit);
    return FSDPC_OK;
}

/* Also drops gradients that this backward has reduced, unless it added them to earlier ones. The
 * other units have none to drop; which units have gradients may differ between ranks. */
static void drop_backward(fsdpc_root *root)
{
    fsdpc_fill_drop_failed(root);
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->fresh)
            fsdpc_unit_zero_grad(root->units[i]);
        root->units[i]->fresh = false;
    }
}

void fsdpc_root_reset(fsdpc_root *root)
{
    if (root->in_backward)
        drop_backward(root);
    root->drops |= root->in_backward;
    root->forward_depth = 0;
    root->in_backward = root->notes_acts = false;
    root->needs_reset = true;
    fsdpc_exec_order_clear(&root->exec_order);
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        unit->in_backward = unit->stays = false;
        unit->running = 0;
        fsdpc_unsharded_drop(unit);
    }
}

static const char *where_of(const fsdpc_root *root)
{
    return root->in_backward ? "backward" : root->forward_depth ? "forward" : NULL;
}

/* Holds all units, or none. */
static fsdpc_status hold_all(fsdpc_root *root)
{
    fsdpc_status status = FSDPC_OK;
    int n = 0;
    for (; status == FSDPC_OK && n < root->n_units; n++) {
        status = fsdpc_gather_wait(root->units[n], false);
        root->units[n]->held += status == FSDPC_OK;
    }
    for (int i = 0; status != FSDPC_OK && i < n - 1; i++)
        (void)fsdpc_reshard(root->units[i]);
    return status;
}

fsdpc_status fsdpc_hold_begin(fsdpc_root *root)
{
    if (where_of(root))
        return fsdpc_fail(FSDPC_ERR_STATE, "hold() inside the %s of '%s': call it around the whole",
                          where_of(root), root->units[0]->name);
    if (root->holds == 0) {
        FSDPC_TRY(fsdpc_root_epoch(root, FSDPC_EPOCH_HOLD, root->units[0], 0));
        FSDPC_TRY(hold_all(root));
    }
    root->holds++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hold_end(fsdpc_root *root)
{
    if (root->holds == 0 || --root->holds > 0)
        return FSDPC_OK;
    for (int i = 0; i < root->n_units; i++)
        FSDPC_TRY(fsdpc_reshard(root->units[i]));
    return fsdpc_root_epoch(root, FSDPC_EPOCH_HOLD_END, root->units[0], 0);
}
