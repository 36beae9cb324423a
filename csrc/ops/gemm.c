/* The matrix product on the CPU: checks, choice of kernels, blocking and threads.
 *
 * The blocking is that of GotoBLAS (Goto & van de Geijn 2008) with the roles turned so that C is
 * written along its rows.  All of A' (a slab of it, where it is larger than SLAB_BYTES) is packed
 * first.  Then C is cut into blocks of columns; for each block of k the block's part of B' is
 * packed, to lie in L2, and each panel of A meets the panels of B in turn.  What a panel is and how
 * two of them are multiplied is the path's (gemm_path.h).
 *
 * With one block of k a tile's sums go straight to C.  With more, the block's sums stay in a
 * private fp32 area of at most ROWS rows, so that partial sums are never rounded to bf16 and C is
 * read and written once.  A sum is one chain over ascending k, therefore equal for every cut of m,
 * n and k.
 *
 * Threads take panels of A to pack, then blocks of C to compute, from a counter; each has its own
 * place for B's block and the sums.  C is cut over columns first, since cuts over rows make threads
 * pack the same columns twice.  Batches of small products are spread over threads whole.
 *
 * Products with at most four rows or columns never come here: see gemm_skinny.h.  Workspace is one
 * block of counted memory per call (category "other"), at most SLAB_BYTES for A (or one panel,
 * where k is very large) and about 2 MB a thread.
 */
#include "ops/gemm.h"

#include <stdatomic.h>

#include "base/size.h"
#include "ops/gemm_path.h"

enum {
    SLAB_BYTES = 16 << 20,
    ROWS = 512,
    HUGE_FROM_BYTES = 256 << 10,
    HUGE_BYTES = 4 << 20,
    INLINE_WORK = 1 << 18, /* multiplications below which threads cost more than they give */
    BATCH_BYTES = 1 << 20, /* workspace up to which products of a batch run side by side */
    SKINNY_INLINE_WORK = 1 << 16
};

typedef struct product {
    size_t m, n, k;
    fsdpc_gemm_operand a, b;
    fsdpc_gemm_target c; /* of the whole matrix; rows and cols unused */
} product;

typedef struct plan {
    const fsdpc_gemm_path *path;
    int threads;
    size_t kc, passes;         /* blocks of k */
    size_t a_panels, b_panels; /* of the whole product */
    size_t a_panel_bytes, b_panel_bytes;
    size_t slab_panels;                     /* panels of A packed at a time */
    size_t row_panels, col_panels;          /* of one block of C */
    size_t tile_bytes;                      /* sums of one tile */
    size_t slab_bytes, b_bytes, sums_bytes; /* packed A; of one thread: B's block and the sums */
} plan;

/* -- choice ------------------------------------------------------------------------------------ */

static const fsdpc_gemm_path *path_of(fsdpc_isa isa, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F64)
        return &fsdpc_gemm_f64_portable;
#if defined(__x86_64__)
    if (dtype == FSDPC_BF16 && isa >= FSDPC_ISA_AMX)
        return &fsdpc_gemm_bf16_amx;
    if (dtype == FSDPC_BF16 && isa >= FSDPC_ISA_AVX512BF16)
        return &fsdpc_gemm_bf16_avx512bf16;
    if (isa >= FSDPC_ISA_AVX512)
        return &fsdpc_gemm_f32_avx512;
    if (isa >= FSDPC_ISA_AVX2)
        return &fsdpc_gemm_f32_avx2;
#endif
    (void)isa;
    return &fsdpc_gemm_f32_portable;
}

/* `count` things in blocks of at most `most`, in at least `least` blocks if there are as many
 * things, all blocks about equal: the size of one. */
static size_t even_block(size_t count, size_t most, size_t least)
{
    size_t blocks = fsdpc_max_size(fsdpc_ceil_div(count, fsdpc_max_size(most, 1)), least);
    return fsdpc_max_size(fsdpc_ceil_div(count, fsdpc_max_size(blocks, 1)), 1);
}

