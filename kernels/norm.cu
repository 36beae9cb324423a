/* RMSNorm and LayerNorm over rows, forward and backward; twin of csrc/ops/nn_norm_body.h.
 *
 * A block handles one row at a time. Rows that consist of whole vectors and are not too long are
 * read only once. Each thread holds its part of a row in registers while the block sums, and
 * meanwhile loads its part of the next row. Other rows are read again for each use, one element at
 * a time.
 *
 * dweight and dbias sum over rows, in chunks whose number only depends on the shape. For rows held
 * in registers, each block processes one chunk, and each thread sums its columns in registers while
 * computing dx. For other rows, a second kernel reads x and dy again, with one block for every 32
 * columns of a chunk. A last kernel adds the chunks in a fixed order.
 */
#include "rows.cuh"

enum { NORM_COLS = 32, NORM_ROWS = 8, NORM_CHUNK = 8, NORM_CHUNKS_MAX = 512 };

/* Row statistics for backward, either stored by forward or, for F64, recomputed. */
template <typename W> struct norm_rows {
    const W *mean, *rstd;
};

/* The buffer in which backward stores its sums over chunks of rows: `chunks` rows for dweight,
 * followed by `chunks` rows for dbias. */
template <typename W> struct norm_sums {
    W *at; /* NULL: not needed */
    size_t chunk_rows, chunks;
};

/* -- held rows --------------------------------------------------------------------------------- */

template <typename T, int HELD>
static __global__ void __launch_bounds__(BLOCK_THREADS) norm_held_kernel(fsdpc_norm_args a)
{
    typedef wide<T> W;
    typedef held_row<T, HELD> held;
    const unsigned cols = (unsigned)a.cols;
    const T *x = (const T *)a.x;
    const held weight((const T *)a.weight, cols, 1), bias((const T *)a.bias, cols, 0);
    held next(x + blockIdx.x * a.cols, cols, 0);
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        vec<W, held::N> v[HELD];
        W mean = 0, square = 0;
        FSDPC_FOR_HELD(held, j)
        {
            v[j] = next.at(j);
            for (int k = 0; k < held::N; k++)
                mean += v[j].at[k]; /* zeros beyond the end of the row */
        }
        if (r + gridDim.x < a.rows)
            next = held(x + (r + gridDim.x) * a.cols, cols, 0);
        mean = a.layer ? block_sum(mean) / (W)cols : (W)0;
        FSDPC_FOR_HELD(held, j)
        for (int k = 0; k < held::N; k++) {
            v[j].at[k] = held::column(j) < cols ? v[j].at[k] - mean : (W)0;
            square += v[j].at[k] * v[j].at[k];
        }
        W rstd = (W)1 / sqrt(block_sum(square) / (W)cols + (W)a.eps);
        if (threadIdx.x == 0 && a.mean)
            a.mean[r] = (float)mean;
        if (threadIdx.x == 0 && a.rstd)
            a.rstd[r] = (float)rstd;
        FSDPC_FOR_HELD(held, j)
        {
            vec<W, held::N> w = weight.at(j), add = bias.at(j);
            for (int k = 0; k < held::N; k++)
                v[j].at[k] = v[j].at[k] * rstd * w.at[k] + add.at[k];
        }
        held::store((T *)a.y + r * a.cols, cols, v);
    }
}

