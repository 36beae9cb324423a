/* The norm's bits do not depend on ranks or layout; clipping leaves a scale that is applied once.
 */
#include "engine_fixture.h"

#include <math.h>

enum { N_PARAMS = 5 };

static fsdpc_status add_units(rig *r)
{
    fsdpc_param_spec specs[N_PARAMS] = {
        rig_spec("odd", FSDPC_F32, 2, 13, 37, 0), rig_spec("even", FSDPC_F32, 2, 29, 128, 0),
        rig_spec("b", FSDPC_F32, 1, 777, 0, 0), rig_spec("conv", FSDPC_F32, 3, 9, 5, 3),
        rig_spec("scalar", FSDPC_F32, 0, 0, 0, 0)};
    for (int u = 0; u < 2; u++) {
        fsdpc_unit_options options = rig_options(r, u ? "a" : "root");
        FSDPC_TRY(rig_add(r, &options, specs, N_PARAMS));
    }
    return rig_root(r);
}

/* Gradients that are the same function of the whole parameter at any world: written as pieces. */
static fsdpc_status set_grads(rig *r, size_t poison, float with)
{
    for (int u = 0; u < 2; u++) {
        r->units[u]->grad_live = true;
        for (int p = 0; p < N_PARAMS; p++) {
            fsdpc_piece piece;
            void *grad;
            FSDPC_TRY(fsdpc_unit_grad(r->units[u], p, &piece, &grad));
            if (!grad)
                continue; /* frozen */
            for (size_t i = 0; i < piece.numel; i++) {
                uint64_t seed = (uint64_t)(u * 10 + p) * 100003u + piece.first + i;
                float x = (float)(rig_random(&seed) >> 40) * 0x1p-24f;
                ((float *)grad)[i] = ldexpf(x - 0.5f, (int)(rig_random(&seed) % 60) - 30);
                if (u == 1 && p == 1 && piece.first + i == poison)
                    ((float *)grad)[i] = with;
            }
        }
    }
    return FSDPC_OK;
}

static fsdpc_status norms(rig *r)
{
    FSDPC_TRY(add_units(r));
    const struct {
        size_t poison;
        float with;
    } cases[] = {{SIZE_MAX, 0}, {1000, NAN}, {3000, INFINITY}, {29 * 128 - 1, -INFINITY}};
    for (int c = 0; c < 4; c++) {
        FSDPC_TRY(set_grads(r, cases[c].poison, cases[c].with));
        FSDPC_TRY(fsdpc_clip_norm(r->units, 2, &r->result[c]));
    }
    r->units[0]->trainable[1] = false; /* frozen: not counted */
    FSDPC_TRY(set_grads(r, SIZE_MAX, 0));
    FSDPC_TRY(fsdpc_clip_norm(r->units, 2, &r->result[4]));
    fsdpc_unit_zero_grad(r->units[0]);
    FSDPC_TRY(fsdpc_clip_norm(r->units, 2, &r->result[5]));
    fsdpc_unit_zero_grad(r->units[1]);
    FSDPC_TRY(fsdpc_clip_norm(r->units, 2, &r->result[6]));
    return FSDPC_OK;
}

static void test_bits(void)
{
    double expect[7] = {0};
    for (int world = 1; world <= RIG_RANKS; world++) {
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, norms, NULL);
        if (world == 1)
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
        CHECK_OK(fsdpc_layout_create(&conv, 1, worlds[w], 0, &layout));
        fsdpc_exact_sum sum = {0};
        for (int rank = worlds[w] - 1; rank >= 0; rank--) {
            fsdpc_exact_sum mine = {0};
            fsdpc_piece piece = fsdpc_layout_piece(layout, 0, rank);
            CHECK_OK(fsdpc_flat_sumsq(grad + piece.first, FSDPC_F32, piece.numel,
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
    CHECK_OK(add_units(&r));
    CHECK_OK(set_grads(&r, SIZE_MAX, 0));
    fsdpc_piece piece;
    void *grad;
    CHECK_OK(fsdpc_unit_grad(r.units[1], 2, &piece, &grad));
    float before = ((float *)grad)[5];
    double norm, again;
    CHECK_OK(fsdpc_clip_norm(r.units, 2, &norm));
    fsdpc_clip_scale(r.units, 2, norm, norm * 2); /* below the limit: nothing */
    CHECK(r.units[1]->pending_scale == 1);
    fsdpc_clip_scale(r.units, 2, norm, norm / 4);
    CHECK(r.units[0]->pending_scale == norm / 4 / (norm + 1e-6));
    CHECK(((float *)grad)[5] == before);           /* not yet */
    CHECK_OK(fsdpc_clip_norm(r.units, 2, &again)); /* who reads applies it, once */
    CHECK(fabs(again / norm - 0.25) < 1e-6 && r.units[0]->pending_scale == 1);
    CHECK(fabsf(((float *)grad)[5] / before - 0.25f) < 1e-6f);
    CHECK_OK(fsdpc_clip_norm(r.units, 2, &norm));
    CHECK(norm == again);
    fsdpc_clip_scale(r.units, 2, NAN, 1);
    CHECK(r.units[0]->pending_scale == 1);
    fsdpc_clip_scale(r.units, 2, INFINITY, 1);
    CHECK(r.units[0]->pending_scale == 0);
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
    return check_report("test_clip");
}
