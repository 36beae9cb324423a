/* The CPU's matrix product: checks, kernel choice, blocking and threads.
 *
 * The blocking is that of GotoBLAS (Goto & van de Geijn 2008) with the roles swapped so that C is
 * written along its rows. C is split into blocks of columns. For each block, B' is packed for one
 * pass over k (a few blocks of k), so that it stays in L2. Each panel of A' is multiplied by the
 * panels of B in turn, one block of k after another. The path (gemm_path.h) multiplies two panels.
 *
 * A' is packed first, a slab of at most SLAB_BYTES at a time. If the path supports it and A is
 * contiguous along k, A' is not packed at all. The first tile of a row then reads A from memory
 * and packs its panel for the others. All tiles of the row prefetch the next panel's memory.
 * Writing A to L3 and reading it back would take a quarter of a bf16 product's time at n = 1024.
 *
 * With one block of k, a tile's sums are written directly to C. With several blocks in one pass, a
 * row of tiles keeps its sums in fp32 between blocks. With several passes (k above the path's
 * blocks x kc, or above 128 for at most FEW_ROWS rows), at most ROWS rows keep their sums in a
 * private area. Partial sums are thus never rounded to bf16, and C is read and written once. Each
 * sum is accumulated in ascending k, so its bits do not depend on how m, n and k are split.
 *
 * Threads use a shared counter to claim panels of A to pack, then blocks of C to compute. Each
 * thread has its own memory for its block of B and for the sums. C is split over columns first,
 * because splitting rows makes threads pack the same columns twice. In a batch, each small product
 * runs on one thread.
 *
 * If B' consists of image patches, each thread computes WINDOWS_BYTES of them before it packs them.
 *
 * Products with at most four rows or columns use gemm_skinny.h. A call's workspace is one block of
 * counted memory (category "other"): at most SLAB_BYTES for A (or one panel, if k is large) and
 * about 2 MB per thread.
 */
#include "ops/gemm.h"

#include <stdatomic.h>

#include "base/size.h"
#include "ops/gemm_path.h"

enum {
    SLAB_BYTES = 16 << 20,
    ROWS = 512,
    FEW_ROWS = 16, /* rows of A' up to which B is packed panel by panel, streaming from memory */
    FEW_KC = 128,  /* max k packed at a time in that case: a panel of B stays in L1 */
    HUGE_FROM_BYTES = 256 << 10,
    HUGE_BYTES = 4 << 20,
    INLINE_WORK = 1 << 18, /* multiplications below which threads cost more than they gain */
    BATCH_BYTES = 1 << 20, /* max workspace for concurrent products of a batch */
    SKINNY_INLINE_WORK = 1 << 16,
    WINDOWS_BYTES = 128 << 10 /* size of a block of patches, computed before it is packed */
};

typedef struct product {
    size_t m, n, k;
    fsdpc_gemm_operand a, b;
    const fsdpc_patches *patches; /* B' is its patches, b.data an image; or NULL */
    fsdpc_gemm_target c;          /* the whole matrix; rows and cols unused */
} product;

typedef struct plan {
    const fsdpc_gemm_path *path;
    int threads;
    size_t kc, blocks, passes; /* k of one block; blocks of a pass over k */
    size_t a_panels, b_panels; /* in the whole product */
    size_t a_panel_bytes, b_panel_bytes;
    bool slab;                           /* A is packed before; otherwise panel by panel, by tile */
    size_t slab_panels;                  /* panels of A packed at a time */
    size_t row_panels, col_panels;       /* of one block of C */
    size_t tile_bytes;                   /* sums of one tile */
    size_t slab_bytes;                   /* packed A */
    size_t b_bytes, sums_bytes, a_bytes; /* per thread; a: one panel, without a slab */
    size_t patch_panels, patches_bytes;  /* computed at a time, per thread; 0 if B is a matrix */
} plan;

/* -- choice ------------------------------------------------------------------------------------ */

#if defined(__x86_64__)
/* Returns `few` if it saves at least an eighth of the computed rows; otherwise returns `path`. */
static const fsdpc_gemm_path *path_for_rows(const fsdpc_gemm_path *path, const fsdpc_gemm_path *few,
                                            size_t m)
{
    return 8 * fsdpc_round_up(m, few->mr) <= 7 * fsdpc_round_up(m, path->mr) ? few : path;
}
#endif

