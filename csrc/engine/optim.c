/* Steps: runs of a flat shard, each one call of a fused kernel.
 *
 * Per unit the optimizer keeps which group each parameter belongs to, its step count, and one state
 * buffer per flat group and state, as large as the shard.  At every step the parameters of a band
 * that may be updated together are joined into runs; that costs nanoseconds a parameter and follows
 * freezing and unfreezing without bookkeeping.
 *
 * The wire is written in the same pass.  That is legal because the step opens an epoch on every
 * root first: all ranks have arrived, so nobody reads.  A unit whose root is not known yet (no
 * forward ran) has no wire; its masters are updated and published by the first epoch.
 */
#include "engine/optim.h"

#include <stdlib.h>

#include "ops/flat_ops.h"

typedef struct unit_states {
    fsdpc_unit *unit;
    int *group_of;  /* per parameter; -1: not ours */
    int64_t *steps; /* per parameter */
    float **states; /* [flat group * FSDPC_OPTIM_MAX_STATES + state] */
} unit_states;

struct fsdpc_optim {
    fsdpc_optim_kind kind;
    fsdpc_device *device;
    fsdpc_trace *trace;
    unit_states *units;
    int n_units;
    fsdpc_hyper *hypers;
    int n_hypers;
};

/* A stretch of one band's slice that one kernel call updates. */
typedef struct run {
    int param; /* the first one: group, step count */
    size_t begin, end;
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
    for (int i = 0; states->states && i < n_groups * FSDPC_OPTIM_MAX_STATES; i++)
        fsdpc_device_free(optim->device, states->states[i]);
    free(states->states);
    free(states->group_of);
    free(states->steps);
}

void fsdpc_optim_destroy(fsdpc_optim *optim)
{
    if (!optim)
        return;
    for (int i = 0; i < optim->n_units; i++)
        fini_states(optim, &optim->units[i]);
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

static fsdpc_status init_states(fsdpc_optim *optim, fsdpc_unit *unit, unit_states *states)
{
    size_t n_params = (size_t)unit->layout->n_params, n_groups = (size_t)unit->layout->n_groups;
    states->unit = unit;
    states->group_of = malloc(n_params * sizeof *states->group_of);
    states->steps = calloc(n_params, sizeof *states->steps);
    states->states = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->states);
    if (!states->group_of || !states->steps || !states->states)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'", unit->name);
    for (size_t i = 0; i < n_params; i++)
        states->group_of[i] = -1;
    for (size_t g = 0; g < n_groups; g++) {
        size_t bytes = unit->groups[g].plan->shard_numel * sizeof(float);
        for (size_t s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
            void *memory;
            FSDPC_TRY(fsdpc_device_alloc(optim->device, FSDPC_MEM_STATE, bytes, &memory));
            states->states[g * FSDPC_OPTIM_MAX_STATES + s] = memory;
            FSDPC_TRY(fsdpc_device_fill(optim->device, memory, 0, bytes, NULL));
        }
    }
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
        fsdpc_status status = init_states(optim, unit, states);
        if (status != FSDPC_OK) {
            fini_states(optim, states);
            return status;
        }
        optim->n_units++;
    }
    const fsdpc_place *place = &unit->layout->params[param];
    if (group < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter groups count from 0, got %d", group);
    if (states->group_of[param] >= 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter '%s' of unit '%s' is in two parameter groups",
                          place->name, unit->name);
    if (place->dtype != FSDPC_F32 && place->dtype != FSDPC_BF16)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "parameter '%s' of unit '%s' is %s; optimizers take float32 and bfloat16",
                          place->name, unit->name, fsdpc_dtype_name(place->dtype));
    states->group_of[param] = group;
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

/* Updates one run of parameter `first`'s band. */
static fsdpc_status step_run(fsdpc_optim *optim, unit_states *states, run part)
{
    fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[part.param];
    fsdpc_unit_group *group = &unit->groups[place->group];
    const fsdpc_slice *band = &group->plan->bands[place->band];
    const fsdpc_hyper *hyper = &optim->hypers[states->group_of[part.param]];
    float **state = &states->states[place->group * FSDPC_OPTIM_MAX_STATES];
    fsdpc_stream inline_stream = {.device = optim->device, .name = "inline"};
    fsdpc_adamw_args args = {
        .param = group->master + part.begin * fsdpc_dtype_bytes(place->dtype),
        .param_dtype = place->dtype,
        .grad = group->grad + part.begin * fsdpc_dtype_bytes(group->grad_dtype),
        .grad_dtype = group->grad_dtype,
        .exp_avg = state[0] + part.begin,
        .exp_avg_sq = state[1] + part.begin,
        .wire_dtype = group->wire_dtype,
        .numel = part.end - part.begin,
        .grad_scale = (float)unit->pending_scale,
        .lr = hyper->lr,
        .beta1 = hyper->beta1,
        .beta2 = hyper->beta2,
        .eps = hyper->eps,
        .weight_decay = hyper->weight_decay,
        .step = states->steps[part.param],
        .decoupled = optim->kind == FSDPC_OPTIM_ADAMW,
        .maximize = hyper->maximize,
    };
    if (unit->root) {
        size_t at = fsdpc_slice_full(band, fsdpc_unit_rank(unit), part.begin);
        args.wire = unit->root->wire->write + group->wire_offset +
                    at * fsdpc_dtype_bytes(group->wire_dtype);
    }
    return fsdpc_flat_adamw(&args, &inline_stream);
}

