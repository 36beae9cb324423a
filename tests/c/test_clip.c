/* The norm's bits do not depend on ranks or layout; clipping leaves a scale that is applied once.
 */
#include "engine_fixture.h"

#include <math.h>

enum { N_PARAMS = 5 };

static fsdpc_status add_units(rig *r, bool band_per_param)
{
    fsdpc_param_spec specs[N_PARAMS] = {
        rig_spec("odd", FSDPC_F32, 2, 13, 37, 0), rig_spec("even", FSDPC_F32, 2, 29, 128, 0),
        rig_spec("b", FSDPC_F32, 1, 777, 0, 0), rig_spec("conv", FSDPC_F32, 3, 9, 5, 3),
        rig_spec("scalar", FSDPC_F32, 0, 0, 0, 0)};
    for (int u = 0; u < 2; u++) {
        fsdpc_unit_options options = rig_options(r, u ? "a" : "root");
        options.band_per_param = band_per_param;
        FSDPC_TRY(rig_add(r, &options, specs, N_PARAMS));
    }
    return rig_root(r);
}

/* Gradients that are the same function of the whole parameter at any world: written as local
 * shards. */
static fsdpc_status set_grads(rig *r, size_t poison, float with)
{
    for (int u = 0; u < 2; u++) {
        rig_own_grads(r->units[u]);
        for (int p = 0; p < N_PARAMS; p++) {
            fsdpc_local_shard local;
            void *grad;
            FSDPC_TRY(fsdpc_unit_grad(r->units[u], p, false, &local, &grad));
            if (!grad)
                continue; /* frozen */
            for (size_t i = 0; i < local.numel; i++) {
                uint64_t seed = (uint64_t)(u * 10 + p) * 100003u + local.first + i;
                float x = (float)(rig_random(&seed) >> 40) * 0x1p-24f;
                ((float *)grad)[i] = ldexpf(x - 0.5f, (int)(rig_random(&seed) % 60) - 30);
                if (u == 1 && p == 1 && local.first + i == poison)
                    ((float *)grad)[i] = with;
            }
        }
    }
    return FSDPC_OK;
}

static fsdpc_status norms(rig *r)
{
    FSDPC_TRY(add_units(r, r->arg != NULL));
    const struct {
        size_t poison;
        float with;
    } cases[] = {{SIZE_MAX, 0}, {1000, NAN}, {3000, INFINITY}, {29 * 128 - 1, -INFINITY}};
    for (int c = 0; c < 4; c++) {
        FSDPC_TRY(set_grads(r, cases[c].poison, cases[c].with));
        FSDPC_TRY(clip_norm(r->units, 2, &r->result[c]));
    }
    FSDPC_TRY(set_grads(r, SIZE_MAX, 0));
    r->units[0]->grads[1] = FSDPC_GRAD_NONE; /* not counted */
    FSDPC_TRY(clip_norm(r->units, 2, &r->result[4]));
    fsdpc_unit_zero_grad(r->units[0]);
    FSDPC_TRY(clip_norm(r->units, 2, &r->result[5]));
    fsdpc_unit_zero_grad(r->units[1]);
    FSDPC_TRY(clip_norm(r->units, 2, &r->result[6]));
    return FSDPC_OK;
}

static void test_bits(void)
{
    double expect[7] = {0};
    for (int i = 0; i < 2 * RIG_RANKS; i++) {
        rig rigs[RIG_RANKS];
        int world = i % RIG_RANKS + 1;
        rigs_run(rigs, world, norms, i < RIG_RANKS ? NULL : expect); /* then a band per parameter */
        if (i == 0)
            memcpy(expect, rigs[0].result, sizeof expect);
        for (int p = 0; p < world; p++)
            for (int c = 0; c < 7; c++)
                CHECK_NOTE(isnan(expect[c])
                               ? isnan(rigs[p].result[c])
                               : memcmp(&rigs[p].result[c], &expect[c], sizeof(double)) == 0,
                           "rank %d of %d, case %d: %a, not %a", p, world, c, rigs[p].result[c],
                           expect[c]);
        rigs_close(rigs, world);
    }
    CHECK(isfinite(expect[0]) && expect[0] > 0);
    CHECK(isnan(expect[1]) && isinf(expect[2]) && isinf(expect[3]) && expect[3] > 0);
    CHECK(expect[4] < expect[0] && expect[5] < expect[4] && expect[6] == 0);
}

