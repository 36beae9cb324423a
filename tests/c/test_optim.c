/* Optimizers: every parameter steps as if it stood alone, whatever runs it was joined into. */
#include "engine_fixture.h"

#include <math.h>

enum { N_PARAMS = 6, NUMEL = 70 * 9 };

static const size_t shapes[N_PARAMS][2] = {{7, 9}, {70, 9}, {5, 0}, {130, 0}, {3, 9}, {0, 9}};

typedef struct scene {
    fsdpc_dtype master, param_buffer;
    fsdpc_optim_kind kind;
    fsdpc_dtype state;
} scene;

static float start_of(int param, size_t i)
{
    uint64_t seed = (uint64_t)param * 7919 + i;
    return (float)((int)(rig_random(&seed) % 512) - 256) / 128.0f; /* exact in 16 bits */
}

static fsdpc_status add_unit(rig *r, const scene *s, bool band_per_param)
{
    fsdpc_param_spec specs[N_PARAMS];
    for (int p = 0; p < N_PARAMS; p++)
        specs[p] = rig_spec("p", s->master, shapes[p][1] ? 2 : 1, shapes[p][0], shapes[p][1], 0);
    fsdpc_unit_options options = rig_options(r, "u");
    options.cast_params = options.cast_reduce = true;
    options.param_dtype = s->param_buffer;
    options.reduce_dtype = FSDPC_F32;
    options.band_per_param = band_per_param;
    FSDPC_TRY(rig_add(r, &options, specs, N_PARAMS));
    for (int p = 0; p < N_PARAMS; p++) {
        float unsharded[NUMEL];
        for (size_t i = 0; i < r->units[0]->layout->params[p].numel; i++)
            unsharded[i] = start_of(p, i);
        FSDPC_TRY(fsdpc_unit_write(r->units[0], p, unsharded, FSDPC_F32));
    }
    return rig_root(r);
}

/* ---- the plain way: one element at a time, in double ---- */

typedef struct element {
    double p, m, v;
    int64_t steps;
} element;

static void plain_step(element *e, double g, const fsdpc_hyper *h, fsdpc_optim_kind kind)
{
    e->steps++;
    if (h->maximize)
        g = -g;
    if (kind == FSDPC_OPTIM_ADAMW || kind == FSDPC_OPTIM_LION)
        e->p -= h->lr * h->weight_decay * e->p;
    else
        g += h->weight_decay * e->p;
    if (kind == FSDPC_OPTIM_SGD) {
        e->m = e->steps == 1 ? g : h->momentum * e->m + (1 - h->dampening) * g;
        e->p -= h->lr * e->m;
        return;
    }
    if (kind == FSDPC_OPTIM_LION) {
        double ahead = h->beta1 * e->m + (1 - h->beta1) * g;
        e->p -= h->lr * (double)((ahead > 0) - (ahead < 0));
        e->m = h->beta2 * e->m + (1 - h->beta2) * g;
        return;
    }
    e->m = h->beta1 * e->m + (1 - h->beta1) * g;
    e->v = h->beta2 * e->v + (1 - h->beta2) * g * g;
    double bias1 = 1 - pow(h->beta1, (double)e->steps), bias2 = 1 - pow(h->beta2, (double)e->steps);
    e->p -= h->lr / bias1 * e->m / (sqrt(e->v) / sqrt(bias2) + h->eps);
}

static const fsdpc_hyper hypers[2] = {
    {.lr = 1e-2,
     .beta1 = 0.9,
     .beta2 = 0.95,
     .eps = 1e-8,
     .weight_decay = 0.0971,
     .momentum = 0.9,
     .dampening = 0.25},
    {.lr = 3e-3,
     .beta1 = 0.8,
     .beta2 = 0.99,
     .eps = 1e-6,
     .weight_decay = 0.0,
     .momentum = 0.5,
     .maximize = true},
};
static const int groups[N_PARAMS] = {0, 0, 1, 0, 1, 0};

