/* An optimizer's data: parameters in groups, hyper-parameters and states.
 *
 * For each unit, it stores the group and step count of every parameter, and one array per flat
 * group and state, with its side array if it is coded. Arrays are created before the first step that
 * uses them.
 *
 * optim_step.c contains the steps, optim_matrix.c the part of matrix rules, optim_graph.c captured
 * steps, and optim_host.c CPU steps for a remote device.
 */
#include "engine/optim.h"

#include <stdlib.h>

#include "engine/collect.h"
#include "engine/factors.h"
#include "engine/optim_factored.h"
#include "engine/optim_graph.h"
#include "engine/optim_host.h"
#include "engine/optim_matrix.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_optim_create(fsdpc_optim_kind kind, fsdpc_device *device, fsdpc_trace *trace,
                                fsdpc_optim **out)
{
    fsdpc_optim *optim = calloc(1, sizeof *optim);
    if (!optim)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
    optim->kind = kind;
    optim->device = device;
    optim->trace = trace;
    optim->format.dtype = FSDPC_F32;
    *out = optim;
    return FSDPC_OK;
}

void fsdpc_optim_destroy(fsdpc_optim *optim)
{
    if (!optim)
        return;
    if (optim->backward_steps)
        (void)optim->backward_steps->leave(
            optim->backward_steps);    /* a unit without memory refuses gradients */
    (void)fsdpc_optim_end_step(optim); /* if it fails, the roots' communicators report that */
    fsdpc_optim_close_step(optim);
    for (int i = 0; i < optim->n_units; i++) {
        fsdpc_unit *unit = optim->units[i].unit;
        unit->swapped = unit->swapped == optim ? NULL : unit->swapped;
        fsdpc_optim_fini_states(&optim->units[i]);
    }
    fsdpc_device_free(optim->device, optim->scalars);
    fsdpc_optim_host_destroy(optim);
    fsdpc_optim_matrix_destroy(optim);
    fsdpc_optim_factored_destroy(optim);
    if (optim->outer) {
        fsdpc_buffer_destroy(optim->outer->buffer);
        fsdpc_device_free(optim->device, optim->outer->means);
    }
    free(optim->outer);
    free(optim->units);
    free(optim->order);
    free(optim->hypers);
    free(optim->kinds);
    free(optim);
}

unit_states *fsdpc_optim_unit(const fsdpc_optim *optim, const fsdpc_unit *unit)
{
    for (int i = optim->n_units - 1; i >= 0; i--) {
        if (optim->units[i].unit == unit)
            return &optim->units[i];
    }
    return NULL;
}

/* ---- A pending step, of optim_step.c ---- */

fsdpc_status fsdpc_optim_end_step(fsdpc_optim *optim)
{
    if (optim->failed != FSDPC_OK)
        return fsdpc_fail(optim->failed, "%s", optim->reason);
    return optim->goes_on ? optim->pending.pass.end(&optim->pending.pass) : FSDPC_OK;
}

void fsdpc_optim_close_step(fsdpc_optim *optim)
{
    for (int i = 0; i < optim->n_units; i++)
        if (optim->units[i].unit->pending == &optim->pending)
            optim->units[i].unit->pending = NULL;
    optim->goes_on = false;
}

/* ---- Parameters and hyper-parameters ---- */

fsdpc_status fsdpc_optim_set_format(fsdpc_optim *optim, const fsdpc_state_format *format,
                                    uint64_t seed)
{
    fsdpc_dtype dtype = format->dtype;
    if (dtype != FSDPC_F32 && dtype != FSDPC_BF16 && dtype != FSDPC_U8)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "states are float32, bfloat16 or int8, not %s",
                          fsdpc_dtype_name(dtype));
    if (optim->n_units > 0)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "the dtype of states is set before parameters are added");
    optim->format = *format;
    optim->seed = seed;
    return FSDPC_OK;
}

uint32_t fsdpc_optim_take_number(fsdpc_optim *optim)
{
    return optim->n_numbers++;
}

