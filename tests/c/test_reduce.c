/* Reduce buffers and reductions: who gets which buffer, what is summed, over one rank and several.
 */
#include "engine_fixture.h"

#include <sched.h>

#include "engine/fill.h"
#include "engine/grads.h"
#include "engine/reduce.h"

static fsdpc_status begin(rig *r)
{
    FSDPC_TRY(rig_forward(r, true));
    return fsdpc_pre_backward(r->units[0], r->seen);
}

/* ---- buffers ---- */

static void test_pool(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 6, false));
    CHECK_OK(rig_root(&r));
    CHECK(r.units[0]->own_buffer && !r.units[1]->own_buffer); /* the root stays open */
    CHECK(r.root->pool[0] && r.root->pool[1]);
    for (int step = 0; step < 3; step++) {
        CHECK_OK(begin(&r));
        fsdpc_buffer *last = NULL;
        for (int u = 5; u > 0; u--) { /* the two take turns, whatever is complete already */
            CHECK_OK(fsdpc_pre_backward(r.units[u], r.seen));
            CHECK_OK(rig_give(&r, u, 0));
            fsdpc_buffer *buffer = r.units[u]->buffer;
            CHECK(buffer == r.root->pool[0] || buffer == r.root->pool[1]);
            CHECK(buffer != last);
            last = buffer;
            CHECK_OK(fsdpc_post_backward(r.units[u]));
            CHECK(!r.units[u]->buffer);
        }
        CHECK_OK(fsdpc_backward_end(r.root));
        CHECK(r.root->n_reducing == 0);
    }
    rig_close(&r);
}

/* Units that stay open fill both pooled buffers: the next gets and keeps one of its own. */
static void test_own_buffer(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 5, false));
    CHECK_OK(rig_root(&r));
    for (int step = 0; step < 2; step++) {
        r.step = 0;
        for (int u = 0; u < 5; u++)
            fsdpc_unit_zero_grad(r.units[u]);
        CHECK_OK(begin(&r));
        for (int u = 4; u > 0; u--) {
            CHECK_OK(fsdpc_pre_backward(r.units[u], r.seen));
            CHECK_OK(rig_give_all(&r, u));
        }
        CHECK(r.units[2]->own_buffer && r.units[1]->own_buffer);
        CHECK((r.units[3]->own_buffer || r.units[4]->own_buffer) == false);
        for (int u = 1; u < 5; u++)
            for (int v = 0; v < u; v++)
                CHECK(r.units[u]->buffer && r.units[u]->buffer != r.units[v]->buffer);
        CHECK_OK(fsdpc_backward_end(r.root));
        for (int u = 1; u < 5; u++) {
            fsdpc_local_shard local;
            void *grad;
            CHECK_OK(fsdpc_unit_grad(r.units[u], 0, false, &local, &grad));
            CHECK(*(float *)grad == rig_gradient(0, 0, u, 0, local.first));
        }
    }
    rig_close(&r);
}

/* ---- accumulation ---- */

static float grad_at(rig *r, int unit, int param)
{
    fsdpc_local_shard local;
    void *grad = NULL;
    CHECK_OK(fsdpc_unit_grad(r->units[unit], param, false, &local, &grad));
    return grad ? *(float *)grad : -1e30f;
}

