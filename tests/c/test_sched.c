/* The schedule, asserted on the trace: what is gathered and reduced, how often, and before what. */
#include "engine_fixture.h"

#include "engine/gather.h"
#include "engine/reduce.h"

/* ---- counting what the process allocates ---- */

#if !SANITIZED && defined(__GLIBC__)
#define COUNTS_ALLOCATIONS 1
#endif

static int allocations;

#ifdef COUNTS_ALLOCATIONS
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);

void *malloc(size_t bytes)
{
    allocations++;
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    allocations++;
    return __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    allocations++;
    return __libc_realloc(old, bytes);
}
#endif

/* ---- counts and order ---- */

static void test_counts(int world)
{
    rig r;
    CHECK_OK(rig_open(&r, world, true));
    CHECK_OK(rig_add_units(&r, 4, false));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 3; step++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_step(&r));
        int expect = world > 1 ? 4 : 0;
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 0) == expect);
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 1) == (world > 1 ? 3 : 0));
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, 0, 1) == 0); /* the root was kept */
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER_DONE, -1, -1) == (world > 1 ? 7 : 0));
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, -1, -1) == expect);
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE_DONE, -1, -1) == expect);
        for (int u = 0; u < 4; u++) {
            CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, u, -1) == (world > 1));
            CHECK(rig_count(&r, FSDPC_TRACE_FORWARD, u, 0) == 1);
            CHECK(rig_count(&r, FSDPC_TRACE_BACKWARD, u, 1) == 1);
            CHECK(rig_count(&r, FSDPC_TRACE_BACKWARD_END, u, 1) == 1);
            CHECK(r.units[u]->state == FSDPC_UNIT_SHARDED && r.units[u]->grad_live);
        }
        CHECK(rig_count(&r, FSDPC_TRACE_EPOCH, 0, 0) == 1);
        CHECK(rig_count(&r, FSDPC_TRACE_COPY_IN, -1, -1) == (step == 0 ? 4 : 0));
    }
    /* the whole of a unit, in bytes, stands in the trace */
    if (world > 1) {
        int at = rig_find(&r, FSDPC_TRACE_GATHER, 1, 0);
        size_t unsharded = r.units[1]->layout->groups[0].unsharded_numel;
        CHECK(at >= 0 && fsdpc_trace_at(r.trace, (size_t)at)->bytes == unsharded * sizeof(float));
    }
    rig_close(&r);
}

static void test_prefetch(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 8, true));
    CHECK_OK(rig_add_units(&r, 5, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_step(&r));
    for (int u = 1; u < 4; u++) /* the first step: on demand */
        CHECK(rig_find(&r, FSDPC_TRACE_GATHER, u + 1, 0) >
              rig_find(&r, FSDPC_TRACE_FORWARD_END, u, 0));
    for (int step = 0; step < 2; step++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_step(&r));
        CHECK(r.root->model->exec_order.following && r.root->model->exec_order.complete);
        for (int u = 1; u < 4; u++) {
            int ahead = rig_find(&r, FSDPC_TRACE_GATHER, u + 1, 0);
            CHECK(ahead >= 0 && ahead < rig_find(&r, FSDPC_TRACE_FORWARD, u, 0));
            CHECK(ahead < rig_find(&r, FSDPC_TRACE_FORWARD_END, u, 0));
        }
        for (int u = 4; u > 1; u--) {
            int ahead = rig_find(&r, FSDPC_TRACE_GATHER, u - 1, 1);
            CHECK(ahead >= 0 && ahead < rig_find(&r, FSDPC_TRACE_BACKWARD_END, u, 1));
            CHECK(ahead < rig_find(&r, FSDPC_TRACE_REDUCE, u, 1));
            CHECK(ahead < rig_find(&r, FSDPC_TRACE_RESHARD, u, 1));
        }
    }
    /* distance 2 and 0 */
    r.root->model->prefetch = 2;
    fsdpc_trace_reset(r.trace);
    CHECK_OK(rig_step(&r));
    CHECK(rig_find(&r, FSDPC_TRACE_GATHER, 3, 0) < rig_find(&r, FSDPC_TRACE_FORWARD, 1, 0));
    CHECK(rig_find(&r, FSDPC_TRACE_GATHER, 2, 1) < rig_find(&r, FSDPC_TRACE_BACKWARD, 4, 1));
    CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, -1) == 9);
    r.root->model->prefetch = 0;
    fsdpc_trace_reset(r.trace);
    CHECK_OK(rig_step(&r));
    CHECK(rig_find(&r, FSDPC_TRACE_GATHER, 3, 0) > rig_find(&r, FSDPC_TRACE_FORWARD_END, 2, 0));
    CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, -1) == 9);
    rig_close(&r);
}