fsdpc_status fsdpc_optim_add(fsdpc_optim *optim, fsdpc_unit *unit, int param, int group)
{
    FSDPC_TRY(fsdpc_optim_end_step(optim));
    unit_states *states = fsdpc_optim_unit(optim, unit);
    if (!states) {
        size_t n = (size_t)optim->n_units + 1;
        unit_states *grown = realloc(optim->units, n * sizeof *grown);
        int *order = realloc(optim->order, n * sizeof *order);
        optim->units = grown ? grown : optim->units;
        optim->order = order ? order : optim->order;
        if (!grown || !order)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the optimizer of unit '%s'",
                              unit->name);
        states = &optim->units[optim->n_units];
        *states = (unit_states){0};
        fsdpc_status status = fsdpc_optim_init_states(optim, states, unit);
        if (status != FSDPC_OK) {
            fsdpc_optim_fini_states(states);
            return status;
        }
        order[optim->n_units] = optim->n_units;
        optim->n_units++;
    }
    const fsdpc_place *place = &unit->layout->params[param];
    if (group < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter groups count from 0, got %d", group);
    if (states->params[param].group >= 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter '%s' of unit '%s' is in two parameter groups",
                          place->name, unit->name);
    states->params[param].group = group;
    states->params[param].number = optim->n_numbers++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_set_hyper(fsdpc_optim *optim, int group, const fsdpc_hyper *hyper)
{
    FSDPC_TRY(fsdpc_optim_end_step(optim));
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

fsdpc_status fsdpc_optim_set_kind(fsdpc_optim *optim, int group, fsdpc_optim_kind kind)
{
    if (fsdpc_optim_kind_of(optim, group) == kind)
        return FSDPC_OK;
    for (int i = 0; i < optim->n_units; i++)
        for (int p = 0; p < optim->units[i].unit->layout->n_params; p++)
            if (optim->units[i].params[p].group == group && optim->units[i].params[p].steps > 0)
                return fsdpc_fail(FSDPC_ERR_STATE,
                                  "group %d of the optimizer has steps of %s, so it cannot step by "
                                  "%s: make a new optimizer",
                                  group, fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, group)),
                                  fsdpc_optim_kind_name(kind));
    if (group >= optim->n_kinds) {
        fsdpc_optim_kind *grown = realloc(optim->kinds, (size_t)(group + 1) * sizeof *grown);
        if (!grown)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %d parameter groups", group + 1);
        for (int i = optim->n_kinds; i <= group; i++)
            grown[i] = optim->kind;
        optim->kinds = grown;
        optim->n_kinds = group + 1;
    }
    optim->kinds[group] = kind;
    return FSDPC_OK;
}

fsdpc_optim_kind fsdpc_optim_group_kind(const fsdpc_optim *optim, int group)
{
    return fsdpc_optim_kind_of(optim, group);
}

const fsdpc_hyper *fsdpc_optim_hyper(const fsdpc_optim *optim, int group)
{
    return fsdpc_optim_hyper_of(optim, group);
}

fsdpc_status fsdpc_optim_prepare(fsdpc_optim *optim)
{
    if (optim->device->ops->capture_begin)
        FSDPC_TRY(fsdpc_optim_graph_room(optim));
    for (int i = 0; i < optim->n_units; i++) {
        unit_states *states = &optim->units[i];
        for (int p = 0; p < states->unit->layout->n_params; p++) {
            bool trains = states->unit->layout->params[p].group < states->unit->n_trained;
            if (states->params[p].group >= 0 && trains)
                FSDPC_TRY(fsdpc_optim_create_states(optim, states, p));
        }
    }
    FSDPC_TRY(fsdpc_optim_matrix_prepare(optim));
    FSDPC_TRY(fsdpc_optim_factored_prepare(optim));
    bool sends = optim->device->remote && fsdpc_optim_reads_gradients(optim);
    return sends ? fsdpc_optim_host_prepare(optim) : FSDPC_OK;
}

fsdpc_status fsdpc_optim_capture_begin(fsdpc_optim *optim, const fsdpc_root *root,
                                       fsdpc_optim_graph **out)
{
    FSDPC_TRY(fsdpc_optim_end_step(optim));
    FSDPC_TRY(fsdpc_optim_prepare(optim));
    if (optim->matrix || optim->factored)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a captured step cannot contain optimizers that read whole matrices, as "
                          "the host waits for the norm of each");
    return fsdpc_optim_graph_create(optim, root, out);
}

/* -- states ------------------------------------------------------------------------------------ */

static fsdpc_status find_states(const fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                unit_states **out)
{
    unit_states *states = fsdpc_optim_unit(optim, unit);
    if (!states || states->params[param].group < 0)
        return fsdpc_fail(FSDPC_ERR_KEY, "the optimizer was not given parameter '%s'",
                          unit->layout->params[param].name);
    *out = states;
    return FSDPC_OK;
}

