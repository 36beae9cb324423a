/* Epochs over ranks that are threads: publishing, foreign writes, no-alias mode, interrupts,
 * resets. */
#include "engine_fixture.h"

#include <stdatomic.h>

static int copied_in(const rig *r)
{
    return rig_count(r, FSDPC_TRACE_COPY_IN, -1, -1);
}

/* The first element of this rank's own rows of unit u's first parameter. */
static float *own_row(rig *r, int u)
{
    fsdpc_local_shard local;
    return fsdpc_unit_master(r->units[u], 0, &local);
}

/* ---- publish only when changed ---- */

static fsdpc_status epochs(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 3, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_forward(r, true)); /* the first publishes everything */
    r->result[0] = copied_in(r);
    r->result[1] = (double)r->root->generation;
    fsdpc_trace_reset(r->trace);
    for (int i = 0; i < 3; i++)
        FSDPC_TRY(rig_forward(r, i == 1));
    r->result[2] = copied_in(r);
    r->result[3] = (double)r->root->generation;
    for (int u = 0; u < 3; u++)
        r->units[u]->foreign = true; /* looked at, and found equal */
    FSDPC_TRY(rig_forward(r, true));
    r->result[4] = copied_in(r);
    /* one rank writes one unit: it alone publishes, all see it, all graphs are old */
    if (r->rank == r->world - 1)
        own_row(r, 1)[0] = 77;
    FSDPC_TRY(fsdpc_pre_forward(r->units[1], false));
    fsdpc_local_shard last = fsdpc_layout_local_shard(r->units[1]->layout, 0, r->world - 1);
    r->result[5] = ((const float *)fsdpc_unit_unsharded(r->units[1], 0))[last.first];
    FSDPC_TRY(fsdpc_post_forward(r->units[1]));
    r->result[6] = copied_in(r);
    r->result[7] = (double)r->root->generation;
    r->result[8] = fsdpc_pre_backward(r->units[0], r->seen) == FSDPC_ERR_STATE;
    return FSDPC_OK;
}

static void test_epochs(void)
{
    for (int world = 1; world <= RIG_RANKS; world++) {
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, epochs, NULL);
        for (int p = 0; p < world; p++) {
            const double *x = rigs[p].result;
            CHECK(x[0] == 3 && x[1] == 1);
            CHECK(x[2] == 0 && x[3] == 1 && x[4] == 0);
            CHECK_NOTE(x[5] == 77, "rank %d of %d reads %g", p, world, x[5]);
            CHECK(x[6] == (p == world - 1) && x[7] == 2 && x[8] == 1);
        }
        rigs_close(rigs, world);
    }
}

/* ---- a training run: unsharded parameters against masters, with and without aliasing ---- */

typedef struct training {
    bool no_alias;
    uint32_t sums[RIG_RANKS];
} training;

static uint32_t sum_unsharded(const rig *r, uint32_t sum)
{
    for (int u = 0; u < r->n_units; u++) {
        for (int p = 0; p < 3; p++) {
            float whole[400];
            if (fsdpc_unit_collect(r->units[u], p, false, whole) != FSDPC_OK)
                return 0;
            size_t numel = r->units[u]->layout->params[p].numel;
            for (size_t i = 0; i < numel; i++) {
                uint32_t bits;
                memcpy(&bits, &whole[i], 4);
                sum = sum * 31 + bits;
            }
        }
    }
    return sum;
}

/* What modules read must be what the owners hold. */
static fsdpc_status count_stale(rig *r, int u)
{
    for (int p = 0; p < 3; p++) {
        float whole[400];
        FSDPC_TRY(fsdpc_unit_collect(r->units[u], p, false, whole));
        size_t bytes = r->units[u]->layout->params[p].numel * sizeof(float);
        r->result[0] += memcmp(whole, fsdpc_unit_unsharded(r->units[u], p), bytes) != 0;
        r->result[1]++;
    }
    return FSDPC_OK;
}

