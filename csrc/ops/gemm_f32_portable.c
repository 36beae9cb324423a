/* The fp32 matrix product for any processor, in tiles of 4 x 8 sums in vectors of four.
 *
 * GCC and clang compile the vector type to SSE2, NEON or other baseline instructions. Eight
 * vectors of sums, two of B and one of A fit into the smallest baseline's sixteen registers. The
 * baseline of x86-64 has no fused multiply-add, so products are rounded before they are added.
 */
enum { MR = 4, NR = 8 };

#define ROWS X(0) X(1) X(2) X(3)

#include "ops/gemm_f32_body.h"

const fsdpc_gemm_path fsdpc_gemm_f32_portable = {
    .name = "f32 portable",
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