/* ---- leaving the record ---- */

/* A step that uses the given units in order. */
static fsdpc_status step_of(rig *r, const int *order, int n)
{
    FSDPC_TRY(fsdpc_pre_forward(r->units[0], true));
    for (int i = 0; i < n; i++)
        FSDPC_TRY(rig_use(r, order[i], true));
    r->seen = r->root->generation;
    FSDPC_TRY(fsdpc_post_forward(r->units[0]));
    FSDPC_TRY(fsdpc_pre_backward(r->units[0], r->seen));
    for (int i = n - 1; i >= 0; i--)
        FSDPC_TRY(rig_backward_of(r, order[i]));
    FSDPC_TRY(rig_give_all(r, 0));
    FSDPC_TRY(fsdpc_backward_end(r->root));
    r->step++;
    return FSDPC_OK;
}

static void test_departing(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 4, true));
    CHECK_OK(rig_add_units(&r, 5, false));
    CHECK_OK(rig_root(&r));
    const int plain[] = {1, 2, 3, 4}, swapped[] = {1, 3, 2, 4}, skipping[] = {1, 2, 4},
              shorter[] = {1, 2};
    struct {
        const int *order;
        int n;
    } steps[] = {{plain, 4},   {plain, 4}, {swapped, 4}, {swapped, 4}, {skipping, 3}, {skipping, 3},
                 {shorter, 2}, {plain, 4}, {shorter, 2}, {plain, 4},   {plain, 4}};
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(step_of(&r, steps[s].order, steps[s].n));
        bool same = s > 0 && steps[s].order == steps[s - 1].order;
        CHECK_NOTE(r.root->model->exec_order.following == same, "step %zu", s);
        CHECK(r.root->model->exec_order.complete);
        CHECK_NOTE(r.root->model->exec_order.length == 2 * (size_t)steps[s].n + 2, "step %zu: %zu",
                   s, r.root->model->exec_order.length);
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, -1, -1) == steps[s].n + 1);
        if (same) { /* nothing was gathered in vain */
            CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 0) == steps[s].n + 1);
            CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 1) == steps[s].n);
        }
        for (int u = 0; u < 5; u++)
            CHECK(r.units[u]->state != FSDPC_UNIT_UNSHARDED &&
                  r.units[u]->reduction == FSDPC_REDUCTION_NONE);
    }
    rig_close(&r);
}

