/* The engine over NCCL with few slots for many units: the same bits as with memory for each, and
 * the memory that was promised, all of it known to NCCL.
 *
 * Ranks are threads with a GPU each; on the emulated device all have the same, and NCCL is the
 * fake. A model is a root and blocks of one size. Forward adds each unit's weights into an
 * activation, backward makes gradients of weights and activation, AdamW steps: whoever reads
 * another unit's weights, or old ones, ends with other numbers.
 */
#include "base/size.h"
#include "engine/unsharded.h"
#include "engine/grads.h"
#include "engine/optim.h"
#include "engine/root_internal.h"
#include "engine/sched.h"
#include "nccl_rig.h"

#if defined(FSDPC_EMU)
#include "emu_driver.h"
#endif

enum { BLOCKS = 5, UNITS = BLOCKS + 1, STEPS = 4, COLUMNS = 128, SLOTS = 2 };

/* How units are used. */
typedef enum script { IN_TURN, ONE_IN_ANOTHER, HELD, SCRIPTS } script;

typedef enum mode { SHARED, NO_ALIAS, NO_WINDOWS, MODES } mode;

typedef struct model {
    gpu_rank *r;
    script script;
    fsdpc_unit *units[UNITS];
    fsdpc_root *root;
    fsdpc_optim *optim;
    float *activation; /* of a block's size */
    size_t numel;      /* of a block */
    uint64_t seen;
    void *unsharded[UNITS]; /* their addresses at first */
} model;

static fsdpc_stream plain_of(const model *m)
{
    return m->r->plain;
}

/* ---- A step ---- */

static fsdpc_status use(model *m, int u)
{
    fsdpc_stream plain = plain_of(m);
    FSDPC_TRY(fsdpc_pre_forward(m->units[u], true));
    const fsdpc_unit_group *group = &m->units[u]->groups[0];
    FSDPC_TRY(fsdpc_flat_accumulate(m->activation, FSDPC_F32, fsdpc_unit_unsharded(m->units[u], 0),
                                    group->param_dtype, m->units[u]->layout->params[0].numel,
                                    &plain));
    if (m->script == ONE_IN_ANOTHER && u == 1)
        FSDPC_TRY(use(m, 3)); /* which shares with it */
    return fsdpc_post_forward(m->units[u]);
}

static fsdpc_status forward(model *m)
{
    FSDPC_TRY(fsdpc_pre_forward(m->units[0], true));
    for (int u = 1; u < UNITS; u++)
        FSDPC_TRY(use(m, u));
    m->seen = m->root->generation;
    return fsdpc_post_forward(m->units[0]);
}

/* The unit's weights, or on top of them. */
static fsdpc_status give(model *m, int u)
{
    void *target;
    fsdpc_dtype dtype;
    bool accumulate;
    fsdpc_stream plain = plain_of(m);
    fsdpc_unit *unit = m->units[u];
    size_t numel = unit->layout->params[0].numel;
    FSDPC_TRY(fsdpc_grad_target_of(unit, 0, &target, &dtype, &accumulate));
    FSDPC_TRY((accumulate ? fsdpc_flat_accumulate : fsdpc_flat_cast)(target, dtype, m->activation,
                                                                     FSDPC_F32, numel, &plain));
    return fsdpc_flat_accumulate(target, dtype, fsdpc_unit_unsharded(unit, 0),
                                 unit->groups[0].param_dtype, numel, &plain);
}

static fsdpc_status backward(model *m)
{
    FSDPC_TRY(fsdpc_pre_backward(m->units[0], m->seen));
    for (int u = BLOCKS; u > 0; u--) {
        FSDPC_TRY(fsdpc_pre_backward(m->units[u], m->seen));
        FSDPC_TRY(give(m, u));
        FSDPC_TRY(fsdpc_post_backward(m->units[u]));
    }
    FSDPC_TRY(give(m, 0));
    return fsdpc_backward_end(m->root);
}

static fsdpc_status step(model *m)
{
    if (m->script == HELD)
        FSDPC_TRY(fsdpc_unshard_begin(m->units[2]));
    FSDPC_TRY(forward(m));
    FSDPC_TRY(backward(m));
    if (m->script == HELD)
        FSDPC_TRY(fsdpc_reshard(m->units[2]));
    FSDPC_TRY(fsdpc_optim_step(m->optim));
    for (int u = 0; u < UNITS; u++)
        fsdpc_unit_zero_grad(m->units[u]);
    return FSDPC_OK;
}

/* ---- Life ---- */

