/* Steps: runs of a flat shard, each one call of a fused kernel.
 *
 * Per unit the optimizer keeps which group each parameter belongs to, its step count, and one state
 * buffer per flat group and state, as large as the shard, made before the first step that uses it.
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
 *
 * Captured steps stand in optim_graph.c.
 */
#include "engine/optim.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/size.h"
#include "engine/collect.h"
#include "engine/epoch.h"
#include "engine/full.h"
#include "engine/grads.h"
#include "engine/optim_graph.h"
#include "ops/flat_ops.h"

/* A stretch of one band's slice that one kernel call updates. */
typedef struct run {
    int param; /* the first one: group, step count */
    size_t begin, end;
    size_t first; /* where it begins in that parameter */
} run;

fsdpc_status fsdpc_optim_create(fsdpc_optim_kind kind, fsdpc_device *device, fsdpc_trace *trace,
                                fsdpc_optim **out)
{
    fsdpc_optim *optim = calloc(1, sizeof *optim);
    if (!optim)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
    optim->kind = kind;
    optim->device = device;
    optim->trace = trace;
    *out = optim;
    return FSDPC_OK;
}

static void fini_states(fsdpc_optim *optim, unit_states *states)
{
    int n_groups = states->unit->layout->n_groups;
    for (int i = 0; states->states && i < n_groups * FSDPC_OPTIM_MAX_STATES; i++) {
        if (states->extents && states->extents[i])
            fsdpc_extent_destroy(states->extents[i]);
        else
            fsdpc_device_free(optim->device, states->states[i]);
    }
    free(states->states);
    free(states->extents);
    free(states->params);
}

void fsdpc_optim_destroy(fsdpc_optim *optim)
{
    if (!optim)
        return;
    for (int i = 0; i < optim->n_units; i++)
        fini_states(optim, &optim->units[i]);
    fsdpc_device_free(optim->device, optim->scalars);
    free(optim->units);
    free(optim->hypers);
    free(optim);
}

static unit_states *find_unit(const fsdpc_optim *optim, const fsdpc_unit *unit)
{
    for (int i = optim->n_units - 1; i >= 0; i--) {
        if (optim->units[i].unit == unit)
            return &optim->units[i];
    }
    return NULL;
}

fsdpc_status fsdpc_optim_set_state_dtype(fsdpc_optim *optim, fsdpc_dtype dtype, uint64_t seed)
{
    if (dtype != FSDPC_F32 && dtype != FSDPC_BF16)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "states are float32 or bfloat16, not %s",
                          fsdpc_dtype_name(dtype));
    if (optim->n_units > 0)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the dtype of states is set before parameters are added");
    optim->state_dtype = dtype;
    optim->seed = seed;
    return FSDPC_OK;
}

uint32_t fsdpc_optim_take_number(fsdpc_optim *optim)
{
    return optim->n_numbers++;
}

static fsdpc_status init_states(unit_states *states, fsdpc_unit *unit)
{
    size_t n_params = (size_t)unit->layout->n_params, n_groups = (size_t)unit->layout->n_groups;
    states->unit = unit;
    states->params = calloc(n_params, sizeof *states->params);
    states->states = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->states);
    states->extents = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->extents);
    if (!states->params || !states->states || !states->extents)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'", unit->name);
    for (size_t i = 0; i < n_params; i++)
        states->params[i].group = -1;
    return FSDPC_OK;
}

static fsdpc_dtype state_dtype_of(const fsdpc_optim *optim, fsdpc_dtype param)
{
    return param == FSDPC_F64 ? FSDPC_F64 : optim->state_dtype;
}

/* As large as the shard, zeros; `s` counts within the flat group. */
static fsdpc_status make_state(fsdpc_optim *optim, unit_states *states, int flat_group, int s,
                               size_t element)
{
    const fsdpc_unit *unit = states->unit;
    size_t numel = unit->groups[flat_group].plan->shard_numel;
    int at = flat_group * FSDPC_OPTIM_MAX_STATES + s;
    if (!unit->offload.states)
        return fsdpc_device_alloc_zeroed(optim->device, FSDPC_MEM_STATE, numel * element,
                                         &states->states[at]);
    FSDPC_TRY(fsdpc_extent_create(unit->offload.tier, fsdpc_optim_state_name(optim->kind, s),
                                  &unit->name, FSDPC_MEM_STATE, numel, element, unit->offload.part,
                                  &states->extents[at]));
    states->states[at] = states->extents[at]->memory;
    return FSDPC_OK;
}