static const fsdpc_gemm_path *path_of(fsdpc_isa isa, fsdpc_dtype dtype, size_t m)
{
    if (dtype == FSDPC_F64)
        return &fsdpc_gemm_f64_portable;
#if defined(__x86_64__)
    if (dtype == FSDPC_BF16 && isa >= FSDPC_ISA_AMX)
        return &fsdpc_gemm_bf16_amx;
    if (dtype == FSDPC_BF16 && isa >= FSDPC_ISA_AVX512BF16)
        return path_for_rows(&fsdpc_gemm_bf16_avx512bf16, &fsdpc_gemm_bf16_few_avx512bf16, m);
    if (isa >= FSDPC_ISA_AVX512)
        return path_for_rows(&fsdpc_gemm_f32_avx512, &fsdpc_gemm_f32_few_avx512, m);
    if (isa >= FSDPC_ISA_AVX2)
        return &fsdpc_gemm_f32_avx2;
#endif
    (void)isa, (void)m;
    return &fsdpc_gemm_f32_portable;
}

/* Returns a block size of at most `most` that gives at least `least` blocks if `count` allows. */
static size_t even_block(size_t count, size_t most, size_t least)
{
    size_t blocks = fsdpc_max_size(fsdpc_ceil_div(count, fsdpc_max_size(most, 1)), least);
    return fsdpc_max_size(fsdpc_ceil_div(count, fsdpc_max_size(blocks, 1)), 1);
}

static plan plan_make(const fsdpc_gemm_path *path, const fsdpc_gemm_args *args, int threads)
{
    size_t m = args->m, n = args->n, k = args->k;
    plan p = {.path = path, .threads = threads, .slab = !path->packs_a || args->trans_a};
    if ((double)m * (double)n * (double)k < INLINE_WORK)
        p.threads = 1;
    size_t team = (size_t)p.threads;
    bool few = m <= FEW_ROWS && !args->patches;

    p.kc = fsdpc_round_up(even_block(k, few ? FEW_KC : path->kc, 1), 32);
    size_t blocks = fsdpc_max_size(fsdpc_ceil_div(k, p.kc), 1);
    p.blocks = even_block(blocks, few ? 1 : path->blocks, 1);
    p.passes = fsdpc_ceil_div(blocks, p.blocks);
    p.a_panel_bytes = fsdpc_gemm_panel_bytes(path, path->mr, p.kc);
    p.b_panel_bytes = fsdpc_gemm_panel_bytes(path, path->nr, p.kc);
    p.a_panels = fsdpc_ceil_div(m, path->mr);
    p.b_panels = fsdpc_ceil_div(n, path->nr);
    p.slab_panels =
        p.slab ? even_block(p.a_panels, SLAB_BYTES / (blocks * p.a_panel_bytes), 1) : p.a_panels;

    /* a multiple of the team size, so that no thread is idle at the end; but with blocks of one
     * panel, A is read once per nr columns */
    size_t most_cols = path->b_bytes / (p.blocks * p.kc * path->element_bytes);
    most_cols = fsdpc_max_size(fsdpc_min_size(most_cols, path->nc) / path->nr, 1);
    size_t cols = fsdpc_ceil_div(p.b_panels, most_cols);
    cols = few ? p.b_panels
               : fsdpc_min_size(fsdpc_round_up(cols, team), fsdpc_ceil_div(p.b_panels, 2));
    p.col_panels = even_block(p.b_panels, p.b_panels, cols);
    cols = fsdpc_ceil_div(p.b_panels, p.col_panels);
    size_t most_rows = p.passes > 1 ? ROWS / path->mr : p.slab_panels;
    p.row_panels = even_block(p.slab_panels, most_rows, fsdpc_ceil_div(team, cols));

    p.tile_bytes = path->mr * path->nr * path->sum_bytes;
    p.slab_bytes = p.slab ? p.slab_panels * blocks * p.a_panel_bytes : 0;
    p.b_bytes = p.blocks * p.col_panels * p.b_panel_bytes;
    size_t tiles = p.passes > 1 ? p.row_panels * p.col_panels : p.blocks > 1 ? p.col_panels : 2;
    p.sums_bytes = tiles * p.tile_bytes;
    p.a_bytes = p.slab ? 0 : p.a_panel_bytes;
    if (args->patches) {
        size_t panel_bytes = p.kc * path->nr * fsdpc_dtype_bytes(args->dtype);
        p.patch_panels = fsdpc_max_size(WINDOWS_BYTES / panel_bytes, 1);
        p.patch_panels = fsdpc_min_size(p.patch_panels, p.col_panels);
        p.patches_bytes = fsdpc_round_up(p.patch_panels * panel_bytes, 64);
    }
    return p;
}

