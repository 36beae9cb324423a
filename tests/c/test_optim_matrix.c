/* Matrix rules: parameters and momentum have the same bits for any number of ranks, and are what
 * the rule says of a whole matrix. */
#include "engine_fixture.h"

#include <math.h>

#include "comm/shm_internal.h"
#include "ops/orthogonal.h"

enum { N_PARAMS = 6, STEPS = 3, NUMEL = 3 * 20 * 14, STEPPED = N_PARAMS - 1 };

/* A stack, matrices of which some ranks have no rows, a vector for AdamW, and a frozen matrix. */
static const size_t shapes[N_PARAMS][3] = {{3, 20, 14}, {40, 14, 0}, {2, 14, 0},
                                           {9, 0, 0},   {30, 9, 0},  {30, 9, 0}};

typedef struct scene {
    bool alone;   /* a unit per parameter */
    bool no_root; /* the unit was never used */
    bool even;    /* a band per parameter */
    bool half;    /* bf16 parameters */
    bool heavy;   /* OrthogonalSGD */
} scene;

static const fsdpc_hyper hypers[2] = {{.lr = 0.05,
                                       .momentum = 0.9,
                                       .nesterov = true,
                                       .weight_decay = 0.1,
                                       .eps = 1e-7,
                                       .ns_steps = 5,
                                       .ns_a = 3.4445,
                                       .ns_b = -4.775,
                                       .ns_c = 2.0315},
                                      {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}};

static float start_of(int param, size_t i)
{
    uint64_t seed = (uint64_t)param * 7919 + i;
    return (float)((int)(rig_random(&seed) % 512) - 256) / 128.0f; /* exact in 16 bits */
}

static fsdpc_status add_unit(rig *r, const scene *s, int first, int n)
{
    fsdpc_param_spec specs[N_PARAMS];
    for (int p = 0; p < n; p++) {
        const size_t *shape = shapes[first + p];
        specs[p] = rig_spec("w", s->half ? FSDPC_BF16 : FSDPC_F32,
                            shape[2]   ? 3
                            : shape[1] ? 2
                                       : 1,
                            shape[0], shape[1], shape[2]);
        specs[p].frozen = first + p == STEPPED;
    }
    fsdpc_unit_options options = rig_options(r, "u");
    options.band_per_param = s->even;
    FSDPC_TRY(rig_add(r, &options, specs, n));
    fsdpc_unit *unit = r->units[r->n_units - 1];
    for (int p = 0; p < n; p++) {
        float unsharded[NUMEL];
        for (size_t i = 0; i < unit->layout->params[p].numel; i++)
            unsharded[i] = start_of(first + p, i);
        FSDPC_TRY(fsdpc_unit_write(unit, p, unsharded, FSDPC_F32));
    }
    return FSDPC_OK;
}

/* Of all ranks together: the same at any world size. */
static void give_gradients(rig *r, fsdpc_unit *unit, int first, int step)
{
    rig_own_grads(unit);
    for (int p = 0; p < unit->layout->n_params; p++) {
        const fsdpc_place *place = &unit->layout->params[p];
        fsdpc_local_shard local = fsdpc_layout_local_shard(unit->layout, p, r->rank);
        float *grad = (float *)(void *)unit->groups[place->group].grad;
        if (place->group >= unit->n_trained) {
            unit->grads[p] = FSDPC_GRAD_NONE;
            continue;
        }
        for (size_t i = 0; i < local.numel; i++)
            grad[local.shard_offset + i] = rig_gradient(0, step, 0, first + p, local.first + i);
    }
    unit->pending_scale = 0.5; /* as clipping leaves it */
}

typedef struct found {
    float params[N_PARAMS][NUMEL], momentum[N_PARAMS][NUMEL];
} found;

