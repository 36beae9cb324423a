/* A path that uses vdpbf16ps, with two k per instruction. The including file defines MR, NR and
 * ROWS. */
#include "ops/gemm_pack_pairs.h"
#include "ops/gemm_skinny.h"

enum { K_STEP = 2 };

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
