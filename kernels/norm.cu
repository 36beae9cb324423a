/* RMSNorm and LayerNorm over rows, forward and backward; twin of csrc/ops/nn_norm_body.h.
 *
 * Backward in two kernels.  dx is a row's own, a block a row.  dweight and dbias sum over rows: a
 * block takes 32 columns and a chunk of rows, whose number depends on the shape alone, and a last
 * kernel adds the chunks in order.  The second reads x and dy again, which the cache mostly has.
 */
#include "rows.cuh"

enum { NORM_COLS = 32, NORM_ROWS = 8, NORM_CHUNK = 128, NORM_CHUNKS_MAX = 256 };

/* Statistics of rows as backward reads them: what forward kept, or, for F64, its own. */
template <typename W> struct norm_rows {
    const W *mean, *rstd;
};

/* Of the block's row at x. */
template <typename T, int N>
__device__ __forceinline__ void norm_statistics(const fsdpc_norm_args &a, const T *x,
                                                wide<T> *mean_out, wide<T> *rstd_out)
{
    typedef wide<T> W;
    W mean = 0, square = 0;
    if (a.layer) {
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
            for (int k = 0; k < N; k++)
                mean += v.at[k];
        }
        mean = block_sum(mean) / (W)a.cols;
    }
    FSDPC_FOR_ROW(N, c, a.cols)
    {
        vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
        for (int k = 0; k < N; k++)
            square += (v.at[k] - mean) * (v.at[k] - mean);
    }
    *mean_out = mean;
    *rstd_out = (W)1 / sqrt(block_sum(square) / (W)a.cols + (W)a.eps);
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS) norm_kernel(fsdpc_norm_args a)
{
    typedef wide<T> W;
    const T *weight = (const T *)a.weight, *bias = (const T *)a.bias;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols;
        W mean, rstd;
        norm_statistics<T, N>(a, x, &mean, &rstd);
        if (threadIdx.x == 0 && a.mean)
            a.mean[r] = (float)mean;
        if (threadIdx.x == 0 && a.rstd)
            a.rstd[r] = (float)rstd;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c), w = {}, b = {};
            if (weight)
                w = load_wide<N, W>(weight + c);
            if (bias)
                b = load_wide<N, W>(bias + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                W y = (v.at[k] - mean) * rstd;
                y = weight ? y * w.at[k] : y;
                v.at[k] = bias ? y + b.at[k] : y;
            }
            store_narrow<N>((T *)a.y + r * a.cols + c, v);
        }
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_statistics_kernel(fsdpc_norm_args a, double *mean, double *rstd)
{
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        double row_mean, row_rstd;
        norm_statistics<double, 1>(a, (const double *)a.x + r * a.cols, &row_mean, &row_rstd);
        if (threadIdx.x == 0) {
            mean[r] = row_mean;
            rstd[r] = row_rstd;
        }
    }
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_backward_kernel(fsdpc_norm_args a, norm_rows<wide<T>> rows)
{
    typedef wide<T> W;
    const T *weight = (const T *)a.weight;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols, *dy = (const T *)a.dy + r * a.cols;
        W mean = a.layer ? rows.mean[r] : (W)0, rstd = rows.rstd[r], g = 0, gx = 0;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c), d = load_wide<N, W>(dy + c), w = {};
            if (weight)
                w = load_wide<N, W>(weight + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                W each = weight ? d.at[k] * w.at[k] : d.at[k];
                g += each;
                gx += each * ((v.at[k] - mean) * rstd);
            }
        }
        g = a.layer ? block_sum(g) / (W)a.cols : (W)0;
        gx = block_sum(gx) / (W)a.cols;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c), d = load_wide<N, W>(dy + c), w = {};
            if (weight)
                w = load_wide<N, W>(weight + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                W each = weight ? d.at[k] * w.at[k] : d.at[k], xhat = (v.at[k] - mean) * rstd;
                v.at[k] = (each - g - xhat * gx) * rstd;
            }
            store_narrow<N>((T *)a.dx + r * a.cols + c, v);
        }
    }
}

/* Sums over rows [chunk * chunk_rows, ...) of 32 columns; dbias' sums stand behind dweight's. */
template <typename T>
static __global__ void __launch_bounds__(NORM_COLS *NORM_ROWS)
    norm_columns_kernel(fsdpc_norm_args a, norm_rows<wide<T>> rows, wide<T> *partial,
                        size_t chunk_rows, size_t chunks)
{
    typedef wide<T> W;
    __shared__ W sums[2][NORM_ROWS][NORM_COLS];
    size_t col_blocks = (a.cols + NORM_COLS - 1) / NORM_COLS;
    unsigned lane = threadIdx.x % NORM_COLS, row = threadIdx.x / NORM_COLS;
    for (size_t item = blockIdx.x; item < col_blocks * chunks; item += gridDim.x) {
        size_t c = item % col_blocks * NORM_COLS + lane, chunk = item / col_blocks;
        size_t last = (chunk + 1) * chunk_rows < a.rows ? (chunk + 1) * chunk_rows : a.rows;
        W dweight = 0, dbias = 0;
        for (size_t r = chunk * chunk_rows + row; r < last && c < a.cols; r += NORM_ROWS) {
            W d = widen<W>(((const T *)a.dy)[r * a.cols + c]);
            W mean = a.layer ? rows.mean[r] : (W)0;
            dweight += d * ((widen<W>(((const T *)a.x)[r * a.cols + c]) - mean) * rows.rstd[r]);
            dbias += d;
        }
        sums[0][row][lane] = dweight;
        sums[1][row][lane] = dbias;
        __syncthreads();
        if (row == 0 && c < a.cols) {
            for (int r = 1; r < NORM_ROWS; r++) {
                dweight += sums[0][r][lane];
                dbias += sums[1][r][lane];
            }
            partial[chunk * a.cols + c] = dweight;
            partial[(chunks + chunk) * a.cols + c] = dbias;
        }
        __syncthreads();
    }
}

