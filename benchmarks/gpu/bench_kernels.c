/* How near the GPU's kernels come to what the device can do.
 *
 * Flat kernels: bytes that must be read and written, over the time, as a share of the rate of a
 * device-to-device copy measured in the same run. Attention: FLOPs by the usual count (4 T^2 d a
 * head forward, 2.5 times that backward, half if causal) over the time. So are those of products.
 * Random data, several times the L2's size, in two lengths; the best and the median of many, by the
 * device's clock.
 */
#include "gpu_rig.h"

#if !defined(FSDPC_EMU)

enum { REPEATS = 21, SOURCES = 8, ROW = 4096 };

typedef fsdpc_status (*bench_fn)(void *arg);

static int by_time(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median milliseconds. */
static float time_of(bench_fn fn, void *arg, float *best_out)
{
    cudaStream_t raw = fsdpc_cuda_queue_of(gpu_stream)->raw;
    cudaEvent_t begin, end;
    float times[REPEATS];
    CHECK(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess);
    for (int r = -3; r < REPEATS; r++) {
        CHECK(cudaEventRecord(begin, raw) == cudaSuccess);
        CHECK_OK(fn(arg));
        CHECK(cudaEventRecord(end, raw) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess);
        if (r >= 0)
            CHECK(cudaEventElapsedTime(&times[r], begin, end) == cudaSuccess);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    qsort(times, REPEATS, sizeof times[0], by_time);
    *best_out = times[0];
    return times[REPEATS / 2];
}

static void *memory_of(size_t bytes)
{
    void *pointer = NULL;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, bytes, &pointer));
    return pointer;
}

static void *noise_of(size_t numel, fsdpc_dtype dtype)
{
    void *pointer = memory_of(numel * fsdpc_dtype_bytes(dtype));
    fsdpc_init_args args = {.dst = pointer,
                            .dtype = dtype,
                            .numel = numel,
                            .kind = FSDPC_INIT_NORMAL,
                            .b = 1,
                            .seed = rig_bits()};
    CHECK_OK(fsdpc_flat_init(&args, gpu_stream));
    return pointer;
}

/* -- flat kernels ------------------------------------------------------------------------------ */

typedef struct flat_buffers {
    size_t numel;         /* of each */
    float *x, *y, *m, *v; /* y is written; m and v are states */
    uint16_t *half[SOURCES], *copy_in;
    fsdpc_exact_sum *sum;
    double *one; /* in the device's memory */
    bool *equal;
} flat_buffers;

typedef struct flat_row {
    const char *name;
    fsdpc_status (*fn)(const struct flat_row *row, const flat_buffers *b);
    double bytes; /* an element */
    int sources;
    bool accumulate, factor; /* a step reads a factor in the device's memory */
    fsdpc_optim_kind kind;
    double momentum;
} flat_row;

typedef struct flat_case {
    const flat_row *row;
    const flat_buffers *buffers;
} flat_case;

static fsdpc_status run_flat(void *arg)
{
    const flat_case *c = arg;
    return c->row->fn(c->row, c->buffers);
}

static fsdpc_status run_copy(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_device_copy(gpu, b->y, b->x, b->numel * 4, gpu_stream);
}

static fsdpc_status run_narrow(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_cast(b->half[0], FSDPC_BF16, b->x, FSDPC_F32, b->numel, gpu_stream);
}

static fsdpc_status run_widen(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_cast(b->y, FSDPC_F32, b->half[1], FSDPC_BF16, b->numel, gpu_stream);
}

static fsdpc_status run_accumulate(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_accumulate(b->y, FSDPC_F32, b->half[1], FSDPC_BF16, b->numel, gpu_stream);
}

static fsdpc_status run_reduce(const flat_row *row, const flat_buffers *b)
{
    fsdpc_reduce_args args = {.srcs = (const void *const *)b->half,
                              .n_srcs = row->sources,
                              .dtype = FSDPC_BF16,
                              .numel = b->numel,
                              .scale = 0.125,
                              .round_dtype = FSDPC_F32,
                              .out = b->y,
                              .out_dtype = FSDPC_F32,
                              .accumulate = row->accumulate};
    return fsdpc_flat_reduce(&args, gpu_stream);
}

static fsdpc_status run_scale(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_scale(b->y, FSDPC_F32, b->numel, 1.0000001f, NULL, NULL, gpu_stream);
}

/* Of what run_narrow left, so that it looks at everything. */
static fsdpc_status run_equal(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_equal(b->half[0], FSDPC_BF16, b->x, FSDPC_F32, b->numel, b->equal,
                            gpu_stream);
}

static fsdpc_status run_absmax(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_absmax(b->x, FSDPC_F32, b->numel, b->one + 1, gpu_stream);
}