/* Computes dx for a chunk of rows, and the chunk's sums for dweight and dbias. */
template <typename T, int HELD, bool BIAS>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_held_backward_kernel(fsdpc_norm_args a, norm_rows<wide<T>> rows, norm_sums<wide<T>> sums)
{
    typedef wide<T> W;
    typedef held_row<T, HELD> held;
    const unsigned cols = (unsigned)a.cols;
    const T *x = (const T *)a.x, *dy = (const T *)a.dy;
    const held weight((const T *)a.weight, cols, 1);
    vec<W, held::N> dweight[HELD] = {}, dbias[HELD] = {};
    size_t first = blockIdx.x * sums.chunk_rows;
    size_t last = first + sums.chunk_rows < a.rows ? first + sums.chunk_rows : a.rows;
    held next_x(x + first * a.cols, cols, 0), next_dy(dy + first * a.cols, cols, 0);
    for (size_t r = first; r < last; r++) {
        const held old(a.dx_accumulate ? (const T *)a.dx + r * a.cols : NULL, cols, 0);
        vec<W, held::N> each[HELD], xhat[HELD];
        W rstd = rows.rstd[r], shift = a.layer ? -rows.mean[r] * rstd : (W)0, g = 0, gx = 0;
        FSDPC_FOR_HELD(held, j) /* dy is zero beyond the end of the row, so all sums are too */
        {
            vec<W, held::N> v = next_x.at(j), d = next_dy.at(j), w = weight.at(j);
            for (int k = 0; k < held::N; k++) {
                xhat[j].at[k] = v.at[k] * rstd + shift;
                each[j].at[k] = d.at[k] * w.at[k];
                g += each[j].at[k];
                gx += each[j].at[k] * xhat[j].at[k];
                dweight[j].at[k] += d.at[k] * xhat[j].at[k];
                if (BIAS)
                    dbias[j].at[k] += d.at[k];
            }
        }
        if (r + 1 < last) {
            next_x = held(x + (r + 1) * a.cols, cols, 0);
            next_dy = held(dy + (r + 1) * a.cols, cols, 0);
        }
        g = a.layer ? block_sum(g) / (W)cols : (W)0;
        gx = block_sum(gx) / (W)cols;
        FSDPC_FOR_HELD(held, j)
        {
            vec<W, held::N> add = old.at(j);
            for (int k = 0; k < held::N; k++)
                each[j].at[k] = (each[j].at[k] - g - xhat[j].at[k] * gx) * rstd + add.at[k];
        }
        held::store((T *)a.dx + r * a.cols, a.dx ? cols : 0, each);
    }
    if (!sums.at)
        return;
    held::store(sums.at + blockIdx.x * a.cols, cols, dweight);
    if (BIAS)
        held::store(sums.at + (sums.chunks + blockIdx.x) * a.cols, cols, dbias);
}

/* -- other rows -------------------------------------------------------------------------------- */

/* Computes the statistics of the block's row at x. */
template <typename T>
__device__ __forceinline__ void norm_statistics(const fsdpc_norm_args &a, const T *x,
                                                wide<T> *mean_out, wide<T> *rstd_out)
{
    typedef wide<T> W;
    W mean = 0, square = 0;
    if (a.layer) {
        FSDPC_FOR_ROW(1, c, a.cols)
        mean += widen<W>(x[c]);
        mean = block_sum(mean) / (W)a.cols;
    }
    FSDPC_FOR_ROW(1, c, a.cols)
    square += (widen<W>(x[c]) - mean) * (widen<W>(x[c]) - mean);
    *mean_out = mean;
    *rstd_out = (W)1 / sqrt(block_sum(square) / (W)a.cols + (W)a.eps);
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS) norm_kernel(fsdpc_norm_args a)
{
    typedef wide<T> W;
    const T *weight = (const T *)a.weight, *bias = (const T *)a.bias;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols;
        W mean, rstd;
        norm_statistics<T>(a, x, &mean, &rstd);
        if (threadIdx.x == 0 && a.mean)
            a.mean[r] = (float)mean;
        if (threadIdx.x == 0 && a.rstd)
            a.rstd[r] = (float)rstd;
        FSDPC_FOR_ROW(1, c, a.cols)
        {
            W y = (widen<W>(x[c]) - mean) * rstd;
            y = weight ? y * widen<W>(weight[c]) : y;
            ((T *)a.y)[r * a.cols + c] = narrow<T>(bias ? y + widen<W>(bias[c]) : y);
        }
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_statistics_kernel(fsdpc_norm_args a, double *mean, double *rstd)
{
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        double row_mean, row_rstd;
        norm_statistics<double>(a, (const double *)a.x + r * a.cols, &row_mean, &row_rstd);
        if (threadIdx.x == 0) {
            mean[r] = row_mean;
            rstd[r] = row_rstd;
        }
    }
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    norm_backward_kernel(fsdpc_norm_args a, norm_rows<wide<T>> rows)
{
    typedef wide<T> W;
    const T *weight = (const T *)a.weight;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols, *dy = (const T *)a.dy + r * a.cols;
        W mean = a.layer ? rows.mean[r] : (W)0, rstd = rows.rstd[r], g = 0, gx = 0;
        FSDPC_FOR_ROW(1, c, a.cols)
        {
            W each = weight ? widen<W>(dy[c]) * widen<W>(weight[c]) : widen<W>(dy[c]);
            g += each;
            gx += each * ((widen<W>(x[c]) - mean) * rstd);
        }
        g = a.layer ? block_sum(g) / (W)a.cols : (W)0;
        gx = block_sum(gx) / (W)a.cols;
        FSDPC_FOR_ROW(1, c, a.cols)
        {
            W each = weight ? widen<W>(dy[c]) * widen<W>(weight[c]) : widen<W>(dy[c]);
            W xhat = (widen<W>(x[c]) - mean) * rstd;
            T *dx = (T *)a.dx + r * a.cols + c;
            W sum = (each - g - xhat * gx) * rstd;
            *dx = narrow<T>(a.dx_accumulate ? sum + widen<W>(*dx) : sum);
        }
    }
}