static plan plan_make(const fsdpc_gemm_path *path, size_t m, size_t n, size_t k, int threads)
{
    plan p = {.path = path, .threads = threads};
    if ((double)m * (double)n * (double)k < INLINE_WORK)
        p.threads = 1;
    size_t team = (size_t)p.threads;

    p.kc = fsdpc_round_up(even_block(k, path->kc, 1), 32);
    p.passes = fsdpc_max_size(fsdpc_ceil_div(k, p.kc), 1);
    p.a_panel_bytes = fsdpc_gemm_panel_bytes(path, path->mr, p.kc);
    p.b_panel_bytes = fsdpc_gemm_panel_bytes(path, path->nr, p.kc);
    p.a_panels = fsdpc_ceil_div(m, path->mr);
    p.b_panels = fsdpc_ceil_div(n, path->nr);
    p.slab_panels = even_block(p.a_panels, SLAB_BYTES / (p.passes * p.a_panel_bytes), 1);

    /* a multiple of the team, so that nobody idles at the end; but blocks of one panel alone would
     * read A once for every nr columns */
    size_t cols = fsdpc_ceil_div(p.b_panels, path->nc / path->nr);
    cols = fsdpc_min_size(fsdpc_round_up(cols, team), fsdpc_ceil_div(p.b_panels, 2));
    p.col_panels = even_block(p.b_panels, p.b_panels, cols);
    cols = fsdpc_ceil_div(p.b_panels, p.col_panels);
    size_t most_rows = p.passes > 1 ? ROWS / path->mr : p.slab_panels;
    p.row_panels = even_block(p.slab_panels, most_rows, fsdpc_ceil_div(team, cols));

    p.tile_bytes = path->mr * path->nr * path->sum_bytes;
    p.slab_bytes = p.slab_panels * p.passes * p.a_panel_bytes;
    p.b_bytes = p.col_panels * p.b_panel_bytes;
    p.sums_bytes = p.passes > 1 ? p.row_panels * p.col_panels * p.tile_bytes : p.tile_bytes;
    return p;
}

static size_t plan_bytes(const plan *p)
{
    return p->slab_bytes + (size_t)p->threads * (p->b_bytes + p->sums_bytes);
}

/* -- one product ------------------------------------------------------------------------------- */

/* A slab of one product at work.  `next` hands out what is left to do; relaxed, since the data it
 * distributes is ordered by the start and end of fsdpc_team_run. */
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

static char *a_panel(const job *j, size_t pass, size_t panel)
{
    return j->workspace + (pass * j->panels + panel) * j->plan->a_panel_bytes;
}

static void pack_slab_part(void *arg, size_t part)
{
    (void)part;
    job *j = arg;
    const plan *p = j->plan;
    const product *it = j->product;
    for (size_t i; (i = take(j)) < j->panels * p->passes;) {
        size_t pass = i / j->panels, panel = i % j->panels;
        size_t row = (j->first_panel + panel) * p->path->mr, k = pass * p->kc;
        p->path->pack_a(a_panel(j, pass, panel), &it->a, row,
                        fsdpc_min_size(it->m - row, p->path->mr), k,
                        fsdpc_min_size(it->k - k, p->kc));
    }
}

/* Multiplies panel `panel` of A (of the slab) with the packed panels of B that begin at column
 * `col`. */
static void multiply_row(const job *j, size_t pass, size_t panel, size_t col, size_t col_panels,
                         const char *b, char *sums)
{
    const plan *p = j->plan;
    const fsdpc_gemm_path *path = p->path;
    const product *it = j->product;
    size_t k_count = fsdpc_min_size(it->k - pass * p->kc, p->kc);
    const char *a = a_panel(j, pass, panel);
    size_t row = (j->first_panel + panel) * path->mr;
    for (size_t q = 0; q < col_panels; q++, col += path->nr) {
        size_t ahead = p->a_panel_bytes + q * k_count * path->ahead_bytes;
        path->tile(sums, a, b + q * p->b_panel_bytes, k_count, pass > 0, a + ahead);
        if (pass + 1 == p->passes) {
            fsdpc_gemm_target to = it->c;
            to.rows = fsdpc_min_size(it->m - row, path->mr);
            to.cols = fsdpc_min_size(it->n - col, path->nr);
            to.c = (char *)to.c + (row * to.ldc + col) * fsdpc_dtype_bytes(to.dtype);
            if (to.bias)
                to.bias = (const char *)to.bias + col * fsdpc_dtype_bytes(to.bias_dtype);
            path->finish(&to, sums);
        }
        if (p->passes > 1)
            sums += p->tile_bytes;
    }
}

