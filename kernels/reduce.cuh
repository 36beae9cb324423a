/* Sums and maxima over a warp and over a block, in a fixed order.
 *
 * Shuffles combine lane l with l xor 16, 8, 4, 2 and 1, so every lane gets the same bits. A block
 * combines its warps' results in the same way. Results do not depend on the order in which warps
 * arrive.
 */
#ifndef FSDPC_KERNELS_REDUCE_CUH
#define FSDPC_KERNELS_REDUCE_CUH

#include "common.cuh"

enum { WARP = 32, WARPS_MAX = 32 };

struct add_values {
    template <typename T> static __device__ __forceinline__ T of(T a, T b)
    {
        return a + b;
    }
};

struct max_values { /* NaN if either is NaN */
    template <typename T> static __device__ __forceinline__ T of(T a, T b)
    {
        return a > b || a != a ? a : b;
    }
};

template <typename Fold, typename T> __device__ __forceinline__ T warp_fold(T x)
{
#pragma unroll
    for (int lanes = WARP / 2; lanes; lanes /= 2)
        x = Fold::of(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

template <typename T> __device__ __forceinline__ T warp_sum(T x)
{
    return warp_fold<add_values>(x);
}

/* Returns the result to all threads. `neutral` replaces missing warps. blockDim.x must be a
 * multiple of 32, and all threads of the block must call this function. */
template <typename Fold, typename T> __device__ __forceinline__ T block_fold(T x, T neutral)
{
    __shared__ T results[WARPS_MAX];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_fold<Fold>(x);
    if (blockDim.x == WARP)
        return x;
    __syncthreads(); /* until all threads have read an earlier fold's results */
    if (lane == 0)
        results[warp] = x;
    __syncthreads();
    return warp_fold<Fold>(lane < blockDim.x / WARP ? results[lane] : neutral);
}

template <typename T> __device__ __forceinline__ T block_sum(T x)
{
    return block_fold<add_values>(x, (T)0);
}

template <typename T> __device__ __forceinline__ T block_max(T x)
{
    return block_fold<max_values>(x, (T)-INFINITY);
}

#endif