/* Computes a chunk's sums for 32 columns. */
template <typename T>
static __global__ void __launch_bounds__(NORM_COLS *NORM_ROWS)
    norm_columns_kernel(fsdpc_norm_args a, norm_rows<wide<T>> rows, norm_sums<wide<T>> sums)
{
    typedef wide<T> W;
    __shared__ W parts[2][NORM_ROWS][NORM_COLS];
    size_t col_blocks = (a.cols + NORM_COLS - 1) / NORM_COLS;
    unsigned lane = threadIdx.x % NORM_COLS, row = threadIdx.x / NORM_COLS;
    for (size_t item = blockIdx.x; item < col_blocks * sums.chunks; item += gridDim.x) {
        size_t c = item % col_blocks * NORM_COLS + lane, chunk = item / col_blocks;
        size_t first = chunk * sums.chunk_rows;
        size_t last = first + sums.chunk_rows < a.rows ? first + sums.chunk_rows : a.rows;
        W dweight = 0, dbias = 0;
        for (size_t r = first + row; r < last && c < a.cols; r += NORM_ROWS) {
            W d = widen<W>(((const T *)a.dy)[r * a.cols + c]);
            W mean = a.layer ? rows.mean[r] : (W)0;
            dweight += d * ((widen<W>(((const T *)a.x)[r * a.cols + c]) - mean) * rows.rstd[r]);
            dbias += d;
        }
        parts[0][row][lane] = dweight;
        parts[1][row][lane] = dbias;
        __syncthreads();
        if (row == 0 && c < a.cols) {
            for (int r = 1; r < NORM_ROWS; r++) {
                dweight += parts[0][r][lane];
                dbias += parts[1][r][lane];
            }
            sums.at[chunk * a.cols + c] = dweight;
            sums.at[(sums.chunks + chunk) * a.cols + c] = dbias;
        }
        __syncthreads();
    }
}

/* -- both kinds of rows ------------------------------------------------------------------------ */

/* target[c] (+)= the chunks' sums: each thread adds every 32nd, then one thread adds the threads'
 * sums. */
template <typename Out, typename W>
static __global__ void __launch_bounds__(NORM_COLS *NORM_COLS)
    norm_finish_kernel(Out *target, const W *sums, size_t cols, size_t chunks, bool accumulate)
{
    typedef decltype(W() + wide<Out>()) Total;
    __shared__ W parts[NORM_COLS][NORM_COLS];
    unsigned lane = threadIdx.x % NORM_COLS, row = threadIdx.x / NORM_COLS;
    size_t c = (size_t)blockIdx.x * NORM_COLS + lane;
    W sum = 0;
    for (size_t chunk = row; chunk < chunks && c < cols; chunk += NORM_COLS)
        sum += sums[chunk * cols + c];
    parts[row][lane] = sum;
    __syncthreads();
    if (row > 0 || c >= cols)
        return;
    for (int r = 1; r < NORM_COLS; r++)
        sum += parts[r][lane];
    target[c] = narrow<Out>(accumulate ? (Total)sum + widen<Total>(target[c]) : (Total)sum);
}

