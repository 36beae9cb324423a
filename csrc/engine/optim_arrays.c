/* Arrays come into being before the first step that uses them, one per flat group and state, and
 * cover only parameters with that state. If more parameters get it later, a longer array takes the
 * present one's place.
 */
#include "engine/optim_internal.h"

#include <stdlib.h>

#include "engine/factors.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_optim_init_states(const fsdpc_optim *optim, unit_states *states,
                                     fsdpc_unit *unit)
{
    size_t n_params = (size_t)unit->layout->n_params, n_groups = (size_t)unit->layout->n_groups;
    states->unit = unit;
    states->params = calloc(n_params, sizeof *states->params);
    states->states = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->states);
    states->extents = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->extents);
    states->sides = calloc(n_groups * FSDPC_OPTIM_MAX_STATES, sizeof *states->sides);
    states->side_numel = calloc(n_groups, sizeof *states->side_numel);
    fsdpc_state_place *places = calloc(n_params, sizeof *places);
    bool made = states->params && states->states && states->extents && states->sides &&
                states->side_numel && places;
    for (size_t g = 0; made && g < n_groups; g++)
        states->side_numel[g] =
            fsdpc_state_side(&optim->format, unit->layout, (int)g, fsdpc_unit_rank(unit), places);
    for (size_t i = 0; made && i < n_params; i++)
        states->params[i] = (param_states){.group = -1, .place = places[i]};
    free(places);
    if (!made)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'", unit->name);
    return FSDPC_OK;
}

void fsdpc_optim_fini_states(unit_states *states)
{
    int n_groups = states->unit->layout->n_groups;
    bool made = states->states && states->extents && states->sides;
    for (int i = 0; made && i < n_groups * FSDPC_OPTIM_MAX_STATES; i++) {
        fsdpc_unit_destroy_array(states->unit, states->extents[i], states->states[i]);
        fsdpc_device_free(states->unit->device, states->sides[i]);
    }
    for (int i = 0; states->params && i < states->unit->layout->n_params; i++)
        fsdpc_device_free(states->unit->device, states->params[i].factors);
    free(states->states);
    free(states->extents);
    free(states->sides);
    free(states->side_numel);
    free(states->params);
}

/* Chunks of a pass, or of gradients that come from a device, end at multiples of 4096 elements and
 * must not split a block. */
static fsdpc_status check_codes(const unit_states *states, int param)
{
    const fsdpc_offload *offload = &states->unit->offload;
    size_t row = states->params[param].place.code_row;
    if (row == 0 || row == FSDPC_LAYOUT_BLOCK || (!offload->tier && !offload->host))
        return FSDPC_OK;
    return fsdpc_fail(
        FSDPC_ERR_UNSUPPORTED,
        "int8 states of '%s' of unit '%s', which is offloaded, need rows that are a "
        "multiple of %d elements; its rows have %zu: keep the unit in memory, or take "
        "bfloat16 states",
        states->unit->layout->params[param].name, states->unit->name, FSDPC_LAYOUT_BLOCK, row);
}

/* Creates a side array, which is in memory even if the codes are in a file. */
static fsdpc_status make_side(const unit_states *states, int group, const char *name, float **out)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_group plan = {.shard_numel = states->side_numel[group]};
    fsdpc_extent *none = NULL;
    return fsdpc_unit_create_array(unit, &plan, unit->offload.states && unit->offload.host,
                                   FSDPC_MEM_STATE, name, FSDPC_F32, &none, (void **)out);
}

/* Returns the dtype of the arrays of a flat group's states. */
static fsdpc_dtype array_dtype(const fsdpc_optim *optim, const unit_states *states, int group)
{
    return states->side_numel[group] > 0
               ? FSDPC_U8
               : fsdpc_state_plain_dtype(&optim->format, states->unit->layout->groups[group].dtype);
}