static void test_accumulation(int world)
{
    rig r;
    CHECK_OK(rig_open(&r, world, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    float sum = 0;
    for (int step = 0; step < 3; step++) {
        sum += rig_gradient(0, step, 1, 0, 0);
        CHECK_OK(rig_step(&r));
        CHECK(grad_at(&r, 1, 0) == sum);
    }
    /* a pending scale belongs to what was there before */
    r.units[1]->pending_scale = 0.5;
    CHECK_OK(rig_step(&r));
    sum = sum * 0.5f + rig_gradient(0, 3, 1, 0, 0);
    CHECK(grad_at(&r, 1, 0) == sum);
    /* without synchronising: local until the last one */
    for (int u = 0; u < 3; u++)
        fsdpc_unit_zero_grad(r.units[u]);
    sum = 0;
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < 3; u++)
            r.units[u]->settings.requires_sync = step == 2;
        sum += rig_gradient(0, r.step, 1, 0, 0);
        fsdpc_trace_reset(r.trace);
        CHECK_OK(rig_step(&r));
        CHECK(r.units[1]->grad_live == (step == 2));
        CHECK(rig_count(&r, FSDPC_TRACE_REDUCE, -1, -1) == (step == 2 && world > 1 ? 3 : 0));
    }
    CHECK(grad_at(&r, 1, 0) == sum);
    /* zeroing drops those, too */
    for (int u = 0; u < 3; u++)
        r.units[u]->settings.requires_sync = false;
    CHECK_OK(rig_step(&r));
    for (int u = 0; u < 3; u++) {
        fsdpc_unit_zero_grad(r.units[u]);
        r.units[u]->settings.requires_sync = true;
    }
    sum = rig_gradient(0, r.step, 1, 0, 0);
    CHECK_OK(rig_step(&r));
    CHECK(grad_at(&r, 1, 0) == sum);
    rig_close(&r);
}

/* Parameters without a contribution count as zero, whatever the buffer held. */
static void test_unfilled(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 2, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_step(&r));
    CHECK_OK(rig_step(&r));
    fsdpc_unit_zero_grad(r.units[1]);
    CHECK_OK(begin(&r));
    CHECK_OK(fsdpc_pre_backward(r.units[1], r.seen));
    CHECK_OK(rig_give(&r, 1, 1));
    CHECK_OK(fsdpc_backward_end(r.root));
    for (int param = 0; param < 3; param += 2) { /* zeros, and no gradients */
        CHECK(!fsdpc_unit_has_grad(r.units[1], param));
        r.units[1]->grads[param] = FSDPC_GRAD_NEW;
        CHECK(grad_at(&r, 1, param) == 0);
    }
    CHECK(grad_at(&r, 1, 1) == rig_gradient(0, 2, 1, 1, 0));
    rig_close(&r);
}

/* ---- over ranks ---- */

/* The worst for the choice of buffers: some ranks look for completed reductions more often. */
static fsdpc_status uneven_steps(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 6, false));
    FSDPC_TRY(rig_root(r));
    for (int step = 0; step < 20; step++) {
        for (int u = 0; u < 6; u++)
            fsdpc_unit_zero_grad(r->units[u]);
        FSDPC_TRY(begin(r));
        for (int u = 5; u > 0; u--) {
            FSDPC_TRY(rig_backward_of(r, u));
            for (int i = 0; (r->rank + step + u) % 3 == 0 && i < 300; i++)
                FSDPC_TRY(fsdpc_reduce_progress(r->root));
        }
        FSDPC_TRY(rig_give_all(r, 0));
        FSDPC_TRY(fsdpc_backward_end(r->root));
        r->step++;
    }
    r->step--;
    for (int u = 0; u < 6; u++) {
        for (int p = 0; p < 3; p++) {
            fsdpc_local_shard local;
            void *grad;
            FSDPC_TRY(fsdpc_unit_grad(r->units[u], p, false, &local, &grad));
            for (size_t i = 0; i < local.numel; i++) {
                float expect = 0; /* exact in any order */
                for (int q = 0; q < r->world; q++)
                    expect += rig_gradient(q, r->step, u, p, local.first + i);
                float scale = (float)(1.0 / r->world);
                r->result[0] += ((const float *)grad)[i] != expect * scale;
                r->result[1] += 1;
            }
        }
    }
    return FSDPC_OK;
}

