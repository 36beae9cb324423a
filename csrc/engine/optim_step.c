/* A step updates a flat shard in runs, each with one call to a fused kernel.
 *
 * Every step joins parameters of a band into runs wherever they can be updated together. Joining
 * costs nanoseconds per parameter, and needs no bookkeeping when parameters are frozen or unfrozen.
 * With bf16 states, each run is a single parameter, because the rounding's random bits depend on
 * the parameter and on the element's index in it. The same is true of coded states, whose blocks are
 * counted inside the parameter.
 *
 * The same pass writes the parameter buffer. This is safe because the step first opens an epoch on
 * every root: all ranks have arrived, so none is reading. A unit without a root (no forward has
 * run) has no parameter buffer; its masters are updated, and the first epoch copies them in.
 *
 * If masters or states are in a file, the step processes the file in one pass (tier/tier.h). Runs
 * can be cut at the end of a chunk, because an element's step does not depend on its neighbours.
 *
 * Pending steps. The call decides what to step (parameters, scales, counts), opens an epoch and
 * steps the units in memory. Units in a file wait. The tier's threads read ahead while the program
 * continues, and each unit is stepped at its next gather, in the order of the pass. The unit's
 * slices are then copied in later, and its gather completes only when all ranks have posted it
 * (epoch.h). The calling thread does all this work without involving its peers, so it may do it at
 * any time. Code that uses masters or states first ends the whole step, which writes the updated
 * values from the ring to the file.
 *
 * If a pending step fails, all later callers get the same error, and the roots' communicators are
 * aborted.
 */
#include "engine/optim.h"

#include <stddef.h>
#include <stdio.h>

#include "base/size.h"
#include "engine/epoch.h"
#include "engine/unsharded.h"
#include "engine/grad_file.h"
#include "engine/micro.h"
#include "engine/optim_graph.h"
#include "engine/optim_host.h"
#include "engine/optim_factored.h"
#include "engine/optim_matrix.h"
#include "engine/optim_outer.h"
#include "ops/flat_ops.h"

/* The part of a band's slice that a single kernel call updates. */
typedef struct run {
    int param; /* the first parameter, for group and step count */
    size_t begin, end;
    size_t first; /* begin, as an offset in that parameter */
} run;

/* Finds the address of element `at` of an array in the pass, and lowers *end to the end of its
 * contiguous memory. */
static fsdpc_status bring(fsdpc_extent *extent, size_t at, size_t *end, void **out)
{
    size_t together;
    FSDPC_TRY(fsdpc_pass_at(extent, at, out, &together));
    *end = fsdpc_min_size(*end, at + together);
    return FSDPC_OK;
}

/* Finds element `at` of an array that may be in the pass. */
static fsdpc_status locate(fsdpc_extent *extent, unsigned char *memory, size_t element, size_t at,
                           size_t *end, void **out)
{
    *out = memory + at * element;
    return extent ? bring(extent, at, end, out) : FSDPC_OK;
}

/* Averages do not read it, and get the parameter itself; outer steps get the mean difference. */
static fsdpc_status locate_gradient(const fsdpc_optim *optim, const fsdpc_unit_group *group,
                                    size_t at, size_t *end, fsdpc_step_args *args)
{
    void *grad = args->param;
    if (fsdpc_optim_reads_gradients(optim))
        FSDPC_TRY(locate(group->grad_extent, group->grad, fsdpc_dtype_bytes(group->grad_dtype), at,
                         end, &grad));
    else if (optim->outer)
        grad = fsdpc_optim_outer_mean(optim, group, at);
    else
        args->grad_dtype = args->param_dtype;
    args->grad = grad;
    return FSDPC_OK;
}

