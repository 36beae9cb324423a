/* Manages a unit's private memory, and copies single parameters into and out of it.
 *
 * Masters are allocated once, with the unit, and never move: optimizers and exported local shards
 * may keep pointers. Gradient shards are also allocated with the unit, but may move while they are
 * empty (place_grads here, and grads.h). The kernels of flat_ops loop over elements; this file only
 * determines which elements.
 */
#include "engine/unit_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/size.h"
#include "comm/coll_math.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_unit_create_array(const fsdpc_unit *unit, const fsdpc_group *group,
                                     bool offloaded, fsdpc_mem_kind kind, const char *what,
                                     fsdpc_dtype dtype, fsdpc_extent **extent_out, void **out)
{
    size_t numel = group->shard_numel;
    fsdpc_array_plan plan = fsdpc_plan_array(&unit->offload, offloaded, numel, dtype);
    if (plan.where != FSDPC_PLAN_FILE)
        return fsdpc_device_alloc_zeroed(unit->device,
                                         plan.where == FSDPC_PLAN_PINNED ? FSDPC_MEM_PINNED : kind,
                                         plan.bytes, out);
    FSDPC_TRY(fsdpc_extent_create(unit->offload.tier, what, &unit->name, kind, numel,
                                  fsdpc_dtype_bytes(dtype), unit->offload.part, extent_out));
    *out = (*extent_out)->memory;
    return FSDPC_OK;
}

void fsdpc_unit_destroy_array(const fsdpc_unit *unit, fsdpc_extent *extent, void *memory)
{
    if (extent)
        fsdpc_extent_destroy(extent);
    else
        fsdpc_device_free(unit->device, memory);
}

/* Note [spread masters]. If the modules of a frozen group read the masters directly, each host
 * needs only one copy of the masters, not two. The masters' address range covers all unsharded
 * parameters, but each rank touches only its own rows. When the parameter buffer is created, its
 * pages replace those of the masters at the same addresses (unsharded_shared.c). A write to a
 * master then copies the page first, so peers do not see the write before it is copied in. */
static bool can_spread(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return fsdpc_plan_shares_masters(group->plan, group->param_dtype, &unit->offload,
                                     unit->gather_codec) &&
           group->plan->shard_numel > 0 && unit->device->flat != fsdpc_flat_ops_null() &&
           !unit->device->remote;
}

static size_t spread_bytes(const fsdpc_unit_group *group)
{
    enum { PAGE = 4096 };
    return fsdpc_round_up(group->plan->unsharded_numel * fsdpc_dtype_bytes(group->plan->dtype),
                          PAGE);
}

static int64_t spread_counted(const fsdpc_unit_group *group)
{
    return (int64_t)fsdpc_mem_counted(group->plan->shard_numel *
                                      fsdpc_dtype_bytes(group->plan->dtype));
}

static fsdpc_status create_spread(const fsdpc_unit *unit, fsdpc_unit_group *group)
{
    void *at = mmap(NULL, spread_bytes(group), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return fsdpc_fail_errno("no address space for the frozen parameters of unit '%s'",
                                unit->name);
    group->master = at;
    group->spread = true;
    fsdpc_mem_count(unit->device->mem, FSDPC_MEM_MASTER, spread_counted(group));
    return FSDPC_OK;
}

static void destroy_master(fsdpc_unit *unit, fsdpc_unit_group *group)
{
    if (!group->spread) {
        fsdpc_unit_destroy_array(unit, group->master_extent, group->master);
        return;
    }
    munmap(group->master, spread_bytes(group));
    if (!group->in_param_buffer)
        fsdpc_mem_count(unit->device->mem, FSDPC_MEM_MASTER, -spread_counted(group));
}

fsdpc_status fsdpc_unit_join_param_buffer(fsdpc_unit *unit, fsdpc_unit_group *group,
                                          const fsdpc_param_buffer *param_buffer)
{
    size_t element = fsdpc_dtype_bytes(group->plan->dtype);
    int rank = fsdpc_unit_rank(unit);
    if (!group->spread || param_buffer->memfd == 0)
        return FSDPC_OK;
    for (size_t i = 0; i < group->plan->n_bands; i++) {
        const fsdpc_slice *band = &group->plan->bands[i];
        memcpy(param_buffer->write + group->param_buffer_offset +
                   fsdpc_slice_unsharded(band, rank, band->shard_offset) * element,
               fsdpc_unit_masters(unit, group, band, band->shard_offset), band->numel * element);
    }
    FSDPC_TRY(fsdpc_param_buffer_map_private(param_buffer, group->param_buffer_offset,
                                             spread_bytes(group), group->master));
    if (!group->in_param_buffer)
        fsdpc_mem_count(unit->device->mem, FSDPC_MEM_MASTER, -spread_counted(group));
    group->in_param_buffer = true;
    return FSDPC_OK;
}

void fsdpc_unit_leave_param_buffer(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        if (group->in_param_buffer)
            fsdpc_mem_count(unit->device->mem, FSDPC_MEM_MASTER, spread_counted(group));
        group->in_param_buffer = false;
    }
}

