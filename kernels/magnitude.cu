/* The largest magnitude, and clamping by magnitude; twins of csrc/ops/flat_magnitude_body.h.
 *
 * A maximum does not depend on the order of comparisons, so each block folds its own into the
 * result at the end. If any element is NaN, the maximum is NaN, always with the same bits. clamp
 * compares as the CPU does: a NaN is neither above nor below, and stays unchanged.
 */
#include "map.cuh"
#include "reduce.cuh"

/* at[0] = max(at[0], value), where value is nonnegative or the NaN. */
__device__ __forceinline__ void fold_largest(double *at, double value)
{
    unsigned long long *word = (unsigned long long *)at;
    unsigned long long bits = (unsigned long long)__double_as_longlong(value);
    unsigned long long seen = *(volatile unsigned long long *)word;
    while (value > __longlong_as_double((long long)seen) || value != value) {
        unsigned long long before = atomicCAS(word, seen, bits);
        if (before == seen)
            return;
        seen = before;
    }
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    absmax_kernel(const T *x, map_plan p, double *most)
{
    const int WIDTH = 16 / sizeof(T);
    size_t thread = grid_thread(), threads = grid_threads();
    wide<T> largest = 0;
    for (size_t v = thread; v < p.vectors; v += threads) {
        vec<wide<T>, WIDTH> values = load_wide<WIDTH, wide<T>>(x + p.head + v * WIDTH);
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            largest = max_values::of((wide<T>)fabs(values.at[k]), largest);
    }
    size_t in_vectors = p.vectors * WIDTH;
    for (size_t j = thread; j < p.numel - in_vectors; j += threads) {
        size_t i = j < p.head ? j : j + in_vectors;
        largest = max_values::of((wide<T>)fabs(widen<wide<T>>(x[i])), largest);
    }
    largest = block_max(largest);
    if (threadIdx.x == 0)
        fold_largest(most, largest != largest ? (double)NAN : (double)largest);
}

template <typename T> struct clamp_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *x;
    double limit;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        /* rounded to the dtype, so that clamped elements equal it */
        wide<T> high = widen<wide<T>>(narrow<T>(limit)), low = -high;
        vec<wide<T>, N> value = load_wide<N, wide<T>>(x + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            value.at[k] = value.at[k] > high ? high : value.at[k] < low ? low : value.at[k];
        store_narrow<N>(x + i, value);
    }
};

extern "C" fsdpc_status fsdpc_cuda_absmax(const void *x, fsdpc_dtype dtype, size_t numel,
                                          double *max_io, fsdpc_stream *stream)
{
    if (numel == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    map_buffer buffers[] = {{x, fsdpc_dtype_bytes(dtype)}};
    map_plan plan = map_plan_of(numel, 16 / buffers[0].bytes, buffers, 1);
    /* Uses fewer blocks than other kernels, because each block ends with an atomic operation. */
    size_t blocks = fsdpc_ceil_div(numel, (size_t)BLOCK_THREADS * 16);
    size_t grid = fsdpc_min_size(blocks, (size_t)queue->multiprocessors * 8);
    FSDPC_FOR_FLOAT(
        dtype, T,
        FSDPC_LAUNCH(absmax_kernel<T>, grid, BLOCK_THREADS, 0, queue, (const T *)x, plan, max_io))
    return launched("absmax");
}

extern "C" fsdpc_status fsdpc_cuda_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                                         fsdpc_stream *stream)
{
    map_buffer buffers[] = {{x, fsdpc_dtype_bytes(dtype)}};
    FSDPC_FOR_FLOAT(dtype, T, {
        clamp_op<T> op = {(T *)x, limit};
        return map_launch("clamp", op, numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}
