/* Units of one model on different meshes: a 2 x 2 grid of ranks, whose rows, columns and whole each
 * have units. */
#include "engine_fixture.h"

#include "engine/step_graph.h"

#include <stdatomic.h>

enum { SIDE = 2, N_UNITS = 5 };

/* The communicators of a rank: of everyone, of its row and of its column. */
typedef struct grid {
    fsdpc_comm *row, *column;
} grid;

static fsdpc_status open_grid(const rig *r, grid *out)
{
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank / SIDE, r->rank, &out->row));
    return fsdpc_comm_split(r->comm, r->rank % SIDE, r->rank, &out->column);
}

static fsdpc_status close_grid(rig *r, grid *g, fsdpc_status status)
{
    rig_close_units(r);
    fsdpc_comm_destroy(g->column);
    fsdpc_comm_destroy(g->row);
    return status;
}

static fsdpc_status add(rig *r, const char *name, fsdpc_mesh mesh)
{
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, 24, 16, 0),
                                rig_spec("v", FSDPC_F32, 2, 5, 24, 0),
                                rig_spec("bias", FSDPC_F32, 1, 70, 0, 0)};
    fsdpc_unit_options options = rig_options(r, name);
    options.mesh = mesh;
    return rig_add(r, &options, specs, 3);
}

/* Five units: of everyone, a column, everyone, a row with the column as replicas, a column. */
static fsdpc_status add_mixed(rig *r, const grid *g)
{
    fsdpc_mesh all = {.shard = r->comm}, column = {.shard = g->column};
    FSDPC_TRY(add(r, "root", all));
    FSDPC_TRY(add(r, "a", column));
    FSDPC_TRY(add(r, "b", all));
    FSDPC_TRY(add(r, "c", (fsdpc_mesh){.shard = g->row, .replicate = g->column}));
    return add(r, "d", column);
}

static bool shares(const rig *r, int unit, int peer)
{
    bool in_column = r->units[unit]->mesh.shard->size == SIDE && !r->units[unit]->mesh.replicate;
    return !in_column || peer % SIDE == r->rank % SIDE;
}

/* Counts gradients that are not the mean over the unit's ranks, which is exact in any order. */
static fsdpc_status count_wrong(rig *r, int step, double *wrong, double *checked)
{
    for (int u = 0; u < r->n_units; u++) {
        for (int p = 0; p < 3; p++) {
            fsdpc_local_shard local;
            void *grad;
            FSDPC_TRY(fsdpc_unit_grad(r->units[u], p, false, &local, &grad));
            for (size_t i = 0; i < local.numel; i++) {
                float sum = 0;
                int ranks = 0;
                for (int q = 0; q < r->world; q++) {
                    if (!shares(r, u, q))
                        continue;
                    sum += rig_gradient(q, step, u, p, local.first + i);
                    ranks++;
                }
                *wrong += !grad || ((const float *)grad)[i] != sum / (float)ranks;
                *checked += 1;
            }
        }
    }
    return FSDPC_OK;
}

/* ---- training ---- */

/* What modules read in a forward, which all ranks of a unit share. */
static fsdpc_status count_stale(rig *r, int u, double *stale)
{
    for (int p = 0; p < 3; p++) {
        float whole[400];
        FSDPC_TRY(fsdpc_unit_collect(r->units[u], p, false, whole));
        size_t bytes = r->units[u]->layout->params[p].numel * sizeof(float);
        *stale += memcmp(whole, fsdpc_unit_unsharded(r->units[u], p), bytes) != 0;
    }
    return FSDPC_OK;
}

static fsdpc_status train_step(rig *r, fsdpc_optim *optim)
{
    for (int u = 0; u < r->n_units; u++)
        fsdpc_unit_zero_grad(r->units[u]);
    FSDPC_TRY(fsdpc_pre_forward(r->units[0], true));
    for (int u = 1; u < r->n_units; u++) {
        FSDPC_TRY(fsdpc_pre_forward(r->units[u], true));
        FSDPC_TRY(count_stale(r, u, &r->result[0]));
        FSDPC_TRY(fsdpc_post_forward(r->units[u]));
    }
    FSDPC_TRY(fsdpc_post_forward(r->units[0]));
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], fsdpc_unit_generation(r->units[0])));
    for (int u = r->n_units - 1; u > 0; u--) {
        r->seen = fsdpc_unit_generation(r->units[u]);
        FSDPC_TRY(rig_backward_of(r, u));
    }
    FSDPC_TRY(rig_give_all(r, 0));
    FSDPC_TRY(fsdpc_backward_end(r->root));
    FSDPC_TRY(count_wrong(r, r->step, &r->result[1], &r->result[2]));
    r->step++;
    return fsdpc_optim_step(optim);
}

