/* Plans each unit's own arrays first, then the memory that units share: unsharded parameters,
 * reduce buffers, and memory for sums in transit.
 */
#include "engine/plan_root.h"

#include <stdlib.h>

#include "comm/coll_math.h"
#include "comm/comm_hosts.h"
#include "engine/agree.h"
#include "engine/cover.h"
#include "engine/factors.h"
#include "engine/micro.h"
#include "engine/slots.h"
#include "ops/matrix_rules.h"

/* The stages of a reduction: the first reads a reduce buffer, the second a partial. */
enum { FIRST, SECOND, N_STAGES };

/* The space that a unit needs in the memory shared by units. */
typedef struct unit_sizes {
    size_t param_buffer, slices, buffer[N_STAGES];   /* bytes; a reduce buffer and a partial */
    size_t codes;                                    /* bytes that a gather with a codec needs */
    int n_trained;                                   /* flat groups; at most one for each dtype */
    fsdpc_dtype dtypes[N_STAGES][FSDPC_DTYPE_COUNT]; /* of their sums */
    size_t n_bands[FSDPC_DTYPE_COUNT];
    bool fills_shard; /* it needs no buffer: kernels fill its gradient shard */
} unit_sizes;

typedef struct planner {
    const fsdpc_plan_unit *units;
    const fsdpc_root_options *options;
    int n;
    unit_sizes *sizes;
    size_t file_ring, host_ring; /* bytes of the ring, and of one chunk of it */
    size_t contribution[N_STAGES];
    size_t matrix, matrix_work; /* elements of the largest matrix, and of the work on one */
    fsdpc_factored_work factored;
    fsdpc_plan_row_fn take;
    void *arg;
} planner;

static fsdpc_status emit(const planner *p, const char *name, fsdpc_mem_kind kind, size_t bytes,
                         size_t count, fsdpc_plan_kind where)
{
    const fsdpc_plan_row row = {name, kind, bytes, count, where};
    return bytes == 0 || count == 0 ? FSDPC_OK : p->take(p->arg, &row);
}

/* ---- The arrays of a unit ---- */

static fsdpc_status plan_array(planner *p, const char *name, fsdpc_mem_kind kind, int count,
                               const fsdpc_array_plan *array)
{
    size_t n = (size_t)count;
    if (n > 0)
        p->file_ring = fsdpc_max_size(p->file_ring, array->ring_bytes);
    FSDPC_TRY(emit(p, name, kind, array->memory_bytes, n, FSDPC_PLAN_MEMORY));
    FSDPC_TRY(emit(p, name, kind, array->pinned_bytes, n, FSDPC_PLAN_PINNED));
    return emit(p, name, kind, array->file_bytes, n, FSDPC_PLAN_FILE);
}

/* See Note [spread masters] in unit.c; it applies only if ranks share a parameter buffer. */
static bool shares_masters(const planner *p, const fsdpc_plan_unit *unit, const fsdpc_group *group,
                           const fsdpc_group_plan *plan)
{
    return !p->options->single && !p->options->remote &&
           fsdpc_plan_shares_masters(group, plan->param_dtype, &unit->options.offload,
                                     unit->options.gather_codec);
}

static void plan_matrix(planner *p, const fsdpc_place *place)
{
    const size_t *shape = place->shape + (place->ndim == 3);
    const fsdpc_matrix_rule *rule = fsdpc_matrix_rule_of(FSDPC_OPTIM_MUON);
    p->matrix = fsdpc_max_size(p->matrix, shape[0] * shape[1]);
    p->matrix_work = fsdpc_max_size(p->matrix_work, rule->work(shape[0], shape[1]));
}

/* Plans the means by row and by column of a group's parameters. */
static fsdpc_status plan_factors(planner *p, const fsdpc_plan_unit *unit,
                                 const fsdpc_layout *layout, int g)
{
    for (int i = 0; i < layout->n_params; i++) {
        const fsdpc_place *place = &layout->params[i];
        if (place->group != g || !unit->specs[i].factored || place->numel == 0)
            continue;
        FSDPC_TRY(fsdpc_factors_check(place));
        fsdpc_local_shard most = fsdpc_factors_most(layout, i);
        fsdpc_factored_work_add(&p->factored, place->ndim, place->shape, &most);
        size_t bytes = fsdpc_mem_counted(fsdpc_factors_numel(layout, i) * sizeof(float));
        FSDPC_TRY(emit(p, "means", FSDPC_MEM_STATE, bytes, 1, FSDPC_PLAN_MEMORY));
    }
    return FSDPC_OK;
}

