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
 *
 * Units of a model may be on different meshes (experts on some ranks, the rest on all). There is one
 * execution order for all of them, and each of their collectives runs on its own mesh. Every rank
 * makes the same calls, so the order of collectives is the same on all ranks of each mesh. Stages
 * that wait (epochs, the end of backward) go through the meshes in the order of the roots.
 */
#include "engine/sched.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "engine/acts.h"
#include "engine/agree.h"
#include "engine/codec_error.h"
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
static fsdpc_status note_use(const fsdpc_unit *unit, bool backward)
{
    fsdpc_exec_order *exec_order = &unit->root->model->exec_order;
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
static fsdpc_status gather_ahead(const fsdpc_unit *unit, bool backward)
{
    const fsdpc_model *model = unit->root->model;
    const fsdpc_exec_order *exec_order = &model->exec_order;
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
    size_t end = exec_order->position + (size_t)model->prefetch;
    for (size_t i = exec_order->position; i < end && i < exec_order->length; i++) {
        fsdpc_unit *next = model->units[exec_order->entries[i].unit];
        if (!fsdpc_unsharded_has_room(next) || comes_too_early(next))
            break; /* no further than memory allows */
        FSDPC_TRY(fsdpc_gather_post(next, exec_order->entries[i].backward));
    }
    return FSDPC_OK;
}

/* On every rank, gathers the units that any rank may need; call when an epoch has begun. */
static fsdpc_status gather_rank_dependent(fsdpc_unit *const *units, int n_units)
{
    for (int i = 0; i < n_units; i++) {
        if (units[i]->settings.rank_dependent)
            FSDPC_TRY(fsdpc_gather_wait(units[i], units[i]->root->model->in_backward));
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
    fsdpc_model *model = root->model;
    bool outermost = model->forward_depth == 0 && !model->in_backward;
    if (outermost && model->holds && grad)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "a forward with gradients of '%s' inside hold(): run it under no_grad() or "
            "after hold()",
            unit->name);
    fsdpc_comm_locate(root->comm, model->in_backward ? "backward" : "forward", unit->name);
    if (outermost && !model->holds) {
        FSDPC_TRY(fsdpc_model_epoch(model, FSDPC_EPOCH_FORWARD, unit, grad ? FSDPC_EPOCH_GRAD : 0));
        if (grad) {
            begin_step(&model->exec_order);
            fsdpc_model_begin_acts(model);
        }
        FSDPC_TRY(gather_rank_dependent(model->units, model->n_units));
    }
    bool recording = grad && !model->in_backward;
    if (recording)
        FSDPC_TRY(note_use(unit, false));
    FSDPC_TRY(fsdpc_gather_wait(unit, model->in_backward));
    if (recording || unit->ahead[0])
        FSDPC_TRY(gather_ahead(unit, false));
    model->forward_depth++;
    unit->running++;
    fsdpc_root_trace(unit, FSDPC_TRACE_FORWARD, 0, model->in_backward);
    return FSDPC_OK;
}

/* Tells the peers of all meshes what this rank does. */
static void locate(const fsdpc_model *model, const char *where, const char *unit)
{
    for (const fsdpc_root *root = model->first; root; root = root->next)
        fsdpc_comm_locate(root->comm, where, unit);
}

/* For example, the backward of a head in a unit of its own: it would be gathered again at once. */
static bool backward_is_next(const fsdpc_unit *unit)
{
    const fsdpc_exec_order *exec_order = &unit->root->model->exec_order;
    if (unit->root->unsharded->at_use || !exec_order->following ||
        exec_order->position >= exec_order->length)
        return false;
    const fsdpc_exec_entry *next = &exec_order->entries[exec_order->position];
    return next->unit == unit->id && next->backward;
}

bool fsdpc_reshards_after_forward(const fsdpc_unit *unit)
{
    return unit->settings.reshard_after_forward && !unit->stays && !unit->settings.rank_dependent &&
           !backward_is_next(unit);
}

fsdpc_status fsdpc_post_forward(fsdpc_unit *unit)
{
    fsdpc_model *model = unit->root->model;
    model->forward_depth--;
    unit->running -= unit->running > 0;
    fsdpc_root_trace(unit, FSDPC_TRACE_FORWARD_END, 0, model->in_backward);
    bool inner = unit->running > 0; /* a method of the unit called its forward */
    if (!inner && !model->in_backward && fsdpc_reshards_after_forward(unit))
        fsdpc_unsharded_drop(unit);
    if (model->forward_depth == 0 && !model->in_backward)
        locate(model, "user code", "");
    return FSDPC_OK;
}

/* Lets posted reductions of all roots advance. */
static fsdpc_status progress(const fsdpc_model *model)
{
    for (fsdpc_root *root = model->first; root; root = root->next)
        FSDPC_TRY(fsdpc_reduce_progress(root));
    return FSDPC_OK;
}

static fsdpc_status begin_backward(fsdpc_model *model)
{
    for (fsdpc_root *root = model->first; root && !model->in_backward; root = root->next)
        FSDPC_TRY(fsdpc_trainable_agree(root));
    model->backwards += !model->in_backward;
    model->in_backward = model->notes_acts = true;
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
    FSDPC_TRY(begin_backward(root->model));
    if (unit->in_backward)
        return FSDPC_OK;
    unit->in_backward = true;
    fsdpc_comm_locate(root->comm, "backward", unit->name);
    FSDPC_TRY(progress(root->model));
    FSDPC_TRY(note_use(unit, true));
    FSDPC_TRY(fsdpc_gather_wait(unit, true));
    FSDPC_TRY(gather_ahead(unit, true));
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
    const fsdpc_model *model = unit->root->model;
    if (!unit->in_backward)
        return FSDPC_OK;
    unit->in_backward = false;
    fsdpc_root_trace(unit, FSDPC_TRACE_BACKWARD_END, 0, true);
    if (unit->settings.rank_dependent)
        return progress(model);
    if (reduces_now(unit))
        FSDPC_TRY(fsdpc_reduce_post(unit));
    if (unit->settings.reshard_after_backward)
        fsdpc_unsharded_drop(unit);
    return progress(model);
}

/* Opens the unit's reduce buffer, and returns the parameter's place in it. */
static fsdpc_status open_place(fsdpc_unit *unit, int param, void **out)
{
    if (!unit->root || !unit->root->model->in_backward)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a gradient of parameter '%s' outside the backward of unit '%s'",
                          unit->layout->params[param].name, unit->name);
    FSDPC_TRY(fsdpc_reduce_carry_on(unit->root));
    FSDPC_TRY(fsdpc_reduce_open(unit));
    *out = fsdpc_fill_place(unit, unit->buffer, param);
    return FSDPC_OK;
}

