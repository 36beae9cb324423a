/* Speed of the matrix product beside what the processor can do: not a test, and not run by CI.
 *
 *     bench_gemm [threads [isa]]
 *
 * For every form a layer uses (y = x W^T, dx = dy W, dW += dy^T x with fp32 gradients) it prints
 * best and median GFLOP/s and the best's share of the peak. The peak is the best of a loop of the
 * instruction the path lives on, with registers alone, measured before and after every row, since
 * clocks wander; threads multiply it. Operands are random: AMX is a fifth faster on zeros. Times
 * are of the calling thread's processor time with one thread, so that other processes disturb less,
 * and wall time with more.
 */
#include <time.h>

#include "base/size.h"
#include "base/wait.h"
#include "check.h"
#include "ops/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { REPEATS_MOST = 200, PEAK_STEPS = 100000 };

static int64_t clock_of(int threads)
{
    if (threads > 1)
        return fsdpc_clock_ns();
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* -- peaks: flops of one loop, results kept by an empty asm ----------------------------------- */

#if defined(__x86_64__)
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx2,fma"))) static double loop_avx2(void)
{
    __m256 x = _mm256_set1_ps(0.5f);
#define X(i) __m256 s##i = x;
    TWELVE(X)
#undef X
    for (int n = 0; n < PEAK_STEPS; n++) {
#define X(i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(s##i) : "x"(x));
        TWELVE(X)
#undef X
    }
    return 12.0 * 16 * PEAK_STEPS;
}

__attribute__((target("avx512f"))) static double loop_avx512(void)
{
    __m512 x = _mm512_set1_ps(0.5f);
#define X(i) __m512 s##i = x;
    TWELVE(X)
#undef X
    for (int n = 0; n < PEAK_STEPS; n++) {
#define X(i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(s##i) : "v"(x));
        TWELVE(X)
#undef X
    }
    return 12.0 * 32 * PEAK_STEPS;
}

__attribute__((target("avx512f,avx512bf16"))) static double loop_avx512bf16(void)
{
    __m512 x = _mm512_set1_ps(0.5f);
#define X(i) __m512 s##i = x;
    TWELVE(X)
#undef X
    for (int n = 0; n < PEAK_STEPS; n++) {
#define X(i) __asm__ volatile("vdpbf16ps %1, %1, %0" : "+v"(s##i) : "v"(x));
        TWELVE(X)
#undef X
    }
    return 12.0 * 64 * PEAK_STEPS;
}

__attribute__((target("amx-tile,amx-bf16"))) static double loop_amx(void)
{
    _Alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int n = 0; n < PEAK_STEPS / 16; n++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_release();
    return 4.0 * 16384 * (PEAK_STEPS / 16);
}
#endif

/* GFLOP/s of one thread, 0 where no loop is known */
static double peak_of(fsdpc_isa isa, fsdpc_dtype dtype)
{
#if defined(__x86_64__)
    double (*loop)(void) = NULL;
    if (dtype == FSDPC_BF16 && isa >= FSDPC_ISA_AVX512BF16)
        loop = isa >= FSDPC_ISA_AMX ? loop_amx : loop_avx512bf16;
    else if (isa >= FSDPC_ISA_AVX2)
        loop = isa >= FSDPC_ISA_AVX512 ? loop_avx512 : loop_avx2;
    double best = 0;
    for (int i = 0; loop && i < 8; i++) {
        int64_t start = clock_of(1);
        double rate = loop() / (double)(clock_of(1) - start);
        best = rate > best ? rate : best;
    }
    return best;
#else
    (void)isa, (void)dtype;
    return 0;
#endif
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(fsdpc_stream *stream, int threads, fsdpc_dtype dtype, size_t rows, size_t out,
                  size_t in, int form)
{
    static const char *const names[] = {"x W^T", "dy W", "dy^T x"};
    fsdpc_gemm_args g = {.dtype = dtype, .c_dtype = form == 2 ? FSDPC_F32 : dtype};
    g.m = form == 2 ? out : rows;
    g.n = form == 0 ? out : in;
    g.k = form == 0 ? in : form == 1 ? out : rows;
    g.trans_b = form == 0;
    g.trans_a = g.accumulate = form == 2;
    g.lda = g.trans_a ? g.m : g.k;
    g.ldb = g.trans_b ? g.k : g.n;
    g.ldc = g.n;
    size_t numels[3] = {g.m * g.k, g.k * g.n, g.m * g.n};
    void *x[3];
    for (int i = 0; i < 3; i++) {
        fsdpc_dtype its = i == 2 ? g.c_dtype : dtype;
        x[i] = calloc(numels[i] + 1, fsdpc_dtype_bytes(its));
        uint32_t state = 1;
        for (size_t j = 0; j < numels[i]; j++) {
            state = state * 1664525u + 1013904223u;
            float value = (float)(int32_t)state * 0x1p-31f;
            if (its == FSDPC_F32)
                ((float *)x[i])[j] = value;
            else
                ((uint16_t *)x[i])[j] = fsdpc_f32_to_bf16(value);
        }
    }
    g.a = x[0], g.b = x[1], g.c = x[2];

    double flops = 2.0 * (double)g.m * (double)g.n * (double)g.k, rates[REPEATS_MOST];
    double peak = peak_of(stream->device->isa, dtype);
    int repeats = (int)(4e10 / flops) + 3;
    repeats = repeats > REPEATS_MOST ? REPEATS_MOST : repeats;
    for (int i = 0; i < repeats; i++) {
        int64_t start = clock_of(threads);
        if (fsdpc_gemm_cpu(&g, stream) != FSDPC_OK) {
            fprintf(stderr, "%s\n", fsdpc_last_error());
            exit(1);
        }
        rates[i] = flops / (double)(clock_of(threads) - start);
    }
    double after = peak_of(stream->device->isa, dtype);
    peak = (after > peak ? after : peak) * threads;
    qsort(rates, (size_t)repeats, sizeof rates[0], by_value);
    printf("%-8s  %-6s  %5zu %5zu %5zu  %8.1f  %8.1f  %8.1f  %5.2f\n", fsdpc_dtype_name(dtype),
           names[form], g.m, g.n, g.k, rates[repeats - 1], rates[repeats / 2], peak,
           peak > 0 ? rates[repeats - 1] / peak : 0);
    for (int i = 0; i < 3; i++)
        free(x[i]);
}

int main(int argc, char **argv)
{
    static const size_t shapes[][3] = {/* rows, out, in */
                                       {512, 512, 512},  {1024, 1024, 1024}, {2048, 2048, 2048},
                                       {512, 320, 320},  {512, 864, 320},    {512, 320, 864},
                                       {256, 768, 768},  {256, 2048, 768},   {256, 768, 2048},
                                       {256, 8192, 768}, {512, 256, 320},    {1, 2048, 2048}};
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    fsdpc_device device = {0};
    fsdpc_isa best = fsdpc_isa_best(); /* asks for AMX */
    if (fsdpc_isa_parse(argc > 2 ? argv[2] : "auto", &device.isa) != FSDPC_OK ||
        device.isa > best || fsdpc_mem_create(&device.mem) != FSDPC_OK ||
        fsdpc_team_create(threads, &device.team) != FSDPC_OK) {
        fprintf(stderr, "%s\n", fsdpc_last_error());
        return 1;
    }
    fsdpc_stream stream = {.device = &device};

    char line[256];
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && fgets(line, sizeof line, info))
        if (strncmp(line, "model name", 10) == 0) {
            printf("%s", line);
            break;
        }
    if (info)
        fclose(info);
    printf("path %s, %d thread(s); GFLOP/s\n", fsdpc_isa_name(device.isa), threads);
    printf("dtype     form        m     n     k      best    median      peak  share\n");
    for (int dtype = FSDPC_F32; dtype <= FSDPC_BF16; dtype++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int form = 0; form < 3; form++)
                bench(&stream, threads, (fsdpc_dtype)dtype, shapes[s][0], shapes[s][1],
                      shapes[s][2], form);
    fsdpc_team_destroy(device.team);
    fsdpc_mem_destroy(device.mem);
    return 0;
}