/* A rank that does not run a rank-dependent unit posts what those post that do. */
static void test_rank_dependent(void)
{
    const int orders[][2] = {{1, 2}, {1, 0}, {1, 2}, {1, 0}, {1, 0}};
    rig r;
    CHECK_OK(rig_open(&r, 4, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    r.units[2]->settings.rank_dependent = true;
    CHECK_OK(rig_root(&r));
    CHECK(r.units[2]->own_buffer && !r.units[1]->own_buffer);
    for (size_t s = 0; s < sizeof orders / sizeof *orders; s++) {
        int n = orders[s][1] == 2 ? 2 : 1;
        fsdpc_trace_reset(r.trace);
        CHECK_OK(step_of(&r, orders[s], n));
        CHECK_NOTE(r.root->model->exec_order.following == (s > 0), "step %zu", s);
        CHECK(r.root->model->exec_order.length == 4); /* unit 2 is not in it */
        CHECK(rig_count(&r, FSDPC_TRACE_FORWARD, 2, 0) == n - 1);
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, 2, 0) == 1);
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, 2, 1) == 0);
        CHECK(rig_find(&r, FSDPC_TRACE_GATHER, 2, 0) < rig_find(&r, FSDPC_TRACE_GATHER, 1, 0));
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, 2, 1) == 1);
        CHECK(rig_find(&r, FSDPC_TRACE_REDUCE, 2, 1) > rig_find(&r, FSDPC_TRACE_REDUCE, 1, 1));
        CHECK(r.units[2]->state == FSDPC_UNIT_UNSHARDED && r.units[2]->grad_live);
    }
    rig_close(&r);
}

/* A step that ends before the record does leaves nothing to be gathered ahead for ever. */
static void test_shortening(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 4, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_step(&r));
    for (int step = 0; step < 3; step++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_forward(&r, true)); /* backward reaches unit 2 only */
        CHECK_OK(fsdpc_pre_backward(r.units[0], r.seen));
        CHECK_OK(rig_backward_of(&r, 2));
        CHECK_OK(fsdpc_backward_end(r.root));
        CHECK_NOTE(rig_count(&r, FSDPC_TRACE_GATHER, 1, 1) == (step == 0), "step %d", step);
    }
    CHECK_OK(rig_step(&r));
    CHECK_OK(rig_step(&r));
    CHECK(r.root->model->exec_order.following && r.root->model->exec_order.length == 6);
    rig_close(&r);
}

static void test_unit_twice(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    const int order[] = {1, 2, 1};
    for (int step = 0; step < 3; step++) {
        fsdpc_trace_reset(r.trace);
        for (int u = 0; u < 3; u++)
            fsdpc_unit_zero_grad(r.units[u]);
        r.step = 0;
        CHECK_OK(step_of(&r, order, 3));
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, 1, -1) == 2);
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, 2, -1) == 1);
        for (int u = 1; u < 3; u++) { /* null peers give what we give; two uses add */
            fsdpc_local_shard local;
            void *grad;
            CHECK_OK(fsdpc_unit_grad(r.units[u], 0, false, &local, &grad));
            float expect = rig_gradient(0, 0, u, 0, local.first) * (u == 1 ? 2 : 1);
            CHECK_NOTE(*(float *)grad == expect, "%g %g", *(float *)grad, expect);
        }
    }
    CHECK(r.root->model->exec_order.following);
    /* twice in a row, both FULL at once, one backward each */
    const int in_a_row[] = {2, 1, 1};
    CHECK_OK(step_of(&r, in_a_row, 3));
    CHECK_OK(step_of(&r, in_a_row, 3));
    CHECK(r.root->model->exec_order.following);
    rig_close(&r);
}

/* F F B B, F (no backward) F B, and an evaluation between forward and backward. */
static void test_orders(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < 3; u++)
            fsdpc_unit_zero_grad(r.units[u]);
        r.step = 0;
        CHECK_OK(rig_forward(&r, true));
        uint64_t first = r.seen;
        CHECK_OK(rig_forward(&r, true));
        CHECK_OK(rig_backward(&r));
        r.seen = first;
        CHECK_OK(rig_backward(&r));
        for (int u = 0; u < 3; u++) {
            fsdpc_local_shard local;
            void *grad;
            CHECK_OK(fsdpc_unit_grad(r.units[u], 1, false, &local, &grad));
            CHECK(*(float *)grad == 2 * rig_gradient(0, 0, u, 1, local.first));
        }
        CHECK(r.root->model->exec_order.following == (step > 0));
    }
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(rig_backward(&r));
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(rig_forward(&r, false));
    CHECK_OK(rig_backward(&r));
    CHECK_OK(rig_step(&r));
    CHECK_OK(rig_step(&r));
    CHECK(r.root->model->exec_order.following);
    rig_close(&r);
}

