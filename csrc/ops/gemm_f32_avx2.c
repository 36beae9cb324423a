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

enum { MR = 6, NR = 16, K_STEP = 1 };

#define ROWS X(0) X(1) X(2) X(3) X(4) X(5)

typedef float tile_element;
typedef fsdpc_vf tile_vec;
#define tile_load fsdpc_vf_load
#define tile_splat fsdpc_vf_splat
#define tile_fma fsdpc_vf_fma
#include "ops/gemm_tile_body.h"

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
