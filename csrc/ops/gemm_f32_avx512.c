/* The fp32 matrix product with AVX-512: 14 x 32 sums.
 *
 * 28 registers of sums, two for a row of B's panel, one for an element of A: 14 broadcasts and two
 * loads feed 28 FMAs, so neither load port limits.  At 13 bytes a cycle for both panels L2 does not
 * limit either, so blocks of k are long enough that a panel of A (43 KB) nearly fills L1: fewer
 * blocks mean fewer passes over the sums.
 *
 * What limits, sampled on a busy machine: where rows of k are packed (dy W, dy^T x), packing B
 * takes 8-11 % of the product at n = 1024 and 2048 and packing A 7 % of dy^T x: such rows come from
 * L3 at 10 GB/s, neighbours in memory at 30.  Blocks of 384 k by 512 columns and prefetching C
 * changed nothing that stood out of the noise.
 *
 * Serves bf16 and fp16 too, widened by packing.
 */
#include "base/cpu.h"
#if defined(__x86_64__)
#include "ops/gemm_pack.h"
#include "ops/gemm_skinny.h"

enum { MR = 14, NR = 32, AHEAD_BYTES = 8 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_beside *beside)
{
    float *c = sums;
    const float *pa = a, *pb = b;
    const char *ahead = beside->next;
#define X(i) __m512 low##i = _mm512_setzero_ps(), top##i = _mm512_setzero_ps();
    ROWS
#undef X
        if (resume)
    {
#define X(i)                                                                                       \
    low##i = _mm512_load_ps(c + (i)*NR);                                                           \
    top##i = _mm512_load_ps(c + (i)*NR + 16);
        ROWS
#undef X
    }
    for (size_t k = 0; k < k_count; k++, pa += MR, pb += NR) {
        if (k % (64 / AHEAD_BYTES) == 0)
            _mm_prefetch(ahead + k * AHEAD_BYTES, _MM_HINT_T1);
        __m512 b0 = _mm512_load_ps(pb), b1 = _mm512_load_ps(pb + 16);
#define X(i)                                                                                       \
    {                                                                                              \
        __m512 x = _mm512_set1_ps(pa[i]);                                                          \
        low##i = _mm512_fmadd_ps(x, b0, low##i);                                                   \
        top##i = _mm512_fmadd_ps(x, b1, top##i);                                                   \
    }
        ROWS
#undef X
    }
    beside->next = ahead + k_count * AHEAD_BYTES;
#define X(i)                                                                                       \
    _mm512_store_ps(c + (i)*NR, low##i);                                                           \
    _mm512_store_ps(c + (i)*NR + 16, top##i);
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

const fsdpc_gemm_path fsdpc_gemm_f32_avx512 = {
    .name = "f32 avx512",
    .mr = MR,
    .nr = NR,
    .kc = 768,
    .blocks = 1,
    .nc = 256,
    .b_bytes = 768 << 10,
    .element_bytes = sizeof(float),
    .sum_bytes = sizeof(float),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
};
#endif