/* Blocks of two and a half granules in bf16, and a root that fills two but for a little. */
static fsdpc_status model_open(model *m, gpu_rank *r, script how, mode memory, size_t granule,
                               int prefetch)
{
    static const char *const names[] = {"root", "a", "b", "c", "d", "e"};
    *m = (model){.r = r, .script = how};
    size_t rows = granule * 5 / 2 / COLUMNS / 2, root_rows = granule * 15 / 8 / COLUMNS / 2;
    m->numel = rows * COLUMNS;
    FSDPC_TRY(
        fsdpc_device_alloc(r->device, FSDPC_MEM_ACTIVATION, m->numel * 4, (void **)&m->activation));
    FSDPC_TRY(fsdpc_device_fill(r->device, m->activation, 0, m->numel * 4, NULL));
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, NULL, &m->optim));
    bool encloses[UNITS] = {true};
    for (int u = 0; u < UNITS; u++) {
        fsdpc_param_spec spec = {
            .name = "w", .dtype = FSDPC_F32, .ndim = 2, .shape = {u ? rows : root_rows, COLUMNS}};
        fsdpc_unit_options options = {.name = names[u],
                                      .mesh = {.shard = r->comm},
                                      .device = r->device,
                                      .cast_params = true,
                                      .param_dtype = FSDPC_BF16,
                                      .cast_reduce = true,
                                      .reduce_dtype = FSDPC_F32,
                                      .reshard_after_forward = u > 0,
                                      .no_alias = memory == NO_ALIAS};
        FSDPC_TRY(fsdpc_unit_create(&spec, 1, &options, &m->units[u]));
        FSDPC_TRY(fsdpc_unit_init_param(m->units[u], 0, FSDPC_INIT_NORMAL, 0, 1, 7, (uint64_t)u));
        FSDPC_TRY(fsdpc_optim_add(m->optim, m->units[u], 0, 0));
    }
    FSDPC_TRY(fsdpc_optim_set_hyper(
        m->optim, 0, &(fsdpc_hyper){.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}));
    m->units[0]->settings.prefetch = prefetch;
    FSDPC_TRY(fsdpc_root_create(m->units, encloses, UNITS, &m->root));
    for (int u = 0; u < UNITS; u++)
        m->unsharded[u] = fsdpc_unit_unsharded(m->units[u], 0);
    return FSDPC_OK;
}

static void model_close(model *m)
{
    fsdpc_root_destroy(m->root);
    fsdpc_optim_destroy(m->optim);
    for (int u = 0; u < UNITS; u++)
        fsdpc_unit_destroy(m->units[u]);
    fsdpc_device_free(m->r->device, m->activation);
}

/* ---- What must hold ---- */

/* A checksum of this rank's masters and of the last activation. */
static uint64_t bits_of(const model *m)
{
    uint64_t sum = 0;
    for (int u = 0; u <= UNITS; u++) {
        fsdpc_local_shard local = {.numel = m->numel};
        const void *from =
            u < UNITS ? fsdpc_unit_master(m->units[u], 0, &local) : (void *)m->activation;
        uint32_t *host = malloc(local.numel * 4 + 4);
        EXPECT_OK(m->r->self, fsdpc_device_copy(m->r->device, host, from, local.numel * 4, NULL));
        for (size_t i = 0; i < local.numel; i++)
            sum = (sum ^ host[i]) * 0x100000001b3u;
        free(host);
    }
    return sum;
}

static size_t param_buffer_bytes(const model *m)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(m->r->mem, &stats);
    return stats.now_bytes[FSDPC_MEM_UNSHARDED];
}

/* What unsharded parameters and published slices take where `slots` slots serve the blocks. */
static size_t expected_bytes(const model *m, size_t slots, size_t own)
{
    size_t granule = m->r->device->window_granule;
    size_t bytes = m->units[0]->param_buffer_bytes + own * m->units[1]->param_buffer_bytes;
    if (slots > 0)
        bytes = fsdpc_round_up(m->units[0]->param_buffer_bytes, granule) +
                slots * fsdpc_round_up(m->units[1]->param_buffer_bytes, granule);
    for (int u = 0; u < UNITS; u++)
        bytes += fsdpc_round_up(m->units[u]->groups[0].plan->shard_numel * 2, 64);
    return bytes;
}

