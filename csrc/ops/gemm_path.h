/* The part of the matrix product that is specific to an instruction set; a private header of
 * gemm*.c.
 *
 * A path packs A' and B' into panels, multiplies two panels into one tile of fp32 (fp64 for F64)
 * sums, and finishes a tile into C. gemm.c owns everything else: blocking, threads, workspace.
 *
 * Panels. A panel holds `width` rows of A' (width = mr) or columns of B' (nr) for one block of k,
 * padded with zeros. Each panel has fsdpc_gemm_panel_bytes() of memory: k is rounded up to 32, and
 * one vector is added, because packers store whole vectors and let the next one overwrite the
 * excess. A panel's layout is private to the path's pack and tile functions.
 *
 * Sums. A tile is a dense array of mr x nr sums. `resume` means that it holds the sum over the
 * previous blocks of k, which is loaded, continued and stored. For any blocking, the sum over k is
 * thus accumulated in ascending order, and C is rounded only once.
 */
#ifndef FSDPC_OPS_GEMM_PATH_H
#define FSDPC_OPS_GEMM_PATH_H

#include <stdbool.h>
#include <stddef.h>

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/size.h"

/* A' or B' as stored. Its `lines` are rows of A' or columns of B'. */
typedef struct fsdpc_gemm_operand {
    const void *data;
    size_t ld, lines;
    bool along_k; /* memory is contiguous along k (A plain, B transposed), not along lines */
    fsdpc_dtype dtype;
    bool streams; /* panels are packed one by one, each through all of k */
} fsdpc_gemm_operand;

/* The destination of a tile. */
typedef struct fsdpc_gemm_target {
    void *c; /* the tile's first element */
    size_t ldc;
    size_t rows, cols; /* rows and columns of the tile that exist */
    fsdpc_dtype dtype;
    const void *bias; /* of bias_dtype, at the tile's first column (or row); NULL: none */
    fsdpc_dtype bias_dtype;
    bool bias_by_row;
    bool accumulate;
} fsdpc_gemm_target;

/* Work done along with a tile while the multipliers leave other units of the processor idle:
 * packing A and prefetching. All fields except `a` are hints. The tile advances `row` and
 * `next`. */
typedef struct fsdpc_gemm_prefetch {
    /* A as stored along k, with rows `a_bytes` apart, for the tile to pack. NULL: already
     * packed. */
    const char *a;
    size_t a_bytes;

    /* Memory that will be read soon: rows of `row_bytes`, `row_step` apart; `next` is in the row at
     * `row`. `rate` lines of 64 bytes per 32 k; 0: no prefetch. */
    const char *row, *next;
    size_t row_bytes, row_step, rate;

    /* The tile of C that receives the sums, with rows `c_step` bytes apart. */
    const char *c;
    size_t c_rows, c_step;
} fsdpc_gemm_prefetch;

enum { FSDPC_GEMM_SKINNY = 4 }; /* rows (or columns) up to which a product is skinny */

/* A product with few rows, or the transpose of a product with few columns. */
typedef struct fsdpc_gemm_skinny {
    const float *x; /* (rows, k), dense; if there are several rows, padded to FSDPC_GEMM_SKINNY */
    size_t rows, k;
    fsdpc_gemm_operand w; /* its lines are the columns of the product */
    void *c;
    size_t c_row, c_col; /* elements between rows and columns of the product */
    fsdpc_dtype c_dtype;
    const void *bias; /* of w.dtype; NULL: none */
    size_t bias_row, bias_col;
    bool accumulate;
} fsdpc_gemm_skinny;

typedef struct fsdpc_gemm_path {
    const char *name;
    size_t mr, nr;
    size_t kc;      /* max k in one block: a panel of A */
    size_t blocks;  /* number of blocks of k for which B is packed at a time */
    size_t nc;      /* max columns of B packed at a time ... */
    size_t b_bytes; /* ... and max bytes: they should stay in L2 */
    size_t element_bytes, sum_bytes;
    bool packs_a; /* tile can pack whole panels of A if A is contiguous along k */

    /* Packs lines [first, first + count) over k in [k_first, k_first + k_count); count <= width. */
    void (*pack_a)(void *panel, const fsdpc_gemm_operand *a, size_t first, size_t count,
                   size_t k_first, size_t k_count);
    void (*pack_b)(void *panel, const fsdpc_gemm_operand *b, size_t first, size_t count,
                   size_t k_first, size_t k_count);
    void (*tile)(void *sums, void *a, const void *b, size_t k_count, bool resume,
                 fsdpc_gemm_prefetch *prefetch);
    void (*finish)(const fsdpc_gemm_target *target, const void *sums);

    /* Computes columns [first, first + count) of a skinny product; NULL if the path does not
     * support this. */
    void (*skinny)(const fsdpc_gemm_skinny *product, size_t first, size_t count);

    /* Called before and after one thread's calls of tile; NULL if there is nothing to do. */
    void (*enter)(void);
    void (*leave)(void);
} fsdpc_gemm_path;

static inline size_t fsdpc_gemm_panel_bytes(const fsdpc_gemm_path *path, size_t width, size_t kc)
{
    return fsdpc_round_up((fsdpc_round_up(kc, 32) * width + 32) * path->element_bytes, 64);
}

/* The paths, one per file; the x86 paths exist only on x86. */
extern const fsdpc_gemm_path fsdpc_gemm_f32_portable, fsdpc_gemm_f64_portable;
#if defined(__x86_64__)
extern const fsdpc_gemm_path fsdpc_gemm_f32_avx2, fsdpc_gemm_f32_avx512;
extern const fsdpc_gemm_path fsdpc_gemm_bf16_avx512bf16, fsdpc_gemm_bf16_amx;
/* Paths that compute the same sums in tiles with fewer rows, for values of m that would leave much
 * of the other paths' tiles unused. */
extern const fsdpc_gemm_path fsdpc_gemm_f32_few_avx512, fsdpc_gemm_bf16_few_avx512bf16;
#endif

#endif
