/* The bf16 matrix product with vdpbf16ps: 14 x 32 sums, two k an instruction.
 *
 * Arithmetic: each step adds the products of two k to a sum with fused rounding of its own (the two
 * products are added in turn, nearest even), and inputs, sums and results that are subnormal count
 * as zero.  So results differ in last bits from the fp32 kernels' on widened inputs, and below
 * 2^-126 they vanish.
 *
 * Zen 4 and 5 run this at twice the rate of fp32 FMA.  Intel's cores with AMX run vdpbf16ps at a
 * quarter of FMA's rate, half its flops: where tiles are not usable there, "auto" is the path named
 * avx512 (bf16 widened to fp32 by packing; see base/cpu.c).
 */
#include "base/cpu.h"
#if defined(__x86_64__)
#include "ops/gemm_pack_pairs.h"
#include "ops/gemm_skinny.h"

enum { MR = 14, NR = 32, K_STEP = 2 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

typedef int32_t tile_element; /* a pair */
typedef __m512bh tile_vec;

FSDPC_INLINE tile_vec tile_load(const tile_element *p)
{
    return (__m512bh)_mm512_load_si512(p);
}

FSDPC_INLINE tile_vec tile_splat(tile_element x)
{
    return (__m512bh)_mm512_set1_epi32(x);
}

FSDPC_INLINE fsdpc_vf tile_fma(tile_vec x, tile_vec b, fsdpc_vf sum)
{
    return (fsdpc_vf)_mm512_dpbf16_ps((__m512)sum, x, b);
}

#include "ops/gemm_tile_body.h"

static void pack_lines(void *panel, size_t width, const fsdpc_gemm_operand *from, size_t first,
                       size_t count, size_t k_first, size_t k_count)
{
    /* ascending k: see Note [whole vectors] */
    for (size_t k = 0; k < k_count; k += BLOCK_K)
        for (size_t j = 0; j < width; j += BLOCK_LINES) {
            block b = block_of(from, width, first, count, k_first, k_count, j, k);
            pairs_block((uint32_t *)panel + k / 2 * width + j, width, &b);
        }
}

#define finish_sums finish_pairs
#include "ops/gemm_path_body.h"

const fsdpc_gemm_path fsdpc_gemm_bf16_avx512bf16 = {
    .name = "bf16 avx512bf16",
    .mr = MR,
    .nr = NR,
    .kc = 768,
    .blocks = 1,
    .nc = 384,
    .b_bytes = 576 << 10,
    .element_bytes = sizeof(uint16_t),
    .sum_bytes = sizeof(float),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
};
#endif