void fsdpc_unit_drop_copies(fsdpc_unit *unit)
{
    for (int g = unit->n_trained; g < unit->layout->n_groups; g++)
        if (unit->groups[g].in_param_buffer)
            fsdpc_param_buffer_drop_copies(unit->groups[g].master, spread_bytes(&unit->groups[g]));
}

/* Creates a gradient shard for the first group that has none, and assigns its offset in the
 * buffers. */
static fsdpc_status add_grads(fsdpc_unit *unit, const fsdpc_group_plan *sizes)
{
    fsdpc_unit_group *group = &unit->groups[unit->n_trained];
    if (!unit->grads_in_frontend) {
        FSDPC_TRY(fsdpc_unit_create_array(unit, group->plan, unit->offload.gradients,
                                          FSDPC_MEM_GRAD, "grad", group->grad_dtype,
                                          &group->grad_extent, (void **)&group->grad));
        if (group->grad_extent)
            group->grad_extent->read_only = true;
    }
    group->reduce_offset = unit->reduce_bytes;
    group->grad_offset = unit->grad_bytes;
    unit->reduce_bytes += sizes->reduce_bytes;
    unit->grad_bytes += sizes->partial_bytes;
    unit->n_trained++;
    return FSDPC_OK;
}

static fsdpc_status create_group(fsdpc_unit *unit, int g, const fsdpc_unit_options *options)
{
    fsdpc_unit_group *group = &unit->groups[g];
    group->plan = &unit->layout->groups[g];
    fsdpc_group_plan sizes;
    FSDPC_TRY(fsdpc_plan_group(group->plan, options, &sizes));
    group->param_dtype = sizes.param_dtype;
    group->reduce_dtype = sizes.reduce_dtype;
    group->grad_dtype = sizes.grad_dtype;
    group->whole = (fsdpc_slice){.numel = group->plan->shard_numel};
    group->param_buffer_offset = unit->param_buffer_bytes;
    unit->param_buffer_bytes += sizes.param_buffer_bytes;
    if (can_spread(unit, group))
        return create_spread(unit, group);
    FSDPC_TRY(fsdpc_unit_create_array(unit, group->plan, unit->offload.masters, FSDPC_MEM_MASTER,
                                      "master", group->plan->dtype, &group->master_extent,
                                      (void **)&group->master));
    return group->plan->frozen ? FSDPC_OK : add_grads(unit, &sizes);
}

/* If only one unit is gathered ahead, the network between hosts is idle from the end of one gather
 * until the next is posted. On CPU ranks, gathering a second unit costs nothing, since unsharded
 * parameters are in the parameter buffer's memory; on a GPU it takes another slot. */
static int default_prefetch(const fsdpc_unit *unit)
{
    const fsdpc_comm *shard = unit->mesh.shard;
    return shard->host_size < shard->size && !unit->device->remote ? 2 : FSDPC_PREFETCH;
}

