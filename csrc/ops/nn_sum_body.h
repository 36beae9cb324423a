/* Sums of elements, or of their squares, over some dimensions (see nn_internal.h for how bodies are
 * compiled).
 *
 * Neighbouring dimensions that are both kept or both reduced are merged first. If the innermost
 * dimension is kept, an item is up to NN_SUM_COLS columns of the output, added row by row, as for a
 * bias gradient. If it is reduced, an item is one output, summed along rows, as for a mean over
 * features. Long sums are split into short ones at fixed boundaries, which reduces the error and
 * makes the result independent of how threads share the work.
 */

enum { SUM_ROWS = 64, SUM_RUN = 4096 };

FSDPC_INLINE fsdpc_vf sum_load(const void *x, size_t at, size_t n, fsdpc_dtype dtype, bool squares)
{
    fsdpc_vf v = fsdpc_vf_load_as_n(x, at, dtype, n);
    return squares ? v * v : v;
}

FSDPC_INLINE float sum_run(const void *x, size_t at, size_t numel, fsdpc_dtype dtype, bool squares)
{
    enum { N = FSDPC_LANES };
    fsdpc_vf a = {0}, b = {0}, c = {0}, d = {0};
    size_t i = 0;
    for (; i + 4 * FSDPC_LANES <= numel; i += 4 * FSDPC_LANES) {
        a += sum_load(x, at + i, N, dtype, squares);
        b += sum_load(x, at + i + N, N, dtype, squares);
        c += sum_load(x, at + i + 2 * N, N, dtype, squares);
        d += sum_load(x, at + i + 3 * N, N, dtype, squares);
    }
    for (; i + FSDPC_LANES <= numel; i += FSDPC_LANES)
        a += sum_load(x, at + i, N, dtype, squares);
    if (i < numel)
        b += sum_load(x, at + i, numel - i, dtype, squares);
    return fsdpc_vf_sum((a + b) + (c + d));
}

FSDPC_INLINE double sum_runs(const void *x, size_t at, size_t numel, fsdpc_dtype dtype,
                             bool squares)
{
    double total = 0;
    for (size_t i = 0; i < numel; i += SUM_RUN)
        total += sum_run(x, at + i, fsdpc_min_size(SUM_RUN, numel - i), dtype, squares);
    return total;
}

static size_t sum_fold_offset(const nn_sum_plan *plan, size_t fold)
{
    if (plan->reduced.ndim == 1)
        return fold * plan->reduced.stride[0][0];
    size_t offset[NN_OPERANDS];
    nn_box_offsets(&plan->reduced, 0, fold, offset);
    return offset[0];
}

FSDPC_INLINE void sum_add_row(float *sum, const void *x, size_t at, size_t cols, fsdpc_dtype dtype,
                              bool squares)
{
    size_t c = 0;
    FSDPC_EACH_VECTOR(
        c, n, cols,
        fsdpc_vf_store_n(sum + c,
                         fsdpc_vf_load_n(sum + c, n) + sum_load(x, at + c, n, dtype, squares), n));
}

FSDPC_INLINE void sum_finish_row(const fsdpc_sum_args *args, size_t at, const float *total,
                                 size_t cols, fsdpc_dtype dtype)
{
    float scale = (float)args->scale;
    for (size_t c = 0; c < cols; c += FSDPC_LANES) {
        size_t n = fsdpc_min_size(FSDPC_LANES, cols - c);
        fsdpc_vf v = fsdpc_vf_load_n(total + c, n) * scale;
        if (args->accumulate)
            v = v + fsdpc_vf_load_as_n(args->out, at + c, dtype, n);
        fsdpc_vf_store_as_n(args->out, at + c, dtype, v, n);
    }
}

/* Sums columns of one output row; x begins at `at`, and the output at `out_at`. */
FSDPC_INLINE void sum_columns(const nn_sum_plan *plan, size_t at, size_t out_at, size_t cols,
                              fsdpc_dtype dtype, bool squares)
{
    const fsdpc_sum_args *args = plan->args;
    float total[NN_SUM_COLS] = {0}, part[NN_SUM_COLS];
    for (size_t fold = 0; fold < plan->folds; fold += SUM_ROWS) {
        size_t end = fsdpc_min_size(fold + SUM_ROWS, plan->folds);
        memset(part, 0, cols * sizeof *part);
        for (size_t f = fold; f < end; f++)
            sum_add_row(part, args->x, at + sum_fold_offset(plan, f), cols, dtype, squares);
        sum_add_row(total, part, 0, cols, FSDPC_F32, false);
    }
    if (args->out_dtype == FSDPC_F32)
        sum_finish_row(args, out_at, total, cols, FSDPC_F32);
    else if (args->out_dtype == FSDPC_BF16)
        sum_finish_row(args, out_at, total, cols, FSDPC_BF16);
    else
        sum_finish_row(args, out_at, total, cols, FSDPC_F16);
}

