/* A unit's private memory: masters by local shard, initial values, whole values, gradients on
 * request. */
#include "engine_fixture.h"

static float value_of(size_t i)
{
    return (float)i * 0.25f - 3;
}

/* Every rank's view on one process: local shard by local shard what was written. */
static void test_write(fsdpc_dtype master, fsdpc_dtype given)
{
    for (int rank = 0; rank < 3; rank++) {
        rig r = {.rank = rank, .world = 3};
        CHECK_OK(rig_memory(&r, false));
        fsdpc_comm_config config = rig_config(&r);
        CHECK_OK(fsdpc_comm_null_create(&config, &r.comm));
        fsdpc_param_spec specs[] = {rig_spec("w", master, 2, 7, 10, 0),
                                    rig_spec("b", master, 1, 130, 0, 0)};
        fsdpc_unit_options options = rig_options(&r, "u");
        CHECK_OK(rig_add(&r, &options, specs, 2));
        r.units[0]->dirty = false;
        float f32[130];
        uint16_t bf16[130];
        for (size_t i = 0; i < 130; i++) {
            f32[i] = value_of(i);
            bf16[i] = fsdpc_f32_to_bf16(f32[i]); /* exact */
        }
        for (int p = 0; p < 2; p++) {
            const void *unsharded = given == FSDPC_F32 ? (const void *)f32 : bf16;
            CHECK_OK(fsdpc_unit_write(r.units[0], p, unsharded, given));
            fsdpc_local_shard local;
            const void *mine = fsdpc_unit_master(r.units[0], p, &local);
            for (size_t i = 0; i < local.numel; i++) {
                float got = master == FSDPC_F32 ? ((const float *)mine)[i]
                                                : fsdpc_bf16_to_f32(((const uint16_t *)mine)[i]);
                CHECK(got == value_of(local.first + i));
            }
        }
        CHECK(r.units[0]->dirty);
        rig_close(&r);
    }
}

/* ---- over ranks ---- */

static fsdpc_status init_and_collect(rig *r)
{
    fsdpc_param_spec specs[] = {
        rig_spec("w", FSDPC_F32, 2, 7, 10, 0), rig_spec("few rows", FSDPC_F32, 2, 3, 5, 0),
        rig_spec("h", FSDPC_BF16, 1, 100, 0, 0), rig_spec("scalar", FSDPC_F32, 0, 0, 0, 0)};
    fsdpc_unit_options options = rig_options(r, "u");
    FSDPC_TRY(rig_add(r, &options, specs, 4));
    for (int p = 0; p < 4; p++)
        FSDPC_TRY(
            fsdpc_unit_init_param(r->units[0], p, FSDPC_INIT_NORMAL, 1, 0.5, 42, (uint64_t)p));
    float *out = r->arg; /* (ranks, 256) */
    out += 256 * r->rank;
    uint16_t half[100];
    FSDPC_TRY(fsdpc_unit_collect(r->units[0], 0, false, out));
    FSDPC_TRY(fsdpc_unit_collect(r->units[0], 1, false, out + 70));
    FSDPC_TRY(fsdpc_unit_collect(r->units[0], 3, false, out + 85));
    FSDPC_TRY(fsdpc_unit_collect(r->units[0], 2, false, half));
    for (int i = 0; i < 100; i++)
        out[86 + i] = fsdpc_bf16_to_f32(half[i]);
    return FSDPC_OK;
}

/* The same seed gives the same parameters at any world size, and all ranks collect them. */
static void test_collect(void)
{
    static float values[RIG_RANKS + 1][RIG_RANKS][256];
    for (int world = 1; world <= RIG_RANKS; world++) {
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, init_and_collect, values[world]);
        for (int rank = 0; rank < world; rank++)
            CHECK_NOTE(memcmp(values[world][rank], values[1][0], 186 * sizeof(float)) == 0,
                       "rank %d of %d", rank, world);
        rigs_close(rigs, world);
    }
    double sum = 0;
    for (int i = 0; i < 186; i++)
        sum += values[1][0][i];
    CHECK(sum / 186 > 0.8 && sum / 186 < 1.2);
}

static fsdpc_status grad_and_collect(rig *r)
{
    FSDPC_TRY(rig_add_units(r, 2, false));
    FSDPC_TRY(rig_root(r));
    FSDPC_TRY(rig_step(r));
    return fsdpc_unit_collect(r->units[1], 0, true, (float *)r->arg + 384 * r->rank);
}

