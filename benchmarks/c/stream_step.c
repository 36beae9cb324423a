/* What memory gives to a pass with the reads and writes of an AdamW step: bench_optim.py's
 * baseline.
 *
 * As STREAM's triad, a += q b, but over the arrays of a step: parameter, gradient and two states
 * are read, all but the gradient are written where they were read, and the parameter buffer, if
 * any, gets the upper halves of the parameters (bf16 without rounding) by stores that go past the
 * cache. It neither divides nor takes roots, so memory limits it. An element's loads come
 * before its stores, which took a tenth off the time on a Zen 3.
 *
 * `ahead` asks for the lines 2 KiB further on, as csrc/ops/flat_stream_body.h does; whether that
 * helps differs from machine to machine, so the faster of the two is the baseline.
 *
 * bench_optim.py compiles this file alone, with -O3 -march=native -fopenmp; OMP_NUM_THREADS is the
 * number of threads. The length is a multiple of CHUNK, and arrays are aligned to 64 bytes.
 */
#include <omp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { CHUNK = 32, LINE = 16, AHEAD = 512 }; /* elements; LINE is one of the cache's in fp32 */

static const float q = 1e-3f;

typedef struct arrays {
    float *param, *exp_avg, *exp_avg_sq;
    const float *grad;
    uint16_t *copy_in; /* or NULL */
} arrays;

static inline void prefetch(const float *at)
{
    for (int line = 0; line < CHUNK; line += LINE)
        __builtin_prefetch((const void *)((uintptr_t)(at + line) + AHEAD * sizeof *at));
}

static inline void copy_in_block(uint16_t *copy_in, const float *param)
{
    uint32_t bits[CHUNK];
    uint16_t upper[CHUNK] __attribute__((aligned(64)));
    memcpy(bits, param, sizeof bits);
    for (int i = 0; i < CHUNK; i++)
        upper[i] = (uint16_t)(bits[i] >> 16);
#ifdef __AVX2__
    const __m256i *half = (const __m256i *)upper;
    _mm256_stream_si256((__m256i *)copy_in, half[0]);
    _mm256_stream_si256((__m256i *)copy_in + 1, half[1]);
#else
    memcpy(copy_in, upper, sizeof upper);
#endif
}

__attribute__((always_inline)) static inline void run(const arrays *a, size_t begin, size_t end,
                                                      bool ahead, bool copy_in)
{
    for (size_t at = begin; at < end; at += CHUNK) {
        float *p = a->param + at, *restrict m = a->exp_avg + at;
        float *v = a->exp_avg_sq + at;
        const float *g = a->grad + at;
        if (ahead)
            prefetch(p), prefetch(m), prefetch(v), prefetch(g);
#pragma omp simd
        for (int i = 0; i < CHUNK; i++) {
            const float pi = p[i], gi = q * g[i], mi = m[i], vi = v[i];
            p[i] = pi + gi;
            m[i] = mi + gi;
            v[i] = vi + gi * gi; /* never negative: the steps take its root */
        }
        if (copy_in)
            copy_in_block(a->copy_in + at, p);
    }
#ifdef __AVX2__
    _mm_sfence();
#endif
}

void stream_step(float *param, const float *grad, float *exp_avg, float *exp_avg_sq,
                 uint16_t *copy_in, size_t numel, int ahead)
{
    const arrays a = {param, exp_avg, exp_avg_sq, grad, copy_in};
#pragma omp parallel
    {
        size_t chunks = numel / CHUNK, threads = (size_t)omp_get_num_threads();
        size_t thread = (size_t)omp_get_thread_num();
        size_t begin = chunks * thread / threads * CHUNK;
        size_t end = chunks * (thread + 1) / threads * CHUNK;
        if (copy_in && ahead)
            run(&a, begin, end, true, true);
        else if (copy_in)
            run(&a, begin, end, false, true);
        else if (ahead)
            run(&a, begin, end, true, false);
        else
            run(&a, begin, end, false, false);
    }
}
