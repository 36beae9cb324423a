/* Kernels with one block per row: the block size, and the order in which threads traverse the row.
 *
 * A thread visits vectors of N elements at N * thread, N * (thread + threads), ...; N is 1 if some
 * rows are not aligned for vectors.
 */
#ifndef FSDPC_KERNELS_ROWS_CUH
#define FSDPC_KERNELS_ROWS_CUH

#include "dtype.cuh"
#include "reduce.cuh"

/* Returns the number of threads for a row of `vectors` vectors: whole warps, up to
 * BLOCK_THREADS. */
static inline unsigned row_threads(size_t vectors)
{
    size_t warps = fsdpc_ceil_div(vectors, 2 * WARP); /* two vectors in flight per thread */
    return (unsigned)(fsdpc_min_size(fsdpc_max_size(warps, 1), BLOCK_THREADS / WARP) * WARP);
}

static inline unsigned row_grid(const fsdpc_cuda_queue *queue, size_t rows)
{
    return (unsigned)fsdpc_min_size(rows, (size_t)queue->multiprocessors * 64);
}

/* Returns whether rows of `cols` elements of T, at these addresses (NULL if unused), can be read in
 * 16-byte vectors. */
template <typename T, int COUNT>
static bool rows_align(size_t cols, const void *const (&bases)[COUNT])
{
    size_t all = cols * sizeof(T);
    for (int b = 0; b < COUNT; b++)
        all |= (uintptr_t)bases[b];
    return all % 16 == 0;
}

/* A thread's part of a row that consists of whole vectors, left unconverted to save registers.
 * Elements beyond the row's end are zero; if the row pointer is NULL, all elements are `fill`. */
template <typename T, int HELD> struct held_row {
    enum { N = 16 / sizeof(T), COUNT = HELD };
    union vector {
        uint4 packed;
        vec<T, N> values;
        __device__ vector() {}
    };
    uint4 part[HELD];

    static __device__ __forceinline__ unsigned column(int j)
    {
        return (j * blockDim.x + threadIdx.x) * N;
    }
    __device__ __forceinline__ held_row(const T *row, unsigned cols, float fill)
    {
        vector all;
#pragma unroll
        for (int k = 0; k < N; k++)
            all.values.at[k] = narrow<T>(row ? 0 : fill);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            part[j] = all.packed;
            if (row && column(j) < cols)
                part[j] = *reinterpret_cast<const uint4 *>(row + column(j));
        }
    }
    __device__ __forceinline__ vec<wide<T>, N> at(int j) const
    {
        vector narrow;
        vec<wide<T>, N> wider;
        narrow.packed = part[j];
#pragma unroll
        for (int k = 0; k < N; k++)
            wider.at[k] = widen<wide<T>>(narrow.values.at[k]);
        return wider;
    }
    /* Stores each thread's part of a row, rounded to Out. */
    template <typename Out>
    static __device__ __forceinline__ void store(Out *row, unsigned cols,
                                                 const vec<wide<T>, N> (&parts)[HELD])
    {
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (column(j) < cols)
                store_narrow<N>(row + column(j), parts[j]);
    }
};

#define FSDPC_FOR_HELD(held, j) _Pragma("unroll") for (int j = 0; j < held::COUNT; j++)

/* Returns how many vectors of a row (2 or 4) each of row_threads() threads holds, or 0 if the rows
 * are too long or unaligned. */
template <typename T, int COUNT>
static int rows_held(size_t cols, const void *const (&bases)[COUNT])
{
    size_t vectors = cols * sizeof(T) / 16;
    if (!rows_align<T>(cols, bases) || vectors > 4 * BLOCK_THREADS)
        return 0;
    return vectors > 2 * BLOCK_THREADS ? 4 : 2;
}

#define FSDPC_FOR_ROW(N, c, cols)                                                                  \
    for (size_t c = (size_t)threadIdx.x * (N); c < (cols); c += (size_t)blockDim.x * (N))

#endif
