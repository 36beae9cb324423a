/* The fp32 matrix product with AVX2 and FMA, in tiles of 6 x 16 sums.
 *
 * Twelve registers of sums hide the latency of FMA (two per cycle, four to five cycles each). Two
 * more hold a row of B's panel, and two remain for elements of A. This path also handles bf16 and
 * fp16, which are widened during packing.
 *
 * Block sizes suit a core with 512 KiB of L2. B is packed for up to eight blocks of k, so sums
 * stay in L1 and B is packed once for all rows; tiles prefetch the next panel of A.
 */
#include "base/cpu.h"
#if defined(__x86_64__)

enum { MR = 6, NR = 16 };

#define AHEAD_BYTES 8
#define ROWS X(0) X(1) X(2) X(3) X(4) X(5)

#include "ops/gemm_f32_body.h"

const fsdpc_gemm_path fsdpc_gemm_f32_avx2 = {
    .name = "f32 avx2",
    .mr = MR,
    .nr = NR,
    .kc = 256,
    .blocks = 8,
    .nc = 512,
    .b_bytes = 384 << 10,
    .element_bytes = sizeof(float),
    .sum_bytes = sizeof(float),
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
};
#endif