static fsdpc_status train(rig *r)
{
    training *t = r->arg;
    FSDPC_TRY(rig_add_units(r, 4, t->no_alias));
    for (int u = 0; u < 4; u++)
        for (int p = 0; p < 3; p++)
            FSDPC_TRY(fsdpc_unit_init_param(r->units[u], p, FSDPC_INIT_NORMAL, 0, 1, 3,
                                            (uint64_t)(u * 3 + p)));
    FSDPC_TRY(rig_root(r));
    fsdpc_optim *optim;
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, r->trace, &optim));
    fsdpc_hyper hyper = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
    fsdpc_status st = fsdpc_optim_set_hyper(optim, 0, &hyper);
    for (int u = 0; u < 4; u++)
        for (int p = 0; p < 3; p++)
            FSDPC_KEEP_FIRST(st, fsdpc_optim_add(optim, r->units[u], p, 0));
    for (int step = 0; step < 8 && st == FSDPC_OK; step++) {
        if (step == 4 && r->rank == 0) { /* a foreign write, on one rank */
            own_row(r, 2)[0] = 5;
            r->units[2]->foreign = true;
        }
        FSDPC_KEEP_FIRST(st, fsdpc_pre_forward(r->units[0], true));
        for (int u = 1; u < 4; u++) {
            FSDPC_KEEP_FIRST(st, fsdpc_pre_forward(r->units[u], true));
            FSDPC_KEEP_FIRST(st, count_stale(r, u));
            FSDPC_KEEP_FIRST(st, fsdpc_post_forward(r->units[u]));
        }
        r->seen = r->root->generation;
        FSDPC_KEEP_FIRST(st, fsdpc_post_forward(r->units[0]));
        FSDPC_KEEP_FIRST(st, rig_backward(r));
        double norm = 0;
        FSDPC_KEEP_FIRST(st, clip_norm(r->units, 4, &norm));
        fsdpc_clip_scale(r->units, 4, norm, 1);
        FSDPC_KEEP_FIRST(st, fsdpc_optim_step(optim));
        for (int u = 0; u < 4; u++)
            fsdpc_unit_zero_grad(r->units[u]);
        r->step++;
    }
    if (st == FSDPC_OK)
        t->sums[r->rank] = sum_unsharded(r, 1);
    fsdpc_optim_destroy(optim);
    return st;
}

static void test_training(void)
{
    for (int world = 1; world <= RIG_RANKS; world++) {
        training modes[2] = {{.no_alias = false}, {.no_alias = true}};
        for (int m = 0; m < 2; m++) {
            rig rigs[RIG_RANKS];
            rigs_run(rigs, world, train, &modes[m]);
            for (int p = 0; p < world; p++) {
                CHECK_NOTE(rigs[p].result[0] == 0 && rigs[p].result[1] == 72,
                           "rank %d of %d: %g of %g parameters were stale", p, world,
                           rigs[p].result[0], rigs[p].result[1]);
                CHECK(modes[m].sums[p] == modes[0].sums[0] && modes[m].sums[p] != 0);
            }
            rigs_close(rigs, world);
        }
    }
}

/* In no-alias mode a full can be read while the unit is FULL alone, and never be written; where a
 * device cannot protect memory it is NaN. */
static void test_no_alias(bool protects)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    fsdpc_device_ops ops = *r.device->ops;
    if (!protects)
        ops.protect = NULL;
    r.device->ops = &ops;
    CHECK_OK(rig_add_units(&r, 2, true));
    CHECK_OK(fsdpc_unit_init_param(r.units[1], 0, FSDPC_INIT_CONSTANT, 3, 0, 0, 0));
    CHECK_OK(rig_root(&r));
    const float *unsharded = fsdpc_unit_unsharded(r.units[1], 0);
    for (int step = 0; step < 2; step++) {
        CHECK(protects ? !rig_can_read(unsharded) : unsharded[0] != unsharded[0]);
        CHECK_OK(fsdpc_pre_forward(r.units[0], true));
        CHECK(protects ? !rig_can_read(unsharded) : unsharded[0] != unsharded[0]);
        CHECK_OK(fsdpc_pre_forward(r.units[1], true));
        CHECK(unsharded[0] == 3 && fsdpc_unit_unsharded(r.units[1], 0) == unsharded);
        CHECK(rig_can_write((void *)(uintptr_t)unsharded) == !protects);
        CHECK_OK(fsdpc_post_forward(r.units[1]));
        CHECK(protects ? !rig_can_read(unsharded) : unsharded[0] != unsharded[0]);
        CHECK_OK(fsdpc_post_forward(r.units[0]));
    }
    rig_close(&r);
}

/* ---- what ranks must agree on ---- */

static fsdpc_status changed_under_hold(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 2, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(fsdpc_unshard_begin(r->units[1]));
    FSDPC_TRY(fsdpc_unshard_wait(r->units[1]));
    r->units[0]->dirty = r->rank == 0;
    r->result[0] = rig_forward(r, true) == FSDPC_ERR_STATE;
    FSDPC_TRY(fsdpc_reshard(r->units[1]));
    FSDPC_TRY(rig_step(r)); /* nothing is broken by it */
    FSDPC_TRY(rig_step(r));
    return FSDPC_OK;
}