static fsdpc_status run_sumsq(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_sumsq(b->x, FSDPC_F32, b->numel, 64, b->sum, gpu_stream);
}

static fsdpc_status run_sumsq_half(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_sumsq(b->half[0], FSDPC_BF16, b->numel, 64, b->sum, gpu_stream);
}

/* Of m before the steps, in which every other row is zeros. */
static fsdpc_status run_sumsq_zeros(const flat_row *row, const flat_buffers *b)
{
    (void)row;
    return fsdpc_flat_sumsq(b->m, FSDPC_F32, b->numel, 64, b->sum, gpu_stream);
}

static fsdpc_status run_step(const flat_row *row, const flat_buffers *b)
{
    fsdpc_step_args args = {.param = b->x,
                            .param_dtype = FSDPC_F32,
                            .grad = b->half[1],
                            .grad_dtype = FSDPC_BF16,
                            .states = {b->m, b->v},
                            .copy_in = b->copy_in,
                            .copy_in_dtype = FSDPC_BF16,
                            .numel = b->numel,
                            .grad_scale = 1,
                            .grad_scale_at = row->factor ? b->one : NULL,
                            .hyper = {.lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.95,
                                      .eps = 1e-8,
                                      .momentum = row->momentum,
                                      .weight_decay = 0.1},
                            .step = 10,
                            .kind = row->kind};
    return fsdpc_flat_step(&args, gpu_stream);
}

/* In this order: see run_equal and run_sumsq_zeros. */
static const flat_row flat_rows[] = {
    {.name = "copy", .fn = run_copy, .bytes = 8},
    {.name = "cast fp32 -> bf16", .fn = run_narrow, .bytes = 6},
    {.name = "cast bf16 -> fp32", .fn = run_widen, .bytes = 6},
    {.name = "accumulate fp32 += bf16", .fn = run_accumulate, .bytes = 10},
    {.name = "reduce 1 bf16 into fp32", .fn = run_reduce, .bytes = 6, .sources = 1},
    {.name = "reduce 2 bf16 into fp32", .fn = run_reduce, .bytes = 8, .sources = 2},
    {.name = "reduce 8 bf16 into fp32", .fn = run_reduce, .bytes = 20, .sources = 8},
    {.name = "reduce 1 bf16, fp32 +=",
     .fn = run_reduce,
     .bytes = 10,
     .sources = 1,
     .accumulate = true},
    {.name = "reduce 2 bf16, fp32 +=",
     .fn = run_reduce,
     .bytes = 12,
     .sources = 2,
     .accumulate = true},
    {.name = "reduce 8 bf16, fp32 +=",
     .fn = run_reduce,
     .bytes = 24,
     .sources = 8,
     .accumulate = true},
    {.name = "scale fp32", .fn = run_scale, .bytes = 8},
    {.name = "equal, bf16 and fp32", .fn = run_equal, .bytes = 6},
    {.name = "absmax fp32", .fn = run_absmax, .bytes = 4},
    {.name = "sumsq fp32, leaves of 64", .fn = run_sumsq, .bytes = 4},
    {.name = "sumsq bf16, leaves of 64", .fn = run_sumsq_half, .bytes = 2},
    {.name = "sumsq fp32, half of it zeros", .fn = run_sumsq_zeros, .bytes = 4},
    {.name = "adamw fp32, bf16 grad and copy-in",
     .fn = run_step,
     .bytes = 28,
     .kind = FSDPC_OPTIM_ADAMW},
    {.name = "  and a factor in memory",
     .fn = run_step,
     .bytes = 28,
     .kind = FSDPC_OPTIM_ADAMW,
     .factor = true},
    {.name = "momentum fp32, bf16 grad, copy-in",
     .fn = run_step,
     .bytes = 20,
     .kind = FSDPC_OPTIM_SGD,
     .momentum = 0.9},
    {.name = "lion fp32, bf16 grad and copy-in",
     .fn = run_step,
     .bytes = 20,
     .kind = FSDPC_OPTIM_LION},
};

static flat_buffers flat_buffers_of(size_t numel)
{
    const double one[] = {1, 0};
    flat_buffers b = {.numel = numel,
                      .x = noise_of(numel, FSDPC_F32),
                      .y = memory_of(numel * 4),
                      .m = noise_of(numel, FSDPC_F32),
                      .v = memory_of(numel * 4),
                      .copy_in = memory_of(numel * 2),
                      .sum = memory_of(sizeof(fsdpc_exact_sum)),
                      .one = memory_of(sizeof one),
                      .equal = memory_of(sizeof(bool))};
    for (int s = 0; s < SOURCES; s++)
        b.half[s] = noise_of(numel, FSDPC_BF16);
    CHECK_OK(fsdpc_device_fill(gpu, b.v, 0, numel * 4, gpu_stream));
    for (size_t i = 0; i + ROW <= numel; i += 2 * ROW)
        CHECK_OK(fsdpc_device_fill(gpu, b.m + i, 0, ROW * 4, gpu_stream));
    CHECK_OK(fsdpc_device_fill(gpu, b.sum, 0, sizeof *b.sum, gpu_stream));
    CHECK_OK(fsdpc_device_copy(gpu, b.one, one, sizeof one, gpu_stream));
    return b;
}

