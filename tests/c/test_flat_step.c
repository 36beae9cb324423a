/* step of every optimizer: against the definitions in fp64, the same bits for any cut, number of
 * threads and instruction set with every dtype, and states in bf16: their bits by a second
 * spelling, their mean, and what the random bits depend on. AdamW has test_flat_adamw.c besides.
 */
#include "test_flat_common.h"

#include "base/random.h"

enum { N = 1003, STEPS = 12 };

typedef struct optimizer {
    const char *name;
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
} optimizer;

#define MEAN .lr = 1e-3, .alpha = 0.9, .eps = 1e-2
#define ADAM .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.97, .eps = 1e-8
static const optimizer optimizers[] = {
    {"AdamW", FSDPC_OPTIM_ADAMW, {ADAM, .weight_decay = 0.1}},
    {"AdamW amsgrad", FSDPC_OPTIM_ADAMW, {ADAM, .weight_decay = 0.1, .amsgrad = true}},
    {"Adam amsgrad", FSDPC_OPTIM_ADAM, {ADAM, .amsgrad = true, .maximize = true}},
    {"SGD", FSDPC_OPTIM_SGD, {.lr = 0.1}},
    {"SGD decay", FSDPC_OPTIM_SGD, {.lr = 0.1, .weight_decay = 0.1, .maximize = true}},
    {"momentum", FSDPC_OPTIM_SGD, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}},
    {"dampening", FSDPC_OPTIM_SGD, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3}},
    {"Nesterov", FSDPC_OPTIM_SGD, {.lr = 0.1, .momentum = 0.7, .nesterov = true, .maximize = true}},
    {"Lion", FSDPC_OPTIM_LION, {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}},
    {"Lion up", FSDPC_OPTIM_LION, {.lr = 1e-2, .beta1 = 0.5, .beta2 = 0.7, .maximize = true}},
    {"RMSprop", FSDPC_OPTIM_RMSPROP, {MEAN, .weight_decay = 0.1, .maximize = true}},
    {"RMSprop momentum", FSDPC_OPTIM_RMSPROP, {MEAN, .momentum = 0.8}},
    {"RMSprop centered", FSDPC_OPTIM_RMSPROP, {MEAN, .momentum = 0.5, .centered = true}},
    {"EMA", FSDPC_OPTIM_EMA, {.decay = 0.9}},
    {"EMA, quick", FSDPC_OPTIM_EMA, {.decay = 0.3}},
    {"EMA swap", FSDPC_OPTIM_EMA, {.decay = 0.9, .swap = true}},
};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

typedef struct scene {
    void *param, *grad, *states[3], *copy_in;
} scene;

static scene scene_create(size_t numel)
{
    scene s = {.param = test_alloc(numel * 8), .grad = test_alloc(numel * 8)};
    for (int k = 0; k < 3; k++)
        s.states[k] = test_alloc(numel * 8);
    s.copy_in = test_alloc(numel * 8);
    return s;
}

static void scene_destroy(scene *s)
{
    free(s->param), free(s->grad), free(s->copy_in);
    for (int k = 0; k < 3; k++)
        free(s->states[k]);
}

static fsdpc_step_args args_for(const scene *s, const optimizer *o, size_t numel, int64_t step)
{
    fsdpc_step_args a = {.kind = o->kind,
                         .hyper = o->hyper,
                         .param = s->param,
                         .grad = s->grad,
                         .numel = numel,
                         .grad_scale = 1,
                         .step = step,
                         .copy_gradient = step == 1,
                         .seed = 77,
                         .number = 5};
    memcpy(a.states, s->states, sizeof a.states);
    return a;
}

/* -- the definitions, in fp64 ------------------------------------------------------------------ */

typedef struct reference {
    double p, m, v, most;
} reference;

