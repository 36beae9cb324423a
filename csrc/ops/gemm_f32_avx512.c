/* The fp32 matrix product with AVX-512, in tiles of 14 x 32 sums.
 *
 * 28 registers hold sums, two hold a row of B's panel, and one holds an element of A. 14 broadcasts
 * and two loads feed 28 FMAs, so neither load port limits. Reading both panels takes 13 bytes per
 * cycle, so L2 is not a bottleneck either. Blocks of k are therefore so long that a panel of A (43
 * KB) nearly fills L1: fewer blocks mean fewer passes over the sums. B is packed for up to four
 * blocks, which occupy half of L2. Only one row of tiles (14 KB of sums), instead of 512 rows, then
 * waits between blocks, which gains 3 % at n = 1024 and 2048. Using a quarter more of L2 made a
 * product with a small A (256 x 768, k 2048) 4 % slower.
 *
 * The limits were sampled on a busy machine. If memory is contiguous along lines instead of k (dy
 * W, dy^T x), packing B takes 8-11 % of the product at n = 1024 and 2048. Packing A takes 7 % of
 * dy^T x. Such operands are read from L3 at 10 GB/s, whereas contiguous memory is read at 30 GB/s.
 * Three changes made no measurable difference: blocks of 384 k by 512 columns; prefetching C; and,
 * while a panel is packed, prefetching the next one's lines to L2 (as weave_two does).
 *
 * This path also handles bf16 and fp16, which are widened during packing.
 */
#include "base/cpu.h"
#if defined(__x86_64__)

enum { MR = 14, NR = 32 };

#define AHEAD_BYTES 8
#define ROWS X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

#include "ops/gemm_f32_body.h"

const fsdpc_gemm_path fsdpc_gemm_f32_avx512 = {
    .name = "f32 avx512",
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
