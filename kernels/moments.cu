/* Row moments, row sums of gradients, and affine maps of rows; twin of csrc/ops/nn_moments_body.h.
 *
 * Each block handles one row: it computes the mean and then sums the squared deviations from it,
 * reading the row from cache. The sum of the deviations measures the mean's rounding error and is
 * used to correct both results.
 */
#include "rows.cuh"

/* Sums x - shift and its square over the block's row or, with dy, sums dy and dy * (x - shift). */
template <typename T, int N>
__device__ __forceinline__ void moment_sums(const T *x, const T *dy, size_t cols, wide<T> shift,
                                            wide<T> *first_out, wide<T> *second_out)
{
    typedef wide<T> W;
    W first = 0, second = 0;
    FSDPC_FOR_ROW(N, c, cols)
    {
        vec<W, N> v = load_wide<N, W>(x + c), d = {};
        if (dy)
            d = load_wide<N, W>(dy + c);
#pragma unroll
        for (int k = 0; k < N; k++) {
            W away = v.at[k] - shift, other = dy ? d.at[k] : away;
            first += other;
            second += other * away;
        }
    }
    *first_out = block_sum(first);
    *second_out = block_sum(second);
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS) row_moments_kernel(fsdpc_row_moments_args a)
{
    typedef wide<T> W;
    const W *shifts = (const W *)a.shift;
    W *out = (W *)a.out;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols;
        const T *dy = a.dy ? (const T *)a.dy + r * a.cols : NULL;
        W shift = shifts ? shifts[r % a.values] : (W)0, first, second;
        moment_sums<T, N>(x, dy, a.cols, shift, &first, &second);
        if (!dy && a.cols) {
            W near = first / (W)a.cols;
            moment_sums<T, N>(x, dy, a.cols, near, &first, &second);
            W left = first / (W)a.cols;
            second -= left * first;
            first = near + left;
        }
        if (threadIdx.x == 0) {
            out[r] = first;
            out[a.rows + r] = second;
        }
    }
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    row_affine_kernel(fsdpc_row_affine_args args)
{
    typedef wide<T> W;
    const W *shifts = (const W *)args.shift, *as = (const W *)args.a, *bs = (const W *)args.b;
    const W *cs = (const W *)args.c;
    for (size_t r = blockIdx.x; r < args.rows; r += gridDim.x) {
        size_t at = r * args.cols, value = r % args.values;
        const T *x = (const T *)args.x + at, *y = args.y ? (const T *)args.y + at : NULL;
        W shift = shifts ? shifts[value] : (W)0, a = as[value], b = bs ? bs[value] : (W)1;
        W c = cs ? cs[value] : (W)0;
        FSDPC_FOR_ROW(N, i, args.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + i), other = {};
            if (y)
                other = load_wide<N, W>(y + i);
#pragma unroll
            for (int k = 0; k < N; k++) {
                v.at[k] = (v.at[k] - shift) * a + c;
                if (y)
                    v.at[k] += other.at[k] * b;
            }
            store_narrow<N>((T *)args.out + at + i, v);
        }
    }
}

template <typename T>
static void moments_launch(const fsdpc_row_moments_args *a, const fsdpc_cuda_queue *queue)
{
    const int N = 16 / sizeof(T);
    const void *bases[] = {a->x, a->dy};
    unsigned grid = row_grid(queue, a->rows);
    fsdpc_row_moments_args args = *a;
    if (!args.dy)
        args.shift = NULL;
    if (rows_align<T>(a->cols, bases))
        FSDPC_LAUNCH((row_moments_kernel<T, N>), grid, row_threads(a->cols / N), 0, queue, args);
    else
        FSDPC_LAUNCH((row_moments_kernel<T, 1>), grid, row_threads(a->cols), 0, queue, args);
}

template <typename T>
static void affine_launch(const fsdpc_row_affine_args *a, const fsdpc_cuda_queue *queue)
{
    const int N = 16 / sizeof(T);
    const void *bases[] = {a->x, a->y, a->out};
    unsigned grid = row_grid(queue, a->rows);
    if (rows_align<T>(a->cols, bases))
        FSDPC_LAUNCH((row_affine_kernel<T, N>), grid, row_threads(a->cols / N), 0, queue, *a);
    else
        FSDPC_LAUNCH((row_affine_kernel<T, 1>), grid, row_threads(a->cols), 0, queue, *a);
}

extern "C" fsdpc_status fsdpc_cuda_row_moments(const fsdpc_row_moments_args *args,
                                               fsdpc_stream *stream)
{
    if (args->rows == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    FSDPC_FOR_FLOAT(args->dtype, T, moments_launch<T>(args, queue))
    return launched("moments of rows");
}

extern "C" fsdpc_status fsdpc_cuda_row_affine(const fsdpc_row_affine_args *args,
                                              fsdpc_stream *stream)
{
    if (args->rows == 0 || args->cols == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    FSDPC_FOR_FLOAT(args->dtype, T, affine_launch<T>(args, queue))
    return launched("an affine map of rows");
}
