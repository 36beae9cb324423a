/* The bf16 matrix product with AMX tiles: 2 x 2 tiles of 16 x 16 sums.
 *
 * TDPBF16PS multiplies a tile of A (16 rows of 32 k) by a tile of B (16 pairs of k by 16 columns)
 * in 16 cycles. Four such products need two loads of each operand, 4 KB in all, so the cache
 * bandwidth of 64 bytes per cycle is the bottleneck. A panel of A (32 x 512, 32 KB) stays in L1.
 * Panels of B are loaded from L2 with the hint not to displace A (TILELOADDT1), which is a third
 * faster; a longer panel of A would lose that gain. If A is contiguous along k, packing only
 * improves its placement in L1 (rows a power of two apart share sets). The first tile of a row
 * stores the tiles of A that it loads. Copying the next panel line by line between the tiles was
 * slower, because it displaces the panel in use; prefetches target L2 for the same reason.
 *
 * The limits were measured at n = 1024 on the Xeon described in benchmarks/README.md. Without
 * loads, TDPBF16PS reaches 3170 GFLOP/s; with its loads, 97 % of that on zeros and 80 % on random
 * numbers (because of heat: the instructions are the same). Storing the sums after every 512 k
 * reduces that rate to 88 % of its value. Packing B takes 8-13 % of the product's time, and
 * finishing C takes 2-5 %.
 *
 * As in vdpbf16ps, subnormals count as zero and rounding is to nearest even. The processor defines
 * a fixed summation order for the 32 k of a tile. Padding consists of zeros, which do not change
 * the sums.
 *
 * Tiles are per-thread state: enter() configures eight full tiles and leave() releases them, so
 * that the kernel saves no tile state at context switches outside products. base/cpu.c requests
 * permission to use tiles once per process, before this path is ever chosen.
 */
#include "base/cpu.h"
#if defined(__x86_64__)
#include "ops/gemm_pack_pairs.h"
#include "ops/gemm_skinny.h"

enum { MR = 32, NR = 32, TILE_BYTES = 1024, TILE_WORDS = TILE_BYTES / 4 };

static void enter(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _Static_assert(sizeof config == 64, "as LDTILECFG reads it");
    /* gcc 12 assumes that the instruction reads only eight bytes, and drops the other stores */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

static void leave(void)
{
    _tile_release();
}

/* Loads two tiles of A from the panel or from memory; in the latter case, also stores them to the
 * panel. */
FSDPC_INLINE void load_a(char *panel, const char **from, size_t bytes, bool packs)
{
    if (packs) {
        _tile_stream_loadd(4, *from, bytes);
        _tile_stream_loadd(5, *from + 16 * bytes, bytes);
        _tile_stored(4, panel, 64);
        _tile_stored(5, panel + TILE_BYTES, 64);
        *from += 64;
    } else {
        _tile_loadd(4, panel, 64);
        _tile_loadd(5, panel + TILE_BYTES, 64);
    }
}

FSDPC_INLINE void prefetch_next(fsdpc_gemm_prefetch *prefetch, const char **next)
{
    for (size_t i = 0; i < prefetch->rate; i++)
        _mm_prefetch(*next + 64 * i, _MM_HINT_T1);
    *next += 64 * prefetch->rate;
    if (*next >= prefetch->row + prefetch->row_bytes)
        *next = prefetch->row += prefetch->row_step;
}

FSDPC_INLINE void multiply(char *pa, const char *pb, size_t k_count, fsdpc_gemm_prefetch *prefetch,
                           bool packs)
{
    const char *from = prefetch->a, *next = prefetch->next, *c = prefetch->c;
    size_t c_rows = prefetch->c_rows;
    for (size_t k = 0; k < k_count; k += BLOCK_K) {
        _tile_stream_loadd(6, pb, 64);
        load_a(pa, &from, prefetch->a_bytes, packs);
        _tile_stream_loadd(7, pb + TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        prefetch_next(prefetch, &next);
        for (size_t i = 0; i < 2 && c_rows; i++, c_rows--, c += prefetch->c_step)
            _mm_prefetch(c, _MM_HINT_T1);
        pa += 2 * TILE_BYTES;
        pb += 2 * TILE_BYTES;
    }
    prefetch->next = next;
}

static void tile(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_prefetch *prefetch)
{
    char *c = sums;
    const size_t row = NR * sizeof(float);
    if (resume) {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 64, row);
        _tile_loadd(2, c + 16 * row, row);
        _tile_loadd(3, c + 16 * row + 64, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    if (prefetch->a)
        multiply(a, b, k_count, prefetch, true);
    else
        multiply(a, b, k_count, prefetch, false);
    _tile_stored(0, c, row);
    _tile_stored(1, c + 64, row);
    _tile_stored(2, c + 16 * row, row);
    _tile_stored(3, c + 16 * row + 64, row);
}

/* [k / 32][2 tiles][16 rows][32 k] */
static void pack_a(void *panel, const fsdpc_gemm_operand *a, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    _Alignas(64) uint32_t woven[2][BLOCK_LINES * BLOCK_PAIRS];
    uint32_t *to = panel;
    for (size_t k = 0; k < k_count; k += BLOCK_K, to += 2 * TILE_WORDS) {
        block low = block_of(a, MR, first, count, k_first, k_count, 0, k);
        block top = block_of(a, MR, first, count, k_first, k_count, BLOCK_LINES, k);
        if (a->along_k) {
            move_rows(to, &low);
            move_rows(to + TILE_WORDS, &top);
        } else {
            weave_two(woven[0], woven[1], &low, count);
            transpose_square(to, BLOCK_PAIRS, woven[0], BLOCK_LINES * sizeof(uint32_t));
            transpose_square(to + TILE_WORDS, BLOCK_PAIRS, woven[1],
                             BLOCK_LINES * sizeof(uint32_t));
        }
    }
}

/* [k / 32][2 tiles][16 pairs][16 columns] */
static void pack_b(void *panel, const fsdpc_gemm_operand *b, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    uint32_t *to = panel;
    for (size_t k = 0; k < k_count; k += BLOCK_K, to += 2 * TILE_WORDS) {
        block low = block_of(b, NR, first, count, k_first, k_count, 0, k);
        block top = block_of(b, NR, first, count, k_first, k_count, BLOCK_LINES, k);
        if (b->along_k) {
            pairs_block(to, BLOCK_LINES, &low);
            pairs_block(to + TILE_WORDS, BLOCK_LINES, &top);
        } else {
            weave_two(to, to + TILE_WORDS, &low, count);
        }
    }
}

static void finish(const fsdpc_gemm_target *target, const void *sums)
{
    finish_pairs(target, sums, NR);
}

static void skinny(const fsdpc_gemm_skinny *product, size_t first, size_t count)
{
    skinny_product(product, first, count);
}

const fsdpc_gemm_path fsdpc_gemm_bf16_amx = {
    .name = "bf16 amx",
    .mr = MR,
    .nr = NR,
    .kc = 512,
    .blocks = 4,
    .nc = 512,
    .b_bytes = 1 << 20,
    .element_bytes = sizeof(uint16_t),
    .sum_bytes = sizeof(float),
    .packs_a = true,
    .pack_a = pack_a,
    .pack_b = pack_b,
    .tile = tile,
    .finish = finish,
    .skinny = skinny,
    .enter = enter,
    .leave = leave,
};
#endif