static void test_recompute(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 2; step++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_forward(&r, true));
        CHECK_OK(fsdpc_pre_backward(r.units[0], r.seen));
        for (int u = 2; u > 0; u--) { /* checkpointed units: forward again inside backward */
            CHECK_OK(rig_use(&r, u, true));
            CHECK(r.units[u]->state == FSDPC_UNIT_UNSHARDED);
            CHECK_OK(rig_backward_of(&r, u));
        }
        CHECK_OK(rig_give_all(&r, 0));
        CHECK_OK(fsdpc_backward_end(r.root));
        CHECK(rig_count(&r, FSDPC_TRACE_EPOCH, -1, -1) == 1);
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 1) == 2);
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, -1, -1) == 3);
    }
    CHECK(r.root->model->exec_order.following);
    rig_close(&r);
}

/* ---- exceptions, refusals ---- */

static void test_reset(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 4, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_step(&r));
    CHECK_OK(rig_step(&r));
    /* in forward, with a unit gathered ahead */
    CHECK_OK(fsdpc_pre_forward(r.units[0], true));
    CHECK_OK(fsdpc_pre_forward(r.units[1], true));
    CHECK(r.units[2]->state == FSDPC_UNIT_GATHERING);
    fsdpc_root_reset(r.root);
    for (int u = 0; u < 4; u++)
        CHECK(r.units[u]->state == FSDPC_UNIT_SHARDED);
    CHECK_OK(rig_step(&r));
    CHECK(!r.root->needs_reset && r.root->model->forward_depth == 0);
    /* in backward, with gradients half filled and one reduction posted */
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(fsdpc_pre_backward(r.units[0], r.seen));
    CHECK_OK(rig_backward_of(&r, 3));
    CHECK_OK(fsdpc_pre_backward(r.units[2], r.seen));
    CHECK_OK(rig_give(&r, 2, 0));
    CHECK_OK(rig_give(&r, 0, 0));
    CHECK(r.units[2]->buffer && r.units[0]->buffer);
    fsdpc_root_reset(r.root);
    CHECK(!r.units[2]->buffer && !r.units[0]->buffer && !r.root->model->in_backward);
    for (int u = 0; u < 4; u++)
        fsdpc_unit_zero_grad(r.units[u]);
    r.step = 7;
    CHECK_OK(rig_step(&r));
    for (int u = 0; u < 4; u++) { /* nothing of the broken step is left */
        fsdpc_local_shard local;
        void *grad;
        CHECK_OK(fsdpc_unit_grad(r.units[u], 0, false, &local, &grad));
        CHECK(grad && *(float *)grad == rig_gradient(0, 7, u, 0, local.first));
    }
    CHECK_OK(rig_step(&r));
    CHECK(r.root->model->exec_order.following);
    rig_close(&r);
}

static void test_generation(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_forward(&r, true));
    uint64_t old = r.seen;
    CHECK(old == fsdpc_unit_generation(r.units[1]) && old > 0);
    CHECK_OK(rig_forward(&r, true)); /* nothing changed: the old graph is good */
    CHECK(r.root->generation == old);
    r.units[1]->dirty = true;
    CHECK_OK(rig_forward(&r, true));
    CHECK(r.root->generation == old + 1);
    CHECK_FAILS(fsdpc_pre_backward(r.units[0], old), FSDPC_ERR_STATE, "changed between forward");
    CHECK(!r.root->model->in_backward);
    CHECK_OK(rig_backward(&r));
    /* an optimizer's step is a change, too */
    fsdpc_optim *optim;
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r.device, r.trace, &optim));
    CHECK_OK(fsdpc_optim_add(optim, r.units[1], 0, 0));
    CHECK_OK(fsdpc_optim_set_hyper(optim, 0, &(fsdpc_hyper){.lr = 1}));
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(fsdpc_optim_step(optim));
    CHECK_FAILS(rig_backward(&r), FSDPC_ERR_STATE, "changed between forward");
    CHECK_OK(rig_step(&r));
    /* and none belongs inside a forward or a backward */
    CHECK_OK(fsdpc_pre_forward(r.units[0], true));
    CHECK_FAILS(fsdpc_optim_step(optim), FSDPC_ERR_STATE, "inside forward");
    CHECK_OK(fsdpc_post_forward(r.units[0]));
    CHECK_OK(fsdpc_pre_backward(r.units[0], r.root->generation));
    CHECK_FAILS(fsdpc_optim_step(optim), FSDPC_ERR_STATE, "inside backward");
    CHECK_OK(fsdpc_backward_end(r.root));
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