static void reference_step(reference *r, const fsdpc_step_args *a, double g)
{
    const fsdpc_hyper *h = &a->hyper;
    g *= h->maximize ? -a->grad_scale : a->grad_scale;
    if (!fsdpc_optim_table[a->kind].decoupled)
        g += h->weight_decay * r->p;
    else
        r->p -= h->lr * h->weight_decay * r->p;
    if (a->kind == FSDPC_OPTIM_SGD) {
        r->m = a->step == 1 ? g : h->momentum * r->m + (1 - h->dampening) * g;
        r->p -= h->lr * (h->momentum == 0 ? g : h->nesterov ? g + h->momentum * r->m : r->m);
    } else if (a->kind == FSDPC_OPTIM_RMSPROP) {
        r->m = h->alpha * r->m + (1 - h->alpha) * g * g;
        r->most = h->alpha * r->most + (1 - h->alpha) * g;
        double square = h->centered ? r->m - r->most * r->most : r->m;
        r->v = h->momentum * r->v + g / (sqrt(square) + h->eps);
        r->p -= h->lr * r->v;
    } else if (a->kind == FSDPC_OPTIM_EMA) {
        double average = r->m;
        r->m = h->swap || a->step == 1 ? r->p : h->decay * r->m + (1 - h->decay) * r->p;
        r->p = h->swap ? average : r->p;
    } else if (a->kind == FSDPC_OPTIM_LION) {
        double ahead = h->beta1 * r->m + (1 - h->beta1) * g;
        r->p -= h->lr * (double)((ahead > 0) - (ahead < 0));
        r->m = h->beta2 * r->m + (1 - h->beta2) * g;
    } else {
        r->m = h->beta1 * r->m + (1 - h->beta1) * g;
        r->v = h->beta2 * r->v + (1 - h->beta2) * g * g;
        r->most = fmax(r->most, r->v);
        double top = r->m / (1 - pow(h->beta1, (double)a->step));
        double square = (h->amsgrad ? r->most : r->v) / (1 - pow(h->beta2, (double)a->step));
        r->p -= h->lr * top / (sqrt(square) + h->eps);
    }
}

static void test_against_f64(rig *r, const optimizer *o, fsdpc_dtype dtype)
{
    scene s = scene_create(N);
    reference *expect = test_alloc(N * sizeof *expect);
    fill_random(s.param, N, dtype, 1);
    for (size_t i = 0; i < N; i++)
        expect[i].p = element(s.param, i, dtype);
    for (int step = 1; step <= STEPS; step++) {
        fill_random(s.grad, N, dtype, (uint64_t)step * 77);
        fsdpc_step_args args = args_for(&s, o, N, step);
        args.param_dtype = args.grad_dtype = args.state_dtype = dtype;
        args.grad_scale = 0.5f;
        CHECK_OK(r->ops->step(&args, &r->stream));
        for (size_t i = 0; i < N; i++)
            reference_step(&expect[i], &args, element(s.grad, i, dtype));
    }
    double worst = 0, state = 0;
    for (size_t i = 0; i < N; i++) {
        worst = fmax(worst, fabs(expect[i].p - element(s.param, i, dtype)));
        if (fsdpc_optim_states(o->kind, &o->hyper) > 0)
            state = fmax(state, fabs(expect[i].m - element(s.states[0], i, dtype)));
        if (o->hyper.amsgrad || o->hyper.centered)
            state = fmax(state, fabs(expect[i].most - element(s.states[2], i, dtype)));
    }
    /* a dozen roundings of numbers about 1, and momentum about 3 */
    double near = dtype == FSDPC_F64 ? 4e-15 : 2e-6;
    CHECK_NOTE(worst < near && state < near, "%s: %g, states %g", o->name, worst, state);
    scene_destroy(&s);
    free(expect);
}

/* -- cuts, paths, dtypes ----------------------------------------------------------------------- */

static void step_in_parts(rig *r, const fsdpc_step_args *whole, bool cuts)
{
    uint64_t random = whole->numel;
    for (size_t at = 0, take; at < whole->numel; at += take) {
        take = cuts ? 1 + random_bits(&random) % (whole->numel / 3 + 20) : whole->numel;
        take = take > whole->numel - at ? whole->numel - at : take;
        fsdpc_step_args a = *whole;
        a.param = at_element(a.param, at, a.param_dtype);
        a.grad = at_element((void *)a.grad, at, a.grad_dtype);
        for (int k = 0; k < 3; k++)
            a.states[k] = at_element(a.states[k], at, a.state_dtype);
        a.copy_in = a.copy_in ? at_element(a.copy_in, at, a.copy_in_dtype) : NULL;
        a.numel = take, a.first += at;
        CHECK_OK(r->ops->step(&a, &r->stream));
    }
}

typedef struct dtypes {
    fsdpc_dtype param, grad, state;
    int copy_in; /* -1: none */
} dtypes;