static fsdpc_status train_on(rig *r, const grid *g, fsdpc_optim *optim)
{
    FSDPC_TRY(add_mixed(r, g));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(fsdpc_optim_set_hyper(optim, 0, &(fsdpc_hyper){.lr = 0.01, .eps = 1e-8}));
    for (int u = 0; u < r->n_units; u++)
        for (int p = 0; p < 3; p++)
            FSDPC_TRY(fsdpc_optim_add(optim, r->units[u], p, 0));
    for (int step = 0; step < 6; step++) {
        fsdpc_trace_reset(r->trace);
        FSDPC_TRY(train_step(r, optim));
        r->result[3] += r->root->model->exec_order.following;
    }
    r->result[4] = (double)fsdpc_root_schedule(r->root).n_uses;
    /* one order: the unit of a column is gathered ahead while the outermost unit computes */
    r->result[5] = rig_find(r, FSDPC_TRACE_GATHER, 1, 0) < rig_find(r, FSDPC_TRACE_FORWARD, 0, 0) ||
                   rig_find(r, FSDPC_TRACE_GATHER, 1, 0) < rig_find(r, FSDPC_TRACE_FORWARD, 1, 0);
    FSDPC_TRY(fsdpc_hold_begin(r->root));
    for (int i = 0; i < r->rank; i++) /* no rank waits for the others here */
        FSDPC_TRY(rig_use(r, 1, false));
    FSDPC_TRY(fsdpc_hold_end(r->root));
    return FSDPC_OK;
}

static fsdpc_status train(rig *r)
{
    grid g = {0};
    fsdpc_optim *optim;
    FSDPC_TRY(open_grid(r, &g));
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, r->trace, &optim));
    fsdpc_status status = train_on(r, &g, optim);
    fsdpc_optim_destroy(optim);
    return close_grid(r, &g, status);
}

static void test_training(void)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, SIDE * SIDE, train, NULL);
    for (int p = 0; p < SIDE * SIDE; p++) {
        const double *x = rigs[p].result;
        CHECK_NOTE(x[0] == 0 && x[1] == 0 && x[2] > 1000, "rank %d: %g stale, %g of %g wrong", p,
                   x[0], x[1], x[2]);
        CHECK_NOTE(x[3] == 5 && x[4] == 2 * N_UNITS && x[5] == 1, "rank %d: %g %g %g", p, x[3],
                   x[4], x[5]);
    }
    rigs_close(rigs, SIDE * SIDE);
}

/* ---- failures reach the ranks of every mesh ---- */

static fsdpc_status reset_on(rig *r, const grid *g)
{
    FSDPC_TRY(add(r, "root", (fsdpc_mesh){.shard = g->row}));
    FSDPC_TRY(add(r, "a", (fsdpc_mesh){.shard = g->column}));
    FSDPC_TRY(add(r, "b", (fsdpc_mesh){.shard = g->row}));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_step(r));
    FSDPC_TRY(rig_step(r));
    r->result[0] = r->root->model->exec_order.following;
    if (r->rank == 0)
        fsdpc_root_reset(r->root);
    FSDPC_TRY(rig_step(r)); /* all record again, also the rank that shares no mesh with rank 0 */
    r->result[1] = r->root->model->exec_order.following;
    FSDPC_TRY(rig_step(r));
    r->result[2] = r->root->model->exec_order.following;
    return FSDPC_OK;
}

static fsdpc_status reset_of_one(rig *r)
{
    grid g = {0};
    FSDPC_TRY(open_grid(r, &g));
    return close_grid(r, &g, reset_on(r, &g));
}