fsdpc_status fsdpc_unit_create(const fsdpc_param_spec *specs, int n_specs,
                               const fsdpc_unit_options *options, fsdpc_unit **out)
{
    fsdpc_status status = FSDPC_OK;
    fsdpc_unit *unit = calloc(1, sizeof *unit);
    if (!unit)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for unit '%s'", options->name);
    unit->id = unit->slot = -1;
    unit->mesh = options->mesh;
    unit->device = options->device;
    unit->trace = options->trace;
    unit->settings = (fsdpc_unit_settings){.reshard_after_forward = options->reshard_after_forward,
                                           .reshard_after_backward = true,
                                           .requires_sync = true,
                                           .requires_all_reduce = true,
                                           .divide_factor = fsdpc_mesh_ranks(&unit->mesh),
                                           .prefetch = default_prefetch(unit),
                                           .n_modules = 1};
    unit->no_alias = options->no_alias;
    unit->offload = options->offload;
    unit->gather_codec = options->gather_codec;
    if (unit->offload.tier)
        fsdpc_tier_acquire(unit->offload.tier);
    unit->dirty = true;
    unit->pending_scale = 1;
    FSDPC_TRY_GOTO(status, fsdpc_plan_check_codec(unit->device, options->name, unit->gather_codec),
                   destroy);
    FSDPC_TRY_GOTO(status,
                   fsdpc_layout_create(specs, n_specs, unit->mesh.shard->size,
                                       options->band_per_param, &unit->layout),
                   destroy);
    size_t slots = n_specs > 0 ? (size_t)n_specs : 1;
    unit->name = strdup(options->name);
    unit->groups = calloc(slots, sizeof *unit->groups);
    unit->filled = calloc(slots, sizeof *unit->filled);
    unit->trainable = calloc(slots, sizeof *unit->trainable);
    unit->agreed = calloc(slots, sizeof *unit->agreed);
    unit->grads = calloc(slots, sizeof *unit->grads);
    if (!unit->name || !unit->groups || !unit->filled || !unit->trainable || !unit->agreed ||
        !unit->grads) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for unit '%s'", options->name);
        goto destroy;
    }
    for (int i = 0; i < n_specs; i++)
        unit->trainable[i] = unit->agreed[i] = !specs[i].frozen;
    for (int g = 0; g < unit->layout->n_groups; g++)
        FSDPC_TRY_GOTO(status, create_group(unit, g, options), destroy);
    if (unit->device->remote)
        FSDPC_TRY_GOTO(status,
                       fsdpc_device_alloc(unit->device, FSDPC_MEM_OTHER, sizeof(double),
                                          (void **)&unit->clip_factor),
                       destroy);
    *out = unit;
    return FSDPC_OK;

destroy:
    fsdpc_unit_destroy(unit);
    return status;
}

void fsdpc_unit_destroy(fsdpc_unit *unit)
{
    if (!unit)
        return;
    for (int g = 0; unit->groups && g < unit->layout->n_groups; g++) {
        free(unit->groups[g].sums);
        for (int stage = 0; stage < FSDPC_STAGES; stage++)
            fsdpc_device_free(unit->device, unit->groups[g].errors[stage].residual);
        if (unit->groups[g].plan)
            destroy_master(unit, &unit->groups[g]);
        if (!unit->grads_in_frontend)
            fsdpc_unit_destroy_array(unit, unit->groups[g].grad_extent, unit->groups[g].grad);
    }
    for (int i = 0; i < FSDPC_MICRO_LEVELS; i++)
        fsdpc_device_free(unit->device, unit->sums[i]);
    fsdpc_device_free(unit->device, unit->clip_factor);
    fsdpc_device_free(unit->device, unit->low_rank_state);
    fsdpc_tier_release(unit->offload.tier);
    free(unit->ahead[0]);
    free(unit->ahead[1]);
    fsdpc_layout_destroy(unit->layout);
    free(unit->groups);
    free(unit->filled);
    free(unit->trainable);
    free(unit->agreed);
    free(unit->grads);
    free(unit->name);
    free(unit);
}

const char *fsdpc_unit_name(const fsdpc_unit *unit)
{
    return unit->name;
}

