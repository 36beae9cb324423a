/* a + b, a - b, a * b, a / b, maxima, minima, masks and comparisons with broadcasting; twin of
 * csrc/ops/nn_binary_body.h.
 *
 * After collapsing, each operand is dense, repeated or strided along the innermost dimension.
 * Dense and repeated operands are read in vectors if the inner length and addresses allow it.
 */
#include "box.cuh"

template <fsdpc_binary KIND, typename W> __device__ __forceinline__ W binary_value(W a, W b)
{
    switch (KIND) {
    case FSDPC_BINARY_ADD:
        return a + b;
    case FSDPC_BINARY_SUB:
        return a - b;
    case FSDPC_BINARY_MUL:
        return a * b;
    case FSDPC_BINARY_DIV:
        return a / b;
    case FSDPC_BINARY_POW:
        return pow(a, b);
    case FSDPC_BINARY_MAXIMUM:
        return a > b || a != a ? a : b;
    case FSDPC_BINARY_MINIMUM:
        return a < b || a != a ? a : b;
    default:
        return a;
    }
}

template <typename T> __device__ __forceinline__ T pow_integer(T a, T b) /* wraps */
{
    uint64_t y = 1, power = (uint64_t)a;
    if (b < 0)
        return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    for (; b; b >>= 1, power *= power)
        y *= b & 1 ? power : 1;
    return (T)y;
}

template <typename T> __device__ __forceinline__ wide<T> comparable(T x)
{
    return widen<wide<T>>(x);
}
__device__ __forceinline__ int32_t comparable(int32_t x)
{
    return x;
}
__device__ __forceinline__ int64_t comparable(int64_t x)
{
    return x;
}
__device__ __forceinline__ uint8_t comparable(uint8_t x)
{
    return x;
}

/* Loads N elements starting at `at`; a step of 0 repeats one element. N > 1 requires a step of 0 or
 * 1. */
template <int N, typename T>
__device__ __forceinline__ vec<wide<T>, N> operand(const T *x, size_t at, size_t col, size_t step)
{
    if (step == 0 || N == 1) {
        vec<wide<T>, N> repeated;
        wide<T> value = widen<wide<T>>(x[at + col * step]);
#pragma unroll
        for (int k = 0; k < N; k++)
            repeated.at[k] = value;
        return repeated;
    }
    return load_wide<N, wide<T>>(x + at + col);
}

template <fsdpc_binary KIND, typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    binary_kernel(T *out, const T *a, const T *b, box shape, size_t vectors)
{
    size_t inner = shape.shape[shape.ndim - 1] / N;
    size_t step_a = shape.stride[0][shape.ndim - 1], step_b = shape.stride[1][shape.ndim - 1];
    for (size_t v = grid_thread(); v < vectors; v += grid_threads()) {
        size_t row = v / inner, col = (v - row * inner) * N;
        box_offsets at = box_row(shape, 1, row);
        vec<wide<T>, N> x = operand<N>(a, at.at[0], col, step_a);
        vec<wide<T>, N> y = operand<N>(b, at.at[1], col, step_b);
#pragma unroll
        for (int k = 0; k < N; k++)
            x.at[k] = binary_value<KIND>(x.at[k], y.at[k]);
        store_narrow<N>(out + v * N, x);
    }
}

template <fsdpc_binary KIND, typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    binary_int_kernel(T *out, const T *a, const T *b, box shape, size_t numel)
{
    for (size_t i = grid_thread(); i < numel; i += grid_threads()) {
        box_offsets at = box_row(shape, 0, i);
        T sa = a[at.at[0]], sb = b[at.at[1]];
        uint64_t x = (uint64_t)sa, y = (uint64_t)sb; /* wraps */
        out[i] = KIND == FSDPC_BINARY_ADD       ? (T)(x + y)
                 : KIND == FSDPC_BINARY_SUB     ? (T)(x - y)
                 : KIND == FSDPC_BINARY_POW     ? pow_integer(sa, sb)
                 : KIND == FSDPC_BINARY_MAXIMUM ? (sa > sb ? sa : sb)
                 : KIND == FSDPC_BINARY_MINIMUM ? (sa < sb ? sa : sb)
                                                : (T)(x * y);
    }
}

