/* Block codes (csrc/ops/block_code.h) in CUDA: twin of csrc/ops/block_code_body.h, with its bits.
 *
 * A warp handles a block: lane l has elements l, l + 32, ... of it, and a shuffle finds the largest.
 */
#ifndef FSDPC_KERNELS_BLOCK_CODE_CUH
#define FSDPC_KERNELS_BLOCK_CODE_CUH

#include "reduce.cuh"

enum { CODE_1 = 0x3f800000, CODES_PER_LANE = FSDPC_CODE_BLOCK / WARP };

/* The elements of one block. */
struct code_span {
    size_t begin;
    int n;
};

__device__ __forceinline__ code_span code_span_of(size_t block, size_t row)
{
    size_t per_row = (row + FSDPC_CODE_BLOCK - 1) / FSDPC_CODE_BLOCK;
    size_t in_row = block % per_row * FSDPC_CODE_BLOCK, left = row - in_row;
    return code_span{block / per_row * row + in_row,
                     (int)(left < FSDPC_CODE_BLOCK ? left : FSDPC_CODE_BLOCK)};
}

__device__ __forceinline__ float code_levels(fsdpc_code code)
{
    return code == FSDPC_CODE_ROOT8 ? 127.0f : 255.0f;
}

__device__ __forceinline__ float code_decode(fsdpc_code code, uint8_t byte, float maximum)
{
    int q = code == FSDPC_CODE_ROOT8 ? (int8_t)byte : byte;
    float root = (float)q * (code == FSDPC_CODE_ROOT8 ? 1 / 127.0f : 1 / 255.0f);
    uint32_t share = (__float_as_uint(root) << 2) - 3u * CODE_1;
    if (code == FSDPC_CODE_UROOT8)
        return __uint_as_float(share) * maximum;
    return copysignf(__uint_as_float(q == 0 ? 0 : share), root) * maximum;
}

__device__ __forceinline__ uint8_t code_encode(fsdpc_code code, float value, float inverse)
{
    float levels = code_levels(code);
    uint32_t share = __float_as_uint(fabsf(value) * inverse);
    float root = __uint_as_float((share >> 2) + (CODE_1 - CODE_1 / 4));
    if (code == FSDPC_CODE_UROOT8)
        root = root > 1 / 255.0f ? root : 1 / 255.0f;
    else
        root = __uint_as_float(__float_as_uint(root) | (__float_as_uint(value) & 0x80000000u));
    return (uint8_t)__float_as_uint(__fmaf_rn(root, levels, 12582912.0f));
}

/* Bits of magnitudes sort like magnitudes, with NaN last. */
__device__ __forceinline__ int code_most(int most, float value)
{
    int bits = (int)(__float_as_uint(value) & 0x7fffffffu);
    return bits > most ? bits : most;
}

/* Returns the warp's maximum from each lane's bits. */
__device__ __forceinline__ float code_maximum(int most)
{
    float maximum = __uint_as_float((uint32_t)warp_fold<max_values>(most));
    return maximum < 0x1p-120f ? 0 : maximum;
}

__device__ __forceinline__ float code_inverse(float maximum)
{
    return maximum == 0 ? 0 : 1 / maximum;
}

/* Returns a grid with a warp for each block of codes, if there is room. */
static inline unsigned code_grid(const fsdpc_cuda_queue *queue, size_t blocks)
{
    return grid_of(queue, blocks, BLOCK_THREADS / WARP);
}

#endif
