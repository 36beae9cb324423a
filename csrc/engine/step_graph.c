/* Records the state on which a step's decisions depend when the step is captured, and checks it at
 * every replay.
 *
 * There are two kinds of state. Counters (steps, generation) grow by the same amount in every
 * step; a replay adds the captured step's increments. All other state determines which work is
 * enqueued, so it must not have changed. For example, an eager step would copy in a unit whose
 * masters were written, but a replay does not.
 *
 * Ranks do not communicate inside a capture. Operations are captured and epochs are local, so if a
 * rank gives up, no peer is left waiting. The ranks meet in one epoch before the capture and one
 * after it, and continue only if all of them can and all captured the same work. A replay consists
 * of one epoch and one operation. The epoch detects ranks that do not or cannot replay. The
 * operation launches the graph in sequence with all other operations, and the communicator monitors
 * it.
 *
 * The host has already processed an abandoned step, but the device never ran it. Step counts are
 * restored. The generation is not restored: a loss computed in the capture refers to memory that
 * was never filled, so its backward must fail.
 */
#include "engine/step_graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "engine/epoch.h"
#include "engine/unsharded.h"
#include "engine/grads.h"
#include "engine/optim_graph.h"
#include "engine/order.h"
#include "engine/reduce.h"
#include "engine/root_internal.h"
#include "engine/sched.h"

/* The state of a unit at the beginning of the capture. */
typedef struct unit_mark {
    bool grad_live;
    int held, n_sums;
    double pending_scale;
    uint32_t settings;
    const unsigned char *written; /* the memory that gathers write; NULL: without a window */
} unit_mark;

struct fsdpc_step_graph {
    fsdpc_root *root;
    fsdpc_optim_graph *optim;
    fsdpc_graph *graph; /* NULL: not ended yet */
    unit_mark *marks;   /* root->n_units */
    bool begun;
    uint32_t number;            /* counts the captures of this root */
    uint64_t steps, generation; /* at the beginning; after the end, the increments per step */
};

/* Returns a hash of the settings that affect a step and may change between steps. */
static uint32_t settings_of(const fsdpc_unit *unit)
{
    const bool flags[] = {unit->settings.requires_sync, unit->settings.requires_all_reduce,
                          unit->settings.reshard_after_forward,
                          unit->settings.reshard_after_backward};
    uint32_t crc = fsdpc_crc32c(0, flags, sizeof flags);
    crc = fsdpc_crc32c(crc, &unit->settings.divide_factor, sizeof unit->settings.divide_factor);
    return fsdpc_crc32c(crc, unit->trainable,
                        (size_t)unit->layout->n_params * sizeof *unit->trainable);
}

static unit_mark mark_of(const fsdpc_unit *unit)
{
    return (unit_mark){.grad_live = unit->grad_live,
                       .held = unit->held,
                       .n_sums = unit->micro.n,
                       .pending_scale = unit->pending_scale,
                       .settings = settings_of(unit),
                       .written = unit->window ? unit->window->memory : NULL};
}

static fsdpc_status check_root(const fsdpc_root *root)
{
    const char *name = root->units[0]->name;
    const char *inside = fsdpc_model_inside(root->model);
    if (inside)
        return fsdpc_fail(FSDPC_ERR_STATE, "a graph of a step inside %s of '%s': call it outside",
                          inside, name);
    if (root->epoch_progress != FSDPC_EPOCH_AT_IDLE || root->needs_reset || root->n_reducing > 0 ||
        !root->model->exec_order.complete)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the last step of '%s' was not a whole one, recorded from its forward to "
                          "its optimizer's step: run a step or two without a graph first",
                          name);
    return FSDPC_OK;
}

/* Checks that the parameter buffer is known to match the unit's masters. */
static fsdpc_status check_unit(const fsdpc_unit *unit)
{
    if (unit->held)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "unit '%s' is held by unshard(): call reshard() before a graph of a step",
                          unit->name);
    if (unit->dirty)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the weights of unit '%s' were written since its last forward, which a "
                          "graph of a step does not know: run a step without it first",
                          unit->name);
    if (unit->foreign)
        return fsdpc_fail(
            FSDPC_ERR_UNSUPPORTED,
            "a local shard of unit '%s' was handed out to be written (p.local), so every "
            "step looks for changes, and the host waits for that: graphs of steps "
            "take models whose local shards were not handed out",
            unit->name);
    if (unit->offload.host || unit->offload.tier)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "unit '%s' has an offload_policy, and the CPU takes part in its steps: "
                          "graphs of steps take models that are on the device only",
                          unit->name);
    return FSDPC_OK;
}

