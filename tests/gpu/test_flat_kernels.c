/* The flat kernels of the GPU against the CPU's, to the bit.
 *
 * Steps of optimizers have a file of their own. Sizes around the width of a vector and long enough
 * for several rounds of the grid; buffers at their alignment, off it together, and off it apart, so
 * that every path of the elementwise loop runs.
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

/* The sign of every third element, so that the largest is not always positive. */
static void make_signed(buffer *b)
{
    for (size_t i = 0; i < b->numel; i += 3)
        element_set(b->on_cpu, i, b->dtype, -fabs(element_of(b->on_cpu, i, b->dtype)));
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
                bool on_cpu = true, on_gpu = true;
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
                                          .scale = 1.0 / 3, /* no number of fp32 */
                                          .round_dtype = floats[(c + (size_t)s) % FLOATS],
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
                buffer by = buffer_random(FSDPC_F64, 1, 0); /* a factor in the device's memory */
                bool read = (n + (size_t)bad) % 2;
                if (bad && sizes[n])
                    element_set(x.on_cpu, sizes[n] - 1, floats[d], bad == 1 ? NAN : -INFINITY);
                buffer_send(&x);
                int on_cpu = 0, on_gpu = 0;
                CHECK_OK(fsdpc_flat_scale(x.on_cpu, floats[d], sizes[n], 0.3f,
                                          read ? by.on_cpu : NULL, &on_cpu, cpu_stream));
                CHECK_OK(fsdpc_flat_scale(x.on_gpu, floats[d], sizes[n], 0.3f,
                                          read ? by.on_gpu : NULL, &on_gpu, gpu_stream));
                CHECK_NOTE(on_cpu == on_gpu && on_gpu == (bad && sizes[n]), "%s, %d: %d and %d",
                           fsdpc_dtype_name(floats[d]), bad, on_cpu, on_gpu);
                CHECK_OK(fsdpc_flat_scale(x.on_gpu, floats[d], 0, 1, NULL, NULL, gpu_stream));
                check_same_bits(&x, "scale");
                buffer_fini(&x);
                buffer_fini(&by);
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

/* Leaves of zeros between others; sizes that 32 leaves in a row, a warp's, have all differ by more
 * than a few digits of the sum. */
static void check_sumsq_of_sizes(fsdpc_dtype dtype, size_t numel, int zeros, int step)
{
    buffer x = buffer_random(dtype, numel, 0);
    for (size_t i = 0; i < numel; i++) {
        size_t leaf = i / 64;
        double size = ldexp(rig_value(), step * ((int)(leaf % 32) - 16));
        bool zero = zeros && (leaf % 3 == 1 || leaf / 64 % 2 == 1);
        element_set(x.on_cpu, i, dtype, zero ? (i % 2 ? 0.0 : -0.0) : size);
    }
    buffer_send(&x);
    fsdpc_exact_sum on_cpu = {{0}, 0, 0}, on_gpu = on_cpu;
    CHECK_OK(fsdpc_flat_sumsq(x.on_cpu, dtype, numel, 64, &on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_sumsq(x.on_gpu, dtype, numel, 64, &on_gpu, gpu_stream));
    fsdpc_exact_sum_normalize(&on_cpu);
    fsdpc_exact_sum_normalize(&on_gpu);
    CHECK_NOTE(memcmp(&on_cpu, &on_gpu, sizeof on_cpu) == 0,
               "%s %zu, zeros %d, step %d: %.17g, %.17g", fsdpc_dtype_name(dtype), numel, zeros,
               step, fsdpc_exact_sum_value(&on_cpu), fsdpc_exact_sum_value(&on_gpu));
    buffer_fini(&x);
}

static void test_sumsq_of_sizes(void)
{
    static const size_t numels[] = {64, 64 * 33 + 5, 64 * 3000};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < 3; n++)
            for (int zeros = 0; zeros < 2; zeros++)
                for (int step = 0; step < 8; step += 7)
                    check_sumsq_of_sizes(floats[d], numels[n], zeros, step);
    check_sumsq_of_sizes(FSDPC_F64, 64 * 3000, 1, 30); /* from 2^-960 to 2^900 */
}

static void test_sumsq(void)
{
    static const size_t leaves[] = {64, 1, 7, 16, 48, 100, 1000};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t l = 0; l < 7; l++)
                if (sizes[n] < 2000 || l % 4 == 0)
                    check_sumsq(floats[d], sizes[n], leaves[l], l % 2, n % 2 ? 60 : 0);
    static const size_t rounds[] = {64,        128,           320,          64 * 782,
                                    64 * 4096, 64 * 4096 + 1, 64 * 5000 - 1};
    for (int d = 0; d < FLOATS; d++) /* leaves read ahead: whole ones, and a short one at the end */
        for (size_t n = 0; n < 7; n++)
            check_sumsq(floats[d], rounds[n], 64, 0, n % 2 ? 60 : 0);
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

/* Powers that are not whole are CUDA's pow, 2 ulp at most, and the C library's, 1. */
static void check_sumpow(fsdpc_dtype dtype, size_t numel, size_t leaf, size_t shift, double p)
{
    buffer x = buffer_random(dtype, numel, shift);
    fsdpc_exact_sum on_cpu = {{0}, 0, 0}, on_gpu = on_cpu;
    CHECK_OK(fsdpc_flat_sumpow(x.on_cpu, dtype, numel, leaf, p, &on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_sumpow(x.on_gpu, dtype, numel, leaf, p, &on_gpu, gpu_stream));
    fsdpc_exact_sum_normalize(&on_cpu);
    fsdpc_exact_sum_normalize(&on_gpu);
    double want = fsdpc_exact_sum_value(&on_cpu), got = fsdpc_exact_sum_value(&on_gpu);
    bool same = memcmp(&on_cpu, &on_gpu, sizeof on_cpu) == 0;
    bool whole = p == rint(p) && p <= 64;
    CHECK_NOTE(whole ? same : fabs(got - want) <= 3 * 0x1p-52 * want,
               "sum of powers %g, %s %zu leaf %zu: %.17g, %.17g", p, fsdpc_dtype_name(dtype), numel,
               leaf, want, got);
    buffer_fini(&x);
}

static void test_sumpow(void)
{
    static const double powers[] = {1, 2, 3, 5, 64, 65, 0.5, 2.5};
    static const size_t leaves[] = {64, 7, 1000};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t p = 0; p < 8; p++)
                check_sumpow(floats[d], sizes[n], leaves[(n + p) % 3], (n + p) % 2, powers[p]);
    buffer x = buffer_random(FSDPC_BF16, 1000, 0);
    element_set(x.on_cpu, 100, FSDPC_BF16, -NAN);
    element_set(x.on_cpu, 700, FSDPC_BF16, -INFINITY);
    buffer_send(&x);
    for (size_t p = 0; p < 8; p++) {
        fsdpc_exact_sum sum = {{0}, 0, 0};
        CHECK_OK(fsdpc_flat_sumpow(x.on_gpu, FSDPC_BF16, 1000, 64, powers[p], &sum, gpu_stream));
        CHECK_NOTE(sum.nans == 1 && sum.infinities == 1, "powers %g", powers[p]);
    }
    buffer_fini(&x);
}

/* `special` goes to the last element, which is an edge's. */
static void check_absmax(fsdpc_dtype dtype, size_t numel, size_t shift, double special, double from)
{
    buffer x = buffer_random(dtype, numel, shift);
    make_signed(&x);
    if (numel && special != 0)
        element_set(x.on_cpu, numel - 1, dtype, special);
    buffer_send(&x);
    double on_cpu = from, on_gpu = from;
    CHECK_OK(fsdpc_flat_absmax(x.on_cpu, dtype, numel, &on_cpu, cpu_stream));
    CHECK_OK(fsdpc_flat_absmax(x.on_gpu, dtype, numel, &on_gpu, gpu_stream));
    CHECK_NOTE(on_cpu == on_gpu || (isnan(on_cpu) && isnan(on_gpu)),
               "largest of %zu %s from %g: %.17g, %.17g", numel, fsdpc_dtype_name(dtype), from,
               on_cpu, on_gpu);
    buffer_fini(&x);
}

static void test_absmax(void)
{
    static const double specials[] = {0, -2, NAN, -INFINITY};
    static const double froms[] = {0, 0.5, 3, INFINITY, NAN};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t k = 0; k < 20; k++)
                check_absmax(floats[d], sizes[n], k % 3, specials[k % 4], froms[k % 5]);
}

