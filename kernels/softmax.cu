/* Softmax and log-softmax over rows; twin of csrc/ops/nn_softmax_body.h.
 *
 * Softmax makes three passes over a row that stays in cache, for the maximum, the sum of
 * exponentials and the result; logsumexp makes two.
 */
#include "rows.cuh"

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS) softmax_kernel(fsdpc_softmax_args a)
{
    typedef wide<T> W;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.x + r * a.cols;
        T *y = (T *)a.out + r * a.cols;
        W top = -INFINITY, sum = 0;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
            for (int k = 0; k < N; k++)
                top = max_values::of(top, v.at[k]);
        }
        top = block_max(top);
        if (a.lse && !isfinite(top))
            top = 0;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
            for (int k = 0; k < N; k++)
                sum += exp(v.at[k] - top);
        }
        sum = block_sum(sum);
        if (a.lse) {
            if (threadIdx.x == 0)
                ((T *)a.lse)[r] = narrow<T>(log(sum) + top);
            continue;
        }
        W scale = a.log ? log(sum) : a.slopes && top == (W)INFINITY ? (W)1 : (W)1 / sum;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                W d = v.at[k] - top;
                v.at[k] = a.log ? d - scale : exp(d) * scale;
            }
            store_narrow<N>(y + c, v);
        }
    }
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    softmax_backward_kernel(fsdpc_softmax_args a)
{
    typedef wide<T> W;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *y = (const T *)a.y + r * a.cols, *dy = (const T *)a.dy + r * a.cols;
        T *dx = (T *)a.out + r * a.cols;
        W dot = 0;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(y + c), d = load_wide<N, W>(dy + c);
#pragma unroll
            for (int k = 0; k < N; k++)
                dot += a.log ? d.at[k] : d.at[k] * v.at[k];
        }
        dot = block_sum(dot);
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(y + c), d = load_wide<N, W>(dy + c);
#pragma unroll
            for (int k = 0; k < N; k++)
                v.at[k] = a.log ? d.at[k] - exp(v.at[k]) * dot : v.at[k] * (d.at[k] - dot);
            store_narrow<N>(dx + c, v);
        }
    }
}

template <typename T, int N>
static void softmax_launch(const fsdpc_softmax_args *a, bool backward,
                           const fsdpc_cuda_queue *queue)
{
    unsigned grid = row_grid(queue, a->rows), threads = row_threads(a->cols / N);
    if (backward)
        FSDPC_LAUNCH((softmax_backward_kernel<T, N>), grid, threads, 0, queue, *a);
    else
        FSDPC_LAUNCH((softmax_kernel<T, N>), grid, threads, 0, queue, *a);
}

static fsdpc_status softmax(const fsdpc_softmax_args *a, bool backward, fsdpc_stream *stream)
{
    if (a->rows == 0 || (a->cols == 0 && !a->lse))
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {backward ? a->y : a->x, backward ? a->dy : NULL, a->out};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        if (rows_align<T>(a->cols, bases))
            softmax_launch<T, 16 / sizeof(T)>(a, backward, queue);
        else
            softmax_launch<T, 1>(a, backward, queue);
    })
    return launched("softmax");
}

extern "C" fsdpc_status fsdpc_cuda_softmax(const fsdpc_softmax_args *args, fsdpc_stream *stream)
{
    return softmax(args, false, stream);
}

extern "C" fsdpc_status fsdpc_cuda_softmax_backward(const fsdpc_softmax_args *args,
                                                    fsdpc_stream *stream)
{
    return softmax(args, true, stream);
}