static fsdpc_status different_calls(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 3, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_forward(r, true));
    fsdpc_status status = rig_use(r, 1 + r->rank % 2, false);
    r->result[0] = status == FSDPC_ERR_MISMATCH || status == FSDPC_ERR_POISONED;
    return FSDPC_OK;
}

/* A reset on one rank: all follow one record. If it was in backward, all drop what they
 * accumulated; else it stays. */
static fsdpc_status reset_of_one(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 5, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_step(r));
    for (int u = 0; u < 5; u++) {
        fsdpc_unit_zero_grad(r->units[u]);
        r->units[u]->settings.requires_sync = false;
    }
    FSDPC_TRY(rig_step(r)); /* accumulated locally */
    const bool *in_backward = r->arg;
    if (r->rank == 0) {
        r->root->model->in_backward = *in_backward;
        fsdpc_root_reset(r->root);
    }
    for (int u = 0; u < 5; u++)
        r->units[u]->settings.requires_sync = true;
    FSDPC_TRY(rig_step(r));
    for (int u = 0; u < 5; u++) {
        fsdpc_local_shard local;
        void *grad;
        FSDPC_TRY(fsdpc_unit_grad(r->units[u], 2, false, &local, &grad));
        float expect = 0;
        for (int step = *in_backward ? 2 : 1; step <= 2; step++)
            for (int q = 0; q < r->world; q++)
                expect += rig_gradient(q, step, u, 2, local.first);
        r->result[0] += local.numel > 0 && *(float *)grad != expect / (float)r->world;
    }
    FSDPC_TRY(rig_step(r));
    r->result[1] = r->root->model->exec_order.following;
    return FSDPC_OK;
}

static void test_agreement(void)
{
    for (int world = 2; world <= RIG_RANKS; world += 2) {
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, changed_under_hold, NULL);
        for (int p = 0; p < world; p++)
            CHECK(rigs[p].result[0] == 1);
        rigs_close(rigs, world);
        rigs_run(rigs, world, different_calls, NULL);
        for (int p = 0; p < world; p++)
            CHECK(rigs[p].result[0] == 1);
        rigs_close(rigs, world);
        for (int k = 0; k < 2; k++) {
            rigs_run(rigs, world, reset_of_one, &(bool){k == 1});
            for (int p = 0; p < world; p++)
                CHECK_NOTE(rigs[p].result[0] == 0 && rigs[p].result[1] == 1, "rank %d of %d", p,
                           world);
            rigs_close(rigs, world);
        }
    }
}

/* ---- an interrupted epoch is completed as announced ---- */

typedef struct interruption {
    _Atomic int raised; /* rank 0 was interrupted: rank 1 may go on */
} interruption;

static fsdpc_status interrupt_once(void *arg)
{
    interruption *i = arg;
    if (atomic_exchange(&i->raised, 1))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_INTERRUPT, "interrupted by the test");
}

static fsdpc_status make_one_optim(rig *r, fsdpc_optim **out)
{
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, NULL, out));
    FSDPC_TRY(fsdpc_optim_add(*out, r->units[1], 0, 0));
    return fsdpc_optim_set_hyper(*out, 0, &(fsdpc_hyper){.lr = 0.1, .eps = 1e-8});
}