/* Returns the number of states of a parameter that have as many elements. */
static int n_states_of(const planner *p, const fsdpc_param_spec *spec)
{
    if (spec->factored)
        return spec->ndim < 2;
    return spec->matrix ? 1 : p->options->n_states;
}

static fsdpc_status plan_codes(planner *p, const fsdpc_offload *offload, size_t numel, size_t side)
{
    int n_states = p->options->n_states;
    fsdpc_array_plan array = fsdpc_plan_array(offload, offload->states, numel, FSDPC_U8);
    FSDPC_TRY(plan_array(p, "states", FSDPC_MEM_STATE, n_states, &array));
    array = fsdpc_plan_array(offload, offload->states && offload->host, side, FSDPC_F32);
    return plan_array(p, "maxima of states", FSDPC_MEM_STATE, n_states, &array);
}

/* Plans the states of a group; each has the bands of the parameters with it. */
static fsdpc_status plan_states(planner *p, const fsdpc_plan_unit *unit, const fsdpc_layout *layout,
                                int g)
{
    const fsdpc_offload *offload = &unit->options.offload;
    const fsdpc_state_format *format = &p->options->format;
    fsdpc_dtype dtype = fsdpc_state_plain_dtype(format, layout->groups[g].dtype);
    size_t side = fsdpc_state_side(format, layout, g, 0, NULL);
    if (side > 0)
        return plan_codes(p, offload, layout->groups[g].shard_numel, side);
    bool *wanted = calloc((size_t)layout->n_params, sizeof *wanted);
    size_t *skips = calloc((size_t)layout->n_params, sizeof *skips);
    fsdpc_status status = wanted && skips ? FSDPC_OK
                                          : fsdpc_fail(FSDPC_ERR_NOMEM,
                                                       "no memory for a plan of "
                                                       "%d parameters",
                                                       layout->n_params);
    bool any = true;
    for (int s = 0; status == FSDPC_OK && any; s++) {
        any = false;
        for (int i = 0; i < layout->n_params; i++) {
            bool ours = layout->params[i].group == g;
            bool has = ours && s < n_states_of(p, &unit->specs[i]);
            any |= has;
            wanted[i] = has || offload->states;
            if (ours && unit->specs[i].matrix)
                plan_matrix(p, &layout->params[i]);
        }
        fsdpc_array_plan array = fsdpc_plan_array(offload, offload->states,
                                                  fsdpc_cover(layout, g, wanted, skips), dtype);
        status = plan_array(p, "states", FSDPC_MEM_STATE, any, &array);
    }
    free(wanted);
    free(skips);
    return status;
}

/* Plans what reductions leave out, which the next ones add (codec_error.h). */
static fsdpc_status plan_residuals(planner *p, const fsdpc_plan_unit *unit, size_t numel,
                                   const fsdpc_dtype *dtypes)
{
    const fsdpc_root_options *options = p->options;
    const fsdpc_unit_settings *settings = &unit->settings;
    bool partials = fsdpc_plan_has_partials(options->replicate, options->shard);
    if (!settings->error_feedback || settings->reduce_codec == FSDPC_CODEC_EXACT)
        return FSDPC_OK;
    for (int stage = 0; stage < (partials ? N_STAGES : 1); stage++) {
        bool over_replicas = stage == SECOND || (options->shard == 1 && options->replicate > 1);
        fsdpc_plan_hosts group = over_replicas ? options->replicas : options->shards;
        if (dtypes[FIRST] == FSDPC_F64 || dtypes[SECOND] == FSDPC_F64)
            continue;
        size_t kept = fsdpc_comm_hosts_residual_numel(over_replicas ? FSDPC_COLL_REDUCE_ALL
                                                                    : FSDPC_COLL_REDUCE_SCATTER,
                                                      numel, group.hosts, group.local_size);
        if (kept > 0)
            FSDPC_TRY(emit(p, "residuals", FSDPC_MEM_STATE, fsdpc_mem_counted(kept * sizeof(float)),
                           1, FSDPC_PLAN_MEMORY));
    }
    return FSDPC_OK;
}

