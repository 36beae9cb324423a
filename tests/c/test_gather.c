/* Gathers: what becomes readable when, publishing into the parameter buffer, and finding foreign
 * writes. */
#include "engine_fixture.h"

#include "engine/gather.h"

/* A unit of every dtype and odd sizes beside the root. */
static fsdpc_status add_mixed(rig *r, bool no_alias)
{
    fsdpc_param_spec specs[] = {
        rig_spec("w", FSDPC_F32, 2, 7, 33, 0), rig_spec("h", FSDPC_BF16, 2, 9, 64, 0),
        rig_spec("b", FSDPC_F32, 1, 5, 0, 0), rig_spec("few rows", FSDPC_F32, 2, 3, 3, 0)};
    FSDPC_TRY(rig_add_units(r, 1, no_alias));
    fsdpc_unit_options options = rig_options(r, "mixed");
    options.no_alias = no_alias;
    options.cast_params = true;
    options.param_dtype = FSDPC_BF16;
    return rig_add(r, &options, specs, 4);
}

static float value_of(int param, size_t i)
{
    return (float)((int)(i % 250) - 125) * (param == 1 ? 0.5f : 1.0f); /* exact in bf16 */
}

static fsdpc_status write_all(rig *r)
{
    for (int p = 0; p < 4; p++) {
        float unsharded[9 * 64];
        for (size_t i = 0; i < r->units[1]->layout->params[p].numel; i++)
            unsharded[i] = value_of(p, i);
        FSDPC_TRY(fsdpc_unit_write(r->units[1], p, unsharded, FSDPC_F32));
    }
    return FSDPC_OK;
}

static int wrong_values(rig *r)
{
    int wrong = 0;
    for (int p = 0; p < 4; p++) {
        const uint16_t *unsharded = fsdpc_unit_unsharded(r->units[1], p);
        for (size_t i = 0; i < r->units[1]->layout->params[p].numel; i++)
            wrong += fsdpc_bf16_to_f32(unsharded[i]) != value_of(p, i);
    }
    return wrong;
}

static fsdpc_status gather_values(rig *r)
{
    FSDPC_TRY(add_mixed(r, r->arg != NULL));
    FSDPC_TRY(write_all(r));
    FSDPC_TRY(rig_root(r));
    for (int step = 0; step < 3; step++) {
        FSDPC_TRY(fsdpc_pre_forward(r->units[0], false));
        FSDPC_TRY(fsdpc_pre_forward(r->units[1], false));
        r->result[step] = wrong_values(r);
        FSDPC_TRY(fsdpc_post_forward(r->units[1]));
        const uint16_t *unsharded = fsdpc_unit_unsharded(r->units[1], 0);
        r->result[3] += !rig_can_read(unsharded); /* given up */
        FSDPC_TRY(fsdpc_post_forward(r->units[0]));
    }
    return FSDPC_OK;
}

static void test_values(void)
{
    for (int world = 1; world <= RIG_RANKS; world++) {
        for (int no_alias = 0; no_alias < 2; no_alias++) {
            rig rigs[RIG_RANKS];
            rigs_run(rigs, world, gather_values, no_alias ? rigs : NULL);
            for (int p = 0; p < world; p++) {
                for (int step = 0; step < 3; step++)
                    CHECK_NOTE(rigs[p].result[step] == 0, "rank %d of %d, step %d: %g wrong", p,
                               world, step, rigs[p].result[step]);
                CHECK(rigs[p].result[3] == (no_alias ? 3 : 0));
            }
            rigs_close(rigs, world);
        }
    }
}

static void test_states(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 2, false));
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[1];
    CHECK_OK(fsdpc_gather_post(unit, false));
    CHECK(unit->state == FSDPC_UNIT_GATHERING);
    CHECK_OK(fsdpc_gather_post(unit, false)); /* nothing more */
    CHECK(rig_count(&r, FSDPC_TRACE_GATHER, 1, 0) == 1);
    fsdpc_unsharded_drop(unit); /* never used: it may be gathered again all the same */
    CHECK(unit->state == FSDPC_UNIT_SHARDED);
    CHECK_OK(fsdpc_gather_wait(unit, true));
    CHECK(unit->state == FSDPC_UNIT_UNSHARDED && rig_count(&r, FSDPC_TRACE_GATHER, 1, 1) == 1);
    CHECK_OK(fsdpc_gather_wait(unit, false));
    CHECK(rig_count(&r, FSDPC_TRACE_GATHER_DONE, 1, -1) == 1);
    unit->held = 1;
    fsdpc_unsharded_drop(unit);
    CHECK(unit->state == FSDPC_UNIT_UNSHARDED);
    unit->held = 0;
    fsdpc_unsharded_drop(unit);
    CHECK(unit->state == FSDPC_UNIT_SHARDED);
    rig_close(&r);
}

static bool equal_to_param_buffer(const fsdpc_unit *unit)
{
    bool equal = true;
    CHECK_OK(fsdpc_gather_compare(unit, &equal));
    return equal;
}

static void test_compare(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(add_mixed(&r, false));
    CHECK_OK(write_all(&r));
    CHECK_OK(rig_root(&r));
    fsdpc_unit *unit = r.units[1];
    CHECK(!equal_to_param_buffer(unit));
    CHECK_OK(fsdpc_gather_copy_in(unit));
    CHECK(equal_to_param_buffer(unit));
    for (int p = 0; p < 3; p++) { /* one bit of any parameter */
        fsdpc_local_shard local;
        void *master = fsdpc_unit_master(unit, p, &local);
        uint32_t keep;
        memcpy(&keep, master, 4);
        memset(master, 0x55, 4);
        CHECK(!equal_to_param_buffer(unit));
        memcpy(master, &keep, 4);
        CHECK(equal_to_param_buffer(unit));
    }
    bool found = false; /* by an earlier comparison: it stays */
    CHECK_OK(fsdpc_gather_compare(unit, &found));
    CHECK(!found);
    rig_close(&r);
}

/* A forward looks only where somebody may have written. */
static void test_looking(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_OK(rig_add_units(&r, 2, false));
    CHECK_OK(rig_root(&r));
    CHECK_OK(rig_forward(&r, false));
    fsdpc_unit *unit = r.units[1];
    fsdpc_local_shard local;
    float *master = fsdpc_unit_master(unit, 0, &local);
    master[0] += 1;
    unit->foreign = false;
    CHECK_OK(rig_forward(&r, false));
    CHECK(!equal_to_param_buffer(unit) && !unit->dirty);
    unit->foreign = true;
    uint64_t generation = r.root->generation;
    CHECK_OK(rig_forward(&r, false));
    CHECK(equal_to_param_buffer(unit) && !unit->dirty && r.root->generation > generation);
    rig_close(&r);
}

int main(void)
{
    test_values();
    test_states();
    test_compare();
    test_looking();
    return check_report("test_gather");
}