static void test_collect_grad(void)
{
    static float grads[RIG_RANKS][384];
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 4, grad_and_collect, grads);
    for (int rank = 0; rank < 4; rank++) {
        for (size_t i = 0; i < 384; i++) {
            float expect = 0;
            for (int p = 0; p < 4; p++) /* exact: multiples of 1/1024 */
                expect += rig_gradient(p, 0, 1, 0, i);
            CHECK(grads[rank][i] == expect / 4);
        }
    }
    rigs_close(rigs, 4);
}

/* ---- gradients on request ---- */

static void test_grad(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    CHECK_OK(rig_add_units(&r, 2, false));
    fsdpc_local_shard local;
    void *grad = &r;
    CHECK_OK(fsdpc_unit_grad(r.units[1], 0, false, &local, &grad));
    CHECK(grad == NULL);
    CHECK(fsdpc_unit_unsharded(r.units[1], 0) == NULL);
    CHECK_FAILS(fsdpc_unit_check_unsharded(r.units[1], 2), FSDPC_ERR_STATE, "'bias' of unit 'a'");
    CHECK_OK(rig_root(&r));
    CHECK(fsdpc_unit_unsharded(r.units[1], 0) != NULL);
    CHECK_OK(rig_step(&r));
    float first = rig_gradient(0, 0, 1, 0, 0);
    r.units[1]->pending_scale = 0.5;
    CHECK_OK(fsdpc_unit_grad(r.units[1], 0, false, &local, &grad));
    CHECK(*(float *)grad == first * 0.5f && r.units[1]->pending_scale == 1);
    CHECK_OK(fsdpc_unit_grad(r.units[1], 0, false, &local, &grad)); /* once */
    CHECK(*(float *)grad == first * 0.5f);
    CHECK_OK(fsdpc_unit_set_trainable(r.units[1], 0, false)); /* it keeps what it has */
    CHECK_OK(fsdpc_unit_grad(r.units[1], 0, false, &local, &grad));
    CHECK(*(float *)grad == first * 0.5f);
    CHECK_OK(fsdpc_unit_set_trainable(r.units[1], 0, true));
    r.units[1]->pending_scale = 0.5;
    fsdpc_unit_zero_grad(r.units[1]);
    CHECK(r.units[1]->pending_scale == 1);
    CHECK_OK(fsdpc_unit_grad(r.units[1], 0, false, &local, &grad));
    CHECK(grad == NULL);
    float out[384];
    CHECK_FAILS(fsdpc_unit_collect(r.units[1], 0, true, out), FSDPC_ERR_STATE, "no gradient");
    rig_close(&r);
}

static void test_dtypes(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 2, false));
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 1, 8, 0, 0),
                                rig_spec("d", FSDPC_F64, 1, 8, 0, 0),
                                rig_spec("h", FSDPC_BF16, 1, 8, 0, 0)};
    fsdpc_unit_options options = rig_options(&r, "plain");
    CHECK_OK(rig_add(&r, &options, specs, 3));
    options = rig_options(&r, "mixed");
    options.cast_params = options.cast_reduce = true;
    options.param_dtype = FSDPC_BF16;
    options.reduce_dtype = FSDPC_F32;
    CHECK_OK(rig_add(&r, &options, specs, 3));
    for (int g = 0; g < 3; g++) {
        const fsdpc_unit_group *plain = &r.units[0]->groups[g], *mixed = &r.units[1]->groups[g];
        CHECK(plain->param_dtype == specs[g].dtype && plain->reduce_dtype == specs[g].dtype);
        CHECK(mixed->param_dtype == FSDPC_BF16 && mixed->reduce_dtype == FSDPC_F32);
        CHECK(plain->grad_dtype == (g == 1 ? FSDPC_F64 : FSDPC_F32));
        CHECK(plain->param_buffer_offset % 4096 == 0 && plain->reduce_offset % 4096 == 0);
    }
    CHECK(r.units[0]->settings.divide_factor == 2);
    rig_close(&r);
}

int main(void)
{
    test_write(FSDPC_F32, FSDPC_F32);
    test_write(FSDPC_F32, FSDPC_BF16);
    test_write(FSDPC_BF16, FSDPC_F32);
    test_collect();
    test_collect_grad();
    test_grad();
    test_dtypes();
    return check_report("test_unit");
}