static fsdpc_status plan_group(planner *p, const fsdpc_plan_unit *unit, const fsdpc_layout *layout,
                               int g, unit_sizes *sizes)
{
    const fsdpc_group *group = &layout->groups[g];
    const fsdpc_offload *offload = &unit->options.offload;
    size_t numel = group->shard_numel;
    fsdpc_group_plan plan;
    FSDPC_TRY(fsdpc_plan_group(group, &unit->options, &plan));
    sizes->param_buffer += plan.param_buffer_bytes;
    sizes->slices += fsdpc_plan_slice_bytes(group, plan.param_dtype);
    fsdpc_array_plan array = fsdpc_plan_array(offload, offload->masters, numel, group->dtype);
    if (!shares_masters(p, unit, group, &plan))
        FSDPC_TRY(plan_array(p, "masters", FSDPC_MEM_MASTER, 1, &array));
    if (unit->options.gather_codec != FSDPC_CODEC_EXACT) {
        size_t peers = (size_t)p->options->shards.hosts - 1;
        size_t bytes = fsdpc_coll_gather_bytes(unit->options.gather_codec, plan.param_dtype,
                                               group->bands, group->n_bands);
        if (peers > 0)
            sizes->codes += fsdpc_mem_counted(bytes) + fsdpc_mem_counted(peers * bytes);
    }
    if (group->frozen)
        return FSDPC_OK;
    array = fsdpc_plan_array(offload, offload->gradients, numel, plan.grad_dtype);
    FSDPC_TRY(plan_array(p, "gradients", FSDPC_MEM_GRAD, 1, &array));
    FSDPC_TRY(plan_states(p, unit, layout, g));
    FSDPC_TRY(plan_factors(p, unit, layout, g));
    if (fsdpc_offload_steps_on_host(offload))
        p->host_ring =
            fsdpc_max_size(p->host_ring, fsdpc_plan_host_bytes(offload, numel,
                                                               fsdpc_dtype_bytes(plan.grad_dtype)));
    const fsdpc_dtype dtypes[N_STAGES] = {plan.reduce_dtype, plan.grad_dtype};
    FSDPC_TRY(plan_residuals(p, unit, numel, dtypes));
    for (int stage = 0; stage < N_STAGES; stage++) {
        size_t sent = fsdpc_coll_contribution_bytes(numel, dtypes[stage]);
        p->contribution[stage] = fsdpc_max_size(p->contribution[stage], sent);
        sizes->dtypes[stage][sizes->n_trained] = dtypes[stage];
    }
    sizes->n_bands[sizes->n_trained] = group->n_bands;
    sizes->buffer[FIRST] += plan.reduce_bytes;
    sizes->buffer[SECOND] += plan.partial_bytes;
    sizes->n_trained++;
    return FSDPC_OK;
}

/* Plans what replicas need to sum a unit's matrices in low rank: its state, then a buffer for each
 * of two operations. */
static fsdpc_status plan_low_rank(const planner *p, const fsdpc_plan_unit *unit,
                                  const fsdpc_layout *layout)
{
    const fsdpc_low_rank_sizes sizes = fsdpc_low_rank_sizes_of(layout, &unit->settings.low_rank);
    const fsdpc_plan_hosts *hosts = &p->options->replicas;
    if (p->options->replicate == 1 || sizes.values == 0)
        return FSDPC_OK;
    FSDPC_TRY(emit(p, "matrices of replicas", FSDPC_MEM_REDUCE,
                   fsdpc_mem_counted(fsdpc_low_rank_state_bytes(&sizes)), 1, FSDPC_PLAN_MEMORY));
    const size_t numels[] = {sizes.p, sizes.q};
    for (int i = 0; i < 2; i++) {
        size_t bytes = fsdpc_mem_counted(numels[i] * sizeof(float));
        FSDPC_TRY(emit(p, "factors of matrices", FSDPC_MEM_REDUCE, bytes, 1, FSDPC_PLAN_MEMORY));
        if (hosts->hosts > 1)
            FSDPC_TRY(emit(p, "sums in transit", FSDPC_MEM_REDUCE,
                           fsdpc_comm_hosts_staging_bytes(FSDPC_COLL_REDUCE_ALL, FSDPC_F32,
                                                          FSDPC_CODEC_EXACT, bytes, 1, hosts->hosts,
                                                          hosts->local_size),
                           1, FSDPC_PLAN_MEMORY));
    }
    return FSDPC_OK;
}