static size_t thread_bytes(const plan *p)
{
    return p->b_bytes + p->sums_bytes + p->a_bytes + p->patches_bytes;
}

static size_t plan_bytes(const plan *p)
{
    return p->slab_bytes + (size_t)p->threads * thread_bytes(p);
}

/* -- one product ------------------------------------------------------------------------------- */

/* A slab of a product in progress. `next` is the next unit of work. Accesses to it are relaxed,
 * because the start and end of fsdpc_team_run order accesses to the data. */
typedef struct job {
    const plan *plan;
    const product *product;
    char *workspace;
    size_t first_panel, panels; /* the slab, in panels of A */
    atomic_size_t next;
} job;

static size_t take(job *j)
{
    return atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
}

static char *a_panel(const job *j, size_t block, size_t panel)
{
    return j->workspace + (block * j->panels + panel) * j->plan->a_panel_bytes;
}

static size_t k_count_of(const job *j, size_t block)
{
    return fsdpc_min_size(j->product->k - block * j->plan->kc, j->plan->kc);
}

static size_t blocks_of(const job *j)
{
    return fsdpc_max_size(fsdpc_ceil_div(j->product->k, j->plan->kc), 1);
}

static void pack_a(const job *j, char *to, size_t block, size_t panel)
{
    const plan *p = j->plan;
    size_t row = (j->first_panel + panel) * p->path->mr;
    p->path->pack_a(to, &j->product->a, row, fsdpc_min_size(j->product->m - row, p->path->mr),
                    block * p->kc, k_count_of(j, block));
}

static void pack_slab_part(void *arg, size_t part)
{
    (void)part;
    job *j = arg;
    for (size_t i; (i = take(j)) < j->panels * blocks_of(j);)
        pack_a(j, a_panel(j, i / j->panels, i % j->panels), i / j->panels, i % j->panels);
}

/* A thread that works on one block of C. */
typedef struct worker {
    const job *job;
    char *b, *sums, *a, *patches;                          /* its own memory; a: without a slab */
    size_t first_panel, last_panel, first_col, col_panels; /* the block */
    fsdpc_gemm_target pending;                             /* a tile to finish */
    const char *pending_sums;                              /* NULL: none */
} worker;

static void finish_pending(worker *w)
{
    if (w->pending_sums)
        w->job->plan->path->finish(&w->pending, w->pending_sums);
    w->pending_sums = NULL;
}

static fsdpc_gemm_target target_of(const worker *w, size_t panel, size_t q)
{
    const product *it = w->job->product;
    const fsdpc_gemm_path *path = w->job->plan->path;
    size_t row = (w->job->first_panel + panel) * path->mr, col = w->first_col + q * path->nr;
    fsdpc_gemm_target to = it->c;
    to.rows = fsdpc_min_size(it->m - row, path->mr);
    to.cols = fsdpc_min_size(it->n - col, path->nr);
    to.c = (char *)to.c + (row * to.ldc + col) * fsdpc_dtype_bytes(to.dtype);
    if (to.bias)
        to.bias =
            (const char *)to.bias + (to.bias_by_row ? row : col) * fsdpc_dtype_bytes(to.bias_dtype);
    return to;
}

/* Multiplies a panel of A with those of B, for one block of k. A tile is finished only after the
 * next one has started: by then its sums are complete, and the processor can overlap the two. */
