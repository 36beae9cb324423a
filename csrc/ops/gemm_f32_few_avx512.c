/* The fp32 matrix product with AVX-512 for an A' with few rows, in tiles of 8 x 32 sums.
 *
 * 16 rows use 57 % of two tiles of 14, and convolutions often have 16 filters. The sums have the
 * same bits as in gemm_f32_avx512.c, so the choice between the two does not change results.
 */
#include "base/cpu.h"
#if defined(__x86_64__)

enum { MR = 8, NR = 32 };

#define AHEAD_BYTES 8
#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

#include "ops/gemm_f32_body.h"

const fsdpc_gemm_path fsdpc_gemm_f32_few_avx512 = {
    .name = "f32 avx512, few rows",
    .mr = MR,
    .nr = NR,
    .kc = 768,
    .blocks = 4,
    .nc = 256,
    .b_bytes = 1 << 20,
    .element_bytes = sizeof(float),
    .sum_bytes = sizeof(float),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
};
#endif
