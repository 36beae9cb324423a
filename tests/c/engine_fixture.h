/* What tests of csrc/engine share: a rank with its own memory, device, trace and units, a step
 * driven as a frontend drives it, and ranks as threads.
 *
 * A rig is a model of `n_units` units: unit 0 encloses the others, which run in order. CHECK is
 * for the main thread alone; a rank's function returns a status, and rigs_run says which rank
 * failed.
 */
#ifndef FSDPC_TESTS_ENGINE_FIXTURE_H
#define FSDPC_TESTS_ENGINE_FIXTURE_H

#include <pthread.h>
#include <unistd.h>

#include "base/mem.h"
#include "check.h"
#include "clip_norm.h"
#include "comm/comm_null.h"
#include "engine/clip.h"
#include "engine/collect.h"
#include "engine/epoch.h"
#include "engine/unsharded.h"
#include "engine/grads.h"
#include "engine/optim.h"
#include "engine/root_internal.h"
#include "engine/sched.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

enum { RIG_UNITS = 6, RIG_RANKS = 4 };

typedef struct rig {
    int rank, world;
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_comm *comm;
    fsdpc_unit *units[RIG_UNITS];
    bool encloses[RIG_UNITS];
    int n_units;
    fsdpc_root *root;
    int step;          /* varies gradients */
    uint64_t seen;     /* generation of the last forward */
    void *arg;         /* of the rank's function */
    double result[16]; /* what it found */
    fsdpc_status status;
    char message[512];
} rig;

/* Whether a byte may be read: the kernel says so without the process dying of it. */
static inline bool rig_can_read(const void *at)
{
    int ends[2];
    bool can = pipe(ends) == 0 && write(ends[1], at, 1) == 1;
    close(ends[0]);
    close(ends[1]);
    return can;
}

/* The same of writing; what was there stays. */
static inline bool rig_can_write(void *at)
{
    int ends[2];
    bool can = pipe(ends) == 0 && write(ends[1], at, 1) == 1 && read(ends[0], at, 1) == 1;
    close(ends[0]);
    close(ends[1]);
    return can;
}

/* A deterministic generator; the same numbers on every machine. */
static inline uint64_t rig_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline fsdpc_param_spec rig_spec(const char *name, fsdpc_dtype dtype, int ndim, size_t a,
                                        size_t b, size_t c)
{
    return (fsdpc_param_spec){.name = name, .dtype = dtype, .ndim = ndim, .shape = {a, b, c}};
}

static inline fsdpc_status rig_memory(rig *r, bool null_device)
{
    FSDPC_TRY(fsdpc_mem_create(&r->mem));
    if (null_device) {
        FSDPC_TRY(fsdpc_device_null_create(r->mem, true, &r->device));
        r->device->flat = fsdpc_flat_ops_null();
    } else {
        FSDPC_TRY(fsdpc_device_cpu_create(r->mem, NULL, fsdpc_isa_best(), 0, &r->device));
        r->device->flat = fsdpc_flat_ops_cpu(fsdpc_isa_best());
        r->device->nn = fsdpc_nn_ops_cpu(fsdpc_isa_best());
    }
    return fsdpc_trace_create(4096, &r->trace);
}

static inline fsdpc_comm_config rig_config(const rig *r)
{
    return (fsdpc_comm_config){.rank = r->rank,
                               .size = r->world,
                               .device = r->device,
                               .trace = r->trace,
                               .timeout_s = 60,
                               .notice_s = 30};
}

/* One process that plays rank 0 of a world: comm_self for one, else comm_null. */
static inline fsdpc_status rig_open(rig *r, int world, bool null_device)
{
    *r = (rig){.world = world};
    FSDPC_TRY(rig_memory(r, null_device));
    fsdpc_comm_config config = rig_config(r);
    return world == 1 ? fsdpc_comm_self_create(&config, &r->comm)
                      : fsdpc_comm_null_create(&config, &r->comm);
}

static inline void rig_close_units(rig *r)
{
    fsdpc_root_destroy(r->root);
    r->root = NULL;
    for (int i = 0; i < r->n_units; i++)
        fsdpc_unit_destroy(r->units[i]);
    r->n_units = 0;
}

