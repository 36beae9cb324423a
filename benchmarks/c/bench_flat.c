/* How fast the flat kernels are, beside memcpy of the same size in the same run.
 *
 *     bench_flat [isa] [log2 of elements] [threads] [repetitions]
 *
 * Prints, for each kernel, median, least and greatest time, and bandwidth at the median: the bytes
 * it must read and write, a write counted once (what the cache reads before writing is not
 * counted). The row "fp64 sum" is sumsq's arithmetic without the exact accumulator, the price of
 * which it shows. Not a test: CI does not run it.
 */
#include "check.h"

#include <time.h>
#include <unistd.h>

#include "ops/flat_ops.h"

enum { SRCS = 8, REPEAT_MAX = 101 };

typedef struct bench {
    const fsdpc_flat_ops *ops;
    fsdpc_stream stream;
    size_t numel;
    int repeat;
    void *src[SRCS], *dst, *param, *exp_avg, *exp_avg_sq, *copy_in,
        *half; /* half: src[0] in bf16 */
    volatile double sink;
} bench;

typedef struct kernel {
    const char *name;
    double bytes; /* per element */
    void (*run)(bench *b);
} kernel;

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void run_memcpy(bench *b)
{
    memcpy(b->dst, b->src[0], 4 * b->numel);
}

static void run_cast_down(bench *b)
{
    b->ops->cast(b->dst, FSDPC_BF16, b->src[0], FSDPC_F32, b->numel, &b->stream);
}

static void run_cast_up(bench *b)
{
    b->ops->cast(b->dst, FSDPC_F32, b->half, FSDPC_BF16, b->numel, &b->stream);
}

static void run_cast_f16(bench *b)
{
    b->ops->cast(b->dst, FSDPC_F16, b->src[0], FSDPC_F32, b->numel, &b->stream);
}

static void run_accumulate(bench *b)
{
    b->ops->accumulate(b->dst, FSDPC_F32, b->src[0], FSDPC_F32, b->numel, &b->stream);
}

static void run_accumulate_bf16(bench *b)
{
    b->ops->accumulate(b->dst, FSDPC_F32, b->half, FSDPC_BF16, b->numel, &b->stream);
}

static void reduce(bench *b, int n, fsdpc_dtype dtype, bool accumulate)
{
    fsdpc_reduce_args args = {(const void *const *)b->src,
                              n,
                              dtype,
                              b->numel,
                              1.0f / (float)n,
                              dtype,
                              b->dst,
                              FSDPC_F32,
                              accumulate};
    b->ops->reduce(&args, &b->stream);
}

static void run_reduce_1(bench *b)
{
    reduce(b, 1, FSDPC_F32, false);
}

static void run_reduce_2(bench *b)
{
    reduce(b, 2, FSDPC_F32, false);
}

static void run_reduce_2_add(bench *b)
{
    reduce(b, 2, FSDPC_F32, true);
}

static void run_reduce_2_bf16(bench *b)
{
    reduce(b, 2, FSDPC_BF16, false);
}

static void run_reduce_4(bench *b)
{
    reduce(b, 4, FSDPC_F32, false);
}

static void run_reduce_8(bench *b)
{
    reduce(b, 8, FSDPC_F32, false);
}

static void run_scale(bench *b)
{
    int nonfinite = 0;
    b->ops->scale(b->dst, FSDPC_F32, b->numel, 1.0f, NULL, &nonfinite, &b->stream);
}

static void sumsq(bench *b, fsdpc_dtype dtype, size_t leaf)
{
    fsdpc_exact_sum sum = {{0}, 0, 0};
    b->ops->sumsq(dtype == FSDPC_BF16 ? b->half : b->src[0], dtype, b->numel, leaf, &sum,
                  &b->stream);
    b->sink = fsdpc_exact_sum_value(&sum);
}

static void run_sumsq(bench *b)
{
    sumsq(b, FSDPC_F32, 64);
}

