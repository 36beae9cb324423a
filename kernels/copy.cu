/* Copies over strided boxes: casts, slices, transposes; twin of csrc/ops/nn_copy_body.h.
 *
 * Dimensions are ordered by the destination's strides and collapsed. Then one of these forms is
 * used:
 *
 *     rows    both sides dense along the innermost dimension, no cast: chunks of up to 16 bytes
 *     tiles   no cast, and the source dense along another dimension (a transpose): squares of 32 by
 *             32 through shared memory, so that both sides move whole sectors
 *     steps   everything else, element by element through int64 or double, as csrc/ops/nn_cast.c
 */
#include "box.cuh"

enum { TILE = 32, TILE_ROWS = 8 };

/* -- steps ------------------------------------------------------------------------------------- */

/* The value of an element of any dtype, as an integer or a double. */
struct any_value {
    bool is_int;
    long long i;
    double x;
};

__device__ __forceinline__ any_value any_load(const void *base, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return any_value{false, 0, ((const float *)base)[i]};
    case FSDPC_BF16:
        return any_value{false, 0, bf16_to_f32(((const uint16_t *)base)[i])};
    case FSDPC_F16:
        return any_value{false, 0, f16_to_f32(((const uint16_t *)base)[i])};
    case FSDPC_F64:
        return any_value{false, 0, ((const double *)base)[i]};
    case FSDPC_I32:
        return any_value{true, ((const int32_t *)base)[i], 0};
    case FSDPC_I64:
        return any_value{true, ((const int64_t *)base)[i], 0};
    case FSDPC_U8:
        return any_value{true, ((const uint8_t *)base)[i], 0};
    default:
        return any_value{true, ((const uint8_t *)base)[i] != 0, 0};
    }
}

/* Truncates toward zero; out-of-range values are clamped to the nearest limit, and NaN becomes
 * 0. */
__device__ __forceinline__ long long truncate(double x, double low, double high)
{
    if (!(x > low))
        return x <= low ? (long long)low : 0;
    if (x < high)
        return (long long)x;
    return high >= 0x1p63 ? INT64_MAX : (long long)high;
}

__device__ __forceinline__ void any_store(void *base, size_t i, fsdpc_dtype dtype, any_value v)
{
    float f = v.is_int ? (float)v.i : (float)v.x;
    switch (dtype) {
    case FSDPC_F32:
        ((float *)base)[i] = f;
        break;
    case FSDPC_BF16:
        ((uint16_t *)base)[i] = f32_to_bf16(f);
        break;
    case FSDPC_F16:
        ((uint16_t *)base)[i] = f32_to_f16(f);
        break;
    case FSDPC_F64:
        ((double *)base)[i] = v.is_int ? (double)v.i : v.x;
        break;
    case FSDPC_I32:
        ((int32_t *)base)[i] = (int32_t)(v.is_int ? v.i : truncate(v.x, INT32_MIN, INT32_MAX));
        break;
    case FSDPC_I64:
        ((int64_t *)base)[i] = v.is_int ? v.i : truncate(v.x, -0x1p63, 0x1p63);
        break;
    case FSDPC_U8:
        ((uint8_t *)base)[i] = (uint8_t)(v.is_int ? v.i : truncate(v.x, 0, UINT8_MAX));
        break;
    default:
        ((uint8_t *)base)[i] = v.is_int ? v.i != 0 : v.x != 0;
        break;
    }
}

struct copy_types {
    fsdpc_dtype dst, src;
    bool accumulate;
};

static __global__ void __launch_bounds__(BLOCK_THREADS)
    copy_steps_kernel(void *dst, const void *src, box shape, size_t numel, copy_types types)
{
    for (size_t i = grid_thread(); i < numel; i += grid_threads()) {
        box_offsets at = box_row(shape, 0, i);
        any_value v = any_load(src, at.at[1], types.src);
        if (types.accumulate) {
            any_value old = any_load(dst, at.at[0], types.dst);
            v.x = (v.is_int ? (double)v.i : v.x) + (old.is_int ? (double)old.i : old.x);
            v.is_int = v.is_int && old.is_int;
            v.i = (long long)((unsigned long long)v.i + (unsigned long long)old.i);
        }
        any_store(dst, at.at[0], types.dst, v);
    }
}

/* -- rows -------------------------------------------------------------------------------------- */

/* Shape and strides count chunks. */
template <typename Chunk>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    copy_rows_kernel(Chunk *dst, const Chunk *src, box shape, size_t chunks)
{
    size_t inner = shape.shape[shape.ndim - 1];
    for (size_t c = grid_thread(); c < chunks; c += grid_threads()) {
        size_t row = c / inner, col = c - row * inner;
        box_offsets at = box_row(shape, 1, row);
        dst[at.at[0] + col] = src[at.at[1] + col];
    }
}

/* Returns the size in bytes of the widest chunk that divides every length, stride and address. */
static size_t chunk_bytes(const fsdpc_copy_args *args, const void *src, const box &b,
                          size_t element)
{
    size_t all = (uintptr_t)args->dst | (uintptr_t)src | b.shape[b.ndim - 1] * element | 16;
    for (int d = 0; d < b.ndim - 1; d++)
        all |= b.stride[0][d] * element | b.stride[1][d] * element;
    return all & -all;
}

