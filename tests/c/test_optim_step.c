/* Steps that go on after their call: the bits of steps that do not, whatever is done meanwhile. */
#include "engine_fixture.h"

#include "base/crc32c.h"
#include "tier/tier.h"

enum { UNITS = 5, STEPS = 9, CHUNK = 4096 };

static char folder[] = "/tmp/fsdpc-test-step-XXXXXX";

typedef struct scene {
    bool on_disk, gradients_too;
    uint64_t seed; /* of what is done meanwhile */
    const char *fails;
    _Atomic int left; /* calls of it that do not, of rank 1 */
} scene;

static fsdpc_status hook(void *arg, const char *call, const char *path)
{
    scene *s = arg;
    (void)path;
    if (!s->fails || strcmp(call, s->fails) != 0 || s->left-- > 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_OS, "the test lets %s fail", call);
}

static fsdpc_status add_units(rig *r, scene *s)
{
    static const char *const names[UNITS] = {"root", "a", "b", "c", "d"};
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, 240, 64, 0),
                                rig_spec("bias", FSDPC_F32, 1, 70, 0, 0)};
    fsdpc_tier_config config = {.folder = folder, .mem = r->mem, .rank = r->rank, .chunk = CHUNK};
    fsdpc_tier *tier = NULL;
    if (r->rank == 1)
        config.fs = (fsdpc_fs){.hook = hook, .arg = s};
    if (s->on_disk)
        FSDPC_TRY(fsdpc_tier_open(&config, &tier));
    fsdpc_status status = FSDPC_OK;
    for (int u = 0; u < UNITS && status == FSDPC_OK; u++) {
        fsdpc_unit_options options = rig_options(r, names[u]);
        if (s->on_disk)
            options.offload = (fsdpc_offload){.tier = tier,
                                              .masters = true,
                                              .states = true,
                                              .gradients = s->gradients_too,
                                              .part = 1};
        status = rig_add(r, &options, specs, 2);
    }
    fsdpc_tier_release(tier);
    FSDPC_TRY(status);
    return rig_root(r);
}

/* The second half of the units comes first: a step goes as forward does, not as they were added. */
static fsdpc_status make_optim(rig *r, fsdpc_optim **out)
{
    const fsdpc_hyper hyper = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    FSDPC_TRY(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r->device, r->trace, out));
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < 2; p++)
            FSDPC_TRY(fsdpc_optim_add(*out, r->units[(u + 2) % UNITS], p, 0));
    return fsdpc_optim_set_hyper(*out, 0, &hyper);
}

/* This rank alone looks at something, or all do, or nobody. */
static fsdpc_status look(rig *r, fsdpc_optim *optim, uint64_t dice)
{
    fsdpc_unit *unit = r->units[dice / 16 % UNITS];
    fsdpc_optim_view view;
    fsdpc_local_shard local;
    void *grad;
    switch ((dice + (uint64_t)r->rank) % 6) {
    case 0:
        return fsdpc_unit_check_master(unit, 0);
    case 1:
        return fsdpc_optim_state(optim, unit, 0, 1, false, &view);
    case 2:
        return fsdpc_unit_grad(unit, 0, false, &local, &grad);
    default:
        return FSDPC_OK;
    }
}

static fsdpc_status digest(rig *r, fsdpc_optim *optim)
{
    uint32_t masters = 0, unsharded = 0, states = 0;
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = r->units[u];
        FSDPC_TRY(fsdpc_unshard_begin(unit));
        FSDPC_TRY(fsdpc_unshard_wait(unit));
        for (int p = 0; p < 2; p++) {
            fsdpc_local_shard local;
            fsdpc_optim_view view;
            size_t numel = unit->layout->params[p].numel;
            unsharded =
                fsdpc_crc32c(unsharded, fsdpc_unit_unsharded(unit, p), numel * sizeof(float));
            FSDPC_TRY(fsdpc_unit_check_master(unit, p));
            const void *master = fsdpc_unit_master(unit, p, &local);
            masters = fsdpc_crc32c(masters, master, local.numel * sizeof(float));
            FSDPC_TRY(fsdpc_optim_state(optim, unit, p, 1, false, &view));
            states = fsdpc_crc32c(states, view.data, local.numel * sizeof(float));
        }
        FSDPC_TRY(fsdpc_reshard(unit));
    }
    r->result[0] = masters;
    r->result[1] = unsharded;
    r->result[2] = states;
    return FSDPC_OK;
}

static fsdpc_status one_step(rig *r, fsdpc_optim *optim, uint64_t dice)
{
    FSDPC_TRY(rig_step(r));
    if (dice % 2)
        fsdpc_clip_multiply(r->units, UNITS, 0.5);
    FSDPC_TRY(fsdpc_optim_step(optim));
    for (int u = 0; u < UNITS; u++)
        r->result[3] += r->units[u]->pending != NULL;
    fsdpc_clip_multiply(r->units, UNITS, 0.25); /* of the gradients as they are from now on */
    if (dice % 16 < 12)
        for (int u = 0; u < UNITS; u++)
            fsdpc_unit_zero_grad(r->units[u]);
    r->units[1]->trainable[1] = dice % 4 != 0;
    FSDPC_TRY(look(r, optim, dice / 32));
    return dice % 5 == 0 ? rig_use(r, 3, false) : FSDPC_OK; /* a forward of one of them */
}

static fsdpc_status run_steps(rig *r)
{
    scene *s = r->arg;
    fsdpc_optim *optim = NULL;
    FSDPC_TRY(add_units(r, s));
    FSDPC_TRY(make_optim(r, &optim));
    uint64_t random = s->seed;
    fsdpc_status status = FSDPC_OK;
    for (int step = 0; step < STEPS && status == FSDPC_OK; step++)
        status = one_step(r, optim, rig_random(&random));
    if (status == FSDPC_OK)
        status = digest(r, optim);
    fsdpc_optim_destroy(optim);
    return status;
}