/* Parameter 1 is frozen in step 2, parameter 3 up to step 1, 4 was never given to the optimizer. */
static bool steps_in(int param, int step)
{
    return param != 4 && !(param == 1 && step == 2) && !(param == 3 && step < 1);
}

static fsdpc_status make_optim(rig *r, const scene *s, fsdpc_optim **out)
{
    FSDPC_TRY(fsdpc_optim_create(s->kind, r->device, r->trace, out));
    const fsdpc_state_format format = {.dtype = s->state};
    FSDPC_TRY(fsdpc_optim_set_format(*out, &format, 3));
    for (int p = 0; p < N_PARAMS; p++) {
        if (p != 4)
            FSDPC_TRY(fsdpc_optim_add(*out, r->units[0], p, groups[p]));
    }
    FSDPC_TRY(fsdpc_optim_set_hyper(*out, 1, &hypers[1]));
    return fsdpc_optim_set_hyper(*out, 0, &hypers[0]);
}

static double read_as(const void *data, fsdpc_dtype dtype, size_t i)
{
    switch (dtype) {
    case FSDPC_F32:
        return (double)((const float *)data)[i];
    case FSDPC_F64:
        return ((const double *)data)[i];
    case FSDPC_F16:
        return (double)fsdpc_f16_to_f32(((const uint16_t *)data)[i]);
    default:
        return (double)fsdpc_bf16_to_f32(((const uint16_t *)data)[i]);
    }
}

/* x as a number of the dtype; nothing here is subnormal or large. */
static double rounded(double x, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F16)
        return (double)fsdpc_f16_to_f32(fsdpc_f32_to_f16((float)x));
    if (dtype == FSDPC_BF16)
        return (double)fsdpc_bf16_to_f32(fsdpc_f32_to_bf16((float)x));
    return dtype == FSDPC_F32 ? (double)(float)x : x;
}

/* How near a master is to the plain way's, which is in double. */
static double tolerance(const scene *s)
{
    if (s->state == FSDPC_BF16)
        return 0x1p-6; /* a second moment off by 2^-8 moves a step of 1e-2 by less */
    if (s->master == FSDPC_BF16 || s->master == FSDPC_F16)
        return s->master == FSDPC_BF16 ? 0x1p-7 : 0x1p-10; /* rounded to a neighbour */
    /* Adam's decayed gradient cancels here and there, never to zero with this decay; gradients of
     * fp64 masters are reduced in fp32 here */
    return s->kind == FSDPC_OPTIM_ADAM ? 5e-5 : 2e-6;
}

static double average(int world, int step, int param, size_t i)
{
    double sum = 0;
    for (int q = 0; q < world; q++)
        sum += rig_gradient(q, step, 0, param, i);
    return sum / world;
}

/* Compares this rank's local shards: result[0] parameters, [1] parameter buffer, [2] states, [3]
 * step counts. */
