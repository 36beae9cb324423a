/* The bf16 matrix product with vdpbf16ps for an A' with few rows, in tiles of 8 x 32 sums. The sums
 * have the same bits as in gemm_avx512bf16.c. */
#include "base/cpu.h"
#if defined(__x86_64__)

enum { MR = 8, NR = 32 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

#include "ops/gemm_avx512bf16_body.h"

const fsdpc_gemm_path fsdpc_gemm_bf16_few_avx512bf16 = {
    .name = "bf16 avx512bf16, few rows",
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
