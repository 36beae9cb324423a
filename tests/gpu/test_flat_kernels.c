/* The flat kernels of the GPU against the CPU's, to the bit.
 *
 * Sizes around the width of a vector and long enough for several rounds of the grid; buffers at
 * their alignment, off it together, and off it apart, so that every path of the elementwise loop
 * runs.
 */
#include "gpu_rig.h"

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 63, 1025, 50021};
enum { FLOATS = 4, SIZES = sizeof sizes / sizeof sizes[0] };

/* How far two buffers are shifted behind alignment. */
static const size_t shifts[][2] = {{0, 0}, {3, 3}, {0, 1}};
enum { SHIFTS = 3 };

/* All bit patterns of 16-bit types come by, and those of fp32 that matter. */
static void make_hard(buffer *b)
{
    for (size_t i = 0; i < b->numel; i++) {
        if (b->dtype == FSDPC_BF16 || b->dtype == FSDPC_F16)
            ((uint16_t *)b->on_cpu)[i] = (uint16_t)(i * 131 + rig_bits() % 131);
        else if (b->dtype == FSDPC_F32 && i % 2)
            ((uint32_t *)b->on_cpu)[i] = (uint32_t)rig_bits();
        else if (b->dtype == FSDPC_F64 && i % 2)
            ((double *)b->on_cpu)[i] = ldexp(rig_value(), (int)(rig_bits() % 300) - 150);
    }
    buffer_send(b);
}

static void test_cast(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (int s = 0; s < FLOATS; s++)
            for (size_t n = 0; n < SIZES; n++) {
                const size_t *shift = shifts[(n + (size_t)d) % SHIFTS];
                buffer src = buffer_random(floats[s], sizes[n], shift[0]);
                buffer dst = buffer_poison(floats[d], sizes[n], shift[1]);
                make_hard(&src);
                CHECK_OK(fsdpc_flat_cast(dst.on_cpu, floats[d], src.on_cpu, floats[s], sizes[n],
                                         cpu_stream));
                CHECK_OK(fsdpc_flat_cast(dst.on_gpu, floats[d], src.on_gpu, floats[s], sizes[n],
                                         gpu_stream));
                check_same_bits(&dst, "cast");
                bool on_cpu = false, on_gpu = false;
                CHECK_OK(fsdpc_flat_equal(dst.on_cpu, floats[d], src.on_cpu, floats[s], sizes[n],
                                          &on_cpu, cpu_stream));
                CHECK_OK(fsdpc_flat_equal(dst.on_gpu, floats[d], src.on_gpu, floats[s], sizes[n],
                                          &on_gpu, gpu_stream));
                CHECK_NOTE(on_cpu && on_gpu, "equal: %d on the CPU, %d on the GPU", on_cpu, on_gpu);
                buffer_fini(&src);
                buffer_fini(&dst);
            }
}

static void test_accumulate(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (int s = 0; s < FLOATS; s++)
            for (size_t n = 0; n < SIZES; n++) {
                const size_t *shift = shifts[(n + (size_t)s) % SHIFTS];
                buffer src = buffer_random(floats[s], sizes[n], shift[0]);
                buffer dst = buffer_random(floats[d], sizes[n], shift[1]);
                CHECK_OK(fsdpc_flat_accumulate(dst.on_cpu, floats[d], src.on_cpu, floats[s],
                                               sizes[n], cpu_stream));
                CHECK_OK(fsdpc_flat_accumulate(dst.on_gpu, floats[d], src.on_gpu, floats[s],
                                               sizes[n], gpu_stream));
                check_same_bits(&dst, "accumulate");
                buffer_fini(&src);
                buffer_fini(&dst);
            }
}

static void test_equal_sees_one_bit(void)
{
    const size_t numel = 30011, places[] = {0, 1, 17, 30010};
    for (size_t p = 0; p < 4; p++) {
        buffer a = buffer_random(FSDPC_BF16, numel, 0), b = buffer_make(FSDPC_BF16, numel, 0);
        memcpy(b.on_cpu, a.on_cpu, numel * 2);
        ((uint16_t *)b.on_cpu)[places[p]] ^= 1;
        buffer_send(&b);
        bool equal = true;
        CHECK_OK(fsdpc_flat_equal(a.on_gpu, FSDPC_BF16, b.on_gpu, FSDPC_BF16, numel, &equal,
                                  gpu_stream));
        CHECK_NOTE(!equal, "a bit at %zu", places[p]);
        buffer_fini(&a);
        buffer_fini(&b);
    }
}