fsdpc_status fsdpc_unit_rename(fsdpc_unit *unit, const char *name)
{
    char *copy = strdup(name);
    if (!copy)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the name '%s'", name);
    fsdpc_status status = fsdpc_unit_end_step(unit); /* threads of a tier may be reading the old
                                                      * one */
    if (status != FSDPC_OK) {
        free(copy);
        return status;
    }
    free(unit->name);
    unit->name = copy;
    return FSDPC_OK;
}

const fsdpc_layout *fsdpc_unit_layout(const fsdpc_unit *unit)
{
    return unit->layout;
}

const fsdpc_mesh *fsdpc_unit_mesh(const fsdpc_unit *unit)
{
    return &unit->mesh;
}

fsdpc_device *fsdpc_unit_device(const fsdpc_unit *unit)
{
    return unit->device;
}

fsdpc_offload fsdpc_unit_offload(const fsdpc_unit *unit)
{
    return unit->offload;
}

fsdpc_codec fsdpc_unit_gather_codec(const fsdpc_unit *unit)
{
    return unit->gather_codec;
}

size_t fsdpc_unit_gather_bytes(const fsdpc_unit *unit)
{
    size_t bytes = 0;
    for (int g = 0; g < unit->layout->n_groups; g++)
        bytes +=
            fsdpc_coll_gather_bytes(unit->gather_codec, unit->groups[g].param_dtype,
                                    unit->groups[g].plan->bands, unit->groups[g].plan->n_bands);
    return bytes;
}

fsdpc_root *fsdpc_unit_root(const fsdpc_unit *unit)
{
    return unit->root;
}

fsdpc_unit_state fsdpc_unit_where(const fsdpc_unit *unit)
{
    return unit->state;
}

bool fsdpc_unit_in_backward(const fsdpc_unit *unit)
{
    return unit->in_backward;
}

/* ---- settings ---- */

const fsdpc_unit_settings *fsdpc_unit_settings_of(const fsdpc_unit *unit)
{
    return &unit->settings;
}

fsdpc_status fsdpc_unit_configure(fsdpc_unit *unit, const fsdpc_unit_settings *settings)
{
    const fsdpc_unit_settings *now = &unit->settings;
    if (unit->root && settings->rank_dependent != now->rank_dependent)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "whether unit '%s' may run on some ranks only is said before its first "
                          "forward",
                          unit->name);
    if (unit->root &&
        (settings->n_modules != now->n_modules || settings->keep_grads != now->keep_grads ||
         settings->deterministic != now->deterministic ||
         settings->reduce_codec != now->reduce_codec ||
         !fsdpc_low_rank_same(&settings->low_rank, &now->low_rank)))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "unit '%s' has a root: its modules, buffers and sums are "
                          "set before its first forward",
                          unit->name);
    if (unit->backward_steps && settings->deterministic)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "deterministic mode of unit '%s', which is stepped inside backward",
                          unit->name);
    FSDPC_TRY(fsdpc_plan_check_codec(unit->device, unit->name, settings->reduce_codec));
    FSDPC_TRY(fsdpc_low_rank_check(&settings->low_rank, unit->layout, &unit->mesh, unit->name,
                                   settings->deterministic || settings->error_feedback ||
                                       unit->backward_steps));
    unit->settings = *settings;
    return FSDPC_OK;
}

