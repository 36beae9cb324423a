/* RMSNorm and LayerNorm over rows, forward and backward (see nn_internal.h for how bodies are
 * compiled).
 *
 * Forward computes statistics in fp32 (the variance from centred values), then the result, while
 * the row stays in cache. Backward, with xhat = (x - mean) * rstd, g = dy * w and means over the
 * row:
 *     dx = rstd * (g - mean(g) - xhat * mean(g * xhat))        (RMSNorm: without mean(g))
 *     dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
 * The sums over rows are computed per block of rows, whose size depends only on the number of rows.
 * The blocks are then added in order, so any number of threads gives the same bits.
 */

typedef struct norm_row {
    const fsdpc_norm_args *args;
    size_t at; /* first element */
    float mean, rstd;
    float mean_g, mean_gx;  /* backward: means of g and of g * xhat */
    float *dweight, *dbias; /* backward: this block's partial sums; NULL: not needed */
} norm_row;

FSDPC_INLINE fsdpc_vf norm_square_step(const norm_row *row, size_t c, size_t n, fsdpc_dtype dtype,
                                       fsdpc_vf sum)
{
    fsdpc_vf x = fsdpc_vf_load_as_n(row->args->x, row->at + c, dtype, n) - row->mean;
    if (!FSDPC_WHOLE(n))
        x = fsdpc_vf_select(fsdpc_vi_first(n), x, (fsdpc_vf){0});
    return fsdpc_vf_fma(x, x, sum);
}

FSDPC_INLINE void norm_statistics(norm_row *row, fsdpc_dtype dtype)
{
    const fsdpc_norm_args *args = row->args;
    size_t cols = args->cols, c = 0;
    row->mean = 0;
    if (args->layer) {
        fsdpc_vf sum = {0}, other = {0};
        for (; c + 2 * FSDPC_LANES <= cols; c += 2 * FSDPC_LANES) {
            sum += fsdpc_vf_load_as(args->x, row->at + c, dtype);
            other += fsdpc_vf_load_as(args->x, row->at + c + FSDPC_LANES, dtype);
        }
        for (; c < cols; c += FSDPC_LANES)
            sum += fsdpc_vf_load_as_n(args->x, row->at + c, dtype,
                                      fsdpc_min_size(FSDPC_LANES, cols - c));
        row->mean = fsdpc_vf_sum(sum + other) / (float)cols;
    }
    fsdpc_vf sum = {0}, other = {0};
    for (c = 0; c + 2 * FSDPC_LANES <= cols; c += 2 * FSDPC_LANES) {
        sum = norm_square_step(row, c, FSDPC_LANES, dtype, sum);
        other = norm_square_step(row, c + FSDPC_LANES, FSDPC_LANES, dtype, other);
    }
    for (; c < cols; c += FSDPC_LANES)
        sum = norm_square_step(row, c, fsdpc_min_size(FSDPC_LANES, cols - c), dtype, sum);
    row->rstd = 1.0f / sqrtf(fsdpc_vf_sum(sum + other) / (float)cols + (float)args->eps);
}

FSDPC_INLINE void norm_step(const norm_row *row, size_t c, size_t n, fsdpc_dtype dtype, bool weight,
                            bool bias)
{
    fsdpc_vf y = (fsdpc_vf_load_as_n(row->args->x, row->at + c, dtype, n) - row->mean) * row->rstd;
    if (weight)
        y = y * fsdpc_vf_load_as_n(row->args->weight, c, dtype, n);
    if (bias)
        y = y + fsdpc_vf_load_as_n(row->args->bias, c, dtype, n);
    fsdpc_vf_store_as_n(row->args->y, row->at + c, dtype, y, n);
}

FSDPC_INLINE void norm_loop(const norm_row *row, fsdpc_dtype dtype, bool weight, bool bias)
{
    size_t c = 0, cols = row->args->cols;
    FSDPC_EACH_VECTOR(c, n, cols, norm_step(row, c, n, dtype, weight, bias));
}