/* Copies the bands that an array has into one that has more. */
static fsdpc_status copy_bands(const fsdpc_optim *optim, const unit_states *states, int group,
                               int state, const size_t *skips, unsigned char *to)
{
    const fsdpc_layout *layout = states->unit->layout;
    const unsigned char *from = states->states[group * FSDPC_OPTIM_MAX_STATES + state];
    for (int i = 0; from && i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        size_t skip = states->params[i].skips[state];
        if (place->group != group || skip == FSDPC_COVER_NONE)
            continue;
        fsdpc_local_shard local =
            fsdpc_layout_local_shard(layout, i, fsdpc_unit_rank(states->unit));
        size_t element = fsdpc_dtype_bytes(array_dtype(optim, states, group));
        FSDPC_TRY(fsdpc_device_copy(optim->device, to + (local.shard_offset - skips[i]) * element,
                                    from + (local.shard_offset - skip) * element,
                                    local.numel * element, NULL));
    }
    return FSDPC_OK;
}

/* Marks the parameters that have a state, or are in a band of its array already. Arrays in a file
 * and codes have all. */
static void mark_wanted(const fsdpc_optim *optim, const unit_states *states, int group, int state,
                        bool *wanted)
{
    const fsdpc_layout *layout = states->unit->layout;
    bool made = states->states[group * FSDPC_OPTIM_MAX_STATES + state];
    for (int i = 0; i < layout->n_params; i++) {
        const param_states *own = &states->params[i];
        wanted[i] = states->unit->offload.states || states->side_numel[group] > 0 ||
                    (made && own->skips[state] != FSDPC_COVER_NONE) ||
                    state < fsdpc_optim_states_of(optim, states, i);
    }
}

/* Creates the array of a state that covers what is wanted, in the place of the present one.
 * `wanted` and `skips` have room for all parameters. */
static fsdpc_status create_state(fsdpc_optim *optim, unit_states *states, int group, int state,
                                 const char *name, bool *wanted, size_t *skips)
{
    fsdpc_unit *unit = states->unit;
    int at = group * FSDPC_OPTIM_MAX_STATES + state;
    fsdpc_group plan = *unit->groups[group].plan;
    fsdpc_extent *extent = NULL;
    void *memory = NULL;
    mark_wanted(optim, states, group, state, wanted);
    plan.shard_numel = fsdpc_cover(unit->layout, group, wanted, skips);
    FSDPC_TRY(fsdpc_unit_create_array(unit, &plan, unit->offload.states, FSDPC_MEM_STATE, name,
                                      array_dtype(optim, states, group), &extent, &memory));
    fsdpc_status status = copy_bands(optim, states, group, state, skips, memory);
    if (status != FSDPC_OK) {
        fsdpc_unit_destroy_array(unit, extent, memory);
        return status;
    }
    if (states->states[at])
        fsdpc_unit_destroy_array(unit, states->extents[at], states->states[at]);
    states->states[at] = memory;
    states->extents[at] = extent;
    for (int i = 0; i < unit->layout->n_params; i++)
        if (unit->layout->params[i].group == group)
            states->params[i].skips[state] = skips[i];
    return FSDPC_OK;
}

/* Creates a state of all parameters of a flat group that have it, or adds those that lack it. */
static fsdpc_status make_state(fsdpc_optim *optim, unit_states *states, int param, int state,
                               const char *name)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[param];
    size_t n_params = (size_t)unit->layout->n_params;
    if (states->states[place->group * FSDPC_OPTIM_MAX_STATES + state] &&
        atomic_load_explicit(&optim->exports, memory_order_relaxed) > 0)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "parameter '%s' of unit '%s' gets the state %s while tensors on the "
                          "optimizer's states are in use: drop them first",
                          place->name, unit->name, name);
    bool *wanted = calloc(n_params, sizeof *wanted);
    size_t *skips = calloc(n_params, sizeof *skips);
    fsdpc_status status =
        wanted && skips
            ? create_state(optim, states, place->group, state, name, wanted, skips)
            : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'", unit->name);
    free(wanted);
    free(skips);
    return status;
}

/* Creates the means by row and by column. */
static fsdpc_status create_factors(const unit_states *states, int param)
{
    fsdpc_device *device = states->unit->device;
    size_t bytes = fsdpc_factors_numel(states->unit->layout, param) * sizeof(float);
    void *memory;
    if (states->params[param].factors || bytes == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_device_alloc(device, FSDPC_MEM_STATE, bytes, &memory));
    states->params[param].factors = memory;
    return fsdpc_device_fill(device, memory, 0, bytes, NULL);
}