static fsdpc_status compare(rig *r, const scene *s, fsdpc_optim *optim, int steps)
{
    fsdpc_unit *unit = r->units[0];
    for (int p = 0; p < N_PARAMS; p++) {
        fsdpc_local_shard local;
        int64_t count = 0, expect = 0;
        fsdpc_optim_view views[2] = {{.data = NULL}, {.data = NULL}};
        const void *master = fsdpc_unit_master(unit, p, &local);
        const void *unsharded = fsdpc_unit_unsharded(unit, p);
        int n_states = p == 4 ? 0 : fsdpc_optim_states(s->kind, &hypers[groups[p]]);
        if (p != 4) {
            for (int k = 0; k < 2; k++) {
                FSDPC_TRY(fsdpc_optim_state(optim, unit, p, k, false, &views[k]));
                r->result[2] += (views[k].data != NULL) != (k < n_states);
            }
            FSDPC_TRY(fsdpc_optim_step_count(optim, unit, p, &count));
            for (int step = 0; step < steps; step++)
                expect += steps_in(p, step);
            r->result[3] += count != expect;
        }
        for (size_t i = 0; i < local.numel; i++) {
            element e = {.p = start_of(p, local.first + i)};
            for (int step = 0; step < steps; step++) {
                if (!steps_in(p, step))
                    continue;
                plain_step(&e, average(r->world, step, p, local.first + i) * 0.5,
                           &hypers[groups[p]], s->kind);
                e.p = s->master == FSDPC_F32 ? e.p : rounded(e.p, s->master);
            }
            double now = read_as(master, s->master, i);
            r->result[0] += !(fabs(now - e.p) <= tolerance(s) * (1 + fabs(e.p)));
            if (p == 4)
                r->result[0] += now != start_of(p, local.first + i);
            r->result[1] += read_as(unsharded, s->param_buffer, local.first + i) !=
                            rounded(now, s->param_buffer);
            const double plain[2] = {e.m, e.v};
            for (int k = 0; k < n_states; k++) {
                double state = read_as(views[k].data, views[k].dtype, i);
                double near = 1e-2 * (1e-3 + fabs(plain[k]));
                if (s->state == FSDPC_BF16) /* four roundings, of numbers that may cancel later */
                    near = 0x1p-6 * (0.25 + fabs(plain[k]));
                r->result[2] += !(fabs(state - plain[k]) <= near);
            }
            r->result[4] += 1;
        }
    }
    return FSDPC_OK;
}

static fsdpc_status run_steps_of(rig *r, bool band_per_param)
{
    const scene *s = r->arg;
    fsdpc_optim *optim = NULL;
    FSDPC_TRY(add_unit(r, s, band_per_param));
    FSDPC_TRY(make_optim(r, s, &optim));
    fsdpc_status status = FSDPC_OK;
    for (int step = 0; step < 4 && status == FSDPC_OK; step++) {
        for (int p = 0; p < N_PARAMS; p++)
            r->units[0]->trainable[p] = p == 4 || steps_in(p, step);
        status = rig_step(r);
        r->units[0]->pending_scale = 0.5; /* as clipping leaves it */
        FSDPC_KEEP_FIRST(status, fsdpc_optim_step(optim));
        fsdpc_unit_zero_grad(r->units[0]);
    }
    FSDPC_KEEP_FIRST(status, compare(r, s, optim, 4));
    /* without gradients nothing moves, decay included, and nothing is counted */
    FSDPC_KEEP_FIRST(status, fsdpc_optim_step(optim));
    FSDPC_KEEP_FIRST(status, compare(r, s, optim, 4));
    fsdpc_optim_destroy(optim);
    return status;
}

static fsdpc_status run_steps(rig *r)
{
    return run_steps_of(r, false);
}

static fsdpc_status run_steps_of_even_chunks(rig *r)
{
    return run_steps_of(r, true);
}

