/* How near the GPU's kernels come to what the device can do.
 *
 * Flat kernels: bytes that must be read and written, over the time, as a share of the rate of a
 * device-to-device copy measured in the same run.  Attention: FLOPs by the usual count (4 T^2 d a
 * head forward, 2.5 times that backward, half if causal) over the time.  Products likewise.
 * Random data, several times the L2's size; the best and the median of many, by the device's clock.
 */
#include "gpu_rig.h"

#if !defined(FSDPC_EMU)

enum { REPEATS = 21, NUMEL = 1 << 28 };

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

typedef struct flat_case {
    float *x, *y, *m, *v; /* NUMEL each */
    uint16_t *half, *wire;
    fsdpc_exact_sum *sum;
} flat_case;

static fsdpc_status run_copy(void *arg)
{
    flat_case *c = arg;
    return fsdpc_device_copy(gpu, c->y, c->x, (size_t)NUMEL * 4, gpu_stream);
}

static fsdpc_status run_cast(void *arg)
{
    flat_case *c = arg;
    return fsdpc_flat_cast(c->half, FSDPC_BF16, c->x, FSDPC_F32, NUMEL, gpu_stream);
}

static fsdpc_status run_accumulate(void *arg)
{
    flat_case *c = arg;
    return fsdpc_flat_accumulate(c->y, FSDPC_F32, c->half, FSDPC_BF16, NUMEL, gpu_stream);
}

static fsdpc_status run_scale(void *arg)
{
    flat_case *c = arg;
    return fsdpc_flat_scale(c->y, FSDPC_F32, NUMEL, 1.0000001f, NULL, NULL, gpu_stream);
}

static fsdpc_status run_sumsq(void *arg)
{
    flat_case *c = arg;
    return fsdpc_flat_sumsq(c->x, FSDPC_F32, NUMEL, 64, c->sum, gpu_stream);
}

static fsdpc_status run_adamw(void *arg)
{
    flat_case *c = arg;
    fsdpc_step_args args = {
        .param = c->x,
        .param_dtype = FSDPC_F32,
        .grad = c->half,
        .grad_dtype = FSDPC_BF16,
        .states = {c->m, c->v},
        .wire = c->wire,
        .wire_dtype = FSDPC_BF16,
        .numel = NUMEL,
        .grad_scale = 1,
        .hyper = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1},
        .step = 10,
        .kind = FSDPC_OPTIM_ADAMW};
    return fsdpc_flat_step(&args, gpu_stream);
}

static void bench_flat(void)
{
    static const struct {
        const char *name;
        bench_fn fn;
        double bytes; /* an element */
    } cases[] = {{"copy", run_copy, 8},
                 {"cast fp32 -> bf16", run_cast, 6},
                 {"accumulate fp32 += bf16", run_accumulate, 10},
                 {"scale fp32", run_scale, 8},
                 {"sumsq fp32, leaves of 64", run_sumsq, 4},
                 {"adamw fp32, bf16 grad and wire", run_adamw, 28}};
    flat_case c = {noise_of(NUMEL, FSDPC_F32),        memory_of((size_t)NUMEL * 4),
                   noise_of(NUMEL, FSDPC_F32),        memory_of((size_t)NUMEL * 4),
                   noise_of(NUMEL, FSDPC_BF16),       memory_of((size_t)NUMEL * 2),
                   memory_of(sizeof(fsdpc_exact_sum))};
    CHECK_OK(fsdpc_device_fill(gpu, c.v, 0, (size_t)NUMEL * 4, gpu_stream));
    CHECK_OK(fsdpc_device_fill(gpu, c.sum, 0, sizeof *c.sum, gpu_stream));
    double copy_rate = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float best, median = time_of(cases[i].fn, &c, &best);
        double rate = cases[i].bytes * NUMEL / median * 1e-9; /* TB/s */
        copy_rate = i == 0 ? rate : copy_rate;
        printf("| %-30s | %6.3f | %6.3f | %5.2f TB/s | %3.0f %% of copy |\n", cases[i].name,
               (double)median, (double)best, rate, 100 * rate / copy_rate);
    }
    void *all[] = {c.x, c.y, c.m, c.v, c.half, c.wire, c.sum};
    for (int b = 0; b < 7; b++)
        fsdpc_device_free(gpu, all[b]);
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
    bench_flat();
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
