/* Optimizers' steps on the GPU against the CPU's, to the bit: every rule, with every combination of
 * dtypes that a step accepts.
 *
 * Each combination takes the next size and the next way of being off alignment, so that all of them
 * come by for every rule; two steps follow one another, since the first is special for momentum.
 * Every other step finds its scalars in device memory, and others in its arguments.
 */
#include "gpu_rig.h"

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 63, 1025, 50021};
/* How far parameters and states, and gradients, are shifted behind alignment. */
static const size_t shifts[][2] = {{0, 0}, {3, 3}, {0, 1}};
enum { FLOATS = 4, SIZES = sizeof sizes / sizeof sizes[0], SHIFTS = 3, NO_COPY_IN = -1 };

typedef struct rule {
    const char *name;
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
} rule;

static const rule rules[] = {
    {"AdamW",
     FSDPC_OPTIM_ADAMW,
     {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}},
    {"Adam, maximizing, quick to forget",
     FSDPC_OPTIM_ADAM,
     {.lr = 1e-3, .beta1 = 0.3, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .maximize = true}},
    {"AdamW, amsgrad",
     FSDPC_OPTIM_ADAMW,
     {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.5, .eps = 1e-8, .weight_decay = 0.1, .amsgrad = true}},
    {"SGD", FSDPC_OPTIM_SGD, {.lr = 0.1, .weight_decay = 0.01}},
    {"SGD, momentum", FSDPC_OPTIM_SGD, {.lr = 0.1, .momentum = 0.9, .dampening = 0.2}},
    {"SGD, Nesterov",
     FSDPC_OPTIM_SGD,
     {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}},
    {"Lion", FSDPC_OPTIM_LION, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}},
    {"RMSprop", FSDPC_OPTIM_RMSPROP, {.lr = 1e-3, .alpha = 0.9, .eps = 1e-8, .weight_decay = 0.1}},
    {"RMSprop, momentum",
     FSDPC_OPTIM_RMSPROP,
     {.lr = 1e-3, .alpha = 0.9, .eps = 1e-8, .momentum = 0.9}},
    {"EMA", FSDPC_OPTIM_EMA, {.decay = 0.9}},
    {"EMA, swap", FSDPC_OPTIM_EMA, {.swap = true}},
};
enum { RULES = sizeof rules / sizeof rules[0] };

typedef struct dtypes {
    fsdpc_dtype param, grad, state;
    int copy_in;
} dtypes;

/* Second moments, which are states 1 and 2, are not negative; Lion meets sums of exactly 0. */
static buffer make_state(fsdpc_dtype dtype, size_t numel, size_t shift, int state)
{
    buffer b = buffer_random(dtype, numel, shift);
    for (size_t i = 0; i < numel; i++) {
        double x = i % 5 == 3 ? 0 : element_of(b.on_cpu, i, dtype);
        element_set(b.on_cpu, i, dtype, state > 0 ? fabs(x) : x);
    }
    buffer_send(&b);
    return b;
}

static buffer make_gradient(fsdpc_dtype dtype, size_t numel, size_t shift)
{
    buffer b = buffer_random(dtype, numel, shift);
    for (size_t i = 0; i < numel; i++)
        if (i % 5 == 3)
            element_set(b.on_cpu, i, dtype, 0);
        else if (i % 503 == 0 && numel > 100)
            element_set(b.on_cpu, i, dtype, i % 2 ? NAN : INFINITY);
    buffer_send(&b);
    return b;
}

/* `read`: by scalars that are put in device memory before. */
static void step_on_gpu(fsdpc_step_args args, bool read)
{
    fsdpc_step_scalars now = fsdpc_step_prepare(&args);
    void *scalars;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, sizeof now, &scalars));
    if (read) {
        CHECK_OK(fsdpc_device_copy(gpu, scalars, &now, sizeof now, gpu_stream));
        args.scalars = scalars;
        args.hyper.lr *= 2, args.hyper.beta1 /= 2, args.hyper.weight_decay += 1;
        args.grad_scale *= 3, args.step += 5, args.copy_gradient = !args.copy_gradient;
    }
    CHECK_OK(fsdpc_flat_step(&args, gpu_stream));
    fsdpc_device_free(gpu, scalars);
}