static void compute_part(void *arg, size_t part)
{
    job *j = arg;
    const plan *p = j->plan;
    const fsdpc_gemm_path *path = p->path;
    const product *it = j->product;
    char *b = j->workspace + p->slab_bytes + part * (p->b_bytes + p->sums_bytes);
    char *sums = b + p->b_bytes;
    size_t row_blocks = fsdpc_ceil_div(j->panels, p->row_panels);
    size_t col_blocks = fsdpc_ceil_div(p->b_panels, p->col_panels);

    if (path->enter)
        path->enter();
    for (size_t i; (i = take(j)) < row_blocks * col_blocks;) {
        size_t first_panel = i / col_blocks * p->row_panels;
        size_t last_panel = fsdpc_min_size(first_panel + p->row_panels, j->panels);
        size_t first_col = i % col_blocks * p->col_panels * path->nr;
        size_t cols = fsdpc_min_size(it->n - first_col, p->col_panels * path->nr);
        size_t col_panels = fsdpc_ceil_div(cols, path->nr);
        for (size_t pass = 0; pass < p->passes; pass++) {
            size_t k = pass * p->kc;
            for (size_t q = 0; q < col_panels; q++)
                path->pack_b(b + q * p->b_panel_bytes, &it->b, first_col + q * path->nr,
                             fsdpc_min_size(cols - q * path->nr, path->nr), k,
                             fsdpc_min_size(it->k - k, p->kc));
            for (size_t panel = first_panel; panel < last_panel; panel++) {
                size_t done =
                    p->passes > 1 ? (panel - first_panel) * col_panels * p->tile_bytes : 0;
                multiply_row(j, pass, panel, first_col, col_panels, b, sums + done);
            }
        }
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

static bool is_skinny(const fsdpc_gemm_path *path, size_t m, size_t n)
{
    return path->skinny && fsdpc_min_size(m, n) <= FSDPC_GEMM_SKINNY;
}

static size_t skinny_bytes(size_t m, size_t n, size_t k)
{
    size_t rows = fsdpc_min_size(m, n) > 1 ? FSDPC_GEMM_SKINNY : 1;
    return fsdpc_round_up(rows * k * sizeof(float), 64);
}

/* x: skinny_bytes().  With few columns instead of few rows, C^T = B'^T A'^T is computed. */
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
    fsdpc_team *team; /* for use inside products; NULL where they run side by side */
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
              .dtype = args->dtype},
        .c = {.c = (char *)args->c + index * args->stride_c * c_bytes,
              .ldc = args->ldc,
              .dtype = args->c_dtype,
              .bias = args->bias,
              .bias_dtype = args->dtype,
              .accumulate = args->accumulate},
    };
}

static void batch_part(void *arg, size_t part)
{
    batch_job *j = arg;
    char *workspace = j->workspace + part * j->workspace_bytes;
    for (size_t i; (i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->batch;) {
        product it = product_of(j->args, i);
        if (is_skinny(j->plan->path, it.m, it.n))
            run_skinny(j->plan->path, &it, (float *)workspace, j->team);
        else
            run(j->plan, &it, workspace, j->team);
    }
}

static size_t product_bytes(const plan *p, size_t m, size_t n, size_t k)
{
    return is_skinny(p->path, m, n) ? skinny_bytes(m, n, k) : fsdpc_round_up(plan_bytes(p), 64);
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
    if ((a_rows > 1 && args->lda < a_cols) || (b_rows > 1 && args->ldb < b_cols) ||
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

    /* A batch that shares B and whose rows follow each other is one product. */
    fsdpc_gemm_args folded = *args;
    folded.batch = fsdpc_max_size(args->batch, 1);
    if (folded.batch > 1 && !args->trans_a && args->stride_b == 0 &&
        args->stride_a == args->m * args->lda && args->stride_c == args->m * args->ldc) {
        FSDPC_TRY(fsdpc_mul_size(args->m, folded.batch, &folded.m));
        folded.batch = 1;
    }
    size_t m = folded.m, n = folded.n, k = folded.k;

    fsdpc_device *device = stream->device;
    const fsdpc_gemm_path *path = path_of(device->isa, args->dtype);
    int threads = fsdpc_team_threads(device->team);
    plan p = plan_make(path, m, n, k, 1);
    batch_job j = {.args = &folded, .batch = folded.batch, .plan = &p};
    size_t parts = fsdpc_min_size((size_t)threads, folded.batch);
    /* products that write to the same C take turns */
    bool side_by_side = parts > 1 && folded.stride_c != 0 &&
                        product_bytes(&p, m, n, k) <= BATCH_BYTES &&
                        (double)m * (double)n * (double)k * (double)folded.batch >= INLINE_WORK;
    if (!side_by_side) {
        parts = 1;
        p = plan_make(path, m, n, k, threads);
        j.team = device->team;
    }
    j.workspace_bytes = product_bytes(&p, m, n, k);
    size_t bytes;
    FSDPC_TRY(fsdpc_mul_size(j.workspace_bytes, parts, &bytes));
    /* From 4 MiB up memory comes in huge pages, without which address translation costs up to a
     * fifth: ask for that much, only what is used is touched. */
    if (bytes >= HUGE_FROM_BYTES)
        bytes = fsdpc_max_size(bytes, HUGE_BYTES);
    void *workspace;
    FSDPC_TRY(fsdpc_mem_alloc(device->mem, FSDPC_MEM_OTHER, bytes, &workspace));
    j.workspace = workspace;
    fsdpc_team_run(parts > 1 ? device->team : NULL, parts, batch_part, &j);
    fsdpc_mem_free(device->mem, workspace);
    return FSDPC_OK;
}
