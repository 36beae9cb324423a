/* adamw: twenty steps against fp64, element by element against the definition in fp32, the
 * parameter buffer against a cast, and the same bits for any cut, alignment, number of threads and
 * instruction set.
 */
#include "test_flat_common.h"

enum { N = 3001, STEPS = 20 };

typedef struct state {
    void *param, *grad, *copy_in;
    float *exp_avg, *exp_avg_sq;
} state;

static state state_create(size_t numel)
{
    return (state){test_alloc(numel * 4), test_alloc(numel * 4), test_alloc(numel * 8),
                   test_alloc(numel * 4), test_alloc(numel * 4)};
}

static void state_destroy(state *s)
{
    free(s->param), free(s->grad), free(s->copy_in), free(s->exp_avg), free(s->exp_avg_sq);
}

static fsdpc_step_args args_for(const state *s, size_t numel, int64_t step)
{
    return (fsdpc_step_args){
        .kind = FSDPC_OPTIM_ADAMW,
        .param = s->param,
        .grad = s->grad,
        .states = {s->exp_avg, s->exp_avg_sq},
        .numel = numel,
        .grad_scale = 1,
        .hyper = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1},
        .step = step};
}

/* The definition of the header, in fp64 throughout. */
static void reference_step(double *p, double *m, double *v, const fsdpc_step_args *a, double grad)
{
    double bias1 = 1 - pow(a->hyper.beta1, (double)a->step),
           bias2 = 1 - pow(a->hyper.beta2, (double)a->step);
    double g = (a->hyper.maximize ? -grad : grad) * a->grad_scale;
    if (a->kind == FSDPC_OPTIM_ADAMW)
        *p -= a->hyper.lr * a->hyper.weight_decay * *p;
    else
        g += a->hyper.weight_decay * *p;
    *m = a->hyper.beta1 * *m + (1 - a->hyper.beta1) * g;
    *v = a->hyper.beta2 * *v + (1 - a->hyper.beta2) * g * g;
    *p -= a->hyper.lr / bias1 * *m / (sqrt(*v) / sqrt(bias2) + a->hyper.eps);
}

static void test_against_f64(rig *r, bool decoupled, bool maximize, float grad_scale, double beta1)
{
    state s = state_create(N);
    double *p = test_alloc(N * 8), *m = test_alloc(N * 8), *v = test_alloc(N * 8);
    fill_random(s.param, N, FSDPC_F32, 1);
    for (size_t i = 0; i < N; i++)
        p[i] = element(s.param, i, FSDPC_F32);
    for (int step = 1; step <= STEPS; step++) {
        fill_random(s.grad, N, FSDPC_F32, (uint64_t)step * 77);
        fsdpc_step_args args = args_for(&s, N, step);
        args.kind = decoupled ? FSDPC_OPTIM_ADAMW : FSDPC_OPTIM_ADAM;
        args.hyper.maximize = maximize, args.grad_scale = grad_scale;
        args.hyper.beta1 = beta1;
        CHECK_OK(r->ops->step(&args, &r->stream));
        for (size_t i = 0; i < N; i++)
            reference_step(&p[i], &m[i], &v[i], &args, element(s.grad, i, FSDPC_F32));
    }
    double worst = 0;
    for (size_t i = 0; i < N; i++) /* steps of 1e-2 in fp32: 20 roundings of each operation */
        worst = fmax(worst, fabs(p[i] - element(s.param, i, FSDPC_F32)));
    CHECK_NOTE(worst < 2e-6, "%g", worst);
    state_destroy(&s);
    free(p), free(m), free(v);
}

