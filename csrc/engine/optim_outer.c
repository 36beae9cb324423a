/* A unit's differences are written to a buffer laid out like its gradient shards. They are summed
 * over the replicas like gradients of a mesh with only replicas, with the same hosts and codecs. The
 * communicator gives every replica the same bits.
 *
 * Units meet one after another, inside the step's epoch. There is thus one buffer and one array of
 * means, as large as the largest unit's shard. Both are created by the first outer step.
 *
 * Masters of replicas differ, so nothing compares them. Instead, a unit's operations carry a checksum
 * of its anchors and of the options; replicas with other ones fail before they step.
 *
 * SGD steps a parameter in place. A run therefore copies the anchors to the masters, steps these
 * (which also writes the parameter buffer), and copies them back.
 */
#include "engine/optim_outer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "engine/optim.h"
#include "ops/flat_ops.h"

/* ---- Begin ---- */

static fsdpc_status check_apart(const fsdpc_unit *unit)
{
    if (!unit->mesh.replicate || unit->mesh.replicate->size == 1)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "unit '%s' has no replicas for outer steps: call fully_shard with "
                          "mesh=init_device_mesh('cpu', (replicas, shards))",
                          unit->name);
    if (unit->device->remote)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "unit '%s' is on a GPU: outer steps work on CPUs only", unit->name);
    if (unit->root && !unit->mesh.apart)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "unit '%s' has run a forward, which shares gradients with its replicas: "
                          "set up outer steps before the first forward",
                          unit->name);
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_train_apart(fsdpc_unit *unit)
{
    FSDPC_TRY(check_apart(unit));
    bool by_default = unit->settings.divide_factor == fsdpc_mesh_ranks(&unit->mesh);
    unit->mesh.apart = true;
    if (by_default)
        unit->settings.divide_factor = fsdpc_mesh_ranks(&unit->mesh);
    return FSDPC_OK;
}

static fsdpc_status check_unit(const fsdpc_optim *optim, const unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    FSDPC_TRY(check_apart(unit));
    if (unit->mesh.replicate != optim->units[0].unit->mesh.replicate)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "units '%s' and '%s' are on different meshes, but outer steps need one",
                          optim->units[0].unit->name, unit->name);
    for (int p = 0; p < unit->layout->n_params; p++) {
        const fsdpc_place *place = &unit->layout->params[p];
        if (states->params[p].group < 0)
            continue;
        FSDPC_TRY(fsdpc_optim_check_memory(optim, states, p));
        if (place->dtype != FSDPC_F32 && place->dtype != FSDPC_F64)
            return fsdpc_fail(FSDPC_ERR_DTYPE,
                              "outer steps are of float32 and float64 parameters, not of '%s' of "
                              "unit '%s' (%s)",
                              place->name, unit->name, fsdpc_dtype_name(place->dtype));
        if (place->group >= unit->n_trained)
            return fsdpc_fail(FSDPC_ERR_STATE, "parameter '%s' of unit '%s' is frozen", place->name,
                              unit->name);
    }
    return FSDPC_OK;
}

/* Returns this rank's rows of a parameter's anchor. */
static unsigned char *anchor_of(const fsdpc_optim *optim, const unit_states *states, int param,
                                fsdpc_local_shard *local_out)
{
    const fsdpc_unit *unit = states->unit;
    *local_out = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    return fsdpc_optim_locate(optim, states, param, 0, local_out->shard_offset).data;
}

/* Returns this rank's rows of a parameter's master. */
static const unsigned char *master_of(const fsdpc_unit *unit, int param,
                                      const fsdpc_local_shard *local)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    return fsdpc_unit_masters(unit, group, &group->plan->bands[place->band], local->shard_offset);
}

