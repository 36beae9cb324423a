/* Kernels in which a block takes a row: how long a row's block is, and how its threads walk along.
 *
 * A thread visits vectors of N elements at N * thread, N * (thread + threads), ...; N is one where
 * rows do not all begin at a vector's address.
 */
#ifndef FSDPC_KERNELS_ROWS_CUH
#define FSDPC_KERNELS_ROWS_CUH

#include "dtype.cuh"
#include "reduce.cuh"

/* Threads for a row of so many vectors: whole warps, up to BLOCK_THREADS. */
static inline unsigned row_threads(size_t vectors)
{
    size_t warps = fsdpc_ceil_div(vectors, 2 * WARP); /* two vectors in flight a thread */
    return (unsigned)(fsdpc_min_size(fsdpc_max_size(warps, 1), BLOCK_THREADS / WARP) * WARP);
}

static inline unsigned row_grid(const fsdpc_cuda_queue *queue, size_t rows)
{
    return (unsigned)fsdpc_min_size(rows, (size_t)queue->multiprocessors * 64);
}

/* Whether rows of `cols` elements of T, at these addresses (NULL: not used), can go in vectors of
 * 16 bytes. */
template <typename T, int COUNT>
static bool rows_align(size_t cols, const void *const (&bases)[COUNT])
{
    size_t all = cols * sizeof(T);
    for (int b = 0; b < COUNT; b++)
        all |= (uintptr_t)bases[b];
    return all % 16 == 0;
}

#define FSDPC_FOR_ROW(N, c, cols)                                                                  \
    for (size_t c = (size_t)threadIdx.x * (N); c < (cols); c += (size_t)blockDim.x * (N))

#endif