static fsdpc_status rows_launch(const fsdpc_copy_args *args, const void *src, box b, size_t numel,
                                size_t element, const fsdpc_cuda_queue *queue)
{
    size_t bytes = chunk_bytes(args, src, b, element), chunks = numel * element / bytes;
    b.shape[b.ndim - 1] = b.shape[b.ndim - 1] * element / bytes;
    for (int d = 0; d < b.ndim - 1; d++)
        for (int o = 0; o < 2; o++) /* may be negative */
            b.stride[o][d] = (size_t)((int64_t)(b.stride[o][d] * element) / (int64_t)bytes);
    unsigned grid = grid_of(queue, chunks, BLOCK_THREADS);
    switch (bytes) {
#define CASE(width, Chunk)                                                                         \
    case width:                                                                                    \
        FSDPC_LAUNCH(copy_rows_kernel<Chunk>, grid, BLOCK_THREADS, 0, queue, (Chunk *)args->dst,   \
                     (const Chunk *)src, b, chunks);                                               \
        break;
        CASE(16, uint4)
        CASE(8, uint2)
        CASE(4, uint32_t)
        CASE(2, uint16_t)
        CASE(1, uint8_t)
#undef CASE
    }
    return launched("copy");
}

/* -- tiles ------------------------------------------------------------------------------------- */

/* The last two dimensions are (rows, cols); dst is dense along cols, and src along rows. */
template <typename T>
static __global__ void __launch_bounds__(TILE *TILE_ROWS)
    copy_tiles_kernel(T *dst, const T *src, box shape, size_t tiles)
{
    __shared__ T tile[TILE][TILE + 1];
    int d = shape.ndim - 2;
    size_t rows = shape.shape[d], cols = shape.shape[d + 1];
    size_t tile_cols = (cols + TILE - 1) / TILE, per_box = (rows + TILE - 1) / TILE * tile_cols;
    unsigned x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    for (size_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        box_offsets at = box_row(shape, 2, t / per_box);
        size_t row = t % per_box / tile_cols * TILE, col = t % tile_cols * TILE;
        for (unsigned c = y; c < TILE; c += TILE_ROWS)
            if (row + x < rows && col + c < cols)
                tile[c][x] = src[at.at[1] + (row + x) + (col + c) * shape.stride[1][d + 1]];
        __syncthreads();
        for (unsigned r = y; r < TILE; r += TILE_ROWS)
            if (row + r < rows && col + x < cols)
                dst[at.at[0] + (row + r) * shape.stride[0][d] + col + x] = tile[x][r];
        __syncthreads(); /* before the next tile overwrites this one */
    }
}

/* Makes the dimension along which the source is dense the second to last, or returns false if there
 * is none. */
static bool turn(box *b)
{
    int dense = -1;
    for (int d = 0; d < b->ndim - 1; d++)
        if (b->stride[1][d] == 1)
            dense = d;
    if (dense < 0)
        return false;
    box old = *b;
    for (int d = dense; d < b->ndim - 2; d++) {
        b->shape[d] = old.shape[d + 1];
        b->stride[0][d] = old.stride[0][d + 1];
        b->stride[1][d] = old.stride[1][d + 1];
    }
    b->shape[b->ndim - 2] = old.shape[dense];
    b->stride[0][b->ndim - 2] = old.stride[0][dense];
    b->stride[1][b->ndim - 2] = old.stride[1][dense];
    return true;
}

static fsdpc_status tiles_launch(const fsdpc_copy_args *args, const void *src, const box &b,
                                 size_t numel, size_t element, const fsdpc_cuda_queue *queue)
{
    size_t rows = b.shape[b.ndim - 2], cols = b.shape[b.ndim - 1];
    size_t tiles = numel / (rows * cols) * fsdpc_ceil_div(rows, TILE) * fsdpc_ceil_div(cols, TILE);
    unsigned grid = grid_of(queue, tiles, 1);
    switch (element) {
#define CASE(width, T)                                                                             \
    case width:                                                                                    \
        FSDPC_LAUNCH(copy_tiles_kernel<T>, grid, TILE *TILE_ROWS, 0, queue, (T *)args->dst,        \
                     (const T *)src, b, tiles);                                                    \
        break;
        CASE(1, uint8_t)
        CASE(2, uint16_t)
        CASE(4, uint32_t)
        CASE(8, uint64_t)
#undef CASE
    }
    return launched("copy");
}

/* -- choice ------------------------------------------------------------------------------------ */

static box copy_box(const fsdpc_copy_args *args)
{
    box b = {};
    b.ndim = args->ndim;
    for (int d = 0; d < args->ndim; d++) { /* insertion sort by descending destination stride */
        int at = d;
        for (; at > 0 && b.stride[0][at - 1] < args->stride_dst[d]; at--) {
            b.shape[at] = b.shape[at - 1];
            b.stride[0][at] = b.stride[0][at - 1];
            b.stride[1][at] = b.stride[1][at - 1];
        }
        b.shape[at] = args->shape[d];
        b.stride[0][at] = args->stride_dst[d];
        b.stride[1][at] = args->stride_src[d];
    }
    return b;
}

extern "C" fsdpc_status fsdpc_cuda_copy(const fsdpc_copy_args *args, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    box b = copy_box(args);
    size_t numel = box_numel(b), element = fsdpc_dtype_bytes(args->dst_dtype);
    if (numel == 0)
        return FSDPC_OK;
    box_collapse(&b);
    int inner = b.ndim - 1;
    const void *src =
        (const char *)args->src + args->src_first * fsdpc_dtype_bytes(args->src_dtype);
    bool plain = args->dst_dtype == args->src_dtype && !args->accumulate;
    bool dense = b.stride[0][inner] == 1;
    if (plain && dense && b.stride[1][inner] == 1)
        return rows_launch(args, src, b, numel, element, queue);
    if (plain && dense && turn(&b))
        return tiles_launch(args, src, b, numel, element, queue);
    copy_types types = {args->dst_dtype, args->src_dtype, args->accumulate};
    FSDPC_LAUNCH(copy_steps_kernel, grid_of(queue, numel, BLOCK_THREADS), BLOCK_THREADS, 0, queue,
                 args->dst, src, b, numel, types);
    return launched("copy");
}