static void test_reset(void)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, SIDE * SIDE, reset_of_one, NULL);
    for (int p = 0; p < SIDE * SIDE; p++) {
        const double *x = rigs[p].result;
        CHECK_NOTE(x[0] == 1 && x[1] == 0 && x[2] == 1, "rank %d: %g %g %g", p, x[0], x[1], x[2]);
    }
    rigs_close(rigs, SIDE * SIDE);
}

/* ---- an interrupt in the epoch of the second mesh ---- */

static fsdpc_status interrupt_once(void *arg)
{
    if (atomic_exchange((_Atomic int *)arg, 1))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_INTERRUPT, "interrupted by the test");
}

static fsdpc_status interrupted_on(rig *r, const grid *g, _Atomic int *raised)
{
    FSDPC_TRY(add_mixed(r, g));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_step(r));
    fsdpc_root *second = r->root->next;
    float *row = fsdpc_unit_master(r->units[1], 0, &(fsdpc_local_shard){0});
    if (r->rank == 0) {
        row[0] = 9;
        r->units[1]->dirty = true;
        FSDPC_TRY(fsdpc_root_epoch(r->root, FSDPC_EPOCH_FORWARD, r->units[0], FSDPC_EPOCH_GRAD));
        g->column->interrupt = (fsdpc_interrupt){.fn = interrupt_once, .arg = raised};
        r->result[0] = fsdpc_root_epoch(second, FSDPC_EPOCH_FORWARD, r->units[0],
                                        FSDPC_EPOCH_GRAD) == FSDPC_ERR_INTERRUPT;
        fsdpc_root_reset(r->root);
    } else {
        FSDPC_TRY(fsdpc_root_epoch(r->root, FSDPC_EPOCH_FORWARD, r->units[0], FSDPC_EPOCH_GRAD));
        while (r->rank == SIDE && !atomic_load(raised))
            fsdpc_cpu_relax();
        FSDPC_TRY(fsdpc_root_epoch(second, FSDPC_EPOCH_FORWARD, r->units[0], FSDPC_EPOCH_GRAD));
        fsdpc_root_reset(r->root); /* a moment later */
    }
    FSDPC_TRY(rig_forward(r, false));
    FSDPC_TRY(fsdpc_pre_forward(r->units[1], false));
    r->result[1] = *(const float *)fsdpc_unit_unsharded(r->units[1], 0);
    return fsdpc_post_forward(r->units[1]);
}

static fsdpc_status interrupted(rig *r)
{
    grid g = {0};
    FSDPC_TRY(open_grid(r, &g));
    return close_grid(r, &g, interrupted_on(r, &g, r->arg));
}

static void test_interrupt(void)
{
    rig rigs[RIG_RANKS];
    _Atomic int raised = 0;
    rigs_run(rigs, SIDE * SIDE, interrupted, &raised);
    CHECK(rigs[0].result[0] == 1);
    CHECK(rigs[0].result[1] == 9 && rigs[SIDE].result[1] == 9 && rigs[1].result[1] != 9);
    rigs_close(rigs, SIDE * SIDE);
}

/* ---- refusals ---- */

static void test_refusals(void)
{
    rig r;
    fsdpc_optim *optim;
    fsdpc_step_graph *step = NULL;
    CHECK_OK(rig_open(&r, 2, false));
    fsdpc_comm *other;
    CHECK_OK(fsdpc_comm_split(r.comm, 0, 0, &other));
    CHECK_OK(add(&r, "root", (fsdpc_mesh){.shard = r.comm}));
    CHECK_OK(add(&r, "a", (fsdpc_mesh){.shard = other}));
    CHECK_OK(rig_root(&r));
    CHECK(r.root->next && !r.root->next->next && r.units[1]->id == 1);
    CHECK_OK(fsdpc_unit_set_ahead(r.units[0], false, &r.units[1], 1));
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r.device, NULL, &optim));
    CHECK(fsdpc_step_graph_begin(r.root, optim, &step) == FSDPC_ERR_UNSUPPORTED);
    CHECK(strstr(fsdpc_last_error(), "units 'root' and 'a' are on different meshes"));
    fsdpc_optim_destroy(optim);
    rig_close_units(&r);
    fsdpc_comm_destroy(other);
    rig_close(&r);
}

int main(void)
{
    test_training();
    test_reset();
    test_interrupt();
    test_refusals();
    return check_report("test_meshes");
}