/* Updates the contiguous part at the front of a run, and removes that part from the run. */
static fsdpc_status step_front(const fsdpc_optim *optim, const unit_states *states, run *rest)
{
    run part = *rest;
    fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[part.param];
    const param_states *own = &states->params[part.param];
    fsdpc_unit_group *group = &unit->groups[place->group];
    const fsdpc_slice *band = &group->plan->bands[place->band];
    bool on_host = fsdpc_offload_steps_on_host(&unit->offload);
    fsdpc_step_args args = {
        .param_dtype = place->dtype,
        .grad_dtype = group->grad_dtype,
        .code_row = own->place.code_row,
        .copy_in_dtype = group->param_dtype,
        .grad_scale = states->scale,
        .grad_scale_at = states->scale_at,
        .step = own->steps,
        .copy_gradient = !own->momentum,
        .number = own->number,
        .first = part.first,
    };
    size_t element = fsdpc_dtype_bytes(place->dtype);
    unsigned char *masters =
        fsdpc_unit_stepped(unit, group, band, part.begin) - part.begin * element;
    FSDPC_TRY(locate(group->master_extent, masters, element, part.begin, &part.end, &args.param));
    FSDPC_TRY(locate_gradient(optim, group, part.begin, &part.end, &args));
    for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
        fsdpc_state_memory at = fsdpc_optim_locate(optim, states, part.param, s, part.begin);
        args.state_dtype = at.dtype;
        args.states[s] = at.data;
        args.maxima[s] = at.maxima;
        if (at.data && at.extent)
            FSDPC_TRY(bring(at.extent, part.begin, &part.end, &args.states[s]));
    }
    if (on_host && optim->host)
        FSDPC_TRY(
            fsdpc_optim_host_bring(optim, states, place->group, part.begin, &part.end, &args));
    args.numel = part.end - part.begin;
    if (fsdpc_optim_writes(optim) && !optim->in_backward && unit->root &&
        !unit->root->unsharded->at_use && (!on_host || unit->root->param_buffer->pinned))
        args.copy_in = fsdpc_unsharded_own_slice(unit, group, band, part.begin);
    rest->begin = part.end;
    rest->first += args.numel;
    if (optim->outer)
        return fsdpc_optim_outer_run(optim, own->group, &args);
    fsdpc_device *device = on_host ? optim->device->host : optim->device;
    return fsdpc_optim_step_alone(optim, own->group, &args, fsdpc_device_main(device));
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
           optim->format.dtype != FSDPC_BF16 && !of_a->place.code_row && !of_b->place.code_row &&
           of_a->place.side == of_b->place.side;
}

/* A band's parameters are in declaration order, so the walk visits neighbours in sequence. Parts of
 * other bands in between must not end a run, so each band is walked separately. */
static fsdpc_status step_band(const fsdpc_optim *optim, const unit_states *states, int flat_group,
                              int band)
{
    const fsdpc_unit *unit = states->unit;
    run open = {.param = -1};
    for (int i = 0; i < unit->layout->n_params; i++) {
        const fsdpc_place *place = &unit->layout->params[i];
        if (place->group != flat_group || place->band != band)
            continue;
        bool ours = states->params[i].stepping && !fsdpc_optim_steps_matrix(optim, states, i) &&
                    !fsdpc_optim_is_factored(optim, states, i);
        fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, i, fsdpc_unit_rank(unit));
        if (open.param >= 0 && !(ours && joins(optim, states, open.param, i))) {
            FSDPC_TRY(step_run(optim, states, open));
            open.param = -1;
        }
        if (!ours || local.numel == 0)
            continue;
        if (open.param < 0)
            open = (run){.param = i, .begin = local.shard_offset, .first = local.first};
        open.end = local.shard_offset + local.numel;
    }
    return open.param >= 0 ? step_run(optim, states, open) : FSDPC_OK;
}

static fsdpc_status step_unit(const fsdpc_optim *optim, const unit_states *states)
{
    fsdpc_unit *unit = states->unit;
    bool any = false;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        for (size_t b = 0; b < unit->layout->groups[g].n_bands; b++)
            FSDPC_TRY(step_band(optim, states, g, (int)b));
    }
    for (int i = 0; i < unit->layout->n_params; i++) {
        param_states *own = &states->params[i];
        any |= own->stepping;
        if (own->stepping && optim->hypers[own->group].momentum != 0)
            own->momentum = true;
    }
    if (!any || !fsdpc_optim_writes(optim))
        return FSDPC_OK;
    if (fsdpc_optim_swaps(optim))
        unit->swapped = unit->swapped ? NULL : optim;
    if (!unit->root || optim->in_backward)
        unit->dirty = true; /* the next epoch copies in */
    else
        FSDPC_TRY(fsdpc_unsharded_seal(unit));
    if (fsdpc_offload_steps_on_host(&unit->offload))
        return fsdpc_optim_host_stepped(unit);
    return FSDPC_OK;
}

/* Calls fn once for each root of the optimizer's units. */
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

/* ---- Data in a file ---- */

/* Returns the unit's tier, or NULL if an earlier unit has the same tier. */
static fsdpc_tier *tier_of(const fsdpc_optim *optim, int i)
{
    fsdpc_tier *tier = optim->units[i].unit->offload.tier;
    bool seen = false;
    for (int j = i - 1; j >= 0 && !seen; j--)
        seen = optim->units[j].unit->offload.tier == tier;
    return seen ? NULL : tier;
}