/* torch's fused kernel, operation by operation. */
static float torch_step(float p, float *m, float *v, float g, const fsdpc_step_args *a)
{
    double bias1 = 1 - pow(a->hyper.beta1, (double)a->step),
           bias2 = 1 - pow(a->hyper.beta2, (double)a->step);
    float toward = (float)(1 - a->hyper.beta1), add = (float)(1 - a->hyper.beta2);
    p = p * (float)(1 - a->hyper.lr * a->hyper.weight_decay);
    *m = fmaf(toward, g - *m, *m);
    *v = fmaf(add * g, g, *v * (float)a->hyper.beta2);
    float denominator = sqrtf(*v) / (float)sqrt(bias2) + (float)a->hyper.eps;
    return p + (float)-(a->hyper.lr / bias1) * *m / denominator;
}

static void test_bits(rig *r)
{
    state s = state_create(N);
    float *p = test_alloc(N * 4), *m = test_alloc(N * 4), *v = test_alloc(N * 4);
    fill_random(s.param, N, FSDPC_F32, 1);
    memcpy(p, s.param, N * 4);
    for (int step = 1; step <= STEPS; step++) {
        fill_random(s.grad, N, FSDPC_F32, (uint64_t)step * 77);
        fsdpc_step_args args = args_for(&s, N, step);
        CHECK_OK(r->ops->step(&args, &r->stream));
        for (size_t i = 0; i < N; i++)
            p[i] = torch_step(p[i], &m[i], &v[i], ((float *)s.grad)[i], &args);
    }
    CHECK(memcmp(p, s.param, N * 4) == 0);
    CHECK(memcmp(m, s.exp_avg, N * 4) == 0);
    CHECK(memcmp(v, s.exp_avg_sq, N * 4) == 0);
    state_destroy(&s);
    free(p), free(m), free(v);
}

/* Steps `numel` elements in pieces of random length; pieces of all when `cuts` is false. */
static void step_in_parts(rig *r, const fsdpc_step_args *whole, bool cuts)
{
    uint64_t random = whole->numel;
    for (size_t at = 0, take; at < whole->numel; at += take) {
        take = cuts ? 1 + random_bits(&random) % (whole->numel / 3 + 20) : whole->numel;
        take = take > whole->numel - at ? whole->numel - at : take;
        fsdpc_step_args a = *whole;
        a.param = at_element(a.param, at, a.param_dtype);
        a.grad = at_element((void *)a.grad, at, a.grad_dtype);
        a.states[0] = at_element(a.states[0], at, FSDPC_F32);
        a.states[1] = at_element(a.states[1], at, FSDPC_F32);
        a.numel = take;
        a.copy_in = a.copy_in ? at_element(a.copy_in, at, a.copy_in_dtype) : NULL;
        CHECK_OK(r->ops->step(&a, &r->stream));
    }
}

/* Every dtype, with and without a parameter buffer, on this rig against the portable one in one
 * piece. */
static void test_dtypes(rig *r, rig *portable, size_t numel)
{
    for (int kind = 0; kind < 20; kind++) {
        fsdpc_dtype param = kind & 1 ? FSDPC_BF16 : FSDPC_F32;
        fsdpc_dtype grad = kind & 2 ? FSDPC_BF16 : FSDPC_F32;
        fsdpc_dtype copy_in = all_floats[kind / 4 % 4];
        state s[2] = {state_create(numel), state_create(numel)};
        for (int step = 1; step <= 3; step++)
            for (int k = 0; k < 2; k++) {
                if (step == 1)
                    fill_random(s[k].param, numel, param, 1);
                fill_random(s[k].grad, numel, grad, (uint64_t)step);
                fsdpc_step_args args = args_for(&s[k], numel, step);
                args.param_dtype = param, args.grad_dtype = grad;
                args.copy_in = kind >= 16 ? NULL : s[k].copy_in, args.copy_in_dtype = copy_in;
                args.kind = kind % 3 ? FSDPC_OPTIM_ADAMW : FSDPC_OPTIM_ADAM;
                args.grad_scale = 0.25f;
                step_in_parts(k ? portable : r, &args, !k);
            }
        size_t param_bytes = numel * fsdpc_dtype_bytes(param);
        CHECK_NOTE(memcmp(s[0].param, s[1].param, param_bytes) == 0, "kind %d, %zu", kind, numel);
        CHECK(memcmp(s[0].exp_avg, s[1].exp_avg, numel * 4) == 0);
        CHECK(memcmp(s[0].exp_avg_sq, s[1].exp_avg_sq, numel * 4) == 0);
        bool equal = true;
        if (kind < 16)
            CHECK_OK(
                r->ops->equal(s[0].copy_in, copy_in, s[0].param, param, numel, &equal, &r->stream));
        CHECK_NOTE(equal, "kind %d", kind);
        CHECK(numel == 0 || element(s[0].exp_avg_sq, 0, FSDPC_F32) > 0);
        state_destroy(&s[0]), state_destroy(&s[1]);
    }
}