template <typename W>
static void norm_finish(const fsdpc_norm_args *a, const norm_sums<W> &sums,
                        const fsdpc_cuda_queue *queue)
{
    unsigned grid = (unsigned)fsdpc_ceil_div(a->cols, NORM_COLS);
    FSDPC_FOR_FLOAT(a->dgrad_dtype, Out, {
        if (a->dweight)
            FSDPC_LAUNCH((norm_finish_kernel<Out, W>), grid, NORM_COLS * NORM_COLS, 0, queue,
                         (Out *)a->dweight, sums.at, a->cols, sums.chunks, a->dweight_accumulate);
        if (a->dbias)
            FSDPC_LAUNCH((norm_finish_kernel<Out, W>), grid, NORM_COLS * NORM_COLS, 0, queue,
                         (Out *)a->dbias, sums.at + sums.chunks * a->cols, a->cols, sums.chunks,
                         a->dbias_accumulate);
    })
}

extern "C" fsdpc_status fsdpc_cuda_norm(const fsdpc_norm_args *a, fsdpc_stream *stream)
{
    if (a->rows == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {a->x, a->y, a->weight, a->bias};
    unsigned grid = row_grid(queue, a->rows);
    FSDPC_FOR_FLOAT(a->dtype, T, {
        unsigned threads = row_threads(a->cols / (16 / sizeof(T)));
        switch (rows_held<T>(a->cols, bases)) {
        case 2:
            FSDPC_LAUNCH((norm_held_kernel<T, 2>), grid, threads, 0, queue, *a);
            break;
        case 4:
            FSDPC_LAUNCH((norm_held_kernel<T, 4>), grid, threads, 0, queue, *a);
            break;
        default:
            FSDPC_LAUNCH((norm_kernel<T>), grid, row_threads(a->cols), 0, queue, *a);
        }
    })
    return launched("a norm");
}

template <typename T, int HELD>
static void held_backward(const fsdpc_norm_args *a, const norm_rows<wide<T>> &rows,
                          const norm_sums<wide<T>> &sums, const fsdpc_cuda_queue *queue)
{
    unsigned grid = (unsigned)sums.chunks, threads = row_threads(a->cols / (16 / sizeof(T)));
    if (a->dbias)
        FSDPC_LAUNCH((norm_held_backward_kernel<T, HELD, true>), grid, threads, 0, queue, *a, rows,
                     sums);
    else
        FSDPC_LAUNCH((norm_held_backward_kernel<T, HELD, false>), grid, threads, 0, queue, *a, rows,
                     sums);
}

template <typename T>
static void chunks_backward(const fsdpc_norm_args *a, const norm_rows<wide<T>> &rows,
                            const norm_sums<wide<T>> &sums, const fsdpc_cuda_queue *queue)
{
    const void *bases[] = {a->x, a->dy, a->weight, a->dx};
    switch (rows_held<T>(a->cols, bases)) {
    case 2:
        held_backward<T, 2>(a, rows, sums, queue);
        return;
    case 4:
        held_backward<T, 4>(a, rows, sums, queue);
        return;
    default:
        break;
    }
    if (a->dx)
        FSDPC_LAUNCH((norm_backward_kernel<T>), row_grid(queue, a->rows), row_threads(a->cols), 0,
                     queue, *a, rows);
    if (sums.at)
        FSDPC_LAUNCH(norm_columns_kernel<T>,
                     grid_of(queue, fsdpc_ceil_div(a->cols, NORM_COLS) * sums.chunks, 1),
                     NORM_COLS * NORM_ROWS, 0, queue, *a, rows, sums);
}

template <typename T>
static fsdpc_status backward_launch(const fsdpc_norm_args *a, const norm_rows<wide<T>> &rows,
                                    fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    norm_sums<wide<T>> sums = {};
    sums.chunk_rows = fsdpc_max_size(NORM_CHUNK, fsdpc_ceil_div(a->rows, NORM_CHUNKS_MAX));
    sums.chunks = fsdpc_ceil_div(a->rows, sums.chunk_rows);
    void *memory = NULL;
    if (a->dweight || a->dbias) {
        size_t bytes;
        FSDPC_TRY(fsdpc_mul_size(sums.chunks * 2 * sizeof(wide<T>), a->cols, &bytes));
        FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
        sums.at = (wide<T> *)memory;
    }
    if (a->rows)
        chunks_backward<T>(a, rows, sums, queue);
    if (sums.at)
        norm_finish(a, sums, queue);
    fsdpc_device_free(stream->device, memory);
    return launched("a norm's backward");
}

/* Recomputes the statistics in F64, because the arguments have only fp32 arrays for them. */
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