/* Calls fn on every tier of the optimizer's units, even after a failure. */
static fsdpc_status each_tier(const fsdpc_optim *optim, fsdpc_status (*fn)(fsdpc_tier *))
{
    fsdpc_status status = FSDPC_OK;
    for (int i = 0; i < optim->n_units; i++)
        if (tier_of(optim, i))
            FSDPC_KEEP_FIRST(status, fn(tier_of(optim, i)));
    return status;
}

static fsdpc_status add_to_pass(const fsdpc_optim *optim, const unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    fsdpc_grad_file_release(unit);
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
        if (group->master_extent && unit->foreign) /* other code may have written them */
            fsdpc_extent_forget(group->master_extent);
        if (group->grad_extent && fsdpc_optim_reads_gradients(optim))
            row[n++] = group->grad_extent;
        if (n > 0 && fsdpc_optim_steps_group(states, g))
            FSDPC_TRY(fsdpc_pass_add(unit->offload.tier, row, n));
    }
    return FSDPC_OK;
}

/* Starts reading the data that the step will need, in order of use, for either the waiting units or
 * the others. */
static fsdpc_status begin_pass(fsdpc_optim *optim, bool waiting)
{
    fsdpc_status status = FSDPC_OK;
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++)
        if (tier_of(optim, i))
            status = fsdpc_pass_begin(tier_of(optim, i), &optim->pending.pass);
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++) {
        const unit_states *states = &optim->units[optim->order[i]];
        if (states->unit->offload.tier && states->waits == waiting)
            status = add_to_pass(optim, states);
    }
    if (status == FSDPC_OK)
        status = each_tier(optim, fsdpc_pass_start);
    if (status != FSDPC_OK)
        (void)each_tier(optim, fsdpc_pass_end);
    return status;
}

static fsdpc_status abort_root(fsdpc_root *root)
{
    fsdpc_root_abort(root, fsdpc_last_error());
    return FSDPC_OK;
}

/* Ends a step that may have updated only part of the model, and makes all ranks fail. */
static fsdpc_status give_up(fsdpc_optim *optim, fsdpc_status status)
{
    snprintf(optim->reason, sizeof optim->reason, "%s", fsdpc_last_error());
    optim->failed = status;
    (void)each_tier(optim, fsdpc_pass_end);
    (void)fsdpc_fail(status, "%s", optim->reason);
    (void)each_root(optim, abort_root);
    return fsdpc_fail(status, "%s", optim->reason);
}

/* ---- Pending steps ---- */

static fsdpc_optim *optim_of(fsdpc_pending *pending)
{
    return (fsdpc_optim *)((char *)pending - offsetof(fsdpc_optim, pending));
}

/* Checks whether the step can continue. */
static fsdpc_status check_step(const fsdpc_optim *optim)
{
    if (optim->failed != FSDPC_OK)
        return fsdpc_fail(optim->failed, "%s", optim->reason);
    return optim->goes_on ? each_tier(optim, fsdpc_tier_check_process) : FSDPC_OK;
}

static fsdpc_status step_next(fsdpc_optim *optim)
{
    unit_states *states = &optim->units[optim->order[optim->next]];
    const fsdpc_root *root = states->unit->root;
    if (states->waits) {
        fsdpc_status status = step_unit(optim, states);
        if (status != FSDPC_OK)
            return give_up(optim, status);
        states->waits = false;
        fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM, states->unit->id, 0,
                        root ? root->param_buffer->epoch : 0, root && root->model->in_backward);
    }
    optim->next++;
    return FSDPC_OK;
}

/* A pass delivers rows in order, so any earlier units are stepped too. */
static fsdpc_status advance(fsdpc_pending *pending, const fsdpc_unit *unit)
{
    fsdpc_optim *optim = optim_of(pending);
    const unit_states *states = fsdpc_optim_unit(optim, unit);
    FSDPC_TRY(check_step(optim));
    while (states->waits)
        FSDPC_TRY(step_next(optim));
    return FSDPC_OK;
}

static fsdpc_status end(fsdpc_pass_hook *hook)
{
    fsdpc_optim *optim = optim_of((fsdpc_pending *)((char *)hook - offsetof(fsdpc_pending, pass)));
    FSDPC_TRY(check_step(optim));
    if (!optim->goes_on)
        return FSDPC_OK;
    while (optim->next < optim->n_units)
        FSDPC_TRY(step_next(optim));
    fsdpc_status files = each_tier(optim, fsdpc_pass_end);
    if (files != FSDPC_OK)
        return give_up(optim, files);
    fsdpc_optim_close_step(optim);
    return FSDPC_OK;
}

