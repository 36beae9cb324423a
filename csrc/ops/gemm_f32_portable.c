/* The fp32 matrix product for any processor: 4 x 8 sums in vectors of four.
 *
 * GCC and clang turn the vector type into SSE2, NEON or whatever the baseline has; eight sums, two
 * vectors of B and one of A fit the sixteen registers of the smallest of them.  The baseline of
 * x86-64 has no fused multiply-add, so products are rounded before they are added.
 */
#include "ops/gemm_pack.h"
#include "ops/gemm_skinny.h"

enum { MR = 4, NR = 8 };

typedef float f32x4 __attribute__((vector_size(16)));

static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_beside *beside)
{
    (void)beside;
    f32x4 sum[MR][2] = {{{0}}};
    if (resume)
        memcpy(sum, sums, sizeof sum);
    const float *pa = a, *pb = b;
    for (size_t k = 0; k < k_count; k++, pa += MR, pb += NR) {
        f32x4 b0, b1;
        memcpy(&b0, pb, sizeof b0);
        memcpy(&b1, pb + 4, sizeof b1);
        for (int i = 0; i < MR; i++) {
            f32x4 x = {pa[i], pa[i], pa[i], pa[i]};
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    memcpy(sums, sum, sizeof sum);
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