static fsdpc_status interrupted(rig *r)
{
    interruption *i = r->arg;
    fsdpc_optim *optim = NULL;
    FSDPC_TRY(rig_add_units(r, 2, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(make_one_optim(r, &optim));
    fsdpc_status st = rig_step(r);
    if (r->rank == 0) {
        r->comm->interrupt = (fsdpc_interrupt){.fn = interrupt_once, .arg = i};
        own_row(r, 1)[0] = 9; /* rank 0 announces a change, then its user presses Ctrl-C */
        r->units[1]->dirty = true;
        fsdpc_status hit = rig_forward(r, true);
        r->result[0] = hit == FSDPC_ERR_INTERRUPT;
        r->result[1] = fsdpc_pre_backward(r->units[0], r->root->generation) == FSDPC_ERR_STATE;
        fsdpc_root_reset(r->root);
    } else {
        while (!atomic_load(&i->raised))
            fsdpc_cpu_relax();
        FSDPC_KEEP_FIRST(
            st, fsdpc_root_epoch(r->root, FSDPC_EPOCH_FORWARD, r->units[0], FSDPC_EPOCH_GRAD));
        fsdpc_root_reset(r->root); /* interrupted, too, but a moment later */
    }
    /* the next call, on all ranks alike */
    FSDPC_KEEP_FIRST(st, rig_forward(r, false));
    r->result[2] = *(const float *)fsdpc_unit_unsharded(r->units[1], 0);
    FSDPC_KEEP_FIRST(st, rig_step(r));
    FSDPC_KEEP_FIRST(st, fsdpc_optim_step(optim));
    FSDPC_KEEP_FIRST(st, rig_step(r));
    r->result[3] = (double)r->root->generation;
    fsdpc_optim_destroy(optim);
    return st;
}

static void test_interrupt(void)
{
    interruption i = {0};
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 2, interrupted, &i);
    CHECK(rigs[0].result[0] == 1 && rigs[0].result[1] == 1);
    for (int p = 0; p < 2; p++)
        CHECK_NOTE(rigs[p].result[2] == 9, "rank %d reads %g", p, rigs[p].result[2]);
    CHECK(rigs[0].result[3] == rigs[1].result[3]);
    rigs_close(rigs, 2);
}

/* The other rank takes the step: this one's rows would stay one behind, so all are closed. */
static fsdpc_status interrupted_step(rig *r)
{
    interruption *i = r->arg;
    fsdpc_optim *optim = NULL;
    FSDPC_TRY(rig_add_units(r, 2, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(make_one_optim(r, &optim));
    fsdpc_status st = rig_step(r);
    if (r->rank == 0) {
        r->comm->interrupt = (fsdpc_interrupt){.fn = interrupt_once, .arg = i};
        r->result[0] = fsdpc_optim_step(optim) == FSDPC_ERR_INTERRUPT;
    } else {
        while (!atomic_load(&i->raised))
            fsdpc_cpu_relax();
        fsdpc_optim_step(optim); /* may be told, or be through before */
    }
    r->result[1] = rig_forward(r, false) == FSDPC_ERR_POISONED;
    r->result[2] = strstr(fsdpc_last_error(), "rank 0 was interrupted in an optimizer") != NULL;
    fsdpc_optim_destroy(optim);
    return st;
}

static void test_interrupted_step(void)
{
    interruption i = {0};
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 2, interrupted_step, &i);
    CHECK(rigs[0].result[0] == 1);
    for (int p = 0; p < 2; p++)
        CHECK_NOTE(rigs[p].result[1] == 1 && rigs[p].result[2] == 1, "rank %d goes on", p);
    rigs_close(rigs, 2);
}

/* ---- making and unmaking ---- */

static void test_create(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    fsdpc_root *root, *other;
    bool encloses[3] = {true, false, false};
    CHECK_OK(fsdpc_root_create(r.units + 1, encloses, 1, &root));
    size_t now = 0;
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r.mem, &stats);
    now = stats.total_now_bytes;
    CHECK_FAILS(fsdpc_root_create(r.units, encloses, 3, &other), FSDPC_ERR_STATE,
                "already belongs to the root 'a'");
    fsdpc_mem_stats_read(r.mem, &stats);
    CHECK(stats.total_now_bytes == now);
    CHECK(r.units[1]->root == root && !r.units[0]->root && !r.units[2]->root);
    fsdpc_root_destroy(root);
    for (int round = 0; round < 2; round++) { /* parameter buffer offsets and states start over */
        CHECK_OK(rig_root(&r));
        for (int u = 0; u < 3; u++) {
            size_t end = r.units[u]->groups[0].param_buffer_offset + r.units[u]->param_buffer_bytes;
            CHECK(end == (u == 2 ? r.root->param_buffer->bytes
                                 : r.units[u + 1]->groups[0].param_buffer_offset));
        }
        CHECK_OK(rig_step(&r));
        CHECK(r.root->generation == 1);
        fsdpc_root_destroy(r.root);
        r.root = NULL;
        CHECK(r.units[1]->dirty && r.units[1]->id == -1);
    }
    rig_close(&r);
}

static fsdpc_status leave_in_flight(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 3, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_forward(r, true));
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], r->seen));
    if (r->rank == 0)
        FSDPC_TRY(rig_backward_of(r, 2)); /* posted here, never there */
    return FSDPC_OK;
}

/* A model dropped in the middle of backward takes nothing with it that is still referred to. */
static void test_dropped(void)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 2, leave_in_flight, NULL);
    CHECK(rigs[0].root->n_reducing == 1);
    rig_close_units(&rigs[0]);
    CHECK(strstr(rigs[0].comm->poison, "destroyed while its gradients"));
    rig_close_units(&rigs[1]);
    rigs_close(rigs, 2);
}

int main(void)
{
    test_epochs();
    test_training();
    test_no_alias(true);
    test_no_alias(false);
    test_agreement();
    test_interrupt();
    test_interrupted_step();
    test_create();
    test_dropped();
    return check_report("test_root");
}
