/* Embedding rows and rotary position embedding (see nn_internal.h for how bodies are compiled).
 *
 * embedding_backward sorts the positions by id (a counting sort, which keeps equal ids in order).
 * It then computes each table row once, summing over the row's positions in order in fp32 and
 * rounding once. Any split of the table thus gives the same bits, and a row without ids costs only
 * a comparison or a fill.
 */

#define EMBEDDING_PICK(type, id_type)                                                              \
    do {                                                                                           \
        const type *table = args->table;                                                           \
        const id_type *ids = args->ids;                                                            \
        for (size_t i = first; i < last; i++)                                                      \
            ((type *)args->out)[i] = table[ids[i]];                                                \
        return;                                                                                    \
    } while (0)

static void embedding_range(const void *arg, size_t first, size_t last)
{
    const fsdpc_embedding_args own = *(const fsdpc_embedding_args *)arg, *args = &own;
    size_t bytes = args->dim * fsdpc_dtype_bytes(args->dtype);
    if (args->dim == 1 && args->id_dtype == FSDPC_I64) { /* single elements, as in gather */
        if (bytes == 4)
            EMBEDDING_PICK(uint32_t, int64_t);
        if (bytes == 2)
            EMBEDDING_PICK(uint16_t, int64_t);
        if (bytes == 8)
            EMBEDDING_PICK(uint64_t, int64_t);
    }
    for (size_t i = first; i < last; i++)
        memcpy((char *)args->out + i * bytes,
               (const char *)args->table +
                   (size_t)fsdpc_nn_load_id(args->ids, i, args->id_dtype) * bytes,
               bytes);
}

static fsdpc_status embedding(const fsdpc_embedding_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_nn_embedding_check(args));
    if (args->dim)
        nn_for(stream, args->count, nn_row_grain(args->dim), embedding_range, args);
    return FSDPC_OK;
}

enum { EMBEDDING_COLS = 512 };

FSDPC_INLINE void embedding_store(const fsdpc_embedding_args *args, size_t at, const float *sum,
                                  size_t cols, fsdpc_dtype dtype)
{
    for (size_t c = 0; c < cols; c += FSDPC_LANES) {
        size_t n = fsdpc_min_size(FSDPC_LANES, cols - c);
        fsdpc_vf v = fsdpc_vf_load_n(sum + c, n);
        if (args->accumulate)
            v = v + fsdpc_vf_load_as_n(args->dtable, at + c, dtype, n);
        fsdpc_vf_store_as_n(args->dtable, at + c, dtype, v, n);
    }
}

FSDPC_INLINE void embedding_backward_row(const nn_embedding_plan *plan, size_t row,
                                         fsdpc_dtype dtype)
{
    const fsdpc_embedding_args *args = plan->args;
    for (size_t col = 0; col < args->dim; col += EMBEDDING_COLS) {
        float sum[EMBEDDING_COLS] = {0};
        size_t cols = fsdpc_min_size(EMBEDDING_COLS, args->dim - col);
        for (size_t k = plan->starts[row]; k < plan->starts[row + 1]; k++)
            sum_add_row(sum, args->dout, plan->order[k] * args->dim + col, cols, dtype, false);
        size_t at = row * args->dim + col;
        if (args->dtable_dtype == FSDPC_F32)
            embedding_store(args, at, sum, cols, FSDPC_F32);
        else if (args->dtable_dtype == FSDPC_BF16)
            embedding_store(args, at, sum, cols, FSDPC_BF16);
        else
            embedding_store(args, at, sum, cols, FSDPC_F16);
    }
}

FSDPC_INLINE void embedding_backward_range(const nn_embedding_plan *plan, size_t first, size_t last,
                                           fsdpc_dtype dtype)
{
    const fsdpc_embedding_args *args = plan->args;
    size_t bytes = args->dim * fsdpc_dtype_bytes(args->dtable_dtype);
    for (size_t row = first; row < last; row++)
        if (plan->starts[row] != plan->starts[row + 1])
            embedding_backward_row(plan, row, dtype);
        else if (!args->accumulate)
            memset((char *)args->dtable + row * bytes, 0, bytes);
}

/* Single elements, as in scatter_add, are added directly to their rows in the order of the ids,
 * which gives the same sums without sorting. Each part scans all ids for those in its row range.
 * `sums` is fp32 memory for all rows. */
typedef struct embedding_adding {
    const fsdpc_embedding_args *args;
    float *sums;
} embedding_adding;