/* This rig in pieces, against the portable one in one piece. */
static void check_same(rig *r, rig *portable, const optimizer *o, dtypes d, size_t numel)
{
    scene s[2] = {scene_create(numel), scene_create(numel)};
    for (int step = 1; step <= 3; step++) {
        for (int k = 0; k < 2; k++) {
            if (step == 1)
                fill_random(s[k].param, numel, d.param, 1);
            fill_random(s[k].grad, numel, d.grad, (uint64_t)step);
            fsdpc_step_args args = args_for(&s[k], o, numel, step);
            args.param_dtype = d.param, args.grad_dtype = d.grad, args.state_dtype = d.state;
            args.copy_in = d.copy_in < 0 ? NULL : s[k].copy_in;
            args.copy_in_dtype = d.copy_in < 0 ? FSDPC_F32 : (fsdpc_dtype)d.copy_in;
            args.grad_scale = 0.25f, args.first = 3;
            step_in_parts(k ? portable : r, &args, !k);
        }
    }
    bool same = memcmp(s[0].param, s[1].param, numel * fsdpc_dtype_bytes(d.param)) == 0;
    for (int k = 0; k < 3; k++)
        same &= memcmp(s[0].states[k], s[1].states[k], numel * fsdpc_dtype_bytes(d.state)) == 0;
    CHECK_NOTE(same, "%s, %s, gradient %s, states %s, copy-in %d, %zu", o->name,
               fsdpc_dtype_name(d.param), fsdpc_dtype_name(d.grad), fsdpc_dtype_name(d.state),
               d.copy_in, numel);
    bool equal = true;
    if (d.copy_in >= 0)
        CHECK_OK(r->ops->equal(s[0].copy_in, (fsdpc_dtype)d.copy_in, s[0].param, d.param, numel,
                               &equal, &r->stream));
    CHECK_NOTE(equal, "%s, copy-in %d", o->name, d.copy_in);
    for (int k = 0; k < fsdpc_optim_states(o->kind, &o->hyper) && numel > 8; k++) {
        int moved = 0;
        for (size_t i = 0; i < numel; i++)
            moved += element(s[0].states[k], i, d.state) != 0;
        CHECK_NOTE(moved > 0, "%s, state %d", o->name, k);
    }
    scene_destroy(&s[0]), scene_destroy(&s[1]);
}

static void test_dtypes(rig *r, rig *portable, size_t numel)
{
    static const dtypes kinds[] = {
        {FSDPC_F32, FSDPC_F32, FSDPC_F32, -1},
        {FSDPC_F32, FSDPC_F32, FSDPC_F32, FSDPC_F32},
        {FSDPC_F32, FSDPC_F32, FSDPC_F32, FSDPC_BF16},
        {FSDPC_F32, FSDPC_F32, FSDPC_F32, FSDPC_F16},
        {FSDPC_F32, FSDPC_BF16, FSDPC_F32, -1},
        {FSDPC_BF16, FSDPC_F32, FSDPC_F32, FSDPC_BF16},
        {FSDPC_BF16, FSDPC_BF16, FSDPC_F32, -1},
        {FSDPC_F16, FSDPC_F32, FSDPC_F32, FSDPC_F16},
        {FSDPC_F16, FSDPC_F16, FSDPC_F32, FSDPC_F32},
        {FSDPC_F64, FSDPC_F64, FSDPC_F64, FSDPC_F64},
        {FSDPC_F64, FSDPC_F64, FSDPC_F64, FSDPC_BF16},
        {FSDPC_F32, FSDPC_F32, FSDPC_BF16, FSDPC_F32},
        {FSDPC_F32, FSDPC_F32, FSDPC_BF16, -1},
        {FSDPC_BF16, FSDPC_F32, FSDPC_BF16, FSDPC_BF16},
        {FSDPC_F16, FSDPC_F16, FSDPC_BF16, FSDPC_F64},
    };
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (int o = 0; o < OPTIMIZERS; o++)
            check_same(r, portable, &optimizers[o], kinds[k], numel);
}