static fsdpc_status plan_unit(planner *p, const fsdpc_plan_unit *unit, unit_sizes *sizes)
{
    fsdpc_layout *layout = NULL;
    FSDPC_TRY(fsdpc_layout_create(unit->specs, unit->n_specs, p->options->shard,
                                  unit->options.band_per_param, &layout));
    fsdpc_status status = FSDPC_OK;
    for (int g = 0; status == FSDPC_OK && g < layout->n_groups; g++)
        status = plan_group(p, unit, layout, g, sizes);
    if (status == FSDPC_OK)
        status = plan_low_rank(p, unit, layout);
    fsdpc_layout_destroy(layout);
    sizes->fills_shard =
        p->options->single && sizes->n_trained > 0 &&
        fsdpc_plan_fits_shard(sizes->n_trained, sizes->dtypes[FIRST][0], sizes->dtypes[SECOND][0],
                              &unit->options.offload, p->options->micro_steps > 0);
    return status;
}

/* ---- Unsharded parameters ---- */

static fsdpc_status plan_param_buffer(const planner *p)
{
    size_t bytes = 0;
    bool in_file = false;
    for (int i = 0; i < p->n; i++) {
        const fsdpc_offload *offload = &p->units[i].options.offload;
        bytes += p->sizes[i].param_buffer;
        in_file |= offload->params && !offload->host && !p->options->remote;
    }
    return emit(p, "parameter buffer", FSDPC_MEM_UNSHARDED, bytes, 1,
                in_file ? FSDPC_PLAN_FILE : FSDPC_PLAN_MEMORY);
}

static fsdpc_status plan_slots(const planner *p, fsdpc_slot_want *wants)
{
    for (int i = 0; i < p->n; i++) {
        const fsdpc_plan_unit *unit = &p->units[i];
        const fsdpc_offload *offload = &unit->options.offload;
        wants[i] = (fsdpc_slot_want){
            .bytes = p->sizes[i].param_buffer,
            .unshared = fsdpc_unit_owns_unsharded(&unit->settings, unit->encloses)};
        FSDPC_TRY(emit(p, "slices", FSDPC_MEM_UNSHARDED, p->sizes[i].slices, 1,
                       offload->params && offload->host ? FSDPC_PLAN_PINNED : FSDPC_PLAN_MEMORY));
    }
    fsdpc_slots_assign(wants, p->n, p->options->prefetch + 1, p->options->granule);
    for (int i = 0; i < p->n; i++)
        FSDPC_TRY(emit(p, wants[i].slot < 0 ? "unsharded parameters" : "memory slots",
                       FSDPC_MEM_UNSHARDED, wants[i].block_bytes, (size_t)wants[i].n_blocks,
                       FSDPC_PLAN_MEMORY));
    return FSDPC_OK;
}

static fsdpc_status plan_unsharded(const planner *p)
{
    if (!p->options->remote || p->options->shard == 1)
        return plan_param_buffer(p);
    fsdpc_slot_want *wants = calloc((size_t)p->n + 1, sizeof *wants);
    if (!wants)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a plan of %d units", p->n);
    fsdpc_status status = plan_slots(p, wants);
    free(wants);
    return status;
}

/* Plans codes in transit: of the largest units, as many as may be gathered at a time. */
static fsdpc_status plan_codes_in_transit(const planner *p)
{
    enum { AHEAD = 2 }; /* on CPUs; see default_prefetch in unit.c */
    int left = (p->options->prefetch > AHEAD ? p->options->prefetch : AHEAD) + 1;
    bool *taken = calloc((size_t)p->n + 1, sizeof *taken);
    size_t bytes = 0;
    if (!taken)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a plan of %d units", p->n);
    for (; left > 0; left--) {
        int most = -1;
        for (int i = 0; i < p->n; i++)
            if (!taken[i] && (most < 0 || p->sizes[i].codes > p->sizes[most].codes))
                most = i;
        if (most < 0)
            break;
        taken[most] = true;
        bytes += p->sizes[most].codes;
    }
    free(taken);
    return emit(p, "codes in transit", FSDPC_MEM_STAGING, bytes, 1, FSDPC_PLAN_MEMORY);
}

/* ---- Reduce buffers ---- */

static bool owns_buffer(const planner *p, int unit)
{
    return fsdpc_unit_owns_buffer(&p->units[unit].settings, p->units[unit].encloses);
}