/* Leaves the step pending: units that wait are stepped when they are needed. */
static fsdpc_status leave_open(fsdpc_optim *optim)
{
    optim->pending = (fsdpc_pending){.pass.end = end, .advance = advance};
    optim->next = 0;
    fsdpc_status status = begin_pass(optim, true);
    if (status != FSDPC_OK)
        return give_up(optim, status);
    optim->goes_on = true;
    for (int i = 0; i < optim->n_units; i++) {
        optim->units[i].unit->puts_off = false;
        if (optim->units[i].waits)
            optim->units[i].unit->pending = &optim->pending;
    }
    return FSDPC_OK;
}

/* ---- A step ---- */

fsdpc_status fsdpc_optim_step_alone(const fsdpc_optim *optim, int group, fsdpc_step_args *args,
                                    fsdpc_stream *stream)
{
    args->kind = fsdpc_optim_kind_of(optim, group);
    args->hyper = optim->hypers[group];
    args->seed = optim->seed;
    if (optim->device->capturing)
        FSDPC_TRY(fsdpc_optim_graph_take(optim, group, args));
    return fsdpc_flat_step(args, stream);
}

fsdpc_status fsdpc_optim_step_whole_alone(fsdpc_optim *optim, int group,
                                          const fsdpc_step_args *args, const char *name, int ndim,
                                          const size_t *shape, fsdpc_stream *stream)
{
    if (fsdpc_optim_kind_of(optim, group) == FSDPC_OPTIM_ADAFACTOR)
        return fsdpc_optim_factored_alone(optim, group, args, name, ndim, shape, stream);
    return fsdpc_optim_matrix_alone(optim, group, args, name, ndim, shape, stream);
}

/* Sorts units in the order in which forward will use them: for each root, the outermost first, then
 * by id. */
static void sort_units(const fsdpc_optim *optim)
{
    for (int i = 1; i < optim->n_units; i++) {
        int at = i, moved = optim->order[i];
        const fsdpc_unit *unit = optim->units[moved].unit;
        for (; at > 0; at--) {
            const fsdpc_unit *before = optim->units[optim->order[at - 1]].unit;
            if (before->root != unit->root || before->id <= unit->id)
                break;
            optim->order[at] = optim->order[at - 1];
        }
        optim->order[at] = moved;
    }
}

static bool lies_in_file(const fsdpc_unit *unit)
{
    const fsdpc_offload *offload = &unit->offload;
    return offload->tier && (offload->masters || offload->states || offload->gradients);
}

/* Returns whether a parameter is part of the step that is about to begin. */
static bool is_stepped(const fsdpc_optim *optim, const unit_states *states, int param)
{
    const fsdpc_unit *unit = states->unit;
    const param_states *own = &states->params[param];
    if (optim->outer)
        return fsdpc_optim_outer_steps(optim, own);
    if (own->group < 0 || fsdpc_optim_reads_gradients(optim))
        return own->group >= 0 && fsdpc_grad_exists(unit, param);
    bool begins = !fsdpc_optim_swaps(optim) && unit->trainable[param];
    return unit->layout->params[param].group < unit->n_trained && (own->steps > 0 || begins);
}

static fsdpc_status check_swapped(const fsdpc_optim *optim, const fsdpc_unit *unit)
{
    if (!unit->swapped || (unit->swapped == optim && fsdpc_optim_swaps(optim)))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "the parameters of unit '%s' are exchanged for their averages: leave the "
                      "EMA's swap() before %s",
                      unit->name,
                      optim->kind == FSDPC_OPTIM_EMA ? "another swap() or update()"
                                                     : "an optimizer steps them");
}

/* Decides which parameters are stepped, with which scale, and which units wait; later changes to
 * the gradients do not affect the decision. A unit does not wait if other code has tensors that use
 * its memory. */
static fsdpc_status decide(fsdpc_optim *optim)
{
    const bool reads = fsdpc_optim_reads_gradients(optim);
    sort_units(optim);
    for (int i = 0; i < optim->n_units; i++) {
        unit_states *states = &optim->units[i];
        fsdpc_unit *unit = states->unit;
        bool any = false;
        FSDPC_TRY(fsdpc_unit_end_step(unit)); /* another optimizer's */
        FSDPC_TRY(check_swapped(optim, unit));
        if (reads && unit->grad_live && unit->micro.n > 0)
            FSDPC_TRY(fsdpc_micro_fold(unit));
        for (int p = 0; p < unit->layout->n_params; p++) {
            param_states *own = &states->params[p];
            own->stepping = is_stepped(optim, states, p);
            any |= own->stepping;
        }
        states->scale = reads ? unit->pending_scale : 1;
        states->scale_at = reads ? fsdpc_unit_scale_at(unit) : NULL;
        states->waits = any && reads && unit->root && lies_in_file(unit) &&
                        !fsdpc_unit_is_shared(unit) && !optim->device->capturing;
        unit->puts_off = states->waits;
    }
    return FSDPC_OK;
}