fsdpc_status fsdpc_optim_check_plain(const fsdpc_optim *optim, int group, const char *name,
                                     fsdpc_dtype dtype)
{
    const char *rule = fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, group));
    if (dtype == FSDPC_F64)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "%s computes in float32, but parameter '%s' is float64: convert it, or "
                          "put it into a group of another optimizer",
                          rule, name);
    if (optim->format.dtype != FSDPC_F32)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "%s keeps its states in float32, not %s: leave state_dtype out", rule,
                          fsdpc_dtype_name(optim->format.dtype));
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_check_memory(const fsdpc_optim *optim, const unit_states *states,
                                      int param)
{
    const fsdpc_offload *offload = &states->unit->offload;
    if (!offload->masters && !offload->states && !offload->gradients)
        return FSDPC_OK;
    return fsdpc_fail(
        FSDPC_ERR_UNSUPPORTED,
        "%s needs masters, gradients and states in memory, but those of parameter '%s' of unit "
        "'%s' are offloaded: offload only params there, or use another optimizer",
        fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, states->params[param].group)),
        states->unit->layout->params[param].name, states->unit->name);
}

fsdpc_status fsdpc_optim_create_states(fsdpc_optim *optim, unit_states *states, int param)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_hyper *hyper = fsdpc_optim_hyper_of(optim, states->params[param].group);
    if (!hyper)
        return fsdpc_fail(FSDPC_ERR_STATE, "parameter group %d, of '%s', has no hyper-parameters",
                          states->params[param].group, place->name);
    const fsdpc_optim_kind kind = fsdpc_optim_kind_of(optim, states->params[param].group);
    const int n_states = fsdpc_optim_states_of(optim, states, param);
    if (fsdpc_optim_is_factored(optim, states, param) && place->ndim >= 2)
        return create_factors(states, param);
    if (n_states > 0)
        FSDPC_TRY(check_codes(states, param));
    for (int s = 0; s < n_states; s++) {
        int at = place->group * FSDPC_OPTIM_MAX_STATES + s;
        const char *name = fsdpc_optim_state_name(kind, s);
        if (!states->states[at] || states->params[param].skips[s] == FSDPC_COVER_NONE)
            FSDPC_TRY(make_state(optim, states, param, s, name));
        if (states->side_numel[place->group] > 0 && !states->sides[at])
            FSDPC_TRY(make_side(states, place->group, name, &states->sides[at]));
    }
    return FSDPC_OK;
}

fsdpc_state_memory fsdpc_optim_locate(const fsdpc_optim *optim, const unit_states *states,
                                      int param, int state, size_t at)
{
    const fsdpc_layout *layout = states->unit->layout;
    const fsdpc_place *place = &layout->params[param];
    const fsdpc_state_place *own = &states->params[param].place;
    int i = place->group * FSDPC_OPTIM_MAX_STATES + state;
    fsdpc_state_memory found = {.dtype = fsdpc_state_plain_dtype(&optim->format, place->dtype)};
    bool coded = states->side_numel[place->group] > 0;
    if (coded && !own->code_row) {
        found.data = states->sides[i] ? states->sides[i] + (own->side + at) : NULL;
        return found;
    }
    found.dtype = coded ? FSDPC_U8 : found.dtype;
    found.extent = states->extents[i];
    size_t skip = states->params[param].skips[state];
    if (states->states[i] && skip != FSDPC_COVER_NONE)
        found.data =
            (unsigned char *)states->states[i] + (at - skip) * fsdpc_dtype_bytes(found.dtype);
    if (coded && states->sides[i]) {
        fsdpc_local_shard local =
            fsdpc_layout_local_shard(layout, param, fsdpc_unit_rank(states->unit));
        found.maxima = states->sides[i] + own->side +
                       fsdpc_code_blocks(at - local.shard_offset, own->code_row);
    }
    return found;
}