static void multiply_row(worker *w, char *a, size_t panel, size_t block,
                         fsdpc_gemm_prefetch *prefetch)
{
    const plan *p = w->job->plan;
    const fsdpc_gemm_path *path = p->path;
    size_t k_count = k_count_of(w->job, block);
    bool last = block + 1 == blocks_of(w->job), kept = p->passes * p->blocks > 1;
    char *sums = w->sums;
    if (p->passes > 1)
        sums += (panel - w->first_panel) * w->col_panels * p->tile_bytes;
    const char *b = w->b + block % p->blocks * w->col_panels * p->b_panel_bytes;
    for (size_t q = 0; q < w->col_panels; q++, b += p->b_panel_bytes) {
        char *to = sums + (kept ? q : q % 2) * p->tile_bytes;
        fsdpc_gemm_target target = target_of(w, panel, q);
        prefetch->c = target.c;
        prefetch->c_rows = last ? target.rows : 0;
        prefetch->c_step = target.ldc * fsdpc_dtype_bytes(target.dtype);
        if (w->pending_sums == to)
            finish_pending(w);
        path->tile(to, a, b, k_count, block > 0, prefetch);
        prefetch->a = NULL;
        finish_pending(w);
        if (last) {
            w->pending = target;
            w->pending_sums = to;
        }
    }
}

/* Returns the prefetch hints for a step's tiles: this step's A, if the tiles must pack it, and the
 * next step's. A step is a panel of A and a block of k. */
static fsdpc_gemm_prefetch prefetch_of(worker *w, const char *a, size_t panel, size_t block)
{
    const job *j = w->job;
    const plan *p = j->plan;
    const fsdpc_gemm_operand *from = &j->product->a;
    size_t k_count = k_count_of(j, block), mr = p->path->mr;
    fsdpc_gemm_prefetch it = {.row = a, .next = a};
    if (p->slab) {
        it.row = it.next = a + p->a_panel_bytes;
        it.row_bytes = p->a_panel_bytes;
        it.row_step = p->a_panel_bytes;
        it.rate = 2;
        return it;
    }
    size_t element = p->path->element_bytes, row = (j->first_panel + panel) * mr;
    const char *data = from->data;
    it.a_bytes = from->ld * element;
    if (from->lines - row >= mr && k_count > 0 && k_count % 32 == 0)
        it.a = data + (row * from->ld + block * p->kc) * element;

    if (++block % p->blocks == 0 || block == blocks_of(j)) {
        block = (block - 1) / p->blocks * p->blocks;
        row += mr;
    }
    if (row < from->lines) {
        size_t steps = w->col_panels * fsdpc_ceil_div(fsdpc_max_size(k_count, 1), 32);
        it.row = it.next = data + (row * from->ld + block * p->kc) * element;
        it.row_bytes = k_count_of(j, block) * element;
        it.row_step = it.a_bytes;
        it.rate = fsdpc_ceil_div(mr * fsdpc_ceil_div(it.row_bytes, 64), steps);
    }
    return it;
}

/* Packs one block of k from the worker's columns of B' into its panels. */
static void pack_b(worker *w, char *to, size_t block)
{
    const plan *p = w->job->plan;
    const fsdpc_gemm_path *path = p->path;
    const product *it = w->job->product;
    size_t k = block * p->kc, k_count = k_count_of(w->job, block), nr = path->nr;
    if (!it->patches) {
        for (size_t q = 0; q < w->col_panels; q++, to += p->b_panel_bytes) {
            size_t col = w->first_col + q * nr;
            path->pack_b(to, &it->b, col, fsdpc_min_size(it->n - col, nr), k, k_count);
        }
        return;
    }
    size_t end = fsdpc_min_size(w->first_col + w->col_panels * nr, it->n);
    for (size_t col = w->first_col, n; col < end; col += n) {
        n = fsdpc_min_size(end - col, p->patch_panels * nr);
        fsdpc_gemm_operand made = it->b;
        made.data = w->patches;
        made.lines = n;
        made.ld = made.along_k ? k_count : n;
        fsdpc_patches_tile tile = made.along_k ? (fsdpc_patches_tile){col, n, k, k_count}
                                               : (fsdpc_patches_tile){k, k_count, col, n};
        fsdpc_patches_copy(it->patches, it->b.data, fsdpc_dtype_bytes(it->b.dtype), &tile,
                           w->patches);
        for (size_t at = 0; at < n; at += nr, to += p->b_panel_bytes)
            path->pack_b(to, &made, at, fsdpc_min_size(n - at, nr), 0, k_count);
    }
}

