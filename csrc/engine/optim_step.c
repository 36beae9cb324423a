/* Steps: runs of a flat shard, each one call of a fused kernel.
 *
 * Every step joins the parameters of a band that may be updated together into runs.  That costs
 * nanoseconds a parameter, and needs no bookkeeping when parameters are frozen or unfrozen.  With
 * bf16 states a run is one parameter, since the random bits of their rounding belong to its
 * elements.
 *
 * The wire is written in the same pass.  That is legal because the step opens an epoch on every
 * root first: all ranks have arrived, so nobody reads.  A unit whose root is not known yet (no
 * forward ran) has no wire; its masters are updated and published by the first epoch.
 *
 * Where masters or states lie in a file, a step walks through it by a pass (tier/tier.h), and runs
 * are cut where chunks end: an element's step does not depend on its neighbours.
 */
#include "engine/optim.h"

#include <stdio.h>

#include "base/size.h"
#include "engine/epoch.h"
#include "engine/full.h"
#include "engine/grads.h"
#include "engine/optim_graph.h"

/* A stretch of one band's slice that one kernel call updates. */
typedef struct run {
    int param; /* the first one: group, step count */
    size_t begin, end;
    size_t first; /* where it begins in that parameter */
} run;

/* Where element `at` of an array lies, which ends where its elements cease to lie together. */
static fsdpc_status locate(fsdpc_extent *extent, unsigned char *memory, size_t element, size_t at,
                           size_t *end, void **out)
{
    size_t together;
    *out = memory + at * element;
    if (!extent)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_pass_at(extent, at, out, &together));
    *end = fsdpc_min_size(*end, at + together);
    return FSDPC_OK;
}

/* Updates the front of a run of a parameter's band, as far as it lies together, and cuts it off. */
static fsdpc_status step_front(const fsdpc_optim *optim, const unit_states *states, run *rest)
{
    run part = *rest;
    fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[part.param];
    const param_states *own = &states->params[part.param];
    fsdpc_unit_group *group = &unit->groups[place->group];
    const fsdpc_slice *band = &group->plan->bands[place->band];
    fsdpc_stream *main = fsdpc_device_main(optim->device);
    void *grad;
    fsdpc_step_args args = {
        .param_dtype = place->dtype,
        .grad_dtype = group->grad_dtype,
        .state_dtype = fsdpc_optim_state_dtype(optim, place->dtype),
        .wire_dtype = group->wire_dtype,
        .grad_scale = unit->pending_scale,
        .grad_scale_at = fsdpc_unit_scale_at(unit),
        .step = own->steps,
        .copy_gradient = !own->momentum,
        .number = own->number,
        .first = part.first,
    };
    FSDPC_TRY(locate(group->master_extent, group->master, fsdpc_dtype_bytes(place->dtype),
                     part.begin, &part.end, &args.param));
    FSDPC_TRY(locate(group->grad_extent, group->grad, fsdpc_dtype_bytes(group->grad_dtype),
                     part.begin, &part.end, &grad));
    args.grad = grad;
    for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
        int at = place->group * FSDPC_OPTIM_MAX_STATES + s;
        if (states->states[at])
            FSDPC_TRY(locate(states->extents[at], states->states[at],
                             fsdpc_dtype_bytes(args.state_dtype), part.begin, &part.end,
                             &args.states[s]));
    }
    args.numel = part.end - part.begin;
    if (unit->root)
        args.wire = fsdpc_full_published(unit, group, band, part.begin);
    rest->begin = part.end;
    rest->first += args.numel;
    return fsdpc_optim_step_alone(optim, own->group, &args, main);
}

static fsdpc_status step_run(const fsdpc_optim *optim, const unit_states *states, run part)
{
    while (part.begin < part.end)
        FSDPC_TRY(step_front(optim, states, &part));
    return FSDPC_OK;
}

static bool joins(const fsdpc_optim *optim, const unit_states *states, int a, int b)
{
    const fsdpc_place *x = &states->unit->layout->params[a], *y = &states->unit->layout->params[b];
    const param_states *of_a = &states->params[a], *of_b = &states->params[b];
    return x->group == y->group && x->band == y->band && of_a->group == of_b->group &&
           of_a->steps == of_b->steps && of_a->momentum == of_b->momentum &&
           optim->state_dtype == FSDPC_F32;
}

static bool steps(const unit_states *states, int param)
{
    return states->params[param].group >= 0 && fsdpc_grad_exists(states->unit, param);
}

/* Parameters of a band stand in declaration order, so neighbours in it are met one after the other;
 * the pieces of another band in between do not end a run of this one only if it is looked for,
 * hence the walk per band. */
static fsdpc_status step_band(const fsdpc_optim *optim, const unit_states *states, int flat_group,
                              int band)
{
    const fsdpc_unit *unit = states->unit;
    run open = {.param = -1};
    for (int i = 0; i < unit->layout->n_params; i++) {
        const fsdpc_place *place = &unit->layout->params[i];
        if (place->group != flat_group || place->band != band)
            continue;
        bool ours = steps(states, i);
        fsdpc_piece piece = fsdpc_layout_piece(unit->layout, i, fsdpc_unit_rank(unit));
        if (open.param >= 0 && !(ours && joins(optim, states, open.param, i))) {
            FSDPC_TRY(step_run(optim, states, open));
            open.param = -1;
        }
        if (!ours || piece.numel == 0)
            continue;
        if (open.param < 0)
            open = (run){.param = i, .begin = piece.shard_offset, .first = piece.first};
        open.end = piece.shard_offset + piece.numel;
    }
    return open.param >= 0 ? step_run(optim, states, open) : FSDPC_OK;
}