static fsdpc_status read_all(rig *r, fsdpc_optim *optim, const scene *s, found *out)
{
    int at = 0;
    for (int u = 0; u < r->n_units; u++)
        for (int p = 0; p < r->units[u]->layout->n_params; p++, at++) {
            size_t numel = r->units[u]->layout->params[p].numel;
            uint16_t half[NUMEL];
            FSDPC_TRY(fsdpc_unit_collect(r->units[u], p, false,
                                         s->half ? (void *)half : out->params[at]));
            for (size_t i = 0; s->half && i < numel; i++)
                out->params[at][i] = fsdpc_bf16_to_f32(half[i]);
            if (at != STEPPED)
                FSDPC_TRY(fsdpc_optim_collect(optim, r->units[u], p, 0, out->momentum[at]));
            if (r->root && !s->half) { /* the same step wrote the parameter buffer */
                fsdpc_local_shard local;
                const void *mine = fsdpc_unit_master(r->units[u], p, &local);
                const float *whole = fsdpc_unit_unsharded(r->units[u], p);
                r->result[0] += memcmp(mine, whole + local.first, local.numel * 4) != 0;
            }
        }
    return FSDPC_OK;
}

static found all_found[RIG_RANKS];

static fsdpc_status run_steps(rig *r)
{
    const scene *s = r->arg;
    fsdpc_optim *optim = NULL;
    int at = 0;
    for (int p = 0; p < (s->alone ? N_PARAMS : 1); p++)
        FSDPC_TRY(add_unit(r, s, p, s->alone ? 1 : N_PARAMS));
    if (!s->no_root) {
        FSDPC_TRY(rig_root(r));
        FSDPC_TRY(rig_forward(r, false));
    }
    FSDPC_TRY(fsdpc_optim_create(s->heavy ? FSDPC_OPTIM_ORTHOGONAL_SGD : FSDPC_OPTIM_MUON,
                                 r->device, r->trace, &optim));
    for (int u = 0; u < r->n_units; u++)
        for (int p = 0; p < r->units[u]->layout->n_params; p++, at++)
            FSDPC_TRY(fsdpc_optim_add(optim, r->units[u], p, shapes[at][1] == 0));
    FSDPC_TRY(fsdpc_optim_set_kind(optim, 1, FSDPC_OPTIM_ADAMW));
    fsdpc_status status = FSDPC_OK;
    for (int g = 0; g < 2; g++)
        FSDPC_TRY(fsdpc_optim_set_hyper(optim, g, &hypers[g]));
    for (int step = 0; step < STEPS && status == FSDPC_OK; step++) {
        uint64_t posted = r->world > 1 ? ((fsdpc_shm_comm *)r->comm)->posted : 0;
        for (int u = 0; u < r->n_units; u++)
            give_gradients(r, r->units[u], u, step);
        status = fsdpc_optim_step(optim);
        if (r->world > 1)
            r->result[1] = (double)(((fsdpc_shm_comm *)r->comm)->posted - posted);
        if (r->root)
            FSDPC_KEEP_FIRST(status, rig_forward(r, false));
    }
    FSDPC_KEEP_FIRST(status, read_all(r, optim, s, &all_found[r->rank]));
    fsdpc_optim_destroy(optim);
    return status;
}

/* The steps of a whole matrix, as the rule says. */
static void check_plain(const scene *s, const found *one)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    for (int p = 0; p < STEPPED; p++) {
        size_t rows = shapes[p][2] ? shapes[p][1] : shapes[p][0];
        size_t cols = shapes[p][2] ? shapes[p][2] : shapes[p][1], numel = rows * cols;
        double lr = hypers[0].lr, worst = 0;
        float *x = calloc(numel + fsdpc_orthogonal_work(rows, cols) + 1, sizeof *x);
        for (size_t k = 0; numel && k < (shapes[p][2] ? shapes[p][0] : 1); k++) {
            double param[NUMEL], momentum[NUMEL] = {0};
            for (size_t i = 0; i < numel; i++)
                param[i] = start_of(p, k * numel + i);
            for (int step = 0; step < STEPS; step++) {
                for (size_t i = 0; i < numel; i++) {
                    double g = 0.5 * rig_gradient(0, step, 0, p, k * numel + i);
                    momentum[i] = 0.9 * momentum[i] + 0.1 * g;
                    x[i] = (float)(0.9 * momentum[i] + 0.1 * g);
                }
                fsdpc_orthogonal_args args = {
                    .rows = rows,
                    .cols = cols,
                    .x = x,
                    .work = x + numel,
                    .a = s->heavy ? 1.5 : hypers[0].ns_a,
                    .b = s->heavy ? -0.5 : hypers[0].ns_b,
                    .c = s->heavy ? 0 : hypers[0].ns_c,
                    .eps = 1e-7,
                    .steps = 5,
                    .scale = sqrt(fmax(1, (double)rows / (double)cols)),
                };
                CHECK_OK(fsdpc_orthogonalize(&args, fsdpc_device_main(r.device)));
                for (size_t i = 0; i < numel; i++)
                    param[i] = param[i] * (1 - lr * 0.1) - lr * x[i];
            }
            for (size_t i = 0; i < numel; i++)
                worst = fmax(worst, fabs(param[i] - one->params[p][k * numel + i]));
        }
        /* bf16 parameters are rounded in each step */
        CHECK_NOTE(worst <= (s->half ? 0.03 : 1e-5), "parameter %d is off by %g", p, worst);
        free(x);
    }
    rig_close(&r);
}

