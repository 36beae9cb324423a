/* Attention tiles, which are 64 rows of 16-bit elements in shared memory, and their products.
 *
 * Rows are PITCH = DIM + 8 elements apart, so that the eight rows of a matrix fall into different
 * banks. Rows beyond the last token and elements beyond the head's dimension are zero, so they add
 * nothing to any product. A warp owns 16 rows of the left operand.
 */
#ifndef FSDPC_KERNELS_ATTENTION_TILES_CUH
#define FSDPC_KERNELS_ATTENTION_TILES_CUH

#include "attention.cuh"
#include "mma.cuh"

enum { TILE_ROWS = 64, TILE_WARPS = 4, TILE_THREADS = 32 * TILE_WARPS };

template <int DIM> struct tile_shape {
    enum { PITCH = DIM + 8, ELEMENTS = TILE_ROWS * PITCH, STEPS = DIM / 16, BLOCKS = DIM / 8 };
};

/* Returns how many of a tile's TILE_ROWS rows, starting at `first`, are below `end`. */
__device__ __forceinline__ int rows_below(size_t end, size_t first)
{
    return end <= first ? 0 : end - first < TILE_ROWS ? (int)(end - first) : (int)TILE_ROWS;
}

/* Loads rows first .. first + ROWS - 1 of one head, asynchronously; `head` is the row of token
 * 0. */
template <typename T, int DIM, int ROWS>
__device__ __forceinline__ void tile_copy(T *tile, const T *head, size_t stride, size_t first,
                                          size_t tokens, size_t dim)
{
    const int CHUNKS = DIM / 8;
    for (int n = threadIdx.x; n < ROWS * CHUNKS; n += TILE_THREADS) {
        int row = n / CHUNKS, col = n % CHUNKS * 8;
        bool valid = first + row < tokens && (size_t)col < dim;
        copy_16(tile + row * tile_shape<DIM>::PITCH + col,
                head + (valid ? (first + row) * stride + col : 0), valid);
    }
}

/* c = left right^T: 16 rows of `left`, starting at `row`, by COLUMNS rows of `right`; sums over
 * DIM. */
template <typename T, int DIM, int COLUMNS>
__device__ __forceinline__ void rows_by_rows(float (&c)[COLUMNS / 8][4], const T *left, int row,
                                             const T *right)
{
    const int PITCH = tile_shape<DIM>::PITCH;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[n][e] = 0;
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        uint32_t a[4];
        load_matrices(a, left + (row + lane % 16) * PITCH + k + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            uint32_t b[4]; /* columns n .. n + 7 and n + 8 .. n + 15, both halves of k */
            load_matrices(b, right + (n + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
            multiply_add(c[n / 8], a, b[0], b[1], T{});
            multiply_add(c[n / 8 + 1], a, b[2], b[3], T{});
        }
    }
}

/* c += left right: left (16 by ROWS) is rounded from registers; right has ROWS rows of DIM. */
template <typename T, int DIM, int ROWS>
__device__ __forceinline__ void registers_by_rows(float (&c)[DIM / 8][4],
                                                  const float (&left)[ROWS / 8][4], const T *right)
{
    const int PITCH = tile_shape<DIM>::PITCH;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) {
        const float(&first)[4] = left[k / 8], (&second)[4] = left[k / 8 + 1];
        uint32_t a[4] = {pack_pair(first[0], first[1], T{}), pack_pair(first[2], first[3], T{}),
                         pack_pair(second[0], second[1], T{}),
                         pack_pair(second[2], second[3], T{})};
#pragma unroll
        for (int n = 0; n < DIM; n += 16) {
            uint32_t b[4];
            load_matrices_turned(b, right + (k + lane % 16) * PITCH + n + lane / 16 * 8);
            multiply_add(c[n / 8], a, b[0], b[1], T{});
            multiply_add(c[n / 8 + 1], a, b[2], b[3], T{});
        }
    }
}

/* Stores a warp's 16 rows, scaling row g by scale[0] and row g + 8 by scale[1]. */
template <typename T, int DIM>
__device__ __forceinline__ void rows_store(T *head, size_t stride, size_t first, size_t tokens,
                                           size_t dim, const float (&c)[DIM / 8][4],
                                           const float (&scale)[2])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        size_t row = first + g + 8 * half;
        if (row >= tokens)
            continue;
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            if ((size_t)(n * 8 + 2 * t) < dim)
                *(uint32_t *)(head + row * stride + n * 8 + 2 * t) =
                    pack_pair(c[n][2 * half] * scale[half], c[n][2 * half + 1] * scale[half], T{});
    }
}

#endif