static void test_management(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(fsdpc_unshard_begin(r.units[1]));
    CHECK_OK(fsdpc_unshard_wait(r.units[1]));
    CHECK(r.units[1]->state == FSDPC_UNIT_UNSHARDED && r.units[2]->state == FSDPC_UNIT_SHARDED);
    CHECK_OK(fsdpc_unit_check_unsharded(r.units[1], 0));
    CHECK_FAILS(fsdpc_unit_check_unsharded(r.units[2], 0), FSDPC_ERR_STATE, "'w' of unit 'b'");
    fsdpc_trace_reset(r.trace);
    CHECK_OK(rig_step(&r)); /* held through a whole step, gathered no more */
    CHECK(rig_count(&r, FSDPC_TRACE_GATHER, 1, -1) == 0);
    CHECK(r.units[1]->state == FSDPC_UNIT_UNSHARDED);
    r.units[2]->dirty = true;
    CHECK_FAILS(rig_forward(&r, true), FSDPC_ERR_STATE, "unshard()");
    CHECK_OK(fsdpc_reshard(r.units[1]));
    CHECK(r.units[1]->state == FSDPC_UNIT_SHARDED);
    CHECK_OK(rig_step(&r));
    r.root->model->holds = 1;
    CHECK_FAILS(fsdpc_pre_forward(r.units[0], true), FSDPC_ERR_STATE, "hold()");
    fsdpc_trace_reset(r.trace);
    CHECK_OK(rig_forward(&r, false));
    CHECK(rig_count(&r, FSDPC_TRACE_EPOCH, -1, -1) == 0);
    r.root->model->holds = 0;
    CHECK_FAILS(rig_give(&r, 1, 0), FSDPC_ERR_STATE, "outside the backward");
    rig_close(&r);
}

/* ---- units that are not like the others ---- */

static void test_odd_units(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 3, false));
    fsdpc_unit_options options = rig_options(&r, "root");
    CHECK_OK(rig_add(&r, &options, NULL, 0)); /* a root without parameters */
    fsdpc_param_spec two[] = {rig_spec("x", FSDPC_F32, 1, 3, 0, 0),
                              rig_spec("y", FSDPC_BF16, 2, 4, 8, 0)};
    options = rig_options(&r, "mixed");
    CHECK_OK(rig_add(&r, &options, two, 2));
    fsdpc_param_spec empty[] = {rig_spec("none", FSDPC_F32, 2, 0, 8, 0)};
    options = rig_options(&r, "empty");
    CHECK_OK(rig_add(&r, &options, empty, 1));
    options = rig_options(&r, "frozen");
    CHECK_OK(rig_add(&r, &options, two, 2));
    r.units[3]->trainable[0] = r.units[3]->trainable[1] = false;
    options = rig_options(&r, "bare");
    CHECK_OK(rig_add(&r, &options, NULL, 0));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 3; step++) {
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_step(&r));
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 0) == 3); /* those with parameters */
        CHECK(rig_count(&r, FSDPC_TRACE_GATHER, -1, 1) == 3);
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, -1, -1) == 2); /* those with gradients */
        CHECK(!r.units[3]->grad_live && !r.units[0]->grad_live);
        CHECK(r.units[1]->grad_live && r.units[2]->grad_live);
    }
    rig_close(&r);
}