static bool joins(const unit_states *states, int a, int b)
{
    const fsdpc_place *x = &states->unit->layout->params[a], *y = &states->unit->layout->params[b];
    return x->group == y->group && x->band == y->band &&
           states->group_of[a] == states->group_of[b] && states->steps[a] == states->steps[b];
}

/* Parameters of a band stand in declaration order, so neighbours in it are met one after the other;
 * the pieces of another band in between do not end a run of this one only if it is looked for,
 * hence the walk per band. */
static fsdpc_status step_band(fsdpc_optim *optim, unit_states *states, int flat_group, int band)
{
    const fsdpc_unit *unit = states->unit;
    run open = {.param = -1};
    for (int i = 0; i < unit->layout->n_params; i++) {
        const fsdpc_place *place = &unit->layout->params[i];
        if (place->group != flat_group || place->band != band)
            continue;
        bool ours = states->group_of[i] >= 0 && unit->trainable[i];
        fsdpc_piece piece = fsdpc_layout_piece(unit->layout, i, fsdpc_unit_rank(unit));
        if (open.param >= 0 && !(ours && joins(states, open.param, i))) {
            FSDPC_TRY(step_run(optim, states, open));
            open.param = -1;
        }
        if (!ours || piece.numel == 0)
            continue;
        if (open.param < 0)
            open = (run){.param = i, .begin = piece.shard_offset};
        open.end = piece.shard_offset + piece.numel;
    }
    return open.param >= 0 ? step_run(optim, states, open) : FSDPC_OK;
}

static fsdpc_status step_unit(fsdpc_optim *optim, unit_states *states)
{
    fsdpc_unit *unit = states->unit;
    if (!unit->grad_live)
        return FSDPC_OK;
    for (int i = 0; i < unit->layout->n_params; i++)
        states->steps[i] += states->group_of[i] >= 0 && unit->trainable[i];
    for (int g = 0; g < unit->layout->n_groups; g++) {
        for (size_t b = 0; b < unit->layout->groups[g].n_bands; b++)
            FSDPC_TRY(step_band(optim, states, g, (int)b));
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

/* Before anything is announced to the peers. */
static fsdpc_status check_groups(const fsdpc_optim *optim)
{
    for (int i = 0; i < optim->n_units; i++) {
        const unit_states *states = &optim->units[i];
        for (int p = 0; p < states->unit->layout->n_params; p++) {
            if (states->group_of[p] >= optim->n_hypers)
                return fsdpc_fail(FSDPC_ERR_STATE,
                                  "parameter group %d, of '%s', has no hyper-parameters",
                                  states->group_of[p], states->unit->layout->params[p].name);
        }
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim)
{
    FSDPC_TRY(check_groups(optim));
    fsdpc_trace_add(optim->trace, FSDPC_TRACE_OPTIM, -1, 0, 0, 0);
    fsdpc_status status = each_root(optim, fsdpc_root_write_begin);
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++)
        status = step_unit(optim, &optim->units[i]);
    /* An epoch that was announced is published whatever happened: peers wait for that. */
    FSDPC_KEEP_FIRST(status, each_root(optim, fsdpc_root_write_end));
    return status;
}

static fsdpc_status find_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                               unit_states **out)
{
    unit_states *states = find_unit(optim, unit);
    if (!states || states->group_of[param] < 0)
        return fsdpc_fail(FSDPC_ERR_KEY, "the optimizer was not given parameter '%s'",
                          unit->layout->params[param].name);
    *out = states;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               fsdpc_piece *piece_out, float **out)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_state(optim, unit, param, &states));
    int group = unit->layout->params[param].group;
    *piece_out = fsdpc_layout_piece(unit->layout, param, fsdpc_unit_rank(unit));
    *out = states->states[group * FSDPC_OPTIM_MAX_STATES + state] + piece_out->shard_offset;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                    int64_t **out)
{
    unit_states *states = NULL;
    FSDPC_TRY(find_state(optim, unit, param, &states));
    *out = &states->steps[param];
    return FSDPC_OK;
}
