/* The fp32 matrix product for any processor: 4 x 8 sums in vectors of four.
 *
 * GCC and clang turn the vector type into SSE2, NEON or whatever the baseline has; eight sums, two
 * vectors of B and one of A fit the sixteen registers of the smallest of them.  The baseline of
 * x86-64 has no fused multiply-add, so products are rounded before they are added.
 */
#include "ops/gemm_pack.h"
#include "ops/gemm_skinny.h"

enum { MR = 4, NR = 8, K_STEP = 1 };

#define ROWS X(0) X(1) X(2) X(3)

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