static void test_ranks(void)
{
    for (int world = 1; world <= RIG_RANKS; world++) {
        rig rigs[RIG_RANKS];
        double checked = 0;
        rigs_run(rigs, world, uneven_steps, NULL);
        for (int p = 0; p < world; p++) {
            CHECK_NOTE(rigs[p].result[0] == 0, "rank %d of %d: %g wrong", p, world,
                       rigs[p].result[0]);
            checked += rigs[p].result[1];
        }
        CHECK(checked == 6 * (24 * 16 + 5 * 24 + 70));
        rigs_close(rigs, world);
    }
}

/* ---- the order of two stages ---- */

enum { EARLY_RANK = 0, LATE_RANK = 1 }; /* of one row of a 2 x 2 mesh */

static _Atomic int posted; /* by EARLY_RANK: it is about to post its second reduction */

/* Looks for completed reductions until the first stage of `unit` is in. */
static fsdpc_status look_until_in(rig *r, const fsdpc_unit *unit)
{
    int64_t until = fsdpc_clock_ns() + 60000000000;
    while (unit->groups[0].reduce.comm && rig_count(r, FSDPC_TRACE_ALL_REDUCE, -1, -1) == 0) {
        FSDPC_TRY(fsdpc_reduce_progress(r->root));
        if (fsdpc_clock_ns() > until)
            return fsdpc_fail(FSDPC_ERR_TIMEOUT, "a first stage that never came in");
        sched_yield();
    }
    return FSDPC_OK;
}

/* One rank comes to its second reduction while its peer has not posted the first; the peer finds
 * the first stage in at once. */
static fsdpc_status two_stages(rig *r)
{
    fsdpc_comm *row = NULL, *column = NULL;
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank / 2, r->rank, &row));
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank % 2, r->rank, &column));
    fsdpc_param_spec spec = rig_spec("w", FSDPC_F32, 2, 24, 16, 0);
    for (int u = 0; u < 3; u++) {
        fsdpc_unit_options options = rig_options(r, "unit");
        options.mesh = (fsdpc_mesh){.shard = row, .replicate = column};
        FSDPC_TRY(rig_add(r, &options, &spec, 1));
    }
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(begin(r));
    fsdpc_trace_reset(r->trace);
    while (r->rank == LATE_RANK && !atomic_load(&posted))
        sched_yield();
    FSDPC_TRY(rig_backward_of(r, 2));
    if (r->rank == LATE_RANK)
        FSDPC_TRY(look_until_in(r, r->units[2]));
    FSDPC_TRY(fsdpc_pre_backward(r->units[1], r->seen));
    FSDPC_TRY(rig_give_all(r, 1));
    if (r->rank == EARLY_RANK)
        atomic_store(&posted, 1);
    FSDPC_TRY(fsdpc_post_backward(r->units[1]));
    FSDPC_TRY(rig_give_all(r, 0));
    FSDPC_TRY(fsdpc_backward_end(r->root));
    rig_note_reductions(r);
    rig_close_units(r);
    fsdpc_comm_destroy(column);
    fsdpc_comm_destroy(row);
    return FSDPC_OK;
}

/* On every rank in the program's order, whoever was ahead: a GPU would wait for ever else. */
static void test_order_of_stages(void)
{
    static const double expected[] = {2, 12, 1, 11, 0, 10};
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 4, two_stages, NULL);
    for (int p = 0; p < 4; p++)
        for (int i = 0; i < 6; i++)
            CHECK_NOTE(rigs[p].result[i] == expected[i], "rank %d, post %d: %g, not %g", p, i,
                       rigs[p].result[i], expected[i]);
    rigs_close(rigs, 4);
}

