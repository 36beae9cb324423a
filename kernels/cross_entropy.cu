/* Cross entropy over rows of logits; twin of csrc/ops/nn_cross_entropy_body.h.
 *
 * Forward reads the logits once: every thread computes a maximum and a sum of exponentials relative
 * to it, and the block combines these pairs. One block computes the mean over rows in fp64, in an
 * order that depends only on the number of rows. Backward makes one pass and may overwrite the
 * logits, because each thread, including the target's, writes only elements that it has already
 * read.
 *
 * An out-of-range target is reported as a fault and otherwise ignored.
 */
#include "map.cuh"
#include "rows.cuh"

__device__ __forceinline__ long long target_of(const fsdpc_cross_entropy_args &a, size_t row)
{
    return a.id_dtype == FSDPC_I32 ? ((const int32_t *)a.targets)[row]
                                   : (long long)((const int64_t *)a.targets)[row];
}

/* Returns whether the row contributes to the loss. */
__device__ __forceinline__ bool is_counted(const fsdpc_cross_entropy_args &a, long long target)
{
    return target != a.ignore_index && (unsigned long long)target < a.cols;
}

/* Returns exp(x - top), where top is the maximum so far. As on the CPU, -inf gives 0 even before
 * the first finite value; NaN gives NaN. */
template <typename W> __device__ __forceinline__ W exp_below(W x, W top)
{
    return exp(x - (top > (W)-INFINITY ? top : (W)0));
}