static void flat_buffers_free(flat_buffers *b)
{
    void *all[] = {b->x, b->y, b->m, b->v, b->copy_in, b->sum, b->one, b->equal};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        fsdpc_device_free(gpu, all[i]);
    for (int s = 0; s < SOURCES; s++)
        fsdpc_device_free(gpu, b->half[s]);
}

static void bench_flat(size_t numel)
{
    flat_buffers b = flat_buffers_of(numel);
    double copy_rate = 0;
    printf("| %zu elements | | | | |\n", numel);
    for (size_t i = 0; i < sizeof flat_rows / sizeof flat_rows[0]; i++) {
        flat_case c = {&flat_rows[i], &b};
        float best, median = time_of(run_flat, &c, &best);
        double rate = c.row->bytes * (double)numel / (double)median * 1e-9; /* TB/s */
        copy_rate = i == 0 ? rate : copy_rate;
        printf("| %-30s | %6.3f | %6.3f | %5.2f TB/s | %3.0f %% of copy |\n", c.row->name,
               (double)median, (double)best, rate, 100 * rate / copy_rate);
    }
    bool equal = false;
    CHECK_OK(fsdpc_device_copy(gpu, &equal, b.equal, sizeof equal, gpu_stream));
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    CHECK(equal); /* else the row above stopped early */
    flat_buffers_free(&b);
}

/* -- products and attention -------------------------------------------------------------------- */

static fsdpc_status run_gemm(void *arg)
{
    return gpu->nn->gemm(arg, gpu_stream);
}

static fsdpc_status run_attention(void *arg)
{
    return gpu->nn->attention(arg, gpu_stream);
}

static fsdpc_status run_attention_backward(void *arg)
{
    return gpu->nn->attention_backward(arg, gpu_stream);
}

static void print_flops(const char *name, double flops, float median, float best)
{
    printf("| %-30s | %6.3f | %6.3f | %5.0f TFLOP/s | |\n", name, (double)median, (double)best,
           flops / median * 1e-9);
}

/* The same weights by another address of their memory, as a unit reads its full. */
static void bench_gemm_by_window(fsdpc_gemm_args args)
{
    fsdpc_window *first, *second;
    size_t bytes = args.k * args.n * 2;
    if (gpu->window_granule == 0) {
        printf("| %-30s | | | none here | |\n", "  its weights in a window");
        return;
    }
    CHECK_OK(fsdpc_window_create(gpu, FSDPC_MEM_OTHER, bytes, NULL, &first));
    CHECK_OK(fsdpc_window_create(gpu, FSDPC_MEM_OTHER, bytes, first, &second));
    CHECK_OK(fsdpc_device_copy(gpu, first->memory, args.b, bytes, gpu_stream));
    args.b = second->address;
    float best, median = time_of(run_gemm, &args, &best);
    print_flops("  its weights in a window", 2.0 * args.m * args.n * args.k, median, best);
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    fsdpc_window_destroy(second);
    fsdpc_window_destroy(first);
}

static fsdpc_status run_gemm_gelu(void *arg)
{
    return gpu->nn->gemm_gelu(arg, gpu_stream);
}

static fsdpc_status run_gemm_then_gelu(void *arg)
{
    return fsdpc_gemm_gelu_by_parts(arg, gpu_stream);
}

/* A linear layer of GPT-2 XL's size with gelu, and the way back through gelu of the layer behind.
 */
