/* The bf16 matrix product with vdpbf16ps: 14 x 32 sums, two k per instruction.
 *
 * Each step adds two products to a sum, one after the other, each with its own fused rounding to
 * nearest even. Subnormal inputs, sums and results are treated as zero. Results therefore differ in
 * the last bits from those of the fp32 kernels on widened inputs, and are zero below 2^-126.
 *
 * Zen 4 and 5 run this at twice the rate of fp32 FMA. Intel cores with AMX run vdpbf16ps at a
 * quarter of the rate of FMA, and thus at half its flops. If tiles are unavailable on such a core,
 * "auto" selects the avx512 path (packing widens bf16 to fp32; see base/cpu.c).
 */
#include "base/cpu.h"
#if defined(__x86_64__)

enum { MR = 14, NR = 32 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

#include "ops/gemm_avx512bf16_body.h"

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