/* Buffers that are now too small are replaced when they are taken (fill.c). */
static fsdpc_status train_frozen(fsdpc_unit *unit, int param)
{
    const char *name = unit->layout->params[param].name;
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    if (unit->backward_steps)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "parameter '%s' of unit '%s' was frozen when step_in_backward() began: "
                          "call step_in_backward(False), and begin it after unfreezing",
                          name, unit->name);
    if (unit->grad_live || unit->buffer || unit->partial_live || unit->micro.n > 0 ||
        unit->reduction != FSDPC_REDUCTION_NONE)
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "parameter '%s' of unit '%s' was frozen when the unit was made, and needs "
            "memory for gradients now, which the unit cannot make while it holds "
            "gradients: call zero_grad() between the step and this forward",
            name, unit->name);
    size_t bytes = 0;
    if (!fsdpc_dtype_is_float(unit->layout->params[param].dtype))
        return fsdpc_fail(FSDPC_ERR_DTYPE, "parameter '%s' of unit '%s' is %s, and stays frozen",
                          name, unit->name, fsdpc_dtype_name(unit->layout->params[param].dtype));
    while (unit->n_trained < unit->layout->n_groups &&
           fsdpc_dtype_is_float(unit->groups[unit->n_trained].plan->dtype)) {
        const fsdpc_unit_group *group = &unit->groups[unit->n_trained];
        fsdpc_group_plan sizes;
        FSDPC_TRY(fsdpc_plan_group(group->plan,
                                   &(fsdpc_unit_options){.cast_params = true,
                                                         .param_dtype = group->param_dtype,
                                                         .cast_reduce = true,
                                                         .reduce_dtype = group->reduce_dtype},
                                   &sizes));
        FSDPC_TRY(add_grads(unit, &sizes));
        bytes += sizes.partial_bytes;
    }
    for (int i = 0; i < FSDPC_MICRO_LEVELS; i++) {
        fsdpc_device_free(unit->device, unit->sums[i]); /* sized for a smaller unit */
        unit->sums[i] = NULL;
    }
    if (unit->mesh.shard->world_rank == 0)
        FSDPC_NOTE(&unit->mesh.shard->log,
                   "parameter '%s' of unit '%s' is trained from now on: %zu bytes for gradients of "
                   "what was frozen in this unit",
                   name, unit->name, bytes);
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_set_trainable(fsdpc_unit *unit, int param, bool trainable)
{
    if (trainable && unit->layout->params[param].group >= unit->n_trained)
        FSDPC_TRY(train_frozen(unit, param));
    unit->trainable[param] = trainable;
    return FSDPC_OK;
}

int fsdpc_unit_trained_groups(const fsdpc_unit *unit)
{
    return unit->n_trained;
}

/* ---- memory ---- */

fsdpc_unit_flat fsdpc_unit_flat_of(const fsdpc_unit *unit, int group)
{
    const fsdpc_unit_group *g = &unit->groups[group];
    return (fsdpc_unit_flat){.dtype = g->plan->dtype,
                             .param_dtype = g->param_dtype,
                             .reduce_dtype = g->reduce_dtype,
                             .grad_dtype = g->grad_dtype,
                             .shard_numel = g->plan->shard_numel,
                             .unsharded_numel = g->plan->unsharded_numel,
                             .master = g->master,
                             .master_numel =
                                 g->spread ? g->plan->unsharded_numel : g->plan->shard_numel,
                             .grad = g->grad,
                             .unsharded = g->unsharded};
}

fsdpc_unit_flat fsdpc_unit_flat_with(const fsdpc_unit *unit, int param)
{
    return fsdpc_unit_flat_of(unit, unit->layout->params[param].group);
}

/* Invalidates the checksums of the masters that a pass keeps. */
static void forget_masters(fsdpc_unit *unit)
{
    for (int g = 0; g < unit->layout->n_groups; g++)
        if (unit->groups[g].master_extent)
            fsdpc_extent_forget(unit->groups[g].master_extent);
}

fsdpc_status fsdpc_unit_mark_written(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    unit->dirty = true;
    forget_masters(unit);
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_mark_shared(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    unit->foreign = true;
    forget_masters(unit);
    return FSDPC_OK;
}

void fsdpc_unit_export(fsdpc_unit *unit, int change)
{
    /* relaxed: a step reads this on the thread that hands tensors out; missing one that is being
     * released is harmless */
    atomic_fetch_add_explicit(&unit->exports, change, memory_order_relaxed);
}

fsdpc_status fsdpc_unit_check_master(const fsdpc_unit *unit, int param)
{
    const fsdpc_unit_group *group = &unit->groups[unit->layout->params[param].group];
    fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    FSDPC_TRY(fsdpc_unit_end_step(unit));
    if (!group->master_extent || local.numel == 0 || unit->foreign)
        return FSDPC_OK;
    return fsdpc_extent_check(group->master_extent, local.shard_offset, local.numel);
}

void *fsdpc_unit_master(const fsdpc_unit *unit, int param, fsdpc_local_shard *local_out)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    *local_out = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    return fsdpc_unit_masters(unit, group, &group->plan->bands[place->band],
                              local_out->shard_offset);
}