fsdpc_status fsdpc_grad_target_of(fsdpc_unit *unit, int param, void **data_out,
                                  fsdpc_dtype *dtype_out, bool *accumulate_out)
{
    const fsdpc_place *place = &unit->layout->params[param];
    FSDPC_TRY(open_place(unit, param, data_out));
    *dtype_out = unit->groups[place->group].reduce_dtype;
    FSDPC_TRY(fsdpc_loan_move(&unit->root->lender, *data_out,
                              place->numel * fsdpc_dtype_bytes(*dtype_out)));
    *accumulate_out = unit->filled[param];
    fsdpc_fill_note(unit, param);
    return FSDPC_OK;
}

fsdpc_status fsdpc_grad_lend(fsdpc_unit *unit, int param, fsdpc_dtype dtype, fsdpc_loan *loan,
                             void **data_out)
{
    return fsdpc_fill_lend(unit, param, dtype, loan, data_out);
}

fsdpc_status fsdpc_grad_settle(fsdpc_unit *unit, int param, fsdpc_loan *loan, bool as_gradient,
                               bool *filled_out)
{
    void *place = NULL;
    if (as_gradient)
        FSDPC_TRY(open_place(unit, param, &place));
    FSDPC_TRY(fsdpc_loan_settle(loan, place, filled_out));
    if (*filled_out)
        fsdpc_fill_note(unit, param);
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

/* Call after recording a whole step: checks that all ranks of a mesh recorded the same order. */
static fsdpc_status compare_record(const fsdpc_root *root)
{
    const fsdpc_exec_order *exec_order = &root->model->exec_order;
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
                          root->model->units[0]->name, exec_order->length, (long long)-marks[2],
                          (long long)marks[0]);
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

static fsdpc_status complete_record(fsdpc_model *model)
{
    if (model->exec_order.following || model->exec_order.length == 0)
        return FSDPC_OK;
    for (const fsdpc_root *root = model->first; root; root = root->next)
        FSDPC_TRY(compare_record(root));
    model->exec_order.complete = true;
    return FSDPC_OK;
}

/* Agrees on a root's gradients and waits for its reductions. */
static fsdpc_status end_root(fsdpc_root *root)
{
    bool steps = false;
    for (int i = 0; i < root->n_units && !steps; i++)
        steps = root->units[i]->backward_steps;
    FSDPC_TRY(fsdpc_reduce_post_rest(root));
    if (steps) /* agreeing compares masters between replicas */
        FSDPC_TRY(fsdpc_reduce_wait_all(root));
    if (fsdpc_codec_errors_due(root)) {
        FSDPC_TRY(fsdpc_reduce_wait_all(root));
        FSDPC_TRY(fsdpc_codec_errors_agree(root));
    }
    fsdpc_codec_errors_count(root);
    FSDPC_TRY(fsdpc_backward_agree(root));
    for (int i = 0; i < root->n_units && steps; i++) {
        fsdpc_unit *unit = root->units[i];
        if (!unit->backward_steps || unit->stepped_in != root->model->backwards)
            continue;
        memset(unit->grads, FSDPC_GRAD_NONE, (size_t)unit->layout->n_params);
        root->generation++; /* another backward of this forward is refused */
    }
    return root->model->is_last_backward ? fsdpc_reduce_wait_all(root) : FSDPC_OK;
}

fsdpc_status fsdpc_backward_end(fsdpc_root *root)
{
    fsdpc_model *model = root->model;
    locate(model, "end of backward", model->units[0]->name);
    for (int i = model->n_units - 1; i >= 0; i--) {
        fsdpc_unit *unit = model->units[i];
        FSDPC_TRY(fsdpc_post_backward(unit));
        if (!reduces_now(unit))
            continue;
        if (unit->settings.rank_dependent && unit->reduce_bytes > 0)
            FSDPC_TRY(fsdpc_reduce_open(unit)); /* zeros, if the unit did not run */
        FSDPC_TRY(fsdpc_reduce_post(unit));     /* including gradients that came after the unit's
                                                 * backward ended */
    }
    for (root = model->first; root; root = root->next)
        FSDPC_TRY(end_root(root));
    for (int i = 0; i < model->n_units; i++) {
        reveal(model->units[i]);
        model->units[i]->keeps = model->units[i]->buffer != NULL;
        model->units[i]->fresh = false;
    }
    model->in_backward = false;
    model->exec_order.ended = true;
    fsdpc_model_end_acts(model);
    fsdpc_status status = complete_record(model);
    locate(model, "user code", "");
    return status;
}

fsdpc_status fsdpc_unit_set_ahead(fsdpc_unit *unit, bool backward, fsdpc_unit *const *units, int n)
{
    fsdpc_unit **ahead = NULL;
    if (units && !(ahead = malloc(((size_t)n + 1) * sizeof *ahead)))
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a list of %d units", n);
    for (int i = 0; ahead && i < n; i++) {
        ahead[i] = units[i];
        if (units[i]->root && unit->root && units[i]->root->model == unit->root->model)
            continue;
        free(ahead);
        return fsdpc_fail(FSDPC_ERR_VALUE, "units '%s' and '%s' are not of one model",
                          units[i]->name, unit->name);
    }
    free(unit->ahead[backward]);
    unit->ahead[backward] = ahead;
    unit->n_ahead[backward] = units ? n : 0;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unshard_begin(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    if (!fsdpc_model_inside(root->model)) {
        FSDPC_TRY(fsdpc_root_epoch(root, FSDPC_EPOCH_UNSHARD, unit, 0));
        FSDPC_TRY(gather_rank_dependent(root->units, root->n_units));
    }
    FSDPC_TRY(fsdpc_gather_post(unit, root->model->in_backward));
    unit->held++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unshard_wait(fsdpc_unit *unit)
{
    return unit->held ? fsdpc_gather_wait(unit, unit->root->model->in_backward) : FSDPC_OK;
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

static void reset_root(fsdpc_root *root)
{
    bool in_backward = root->model->in_backward;
    if (in_backward)
        drop_backward(root);
    root->drops |= in_backward;
    root->needs_reset = true;
}

void fsdpc_root_reset(fsdpc_root *root)
{
    fsdpc_model *model = root->model;
    for (root = model->first; root; root = root->next)
        reset_root(root);
    model->forward_depth = 0;
    model->in_backward = model->notes_acts = false;
    fsdpc_exec_order_clear(&model->exec_order);
    for (int i = 0; i < model->n_units; i++) {
        fsdpc_unit *unit = model->units[i];
        unit->in_backward = unit->stays = false;
        unit->running = 0;
        fsdpc_unsharded_drop(unit);
    }
}

/* Holds all units, or none. */
static fsdpc_status hold_all(fsdpc_model *model)
{
    fsdpc_status status = FSDPC_OK;
    int n = 0;
    for (; status == FSDPC_OK && n < model->n_units; n++) {
        status = fsdpc_gather_wait(model->units[n], false);
        model->units[n]->held += status == FSDPC_OK;
    }
    for (int i = 0; status != FSDPC_OK && i < n - 1; i++)
        (void)fsdpc_reshard(model->units[i]);
    return status;
}

fsdpc_status fsdpc_hold_begin(fsdpc_root *root)
{
    fsdpc_model *model = root->model;
    if (model->in_backward || model->forward_depth > 0)
        return fsdpc_fail(FSDPC_ERR_STATE, "hold() inside the %s of '%s': call it around the whole",
                          model->in_backward ? "backward" : "forward", model->units[0]->name);
    if (model->holds == 0) {
        FSDPC_TRY(fsdpc_model_epoch(model, FSDPC_EPOCH_HOLD, model->units[0], 0));
        FSDPC_TRY(hold_all(model));
    }
    model->holds++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hold_end(fsdpc_root *root)
{
    fsdpc_model *model = root->model;
    if (model->holds == 0 || --model->holds > 0)
        return FSDPC_OK;
    for (int i = 0; i < model->n_units; i++)
        FSDPC_TRY(fsdpc_reshard(model->units[i]));
    return fsdpc_model_epoch(model, FSDPC_EPOCH_HOLD_END, model->units[0], 0);
}