/* Like find_states, but first ends any pending step. */
static fsdpc_status open_states(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                unit_states **out)
{
    FSDPC_TRY(fsdpc_optim_end_step(optim));
    return find_states(optim, unit, param, out);
}

static fsdpc_optim_view view_of(const fsdpc_optim *optim, const unit_states *states, int param,
                                int state)
{
    const fsdpc_layout *layout = states->unit->layout;
    fsdpc_local_shard local =
        fsdpc_layout_local_shard(layout, param, fsdpc_unit_rank(states->unit));
    fsdpc_state_memory at = fsdpc_optim_locate(optim, states, param, state, local.shard_offset);
    fsdpc_optim_view view = {.local = local, .dtype = at.dtype, .data = at.data};
    if (at.dtype == FSDPC_U8) {
        int group = states->params[param].group;
        fsdpc_optim_kind kind = fsdpc_optim_kind_of(optim, group);
        const fsdpc_hyper *hyper = fsdpc_optim_hyper_of(optim, group);
        view.codes = (fsdpc_code_args){.code = fsdpc_state_code(kind, hyper, state),
                                       .codes = at.data,
                                       .maxima = at.maxima,
                                       .numel = local.numel,
                                       .row = states->params[param].place.code_row};
    }
    return view;
}

/* Call before reading or writing a parameter's rows of a state in place. */
static fsdpc_status open_rows(const fsdpc_optim *optim, const unit_states *states, int param,
                              int state, bool write)
{
    fsdpc_local_shard local =
        fsdpc_layout_local_shard(states->unit->layout, param, fsdpc_unit_rank(states->unit));
    fsdpc_extent *extent =
        fsdpc_optim_locate(optim, states, param, state, local.shard_offset).extent;
    if (!extent)
        return FSDPC_OK;
    return write ? fsdpc_extent_written(extent, local.shard_offset, local.numel)
                 : fsdpc_extent_check(extent, local.shard_offset, local.numel);
}

fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               bool write, fsdpc_optim_view *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(open_states(optim, unit, param, &states));
    FSDPC_TRY(open_rows(optim, states, param, state, write));
    *out = view_of(optim, states, param, state);
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_factors(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                 fsdpc_factor_view *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(open_states(optim, unit, param, &states));
    FSDPC_TRY(fsdpc_optim_create_states(optim, states, param));
    const fsdpc_place *place = &unit->layout->params[param];
    fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    fsdpc_factors f = fsdpc_factors_of(place->ndim, place->shape, &local);
    float *factors = states->params[param].factors;
    *out = (fsdpc_factor_view){factors, factors ? factors + f.n_rows : NULL, f, local};
    return FSDPC_OK;
}

void fsdpc_optim_export(fsdpc_optim *optim, int change)
{
    atomic_fetch_add_explicit(&optim->exports, change, memory_order_relaxed);
}

fsdpc_status fsdpc_optim_make_states(fsdpc_optim *optim, const fsdpc_unit *unit, int param)
{
    unit_states *states = NULL;
    FSDPC_TRY(open_states(optim, unit, param, &states));
    return fsdpc_optim_create_states(optim, states, param);
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
    FSDPC_TRY(open_states(optim, unit, param, &states));
    if (steps < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "parameter '%s' cannot have made %lld steps",
                          unit->layout->params[param].name, (long long)steps);
    states->params[param].steps = steps;
    if (steps == 0 && states->params[param].factors)
        FSDPC_TRY(fsdpc_device_fill(optim->device, states->params[param].factors, 0,
                                    fsdpc_factors_numel(unit->layout, param) * sizeof(float),
                                    NULL));
    for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
        fsdpc_optim_view view = view_of(optim, states, param, s);
        if (s == 0)
            states->params[param].momentum = steps > 0 && view.data;
        if (steps != 0 || !view.data)
            continue;
        FSDPC_TRY(open_rows(optim, states, param, s, true));
        FSDPC_TRY(fsdpc_device_fill(optim->device, view.data, 0,
                                    view.local.numel * fsdpc_dtype_bytes(view.dtype), NULL));
        if (view.codes.maxima) /* a code of 0 may be a number above 0 */
            FSDPC_TRY(fsdpc_device_fill(
                optim->device, view.codes.maxima, 0,
                fsdpc_code_blocks(view.local.numel, view.codes.row) * sizeof(float), NULL));
    }
    return FSDPC_OK;
}