/* States of a parameter come with those of its whole flat group. */
static fsdpc_status make_states(fsdpc_optim *optim, unit_states *states, int param)
{
    const fsdpc_place *place = &states->unit->layout->params[param];
    const fsdpc_hyper *hyper = fsdpc_optim_hyper(optim, states->params[param].group);
    if (!hyper)
        return fsdpc_fail(FSDPC_ERR_STATE, "parameter group %d, of '%s', has no hyper-parameters",
                          states->params[param].group, place->name);
    size_t element = fsdpc_dtype_bytes(state_dtype_of(optim, place->dtype));
    for (int s = 0; s < fsdpc_optim_states(optim->kind, hyper); s++)
        if (!states->states[place->group * FSDPC_OPTIM_MAX_STATES + s])
            FSDPC_TRY(make_state(optim, states, place->group, s, element));
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_add(fsdpc_optim *optim, fsdpc_unit *unit, int param, int group)
{
    unit_states *states = find_unit(optim, unit);
    if (!states) {
        unit_states *grown =
            realloc(optim->units, (size_t)(optim->n_units + 1) * sizeof *optim->units);
        if (!grown)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'",
                              unit->name);
        optim->units = grown;
        states = &optim->units[optim->n_units];
        *states = (unit_states){0};
        fsdpc_status status = init_states(states, unit);
        if (status != FSDPC_OK) {
            fini_states(optim, states);
            return status;
        }
        optim->n_units++;
    }
    const fsdpc_place *place = &unit->layout->params[param];
    if (group < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter groups count from 0, got %d", group);
    if (states->params[param].group >= 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter '%s' of unit '%s' is in two parameter groups",
                          place->name, unit->name);
    states->params[param] = (param_states){.group = group, .number = optim->n_numbers++};
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_set_hyper(fsdpc_optim *optim, int group, const fsdpc_hyper *hyper)
{
    if (group >= optim->n_hypers) {
        fsdpc_hyper *grown = realloc(optim->hypers, (size_t)(group + 1) * sizeof *grown);
        if (!grown)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %d parameter groups", group + 1);
        for (int i = optim->n_hypers; i <= group; i++)
            grown[i] = *hyper;
        optim->hypers = grown;
        optim->n_hypers = group + 1;
    }
    optim->hypers[group] = *hyper;
    return FSDPC_OK;
}

const fsdpc_hyper *fsdpc_optim_hyper(const fsdpc_optim *optim, int group)
{
    return group >= 0 && group < optim->n_hypers ? &optim->hypers[group] : NULL;
}

fsdpc_status fsdpc_optim_step_alone(const fsdpc_optim *optim, int group, fsdpc_step_args *args,
                                    fsdpc_stream *stream)
{
    args->kind = optim->kind;
    args->hyper = optim->hypers[group];
    args->seed = optim->seed;
    if (optim->device->capturing)
        FSDPC_TRY(fsdpc_optim_graph_take(optim, group, args));
    return fsdpc_flat_step(args, stream);
}

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
        .state_dtype = state_dtype_of(optim, place->dtype),
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

/* Before anything is announced to the peers: hyper-parameters and states are there. */
static fsdpc_status prepare(fsdpc_optim *optim)
{
    if (optim->device->ops->capture_begin)
        FSDPC_TRY(fsdpc_optim_graph_room(optim));
    for (int i = 0; i < optim->n_units; i++) {
        unit_states *states = &optim->units[i];
        for (int p = 0; p < states->unit->layout->n_params; p++) {
            if (states->params[p].group >= 0)
                FSDPC_TRY(make_states(optim, states, p));
        }
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

fsdpc_status fsdpc_optim_capture_begin(fsdpc_optim *optim, const fsdpc_root *root,
                                       fsdpc_optim_graph **out)
{
    FSDPC_TRY(prepare(optim));
    return fsdpc_optim_graph_create(optim, root, out);
}

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim)
{
    if (optim->device->capturing && !optim->capture)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "another optimizer steps inside a captured step: a graph holds the step of "
            "the one that it was given");
    FSDPC_TRY(prepare(optim));
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

/* -- states ------------------------------------------------------------------------------------ */

static fsdpc_status find_states(const fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                unit_states **out)
{
    unit_states *states = find_unit(optim, unit);
    if (!states || states->params[param].group < 0)
        return fsdpc_fail(FSDPC_ERR_KEY, "the optimizer was not given parameter '%s'",
                          unit->layout->params[param].name);
    *out = states;
    return FSDPC_OK;
}

static fsdpc_optim_view view_of(const fsdpc_optim *optim, const unit_states *states, int param,
                                int state)
{
    const fsdpc_layout *layout = states->unit->layout;
    const fsdpc_place *place = &layout->params[param];
    fsdpc_optim_view view = {.piece =
                                 fsdpc_layout_piece(layout, param, fsdpc_unit_rank(states->unit)),
                             .dtype = state_dtype_of(optim, place->dtype)};
    unsigned char *base = states->states[place->group * FSDPC_OPTIM_MAX_STATES + state];
    if (base)
        view.data = base + view.piece.shard_offset * fsdpc_dtype_bytes(view.dtype);
    return view;
}

/* Before a parameter's rows of a state are read, or written, where they lie. */
static fsdpc_status open_rows(const unit_states *states, int param, int state, bool write)
{
    int group = states->unit->layout->params[param].group;
    fsdpc_extent *extent = states->extents[group * FSDPC_OPTIM_MAX_STATES + state];
    fsdpc_piece piece =
        fsdpc_layout_piece(states->unit->layout, param, fsdpc_unit_rank(states->unit));
    if (!extent)
        return FSDPC_OK;
    return write ? fsdpc_extent_written(extent, piece.shard_offset, piece.numel)
                 : fsdpc_extent_check(extent, piece.shard_offset, piece.numel);
}

fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               bool write, fsdpc_optim_view *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    FSDPC_TRY(open_rows(states, param, state, write));
    *out = view_of(optim, states, param, state);
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_make_states(fsdpc_optim *optim, const fsdpc_unit *unit, int param)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    return make_states(optim, states, param);
}

fsdpc_status fsdpc_optim_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                    int64_t *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    *out = states->params[param].steps;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_set_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                        int64_t steps)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    if (steps < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter '%s' cannot have made %lld steps",
                          unit->layout->params[param].name, (long long)steps);
    states->params[param].steps = steps;
    for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
        fsdpc_optim_view view = view_of(optim, states, param, s);
        if (s == 0)
            states->params[param].momentum = steps > 0 && view.data;
        if (steps != 0 || !view.data)
            continue;
        FSDPC_TRY(open_rows(states, param, s, true));
        FSDPC_TRY(fsdpc_device_fill(optim->device, view.data, 0,
                                    view.piece.numel * fsdpc_dtype_bytes(view.dtype), NULL));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_write(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               const void *full, fsdpc_dtype dtype)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    FSDPC_TRY(make_states(optim, states, param));
    fsdpc_optim_view view = view_of(optim, states, param, state);
    if (!view.data)
        return fsdpc_fail(FSDPC_ERR_STATE, "%s as set up keeps no state %d of parameter '%s'",
                          fsdpc_optim_kind_name(optim->kind), state,
                          unit->layout->params[param].name);
    FSDPC_TRY(open_rows(states, param, state, true));
    fsdpc_stream *main = fsdpc_device_main(optim->device);
    const char *from = (const char *)full + view.piece.first * fsdpc_dtype_bytes(dtype);
    return fsdpc_flat_cast(view.data, view.dtype, from, dtype, view.piece.numel, main);
}

fsdpc_status fsdpc_optim_collect(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                                 void *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_states(optim, unit, param, &states));
    fsdpc_optim_view mine = view_of(optim, states, param, state);
    if (!mine.data)
        return fsdpc_fail(FSDPC_ERR_STATE, "parameter '%s' has no state %d yet",
                          unit->layout->params[param].name, state);
    FSDPC_TRY(open_rows(states, param, state, false));
    return fsdpc_unit_collect_rows(unit, param, mine.dtype, mine.data, out);
}
