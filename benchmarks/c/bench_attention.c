/* Attention's time per instruction set and shape, one thread: forward, and forward with backward.
 *
 *   bench_attention [isa]     default: every path this machine has
 *
 * Prints the best and the median of many calls, in microseconds of the thread's processor time, so
 * that others may share the machine. The baseline, measured in the same minutes, is
 * torch.nn.functional.scaled_dot_product_attention on (B, H, T, D) views of (B, T, H, D), one
 * thread.
 */
#include "ops/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef fsdpc_status (*attention_fn)(const fsdpc_attention_args *args, fsdpc_stream *stream);

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { MOST_RUNS = 400 };

/* Fills best and median of fn over about `budget_us`. */
static void measure(attention_fn fn, const fsdpc_attention_args *x, fsdpc_stream *stream,
                    double budget_us, double *best, double *median)
{
    static double times[MOST_RUNS];
    int n = 0;
    double begin = now_us();
    while (n < MOST_RUNS && (n < 5 || now_us() - begin < budget_us)) {
        double from = now_us();
        if (fn(x, stream) != FSDPC_OK) {
            fprintf(stderr, "%s\n", fsdpc_last_error());
            exit(1);
        }
        times[n++] = now_us() - from;
    }
    qsort(times, (size_t)n, sizeof *times, ascending);
    *best = times[0];
    *median = times[n / 2];
}

static void *filled(size_t numel, fsdpc_dtype dtype)
{
    void *p = aligned_alloc(64, (numel * 4 + 63) / 64 * 64);
    if (!p)
        abort();
    uint32_t state = 1;
    for (size_t i = 0; i < numel; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(state >> 8) * 0x1p-22f - 2;
        if (dtype == FSDPC_F32)
            ((float *)p)[i] = x;
        else
            ((uint16_t *)p)[i] = fsdpc_f32_to_bf16(x);
    }
    return p;
}

typedef struct bench_shape {
    size_t batch, tokens, heads, dim;
    bool causal;
} bench_shape;

static void bench(const bench_shape *shape, fsdpc_dtype dtype, fsdpc_stream *stream)
{
    size_t numel = shape->batch * shape->tokens * shape->heads * shape->dim;
    fsdpc_attention_args x = {.dtype = dtype,
                              .batch = shape->batch,
                              .tokens_q = shape->tokens,
                              .tokens_k = shape->tokens,
                              .heads = shape->heads,
                              .kv_heads = shape->heads,
                              .dim = shape->dim,
                              .scale = 1 / sqrt((double)shape->dim),
                              .causal = shape->causal};
    size_t stride[3] = {shape->tokens * shape->heads * shape->dim, shape->heads * shape->dim,
                        shape->dim};
    memcpy(x.stride_q, stride, sizeof stride);
    memcpy(x.stride_k, stride, sizeof stride);
    memcpy(x.stride_v, stride, sizeof stride);
    memcpy(x.stride_out, stride, sizeof stride);
    void *tensors[8];
    for (int i = 0; i < 8; i++)
        tensors[i] = filled(numel, dtype);
    x.q = tensors[0], x.k = tensors[1], x.v = tensors[2], x.out = tensors[3];
    x.dout = tensors[4], x.dq = tensors[5], x.dk = tensors[6], x.dv = tensors[7];
    x.lse = filled(shape->batch * shape->heads * shape->tokens, FSDPC_F32);
    double forward[2], backward[2];
    measure(fsdpc_attention_cpu, &x, stream, 3e5, &forward[0], &forward[1]);
    measure(fsdpc_attention_backward_cpu, &x, stream, 5e5, &backward[0], &backward[1]);
    printf("%-10s %-8s B%zu T%-4zu H%-2zu D%-3zu %-6s forward %7.0f (%7.0f) backward %7.0f (%7.0f) "
           "both %7.0f\n",
           fsdpc_isa_name(stream->device->isa), fsdpc_dtype_name(dtype), shape->batch,
           shape->tokens, shape->heads, shape->dim, shape->causal ? "causal" : "", forward[0],
           forward[1], backward[0], backward[1], forward[0] + backward[0]);
    for (int i = 0; i < 8; i++)
        free(tensors[i]);
    free(x.lse);
}

int main(int argc, char **argv)
{
    static const bench_shape shapes[] = {{2, 256, 5, 64, true},
                                         {1, 256, 12, 64, true},
                                         {1, 1024, 8, 64, true},
                                         {1, 1024, 8, 64, false},
                                         {1, 1024, 8, 128, true}};
    fsdpc_isa only = FSDPC_ISA_COUNT;
    if (argc > 1 && fsdpc_isa_parse(argv[1], &only) != FSDPC_OK) {
        fprintf(stderr, "%s\n", fsdpc_last_error());
        return 1;
    }
    fsdpc_mem *mem;
    if (fsdpc_mem_create(&mem) != FSDPC_OK)
        return 1;
    for (fsdpc_isa isa = 0; isa <= fsdpc_isa_best(); isa++) {
        if (only != FSDPC_ISA_COUNT && isa != only)
            continue;
        fsdpc_device device = {.mem = mem, .isa = isa};
        fsdpc_stream stream = {.device = &device, .name = "bench"};
        for (int dtype = FSDPC_F32; dtype <= FSDPC_BF16; dtype++)
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
                bench(&shapes[i], (fsdpc_dtype)dtype, &stream);
    }
    fsdpc_mem_destroy(mem);
    return 0;
}
