/* Strided boxes: up to eight dimensions shared by two operands, collapsed on the host.
 *
 * Twins of nn_box in csrc/ops/nn_internal.h. A box is passed to the kernel by value.
 */
#ifndef FSDPC_KERNELS_BOX_CUH
#define FSDPC_KERNELS_BOX_CUH

#include "dtype.cuh"

struct box {
    int ndim; /* at least 1 once collapsed */
    size_t shape[FSDPC_MAX_DIMS];
    size_t stride[2][FSDPC_MAX_DIMS];
};

struct box_offsets {
    size_t at[2];
};

static inline size_t box_numel(const box &b)
{
    size_t numel = 1;
    for (int d = 0; d < b.ndim; d++)
        numel *= b.shape[d];
    return numel;
}

/* Drops dimensions of size 1, and merges neighbouring dimensions whose strides in both operands
 * allow it. */
static inline void box_collapse(box *b)
{
    int kept = 0;
    for (int d = 0; d < b->ndim; d++) {
        if (b->shape[d] == 1)
            continue;
        bool joins = kept > 0;
        for (int o = 0; o < 2 && joins; o++)
            joins = b->stride[o][kept - 1] == b->stride[o][d] * b->shape[d];
        int into = joins ? kept - 1 : kept++;
        b->shape[into] = joins ? b->shape[into] * b->shape[d] : b->shape[d];
        for (int o = 0; o < 2; o++)
            b->stride[o][into] = b->stride[o][d];
    }
    if (kept == 0) {
        b->shape[0] = b->stride[0][0] = b->stride[1][0] = 1;
        kept = 1;
    }
    b->ndim = kept;
}

/* Returns the offset of row `row` in each operand; `row` indexes all but the last `inner`
 * dimensions. 32-bit division is several times faster, and sufficient for most rows. */
__device__ __forceinline__ box_offsets box_row(const box &b, int inner, size_t row)
{
    box_offsets offsets = {{0, 0}};
#pragma unroll
    for (int d = FSDPC_MAX_DIMS - 1; d >= 0; d--) {
        if (d > b.ndim - 1 - inner)
            continue;
        size_t index, rest;
        if (row >> 32 || b.shape[d] >> 32) {
            rest = row / b.shape[d];
            index = row % b.shape[d];
        } else {
            rest = (uint32_t)row / (uint32_t)b.shape[d];
            index = (uint32_t)row % (uint32_t)b.shape[d];
        }
        row = rest;
        offsets.at[0] += index * b.stride[0][d];
        offsets.at[1] += index * b.stride[1][d];
    }
    return offsets;
}

#endif