/* target[c] (+)= the chunks' sums, in order */
template <typename Out, typename W>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_finish_kernel(Out *target, const W *partial, size_t cols, size_t chunks, bool accumulate)
{
    typedef decltype(W() + wide<Out>()) Total;
    for (size_t c = grid_thread(); c < cols; c += grid_threads()) {
        W sum = 0;
        for (size_t chunk = 0; chunk < chunks; chunk++)
            sum += partial[chunk * cols + c];
        target[c] = narrow<Out>(accumulate ? (Total)sum + widen<Total>(target[c]) : (Total)sum);
    }
}

template <typename T>
static fsdpc_status norm_columns(const fsdpc_norm_args *a, const norm_rows<wide<T>> &rows,
                                 fsdpc_stream *stream)
{
    typedef wide<T> W;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t chunk_rows = fsdpc_max_size(NORM_CHUNK, fsdpc_ceil_div(a->rows, NORM_CHUNKS_MAX));
    size_t chunks = fsdpc_ceil_div(a->rows, chunk_rows), bytes;
    void *memory;
    FSDPC_TRY(fsdpc_mul_size(chunks * 2 * sizeof(W), a->cols, &bytes));
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
    W *partial = (W *)memory;
    if (chunks) {
        size_t blocks = fsdpc_ceil_div(a->cols, NORM_COLS) * chunks;
        FSDPC_LAUNCH(norm_columns_kernel<T>, grid_of(queue, blocks, 1), NORM_COLS * NORM_ROWS, 0,
                     queue, *a, rows, partial, chunk_rows, chunks);
    }
    unsigned grid = grid_of(queue, a->cols, BLOCK_THREADS);
    FSDPC_FOR_FLOAT(a->dgrad_dtype, Out, {
        if (a->dweight)
            FSDPC_LAUNCH((norm_finish_kernel<Out, W>), grid, BLOCK_THREADS, 0, queue,
                         (Out *)a->dweight, partial, a->cols, chunks, a->dweight_accumulate);
        if (a->dbias)
            FSDPC_LAUNCH((norm_finish_kernel<Out, W>), grid, BLOCK_THREADS, 0, queue,
                         (Out *)a->dbias, partial + chunks * a->cols, a->cols, chunks,
                         a->dbias_accumulate);
    })
    fsdpc_device_free(stream->device, memory);
    return launched("a norm's backward over rows");
}

template <typename T, int N>
static void norm_launch(const fsdpc_norm_args *a, const fsdpc_cuda_queue *queue)
{
    FSDPC_LAUNCH((norm_kernel<T, N>), row_grid(queue, a->rows), row_threads(a->cols / N), 0, queue,
                 *a);
}

extern "C" fsdpc_status fsdpc_cuda_norm(const fsdpc_norm_args *a, fsdpc_stream *stream)
{
    if (a->rows == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {a->x, a->y, a->weight, a->bias};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        if (rows_align<T>(a->cols, bases))
            norm_launch<T, 16 / sizeof(T)>(a, queue);
        else
            norm_launch<T, 1>(a, queue);
    })
    return launched("a norm");
}

template <typename T>
static fsdpc_status backward_launch(const fsdpc_norm_args *a, const norm_rows<wide<T>> &rows,
                                    fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {a->x, a->dy, a->weight, a->dx};
    const int N = 16 / sizeof(T);
    unsigned grid = row_grid(queue, a->rows);
    if (a->dx && a->rows && rows_align<T>(a->cols, bases))
        FSDPC_LAUNCH((norm_backward_kernel<T, N>), grid, row_threads(a->cols / N), 0, queue, *a,
                     rows);
    else if (a->dx && a->rows)
        FSDPC_LAUNCH((norm_backward_kernel<T, 1>), grid, row_threads(a->cols), 0, queue, *a, rows);
    if (a->dweight || a->dbias)
        return norm_columns<T>(a, rows, stream);
    return launched("a norm's backward");
}

/* F64 has its statistics in F64, which the arguments cannot keep. */
static fsdpc_status backward_f64(const fsdpc_norm_args *a, fsdpc_stream *stream)
{
    void *memory;
    FSDPC_TRY(
        fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, 2 * a->rows * sizeof(double), &memory));
    double *mean = (double *)memory, *rstd = mean + a->rows;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    if (a->rows)
        FSDPC_LAUNCH(norm_statistics_kernel, row_grid(queue, a->rows), row_threads(a->cols), 0,
                     queue, *a, mean, rstd);
    norm_rows<double> rows = {mean, rstd};
    fsdpc_status status = backward_launch<double>(a, rows, stream);
    fsdpc_device_free(stream->device, memory);
    return status;
}

extern "C" fsdpc_status fsdpc_cuda_norm_backward(const fsdpc_norm_args *a, fsdpc_stream *stream)
{
    if (a->cols == 0)
        return FSDPC_OK;
    norm_rows<float> rows = {a->mean, a->rstd};
    switch (a->dtype) {
    case FSDPC_F32:
        return backward_launch<float>(a, rows, stream);
    case FSDPC_BF16:
        return backward_launch<bf16>(a, rows, stream);
    case FSDPC_F16:
        return backward_launch<f16>(a, rows, stream);
    default:
        return backward_f64(a, stream);
    }
}