static void sum_store(const fsdpc_sum_args *args, size_t at, double total)
{
    float v = (float)(total * args->scale);
    if (args->accumulate)
        v += fsdpc_f32_load_as(args->out, at, args->out_dtype);
    fsdpc_f32_store_as(args->out, at, args->out_dtype, v);
}

FSDPC_INLINE void sum_items(const nn_sum_plan *plan, size_t first, size_t last, fsdpc_dtype dtype,
                            bool squares)
{
    size_t col_blocks = fsdpc_ceil_div(plan->inner, NN_SUM_COLS);
    for (size_t item = first; item < last; item++) {
        size_t offset[NN_OPERANDS];
        if (plan->partial) { /* block `item` of a full sum */
            size_t at = item * NN_SUM_BLOCK;
            size_t numel = fsdpc_min_size(NN_SUM_BLOCK, plan->inner - at);
            plan->partial[item] = sum_runs(plan->args->x, at, numel, dtype, squares);
        } else if (plan->inner_kept) {
            size_t row = item / col_blocks, col = item % col_blocks * NN_SUM_COLS;
            nn_box_offsets(&plan->kept, 0, row, offset);
            sum_columns(plan, offset[0] + col, row * plan->inner + col,
                        fsdpc_min_size(NN_SUM_COLS, plan->inner - col), dtype, squares);
        } else {
            nn_box_offsets(&plan->kept, 0, item, offset);
            double total = 0;
            for (size_t fold = 0; fold < plan->folds; fold++)
                total += sum_runs(plan->args->x, offset[0] + sum_fold_offset(plan, fold),
                                  plan->inner, dtype, squares);
            sum_store(plan->args, item, total);
        }
    }
}

FSDPC_INLINE void sum_range(const nn_sum_plan *plan, size_t first, size_t last, fsdpc_dtype dtype)
{
    if (plan->args->squares)
        sum_items(plan, first, last, dtype, true);
    else
        sum_items(plan, first, last, dtype, false);
}

NN_FLOAT_KERNELS(sum_range, nn_sum_plan, fsdpc_nn_sum_wide)

/* Sums all elements as partial sums over fixed blocks, which are added in order. */
static fsdpc_status sum_all(nn_sum_plan *plan, fsdpc_stream *stream)
{
    size_t blocks = fsdpc_ceil_div(plan->inner, NN_SUM_BLOCK);
    void *partial;
    FSDPC_TRY(
        fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, blocks * sizeof(double), &partial));
    plan->partial = partial;
    nn_for(stream, blocks, 4, sum_range_kernels[plan->args->dtype], plan);
    double total = 0;
    for (size_t block = 0; block < blocks; block++)
        total += plan->partial[block];
    sum_store(plan->args, 0, total);
    fsdpc_device_free(stream->device, partial);
    return FSDPC_OK;
}

static fsdpc_status sum(const fsdpc_sum_args *args, fsdpc_stream *stream)
{
    if (args->dtype != FSDPC_I64 || args->out_dtype != FSDPC_I64) {
        FSDPC_TRY(nn_check_float(args->dtype, "a sum"));
        FSDPC_TRY(nn_check_float(args->out_dtype, "a sum's result"));
    }
    nn_sum_plan plan;
    fsdpc_nn_sum_plan_init(&plan, args);
    if (plan.outer == 0 || (plan.inner_kept && plan.inner == 0))
        return FSDPC_OK;
    bool integers = args->dtype == FSDPC_I64;
    if (integers || args->dtype == FSDPC_F64 || args->out_dtype == FSDPC_F64) {
        size_t outputs = plan.outer * (plan.inner_kept ? plan.inner : 1);
        size_t terms = plan.folds * (plan.inner_kept ? 1 : plan.inner);
        nn_for(stream, outputs, nn_row_grain(terms),
               integers ? fsdpc_nn_sum_i64 : fsdpc_nn_sum_wide, &plan);
        return FSDPC_OK;
    }
    if (!plan.inner_kept && plan.outer == 1 && plan.folds == 1 && plan.inner > NN_SUM_BLOCK)
        return sum_all(&plan, stream);
    size_t items = plan.outer, weight = plan.folds * plan.inner;
    if (plan.inner_kept) {
        items *= fsdpc_ceil_div(plan.inner, NN_SUM_COLS);
        weight = plan.folds * fsdpc_min_size(NN_SUM_COLS, plan.inner);
    }
    nn_for(stream, items, nn_row_grain(weight), sum_range_kernels[args->dtype], &plan);
    return FSDPC_OK;
}