/* Long enough for several threads and for a parameter buffer past the cache. */
static void test_long(rig *r, rig *portable)
{
    for (int o = 0; o < OPTIMIZERS; o++) {
        dtypes d = {FSDPC_F32, FSDPC_F32, o % 2 ? FSDPC_BF16 : FSDPC_F32, FSDPC_BF16};
        check_same(r, portable, &optimizers[o], d, 150001);
    }
    scene s = scene_create(1);
    enum { LONG = (1 << 20) + 19 };
    void *memory[4];
    for (int k = 0; k < 4; k++)
        memory[k] = aligned_alloc(64, (LONG * 4 + 63) / 64 * 64);
    for (int o = 0; o < OPTIMIZERS; o++) {
        if (fsdpc_optim_states(optimizers[o].kind, &optimizers[o].hyper) > 1)
            continue;
        fsdpc_step_args a = args_for(&s, &optimizers[o], LONG, 1);
        fill_random(memory[0], LONG, FSDPC_F32, 1);
        fill_random(memory[1], LONG, FSDPC_F32, 2);
        memset(memory[2], 0, LONG * 4);
        a.param = memory[0], a.grad = memory[1], a.states[0] = memory[2], a.copy_in = memory[3];
        a.copy_in_dtype = o % 2 ? FSDPC_F32 : FSDPC_BF16;
        CHECK_OK(r->ops->step(&a, &r->stream));
        bool equal = true;
        CHECK_OK(r->ops->equal(a.copy_in, a.copy_in_dtype, a.param, FSDPC_F32, LONG, &equal,
                               &r->stream));
        CHECK_NOTE(equal, "%s", optimizers[o].name);
    }
    for (int k = 0; k < 4; k++)
        free(memory[k]);
    scene_destroy(&s);
}

/* -- states in bf16 ---------------------------------------------------------------------------- */

static uint16_t rounded(float x, uint32_t word, int state)
{
    uint32_t random = state == 0 ? word & 0xffff : word >> 16;
    float low = fsdpc_bf16_to_f32((uint16_t)(fsdpc_f32_bits(x) >> 16)); /* towards zero */
    uint16_t at = (uint16_t)(fsdpc_f32_bits(x) >> 16);
    float high = fsdpc_bf16_to_f32((uint16_t)(at + 1));
    double share = ((double)x - (double)low) / ((double)high - (double)low);
    return (uint16_t)(at + (share * 65536 + random >= 65536));
}

/* One step by bf16 states, against one by fp32 states from the same values, rounded here. */
static void test_rounding(rig *r)
{
    const optimizer *o = &optimizers[1]; /* three states */
    scene narrow = scene_create(N), wide = scene_create(N);
    fill_random(narrow.param, N, FSDPC_F32, 1), fill_random(wide.param, N, FSDPC_F32, 1);
    int up = 0, wrong = 0;
    for (int step = 1; step <= STEPS; step++) {
        fill_random(narrow.grad, N, FSDPC_F32, (uint64_t)step);
        fill_random(wide.grad, N, FSDPC_F32, (uint64_t)step);
        fsdpc_step_args a = args_for(&narrow, o, N, step), b = args_for(&wide, o, N, step);
        a.state_dtype = FSDPC_BF16, a.first = b.first = 6;
        CHECK_OK(r->ops->step(&a, &r->stream));
        CHECK_OK(r->ops->step(&b, &r->stream));
        wrong += memcmp(narrow.param, wide.param, N * 4) != 0;
        for (size_t i = 0; i < N; i++) {
            uint64_t at = 6 + i;
            uint32_t word =
                fsdpc_philox_block(77, (uint64_t)5 << 32 | (uint32_t)step, at / 4).x[at % 4];
            for (int k = 0; k < 3; k++) {
                float *exact = (float *)wide.states[k] + i;
                uint16_t expect = rounded(*exact, word, k);
                wrong += ((uint16_t *)narrow.states[k])[i] != expect;
                up += expect != fsdpc_f32_bits(*exact) >> 16;
                *exact = fsdpc_bf16_to_f32(expect); /* the next step begins from what is stored */
            }
            wrong +=
                element(narrow.states[2], i, FSDPC_BF16) < element(narrow.states[1], i, FSDPC_BF16);
        }
    }
    CHECK_NOTE(wrong == 0, "%d", wrong);
    CHECK(up > N && up < 2 * N * STEPS);
    scene_destroy(&narrow), scene_destroy(&wide);
}