static void test_steps(void)
{
    static scene scenes[] = {
        {0}, {.alone = true}, {.no_root = true}, {.even = true}, {.half = true}, {.heavy = true}};
    static found one;
    for (size_t c = 0; c < sizeof scenes / sizeof scenes[0]; c++) {
        for (int world = 1; world <= RIG_RANKS; world++) {
            rig rigs[RIG_RANKS];
            memset(all_found, 0, sizeof all_found);
            rigs_run(rigs, world, run_steps, &scenes[c]);
            for (int p = 0; p < world; p++) {
                CHECK_NOTE(rigs[p].result[0] == 0, "scene %zu: parameter buffer", c);
                if (world > 1)
                    CHECK_NOTE(memcmp(&one, &all_found[p], sizeof one) == 0,
                               "scene %zu: rank %d of %d has other bits than one rank", c, p,
                               world);
                /* one batch of three barriers; without buffers, broadcasts */
                if (world > 1 && (c == 0 || scenes[c].no_root))
                    CHECK_NOTE((rigs[p].result[1] == 3) == (c == 0), "scene %zu: %g posts", c,
                               rigs[p].result[1]);
            }
            if (world == 1)
                one = all_found[0];
            rigs_close(rigs, world);
        }
        check_plain(&scenes[c], &one);
    }
}

static fsdpc_status refused(rig *r, const fsdpc_param_spec *spec, fsdpc_dtype state,
                            const fsdpc_offload *offload)
{
    fsdpc_unit_options options = rig_options(r, "u");
    fsdpc_optim *optim;
    if (offload)
        options.offload = *offload;
    CHECK_OK(rig_add(r, &options, spec, 1));
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_MUON, r->device, NULL, &optim));
    const fsdpc_state_format format = {.dtype = state};
    CHECK_OK(fsdpc_optim_set_format(optim, &format, 0));
    CHECK_OK(fsdpc_optim_add(optim, r->units[0], 0, 0));
    CHECK_OK(fsdpc_optim_set_hyper(optim, 0, &hypers[0]));
    fsdpc_status status = fsdpc_optim_step(optim);
    fsdpc_optim_destroy(optim);
    rig_close_units(r);
    return status;
}

static void test_refused(void)
{
    rig r;
    const fsdpc_offload host = {.host = true, .masters = true};
    fsdpc_param_spec spec = rig_spec("v", FSDPC_F32, 1, 5, 0, 0);
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_FAILS(refused(&r, &spec, FSDPC_F32, NULL), FSDPC_ERR_SHAPE,
                "parameter 'v' has 1 dimension: put");
    spec = rig_spec("v", FSDPC_F64, 2, 5, 4, 0);
    CHECK_FAILS(refused(&r, &spec, FSDPC_F32, NULL), FSDPC_ERR_DTYPE, "'v' is float64");
    spec.dtype = FSDPC_F32;
    CHECK_FAILS(refused(&r, &spec, FSDPC_BF16, NULL), FSDPC_ERR_DTYPE, "not bfloat16");
    CHECK_FAILS(refused(&r, &spec, FSDPC_F32, &host), FSDPC_ERR_UNSUPPORTED,
                "those of parameter 'v' of unit 'u' are offloaded");
    rig_close(&r);
}

int main(void)
{
    test_steps();
    test_refused();
    return check_report("optim_matrix");
}