/* bf16 buffers round once through bf16, at world 1 as well. */
static void test_bf16(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    fsdpc_unit_options options = rig_options(&r, "root");
    options.cast_reduce = true;
    options.reduce_dtype = FSDPC_BF16;
    options.cast_params = true;
    options.param_dtype = FSDPC_BF16;
    fsdpc_param_spec spec = rig_spec("w", FSDPC_F32, 1, 64, 0, 0);
    CHECK_OK(rig_add(&r, &options, &spec, 1));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_step(&r));
    fsdpc_local_shard local;
    void *grad;
    CHECK_OK(fsdpc_unit_grad(r.units[0], 0, false, &local, &grad));
    for (size_t i = 0; i < 64; i++)
        CHECK(((float *)grad)[i] ==
              fsdpc_bf16_to_f32(fsdpc_f32_to_bf16(rig_gradient(0, 0, 0, 0, i))));
    rig_close(&r);
}

/* ---- alone ---- */

/* Whether a backward of unit 1 writes into its gradient shard. */
static bool fills_shard(rig *r)
{
    fsdpc_unit *unit = r->units[1];
    CHECK_OK(begin(r));
    CHECK_OK(fsdpc_pre_backward(unit, r->seen));
    CHECK_OK(rig_give_all(r, 1));
    bool in_shard = fsdpc_fill_is_in_shard(unit);
    CHECK(in_shard == (unit->buffer->data == unit->groups[0].grad));
    CHECK_OK(fsdpc_post_backward(unit));
    CHECK_OK(fsdpc_backward_end(r->root));
    r->step++;
    return in_shard;
}

static void test_in_shard(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[1];
    CHECK(fills_shard(&r));
    CHECK(grad_at(&r, 1, 0) == rig_gradient(0, 0, 1, 0, 0));
    CHECK(!fills_shard(&r)); /* it holds gradients: these are added to them */
    CHECK(grad_at(&r, 1, 0) == rig_gradient(0, 0, 1, 0, 0) + rig_gradient(0, 1, 1, 0, 0));
    fsdpc_unit_zero_grad(unit);
    unit->settings.divide_factor = 4;
    CHECK(!fills_shard(&r));
    CHECK(grad_at(&r, 1, 0) == rig_gradient(0, 2, 1, 0, 0) / 4);
    fsdpc_unit_zero_grad(unit);
    unit->settings.divide_factor = 1;
    unit->settings.requires_sync = false;
    CHECK(!fills_shard(&r));
    unit->settings.requires_sync = true;
    CHECK(!fills_shard(&r)); /* it goes on in the same buffer */
    CHECK(grad_at(&r, 1, 0) == rig_gradient(0, 3, 1, 0, 0) + rig_gradient(0, 4, 1, 0, 0));
    fsdpc_unit_zero_grad(unit);
    CHECK(fills_shard(&r));
    rig_close(&r);
}

/* Somebody gives a gradient while another one is half filled: both count. */
static void test_leaving_shard(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_OK(rig_add_units(&r, 3, false));
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[1];
    CHECK_OK(begin(&r));
    CHECK_OK(fsdpc_pre_backward(unit, r.seen));
    CHECK_OK(rig_give(&r, 1, 0));
    CHECK(fsdpc_fill_is_in_shard(unit));
    CHECK_OK(fsdpc_unit_take_begin(unit));
    CHECK(unit->buffer && !fsdpc_fill_is_in_shard(unit));
    fsdpc_local_shard local;
    for (int p = 0; p < unit->layout->n_params; p++) {
        CHECK_OK(fsdpc_unit_take_grad(unit, p, p == 0));
        float *rows = fsdpc_unit_grad_rows(unit, p, &local);
        for (size_t i = 0; i < local.numel; i++)
            rows[i] = 0.5f;
    }
    CHECK_OK(fsdpc_post_backward(unit));
    CHECK_OK(fsdpc_backward_end(r.root));
    CHECK(grad_at(&r, 1, 0) == 0.5f + rig_gradient(0, 0, 1, 0, 0));
    rig_close(&r);
}

int main(void)
{
    test_in_shard();
    test_leaving_shard();
    test_pool();
    test_own_buffer();
    test_accumulation(1);
    test_accumulation(2);
    test_unfilled();
    test_ranks();
    test_order_of_stages();
    test_bf16();
    return check_report("test_reduce");
}