static void run_sumsq_row(bench *b)
{
    sumsq(b, FSDPC_F32, 1000);
}

static void run_sumsq_all(bench *b)
{
    sumsq(b, FSDPC_F32, b->numel); /* one leaf: nothing but the fp64 sum */
}

static void run_sumsq_bf16(bench *b)
{
    sumsq(b, FSDPC_BF16, 64);
}

static void run_equal(bench *b)
{
    bool equal;
    b->ops->equal(b->dst, FSDPC_F32, b->src[0], FSDPC_F32, b->numel, &equal, &b->stream);
    b->sink = equal;
}

static void run_equal_bf16(bench *b)
{
    bool equal;
    b->ops->equal(b->copy_in, FSDPC_BF16, b->param, FSDPC_F32, b->numel, &equal, &b->stream);
    b->sink = equal;
}

static void adamw(bench *b, fsdpc_dtype grad_dtype, fsdpc_dtype state_dtype, void *copy_in,
                  fsdpc_dtype copy_in_dtype)
{
    fsdpc_step_args args = {
        .param = b->param,
        .grad = grad_dtype == FSDPC_BF16 ? b->half : b->src[0],
        .grad_dtype = grad_dtype,
        .states = {b->exp_avg, b->exp_avg_sq},
        .state_dtype = state_dtype,
        .maxima = {b->src[1], b->src[2]},
        .code_row = FSDPC_CODE_BLOCK,
        .copy_in = copy_in,
        .copy_in_dtype = copy_in_dtype,
        .numel = b->numel,
        .grad_scale = 1,
        .hyper = {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01},
        .step = 3,
        .kind = FSDPC_OPTIM_ADAMW};
    b->ops->step(&args, &b->stream);
}

static void run_adamw(bench *b)
{
    adamw(b, FSDPC_F32, FSDPC_F32, NULL, FSDPC_F32);
}

static void run_adamw_f32(bench *b)
{
    adamw(b, FSDPC_F32, FSDPC_F32, b->copy_in, FSDPC_F32);
}

static void run_adamw_bf16(bench *b)
{
    adamw(b, FSDPC_F32, FSDPC_F32, b->copy_in, FSDPC_BF16);
}

static void run_adamw_bf16_bf16(bench *b)
{
    adamw(b, FSDPC_BF16, FSDPC_F32, b->copy_in, FSDPC_BF16);
}

static void run_adamw_int8(bench *b)
{
    adamw(b, FSDPC_F32, FSDPC_U8, NULL, FSDPC_F32);
}

static void run_adamw_int8_bf16(bench *b)
{
    adamw(b, FSDPC_F32, FSDPC_U8, b->copy_in, FSDPC_BF16);
}

static void run_init(bench *b)
{
    fsdpc_init_args args = {b->dst, FSDPC_F32, b->numel, FSDPC_INIT_NORMAL, 0, 0.02, 1, 2, 3};
    b->ops->init(&args, &b->stream);
}

static void run_init_uniform(bench *b)
{
    fsdpc_init_args args = {b->dst, FSDPC_F32, b->numel, FSDPC_INIT_UNIFORM, -1, 1, 1, 2, 3};
    b->ops->init(&args, &b->stream);
}