static void compute_block(worker *w)
{
    const job *j = w->job;
    const plan *p = j->plan;
    for (size_t first = 0; first < blocks_of(j); first += p->blocks) {
        size_t end = fsdpc_min_size(first + p->blocks, blocks_of(j));
        for (size_t block = first; block < end; block++)
            pack_b(w, w->b + (block - first) * w->col_panels * p->b_panel_bytes, block);
        for (size_t panel = w->first_panel; panel < w->last_panel; panel++)
            for (size_t block = first; block < end; block++) {
                char *a = p->slab ? a_panel(j, block, panel) : w->a;
                fsdpc_gemm_prefetch prefetch = prefetch_of(w, a, panel, block);
                if (!p->slab && !prefetch.a)
                    pack_a(j, a, block, panel);
                multiply_row(w, a, panel, block, &prefetch);
            }
    }
    finish_pending(w);
}

static void compute_part(void *arg, size_t part)
{
    job *j = arg;
    const plan *p = j->plan;
    const fsdpc_gemm_path *path = p->path;
    worker w = {.job = j};
    w.b = j->workspace + p->slab_bytes + part * thread_bytes(p);
    w.sums = w.b + p->b_bytes;
    w.a = w.sums + p->sums_bytes;
    w.patches = w.a + p->a_bytes;
    size_t row_blocks = fsdpc_ceil_div(j->panels, p->row_panels);
    size_t col_blocks = fsdpc_ceil_div(p->b_panels, p->col_panels);

    if (path->enter)
        path->enter();
    for (size_t i; (i = take(j)) < row_blocks * col_blocks;) {
        w.first_panel = i / col_blocks * p->row_panels;
        w.last_panel = fsdpc_min_size(w.first_panel + p->row_panels, j->panels);
        size_t first = i % col_blocks * p->col_panels;
        w.first_col = first * path->nr;
        w.col_panels = fsdpc_min_size(p->b_panels - first, p->col_panels);
        compute_block(&w);
    }
    if (path->leave)
        path->leave();
}

static void run(const plan *p, const product *it, char *workspace, fsdpc_team *team)
{
    for (size_t first = 0; first < p->a_panels; first += p->slab_panels) {
        job j = {.plan = p,
                 .product = it,
                 .workspace = workspace,
                 .first_panel = first,
                 .panels = fsdpc_min_size(p->a_panels - first, p->slab_panels)};
        if (p->slab)
            fsdpc_team_run(p->threads > 1 ? team : NULL, (size_t)p->threads, pack_slab_part, &j);
        atomic_store_explicit(&j.next, 0, memory_order_relaxed);
        fsdpc_team_run(p->threads > 1 ? team : NULL, (size_t)p->threads, compute_part, &j);
    }
}

/* -- skinny products --------------------------------------------------------------------------- */

typedef struct skinny_job {
    const fsdpc_gemm_path *path;
    fsdpc_gemm_skinny product;
    size_t cols, part_cols;
} skinny_job;

static void skinny_part(void *arg, size_t part)
{
    const skinny_job *j = arg;
    size_t first = part * j->part_cols;
    if (first < j->cols)
        j->path->skinny(&j->product, first, fsdpc_min_size(j->cols - first, j->part_cols));
}

static bool is_skinny(const fsdpc_gemm_path *path, const fsdpc_gemm_args *args)
{
    return path->skinny && !args->patches && fsdpc_min_size(args->m, args->n) <= FSDPC_GEMM_SKINNY;
}

static size_t skinny_bytes(size_t m, size_t n, size_t k)
{
    size_t rows = fsdpc_min_size(m, n) > 1 ? FSDPC_GEMM_SKINNY : 1;
    return fsdpc_round_up(rows * k * sizeof(float), 64);
}