static void test_steps(void)
{
    scene scenes[] = {{FSDPC_F32, FSDPC_F32, FSDPC_OPTIM_ADAMW, FSDPC_F32},
                      {FSDPC_F32, FSDPC_BF16, FSDPC_OPTIM_ADAMW, FSDPC_F32},
                      {FSDPC_BF16, FSDPC_BF16, FSDPC_OPTIM_ADAMW, FSDPC_F32},
                      {FSDPC_F32, FSDPC_F32, FSDPC_OPTIM_ADAM, FSDPC_F32},
                      {FSDPC_F32, FSDPC_F32, FSDPC_OPTIM_SGD, FSDPC_F32},
                      {FSDPC_F32, FSDPC_BF16, FSDPC_OPTIM_LION, FSDPC_F32},
                      {FSDPC_F16, FSDPC_F16, FSDPC_OPTIM_ADAMW, FSDPC_F32},
                      {FSDPC_F64, FSDPC_F32, FSDPC_OPTIM_SGD, FSDPC_F32},
                      {FSDPC_F64, FSDPC_F64, FSDPC_OPTIM_ADAMW, FSDPC_BF16},
                      {FSDPC_F32, FSDPC_BF16, FSDPC_OPTIM_ADAMW, FSDPC_BF16},
                      {FSDPC_F16, FSDPC_BF16, FSDPC_OPTIM_SGD, FSDPC_BF16}};
    for (size_t c = 0; c < sizeof scenes / sizeof scenes[0]; c++) {
        for (int run = 1; run <= RIG_RANKS + 1; run++) {
            bool even = run > RIG_RANKS;
            int world = even ? 3 : run;
            rig rigs[RIG_RANKS];
            double elements = 0;
            rigs_run(rigs, world, even ? run_steps_of_even_chunks : run_steps, &scenes[c]);
            for (int p = 0; p < world; p++) {
                static const char *const what[] = {"parameters", "parameter buffer", "states",
                                                   "step counts"};
                for (int k = 0; k < 4; k++)
                    CHECK_NOTE(rigs[p].result[k] == 0, "scene %zu, rank %d of %d: %g wrong %s", c,
                               p, world, rigs[p].result[k], what[k]);
                elements += rigs[p].result[4] / 2;
            }
            CHECK(elements == 7 * 9 + 70 * 9 + 5 + 130 + 3 * 9);
            rigs_close(rigs, world);
        }
    }
}

static fsdpc_status set_dtype(fsdpc_optim *optim, fsdpc_dtype dtype)
{
    const fsdpc_state_format format = {.dtype = dtype};
    return fsdpc_optim_set_format(optim, &format, 0);
}

static void test_refused(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    scene s = {FSDPC_F32, FSDPC_F32, FSDPC_OPTIM_ADAMW, FSDPC_F32};
    CHECK_OK(add_unit(&r, &s, false));
    fsdpc_optim *optim;
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r.device, NULL, &optim));
    CHECK_FAILS(set_dtype(optim, FSDPC_F16), FSDPC_ERR_DTYPE, "float16");
    CHECK_OK(fsdpc_optim_add(optim, r.units[0], 0, 0));
    CHECK_FAILS(fsdpc_optim_add(optim, r.units[0], 0, 1), FSDPC_ERR_VALUE, "two parameter groups");
    CHECK_FAILS(fsdpc_optim_add(optim, r.units[0], 1, -1), FSDPC_ERR_VALUE, "count from 0");
    CHECK_FAILS(set_dtype(optim, FSDPC_BF16), FSDPC_ERR_STATE, "before");
    uint64_t epoch = r.root->param_buffer->epoch;
    CHECK_FAILS(fsdpc_optim_step(optim), FSDPC_ERR_STATE, "no hyper-parameters");
    CHECK(r.root->param_buffer->epoch == epoch && r.root->steps == 0);
    fsdpc_optim_view view;
    CHECK_FAILS(fsdpc_optim_state(optim, r.units[0], 3, 0, false, &view), FSDPC_ERR_KEY, "'p'");
    CHECK_OK(fsdpc_optim_state(optim, r.units[0], 0, 0, false, &view));
    CHECK(!view.data);
    CHECK_FAILS(fsdpc_optim_set_step_count(optim, r.units[0], 0, -1), FSDPC_ERR_VALUE, "-1 steps");
    CHECK_OK(fsdpc_optim_set_hyper(optim, 0, &hypers[0]));
    CHECK_OK(fsdpc_optim_step(optim));
    CHECK(r.root->param_buffer->epoch == epoch + 1 && r.root->steps == 1);
    CHECK(r.root->epoch_progress == FSDPC_EPOCH_AT_IDLE);
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