static const kernel kernels[] = {
    {"memcpy", 8, run_memcpy},
    {"equal f32 f32", 8, run_equal}, /* straight after memcpy: they are equal */
    {"cast bf16 <- f32", 6, run_cast_down},
    {"cast f32 <- bf16", 6, run_cast_up},
    {"cast f16 <- f32", 6, run_cast_f16},
    {"accumulate f32 += f32", 12, run_accumulate},
    {"accumulate f32 += bf16", 10, run_accumulate_bf16},
    {"reduce 1 f32", 8, run_reduce_1},
    {"reduce 2 f32", 12, run_reduce_2},
    {"reduce 2 f32, add", 16, run_reduce_2_add},
    {"reduce 2 bf16", 8, run_reduce_2_bf16},
    {"reduce 4 f32", 20, run_reduce_4},
    {"reduce 8 f32", 36, run_reduce_8},
    {"scale f32", 8, run_scale},
    {"fp64 sum", 4, run_sumsq_all},
    {"sumsq f32, leaf 64", 4, run_sumsq},
    {"sumsq f32, leaf 1000", 4, run_sumsq_row},
    {"sumsq bf16, leaf 64", 2, run_sumsq_bf16},
    {"adamw f32", 28, run_adamw},
    {"adamw f32, copy-in f32", 32, run_adamw_f32},
    {"adamw f32, copy-in bf16", 30, run_adamw_bf16},
    {"equal bf16 f32", 6, run_equal_bf16}, /* straight after publishing: they are equal */
    {"adamw grad, copy-in bf16", 28, run_adamw_bf16_bf16},
    {"adamw int8", 16, run_adamw_int8},
    {"adamw int8, copy-in bf16", 18, run_adamw_int8_bf16},
    {"init normal", 4, run_init},
    {"init uniform", 4, run_init_uniform},
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void time_kernel(bench *b, const kernel *k)
{
    double ms[REPEAT_MAX];
    k->run(b); /* touches memory, starts threads */
    for (int i = 0; i < b->repeat; i++) {
        double start = now_ms();
        k->run(b);
        ms[i] = now_ms() - start;
    }
    qsort(ms, (size_t)b->repeat, sizeof ms[0], compare_doubles);
    double median = ms[b->repeat / 2];
    printf("%-24s %9.3f ms  (%.3f .. %.3f)  %6.1f GB/s  %6.2f Gelement/s\n", k->name, median, ms[0],
           ms[b->repeat - 1], k->bytes * (double)b->numel / median / 1e6,
           (double)b->numel / median / 1e6);
}

int main(int argc, char **argv)
{
    fsdpc_isa isa;
    CHECK_OK(fsdpc_isa_parse(argc > 1 ? argv[1] : "auto", &isa));
    if (check_failures)
        return 1;
    bench b = {.ops = fsdpc_flat_ops_cpu(isa), .repeat = argc > 4 ? atoi(argv[4]) : 9};
    b.numel = (size_t)1 << (argc > 2 ? atoi(argv[2]) : 24);
    b.repeat = b.repeat < 1 ? 1 : b.repeat > REPEAT_MAX ? REPEAT_MAX : b.repeat;
    fsdpc_device device = {.isa = isa};
    CHECK_OK(fsdpc_team_create(argc > 3 ? atoi(argv[3]) : 1, &device.team));
    b.stream.device = &device;
    void **buffers[] = {&b.dst, &b.param, &b.exp_avg, &b.exp_avg_sq, &b.copy_in, &b.half};
    for (size_t i = 0; i < SRCS + 6; i++) {
        void **buffer = i < SRCS ? &b.src[i] : buffers[i - SRCS];
        *buffer = aligned_alloc(64, 4 * b.numel);
        if (!*buffer)
            return 1;
        fsdpc_init_args init = {*buffer, FSDPC_F32, b.numel, FSDPC_INIT_UNIFORM, 0, 1, i, 0, 0};
        b.ops->init(&init, &b.stream);
    }
    CHECK_OK(b.ops->cast(b.half, FSDPC_BF16, b.src[0], FSDPC_F32, b.numel, &b.stream));
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    printf("%s, kernels %s, %d threads, %zu elements, median of %d (least .. greatest)\n", host,
           b.ops->name, fsdpc_team_threads(device.team), b.numel, b.repeat);
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        time_kernel(&b, &kernels[i]);
    fsdpc_team_destroy(device.team);
    for (size_t i = 0; i < SRCS + 6; i++)
        free(i < SRCS ? b.src[i] : *buffers[i - SRCS]);
    return check_failures != 0;
}