static void test_reduce(void)
{
    static const int counts[] = {1, 2, 3, 5, 8, 9, 13, 33};
    for (int d = 0; d < FLOATS; d++)
        for (int s = 0; s < FLOATS; s++)
            for (size_t c = 0; c < 8; c++) {
                size_t numel = sizes[(c * 3 + (size_t)d + (size_t)s) % SIZES];
                size_t shift = c % 2;
                buffer srcs[33], out = buffer_random(floats[d], numel, shift);
                const void *on_cpu[33], *on_gpu[33];
                for (int k = 0; k < counts[c]; k++) {
                    srcs[k] = buffer_random(floats[s], numel, shift);
                    on_cpu[k] = srcs[k].on_cpu;
                    on_gpu[k] = srcs[k].on_gpu;
                }
                fsdpc_reduce_args args = {.srcs = on_cpu,
                                          .n_srcs = counts[c],
                                          .dtype = floats[s],
                                          .numel = numel,
                                          .scale = 1.0f / 3,
                                          .round_dtype = floats[c % 2 ? s : FLOATS - 1],
                                          .out = out.on_cpu,
                                          .out_dtype = floats[d],
                                          .accumulate = (c + (size_t)d) % 2};
                CHECK_OK(fsdpc_flat_reduce(&args, cpu_stream));
                args.srcs = on_gpu;
                args.out = out.on_gpu;
                CHECK_OK(fsdpc_flat_reduce(&args, gpu_stream));
                check_same_bits(&out, "reduce");
                buffer_fini(&out);
                for (int k = 0; k < counts[c]; k++)
                    buffer_fini(&srcs[k]);
            }
}

static void test_scale(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (int bad = 0; bad < 3; bad++) {
                buffer x = buffer_random(floats[d], sizes[n], n % 2);
                if (bad && sizes[n])
                    element_set(x.on_cpu, sizes[n] - 1, floats[d], bad == 1 ? NAN : -INFINITY);
                buffer_send(&x);
                int on_cpu = 0, on_gpu = 0;
                CHECK_OK(
                    fsdpc_flat_scale(x.on_cpu, floats[d], sizes[n], 0.3f, &on_cpu, cpu_stream));
                CHECK_OK(
                    fsdpc_flat_scale(x.on_gpu, floats[d], sizes[n], 0.3f, &on_gpu, gpu_stream));
                CHECK_NOTE(on_cpu == on_gpu && on_gpu == (bad && sizes[n]), "%s, %d: %d and %d",
                           fsdpc_dtype_name(floats[d]), bad, on_cpu, on_gpu);
                CHECK_OK(fsdpc_flat_scale(x.on_gpu, floats[d], 0, 1, NULL, gpu_stream));
                check_same_bits(&x, "scale");
                buffer_fini(&x);
            }
}

static void check_sumsq(fsdpc_dtype dtype, size_t numel, size_t leaf, size_t shift, int spread)
{
    buffer x = buffer_random(dtype, numel, shift);
    for (size_t i = 0; i < numel && spread; i++) /* leaves far from each other in size */
        element_set(x.on_cpu, i, dtype,
                    ldexp(rig_value(), (int)(i / leaf * 7 % (size_t)spread) - spread / 2));
    buffer_send(&x);
    fsdpc_exact_sum on_cpu = {{0}, 0, 0}, on_gpu = on_cpu;
    CHECK_OK(fsdpc_flat_sumsq(x.on_cpu, dtype, numel, leaf, &on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_sumsq(x.on_gpu, dtype, numel, leaf, &on_gpu, gpu_stream));
    fsdpc_exact_sum_normalize(&on_cpu);
    fsdpc_exact_sum_normalize(&on_gpu);
    CHECK_NOTE(memcmp(&on_cpu, &on_gpu, sizeof on_cpu) == 0, "sumsq %s %zu leaf %zu: %.17g, %.17g",
               fsdpc_dtype_name(dtype), numel, leaf, fsdpc_exact_sum_value(&on_cpu),
               fsdpc_exact_sum_value(&on_gpu));
    buffer_fini(&x);
}

static void test_sumsq(void)
{
    static const size_t leaves[] = {64, 1, 7, 16, 48, 100, 1000};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t l = 0; l < 7; l++)
                if (sizes[n] < 2000 || l % 4 == 0)
                    check_sumsq(floats[d], sizes[n], leaves[l], l % 2, n % 2 ? 60 : 0);
    check_sumsq(FSDPC_F64, 50021, 64, 0, 900);
    buffer x = buffer_random(FSDPC_F32, 1000, 0);
    element_set(x.on_cpu, 100, FSDPC_F32, NAN);
    element_set(x.on_cpu, 700, FSDPC_F32, INFINITY);
    buffer_send(&x);
    fsdpc_exact_sum sum = {{0}, 0, 0};
    CHECK_OK(fsdpc_flat_sumsq(x.on_gpu, FSDPC_F32, 1000, 64, &sum, gpu_stream));
    CHECK(sum.nans == 1 && sum.infinities == 1);
    buffer_fini(&x);
}