enum { N_POWERS = 5 };
static const double powers[N_POWERS] = {1, 2, INFINITY, 3, 2.5};

/* The sum of |g|^p, or the maximum, over one parameter of set_grads, in long double. */
static long double plain_norm(int u, int p, size_t numel, double power, double factor)
{
    long double total = 0;
    for (size_t i = 0; i < numel; i++) {
        uint64_t seed = (uint64_t)(u * 10 + p) * 100003u + i;
        float x = (float)(rig_random(&seed) >> 40) * 0x1p-24f;
        x = fabsf(ldexpf(x - 0.5f, (int)(rig_random(&seed) % 60) - 30));
        long double scaled = (long double)x * (long double)factor;
        total = isinf(power) ? fmaxl(total, scaled) : total + powl(scaled, (long double)power);
    }
    return total;
}

typedef struct found {
    double total[N_POWERS], each[N_POWERS][2 * N_PARAMS];
} found;

static int collectives(const fsdpc_trace *trace)
{
    int n = 0;
    for (size_t i = 0; i < fsdpc_trace_length(trace); i++)
        n += fsdpc_trace_at(trace, i)->kind == FSDPC_TRACE_COLLECTIVE;
    return n;
}

/* Every norm in turn, of both units at once, in one collective; unit 1 has a scale pending. */
static fsdpc_status all_norms(rig *r)
{
    found *out = (found *)r->arg + r->rank;
    FSDPC_TRY(add_units(r, false));
    FSDPC_TRY(set_grads(r, SIZE_MAX, 0));
    r->units[0]->grads[4] = FSDPC_GRAD_NONE;
    fsdpc_clip_multiply(&r->units[1], 1, 0x1p-16);
    if (r->rank == 1) { /* this rank alone has looked at its gradients */
        fsdpc_local_shard local;
        void *grad;
        FSDPC_TRY(fsdpc_unit_grad(r->units[1], 0, false, &local, &grad));
    }
    for (int k = 0; k < N_POWERS; k++) {
        fsdpc_norm total = {{{0}, 0, 0}}, again = total, norms[2 * N_PARAMS];
        fsdpc_trace_reset(r->trace);
        FSDPC_TRY(fsdpc_clip_norms(r->units, 2, powers[k], &total, norms));
        FSDPC_TRY(fsdpc_clip_norms(r->units, 2, powers[k], &again, NULL));
        if (collectives(r->trace) != 2 * (r->world > 1))
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "one collective each");
        bool kept = r->units[1]->pending_scale == 0x1p-16;
        if (r->rank != 1 && kept != (k < 3))
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "p %g: scale pending: %d", powers[k], kept);
        out->total[k] = fsdpc_norm_value(&total, powers[k]);
        if (fsdpc_norm_value(&again, powers[k]) != out->total[k])
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "the total is not the sum of all");
        for (int p = 0; p < 2 * N_PARAMS; p++)
            out->each[k][p] = fsdpc_norm_value(&norms[p], powers[k]);
    }
    return FSDPC_OK;
}

static void test_powers(void)
{
    const size_t numels[N_PARAMS] = {13 * 37, 29 * 128, 777, 9 * 5 * 3, 1};
    found first = {{0}, {{0}}};
    for (int world = 1; world <= RIG_RANKS; world++) {
        found out[RIG_RANKS];
        memset(out, 0, sizeof out);
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, all_norms, out);
        if (world == 1)
            first = out[0];
        for (int p = 0; p < world; p++)
            CHECK_NOTE(memcmp(&out[p], &first, sizeof first) == 0, "rank %d of %d", p, world);
        rigs_close(rigs, world);
    }
    for (int k = 0; k < N_POWERS; k++) {
        long double total = 0;
        for (int p = 0; p < 2 * N_PARAMS; p++) {
            long double sum = p == 4 ? 0
                                     : plain_norm(p / N_PARAMS, p % N_PARAMS, numels[p % N_PARAMS],
                                                  powers[k], p < N_PARAMS ? 1 : 0x1p-16);
            total = isinf(powers[k]) ? fmaxl(total, sum) : total + sum;
            double norm = (double)(isinf(powers[k]) ? sum : powl(sum, 1 / (long double)powers[k]));
            CHECK_NOTE(fabs(first.each[k][p] - norm) <= 1e-14 * norm, "p %g, parameter %d: %g, %g",
                       powers[k], p, first.each[k][p], norm);
        }
        double norm = (double)(isinf(powers[k]) ? total : powl(total, 1 / (long double)powers[k]));
        CHECK_NOTE(fabs(first.total[k] - norm) <= 1e-14 * norm, "p %g: %g, not %g", powers[k],
                   first.total[k], norm);
    }
}

