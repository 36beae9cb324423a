/* What a step decides by, noted when it is captured and compared whenever it is replayed.
 *
 * Two kinds of state.  Counters (steps, generation, epoch) go up by the same in every step; a
 * replay adds what the captured step added.  Everything else steers which work is enqueued, and
 * must not have changed: a unit whose masters were written would be published by an eager step and
 * is not by a replay, gradients that are pending would be added to or not.
 *
 * An abandoned step was seen by the host and not by the device.  Step counts go back.  The
 * generation does not: a loss that was made inside refers to memory that nobody filled, and its
 * backward is refused because of that.
 */
#include "engine/step_graph.h"

#include <stdlib.h>

#include "base/crc32c.h"
#include "engine/sched.h"

/* Of a unit, when the capture began. */
typedef struct unit_mark {
    bool grad_live;
    int held, n_sums;
    double pending_scale;
    uint32_t settings;
} unit_mark;

struct fsdpc_step_graph {
    fsdpc_root *root;
    fsdpc_optim_graph *optim;
    fsdpc_graph *graph; /* NULL: not ended */
    unit_mark *marks;   /* root->n_units */
    bool begun;
    uint64_t steps, generation, epoch; /* at the beginning; once ended, what one step adds */
};

/* Whatever a program may set between steps and steps go by. */
static uint32_t settings_of(const fsdpc_unit *unit)
{
    const bool flags[] = {unit->requires_sync, unit->requires_all_reduce,
                          unit->reshard_after_forward, unit->reshard_after_backward};
    uint32_t crc = fsdpc_crc32c(0, flags, sizeof flags);
    crc = fsdpc_crc32c(crc, &unit->divide_factor, sizeof unit->divide_factor);
    return fsdpc_crc32c(crc, unit->trainable,
                        (size_t)unit->layout->n_params * sizeof *unit->trainable);
}

static unit_mark mark_of(const fsdpc_unit *unit)
{
    return (unit_mark){.grad_live = unit->grad_live,
                       .held = unit->held,
                       .n_sums = unit->n_sums,
                       .pending_scale = unit->pending_scale,
                       .settings = settings_of(unit)};
}

static fsdpc_status check_root(const fsdpc_root *root)
{
    const char *name = root->units[0]->name;
    const char *inside = root->holds           ? "hold()"
                         : root->in_backward   ? "backward"
                         : root->forward_depth ? "forward"
                                               : NULL;
    if (inside)
        return fsdpc_fail(FSDPC_ERR_STATE, "a graph of a step inside %s of '%s': call it outside",
                          inside, name);
    if (root->stage != FSDPC_STAGE_IDLE || root->needs_reset || root->n_reducing > 0 ||
        !root->record.complete)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the last step of '%s' was not a whole one, recorded from its forward to "
                          "its optimizer's step: run a step or two without a graph first",
                          name);
    return FSDPC_OK;
}

/* Its wire is what its masters are, without looking. */
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
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a piece of unit '%s' was handed out to be written (p.local), so every "
                          "step looks for changes, and the host waits for that: graphs of steps "
                          "take models whose pieces were not handed out",
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
    if (root->ranks > 1)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a graph of a step on %d ranks is not supported yet: epochs of several "
                          "ranks are waits of the host",
                          root->ranks);
    for (int i = 0; i < root->n_units; i++) {
        if (root->units[i]->deterministic)
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                              "a graph of a step in deterministic mode: its random numbers are of "
                              "the step that was captured");
        FSDPC_TRY(check_unit(root->units[i]));
    }
    return check_root(root);
}

fsdpc_status fsdpc_step_graph_begin(fsdpc_root *root, fsdpc_optim *optim, fsdpc_step_graph **out)
{
    if (root->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "a graph of a step inside another one: end that first");
    FSDPC_TRY(check_can_begin(root));
    fsdpc_step_graph *step = calloc(1, sizeof *step);
    unit_mark *marks = calloc((size_t)root->n_units, sizeof *marks);
    if (!step || !marks) {
        free(step);
        free(marks);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the graph of a step");
    }
    *step = (fsdpc_step_graph){.root = root,
                               .marks = marks,
                               .steps = root->steps,
                               .generation = root->generation,
                               .epoch = root->wire->epoch};
    for (int i = 0; i < root->n_units; i++)
        marks[i] = mark_of(root->units[i]);
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, fsdpc_optim_capture_begin(optim, root, &step->optim), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_capture_begin(root->device), destroy_optim);
    step->begun = root->captured = true;
    *out = step;
    return FSDPC_OK;

destroy_optim:
    fsdpc_optim_capture_end(step->optim, false);
destroy:
    fsdpc_step_graph_destroy(step);
    return status;
}

void fsdpc_step_graph_abandon(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    if (!step->begun)
        return;
    step->begun = root->captured = false;
    if (root->device->capturing)
        (void)fsdpc_capture_end(root->device, NULL);
    fsdpc_graph_destroy(step->graph);
    step->graph = NULL;
    fsdpc_optim_capture_end(step->optim, false);
    root->steps = step->steps;
    root->generation++;
    for (int i = 0; i < root->n_units; i++) {
        root->units[i]->held = step->marks[i].held;
        fsdpc_unit_zero_grad(root->units[i]);
        root->units[i]->grad_live = step->marks[i].grad_live;
        root->units[i]->pending_scale = step->marks[i].pending_scale;
    }
    fsdpc_root_reset(root);
}

static fsdpc_status end(fsdpc_step_graph *step)
{
    FSDPC_TRY(check_all(step, "when it ends"));
    FSDPC_TRY(fsdpc_capture_end(step->root->device, &step->graph));
    FSDPC_TRY(fsdpc_optim_capture_end(step->optim, true));
    return fsdpc_graph_launch(step->graph);
}

fsdpc_status fsdpc_step_graph_end(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    fsdpc_status status = end(step);
    if (status != FSDPC_OK) {
        fsdpc_step_graph_abandon(step);
        return status;
    }
    step->begun = root->captured = false;
    step->steps = root->steps - step->steps;
    step->generation = root->generation - step->generation;
    step->epoch = root->wire->epoch - step->epoch;
    return FSDPC_OK;
}

fsdpc_status fsdpc_step_graph_replay(fsdpc_step_graph *step)
{
    fsdpc_root *root = step->root;
    if (!step->graph)
        return fsdpc_fail(FSDPC_ERR_STATE, "a replay of a step whose capture failed, or goes on");
    if (root->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "a replay while a step is captured: end that first");
    FSDPC_TRY(check_all(step, "at this replay"));
    FSDPC_TRY(fsdpc_optim_graph_advance(step->optim));
    FSDPC_TRY(fsdpc_graph_launch(step->graph));
    root->steps += step->steps;
    root->generation += step->generation;
    root->wire->epoch += step->epoch;
    return FSDPC_OK;
}

void fsdpc_step_graph_destroy(fsdpc_step_graph *step)
{
    if (!step)
        return;
    fsdpc_step_graph_abandon(step);
    fsdpc_graph_destroy(step->graph);
    fsdpc_optim_graph_destroy(step->optim);
    free(step->marks);
    free(step);
}
