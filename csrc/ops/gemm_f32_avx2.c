/* The fp32 matrix product with AVX2 and FMA: 6 x 16 sums.
 *
 * Twelve registers of sums hide the latency of FMA (two a cycle, four to five cycles each), two
 * hold a row of B's panel, two are left for elements of A.  Serves bf16 and fp16 too, widened by
 * packing.
 */
#include "base/cpu.h"
#if defined(__x86_64__)
#include "ops/gemm_pack.h"
#include "ops/gemm_skinny.h"

enum { MR = 6, NR = 16 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5)

static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_beside *beside)
{
    (void)beside;
    float *c = sums;
    const float *pa = a, *pb = b;
#define X(i) __m256 low##i = _mm256_setzero_ps(), top##i = _mm256_setzero_ps();
    ROWS
#undef X
        if (resume)
    {
#define X(i)                                                                                       \
    low##i = _mm256_load_ps(c + (i)*NR);                                                           \
    top##i = _mm256_load_ps(c + (i)*NR + 8);
        ROWS
#undef X
    }
    for (size_t k = 0; k < k_count; k++, pa += MR, pb += NR) {
        __m256 b0 = _mm256_load_ps(pb), b1 = _mm256_load_ps(pb + 8);
#define X(i)                                                                                       \
    {                                                                                              \
        __m256 x = _mm256_broadcast_ss(pa + (i));                                                  \
        low##i = _mm256_fmadd_ps(x, b0, low##i);                                                   \
        top##i = _mm256_fmadd_ps(x, b1, top##i);                                                   \
    }
        ROWS
#undef X
    }
#define X(i)                                                                                       \
    _mm256_store_ps(c + (i)*NR, low##i);                                                           \
    _mm256_store_ps(c + (i)*NR + 8, top##i);
    ROWS
#undef X
}

static void pack_a(void *panel, const fsdpc_gemm_operand *a, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack_f32(panel, MR, a, first, count, k_first, k_count);
}

static void pack_b(void *panel, const fsdpc_gemm_operand *b, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack_f32(panel, NR, b, first, count, k_first, k_count);
}

static void finish(const fsdpc_gemm_target *target, const void *sums)
{
    finish_f32(target, sums, NR);
}

static void skinny(const fsdpc_gemm_skinny *product, size_t first, size_t count)
{
    skinny_product(product, first, count);
}

const fsdpc_gemm_path fsdpc_gemm_f32_avx2 = {
    .name = "f32 avx2",
    .mr = MR,
    .nr = NR,
    .kc = 256,
    .blocks = 1,
    .nc = 512,
    .b_bytes = 512 << 10,
    .element_bytes = sizeof(float),
    .sum_bytes = sizeof(float),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
};
#endif