static void check_adamw(fsdpc_dtype param, fsdpc_dtype grad, int wire, size_t numel, size_t shift)
{
    buffer p = buffer_random(param, numel, shift), g = buffer_random(grad, numel, shift);
    buffer m = buffer_random(FSDPC_F32, numel, shift), v = buffer_random(FSDPC_F32, numel, shift);
    for (size_t i = 0; i < numel; i++)
        ((float *)v.on_cpu)[i] = fabsf(((float *)v.on_cpu)[i]);
    buffer_send(&v);
    buffer w = buffer_poison(wire < 0 ? FSDPC_F32 : (fsdpc_dtype)wire, numel, shift);
    for (int step = 1; step <= 2; step++) {
        fsdpc_step_args args = {.param = p.on_cpu,
                                .param_dtype = param,
                                .grad = g.on_cpu,
                                .grad_dtype = grad,
                                .states = {m.on_cpu, v.on_cpu},
                                .wire = wire < 0 ? NULL : w.on_cpu,
                                .wire_dtype = w.dtype,
                                .numel = numel,
                                .grad_scale = 0.7f,
                                .hyper = {.lr = 1e-3,
                                          .beta1 = step == 1 ? 0.9 : 0.3,
                                          .beta2 = 0.95,
                                          .eps = 1e-8,
                                          .weight_decay = 0.1,
                                          .maximize = step == 2},
                                .step = step,
                                .kind = step == 1 ? FSDPC_OPTIM_ADAMW : FSDPC_OPTIM_ADAM};
        CHECK_OK(fsdpc_flat_step(&args, cpu_stream));
        args.param = p.on_gpu, args.grad = g.on_gpu;
        args.states[0] = m.on_gpu, args.states[1] = v.on_gpu;
        args.wire = wire < 0 ? NULL : w.on_gpu;
        CHECK_OK(fsdpc_flat_step(&args, gpu_stream));
        check_same_bits(&p, "adamw, param");
        check_same_bits(&m, "adamw, exp_avg");
        check_same_bits(&v, "adamw, exp_avg_sq");
        check_same_bits(&w, "adamw, wire");
    }
    buffer *all[] = {&p, &g, &m, &v, &w};
    for (int b = 0; b < 5; b++)
        buffer_fini(all[b]);
}

static void test_adamw(void)
{
    for (int p = 0; p < 2; p++)
        for (int g = 0; g < 2; g++)
            for (int wire = -1; wire < FLOATS; wire++)
                for (size_t n = 0; n < SIZES; n += 2)
                    check_adamw(floats[p], floats[g], wire, sizes[n], n / 2 % 2);
}

static void test_init(void)
{
    static const struct {
        fsdpc_init_kind kind;
        double a, b;
    } cases[] = {{FSDPC_INIT_CONSTANT, 0.3, 0},
                 {FSDPC_INIT_NORMAL, 0, 0.02},
                 {FSDPC_INIT_NORMAL, 1, 3},
                 {FSDPC_INIT_UNIFORM, -0.1, 0.1},
                 {FSDPC_INIT_UNIFORM, -1, 0}};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t c = 0; c < 5; c++) {
                buffer x = buffer_poison(floats[d], sizes[n], n % 2);
                fsdpc_init_args args = {.dst = x.on_cpu,
                                        .dtype = floats[d],
                                        .numel = sizes[n],
                                        .kind = cases[c].kind,
                                        .a = cases[c].a,
                                        .b = cases[c].b,
                                        .seed = rig_bits(),
                                        .stream = rig_bits() % 9,
                                        .first = c * 1001 + n % 4};
                CHECK_OK(fsdpc_flat_init(&args, cpu_stream));
                args.dst = x.on_gpu;
                CHECK_OK(fsdpc_flat_init(&args, gpu_stream));
                check_same_bits(&x, "init");
                buffer_fini(&x);
            }
}

static void test_refusals(void)
{
    float x = 0;
    fsdpc_exact_sum sum = {{0}, 0, 0};
    fsdpc_reduce_args reduce = {.dtype = FSDPC_F32, .out_dtype = FSDPC_F32};
    CHECK_FAILS(fsdpc_flat_cast(&x, FSDPC_I32, &x, FSDPC_F32, 1, gpu_stream), FSDPC_ERR_DTYPE,
                "convert it first");
    CHECK_FAILS(fsdpc_flat_cast(&x, FSDPC_BF16, &x, FSDPC_F32, 1, gpu_stream), FSDPC_ERR_VALUE,
                "in place");
    CHECK_FAILS(fsdpc_flat_sumsq(&x, FSDPC_F32, 1, 0, &sum, gpu_stream), FSDPC_ERR_VALUE, "leaf");
    CHECK_FAILS(fsdpc_flat_reduce(&reduce, gpu_stream), FSDPC_ERR_VALUE, "source");
}

int main(void)
{
    static const rig_test_fn tests[] = {test_cast,   test_accumulate, test_equal_sees_one_bit,
                                        test_reduce, test_scale,      test_sumsq,
                                        test_adamw,  test_init,       test_refusals};
    return rig_main("test_flat_kernels", tests, sizeof tests / sizeof tests[0]);
}