static fsdpc_status check_mark(const fsdpc_unit *unit, const unit_mark *before, const char *now)
{
    const unit_mark mark = mark_of(unit);
    if (mark.grad_live != before->grad_live || mark.n_sums != before->n_sums)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "unit '%s' has %s gradients %s, unlike when the captured step began: "
                          "begin and end steps alike, with zero_grad() at the end",
                          unit->name, mark.grad_live ? "pending" : "no", now);
    if (mark.settings != before->settings)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "settings of unit '%s' (requires_grad, set_... methods) are others %s "
                          "than when the captured step began: capture a step again",
                          unit->name, now);
    if (mark.written != before->written)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "unit '%s' was given memory of its own for its unsharded parameters (two units that "
            "share "
            "were unsharded at once, as in hold()), and gathers of the captured step write "
            "the old: capture a step again",
            unit->name);
    return FSDPC_OK;
}

static fsdpc_status check_all(const fsdpc_step_graph *step, const char *now)
{
    const fsdpc_root *root = step->root;
    FSDPC_TRY(check_root(root));
    for (int i = 0; i < root->n_units; i++) {
        FSDPC_TRY(check_unit(root->units[i]));
        FSDPC_TRY(check_mark(root->units[i], &step->marks[i], now));
    }
    return FSDPC_OK;
}

static fsdpc_status check_can_begin(const fsdpc_root *root)
{
    const fsdpc_root *first = root->model->first;
    if (first->next)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a graph of a step of '%s', whose units '%s' and '%s' are on different "
                          "meshes: graphs take models on one mesh",
                          root->model->units[0]->name, first->units[0]->name,
                          first->next->units[0]->name);
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->settings.deterministic)
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                              "a graph of a step in deterministic mode: its random numbers are of "
                              "the step that was captured");
        FSDPC_TRY(check_unit(root->units[i]));
    }
    return check_root(root);
}

/* Does everything that may fail. */
static fsdpc_status prepare(fsdpc_root *root, fsdpc_optim *optim, fsdpc_step_graph **out)
{
    FSDPC_TRY(check_can_begin(root));
    FSDPC_TRY(fsdpc_loan_move(&root->lender, NULL, SIZE_MAX)); /* replays write the buffers */
    fsdpc_step_graph *step = calloc(1, sizeof *step);
    unit_mark *marks = calloc((size_t)root->n_units, sizeof *marks);
    if (!step || !marks) {
        free(step);
        free(marks);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the graph of a step");
    }
    *step = (fsdpc_step_graph){
        .root = root, .marks = marks, .steps = root->steps, .generation = root->generation};
    for (int i = 0; i < root->n_units; i++)
        marks[i] = mark_of(root->units[i]);
    fsdpc_status status = fsdpc_optim_capture_begin(optim, root, &step->optim);
    if (status != FSDPC_OK) {
        fsdpc_step_graph_destroy(step);
        return status;
    }
    *out = step;
    return FSDPC_OK;
}

fsdpc_status fsdpc_step_graph_begin(fsdpc_root *root, fsdpc_optim *optim, fsdpc_step_graph **out)
{
    fsdpc_step_graph *step = NULL;
    if (root->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "a graph of a step inside another one: end that first");
    fsdpc_status status = prepare(root, optim, &step);
    status = fsdpc_root_agree(root, FSDPC_EPOCH_CAPTURE, status);
    if (status != FSDPC_OK) {
        if (step)
            fsdpc_optim_capture_end(step->optim, false);
        fsdpc_step_graph_destroy(step);
        return status;
    }
    root->comm->captured = 0;
    if (root->replicate)
        root->replicate->captured = 0;
    step->number = ++root->captures;
    step->begun = root->captured = true;
    status = fsdpc_capture_begin(root->device);
    if (status == FSDPC_OK)
        status = fsdpc_order_fork(root);
    if (status != FSDPC_OK) {
        char text[512];
        snprintf(text, sizeof text, "%s", fsdpc_last_error());
        fsdpc_step_graph_abandon(step, text);
        fsdpc_step_graph_destroy(step);
        return fsdpc_fail(status, "%s", text);
    }
    *out = step;
    return FSDPC_OK;
}

/* Abandons a step on this rank. */
static void give_up(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    step->begun = root->captured = false;
    if (root->device->capturing) {
        /* posted operations go into the graph first, and are not sent to the peers later */
        for (int i = 0; i < root->n_units; i++)
            (void)fsdpc_unsharded_settle(root->units[i]);
        (void)fsdpc_reduce_wait_all(root);
        (void)fsdpc_capture_end(root->device, NULL);
    }
    fsdpc_graph_destroy(step->graph);
    step->graph = NULL;
    fsdpc_optim_capture_end(step->optim, false);
    root->steps = step->steps;
    root->generation++;
    for (int i = 0; i < root->n_units; i++) {
        root->units[i]->held = step->marks[i].held;
        fsdpc_unit_zero_grad(root->units[i]);
        root->units[i]->grad_live = step->marks[i].grad_live;
        if (step->marks[i].grad_live) /* it is unknown which parameters they belong to: zeros count
                                       * as gradients */
            memset(root->units[i]->grads, FSDPC_GRAD_OLD, (size_t)root->units[i]->layout->n_params);
        root->units[i]->pending_scale = step->marks[i].pending_scale;
    }
    if (fsdpc_order_fork(root) != FSDPC_OK)
        fsdpc_comm_abort(root->comm, fsdpc_last_error()); /* otherwise gathers would not be
                                                           * ordered */
    fsdpc_root_reset(root);
}