static inline void rig_close(rig *r)
{
    rig_close_units(r);
    fsdpc_comm_destroy(r->comm);
    fsdpc_device_destroy(r->device);
    fsdpc_trace_destroy(r->trace);
    fsdpc_mem_destroy(r->mem);
}

static inline fsdpc_unit_options rig_options(const rig *r, const char *name)
{
    return (fsdpc_unit_options){.name = name,
                                .mesh = {.shard = r->comm},
                                .device = r->device,
                                .trace = r->trace,
                                .reshard_after_forward = r->n_units > 0};
}

static inline fsdpc_status rig_add(rig *r, const fsdpc_unit_options *options,
                                   const fsdpc_param_spec *specs, int n)
{
    FSDPC_TRY(fsdpc_unit_create(specs, n, options, &r->units[r->n_units]));
    r->encloses[r->n_units] = r->n_units == 0;
    r->n_units++;
    return FSDPC_OK;
}

/* `n` units of two matrices and a bias each. */
static inline fsdpc_status rig_add_units(rig *r, int n, bool no_alias)
{
    static const char *const names[RIG_UNITS] = {"root", "a", "b", "c", "d", "e"};
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, 24, 16, 0),
                                rig_spec("v", FSDPC_F32, 2, 5, 24, 0),
                                rig_spec("bias", FSDPC_F32, 1, 70, 0, 0)};
    for (int i = 0; i < n; i++) {
        fsdpc_unit_options options = rig_options(r, names[i]);
        options.no_alias = no_alias;
        FSDPC_TRY(rig_add(r, &options, specs, 3));
    }
    return FSDPC_OK;
}

static inline fsdpc_status rig_root(rig *r)
{
    return fsdpc_root_create(r->units, r->encloses, r->n_units, &r->root);
}

/* ---- steps ---- */

static inline fsdpc_status rig_use(rig *r, int unit, bool grad)
{
    FSDPC_TRY(fsdpc_pre_forward(r->units[unit], grad));
    return fsdpc_post_forward(r->units[unit]);
}

static inline fsdpc_status rig_forward(rig *r, bool grad)
{
    FSDPC_TRY(fsdpc_pre_forward(r->units[0], grad));
    for (int i = 1; i < r->n_units; i++)
        FSDPC_TRY(rig_use(r, i, grad));
    r->seen = r->root->generation;
    return fsdpc_post_forward(r->units[0]);
}

/* Element i of rank's gradient: small, uneven, exactly summed in fp32 for a few ranks. */
static inline float rig_gradient(int rank, int step, int unit, int param, size_t i)
{
    uint64_t seed = (uint64_t)(((rank * 31 + step) * 31 + unit) * 31 + param) * 1000003u + i;
    return (float)((int)(rig_random(&seed) % 4001) - 2000) / 1024.0f;
}

static inline fsdpc_status rig_give(rig *r, int unit, int param)
{
    void *data;
    fsdpc_dtype dtype;
    bool accumulate;
    fsdpc_unit *u = r->units[unit];
    FSDPC_TRY(fsdpc_grad_target_of(u, param, &data, &dtype, &accumulate));
    for (size_t i = 0;
         r->device->flat != fsdpc_flat_ops_null() && i < u->layout->params[param].numel; i++) {
        float g = rig_gradient(r->rank, r->step, unit, param, i);
        if (dtype == FSDPC_F32)
            ((float *)data)[i] = accumulate ? ((float *)data)[i] + g : g;
        else
            ((uint16_t *)data)[i] = fsdpc_f32_to_bf16(g);
    }
    return FSDPC_OK;
}

/* As if a reduction had left gradients of all its parameters. */
static inline void rig_own_grads(fsdpc_unit *unit)
{
    unit->grad_live = true;
    memset(unit->grads, FSDPC_GRAD_NEW, (size_t)unit->layout->n_params);
}

static inline fsdpc_status rig_give_all(rig *r, int unit)
{
    for (int p = 0; p < r->units[unit]->layout->n_params; p++) {
        if (r->units[unit]->trainable[p])
            FSDPC_TRY(rig_give(r, unit, p));
    }
    return FSDPC_OK;
}