/* Returns how many bytes a flat group's sums occupy in transit between hosts, if they are in a
 * buffer of `buffer_bytes`. Each group in a buffer has its own reduction, which needs separate
 * memory. */
static size_t transit_bytes(const planner *p, int stage, int unit, int g, size_t buffer_bytes)
{
    const unit_sizes *sizes = &p->sizes[unit];
    const bool apart = p->options->apart;
    bool over_replicas = stage == SECOND || (p->options->shard == 1 && !apart);
    fsdpc_plan_hosts group = over_replicas ? p->options->replicas : p->options->shards;
    if (group.hosts == 1 || g >= sizes->n_trained || sizes->buffer[FIRST] == 0)
        return 0;
    return fsdpc_comm_hosts_staging_bytes(
        over_replicas ? FSDPC_COLL_REDUCE_ALL : FSDPC_COLL_REDUCE_SCATTER, sizes->dtypes[stage][g],
        apart && stage == SECOND ? p->options->outer_codec : p->units[unit].settings.reduce_codec,
        buffer_bytes, stage == FIRST ? sizes->n_bands[g] : 1, group.hosts, group.local_size);
}

static fsdpc_status emit_buffers(const planner *p, const char *name, size_t bytes, size_t count,
                                 size_t transit)
{
    FSDPC_TRY(emit(p, name, FSDPC_MEM_REDUCE, bytes, count, FSDPC_PLAN_MEMORY));
    return emit(p, "sums in transit", FSDPC_MEM_REDUCE, transit, count, FSDPC_PLAN_MEMORY);
}

/* Plans what fill.c creates. A single rank creates a buffer when it first fills it. */
static fsdpc_status plan_stage(const planner *p, int stage)
{
    fsdpc_pool_plan pool = {0};
    size_t n_created = 0, transit = 0;
    for (int i = 0; i < p->n; i++) {
        const unit_sizes *sizes = &p->sizes[i];
        size_t bytes = sizes->buffer[stage], own = 0;
        if (sizes->buffer[FIRST] == 0)
            continue;
        if (!owns_buffer(p, i)) {
            fsdpc_pool_plan_add(&pool, sizes->buffer[FIRST], sizes->buffer[SECOND]);
            n_created += !sizes->fills_shard && n_created < FSDPC_POOLED_BUFFERS;
        } else if (!sizes->fills_shard) {
            for (int g = 0; g < sizes->n_trained; g++)
                own += transit_bytes(p, stage, i, g, bytes);
            FSDPC_TRY(
                emit_buffers(p, stage == FIRST ? "own buffers" : "own partials", bytes, 1, own));
        }
    }
    size_t bytes = stage == FIRST ? pool.bytes : pool.partial_bytes;
    for (int g = 0; g < FSDPC_DTYPE_COUNT; g++) {
        size_t most = 0;
        for (int i = 0; i < p->n; i++)
            if (!owns_buffer(p, i))
                most = fsdpc_max_size(most, transit_bytes(p, stage, i, g, bytes));
        transit += most;
    }
    return emit_buffers(p, stage == FIRST ? "pooled buffers" : "pooled partials", bytes, n_created,
                        transit);
}

static fsdpc_status plan_buffers(const planner *p)
{
    const fsdpc_root_options *options = p->options;
    const bool receives = options->remote && options->micro_steps > 0;
    const int ranks[N_STAGES] = {options->shard > 1 ? options->shard : options->replicate,
                                 options->replicate};
    int n = fsdpc_plan_has_partials(options->replicate, options->shard) ? N_STAGES : 1;
    for (int stage = 0; stage < n; stage++) {
        FSDPC_TRY(plan_stage(p, stage));
        FSDPC_TRY(emit(p, "contributions", FSDPC_MEM_REDUCE, p->contribution[stage],
                       receives ? (size_t)(ranks[stage] - 1) : 0, FSDPC_PLAN_MEMORY));
    }
    return FSDPC_OK;
}