/* Returns the log-sum-exp of the block's row at x to all threads. */
template <typename T, int N> __device__ __forceinline__ wide<T> row_lse(const T *x, size_t cols)
{
    typedef wide<T> W;
    W top = -INFINITY, sum = 0;
    FSDPC_FOR_ROW(N, c, cols)
    {
        vec<W, N> v = load_wide<N, W>(x + c);
        W best = top;
#pragma unroll
        for (int k = 0; k < N; k++)
            best = v.at[k] > best ? v.at[k] : best; /* NaN appears in the sum */
        if (best > top) {
            sum *= exp(top - best);
            top = best;
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            sum += exp_below(v.at[k], top);
    }
    W row_top = block_max(top);
    return row_top + log(block_sum(row_top > top ? sum * exp(top - row_top) : sum));
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    cross_entropy_kernel(fsdpc_cross_entropy_args a, fsdpc_cuda_fault *fault)
{
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        wide<T> lse = a.lse ? row_lse<T, N>((const T *)a.logits + r * a.cols, a.cols) : 0;
        double total = 0;
        if (a.means) {
            FSDPC_FOR_ROW(1, c, a.cols)
            total += widen<double>(((const T *)a.logits)[r * a.cols + c]);
            total = block_sum(total);
        }
        if (threadIdx.x)
            continue;
        if (a.lse)
            a.lse[r] = (float)lse;
        if (a.means)
            a.means[r] = (float)(total / (double)a.cols);
        long long target = target_of(a, r);
        if (target != a.ignore_index && (unsigned long long)target >= a.cols)
            report_fault(fault, FSDPC_CUDA_FAULT_TARGET, target, r, a.cols);
    }
}

/* As in csrc/ops/nn_plan.c. */
template <typename T>
__device__ __forceinline__ double row_loss(const fsdpc_cross_entropy_args &a, size_t r,
                                           long long target)
{
    double x = widen<double>(((const T *)a.logits)[r * a.cols + target]);
    if (!a.lse)
        return -x;
    double lse = a.lse[r], smoothing = a.smoothing;
    if (a.means)
        x = (1 - smoothing) * x + smoothing * (double)a.means[r];
    return lse - x + (double)a.z_loss * lse * lse;
}

/* Runs in one block. */
template <typename T>
static __global__ void __launch_bounds__(1024) cross_entropy_mean_kernel(fsdpc_cross_entropy_args a)
{
    double total = 0;
    unsigned long long count = 0;
    for (size_t r = threadIdx.x; r < a.rows; r += blockDim.x) {
        long long target = target_of(a, r);
        bool counted = is_counted(a, target);
        double loss = counted ? row_loss<T>(a, r, target) : 0;
        if (a.losses)
            a.losses[r] = (float)loss;
        total += loss;
        count += counted;
    }
    total = block_sum(total);
    count = block_sum(count);
    if (threadIdx.x == 0 && a.loss) {
        fsdpc_loss_sum sum = {0, 0};
        if (a.accumulate)
            sum = *a.sum;
        if (count)
            sum.total += (double)(float)(total / (double)count) * (double)count;
        sum.count = a.sums ? 1 : sum.count + count;
        *a.sum = sum;
        *a.loss = sum.count ? (float)(sum.total / (double)sum.count) : NAN;
    }
}

/* Returns the gradient of each row's loss, given that of the mean. */
__device__ __forceinline__ double loss_scale(const fsdpc_loss_sum *sum, const float *dloss)
{
    return sum->count ? (double)*dloss / (double)sum->count : 0.0;
}

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    cross_entropy_backward_kernel(fsdpc_cross_entropy_args a, fsdpc_cuda_fault *fault)
{
    typedef wide<T> W;
    W all = a.dloss ? (W)loss_scale(a.sum, a.dloss) : (W)1;
    W inverse = a.softcap > 0 ? (W)1 / (W)a.softcap : (W)0;
    W smoothing = (W)a.smoothing, even = smoothing / (W)a.cols;
    for (size_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const T *x = (const T *)a.logits + r * a.cols;
        long long target = target_of(a, r);
        bool counted = is_counted(a, target);
        W lse = 0, scale = a.dlosses ? (W)a.dlosses[r] : all;
        if (a.lse)
            lse = sizeof(W) == sizeof(float) ? (W)a.lse[r] : row_lse<T, N>(x, a.cols);
        W factor = (W)1 + (W)2 * (W)a.z_loss * lse;
        FSDPC_FOR_ROW(N, c, a.cols)
        {
            vec<W, N> v = load_wide<N, W>(x + c);
#pragma unroll
            for (int k = 0; k < N; k++) {
                W x = v.at[k] * inverse, slope = (W)1 - x * x;
                W p = a.lse ? exp(v.at[k] - lse) * factor : (W)0;
                W hit = (long long)(c + k) == target ? (W)1 - smoothing : (W)0;
                p = (p - (hit + even)) * scale;
                v.at[k] = !counted ? (W)0 : inverse > (W)0 ? p * slope : p;
            }
            store_narrow<N>((T *)a.dlogits + r * a.cols + c, v);
        }
        if (threadIdx.x == 0 && !counted && target != a.ignore_index)
            report_fault(fault, FSDPC_CUDA_FAULT_TARGET, target, r, a.cols);
    }
}

template <typename T, int N>
static void launch(const fsdpc_cross_entropy_args *a, bool backward, const fsdpc_cuda_queue *queue)
{
    unsigned grid = row_grid(queue, a->rows), threads = row_threads(a->cols / N);
    if (backward)
        FSDPC_LAUNCH((cross_entropy_backward_kernel<T, N>), grid, threads, 0, queue, *a,
                     queue->fault);
    else
        FSDPC_LAUNCH((cross_entropy_kernel<T, N>), grid, threads, 0, queue, *a, queue->fault);
}

extern "C" fsdpc_status fsdpc_cuda_cross_entropy(const fsdpc_cross_entropy_args *a,
                                                 fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {a->logits};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        if (a->rows && rows_align<T>(a->cols, bases))
            launch<T, 16 / sizeof(T)>(a, false, queue);
        else if (a->rows)
            launch<T, 1>(a, false, queue);
        FSDPC_LAUNCH(cross_entropy_mean_kernel<T>, 1, 1024, 0, queue, *a);
    })
    return launched("cross entropy");
}

extern "C" fsdpc_status fsdpc_cuda_cross_entropy_backward(const fsdpc_cross_entropy_args *a,
                                                          fsdpc_stream *stream)
{
    if (a->rows == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    const void *bases[] = {a->logits, a->dlogits};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        if (rows_align<T>(a->cols, bases))
            launch<T, 16 / sizeof(T)>(a, true, queue);
        else
            launch<T, 1>(a, true, queue);
    })
    return launched("cross entropy's backward");
}

template <typename T> struct loss_gradient_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *out;
    const T *x;
    const fsdpc_loss_sum *sum;
    const float *dloss;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<wide<T>, N> v = load_wide<N, wide<T>>(x + i);
        wide<T> scale = (wide<T>)loss_scale(sum, dloss);
#pragma unroll
        for (int k = 0; k < N; k++)
            v.at[k] *= scale;
        store_narrow<N>(out + i, v);
    }
};

extern "C" fsdpc_status fsdpc_cuda_loss_gradient(const fsdpc_loss_gradient_args *a,
                                                 fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {{a->out, bytes}, {a->x, bytes}};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        loss_gradient_op<T> op = {(T *)a->out, (const T *)a->x, a->sum, a->dloss};
        return map_launch("a loss's gradient", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}