static fsdpc_status write_codes(const fsdpc_optim *optim, const fsdpc_optim_view *view,
                                const void *from, fsdpc_dtype dtype)
{
    fsdpc_stream *main = fsdpc_device_main(optim->device);
    fsdpc_code_args args = view->codes;
    FSDPC_TRY(fsdpc_device_alloc(optim->device, FSDPC_MEM_STAGING,
                                 view->local.numel * sizeof(float), (void **)&args.values));
    fsdpc_status status =
        fsdpc_flat_cast(args.values, FSDPC_F32, from, dtype, view->local.numel, main);
    if (status == FSDPC_OK)
        status = fsdpc_flat_encode(&args, main);
    fsdpc_device_free(optim->device, args.values);
    return status;
}

static fsdpc_status collect_codes(const fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                  const fsdpc_optim_view *view, void *out)
{
    fsdpc_code_args args = view->codes;
    FSDPC_TRY(fsdpc_device_alloc(optim->device, FSDPC_MEM_STAGING,
                                 view->local.numel * sizeof(float), (void **)&args.values));
    fsdpc_status status = fsdpc_flat_decode(&args, fsdpc_device_main(optim->device));
    if (status == FSDPC_OK)
        status = fsdpc_unit_collect_rows(unit, param, FSDPC_F32, args.values, out);
    fsdpc_device_free(optim->device, args.values);
    return status;
}

fsdpc_status fsdpc_optim_write(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               const void *unsharded, fsdpc_dtype dtype)
{
    unit_states *states = NULL;
    FSDPC_TRY(open_states(optim, unit, param, &states));
    FSDPC_TRY(fsdpc_optim_create_states(optim, states, param));
    fsdpc_optim_view view = view_of(optim, states, param, state);
    if (!view.data)
        return fsdpc_fail(
            FSDPC_ERR_STATE, "%s as set up keeps no state %d of parameter '%s'",
            fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, states->params[param].group)), state,
            unit->layout->params[param].name);
    FSDPC_TRY(open_rows(optim, states, param, state, true));
    const char *from = (const char *)unsharded + view.local.first * fsdpc_dtype_bytes(dtype);
    if (view.dtype == FSDPC_U8)
        return write_codes(optim, &view, from, dtype);
    return fsdpc_flat_cast(view.data, view.dtype, from, dtype, view.local.numel,
                           fsdpc_device_main(optim->device));
}

fsdpc_status fsdpc_optim_collect(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                                 void *out)
{
    unit_states *states = NULL;
    FSDPC_TRY(open_states(optim, unit, param, &states));
    fsdpc_optim_view mine = view_of(optim, states, param, state);
    if (!mine.data)
        return fsdpc_fail(FSDPC_ERR_STATE, "parameter '%s' has no state %d yet",
                          unit->layout->params[param].name, state);
    FSDPC_TRY(open_rows(optim, states, param, state, false));
    if (mine.dtype == FSDPC_U8)
        return collect_codes(optim, unit, param, &mine, out);
    return fsdpc_unit_collect_rows(unit, param, mine.dtype, mine.data, out);
}

/* Bits are added as integers: the other ranks have zeros. */
fsdpc_status fsdpc_optim_collect_means(const fsdpc_unit *unit, const fsdpc_factor_view *view,
                                       bool by_column, float *out, size_t numel)
{
    const fsdpc_factors *f = &view->factors;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    const fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                           .unit = unit->id,
                           .what = "means of Adafactor",
                           .dtype = FSDPC_I32,
                           .op = FSDPC_RED_SUM,
                           .stream = main,
                           .send = out,
                           .recv = out,
                           .numel = numel};
    size_t first = by_column ? f->first_col : f->first_row;
    size_t n = by_column ? f->n_cols : f->n_rows;
    FSDPC_TRY(fsdpc_device_fill(unit->device, out, 0, numel * sizeof *out, main));
    FSDPC_TRY(fsdpc_device_copy(unit->device, out + first,
                                by_column ? view->col_var : view->row_var, n * sizeof *out, main));
    bool apart = unit->mesh.shard->size > 1 && !(by_column && f->spread);
    return apart ? fsdpc_comm_run(unit->mesh.shard, &op) : FSDPC_OK;
}
