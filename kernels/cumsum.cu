/* Cumulative sums; twin of csrc/ops/nn_cumsum.c.
 *
 * Along the innermost dimension, a block handles a row in tiles of BLOCK_THREADS elements. It sums
 * within each tile in steps of doubling distance, then adds the sum of the earlier tiles. Along any
 * other dimension, each thread handles one line, and adjacent threads handle adjacent lines. Floats
 * are summed in double and then rounded (16-bit floats via fp32), and integer sums wrap; results do
 * not depend on the grid.
 */
#include "dtype.cuh"

template <typename T> struct cumsum_type { /* floats */
    typedef double sum;
    static __device__ __forceinline__ double load(T x)
    {
        return widen<double>(x);
    }
    static __device__ __forceinline__ T store(double x)
    {
        return narrow<T>(sizeof(T) == 2 ? (double)(float)x : x);
    }
};
template <> struct cumsum_type<int32_t> {
    typedef uint32_t sum;
    static __device__ __forceinline__ uint32_t load(int32_t x)
    {
        return (uint32_t)x;
    }
    static __device__ __forceinline__ int32_t store(uint32_t x)
    {
        return (int32_t)x;
    }
};
template <> struct cumsum_type<int64_t> {
    typedef uint64_t sum;
    static __device__ __forceinline__ uint64_t load(int64_t x)
    {
        return (uint64_t)x;
    }
    static __device__ __forceinline__ int64_t store(uint64_t x)
    {
        return (int64_t)x;
    }
};

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    cumsum_rows_kernel(T *out, const T *x, size_t rows, size_t extent, bool reverse)
{
    typedef typename cumsum_type<T>::sum sum;
    __shared__ sum tile[BLOCK_THREADS];
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        sum before = 0;
        for (size_t first = 0; first < extent; first += BLOCK_THREADS) {
            size_t e = first + threadIdx.x;
            size_t at = row * extent + (reverse ? extent - 1 - e : e);
            tile[threadIdx.x] = e < extent ? cumsum_type<T>::load(x[at]) : 0;
            for (unsigned distance = 1; distance < BLOCK_THREADS; distance *= 2) {
                __syncthreads();
                sum other = threadIdx.x >= distance ? tile[threadIdx.x - distance] : 0;
                __syncthreads();
                tile[threadIdx.x] += other;
            }
            __syncthreads();
            if (e < extent)
                out[at] = cumsum_type<T>::store(before + tile[threadIdx.x]);
            before += tile[BLOCK_THREADS - 1];
            __syncthreads(); /* before the next tile overwrites this one */
        }
    }
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    cumsum_lines_kernel(T *out, const T *x, size_t lines, size_t extent, size_t inner, bool reverse)
{
    for (size_t line = grid_thread(); line < lines; line += grid_threads()) {
        size_t first = line / inner * extent * inner + line % inner;
        typename cumsum_type<T>::sum total = 0;
        for (size_t e = 0; e < extent; e++) {
            size_t at = first + (reverse ? extent - 1 - e : e) * inner;
            total += cumsum_type<T>::load(x[at]);
            out[at] = cumsum_type<T>::store(total);
        }
    }
}

template <typename T>
static void cumsum_launch(const fsdpc_cumsum_args *args, const fsdpc_cuda_queue *queue)
{
    size_t lines = args->outer * args->inner;
    T *out = (T *)args->out;
    const T *x = (const T *)args->x;
    if (args->inner == 1)
        FSDPC_LAUNCH(cumsum_rows_kernel<T>, grid_of(queue, lines, 1), BLOCK_THREADS, 0, queue, out,
                     x, lines, args->extent, args->reverse);
    else
        FSDPC_LAUNCH(cumsum_lines_kernel<T>, grid_of(queue, lines, BLOCK_THREADS), BLOCK_THREADS, 0,
                     queue, out, x, lines, args->extent, args->inner, args->reverse);
}

extern "C" fsdpc_status fsdpc_cuda_cumsum(const fsdpc_cumsum_args *args, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    if (args->outer * args->extent * args->inner == 0)
        return FSDPC_OK;
    if (args->dtype == FSDPC_I32)
        cumsum_launch<int32_t>(args, queue);
    else if (args->dtype == FSDPC_I64)
        cumsum_launch<int64_t>(args, queue);
    else
        FSDPC_FOR_FLOAT(args->dtype, T, cumsum_launch<T>(args, queue))
    return launched("cumsum");
}