/* x: skinny_bytes(). If there are few columns instead of few rows, computes C^T = B'^T A'^T. */
static void run_skinny(const fsdpc_gemm_path *path, const product *it, float *x, fsdpc_team *team)
{
    bool few_rows = it->m <= it->n;
    const fsdpc_gemm_operand *few = few_rows ? &it->a : &it->b;
    size_t rows = few_rows ? it->m : it->n, cols = few_rows ? it->n : it->m, k = it->k;
    size_t padded = rows > 1 ? FSDPC_GEMM_SKINNY : 1;
    for (size_t r = 0; r < padded; r++)
        for (size_t i = 0; i < k; i++) {
            size_t at = few->along_k ? r * few->ld + i : i * few->ld + r;
            float value = 0;
            if (r < rows && few->dtype == FSDPC_F32)
                value = ((const float *)few->data)[at];
            else if (r < rows && few->dtype == FSDPC_BF16)
                value = fsdpc_bf16_to_f32(((const uint16_t *)few->data)[at]);
            else if (r < rows)
                value = fsdpc_f16_to_f32(((const uint16_t *)few->data)[at]);
            x[r * k + i] = value;
        }
    size_t threads = cols * k < SKINNY_INLINE_WORK ? 1 : (size_t)fsdpc_team_threads(team);
    skinny_job j = {.path = path,
                    .product = {.x = x,
                                .rows = rows,
                                .k = k,
                                .w = few_rows ? it->b : it->a,
                                .c = it->c.c,
                                .c_row = few_rows ? it->c.ldc : 1,
                                .c_col = few_rows ? 1 : it->c.ldc,
                                .c_dtype = it->c.dtype,
                                .bias = it->c.bias,
                                .bias_row = few_rows ? 0 : 1,
                                .bias_col = few_rows ? 1 : 0,
                                .accumulate = it->c.accumulate},
                    .cols = cols,
                    .part_cols = fsdpc_round_up(fsdpc_ceil_div(cols, threads), 64)};
    fsdpc_team_run(threads > 1 ? team : NULL, threads, skinny_part, &j);
}

/* -- batches ----------------------------------------------------------------------------------- */

typedef struct batch_job {
    const fsdpc_gemm_args *args;
    const plan *plan;
    size_t batch, workspace_bytes; /* of one product */
    char *workspace;
    fsdpc_team *team; /* for use inside products; NULL if they run concurrently */
    atomic_size_t next;
} batch_job;

static product product_of(const fsdpc_gemm_args *args, size_t index)
{
    size_t bytes = fsdpc_dtype_bytes(args->dtype), c_bytes = fsdpc_dtype_bytes(args->c_dtype);
    return (product){
        .m = args->m,
        .n = args->n,
        .k = args->k,
        .a = {.data = (const char *)args->a + index * args->stride_a * bytes,
              .ld = args->lda,
              .lines = args->m,
              .along_k = !args->trans_a,
              .dtype = args->dtype},
        .b = {.data = (const char *)args->b + index * args->stride_b * bytes,
              .ld = args->ldb,
              .lines = args->n,
              .along_k = args->trans_b,
              .dtype = args->dtype,
              .streams = args->m <= FEW_ROWS && !args->patches},
        .patches = args->patches,
        .c = {.c = (char *)args->c + index * args->stride_c * c_bytes,
              .ldc = args->ldc,
              .dtype = args->c_dtype,
              .bias = args->bias,
              .bias_dtype = args->dtype,
              .bias_by_row = args->patches,
              .accumulate = args->accumulate},
    };
}