/* The mean over elements that all hold the same number: what rounding to nearest would lose. */
static void test_unbiased(rig *r)
{
    enum { MANY = 200000 };
    const optimizer *o = &optimizers[0];
    scene s = scene_create(MANY);
    for (size_t i = 0; i < MANY; i++)
        set_element(s.grad, i, FSDPC_F32, 1.003);
    double m = 0, v = 0;
    for (int step = 1; step <= 40; step++) {
        fsdpc_step_args a = args_for(&s, o, MANY, step);
        a.state_dtype = FSDPC_BF16;
        CHECK_OK(r->ops->step(&a, &r->stream));
        m += (1 - 0.9) * (1.003 - m), v += (1 - 0.97) * (1.003 * 1.003 - v);
    }
    double mean[2] = {0}, spread = 0;
    for (size_t i = 0; i < MANY; i++) {
        mean[0] += element(s.states[0], i, FSDPC_BF16) / MANY;
        mean[1] += element(s.states[1], i, FSDPC_BF16) / MANY;
    }
    for (size_t i = 0; i < MANY; i++)
        spread += pow(element(s.states[1], i, FSDPC_BF16) - mean[1], 2) / MANY;
    /* numbers about 1 are 2^-8 apart; the standard error of a mean is under 2e-5 */
    CHECK_NOTE(fabs(mean[0] - m) < 1e-4, "%g", mean[0] - m);
    CHECK_NOTE(fabs(mean[1] - v) < 1e-4, "%g", mean[1] - v);
    CHECK_NOTE(sqrt(spread) > 1e-3 && sqrt(spread) < 1.2e-2, "%g", sqrt(spread));
    scene_destroy(&s);
}

/* Other bits for another seed, parameter, step, place and state; the same for the same. */
static void test_keys(rig *r)
{
    scene s = scene_create(N);
    uint16_t *first = test_alloc(N * 2);
    for (int key = 0; key < 6; key++) {
        fsdpc_step_args a = args_for(&s, &optimizers[8], N, key == 3 ? 2 : 1);
        memset(s.states[0], 0, N * 2);
        memset(s.param, 0, N * 4);
        for (size_t i = 0; i < N; i++)
            set_element(s.grad, i, FSDPC_F32, 1.003);
        a.state_dtype = FSDPC_BF16;
        a.seed += key == 1, a.number += key == 2, a.first += key == 4;
        CHECK_OK(r->ops->step(&a, &r->stream));
        size_t same = 0;
        for (size_t i = 0; i < N; i++)
            same += ((uint16_t *)s.states[0])[i] == first[i];
        CHECK_NOTE(key == 0 || (key == 5 ? same == N : same < N * 9 / 10), "key %d: %zu", key,
                   same);
        if (key == 0)
            memcpy(first, s.states[0], N * 2);
    }
    scene_destroy(&s);
    free(first);
}

static void test_nonfinite(rig *r)
{
    for (int o = 0; o < OPTIMIZERS && optimizers[o].kind != FSDPC_OPTIM_EMA; o++) {
        for (int narrow = 0; narrow < 2; narrow++) {
            scene s = scene_create(20);
            fsdpc_step_args a = args_for(&s, &optimizers[o], 20, 1);
            a.state_dtype = narrow ? FSDPC_BF16 : FSDPC_F32;
            ((float *)s.grad)[18] = NAN, ((float *)s.grad)[19] = INFINITY;
            CHECK_OK(r->ops->step(&a, &r->stream));
            CHECK(isnan(((float *)s.param)[18]) && ((float *)s.param)[17] == 0);
            for (int k = 0; k < fsdpc_optim_states(a.kind, &a.hyper); k++) {
                CHECK_NOTE(isnan(element(s.states[k], 18, a.state_dtype)), "%s, %d",
                           optimizers[o].name, k);
                /* RMSprop's momentum adds infinity over infinity */
                bool quotient = a.kind == FSDPC_OPTIM_RMSPROP && k == 1;
                CHECK(quotient || isinf(element(s.states[k], 19, a.state_dtype)));
                CHECK(element(s.states[k], 17, a.state_dtype) == 0);
            }
            a.step = 2, a.copy_gradient = false, a.hyper.lr = 0;
            ((float *)s.grad)[18] = 1; /* what was NaN stays so, in the maximum of amsgrad too */
            CHECK_OK(r->ops->step(&a, &r->stream));
            for (int k = 0; k < fsdpc_optim_states(a.kind, &a.hyper); k++)
                CHECK(isnan(element(s.states[k], 18, a.state_dtype)));
            scene_destroy(&s);
        }
    }
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    rig portable;
    rig_init(&portable, FSDPC_ISA_PORTABLE, 1);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        for (int o = 0; o < OPTIMIZERS; o++) {
            test_against_f64(&r, &optimizers[o], FSDPC_F32);
            test_against_f64(&r, &optimizers[o], FSDPC_F64);
        }
        const size_t sizes[] = {0, 1, 15, 17, 1300};
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            test_dtypes(&r, &portable, sizes[i]);
        test_long(&r, &portable);
        test_rounding(&r);
        test_unbiased(&r);
        test_keys(&r);
        test_nonfinite(&r);
        rig_fini(&r);
    }
    rig_fini(&portable);
    return check_report("flat_step");
}