static void bench_gemm_gelu(void)
{
    const size_t rows = 8192, dim = 1600, inner = 6400;
    void *x = noise_of(rows * dim, FSDPC_BF16), *w = noise_of(inner * dim, FSDPC_BF16);
    void *bias = noise_of(inner, FSDPC_BF16), *before = noise_of(rows * inner, FSDPC_BF16);
    void *c = memory_of(rows * inner * 2);
    for (int backward = 0; backward < 2; backward++) {
        fsdpc_gemm_gelu_args args = {.gemm = {.m = rows,
                                              .n = inner,
                                              .k = dim,
                                              .dtype = FSDPC_BF16,
                                              .c_dtype = FSDPC_BF16,
                                              .a = x,
                                              .b = w,
                                              .c = c,
                                              .lda = dim,
                                              .ldb = backward ? inner : dim,
                                              .ldc = inner,
                                              .trans_b = !backward,
                                              .bias = backward ? NULL : bias},
                                     .backward = backward,
                                     .before = before};
        double flops = 2.0 * (double)(rows * dim * inner);
        float best, median = time_of(run_gemm_gelu, &args, &best);
        print_flops(backward ? "gemm with gelu's slope" : "gemm with gelu", flops, median, best);
        median = time_of(run_gemm_then_gelu, &args, &best);
        print_flops("  one after the other", flops, median, best);
    }
    void *all[] = {x, w, bias, before, c};
    for (int i = 0; i < 5; i++)
        fsdpc_device_free(gpu, all[i]);
}

static void bench_gemm(void)
{
    const size_t n = 8192;
    fsdpc_gemm_args args = {.m = n,
                            .n = n,
                            .k = n,
                            .dtype = FSDPC_BF16,
                            .c_dtype = FSDPC_BF16,
                            .a = noise_of(n * n, FSDPC_BF16),
                            .b = noise_of(n * n, FSDPC_BF16),
                            .c = memory_of(n * n * 2),
                            .lda = n,
                            .ldb = n,
                            .ldc = n,
                            .trans_b = true};
    float best, median = time_of(run_gemm, &args, &best);
    print_flops("gemm bf16, 8192 cubed", 2.0 * n * n * n, median, best);
    bench_gemm_by_window(args);
    fsdpc_device_free(gpu, (void *)args.a);
    fsdpc_device_free(gpu, (void *)args.b);
    fsdpc_device_free(gpu, args.c);
}

static void bench_attention(size_t dim)
{
    const size_t tokens = 8192, heads = 16, kv_heads = 4;
    size_t numel = tokens * heads * dim, kv_numel = tokens * kv_heads * dim;
    size_t q_stride[3] = {numel, heads * dim, dim}, kv_stride[3] = {kv_numel, kv_heads * dim, dim};
    fsdpc_attention_args args = {.dtype = FSDPC_BF16,
                                 .batch = 1,
                                 .tokens_q = tokens,
                                 .tokens_k = tokens,
                                 .heads = heads,
                                 .kv_heads = kv_heads,
                                 .dim = dim,
                                 .scale = 1 / sqrt((double)dim),
                                 .causal = true,
                                 .q = noise_of(numel, FSDPC_BF16),
                                 .k = noise_of(kv_numel, FSDPC_BF16),
                                 .v = noise_of(kv_numel, FSDPC_BF16),
                                 .out = memory_of(numel * 2),
                                 .lse = memory_of(heads * tokens * 4),
                                 .dout = noise_of(numel, FSDPC_BF16),
                                 .dq = memory_of(numel * 2),
                                 .dk = memory_of(kv_numel * 2),
                                 .dv = memory_of(kv_numel * 2)};
    memcpy(args.stride_q, q_stride, sizeof q_stride);
    memcpy(args.stride_out, q_stride, sizeof q_stride);
    memcpy(args.stride_k, kv_stride, sizeof kv_stride);
    memcpy(args.stride_v, kv_stride, sizeof kv_stride);
    double flops = 2.0 * (double)tokens * (double)tokens * (double)(heads * dim); /* causal */
    char name[64];
    float best, median = time_of(run_attention, &args, &best);
    snprintf(name, sizeof name, "attention bf16, causal, d %zu", dim);
    print_flops(name, flops, median, best);
    median = time_of(run_attention_backward, &args, &best);
    snprintf(name, sizeof name, "  its backward");
    print_flops(name, 2.5 * flops, median, best);
    void *all[] = {(void *)args.q,    (void *)args.k, (void *)args.v, args.out, args.lse,
                   (void *)args.dout, args.dq,        args.dk,        args.dv};
    for (int b = 0; b < 9; b++)
        fsdpc_device_free(gpu, all[b]);
}

static void bench_all(void)
{
    struct cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
    printf("%s, %d multiprocessors; %d repeats\n", properties.name, properties.multiProcessorCount,
           (int)REPEATS);
    printf(
        "| kernel                         | median | best ms | rate | |\n|---|---|---|---|---|\n");
    bench_flat((size_t)1 << 28);
    bench_flat(100000000);
    bench_gemm();
    bench_gemm_gelu();
    bench_attention(64);
    bench_attention(128);
}

int main(void)
{
    static const rig_test_fn tests[] = {bench_all};
    return rig_main("bench_kernels", tests, 1);
}

#else

int main(void)
{
    return 0; /* the emulated device has no speed */
}

#endif