static void test_clamp(void)
{
    /* of the last two, one is rounded up to bf16, one to fp16, but down if by way of fp32 */
    static const double limits[] = {0, 0.1, 1e-40, INFINITY, 0x1.0100000001p0, 0x1.0020000001p0};
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++)
            for (size_t l = 0; l < 6; l++) {
                buffer x = buffer_random(floats[d], sizes[n], l % 2);
                make_hard(&x);
                CHECK_OK(fsdpc_flat_clamp(x.on_cpu, floats[d], sizes[n], limits[l], cpu_stream));
                CHECK_OK(fsdpc_flat_clamp(x.on_gpu, floats[d], sizes[n], limits[l], gpu_stream));
                check_same_bits(&x, "clamp");
                buffer_fini(&x);
            }
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
    CHECK_FAILS(fsdpc_flat_sumpow(&x, FSDPC_F32, 1, 64, 0, &sum, gpu_stream), FSDPC_ERR_VALUE,
                "above 0");
    CHECK_FAILS(fsdpc_flat_clamp(&x, FSDPC_F32, 1, -1, gpu_stream), FSDPC_ERR_VALUE, "at least 0");
    CHECK_FAILS(fsdpc_flat_sumsq(&x, FSDPC_F32, 1, 0, &sum, gpu_stream), FSDPC_ERR_VALUE, "leaf");
    CHECK_FAILS(fsdpc_flat_reduce(&reduce, gpu_stream), FSDPC_ERR_VALUE, "source");
}

int main(void)
{
    static const rig_test_fn tests[] = {
        test_cast,           test_accumulate, test_equal_sees_one_bit,
        test_reduce,         test_scale,      test_sumsq,
        test_sumsq_of_sizes, test_sumpow,     test_absmax,
        test_clamp,          test_init,       test_refusals};
    return rig_main("test_flat_kernels", tests, sizeof tests / sizeof tests[0]);
}