size_t fsdpc_unit_master_offset(const fsdpc_unit *unit, int param)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    return group->spread ? place->unsharded_offset + local.first : local.shard_offset;
}

void *fsdpc_unit_grad_rows(const fsdpc_unit *unit, int param, fsdpc_local_shard *local_out)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    *local_out = fsdpc_layout_local_shard(unit->layout, param, fsdpc_unit_rank(unit));
    if (place->group >= unit->n_trained)
        return NULL;
    return group->grad + local_out->shard_offset * fsdpc_dtype_bytes(group->grad_dtype);
}

fsdpc_status fsdpc_unit_alloc_grad(const fsdpc_unit *unit, int group, void **out)
{
    const fsdpc_unit_group *g = &unit->groups[group];
    *out = NULL;
    return fsdpc_device_alloc_zeroed(unit->device, FSDPC_MEM_GRAD,
                                     g->plan->shard_numel * fsdpc_dtype_bytes(g->grad_dtype), out);
}

void fsdpc_unit_place_grads(fsdpc_unit *unit, void *const *groups)
{
    for (int g = 0; g < unit->n_trained; g++) {
        if (!unit->grads_in_frontend)
            fsdpc_unit_destroy_array(unit, unit->groups[g].grad_extent, unit->groups[g].grad);
        unit->groups[g].grad = groups ? groups[g] : NULL;
    }
    unit->grads_in_frontend = true;
    unit->grads_away = !groups;
}

void fsdpc_unit_set_frontend_memory(fsdpc_unit *unit, const fsdpc_frontend_memory *room)
{
    unit->frontend_memory = room ? *room : (fsdpc_frontend_memory){0};
}

void *fsdpc_unit_unsharded(const fsdpc_unit *unit, int param)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    if (!group->unsharded)
        return NULL;
    return group->unsharded + place->unsharded_offset * fsdpc_dtype_bytes(group->param_dtype);
}

fsdpc_status fsdpc_unit_write(fsdpc_unit *unit, int param, const void *value, fsdpc_dtype dtype)
{
    const fsdpc_place *place = &unit->layout->params[param];
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_local_shard local;
    FSDPC_TRY(fsdpc_unit_mark_written(unit));
    void *master = fsdpc_unit_master(unit, param, &local);
    const char *from = (const char *)value + local.first * fsdpc_dtype_bytes(dtype);
    return fsdpc_flat_cast(master, place->dtype, from, dtype, local.numel, main);
}

fsdpc_status fsdpc_unit_init_param(fsdpc_unit *unit, int param, int kind, double a, double b,
                                   uint64_t seed, uint64_t stream)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_local_shard local;
    FSDPC_TRY(fsdpc_unit_mark_written(unit));
    void *master = fsdpc_unit_master(unit, param, &local);
    fsdpc_init_args args = {.dst = master,
                            .dtype = unit->layout->params[param].dtype,
                            .numel = local.numel,
                            .kind = (fsdpc_init_kind)kind,
                            .a = a,
                            .b = b,
                            .seed = seed,
                            .stream = stream,
                            .first = local.first};
    return fsdpc_flat_init(&args, main);
}

fsdpc_status fsdpc_unit_check_unsharded(fsdpc_unit *unit, int param)
{
    if (__builtin_expect(unit->state == FSDPC_UNIT_UNSHARDED, 1))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "parameter '%s' of unit '%s' is sharded here: its unsharded value exists "
                      "only inside the unit's forward and backward; use .local, full_tensor() or "
                      "unshard()",
                      unit->layout->params[param].name, unit->name);
}