static void embedding_add_range(const void *arg, size_t first, size_t last)
{
    const fsdpc_embedding_args *args = ((const embedding_adding *)arg)->args;
    float *sums = ((const embedding_adding *)arg)->sums, block[UNARY_BLOCK];
    memset(sums + first, 0, (last - first) * sizeof *sums);
    for (size_t i = 0; i < args->count; i += UNARY_BLOCK) {
        size_t n = fsdpc_min_size(UNARY_BLOCK, args->count - i);
        if (args->dtype == FSDPC_F32)
            memcpy(block, (const float *)args->dout + i, n * sizeof *block);
        else if (args->dtype == FSDPC_BF16)
            widen(block, args->dout, i, n, FSDPC_BF16);
        else
            widen(block, args->dout, i, n, FSDPC_F16);
        for (size_t k = 0; k < n; k++) {
            size_t row = (size_t)fsdpc_nn_load_id(args->ids, i + k, args->id_dtype);
            if (row - first < last - first)
                sums[row] += block[k];
        }
    }
    if (args->dtable_dtype == FSDPC_BF16)
        narrow(args->dtable, first, sums + first, last - first, FSDPC_BF16);
    else if (args->dtable_dtype == FSDPC_F16)
        narrow(args->dtable, first, sums + first, last - first, FSDPC_F16);
}

static fsdpc_status embedding_add(const fsdpc_embedding_args *args, fsdpc_stream *stream)
{
    embedding_adding adding = {args, args->dtable};
    void *memory = NULL;
    if (args->dtable_dtype != FSDPC_F32) {
        size_t bytes;
        FSDPC_TRY(fsdpc_mul_size(args->rows, sizeof(float), &bytes));
        FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
        adding.sums = memory;
    }
    size_t threads = (size_t)fsdpc_team_threads(stream->device->team);
    nn_for(stream, args->rows, fsdpc_max_size(NN_GRAIN, args->rows / threads), embedding_add_range,
           &adding);
    if (memory)
        fsdpc_device_free(stream->device, memory);
    return FSDPC_OK;
}

NN_FLOAT_KERNELS(embedding_backward_range, nn_embedding_plan, fsdpc_nn_embedding_backward_wide)

static fsdpc_status embedding_backward(const fsdpc_embedding_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "an embedding"));
    FSDPC_TRY(nn_check_float(args->dtable_dtype, "an embedding's gradient"));
    FSDPC_TRY(fsdpc_nn_embedding_check(args));
    if (args->dim == 0)
        return FSDPC_OK;
    bool wide = args->dtype == FSDPC_F64 || args->dtable_dtype == FSDPC_F64;
    if (args->dim == 1 && !wide && !args->accumulate)
        return embedding_add(args, stream);
    nn_embedding_plan plan = {.args = args};
    size_t words, bytes;
    FSDPC_TRY(fsdpc_add_size(args->rows + 1, args->count, &words));
    FSDPC_TRY(fsdpc_mul_size(words, sizeof(size_t), &bytes));
    void *memory;
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
    plan.starts = memory;
    plan.order = plan.starts + args->rows + 1;
    fsdpc_nn_embedding_sort(&plan);
    nn_for(stream, args->rows, nn_row_grain(args->dim),
           embedding_backward_range_kernels[wide ? FSDPC_F64 : args->dtype], &plan);
    fsdpc_device_free(stream->device, memory);
    return FSDPC_OK;
}

/* -- rotary ------------------------------------------------------------------------------------ */

FSDPC_INLINE void rotary_step(const fsdpc_rotary_args *args, size_t at, size_t angle, size_t half,
                              size_t n, fsdpc_dtype dtype)
{
    fsdpc_vf cosine = fsdpc_vf_load_n(args->cosines + angle, n);
    fsdpc_vf sine = fsdpc_vf_load_n(args->sines + angle, n);
    fsdpc_vf a = fsdpc_vf_load_as_n(args->x, at, dtype, n);
    fsdpc_vf b = fsdpc_vf_load_as_n(args->x, at + half, dtype, n);
    if (args->inverse)
        sine = -sine;
    fsdpc_vf_store_as_n(args->y, at, dtype, a * cosine - b * sine, n);
    fsdpc_vf_store_as_n(args->y, at + half, dtype, b * cosine + a * sine, n);
}

/* Rows are (batch, token). */
FSDPC_INLINE void rotary_range(const fsdpc_rotary_args *args, size_t first, size_t last,
                               fsdpc_dtype dtype)
{
    size_t half = args->dim / 2;
    for (size_t row = first; row < last; row++)
        for (size_t head = 0; head < args->heads; head++) {
            size_t at = (row * args->heads + head) * args->dim, i = 0;
            size_t angle = row % args->tokens * half;
            FSDPC_EACH_VECTOR(i, n, half, rotary_step(args, at + i, angle + i, half, n, dtype));
        }
}

NN_FLOAT_KERNELS(rotary_range, fsdpc_rotary_args, fsdpc_nn_rotary_f64)

static fsdpc_status rotary(const fsdpc_rotary_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "rotary embedding"));
    if (args->dim % 2)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "rotary embedding of %zu elements a head: make it even",
                          args->dim);
    nn_for(stream, args->batch * args->tokens, nn_row_grain(args->heads * args->dim),
           rotary_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