FSDPC_INLINE void norm_range(const fsdpc_norm_args *args, size_t first, size_t last,
                             fsdpc_dtype dtype)
{
    for (size_t r = first; r < last; r++) {
        norm_row row = {.args = args, .at = r * args->cols};
        norm_statistics(&row, dtype);
        if (args->mean)
            args->mean[r] = row.mean;
        if (args->rstd)
            args->rstd[r] = row.rstd;
        if (args->weight && !args->bias)
            norm_loop(&row, dtype, true, false);
        else if (args->weight)
            norm_loop(&row, dtype, true, true);
        else if (args->bias)
            norm_loop(&row, dtype, false, true);
        else
            norm_loop(&row, dtype, false, false);
    }
}

NN_FLOAT_KERNELS(norm_range, fsdpc_norm_args, fsdpc_nn_norm_f64)

static fsdpc_status norm(const fsdpc_norm_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "a norm"));
    nn_for(stream, args->rows, nn_row_grain(args->cols), norm_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

/* -- backward ---------------------------------------------------------------------------------- */

typedef struct norm_plan {
    const fsdpc_norm_args *args;
    size_t block_rows, blocks;
    float *dweight, *dbias; /* (blocks, cols) partial sums; NULL: not needed */
} norm_plan;

typedef struct norm_values {
    fsdpc_vf dy, g, xhat;
} norm_values;

FSDPC_INLINE norm_values norm_load(const norm_row *row, size_t c, size_t n, fsdpc_dtype dtype,
                                   bool weight)
{
    norm_values v;
    v.dy = fsdpc_vf_load_as_n(row->args->dy, row->at + c, dtype, n); /* 0 beyond n */
    v.g = weight ? v.dy * fsdpc_vf_load_as_n(row->args->weight, c, dtype, n) : v.dy;
    v.xhat = (fsdpc_vf_load_as_n(row->args->x, row->at + c, dtype, n) - row->mean) * row->rstd;
    return v;
}

FSDPC_INLINE void norm_backward_means(norm_row *row, fsdpc_dtype dtype, bool weight)
{
    fsdpc_vf g = {0}, gx = {0}, other_g = {0}, other_gx = {0};
    size_t c = 0, cols = row->args->cols;
    for (; c + 2 * FSDPC_LANES <= cols; c += 2 * FSDPC_LANES) {
        norm_values a = norm_load(row, c, FSDPC_LANES, dtype, weight);
        norm_values b = norm_load(row, c + FSDPC_LANES, FSDPC_LANES, dtype, weight);
        g += a.g;
        gx = fsdpc_vf_fma(a.g, a.xhat, gx);
        other_g += b.g;
        other_gx = fsdpc_vf_fma(b.g, b.xhat, other_gx);
    }
    for (; c < cols; c += FSDPC_LANES) {
        norm_values a = norm_load(row, c, fsdpc_min_size(FSDPC_LANES, cols - c), dtype, weight);
        g += a.g;
        gx = fsdpc_vf_fma(a.g, a.xhat, gx);
    }
    row->mean_g = row->args->layer ? fsdpc_vf_sum(g + other_g) / (float)cols : 0;
    row->mean_gx = fsdpc_vf_sum(gx + other_gx) / (float)cols;
}

FSDPC_INLINE void norm_backward_step(const norm_row *row, size_t c, size_t n, fsdpc_dtype dtype,
                                     bool weight)
{
    norm_values v = norm_load(row, c, n, dtype, weight);
    if (row->args->dx) {
        fsdpc_vf dx = (v.g - row->mean_g - v.xhat * row->mean_gx) * row->rstd;
        if (row->args->dx_accumulate)
            dx += fsdpc_vf_load_as_n(row->args->dx, row->at + c, dtype, n);
        fsdpc_vf_store_as_n(row->args->dx, row->at + c, dtype, dx, n);
    }
    if (row->dweight) {
        fsdpc_vf sum = fsdpc_vf_load_n(row->dweight + c, n);
        fsdpc_vf_store_n(row->dweight + c, fsdpc_vf_fma(v.dy, v.xhat, sum), n);
    }
    if (row->dbias)
        fsdpc_vf_store_n(row->dbias + c, fsdpc_vf_load_n(row->dbias + c, n) + v.dy, n);
}

FSDPC_INLINE void norm_backward_row(norm_row *row, fsdpc_dtype dtype, bool weight)
{
    size_t c = 0, cols = row->args->cols;
    norm_backward_means(row, dtype, weight);
    FSDPC_EACH_VECTOR(c, n, cols, norm_backward_step(row, c, n, dtype, weight));
}

/* Processes the row blocks [first, last). */
FSDPC_INLINE void norm_backward_range(const norm_plan *plan, size_t first, size_t last,
                                      fsdpc_dtype dtype)
{
    const fsdpc_norm_args own = *plan->args, *args = &own; /* cannot alias stored values */
    for (size_t block = first; block < last; block++) {
        norm_row row = {.args = args};
        row.dweight = plan->dweight ? plan->dweight + block * args->cols : NULL;
        row.dbias = plan->dbias ? plan->dbias + block * args->cols : NULL;
        if (row.dweight)
            memset(row.dweight, 0, args->cols * sizeof *row.dweight);
        if (row.dbias)
            memset(row.dbias, 0, args->cols * sizeof *row.dbias);
        size_t r = block * plan->block_rows;
        size_t end = fsdpc_min_size(r + plan->block_rows, args->rows);
        for (; r < end; r++) {
            row.at = r * args->cols;
            row.mean = args->layer ? args->mean[r] : 0;
            row.rstd = args->rstd[r];
            if (args->weight)
                norm_backward_row(&row, dtype, true);
            else
                norm_backward_row(&row, dtype, false);
        }
    }
}

NN_FLOAT_KERNELS(norm_backward_range, norm_plan, NULL)

/* target[c] (+)= sum over blocks of partial[block][c], for columns [first, last) */
static void norm_add_blocks(const float *partial, const norm_plan *plan, void *target,
                            bool accumulate, size_t first, size_t last)
{
    const fsdpc_norm_args *args = plan->args;
    for (size_t c = first; c < last; c++) {
        float sum = 0;
        for (size_t block = 0; block < plan->blocks; block++)
            sum += partial[block * args->cols + c];
        if (args->dgrad_dtype == FSDPC_F64)
            ((double *)target)[c] = sum + (accumulate ? ((double *)target)[c] : 0);
        else
            fsdpc_f32_store_as(target, c, args->dgrad_dtype,
                               accumulate ? sum + fsdpc_f32_load_as(target, c, args->dgrad_dtype)
                                          : sum);
    }
}

static void norm_backward_columns(const void *arg, size_t first, size_t last)
{
    const norm_plan *plan = arg;
    const fsdpc_norm_args *args = plan->args;
    if (args->dweight)
        norm_add_blocks(plan->dweight, plan, args->dweight, args->dweight_accumulate, first, last);
    if (args->dbias)
        norm_add_blocks(plan->dbias, plan, args->dbias, args->dbias_accumulate, first, last);
}

static fsdpc_status norm_backward(const fsdpc_norm_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "a norm"));
    if (args->dweight || args->dbias)
        FSDPC_TRY(nn_check_float(args->dgrad_dtype, "a norm's gradient"));
    if (args->dtype == FSDPC_F64) {
        fsdpc_nn_norm_backward_f64(args);
        return FSDPC_OK;
    }
    norm_plan plan = {.args = args};
    plan.block_rows = fsdpc_max_size(32, fsdpc_ceil_div(args->rows, 256));
    plan.blocks = fsdpc_ceil_div(args->rows, plan.block_rows);
    size_t cells, wanted = (args->dweight != NULL) + (args->dbias != NULL);
    FSDPC_TRY(fsdpc_mul_size(plan.blocks, args->cols * wanted * sizeof(float), &cells));
    void *partial = NULL;
    if (cells) {
        FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, cells, &partial));
        plan.dweight = args->dweight ? partial : NULL;
        plan.dbias =
            args->dbias ? (float *)partial + (wanted - 1) * plan.blocks * args->cols : NULL;
    }
    size_t grain = fsdpc_max_size(nn_row_grain(args->cols) / plan.block_rows, 1);
    nn_for(stream, plan.blocks, grain, norm_backward_range_kernels[args->dtype], &plan);
    if (wanted)
        nn_for(stream, args->cols, nn_row_grain(plan.blocks), norm_backward_columns, &plan);
    fsdpc_device_free(stream->device, partial);
    return FSDPC_OK;
}