/* Units of two shard groups, interleaved: one collective a group, and every norm in its place. */
static fsdpc_status two_groups(rig *r)
{
    found *out = (found *)r->arg + r->rank;
    fsdpc_param_spec spec = rig_spec("w", FSDPC_F32, 2, 29, 128, 0);
    fsdpc_comm *other;
    FSDPC_TRY(fsdpc_comm_split(r->comm, 0, r->rank, &other));
    for (int u = 0; u < 4; u++) {
        fsdpc_unit_options options = rig_options(r, "u");
        options.mesh.shard = u % 2 ? other : r->comm;
        FSDPC_TRY(rig_add(r, &options, &spec, 1));
        fsdpc_local_shard local;
        void *grad;
        rig_own_grads(r->units[u]);
        FSDPC_TRY(fsdpc_unit_grad(r->units[u], 0, false, &local, &grad));
        for (size_t i = 0; i < local.numel; i++)
            ((float *)grad)[i] = (float)(u + 1);
    }
    fsdpc_norm total = {{{0}, 0, 0}}, norms[4];
    FSDPC_TRY(fsdpc_clip_norms(r->units, 4, 1, &total, norms));
    out->total[0] = fsdpc_norm_value(&total, 1);
    for (int u = 0; u < 4; u++)
        out->each[0][u] = fsdpc_norm_value(&norms[u], 1);
    rig_close_units(r);
    fsdpc_comm_destroy(other);
    return FSDPC_OK;
}

static void test_groups(void)
{
    found out[2];
    rig rigs[RIG_RANKS];
    memset(out, 0, sizeof out);
    rigs_run(rigs, 2, two_groups, out);
    for (int rank = 0; rank < 2; rank++) {
        CHECK(out[rank].total[0] == 10 * 29 * 128);
        for (int u = 0; u < 4; u++)
            CHECK(out[rank].each[0][u] == (u + 1) * 29 * 128);
    }
    rigs_close(rigs, 2);
}

/* A 2 x 2 mesh: replicas hold the same gradients, and count once. */
static fsdpc_status on_a_mesh(rig *r)
{
    fsdpc_param_spec spec = rig_spec("w", FSDPC_F32, 2, 29, 128, 0);
    fsdpc_unit_options options = rig_options(r, "u");
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank / 2, r->rank, &options.mesh.shard));
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank % 2, r->rank, &options.mesh.replicate));
    FSDPC_TRY(rig_add(r, &options, &spec, 1));
    fsdpc_local_shard local;
    void *grad;
    rig_own_grads(r->units[0]);
    FSDPC_TRY(fsdpc_unit_grad(r->units[0], 0, false, &local, &grad));
    for (size_t i = 0; i < local.numel; i++)
        ((float *)grad)[i] = -3;
    FSDPC_TRY(clip_norm(r->units, 1, &r->result[0]));
    if (r->rank % 2 == 0) /* on both replicas, as an all-reduce would have left it */
        ((float *)grad)[7] = INFINITY;
    fsdpc_norm largest = {{{0}, 0, 0}};
    FSDPC_TRY(fsdpc_clip_norms(r->units, 1, INFINITY, &largest, NULL));
    r->result[1] = fsdpc_norm_value(&largest, INFINITY);
    rig_close_units(r);
    fsdpc_comm_destroy(options.mesh.replicate);
    fsdpc_comm_destroy(options.mesh.shard);
    return FSDPC_OK;
}

static void test_replicas(void)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 4, on_a_mesh, NULL);
    for (int rank = 0; rank < 4; rank++)
        CHECK(rigs[rank].result[0] == sqrt(9.0 * 29 * 128) && isinf(rigs[rank].result[1]));
    rigs_close(rigs, 4);
}

static void test_refused(void)
{
    fsdpc_norm total = {{{0}, 0, 0}};
    const double refused[] = {0, -1, -INFINITY, NAN};
    for (int k = 0; k < 4; k++)
        CHECK_FAILS(fsdpc_clip_norms(NULL, 0, refused[k], &total, NULL), FSDPC_ERR_VALUE,
                    "give 1, 2, inf");
    CHECK_OK(fsdpc_clip_norms(NULL, 0, INFINITY, &total, NULL));
    CHECK(fsdpc_norm_value(&total, INFINITY) == 0 && fsdpc_norm_value(&total, 3) == 0);
}