static void batch_part(void *arg, size_t part)
{
    batch_job *j = arg;
    char *workspace = j->workspace + part * j->workspace_bytes;
    for (size_t i; (i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->batch;) {
        product it = product_of(j->args, i);
        if (is_skinny(j->plan->path, j->args))
            run_skinny(j->plan->path, &it, (float *)workspace, j->team);
        else
            run(j->plan, &it, workspace, j->team);
    }
}

static size_t product_bytes(const plan *p, const fsdpc_gemm_args *args)
{
    return is_skinny(p->path, args) ? skinny_bytes(args->m, args->n, args->k)
                                    : fsdpc_round_up(plan_bytes(p), 64);
}

static fsdpc_status check(const fsdpc_gemm_args *args)
{
    if (!fsdpc_dtype_is_float(args->dtype))
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "a matrix product of %s: cast the operands to a float dtype",
                          fsdpc_dtype_name(args->dtype));
    if (args->c_dtype != args->dtype && args->c_dtype != FSDPC_F32)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "a matrix product of %s cannot be written as %s: use %s or float32",
                          fsdpc_dtype_name(args->dtype), fsdpc_dtype_name(args->c_dtype),
                          fsdpc_dtype_name(args->dtype));
    size_t a_rows = args->trans_a ? args->k : args->m, a_cols = args->trans_a ? args->m : args->k;
    size_t b_rows = args->trans_b ? args->n : args->k, b_cols = args->trans_b ? args->k : args->n;
    if (args->patches && (fsdpc_patches_rows(args->patches) != b_rows ||
                          fsdpc_patches_cols(args->patches) != b_cols))
        return fsdpc_fail(FSDPC_ERR_SHAPE, "windows are (%zu, %zu), B is (%zu, %zu)",
                          fsdpc_patches_rows(args->patches), fsdpc_patches_cols(args->patches),
                          b_rows, b_cols);
    if ((a_rows > 1 && args->lda < a_cols) ||
        (b_rows > 1 && args->ldb < b_cols && !args->patches) ||
        (args->m > 1 && args->ldc < args->n))
        return fsdpc_fail(
            FSDPC_ERR_SHAPE,
            "rows overlap in a product of (%zu, %zu) and (%zu, %zu): lda %zu, ldb %zu, "
            "ldc %zu must not be less than the rows they hold",
            args->m, args->k, args->k, args->n, args->lda, args->ldb, args->ldc);
    return FSDPC_OK;
}

fsdpc_status fsdpc_gemm_cpu(const fsdpc_gemm_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check(args));
    if (args->m == 0 || args->n == 0)
        return FSDPC_OK;

    /* A batch that shares B and whose rows are consecutive is computed as one product. */
    fsdpc_gemm_args folded = *args;
    folded.batch = fsdpc_max_size(args->batch, 1);
    if (folded.batch > 1 && !args->trans_a && args->stride_b == 0 && !args->patches &&
        args->stride_a == args->m * args->lda && args->stride_c == args->m * args->ldc) {
        FSDPC_TRY(fsdpc_mul_size(args->m, folded.batch, &folded.m));
        folded.batch = 1;
    }
    size_t m = folded.m, n = folded.n, k = folded.k;

    fsdpc_device *device = stream->device;
    const fsdpc_gemm_path *path = path_of(device->isa, args->dtype, m);
    int threads = fsdpc_team_threads(device->team);
    plan p = plan_make(path, &folded, 1);
    batch_job j = {.args = &folded, .batch = folded.batch, .plan = &p};
    size_t parts = fsdpc_min_size((size_t)threads, folded.batch);
    /* products that write to the same C run one after the other */
    bool side_by_side = parts > 1 && folded.stride_c != 0 &&
                        product_bytes(&p, &folded) <= BATCH_BYTES &&
                        (double)m * (double)n * (double)k * (double)folded.batch >= INLINE_WORK;
    if (!side_by_side) {
        parts = 1;
        p = plan_make(path, &folded, threads);
        j.team = device->team;
    }
    j.workspace_bytes = product_bytes(&p, &folded);
    size_t bytes;
    FSDPC_TRY(fsdpc_mul_size(j.workspace_bytes, parts, &bytes));
    /* Allocations of 4 MiB or more use huge pages, without which address translation costs up to a
     * fifth of the time. Request at least that much; only the used part is accessed. */
    if (bytes >= HUGE_FROM_BYTES)
        bytes = fsdpc_max_size(bytes, HUGE_BYTES);
    void *workspace;
    FSDPC_TRY(fsdpc_mem_alloc(device->mem, FSDPC_MEM_OTHER, bytes, &workspace));
    j.workspace = workspace;
    fsdpc_team_run(parts > 1 ? device->team : NULL, parts, batch_part, &j);
    fsdpc_mem_free(device->mem, workspace);
    return FSDPC_OK;
}