/* Increments the step counts and steps the units that do not wait; call after all ranks have
 * arrived. */
static fsdpc_status step_units(fsdpc_optim *optim, bool *waits_out)
{
    *waits_out = false;
    for (int i = 0; i < optim->n_units; i++) {
        const unit_states *states = &optim->units[i];
        for (int p = 0; p < states->unit->layout->n_params; p++)
            states->params[p].steps += states->params[p].stepping && !fsdpc_optim_swaps(optim);
    }
    fsdpc_status status = fsdpc_optim_matrix_step(optim);
    if (status == FSDPC_OK)
        status = fsdpc_optim_factored_step(optim);
    if (status != FSDPC_OK)
        return give_up(optim, status);
    for (int i = 0; i < optim->n_units; i++) {
        const unit_states *states = &optim->units[optim->order[i]];
        *waits_out |= states->waits;
        if (optim->outer && (status = fsdpc_optim_outer_meet(optim, states)) != FSDPC_OK)
            return give_up(optim, status);
        if (!states->waits)
            FSDPC_TRY(step_unit(optim, states));
    }
    return FSDPC_OK;
}

/* Waits until a remote device has copied in the masters that the CPU is about to exchange. Steps
 * with gradients wait for those instead (optim_host.c). */
static fsdpc_status await_copies(const fsdpc_optim *optim)
{
    bool on_host = false;
    for (int i = 0; i < optim->n_units; i++)
        on_host |= fsdpc_offload_steps_on_host(&optim->units[i].unit->offload);
    bool reads = on_host && optim->device->remote;
    return reads ? fsdpc_stream_sync(fsdpc_device_main(optim->device)) : FSDPC_OK;
}

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim)
{
    bool waits = false, writes = fsdpc_optim_writes(optim);
    if (optim->device->capturing && !optim->capture)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "another optimizer steps inside a captured step: a graph holds the step of "
            "the one that it was given");
    FSDPC_TRY(fsdpc_optim_end_step(optim));
    FSDPC_TRY(fsdpc_optim_prepare(optim));
    FSDPC_TRY(decide(optim));
    FSDPC_TRY(begin_pass(optim, false));
    fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM, -1, 0, 0, 0);
    fsdpc_status status = writes ? each_root(optim, fsdpc_root_write_begin) : FSDPC_OK;
    if (status == FSDPC_OK && !fsdpc_optim_reads_gradients(optim))
        status = await_copies(optim);
    if (status == FSDPC_OK && optim->host)
        status = fsdpc_optim_host_begin(optim);
    if (status == FSDPC_OK)
        status = step_units(optim, &waits);
    fsdpc_status files = each_tier(optim, fsdpc_pass_end);
    if (optim->host)
        FSDPC_KEEP_FIRST(files, fsdpc_optim_host_end(optim));
    if (files != FSDPC_OK)
        return give_up(optim, files);
    if (status == FSDPC_OK && waits)
        status = leave_open(optim);
    /* Even after an error, an announced epoch reports its copy-in, since peers wait for it. */
    if (writes)
        FSDPC_KEEP_FIRST(status, each_root(optim, fsdpc_root_write_end));
    fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM_END, -1, 0, 0, 0);
    return status;
}

fsdpc_status fsdpc_optim_prepare_backward(fsdpc_optim *optim)
{
    FSDPC_TRY(fsdpc_optim_prepare(optim));
    for (int i = 0; i < optim->n_units; i++)
        FSDPC_TRY(check_swapped(optim, optim->units[i].unit));
    return FSDPC_OK;
}

/* The unit's slices are copied in by the next epoch: peers may still be in this backward, but have
 * ended the unit's, since its reduction is finished. */
fsdpc_status fsdpc_optim_step_reduced(fsdpc_optim *optim, fsdpc_unit *unit)
{
    unit_states *states = fsdpc_optim_unit(optim, unit);
    for (int p = 0; p < unit->layout->n_params; p++) {
        states->params[p].stepping = is_stepped(optim, states, p);
        states->params[p].steps += states->params[p].stepping;
    }
    states->scale = unit->pending_scale;
    states->scale_at = NULL;
    optim->in_backward = true;
    fsdpc_status status = step_unit(optim, states);
    optim->in_backward = false;
    fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM, unit->id, 0, unit->root->param_buffer->epoch,
                    true);
    return status == FSDPC_OK ? FSDPC_OK : give_up(optim, status);
}