/* Plans the buffer and the means of outer steps, which all units use in turn. */
static fsdpc_status plan_outer(const planner *p)
{
    size_t bytes = 0, transit = 0;
    for (int i = 0; i < p->n; i++)
        bytes = fsdpc_max_size(bytes, p->sizes[i].buffer[SECOND]);
    for (int g = 0; g < FSDPC_DTYPE_COUNT; g++) {
        size_t most = 0;
        for (int i = 0; i < p->n; i++)
            most = fsdpc_max_size(most, transit_bytes(p, SECOND, i, g, bytes));
        transit += most;
    }
    if (!p->options->apart)
        return FSDPC_OK;
    FSDPC_TRY(emit(p, "means of outer steps", FSDPC_MEM_REDUCE, fsdpc_mem_counted(bytes), 1,
                   FSDPC_PLAN_MEMORY));
    return emit_buffers(p, "buffer of outer steps", bytes, 1, transit);
}

/* Plans the sums of micro-steps except the first sum, which is in the gradient shard. */
static fsdpc_status plan_sums(const planner *p)
{
    const fsdpc_root_options *options = p->options;
    bool over_replicas = options->replicate > 1;
    int hosts = over_replicas ? options->replicas.hosts : options->shards.hosts;
    int leaves =
        fsdpc_micro_leaves(over_replicas ? options->replicate : options->shard,
                           over_replicas ? options->shard : 1, options->remote || hosts == 1);
    int more = fsdpc_micro_most(leaves, options->micro_steps) - 1;
    for (int i = 0; i < p->n; i++)
        FSDPC_TRY(emit(p, "sums of micro-steps", FSDPC_MEM_GRAD, p->sizes[i].buffer[SECOND],
                       (size_t)more, FSDPC_PLAN_MEMORY));
    return FSDPC_OK;
}

/* ---- Messages ---- */

static fsdpc_status plan_messages(const planner *p)
{
    const fsdpc_hosts_messages messages = fsdpc_comm_hosts_messages();
    const fsdpc_plan_kind where = FSDPC_PLAN_MESSAGE;
    size_t n_params = 0;
    for (int i = 0; i < p->n; i++)
        n_params += (size_t)p->units[i].n_specs;
    FSDPC_TRY(emit(p, "note of an epoch", FSDPC_MEM_OTHER, messages.note, 1, where));
    FSDPC_TRY(emit(p, "header", FSDPC_MEM_OTHER, messages.header, 1, where));
    FSDPC_TRY(emit(p, "agreement", FSDPC_MEM_OTHER, fsdpc_agree_bytes(n_params, false), 1, where));
    return emit(p, "agreement of replicas", FSDPC_MEM_OTHER, fsdpc_agree_bytes(n_params, true), 1,
                where);
}

fsdpc_status fsdpc_plan_root(const fsdpc_plan_unit *units, int n_units,
                             const fsdpc_root_options *options, fsdpc_plan_row_fn take, void *arg)
{
    planner p = {.units = units, .options = options, .n = n_units, .take = take, .arg = arg};
    fsdpc_status status = FSDPC_OK;
    p.sizes = calloc((size_t)n_units + 1, sizeof *p.sizes);
    if (!p.sizes)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a plan of %d units", n_units);
    for (int i = 0; status == FSDPC_OK && i < n_units; i++)
        status = plan_unit(&p, &units[i], &p.sizes[i]);
    fsdpc_status (*const parts[])(const planner *) = {
        plan_unsharded, plan_codes_in_transit, plan_buffers, plan_outer, plan_sums, plan_messages};
    for (size_t i = 0; status == FSDPC_OK && i < sizeof parts / sizeof *parts; i++)
        status = parts[i](&p);
    if (status == FSDPC_OK)
        status = emit(&p, "ring", FSDPC_MEM_STAGING, p.file_ring, 1, FSDPC_PLAN_MEMORY);
    if (status == FSDPC_OK)
        status =
            emit(&p, "ring", FSDPC_MEM_STAGING, p.host_ring, FSDPC_HOST_CHUNKS, FSDPC_PLAN_PINNED);
    if (status == FSDPC_OK)
        status = emit(&p, "work on matrices", FSDPC_MEM_STAGING,
                      fsdpc_mem_counted((p.matrix + p.matrix_work) * sizeof(float)), 1,
                      FSDPC_PLAN_MEMORY);
    if (status == FSDPC_OK)
        status =
            emit(&p, "work of Adafactor", FSDPC_MEM_STAGING,
                 fsdpc_mem_counted(fsdpc_factored_work_bytes(&p.factored)), 1, FSDPC_PLAN_MEMORY);
    free(p.sizes);
    return status;
}