/* Gradients of a unit whose backward has ended already, as tied weights can give them. */
static void test_late_gradients(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 2; step++) {
        fsdpc_trace_reset(r.trace);
        for (int u = 0; u < 3; u++)
            fsdpc_unit_zero_grad(r.units[u]);
        CHECK_OK(rig_forward(&r, true));
        CHECK_OK(fsdpc_pre_backward(r.units[0], r.seen));
        CHECK_OK(rig_backward_of(&r, 2));
        CHECK_OK(fsdpc_pre_backward(r.units[1], r.seen));
        CHECK_OK(rig_give_all(&r, 1));
        CHECK_OK(rig_give(&r, 2, 1));
        CHECK_OK(fsdpc_post_backward(r.units[1]));
        CHECK_OK(rig_give_all(&r, 0));
        CHECK_OK(fsdpc_backward_end(r.root));
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, 2, -1) == 2);
        CHECK(!r.units[2]->buffer && r.units[2]->reduction == FSDPC_REDUCTION_NONE);
        fsdpc_local_shard local;
        void *grad;
        CHECK_OK(fsdpc_unit_grad(r.units[2], 1, false, &local, &grad));
        CHECK(*(float *)grad == 2 * rig_gradient(0, 0, 2, 1, local.first));
        CHECK_OK(fsdpc_unit_grad(r.units[2], 0, false, &local, &grad));
        CHECK(*(float *)grad == rig_gradient(0, 0, 2, 0, local.first));
    }
    rig_close(&r);
}

/* ---- no allocation in steady state ---- */

static void test_steady_state(int world, bool no_alias)
{
    rig r;
    CHECK_OK(rig_open(&r, world, false));
    CHECK_OK(rig_add_units(&r, 5, no_alias));
    CHECK_OK(rig_root(&r));
    fsdpc_optim *optim;
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r.device, r.trace, &optim));
    CHECK_OK(
        fsdpc_optim_set_hyper(optim, 0, &(fsdpc_hyper){.lr = 1e-3, .beta1 = 0.9, .eps = 1e-8}));
    for (int u = 0; u < 5; u++)
        for (int p = 0; p < 3; p++)
            CHECK_OK(fsdpc_optim_add(optim, r.units[u], p, 0));
    fsdpc_mem_stats before = {0}, after;
    int mallocs = 0;
    for (int step = 0; step < 6; step++) {
        if (step == 2) {
            fsdpc_mem_stats_read(r.mem, &before);
            mallocs = allocations;
        }
        double norm = 0;
        CHECK_OK(rig_step(&r));
        CHECK_OK(clip_norm(r.units, 5, &norm));
        fsdpc_clip_scale(r.units, 5, norm, 1.0);
        CHECK_OK(fsdpc_optim_step(optim));
        for (int u = 0; u < 5; u++)
            fsdpc_unit_zero_grad(r.units[u]);
    }
    fsdpc_mem_stats_read(r.mem, &after);
    CHECK(after.system_allocs == before.system_allocs);
    CHECK(after.total_now_bytes == before.total_now_bytes);
    CHECK(after.total_peak_bytes == before.total_peak_bytes);
    if (world == 1) /* comm_null keeps records */
        CHECK_NOTE(allocations == mallocs, "%d calls of malloc", allocations - mallocs);
#ifdef COUNTS_ALLOCATIONS
    CHECK(allocations > 0); /* it does count */
#endif
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

int main(void)
{
    for (int world = 1; world <= 5; world += 2)
        test_counts(world);
    test_counts(256);
    test_prefetch();
    test_departing();
    test_rank_dependent();
    test_shortening();
    test_unit_twice();
    test_orders();
    test_recompute();
    test_reset();
    test_generation();
    test_management();
    test_odd_units();
    test_late_gradients();
    test_steady_state(1, false);
    test_steady_state(1, true);
    test_steady_state(3, false);
    return check_report("test_sched");
}
