/* Calls as frontends make them: nested, of several modules, failed, run again. */
#include "engine_fixture.h"

#include "engine/call.h"

static const fsdpc_call TRAINING = {.grad = true, .ran_at = FSDPC_CALL_UNKNOWN};

static rig open_rig(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, true));
    CHECK_OK(rig_add_units(&r, 3, false));
    return r;
}

static fsdpc_left leave(fsdpc_unit *unit)
{
    fsdpc_left left = FSDPC_LEFT_INSIDE;
    CHECK_OK(fsdpc_call_leave(unit, &left));
    return left;
}

static bool enter(fsdpc_unit *unit)
{
    bool first = false;
    CHECK_OK(fsdpc_call_enter(unit, &TRAINING, &first));
    CHECK_OK(fsdpc_unit_check_unsharded(unit, 0));
    return first;
}

static void test_nested(void)
{
    rig r = open_rig();
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[1];
    CHECK(enter(r.units[0]) && enter(unit) && enter(unit));
    CHECK(leave(unit) == FSDPC_LEFT_INSIDE); /* a method called forward, and goes on */
    CHECK_OK(fsdpc_unit_check_unsharded(unit, 0));
    CHECK(leave(unit) == FSDPC_LEFT_RESHARD);
    CHECK_FAILS(fsdpc_unit_check_unsharded(unit, 0), FSDPC_ERR_STATE, "is sharded here");
    CHECK(leave(r.units[0]) == FSDPC_LEFT_KEPT);
    rig_close(&r);
}

static void test_several_modules(void)
{
    rig r = open_rig();
    fsdpc_unit *unit = r.units[1];
    unit->settings.n_modules = 3;
    CHECK_OK(rig_root(&r));
    for (int forward = 0; forward < 2; forward++) {
        enter(r.units[0]);
        for (int m = 0; m < 3; m++) {
            CHECK(enter(unit) == (m == 0));
            CHECK(leave(unit) == (m < 2 ? FSDPC_LEFT_KEPT : FSDPC_LEFT_RESHARD));
        }
        leave(r.units[0]);
    }
    /* one that left a module out begins anew */
    enter(r.units[0]), enter(unit), leave(unit), leave(r.units[0]);
    enter(r.units[0]);
    CHECK(enter(unit));
    rig_close(&r);
}

static void test_failed(void)
{
    rig r = open_rig();
    CHECK_OK(rig_root(&r));
    enter(r.units[0]), enter(r.units[1]);
    fsdpc_call_failed(r.units[1]); /* caught by the outer forward, which goes on */
    CHECK_OK(fsdpc_unit_check_unsharded(r.units[0], 0));
    enter(r.units[2]), leave(r.units[2]);
    fsdpc_call_failed(r.units[0]);
    CHECK_FAILS(fsdpc_unit_check_unsharded(r.units[0], 0), FSDPC_ERR_STATE, "is sharded here");
    CHECK_OK(rig_step(&r));
    /* in backward: the count of forwards is right again, and the backward goes on */
    CHECK_OK(rig_forward(&r, true));
    CHECK_OK(fsdpc_call_begin_backward(r.units[0], r.seen));
    enter(r.units[1]);
    fsdpc_call_failed(r.units[1]);
    CHECK_OK(fsdpc_unit_check_unsharded(r.units[0], 0));
    CHECK_OK(fsdpc_call_end_backward(r.root, FSDPC_OK));
    CHECK_OK(rig_step(&r));
    rig_close(&r);
}

/* A checkpoint stands around the whole model: nothing but the clock says which weights it saw. */
static void test_recomputation(void)
{
    rig r = open_rig();
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[0];
    bool first;
    uint64_t generation;
    const fsdpc_call plain = {.clock = 10, .ran_at = FSDPC_CALL_UNKNOWN};
    CHECK_OK(fsdpc_call_enter(unit, &plain, &first));
    leave(unit);
    const fsdpc_call again = {.grad = true, .recomputed = true, .clock = 20, .ran_at = 11};
    CHECK(fsdpc_call_begins_backward(unit, &again, &generation));
    CHECK(fsdpc_call_wants_end(unit));
    CHECK_OK(fsdpc_call_begin_backward(unit, generation));
    CHECK(!fsdpc_call_wants_end(unit));
    CHECK(!fsdpc_call_begins_backward(unit, &again, &generation));
    CHECK_OK(fsdpc_call_enter(unit, &again, &first));
    CHECK(leave(unit) == FSDPC_LEFT_INSIDE);
    const fsdpc_call older = {.grad = true, .recomputed = true, .clock = 20, .ran_at = 9};
    CHECK_FAILS(fsdpc_call_enter(unit, &older, &first), FSDPC_ERR_STATE, "changed between");
    CHECK_FAILS(fsdpc_call_end_backward(r.root, FSDPC_ERR_STATE), FSDPC_ERR_STATE, "");
    CHECK(fsdpc_call_wants_end(unit));
    CHECK_OK(rig_step(&r));
    rig_close(&r);
}

static void test_streams(void)
{
    rig r = open_rig();
    r.units[0]->settings.deterministic = true;
    CHECK_OK(rig_root(&r));
    uint64_t stream = 5;
    fsdpc_call call = TRAINING;
    call.next_stream = &stream;
    bool first;
    for (uint64_t micro = 0; micro < 2; micro++) { /* rank 0 of 2: contributions 0 and 2 */
        CHECK_OK(fsdpc_call_enter(r.units[0], &call, &first));
        CHECK(stream == (1ull << 40) + ((2 * micro) << 20));
        leave(r.units[0]);
    }
    rig_close(&r);
}

int main(void)
{
    test_nested();
    test_several_modules();
    test_failed();
    test_recomputation();
    test_streams();
    return check_report("test_call");
}