/* Writes the units whose reductions were posted to `result`, in order: +10 if over replicas. */
static inline void rig_note_reductions(rig *r)
{
    int n = 0;
    for (size_t i = 0; i < fsdpc_trace_length(r->trace); i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(r->trace, i);
        if (e->kind == FSDPC_TRACE_REDUCE || e->kind == FSDPC_TRACE_ALL_REDUCE)
            r->result[n++ % 16] = e->unit + (e->kind == FSDPC_TRACE_ALL_REDUCE ? 10 : 0);
    }
}

static inline fsdpc_status rig_backward_of(rig *r, int unit)
{
    FSDPC_TRY(fsdpc_pre_backward(r->units[unit], r->seen));
    FSDPC_TRY(rig_give_all(r, unit));
    return fsdpc_post_backward(r->units[unit]);
}

static inline fsdpc_status rig_backward(rig *r)
{
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], r->seen));
    for (int i = r->n_units - 1; i > 0; i--)
        FSDPC_TRY(rig_backward_of(r, i));
    FSDPC_TRY(rig_give_all(r, 0));
    return fsdpc_backward_end(r->root);
}

static inline fsdpc_status rig_step(rig *r)
{
    FSDPC_TRY(rig_forward(r, true));
    FSDPC_TRY(rig_backward(r));
    r->step++;
    return FSDPC_OK;
}

/* ---- ranks as threads ---- */

typedef fsdpc_status (*rig_fn)(rig *r);

typedef struct rig_thread {
    rig *r;
    rig_fn fn;
} rig_thread;

static inline void *rig_thread_main(void *arg)
{
    rig_thread *t = arg;
    t->r->status = t->fn(t->r);
    if (t->r->status != FSDPC_OK) {
        snprintf(t->r->message, sizeof t->r->message, "%s", fsdpc_last_error());
        fsdpc_comm_abort(t->r->comm, t->r->message); /* the others need not wait */
    }
    return NULL;
}

/* Runs `fn` on `world` ranks that are threads over shared memory; rigs stay open for inspection. */
static inline bool rigs_run(rig *rigs, int world, rig_fn fn, void *arg)
{
    fsdpc_comm_config configs[RIG_RANKS];
    fsdpc_comm *comms[RIG_RANKS];
    rig_thread threads[RIG_RANKS];
    pthread_t ids[RIG_RANKS];
    for (int p = 0; p < world; p++) {
        rigs[p] = (rig){.rank = p, .world = world, .arg = arg};
        CHECK_OK(rig_memory(&rigs[p], false));
        configs[p] = rig_config(&rigs[p]);
    }
    if (world == 1)
        CHECK_OK(fsdpc_comm_self_create(configs, comms));
    else
        CHECK_OK(fsdpc_comm_shm_create_threads(configs, world, comms));
    for (int p = 0; p < world; p++) {
        rigs[p].comm = comms[p];
        threads[p] = (rig_thread){.r = &rigs[p], .fn = fn};
        CHECK(pthread_create(&ids[p], NULL, rig_thread_main, &threads[p]) == 0);
    }
    bool ok = true;
    for (int p = 0; p < world; p++) {
        pthread_join(ids[p], NULL);
        CHECK_NOTE(rigs[p].status == FSDPC_OK, "rank %d of %d: %s", p, world, rigs[p].message);
        ok &= rigs[p].status == FSDPC_OK;
    }
    return ok;
}

static inline void rigs_close(rig *rigs, int world)
{
    for (int p = 0; p < world; p++)
        rig_close_units(&rigs[p]);
    for (int p = 0; p < world; p++)
        rig_close(&rigs[p]);
}

/* ---- the trace ---- */

static inline int rig_count(const rig *r, fsdpc_trace_kind kind, int unit, int in_backward)
{
    int count = 0;
    for (size_t i = 0; i < fsdpc_trace_length(r->trace); i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(r->trace, i);
        count += e->kind == kind && (unit < 0 || e->unit == unit) &&
                 (in_backward < 0 || e->in_backward == in_backward);
    }
    return count;
}

/* Where the first such event stands; -1: nowhere. */
static inline int rig_find(const rig *r, fsdpc_trace_kind kind, int unit, int in_backward)
{
    for (size_t i = 0; i < fsdpc_trace_length(r->trace); i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(r->trace, i);
        if (e->kind == kind && e->unit == unit && e->in_backward == in_backward)
            return (int)i;
    }
    return -1;
}

#endif