static fsdpc_status step_unit(const fsdpc_optim *optim, const unit_states *states)
{
    fsdpc_unit *unit = states->unit;
    if (!unit->grad_live)
        return FSDPC_OK;
    for (int i = 0; i < unit->layout->n_params; i++)
        states->params[i].steps += steps(states, i);
    for (int g = 0; g < unit->layout->n_groups; g++) {
        for (size_t b = 0; b < unit->layout->groups[g].n_bands; b++)
            FSDPC_TRY(step_band(optim, states, g, (int)b));
    }
    for (int i = 0; i < unit->layout->n_params; i++) {
        param_states *own = &states->params[i];
        if (steps(states, i) && optim->hypers[own->group].momentum != 0)
            own->momentum = true;
    }
    if (!unit->root)
        unit->dirty = true;
    return FSDPC_OK;
}

/* The roots of the optimizer's units, each once: calls fn on every one. */
static fsdpc_status each_root(const fsdpc_optim *optim, fsdpc_status (*fn)(fsdpc_root *))
{
    for (int i = 0; i < optim->n_units; i++) {
        fsdpc_root *root = optim->units[i].unit->root;
        bool seen = !root;
        for (int j = i - 1; j >= 0 && !seen; j--)
            seen = optim->units[j].unit->root == root;
        if (!seen)
            FSDPC_TRY(fn(root));
    }
    return FSDPC_OK;
}

/* ---- What lies in a file ---- */

/* The tiers of the optimizer's units, each once: calls fn on every one, whatever fails. */
static fsdpc_status each_tier(const fsdpc_optim *optim, fsdpc_status (*fn)(fsdpc_tier *))
{
    fsdpc_status status = FSDPC_OK;
    for (int i = 0; i < optim->n_units; i++) {
        fsdpc_tier *tier = optim->units[i].unit->offload.tier;
        bool seen = !tier;
        for (int j = i - 1; j >= 0 && !seen; j--)
            seen = optim->units[j].unit->offload.tier == tier;
        if (!seen)
            FSDPC_KEEP_FIRST(status, fn(tier));
    }
    return status;
}

static bool group_steps(const unit_states *states, int flat_group)
{
    const fsdpc_layout *layout = states->unit->layout;
    for (int p = 0; p < layout->n_params; p++)
        if (layout->params[p].group == flat_group && steps(states, p))
            return true;
    return false;
}

static fsdpc_status add_to_pass(const unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        fsdpc_extent *const *of_states = &states->extents[g * FSDPC_OPTIM_MAX_STATES];
        fsdpc_extent *row[FSDPC_TIER_COLUMNS];
        int n = 0;
        if (group->master_extent)
            row[n++] = group->master_extent;
        for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++)
            if (of_states[s])
                row[n++] = of_states[s];
        if (group->master_extent && unit->foreign) /* others may have written them */
            fsdpc_extent_forget(group->master_extent);
        if (group->grad_extent) {
            fsdpc_extent_forget(group->grad_extent);
            row[n++] = group->grad_extent;
        }
        if (n > 0 && group_steps(states, g))
            FSDPC_TRY(fsdpc_pass_add(unit->offload.tier, row, n));
    }
    return FSDPC_OK;
}

/* From here on what the step will need is read, in the order in which it will. */
static fsdpc_status begin_pass(const fsdpc_optim *optim)
{
    fsdpc_status status = each_tier(optim, fsdpc_pass_begin);
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++)
        if (optim->units[i].unit->offload.tier && optim->units[i].unit->grad_live)
            status = add_to_pass(&optim->units[i]);
    if (status == FSDPC_OK)
        status = each_tier(optim, fsdpc_pass_start);
    if (status != FSDPC_OK)
        (void)each_tier(optim, fsdpc_pass_end);
    return status;
}

static fsdpc_status abort_root(fsdpc_root *root)
{
    fsdpc_comm_abort(root->comm, fsdpc_last_error());
    return FSDPC_OK;
}

/* Part of the model is stepped and the rest cannot be: no rank goes on with that. */
static fsdpc_status give_up(const fsdpc_optim *optim, fsdpc_status status)
{
    char reason[512];
    snprintf(reason, sizeof reason, "%s", fsdpc_last_error());
    (void)each_root(optim, abort_root);
    return fsdpc_fail(status, "%s", reason);
}

/* ---- A step ---- */

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim)
{
    if (optim->device->capturing && !optim->capture)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "another optimizer steps inside a captured step: a graph holds the step of "
            "the one that it was given");
    FSDPC_TRY(fsdpc_optim_prepare(optim));
    FSDPC_TRY(begin_pass(optim));
    fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM, -1, 0, 0, 0);
    fsdpc_status status = each_root(optim, fsdpc_root_write_begin);
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++)
        status = step_unit(optim, &optim->units[i]);
    fsdpc_status files = each_tier(optim, fsdpc_pass_end);
    if (files != FSDPC_OK)
        return give_up(optim, files);
    /* An epoch that was announced is published whatever happened: peers wait for that. */
    FSDPC_KEEP_FIRST(status, each_root(optim, fsdpc_root_write_end));
    return status;
}