/* Parameter buffers long enough to be written past the cache. */
static void test_streamed(rig *r)
{
    enum { LONG = (1 << 20) + 19 };
    state s = state_create(LONG);
    uint64_t *aligned = aligned_alloc(64, (LONG * 4 + 63) / 64 * 64);
    fill_random(s.param, LONG, FSDPC_F32, 1);
    fill_random(s.grad, LONG, FSDPC_F32, 2);
    for (int k = 0; k < 2; k++) {
        fsdpc_step_args args = args_for(&s, LONG, 1 + k);
        args.copy_in = aligned, args.copy_in_dtype = k ? FSDPC_F32 : FSDPC_BF16;
        CHECK_OK(r->ops->step(&args, &r->stream));
        bool equal = true;
        CHECK_OK(r->ops->equal(aligned, args.copy_in_dtype, s.param, FSDPC_F32, LONG, &equal,
                               &r->stream));
        CHECK(equal);
    }
    state_destroy(&s);
    free(aligned);
}

static void test_refusals_and_nan(rig *r)
{
    state s = state_create(40);
    fsdpc_step_args args = args_for(&s, 40, 0);
    CHECK_FAILS(r->ops->step(&args, &r->stream), FSDPC_ERR_VALUE, "first is 1");
    args.step = 1, args.param_dtype = FSDPC_F64;
    CHECK_FAILS(r->ops->step(&args, &r->stream), FSDPC_ERR_DTYPE, "are float64, not float32");
    args.param_dtype = FSDPC_F16, args.grad_dtype = FSDPC_F64;
    CHECK_FAILS(r->ops->step(&args, &r->stream), FSDPC_ERR_DTYPE, "a float16 parameter with");
    args.grad_dtype = FSDPC_F32, args.state_dtype = FSDPC_F16;
    CHECK_FAILS(r->ops->step(&args, &r->stream), FSDPC_ERR_DTYPE, "not float16");
    args.state_dtype = FSDPC_F32;
    args.param_dtype = FSDPC_F32, args.copy_in = s.copy_in, args.copy_in_dtype = FSDPC_U8;
    CHECK_FAILS(r->ops->step(&args, &r->stream), FSDPC_ERR_DTYPE, "uint8");
    args.copy_in = NULL;
    ((float *)s.grad)[39] = NAN; /* stays where it is */
    CHECK_OK(r->ops->step(&args, &r->stream));
    CHECK(isnan(((float *)s.param)[39]) && ((float *)s.param)[38] == 0);
    state_destroy(&s);
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
        test_against_f64(&r, true, false, 1, 0.9);
        test_against_f64(&r, false, true, 0.5f, 0.9);
        test_against_f64(&r, true, true, 2, 0.4);
        test_against_f64(&r, false, false, 1, 0);
        test_bits(&r);
        const size_t sizes[] = {0, 1, 15, 16, 17, 1000, 70001};
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            test_dtypes(&r, &portable, sizes[i]);
        test_streamed(&r);
        test_refusals_and_nan(&r);
        rig_fini(&r);
    }
    rig_fini(&portable);
    return check_report("flat_adamw");
}