static void check_memory(const model *m, mode memory, int steps)
{
    rank_context *self = m->r->self;
    size_t parted = m->script != IN_TURN && steps > 0;
    size_t got = param_buffer_bytes(m), want = 0;
    if (memory == SHARED)
        want = expected_bytes(m, SLOTS + parted, 0);
    else if (memory == NO_WINDOWS)
        want = expected_bytes(m, 0, BLOCKS);
    else /* unsharded parameters count as other memory there */
        want = expected_bytes(m, 0, 0) - m->units[0]->param_buffer_bytes;
    EXPECT(self, got == want, "script %d, mode %d, step %d: %zu bytes instead of %zu", m->script,
           memory, steps, got, want);
    for (int u = 0; u < UNITS; u++)
        EXPECT(self, fsdpc_unit_unsharded(m->units[u], 0) == m->unsharded[u], "unit %d has moved",
               u);
}

/* The root's memory and every slot, once each, as long as they live. */
static void check_registered(gpu_rank *r, int windows)
{
#if defined(FSDPC_EMU)
    const fsdpc_coll barrier = {.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = "a look"};
    fake_nccl_memory known;
    EXPECT_OK(r->self, fsdpc_comm_run(r->comm, &barrier));
    look_at_memory(&known);
    EXPECT(r->self, known.windows == windows * r->self->size && known.buffers == 0,
           "%d windows and %d buffers of %d ranks instead of %d windows each", known.windows,
           known.buffers, r->self->size, windows);
    EXPECT_OK(r->self, fsdpc_comm_run(r->comm, &barrier));
#else
    (void)r, (void)windows;
#endif
}

static void trains_alike(gpu_rank *r)
{
    for (script how = 0; how < SCRIPTS; how++) {
        uint64_t bits[MODES] = {0};
        for (mode memory = 0; memory < MODES; memory++) {
            model m;
            size_t granule = r->device->window_granule;
            if (memory == NO_WINDOWS) {
#if !defined(FSDPC_EMU)
                bits[memory] = bits[SHARED]; /* of other sizes there */
                continue;
#endif
                r->device->window_granule = 0;
            }
            EXPECT_OK(r->self, model_open(&m, r, how, memory, granule, FSDPC_PREFETCH));
            check_memory(&m, memory, 0);
            check_registered(r, memory == SHARED ? SLOTS + 1 : 0);
            for (int s = 1; s <= STEPS; s++) {
                EXPECT_OK(r->self, step(&m));
                check_memory(&m, memory, s);
            }
            bits[memory] = bits_of(&m);
            check_registered(r, memory == SHARED ? SLOTS + 1 + (how != IN_TURN) : 0);
            model_close(&m);
            check_registered(r, 0);
            r->device->window_granule = granule;
            EXPECT(r->self, bits[memory] == bits[0], "script %d: mode %d has other bits", how,
                   memory);
        }
    }
}

/* As many slots as are full at once, however far ahead. */
static void gathers_as_far_ahead(gpu_rank *r)
{
    uint64_t first = 0;
    for (int prefetch = 0; prefetch <= 2; prefetch++) {
        model m;
        EXPECT_OK(r->self, model_open(&m, r, IN_TURN, SHARED, r->device->window_granule, prefetch));
        size_t want = expected_bytes(&m, (size_t)prefetch + 1, 0);
        for (int s = 0; s < STEPS; s++)
            EXPECT_OK(r->self, step(&m));
        EXPECT(r->self, param_buffer_bytes(&m) == want, "%d ahead: %zu bytes instead of %zu",
               prefetch, param_buffer_bytes(&m), want);
        uint64_t bits = bits_of(&m);
        first = prefetch ? first : bits;
        EXPECT(r->self, bits == first, "%d ahead: other bits", prefetch);
        model_close(&m);
    }
}

static void everything(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create(&r, self, library));
    if (r.device->window_granule > 0) {
        trains_alike(&r);
        if (self->size == 2)
            gathers_as_far_ahead(&r);
    }
    rank_destroy(&r);
}

/* The argument, if there is one, is the largest world to try. */
int main(int argc, char **argv)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_engine_windows");
    if (argc > 1 && atoi(argv[1]) < most)
        most = atoi(argv[1]);
#if defined(FSDPC_EMU)
    fake_open();
#endif
    for (int size = 2; size <= most; size++)
        ranks_run_threads(size, everything, &(rank_options){0});
#if defined(FSDPC_EMU)
    fake_check();
    fake_nccl_memory known;
    look_at_memory(&known);
    CHECK(known.in_place > 0);
    emu_driver_counts counts = emu_driver_look();
    CHECK(counts.handles == 0 && counts.ranges == 0 && counts.mappings == 0);
    CHECK(counts.forbidden == 0);
#endif
    return check_report("test_engine_windows");
}