template <fsdpc_binary KIND, typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    compare_kernel(uint8_t *out, const T *a, const T *b, box shape, size_t numel)
{
    for (size_t i = grid_thread(); i < numel; i += grid_threads()) {
        box_offsets at = box_row(shape, 0, i);
        auto x = comparable(a[at.at[0]]), y = comparable(b[at.at[1]]);
        out[i] = KIND == FSDPC_BINARY_EQ   ? x == y
                 : KIND == FSDPC_BINARY_NE ? x != y
                 : KIND == FSDPC_BINARY_LT ? x < y
                 : KIND == FSDPC_BINARY_LE ? x <= y
                 : KIND == FSDPC_BINARY_GT ? x > y
                                           : x >= y;
    }
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    mask_kernel(T *out, const T *x, const uint8_t *keep, box shape, size_t numel, T other)
{
    for (size_t i = grid_thread(); i < numel; i += grid_threads()) {
        box_offsets at = box_row(shape, 0, i);
        out[i] = keep[at.at[1]] ? x[at.at[0]] : other;
    }
}

/* Returns whether every row of the operand is aligned for vectors of `bytes` bytes. */
static bool starts_align(const void *base, const box &b, int operand, size_t element, size_t bytes)
{
    bool aligned = (uintptr_t)base % bytes == 0;
    if (b.stride[operand][b.ndim - 1] == 0)
        return true;
    for (int d = 0; d < b.ndim - 1; d++)
        aligned = aligned && b.stride[operand][d] * element % bytes == 0;
    return aligned && b.stride[operand][b.ndim - 1] == 1;
}

template <fsdpc_binary KIND, typename T>
static fsdpc_status float_launch(const fsdpc_binary_args *args, const box &shape, size_t numel,
                                 const fsdpc_cuda_queue *queue)
{
    const int N = 16 / sizeof(T);
    T *out = (T *)args->out;
    const T *a = (const T *)args->a, *b = (const T *)args->b;
    bool vectors = shape.shape[shape.ndim - 1] % N == 0 && (uintptr_t)out % 16 == 0 &&
                   starts_align(a, shape, 0, sizeof(T), 16) &&
                   starts_align(b, shape, 1, sizeof(T), 16);
    unsigned grid = grid_of(queue, vectors ? numel / N : numel, BLOCK_THREADS);
    if (vectors)
        FSDPC_LAUNCH((binary_kernel<KIND, T, N>), grid, BLOCK_THREADS, 0, queue, out, a, b, shape,
                     numel / N);
    else
        FSDPC_LAUNCH((binary_kernel<KIND, T, 1>), grid, BLOCK_THREADS, 0, queue, out, a, b, shape,
                     numel);
    return launched("arithmetic");
}

template <fsdpc_binary KIND, typename T>
static fsdpc_status compare_launch(const fsdpc_binary_args *args, const box &shape, size_t numel,
                                   const fsdpc_cuda_queue *queue)
{
    FSDPC_LAUNCH((compare_kernel<KIND, T>), grid_of(queue, numel, BLOCK_THREADS), BLOCK_THREADS, 0,
                 queue, (uint8_t *)args->out, (const T *)args->a, (const T *)args->b, shape, numel);
    return launched("a comparison");
}

template <fsdpc_binary KIND>
static fsdpc_status compare(const fsdpc_binary_args *args, const box &shape, size_t numel,
                            const fsdpc_cuda_queue *queue)
{
    if (args->dtype == FSDPC_I32)
        return compare_launch<KIND, int32_t>(args, shape, numel, queue);
    if (args->dtype == FSDPC_I64)
        return compare_launch<KIND, int64_t>(args, shape, numel, queue);
    if (args->dtype == FSDPC_U8 || args->dtype == FSDPC_BOOL)
        return compare_launch<KIND, uint8_t>(args, shape, numel, queue);
    FSDPC_FOR_FLOAT(args->dtype, T, return compare_launch<KIND, T>(args, shape, numel, queue))
    return FSDPC_ERR_DTYPE;
}

/* U is the unsigned integer type of the dtype's size; `other` contains the bits to store where the
 * mask is false. */
template <typename U>
static fsdpc_status mask(const fsdpc_binary_args *args, const box &shape, size_t numel, U other,
                         const fsdpc_cuda_queue *queue)
{
    FSDPC_LAUNCH(mask_kernel<U>, grid_of(queue, numel, BLOCK_THREADS), BLOCK_THREADS, 0, queue,
                 (U *)args->out, (const U *)args->a, (const uint8_t *)args->b, shape, numel, other);
    return launched("a mask");
}

template <fsdpc_binary KIND>
static fsdpc_status launch(const fsdpc_binary_args *args, const box &shape, size_t numel,
                           const fsdpc_cuda_queue *queue)
{
    unsigned grid = grid_of(queue, numel, BLOCK_THREADS);
    if (args->dtype == FSDPC_I32)
        FSDPC_LAUNCH((binary_int_kernel<KIND, int32_t>), grid, BLOCK_THREADS, 0, queue,
                     (int32_t *)args->out, (const int32_t *)args->a, (const int32_t *)args->b,
                     shape, numel);
    else if (args->dtype == FSDPC_I64)
        FSDPC_LAUNCH((binary_int_kernel<KIND, int64_t>), grid, BLOCK_THREADS, 0, queue,
                     (int64_t *)args->out, (const int64_t *)args->a, (const int64_t *)args->b,
                     shape, numel);
    else
        FSDPC_FOR_FLOAT(args->dtype, T, return float_launch<KIND, T>(args, shape, numel, queue))
    return launched("arithmetic");
}

extern "C" fsdpc_status fsdpc_cuda_binary(const fsdpc_binary_args *args, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    box shape = {};
    shape.ndim = args->ndim;
    for (int d = 0; d < args->ndim; d++) {
        shape.shape[d] = args->shape[d];
        shape.stride[0][d] = args->stride_a[d];
        shape.stride[1][d] = args->stride_b[d];
    }
    size_t numel = box_numel(shape);
    if (numel == 0)
        return FSDPC_OK;
    box_collapse(&shape);
    switch (args->kind) {
    case FSDPC_BINARY_ADD:
        return launch<FSDPC_BINARY_ADD>(args, shape, numel, queue);
    case FSDPC_BINARY_SUB:
        return launch<FSDPC_BINARY_SUB>(args, shape, numel, queue);
    case FSDPC_BINARY_MUL:
        return launch<FSDPC_BINARY_MUL>(args, shape, numel, queue);
    case FSDPC_BINARY_DIV:
        return launch<FSDPC_BINARY_DIV>(args, shape, numel, queue);
    case FSDPC_BINARY_POW:
        return launch<FSDPC_BINARY_POW>(args, shape, numel, queue);
    case FSDPC_BINARY_MAXIMUM:
        return launch<FSDPC_BINARY_MAXIMUM>(args, shape, numel, queue);
    case FSDPC_BINARY_MINIMUM:
        return launch<FSDPC_BINARY_MINIMUM>(args, shape, numel, queue);
    case FSDPC_BINARY_MASK:
    case FSDPC_BINARY_KEEP: {
        bool minus = args->kind == FSDPC_BINARY_MASK && args->dtype <= FSDPC_F64;
        if (args->dtype == FSDPC_BF16 || args->dtype == FSDPC_F16)
            return mask<uint16_t>(args, shape, numel, minus ? 0x8000 : 0, queue);
        if (args->dtype == FSDPC_F32 || args->dtype == FSDPC_I32)
            return mask<uint32_t>(args, shape, numel, minus ? 1u << 31 : 0, queue);
        return mask<uint64_t>(args, shape, numel, minus ? 1ull << 63 : 0, queue);
    }
    case FSDPC_BINARY_EQ:
        return compare<FSDPC_BINARY_EQ>(args, shape, numel, queue);
    case FSDPC_BINARY_NE:
        return compare<FSDPC_BINARY_NE>(args, shape, numel, queue);
    case FSDPC_BINARY_LT:
        return compare<FSDPC_BINARY_LT>(args, shape, numel, queue);
    case FSDPC_BINARY_LE:
        return compare<FSDPC_BINARY_LE>(args, shape, numel, queue);
    case FSDPC_BINARY_GT:
        return compare<FSDPC_BINARY_GT>(args, shape, numel, queue);
    case FSDPC_BINARY_GE:
        return compare<FSDPC_BINARY_GE>(args, shape, numel, queue);
    }
    return FSDPC_ERR_VALUE;
}
