/* A stable radix sort of positions by id, least significant digit first, eight bits at a time.
 *
 * Positions with equal ids keep their order, so a sum over them is the same in every run. Each pass
 * counts the digits in every block and accumulates the counts in (digit, block) order; every block
 * then places its items after those of earlier blocks. Within a block, an item's destination
 * depends only on the items with the same digit in earlier warps and lanes, so atomics never affect
 * the order. The number of passes equals the number of bytes in the largest id: three for a
 * vocabulary of 128,256.
 */
#ifndef FSDPC_KERNELS_SORT_CUH
#define FSDPC_KERNELS_SORT_CUH

#include "common.cuh"
#include "reduce.cuh"

enum { RADIX = 256, SORT_THREADS = 256, SORT_ITEMS = 8, SORT_TILE = SORT_THREADS * SORT_ITEMS };

struct sort_item {
    uint32_t id, position;
};

__device__ __forceinline__ unsigned digit_of(uint32_t id, int shift)
{
    return id >> shift & (RADIX - 1);
}

/* counts[digit * blocks + block] */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_count_kernel(const sort_item *items, size_t numel, int shift, unsigned *counts)
{
    __shared__ unsigned here[RADIX];
    here[threadIdx.x] = 0;
    __syncthreads();
    size_t first = (size_t)blockIdx.x * SORT_TILE;
    for (int k = 0; k < SORT_ITEMS; k++) {
        size_t i = first + (size_t)k * SORT_THREADS + threadIdx.x;
        if (i < numel)
            atomicAdd(&here[digit_of(items[i].id, shift)], 1u);
    }
    __syncthreads();
    counts[threadIdx.x * gridDim.x + blockIdx.x] = here[threadIdx.x];
}

/* Replaces each value with the sum of the values before it. One block of 1024. */
static __global__ void __launch_bounds__(1024) scan_kernel(unsigned *values, size_t numel)
{
    __shared__ unsigned warps[WARP];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, before = 0;
    for (size_t first = 0; first < numel; first += blockDim.x) {
        size_t i = first + threadIdx.x;
        unsigned value = i < numel ? values[i] : 0, sum = value;
        for (unsigned lanes = 1; lanes < WARP; lanes *= 2) {
            unsigned left = __shfl_up_sync(0xffffffffu, sum, lanes);
            sum += lane >= lanes ? left : 0;
        }
        if (lane == WARP - 1)
            warps[warp] = sum;
        __syncthreads();
        unsigned total = 0, left = 0;
        for (unsigned w = 0; w < blockDim.x / WARP; w++) {
            left += w < warp ? warps[w] : 0;
            total += warps[w];
        }
        if (i < numel)
            values[i] = before + left + sum - value;
        before += total;
        __syncthreads();
    }
}

static __global__ void __launch_bounds__(SORT_THREADS)
    sort_place_kernel(const sort_item *items, sort_item *sorted, size_t numel, int shift,
                      const unsigned *places)
{
    __shared__ unsigned next[RADIX], in_warp[SORT_THREADS / WARP][RADIX];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    next[threadIdx.x] = places[threadIdx.x * gridDim.x + blockIdx.x];
    size_t first = (size_t)blockIdx.x * SORT_TILE;
    for (int k = 0; k < SORT_ITEMS; k++) {
        for (unsigned w = 0; w < SORT_THREADS / WARP; w++)
            in_warp[w][threadIdx.x] = 0;
        __syncthreads();
        size_t i = first + (size_t)k * SORT_THREADS + threadIdx.x;
        bool valid = i < numel;
        sort_item item = valid ? items[i] : sort_item{0, 0};
        unsigned digit = valid ? digit_of(item.id, shift) : RADIX; /* RADIX: none */
        unsigned peers = __match_any_sync(0xffffffffu, digit);
        unsigned rank = __popc(peers & ((1u << lane) - 1));
        if (valid && rank == 0)
            in_warp[warp][digit] = __popc(peers);
        __syncthreads();
        if (valid) {
            unsigned place = next[digit] + rank;
            for (unsigned w = 0; w < warp; w++)
                place += in_warp[w][digit];
            sorted[place] = item;
        }
        __syncthreads();
        unsigned here = 0;
        for (unsigned w = 0; w < SORT_THREADS / WARP; w++)
            here += in_warp[w][threadIdx.x];
        next[threadIdx.x] += here;
        __syncthreads();
    }
}

/* Returns the number of counters needed to sort `numel` items. */
static inline size_t sort_counters(size_t numel)
{
    return RADIX * fsdpc_ceil_div(numel, SORT_TILE);
}

/* Sorts `items` by id, using `other` of the same length as a second buffer; returns the buffer that
 * contains the result. */
static inline sort_item *sort_launch(sort_item *items, sort_item *other, size_t numel,
                                     size_t id_end, unsigned *counters,
                                     const fsdpc_cuda_queue *queue)
{
    size_t blocks = fsdpc_ceil_div(numel, SORT_TILE);
    for (int shift = 0; shift < 32 && (id_end - 1) >> shift; shift += 8) {
        FSDPC_LAUNCH(sort_count_kernel, blocks, SORT_THREADS, 0, queue, items, numel, shift,
                     counters);
        FSDPC_LAUNCH(scan_kernel, 1, 1024, 0, queue, counters, RADIX * blocks);
        FSDPC_LAUNCH(sort_place_kernel, blocks, SORT_THREADS, 0, queue, items, other, numel, shift,
                     counters);
        sort_item *placed = other;
        other = items;
        items = placed;
    }
    return items;
}

#endif