void fsdpc_step_graph_abandon(fsdpc_step_graph *step, const char *why)
{
    if (!step->begun)
        return;
    give_up(step);
    fsdpc_fail(FSDPC_ERR_STATE, "the step that it captured was given up: %s", why);
    (void)fsdpc_root_agree(step->root, FSDPC_EPOCH_CAPTURE_END, FSDPC_ERR_STATE);
}

static fsdpc_status end_capture(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    FSDPC_TRY(check_all(step, "when it ends"));
    FSDPC_TRY(fsdpc_order_join(root));
    return fsdpc_capture_end(root->device, &step->graph);
}

/* Checks that all ranks of a group have captured the same work. */
static fsdpc_status compare(fsdpc_comm *comm)
{
    int64_t marks[2] = {comm->captured, -(int64_t)comm->captured};
    FSDPC_TRY(fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                 .unit = -1,
                                                 .what = "graph_step()",
                                                 .dtype = FSDPC_I64,
                                                 .op = FSDPC_RED_MAX,
                                                 .send = marks,
                                                 .recv = marks,
                                                 .numel = 2}));
    if (marks[0] == -marks[1])
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "ranks captured different gathers and reductions: every rank must capture "
                      "the same step");
}

/* Collective; `status` is the result of the capture on this rank. */
static fsdpc_status agree_on_end(fsdpc_root *root, fsdpc_status status)
{
    FSDPC_TRY(fsdpc_root_agree(root, FSDPC_EPOCH_CAPTURE_END, status));
    if (root->ranks == 1)
        return FSDPC_OK;
    status = compare(root->comm);
    if (root->replicate)
        FSDPC_KEEP_FIRST(status, compare(root->replicate));
    return fsdpc_root_agree(root, FSDPC_EPOCH_CAPTURE_END, status);
}

/* Collective. */
static fsdpc_status launch(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    fsdpc_stream *main = fsdpc_device_main(root->device);
    FSDPC_TRY(fsdpc_comm_run_ahead(root->comm,
                                   &(fsdpc_coll){.kind = FSDPC_COLL_REPLAY,
                                                 .unit = -1,
                                                 .what = root->units[0]->name,
                                                 .dtype = FSDPC_U8,
                                                 .epoch = root->steps,
                                                 .graph = step->graph,
                                                 .numel = step->number},
                                   main));
    return fsdpc_order_follow(root);
}

fsdpc_status fsdpc_step_graph_end(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    char text[512];
    fsdpc_status status = end_capture(step);
    snprintf(text, sizeof text, "%s", status == FSDPC_OK ? "" : fsdpc_last_error());
    if (status != FSDPC_OK)
        give_up(step);
    root->captured = false;
    if (status == FSDPC_OK)
        status = fsdpc_order_fork(root);
    else
        fsdpc_fail(status, "%s", text);
    uint64_t steps = root->steps;
    root->steps = step->steps; /* as on the ranks that gave up */
    status = agree_on_end(root, status);
    root->steps = steps;
    if (status == FSDPC_OK)
        status = fsdpc_optim_capture_end(step->optim, true);
    if (status == FSDPC_OK)
        status = launch(step);
    snprintf(text, sizeof text, "%s", status == FSDPC_OK ? "" : fsdpc_last_error());
    if (status != FSDPC_OK) {
        if (step->begun)
            give_up(step);
        return fsdpc_fail(status, "%s", text);
    }
    step->begun = false;
    step->steps = root->steps - step->steps;
    step->generation = root->generation - step->generation;
    return FSDPC_OK;
}

/* Checks whether this rank can run the step. */
static fsdpc_status check_replay(const fsdpc_step_graph *step)
{
    FSDPC_TRY(check_all(step, "at this replay"));
    return fsdpc_optim_graph_check(step->optim);
}

fsdpc_status fsdpc_step_graph_replay(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    if (!step->graph)
        return fsdpc_fail(FSDPC_ERR_STATE, "a replay of a step whose capture failed, or goes on");
    if (root->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "a replay while a step is captured: end that first");
    FSDPC_TRY(fsdpc_root_agree(root, FSDPC_EPOCH_REPLAY, check_replay(step)));
    FSDPC_TRY(fsdpc_optim_graph_advance(step->optim));
    FSDPC_TRY(launch(step));
    root->steps += step->steps;
    root->generation += step->generation;
    return FSDPC_OK;
}

void fsdpc_step_graph_destroy(fsdpc_step_graph *step)
{
    if (!step)
        return;
    if (step->begun)
        give_up(step);
    fsdpc_graph_destroy(step->graph);
    fsdpc_optim_graph_destroy(step->optim);
    free(step->marks);
    free(step);
}