static void check_step(const rule *r, const dtypes *d, size_t numel, const size_t *shift)
{
    const int n_states = fsdpc_optim_states(r->kind, &r->hyper);
    buffer p = buffer_random(d->param, numel, shift[0]);
    buffer g = make_gradient(d->grad, numel, shift[1]), states[FSDPC_OPTIM_MAX_STATES];
    for (int s = 0; s < n_states; s++)
        states[s] = make_state(d->state, numel, shift[0], s);
    bool has_copy_in = d->copy_in != NO_COPY_IN;
    buffer factor =
        buffer_random(FSDPC_F64, 1, 0); /* what clipping left, from the second step on */
    buffer w = buffer_poison(has_copy_in ? (fsdpc_dtype)d->copy_in : FSDPC_F32, numel, shift[0]);
    fsdpc_step_args args = {.kind = r->kind,
                            .hyper = r->hyper,
                            .param_dtype = d->param,
                            .grad_dtype = d->grad,
                            .state_dtype = d->state,
                            .copy_in_dtype = w.dtype,
                            .numel = numel,
                            .grad_scale = 0.7f,
                            .seed = rig_bits(),
                            .number = (uint32_t)rig_bits(),
                            .first = rig_bits() % (1ull << 40)};
    for (int step = 1; step <= 2; step++) {
        args.step = step;
        args.copy_gradient = step == 1;
        args.param = p.on_cpu, args.grad = g.on_cpu, args.copy_in = has_copy_in ? w.on_cpu : NULL;
        args.grad_scale_at = step > 1 ? factor.on_cpu : NULL;
        for (int s = 0; s < n_states; s++)
            args.states[s] = states[s].on_cpu;
        CHECK_OK(fsdpc_flat_step(&args, cpu_stream));
        args.param = p.on_gpu, args.grad = g.on_gpu, args.copy_in = has_copy_in ? w.on_gpu : NULL;
        args.grad_scale_at = step > 1 ? factor.on_gpu : NULL;
        for (int s = 0; s < n_states; s++)
            args.states[s] = states[s].on_gpu;
        step_on_gpu(args, (numel + (size_t)step) % 2);
        check_same_bits(&p, r->name);
        check_same_bits(&w, r->name);
        for (int s = 0; s < n_states; s++)
            check_same_bits(&states[s], r->name);
    }
    buffer_fini(&p);
    buffer_fini(&g);
    buffer_fini(&w);
    buffer_fini(&factor);
    for (int s = 0; s < n_states; s++)
        buffer_fini(&states[s]);
}

static void test_every_combination(void)
{
    size_t turn = 0;
    for (int r = 0; r < RULES; r++)
        for (int p = 0; p < FLOATS; p++)
            for (int g = 0; g < FLOATS; g++)
                for (int s = 0; s < 2; s++)
                    for (int copy_in = NO_COPY_IN; copy_in < FLOATS; copy_in++) {
                        bool wide = floats[p] == FSDPC_F64;
                        if (wide ? s > 0 : floats[g] == FSDPC_F64)
                            continue;
                        dtypes d = {floats[p], floats[g], wide ? FSDPC_F64 : floats[s], copy_in};
                        check_step(&rules[r], &d, sizes[turn % SIZES], shifts[turn % SHIFTS]);
                        turn++;
                    }
}

/* What training does all the time, at every size. */
static void test_every_size(void)
{
    for (int r = 0; r < RULES; r++)
        for (int s = 0; s < 2; s++)
            for (size_t n = 0; n < SIZES; n++) {
                dtypes d = {FSDPC_F32, n % 2 ? FSDPC_BF16 : FSDPC_F32, floats[s], FSDPC_BF16};
                check_step(&rules[r], &d, sizes[n], shifts[n % SHIFTS]);
            }
}

/* A state as codes: what it decodes to, the codes and the maxima. */
typedef struct coded {
    buffer values, codes, maxima;
    fsdpc_code_args args;
} coded;

static fsdpc_code_args coded_args(const coded *c, bool on_gpu)
{
    fsdpc_code_args a = c->args;
    a.values = on_gpu ? c->values.on_gpu : c->values.on_cpu;
    a.codes = on_gpu ? c->codes.on_gpu : c->codes.on_cpu;
    a.maxima = on_gpu ? c->maxima.on_gpu : c->maxima.on_cpu;
    return a;
}