static void test_bits(void)
{
    for (uint64_t seed = 1; seed < 7; seed++) {
        int world = 1 + (int)(seed % 3);
        double expected[RIG_RANKS][3], went_on = 0;
        for (int way = 0; way < 3; way++) {
            scene s = {.on_disk = way > 0, .gradients_too = way > 1, .seed = seed};
            rig rigs[RIG_RANKS];
            rigs_run(rigs, world, run_steps, &s);
            for (int p = 0; p < world; p++) {
                for (int k = 0; k < 3; k++) {
                    expected[p][k] = way ? expected[p][k] : rigs[p].result[k];
                    CHECK_NOTE(rigs[p].result[k] == expected[p][k],
                               "seed %d, way %d, rank %d of %d: other bits in %d", (int)seed, way,
                               p, world, k);
                }
                went_on += rigs[p].result[3];
            }
            rigs_close(rigs, world);
        }
        CHECK(went_on == 2 * world * STEPS * UNITS);
    }
}

/* Units are stepped as they are gathered, the root first; who steps none needs no disk. */
static void test_in_turn(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    scene s = {.on_disk = true};
    fsdpc_optim *optim;
    CHECK_OK(add_units(&r, &s));
    CHECK_OK(make_optim(&r, &optim));
    CHECK_OK(rig_step(&r));
    CHECK_OK(fsdpc_optim_step(optim));
    for (int u = 0; u < UNITS; u++)
        CHECK(r.units[u]->pending && r.units[u]->copy_in_later);
    for (int u = 0; u < UNITS; u++)
        fsdpc_unit_zero_grad(r.units[u]);
    CHECK(rig_count(&r, FSDPC_TRACE_OPTIM, -1, -1) == 1);
    CHECK_OK(fsdpc_pre_forward(r.units[0], true));
    for (int u = 0; u < UNITS; u++) {
        if (u > 0)
            CHECK_OK(fsdpc_pre_forward(r.units[u], true));
        CHECK(rig_count(&r, FSDPC_TRACE_OPTIM, u, -1) == 1);
        CHECK(rig_count(&r, FSDPC_TRACE_OPTIM, -1, -1) == 2 + u);
        CHECK(!r.units[u]->copy_in_later);
    }
    for (int u = UNITS - 1; u >= 0; u--)
        CHECK_OK(fsdpc_post_forward(r.units[u]));
    CHECK(r.units[0]->pending); /* what was stepped may not be in the file yet */
    CHECK_OK(fsdpc_unit_check_master(r.units[4], 0));
    for (int u = 0; u < UNITS; u++)
        CHECK(!r.units[u]->pending);
    fsdpc_unit_export(r.units[2], 1); /* a caller holds a gradient of it */
    r.seen = r.root->generation;
    CHECK_OK(rig_backward(&r));
    CHECK_OK(fsdpc_optim_step(optim));
    CHECK(!r.units[2]->pending && r.units[1]->pending);
    fsdpc_unit_export(r.units[2], -1);
    fsdpc_root_destroy(r.root); /* what is left is stepped without a parameter buffer */
    r.root = NULL;
    fsdpc_optim_destroy(optim);
    CHECK(!r.units[1]->pending && r.units[1]->dirty);
    rig_close(&r);
}

/* Whatever fails, at whichever call, every rank hears of it, and so does whoever asks again. */
static fsdpc_status run_to_failure(rig *r)
{
    scene *s = r->arg;
    fsdpc_optim *optim = NULL;
    FSDPC_TRY(add_units(r, s));
    FSDPC_TRY(make_optim(r, &optim));
    fsdpc_status status = FSDPC_OK;
    for (int step = 0; step < 4 && status == FSDPC_OK; step++)
        status = one_step(r, optim, 96); /* nobody looks */
    if (status == FSDPC_OK)
        status = fsdpc_unit_end_step(r->units[0]);
    if (status == FSDPC_OK)
        status = fsdpc_comm_run(r->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER});
    r->result[0] = status != FSDPC_OK;
    r->result[1] = status != FSDPC_OK && strstr(fsdpc_last_error(), "the test lets");
    r->result[5] = s->left < 0;
    r->result[2] = fsdpc_unit_check_master(r->units[3], 0) != FSDPC_OK;
    r->result[3] = status != FSDPC_OK && strstr(fsdpc_last_error(), "the test lets");
    fsdpc_optim_destroy(optim);
    for (int u = 0; u < UNITS; u++)
        r->result[4] += r->units[u]->pending != NULL;
    return FSDPC_OK;
}

static void test_failures(const char *call)
{
    int failed = 0;
    for (int left = 0;; left += 13) {
        scene s = {.on_disk = true, .fails = call, .left = left};
        rig rigs[RIG_RANKS];
        rigs_run(rigs, 2, run_to_failure, &s);
        bool ended = rigs[1].result[5] == 0;
        for (int p = 0; p < 2; p++) {
            CHECK_NOTE(rigs[p].result[0] == !ended && rigs[p].result[1] == !ended,
                       "%s fails after %d: rank %d", call, left, p);
            CHECK(rigs[p].result[4] == 0);
        }
        CHECK(ended || (rigs[1].result[2] && rigs[1].result[3]));
        rigs_close(rigs, 2);
        failed += !ended;
        if (ended)
            break;
    }
    CHECK_NOTE(failed > 3, "%s failed %d times", call, failed);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    test_bits();
    test_in_turn();
    test_failures("pread");
    test_failures("pwrite");
    CHECK(rmdir(folder) == 0);
    return check_report("test_optim_step");
}