/* Against a plain sum, and every world's layout on one process: leaves must not be cut by it. */
static void test_layouts(void)
{
    fsdpc_param_spec conv = {
        .name = "conv", .dtype = FSDPC_F32, .ndim = 4, .shape = {512, 511, 3, 3}};
    size_t numel = (size_t)512 * 511 * 9;
    float *grad = malloc(numel * sizeof *grad);
    double plain = 0, first = 0;
    for (size_t i = 0; i < numel; i++) {
        uint64_t seed = i;
        grad[i] = (float)(rig_random(&seed) >> 40) * 0x1p-24f;
        plain += (double)grad[i] * grad[i];
    }
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    fsdpc_stream stream = {.device = r.device, .name = "inline"};
    const int worlds[] = {1, 3, 64, 1000};
    for (int w = 0; w < 4; w++) {
        fsdpc_layout *layout;
        CHECK_OK(fsdpc_layout_create(&conv, 1, worlds[w], false, &layout));
        fsdpc_exact_sum sum = {0};
        for (int rank = worlds[w] - 1; rank >= 0; rank--) {
            fsdpc_exact_sum mine = {0};
            fsdpc_local_shard local = fsdpc_layout_local_shard(layout, 0, rank);
            CHECK_OK(fsdpc_flat_sumsq(grad + local.first, FSDPC_F32, local.numel,
                                      layout->params[0].leaf_numel, &mine, &stream));
            fsdpc_exact_sum_normalize(&mine);
            fsdpc_exact_sum_merge(&sum, &mine);
        }
        fsdpc_exact_sum_normalize(&sum);
        double value = fsdpc_exact_sum_value(&sum);
        first = w == 0 ? value : first;
        CHECK_NOTE(value == first, "%d ranks: %a, not %a", worlds[w], value, first);
        fsdpc_layout_destroy(layout);
    }
    CHECK(fabs(first / plain - 1) < 1e-12);
    rig_close(&r);
    free(grad);
}

static void test_scale(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_OK(add_units(&r, false));
    CHECK_OK(set_grads(&r, SIZE_MAX, 0));
    fsdpc_local_shard local;
    void *grad;
    CHECK_OK(fsdpc_unit_grad(r.units[1], 2, false, &local, &grad));
    float before = ((float *)grad)[5];
    double norm, again;
    CHECK_OK(clip_norm(r.units, 2, &norm));
    fsdpc_clip_scale(r.units, 2, norm, norm * 2); /* below the limit: nothing */
    CHECK(r.units[1]->pending_scale == 1);
    fsdpc_clip_scale(r.units, 2, norm, norm / 4);
    CHECK(r.units[0]->pending_scale == norm / 4 / (norm + 1e-6));
    CHECK(((float *)grad)[5] == before);     /* not yet */
    CHECK_OK(clip_norm(r.units, 2, &again)); /* who reads applies it, once */
    CHECK(fabs(again / norm - 0.25) < 1e-6 && r.units[0]->pending_scale == 1);
    CHECK(fabsf(((float *)grad)[5] / before - 0.25f) < 1e-6f);
    CHECK_OK(clip_norm(r.units, 2, &norm));
    CHECK(norm == again);
    fsdpc_clip_scale(r.units, 2, NAN, INFINITY); /* an infinite limit only measures */
    CHECK(r.units[0]->pending_scale == 1);
    fsdpc_clip_scale(r.units, 2, INFINITY, 1);
    CHECK(r.units[0]->pending_scale == 0);
    fsdpc_clip_scale(r.units, 2, NAN, 1);
    CHECK(isnan(r.units[0]->pending_scale));
    fsdpc_unit_zero_grad(r.units[0]);
    CHECK(r.units[0]->pending_scale == 1);
    fsdpc_clip_scale(r.units, 1, 10, 1); /* no gradient, no scale */
    CHECK(r.units[0]->pending_scale == 1);
    rig_close(&r);
}

int main(void)
{
    test_bits();
    test_layouts();
    test_scale();
    test_powers();
    test_groups();
    test_replicas();
    test_refused();
    return check_report("test_clip");
}