static fsdpc_status set_anchors(fsdpc_optim *optim, unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    for (int p = 0; p < unit->layout->n_params; p++) {
        fsdpc_local_shard local;
        if (states->params[p].group < 0)
            continue;
        FSDPC_TRY(fsdpc_optim_create_states(optim, states, p));
        unsigned char *anchor = anchor_of(optim, states, p, &local);
        size_t element = fsdpc_dtype_bytes(unit->layout->params[p].dtype);
        if (local.numel > 0)
            memcpy(anchor, master_of(unit, p, &local), local.numel * element);
        states->params[p].steps = 1;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_outer_begin(fsdpc_optim *optim, fsdpc_codec codec)
{
    if (optim->kind != FSDPC_OPTIM_OUTER || optim->outer || optim->n_units == 0)
        return fsdpc_fail(FSDPC_ERR_STATE, "not an outer optimizer, or one that has begun");
    for (int i = 0; i < optim->n_units; i++)
        FSDPC_TRY(check_unit(optim, &optim->units[i]));
    for (int i = 0; i < optim->n_units; i++)
        FSDPC_TRY(set_anchors(optim, &optim->units[i]));
    fsdpc_optim_outer *outer = calloc(1, sizeof *outer);
    if (!outer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for outer steps");
    *outer = (fsdpc_optim_outer){
        .codec = codec, .group = -1, .comm = optim->units[0].unit->mesh.replicate};
    optim->outer = outer;
    for (int i = 0; i < optim->n_units; i++)
        FSDPC_TRY(fsdpc_unit_train_apart(optim->units[i].unit));
    return FSDPC_OK;
}

/* ---- A step ---- */

fsdpc_status fsdpc_optim_outer_choose(fsdpc_optim *optim, int group)
{
    if (!optim->outer)
        return fsdpc_fail(FSDPC_ERR_STATE, "outer steps have not begun");
    optim->outer->group = group;
    return FSDPC_OK;
}

static fsdpc_status create_buffer(const fsdpc_optim *optim)
{
    fsdpc_optim_outer *outer = optim->outer;
    size_t bytes = 0;
    for (int i = 0; i < optim->n_units; i++)
        bytes = fsdpc_max_size(bytes, optim->units[i].unit->grad_bytes);
    if (!outer->means)
        FSDPC_TRY(fsdpc_device_alloc_zeroed(optim->device, FSDPC_MEM_REDUCE, bytes,
                                            (void **)&outer->means));
    return fsdpc_buffer_create(outer->comm, bytes, &outer->buffer);
}

bool fsdpc_optim_outer_steps(const fsdpc_optim *optim, const param_states *own)
{
    return own->group >= 0 && own->group == optim->outer->group && own->steps > 0;
}

#define DEFINE_SUBTRACT(name, type)                                                                \
    static void name(type *restrict out, const type *restrict a, const type *restrict b, size_t n) \
    {                                                                                              \
        for (size_t i = 0; i < n; i++)                                                             \
            out[i] = a[i] - b[i];                                                                  \
    }
DEFINE_SUBTRACT(subtract_f32, float)
DEFINE_SUBTRACT(subtract_f64, double)

/* Writes a parameter's difference, in the dtype of its gradient, which is the master's. Adds its
 * anchor to a checksum. */
static void write_difference(const fsdpc_optim *optim, const unit_states *states, int param,
                             uint32_t *sum)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_unit_group *group = &unit->groups[unit->layout->params[param].group];
    fsdpc_local_shard local;
    const void *anchor = anchor_of(optim, states, param, &local);
    size_t element = fsdpc_dtype_bytes(group->grad_dtype);
    void *out = optim->outer->buffer->data + group->grad_offset + local.shard_offset * element;
    if (local.numel == 0)
        return;
    const void *master = master_of(unit, param, &local);
    *sum = fsdpc_crc32c(*sum, anchor, local.numel * element);
    if (group->grad_dtype == FSDPC_F64)
        subtract_f64(out, anchor, master, local.numel);
    else
        subtract_f32(out, anchor, master, local.numel);
}

static uint32_t hash_options(const fsdpc_hyper *hyper)
{
    const double options[] = {hyper->lr, hyper->momentum, hyper->nesterov};
    return fsdpc_crc32c(0, options, sizeof options);
}

static fsdpc_status say_drift(fsdpc_status status)
{
    char text[768];
    if (status != FSDPC_ERR_MISMATCH)
        return status;
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    return fsdpc_fail(status,
                      "%s; in an outer step, replicas need the same lr, momentum and nesterov and "
                      "the same anchors: set options on every rank, and load the last checkpoint",
                      text);
}

fsdpc_status fsdpc_optim_outer_meet(const fsdpc_optim *optim, const unit_states *states)
{
    fsdpc_optim_outer *outer = optim->outer;
    const fsdpc_unit *unit = states->unit;
    int64_t round = 0;
    for (int p = 0; p < unit->layout->n_params; p++)
        if (states->params[p].stepping)
            round = states->params[p].steps;
    if (round == 0)
        return FSDPC_OK;
    if (!outer->buffer)
        FSDPC_TRY(create_buffer(optim));
    FSDPC_TRY(fsdpc_buffer_idle_wait(outer->buffer, unit->name));
    /* for padding, and parameters without an anchor */
    memset(outer->buffer->data, 0, unit->grad_bytes);
    uint32_t sum = hash_options(&optim->hypers[outer->group]);
    for (int p = 0; p < unit->layout->n_params; p++)
        if (states->params[p].stepping)
            write_difference(optim, states, p, &sum);
    for (int g = 0; g < unit->n_trained; g++) {
        const fsdpc_unit_group *group = &unit->groups[g];
        const fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_ALL,
                               .unit = unit->id,
                               .codec = outer->codec,
                               .what = unit->name,
                               .dtype = group->grad_dtype,
                               .epoch = (uint64_t)round,
                               .slices = &group->whole,
                               .n_slices = 1,
                               .buffer = outer->buffer,
                               .offset = group->grad_offset,
                               .trains = sum,
                               .same_filling = g > 0,
                               .tree = unit->settings.deterministic,
                               .shard = outer->means + group->grad_offset,
                               .shard_dtype = group->grad_dtype,
                               .scale = 1.0 / outer->comm->size,
                               .round_dtype = group->grad_dtype};
        FSDPC_TRY(say_drift(fsdpc_comm_run(outer->comm, &op)));
    }
    return FSDPC_OK;
}

void *fsdpc_optim_outer_mean(const fsdpc_optim *optim, const fsdpc_unit_group *group, size_t at)
{
    return optim->outer->means + group->grad_offset + at * fsdpc_dtype_bytes(group->grad_dtype);
}

fsdpc_status fsdpc_optim_outer_run(const fsdpc_optim *optim, int group, fsdpc_step_args *args)
{
    void *anchor = args->states[0];
    size_t bytes = args->numel * fsdpc_dtype_bytes(args->param_dtype);
    memcpy(args->param, anchor, bytes);
    args->kind = FSDPC_OPTIM_SGD;
    args->hyper = optim->hypers[group];
    args->states[0] = args->states[1];
    args->states[1] = NULL;
    args->copy_gradient = false; /* momentum begins as zeros */
    FSDPC_TRY(fsdpc_flat_step(args, fsdpc_device_main(optim->device)));
    memcpy(anchor, args->param, bytes);
    return FSDPC_OK;
}