/* Every rank's rows meet in the full state, and a full state goes back to rows. */
static fsdpc_status carry_states(rig *r)
{
    const scene *s = r->arg;
    fsdpc_optim *optim = NULL, *other = NULL;
    FSDPC_TRY(add_unit(r, s, false));
    FSDPC_TRY(make_optim(r, s, &optim));
    FSDPC_TRY(make_optim(r, s, &other));
    FSDPC_TRY(rig_step(r));
    FSDPC_TRY(fsdpc_optim_step(optim));
    for (int p = 0; p < N_PARAMS; p++) {
        for (int k = 0; p != 4 && k < 2; k++) {
            float unsharded[NUMEL];
            fsdpc_optim_view from, to;
            FSDPC_TRY(fsdpc_optim_collect(optim, r->units[0], p, k, unsharded));
            FSDPC_TRY(fsdpc_optim_write(other, r->units[0], p, k, unsharded, FSDPC_F32));
            FSDPC_TRY(fsdpc_optim_state(optim, r->units[0], p, k, false, &from));
            FSDPC_TRY(fsdpc_optim_state(other, r->units[0], p, k, true, &to));
            size_t bytes = from.local.numel * sizeof(float);
            r->result[0] += from.data == to.data || memcmp(from.data, to.data, bytes) != 0;
            r->result[1] += bytes > 0 && memcmp(unsharded + from.local.first, to.data, bytes) != 0;
            for (size_t i = 0; i < r->units[0]->layout->params[p].numel; i++) {
                element e = {.p = start_of(p, i)};
                plain_step(&e, average(r->world, 0, p, i), &hypers[groups[p]], s->kind);
                double plain = k ? e.v : e.m;
                r->result[2] +=
                    !(fabs((double)unsharded[i] - plain) <= 1e-2 * (1e-3 + fabs(plain)));
            }
        }
    }
    FSDPC_TRY(fsdpc_optim_set_step_count(other, r->units[0], 1, 0));
    fsdpc_optim_view view;
    FSDPC_TRY(fsdpc_optim_state(other, r->units[0], 1, 0, false, &view));
    for (size_t i = 0; i < view.local.numel; i++)
        r->result[3] += ((const float *)view.data)[i] != 0;
    fsdpc_optim_destroy(optim);
    fsdpc_optim_destroy(other);
    return FSDPC_OK;
}

static void test_carried(void)
{
    scene s = {FSDPC_F32, FSDPC_F32, FSDPC_OPTIM_ADAMW, FSDPC_F32};
    for (int world = 1; world <= RIG_RANKS; world++) {
        rig rigs[RIG_RANKS];
        rigs_run(rigs, world, carry_states, &s);
        for (int p = 0; p < world; p++)
            for (int k = 0; k < 4; k++)
                CHECK_NOTE(rigs[p].result[k] == 0, "rank %d of %d: %g wrong (%d)", p, world,
                           rigs[p].result[k], k);
        rigs_close(rigs, world);
    }
}

/* Before the first forward there is no parameter buffer: masters step, the first epoch copies them
 * in. */
static void test_rootless(void)
{
    rig r;
    CHECK_OK(rig_open(&r, 1, false));
    fsdpc_param_spec spec = rig_spec("w", FSDPC_F32, 1, 4, 0, 0);
    fsdpc_unit_options options = rig_options(&r, "u");
    CHECK_OK(rig_add(&r, &options, &spec, 1));
    CHECK_OK(fsdpc_unit_init_param(r.units[0], 0, FSDPC_INIT_CONSTANT, 1, 0, 0, 0));
    fsdpc_optim *optim;
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_ADAMW, r.device, NULL, &optim));
    CHECK_OK(fsdpc_optim_add(optim, r.units[0], 0, 0));
    CHECK_OK(fsdpc_optim_set_hyper(optim, 0, &hypers[0]));
    rig_own_grads(r.units[0]); /* zeros: decay alone */
    r.units[0]->dirty = false;
    CHECK_OK(fsdpc_optim_step(optim));
    CHECK(r.units[0]->dirty);
    CHECK_OK(rig_root(&r));
    CHECK_OK(fsdpc_pre_forward(r.units[0], false));
    CHECK(fabsf(*(float *)fsdpc_unit_unsharded(r.units[0], 0) - 0.999029f) < 1e-6f);
    CHECK_OK(fsdpc_post_forward(r.units[0]));
    fsdpc_optim_destroy(optim);
    rig_close(&r);
}

