/* Panel-by-panel packing and finishing for a path with MR x NR tiles.
 *
 * The including file defines MR, NR and ROWS (see ops/gemm_tile_body.h), `pack_lines` and
 * `finish_sums`. pack_lines packs lines of an operand into a panel of a given width; finish_sums
 * writes a tile's sums, also of a given width, to C.
 */

static void pack_a(void *panel, const fsdpc_gemm_operand *a, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack_lines(panel, MR, a, first, count, k_first, k_count);
}

static void pack_b(void *panel, const fsdpc_gemm_operand *b, size_t first, size_t count,
                   size_t k_first, size_t k_count)
{
    pack_lines(panel, NR, b, first, count, k_first, k_count);
}

static void finish(const fsdpc_gemm_target *target, const void *sums)
{
    finish_sums(target, sums, NR);
}

static void skinny(const fsdpc_gemm_skinny *product, size_t first, size_t count)
{
    skinny_product(product, first, count);
}