static coded make_coded(fsdpc_code code, size_t numel, size_t row)
{
    coded c = {.values = make_state(FSDPC_F32, numel, 0, code == FSDPC_CODE_UROOT8),
               .codes = buffer_poison(FSDPC_U8, numel, 0),
               .maxima = buffer_poison(FSDPC_F32, fsdpc_code_blocks(numel, row), 0),
               .args = {.code = code, .numel = numel, .row = row}};
    fsdpc_code_args on_cpu = coded_args(&c, false), on_gpu = coded_args(&c, true);
    CHECK_OK(fsdpc_flat_encode(&on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_encode(&on_gpu, gpu_stream));
    return c;
}

static void check_coded(coded *c, const char *what)
{
    fsdpc_code_args on_cpu = coded_args(c, false), on_gpu = coded_args(c, true);
    CHECK_OK(fsdpc_flat_decode(&on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_decode(&on_gpu, gpu_stream));
    check_same_bits(&c->codes, what);
    check_same_bits(&c->maxima, what);
    check_same_bits(&c->values, what);
}

static void check_coded_step(const rule *r, size_t row, fsdpc_dtype dtype)
{
    const int n_states = fsdpc_optim_states(r->kind, &r->hyper);
    size_t numel = 37 * row;
    buffer p = buffer_random(dtype, numel, 0), g = buffer_random(dtype, numel, 1);
    buffer w = buffer_poison(FSDPC_BF16, numel, 0);
    coded states[FSDPC_OPTIM_MAX_STATES];
    for (int s = 0; s < n_states; s++)
        states[s] = make_coded(fsdpc_state_code(r->kind, &r->hyper, s), numel, row);
    fsdpc_step_args args = {.kind = r->kind,
                            .hyper = r->hyper,
                            .param_dtype = dtype,
                            .grad_dtype = dtype,
                            .state_dtype = FSDPC_U8,
                            .code_row = row,
                            .copy_in_dtype = w.dtype,
                            .numel = numel,
                            .grad_scale = 0.7};
    for (int step = 1; step <= 2; step++) {
        args.step = step, args.copy_gradient = step == 1;
        for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
            args.param = on_gpu ? p.on_gpu : p.on_cpu;
            args.grad = on_gpu ? g.on_gpu : g.on_cpu;
            args.copy_in = on_gpu ? w.on_gpu : w.on_cpu;
            for (int s = 0; s < n_states; s++) {
                fsdpc_code_args at = coded_args(&states[s], on_gpu);
                args.states[s] = at.codes, args.maxima[s] = at.maxima;
            }
            if (on_gpu)
                step_on_gpu(args, step == 2);
            else
                CHECK_OK(fsdpc_flat_step(&args, cpu_stream));
        }
        check_same_bits(&p, r->name);
        check_same_bits(&w, r->name);
        for (int s = 0; s < n_states; s++)
            check_coded(&states[s], r->name);
    }
    buffer_fini(&p);
    buffer_fini(&g);
    buffer_fini(&w);
    for (int s = 0; s < n_states; s++) {
        buffer_fini(&states[s].values);
        buffer_fini(&states[s].codes);
        buffer_fini(&states[s].maxima);
    }
}

static void test_codes(void)
{
    const size_t rows[] = {64, 100, 256, 515};
    for (int r = 0; r < RULES; r++) {
        fsdpc_step_rule rule = fsdpc_optim_table[rules[r].kind].rule(&rules[r].hyper);
        for (int i = 0; i < 4 && fsdpc_rule_states(rule) > 0 && fsdpc_rule_takes_codes(rule); i++)
            check_coded_step(&rules[r], rows[i], i % 2 ? FSDPC_BF16 : FSDPC_F32);
    }
}

static void test_refusals(void)
{
    float x = 0;
    fsdpc_step_args args = {.kind = FSDPC_OPTIM_LION,
                            .param = &x,
                            .grad = &x,
                            .states = {&x},
                            .numel = 1,
                            .step = 1,
                            .state_dtype = FSDPC_F16};
    CHECK_FAILS(fsdpc_flat_step(&args, gpu_stream), FSDPC_ERR_DTYPE,
                "Lion: states of a float32 parameter are float32, bfloat16 or codes, not float16");
    args.grad_dtype = FSDPC_F64;
    CHECK_FAILS(fsdpc_flat_step(&args, gpu_stream), FSDPC_ERR_DTYPE, "give both one dtype");
    args.grad_dtype = FSDPC_F32, args.state_dtype = FSDPC_F32, args.step = 0;
    CHECK_FAILS(fsdpc_flat_step(&args, gpu_stream), FSDPC_ERR_VALUE, "the first is 1");
}

int main(void)
{
    static const rig_test_fn tests[] = {test_every_combination, test_every_size, test_codes,
                                        test_refusals};
    return rig_main("test_step_kernels", tests, sizeof tests / sizeof tests[0]);
}