/* ---- averages ---- */

static bool masters_are(const rig *r, float factor)
{
    size_t wrong = 0;
    for (int p = 0; p < N_PARAMS; p++) {
        fsdpc_local_shard local;
        const float *master = fsdpc_unit_master(r->units[0], p, &local);
        for (size_t i = 0; i < local.numel; i++)
            wrong += master[i] != factor * start_of(p, local.first + i);
    }
    return wrong == 0;
}

/* Masters times 3: 0.25 start + 0.75 * 3 start is exact. An update begins no epoch; a swap begins
 * one, is its own inverse, counts no step and is refused to others until then. */
static void test_average(void)
{
    const fsdpc_hyper move = {.decay = 0.25}, swap = {.swap = true};
    scene s = {FSDPC_F32, FSDPC_BF16, FSDPC_OPTIM_EMA, FSDPC_F32};
    rig r;
    fsdpc_optim *ema, *other;
    CHECK_OK(rig_open(&r, 1, false));
    CHECK_OK(add_unit(&r, &s, false));
    CHECK_OK(fsdpc_unit_set_trainable(r.units[0], 4, false));
    CHECK_OK(fsdpc_optim_create(FSDPC_OPTIM_EMA, r.device, NULL, &ema));
    CHECK_OK(make_optim(&r, &(scene){.kind = FSDPC_OPTIM_ADAMW, .state = FSDPC_F32}, &other));
    for (int p = 0; p < N_PARAMS; p++)
        CHECK_OK(fsdpc_optim_add(ema, r.units[0], p, 0));
    CHECK_OK(fsdpc_optim_set_hyper(ema, 0, &move));
    uint64_t epoch = r.root->param_buffer->epoch;
    CHECK_OK(fsdpc_optim_step(ema));
    for (int p = 0; p < N_PARAMS; p++) {
        fsdpc_local_shard local;
        float *master = fsdpc_unit_master(r.units[0], p, &local);
        for (size_t i = 0; i < local.numel; i++)
            master[i] *= 3;
    }
    CHECK_OK(fsdpc_optim_step(ema));
    CHECK(r.root->param_buffer->epoch == epoch && masters_are(&r, 3));
    CHECK_OK(fsdpc_optim_set_hyper(ema, 0, &swap));
    CHECK_OK(fsdpc_optim_step(ema));
    fsdpc_local_shard frozen;
    float *fixed = fsdpc_unit_master(r.units[0], 4, &frozen); /* has no average */
    for (size_t i = 0; i < frozen.numel; i++)
        fixed[i] *= 2.5f / 3;
    CHECK(r.root->param_buffer->epoch == epoch + 1 && masters_are(&r, 2.5f));
    CHECK_FAILS(fsdpc_optim_step(other), FSDPC_ERR_STATE, "unit 'u' are exchanged");
    CHECK_OK(fsdpc_optim_step(ema));
    int64_t steps[2];
    CHECK_OK(fsdpc_optim_step_count(ema, r.units[0], 0, &steps[0]));
    CHECK_OK(fsdpc_optim_step_count(ema, r.units[0], 4, &steps[1]));
    CHECK(steps[0] == 2 && steps[1] == 0 && masters_are(&r, 3) == (frozen.numel == 0));
    CHECK_OK(fsdpc_optim_step(other));
    CHECK_OK(fsdpc_optim_step(ema));
    fsdpc_optim_destroy(ema); /* takes its mark along */
    CHECK_OK(fsdpc_optim_step(other));
    fsdpc_optim_destroy(other);
    rig_close(&r);
}

int main(void)
{
    test_average();
    test_steps();
    test_carried();
    test_refused();
    test_rootless();
    return check_report("test_optim");
}
