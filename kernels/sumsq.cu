/* Sums of squares of whole leaves into an exact accumulator; twin of csrc/ops/flat_sumsq_body.h.
 *
 * A leaf's order of summation is part of the result: sixteen fp64 partial sums, element i into
 * partial i mod 16, folded j with j + 8, 4, 2, 1.  Here 16 / V lanes share a leaf, V being the
 * elements of 16 bytes: lane q holds partials q V .. q V + V - 1, loads 16 bytes where the CPU
 * loads a vector, and the lanes fold by shuffles.  So a warp reads whole sectors, no element twice.
 *
 * The accumulator (csrc/ops/exact_sum.h) is integers, so the order of additions, and thus blocks
 * and atomics, cannot change it.  Atomics for every leaf would be too slow; but leaves near each
 * other are about equally large, so a thread keeps a window of four digits in registers, adds its
 * leaves there, and writes the window out when a leaf falls outside it and at the end.  A block
 * collects its threads' windows in shared memory, carries, and adds to the result: one addition of
 * a normalised sum, as the accumulator's rule counts.
 */
#include "dtype.cuh"
#include "reduce.cuh"

enum { PARTIALS = 16, WINDOW = 4, DIGITS = FSDPC_EXACT_SUM_DIGITS, WORDS = DIGITS + 2 };

/* atomicAdd has no signed form; two's complement needs none. */
__device__ __forceinline__ void add_word(int64_t *word, int64_t value)
{
    if (value)
        atomicAdd((unsigned long long *)word, (unsigned long long)value);
}

struct digit_window {
    int first; /* digits first .. first + WINDOW - 1 */
    int64_t words[WINDOW];

    __device__ __forceinline__ void flush(int64_t *sum)
    {
#pragma unroll
        for (int w = 0; w < WINDOW; w++) {
            if (words[w])
                add_word(sum + first + w, words[w]);
            words[w] = 0;
        }
    }

    /* value >= 0, or NaN or infinity */
    __device__ __forceinline__ void add(double value, int64_t *sum)
    {
        uint64_t bits = (uint64_t)__double_as_longlong(value);
        uint64_t exponent = bits >> 52 & 0x7ff, mantissa = bits & 0xfffffffffffffu;
        if (exponent == 0x7ff) {
            add_word(sum + (mantissa ? DIGITS : DIGITS + 1), 1);
            return;
        }
        mantissa |= (uint64_t)(exponent != 0) << 52;
        unsigned place = (unsigned)(exponent - (exponent != 0)), shift = place % 32;
        int digit = (int)(place / 32);
        uint64_t low = mantissa << shift, high = shift ? mantissa >> (64 - shift) : 0;
        if (digit < first || digit > first + 1) {
            flush(sum);
            first = digit < DIGITS - WINDOW ? digit : DIGITS - WINDOW;
        }
        int64_t parts[3] = {(int64_t)(low & 0xffffffffu), (int64_t)(low >> 32), (int64_t)high};
#pragma unroll
        for (int k = 0; k < 3; k++) /* words are indexed by constants, to stay in registers */
#pragma unroll
            for (int w = 0; w < WINDOW; w++)
                words[w] += digit + k == first + w ? parts[k] : 0;
    }

    /* All lanes of a warp call; one atomic a word where their windows agree. */
    __device__ __forceinline__ void flush_warp(int64_t *sum)
    {
        if (!__all_sync(0xffffffffu, first == __shfl_sync(0xffffffffu, first, 0))) {
            flush(sum);
            return;
        }
#pragma unroll
        for (int w = 0; w < WINDOW; w++)
            words[w] = warp_sum((long long)words[w]);
        if (threadIdx.x % WARP == 0)
            flush(sum);
    }
};

/* CPU and GPU alike may fuse here, since squares of at most 24 bits are exact; those of F64 are
 * not, and this file is compiled without fusing. */
template <typename T, int V>
__device__ __forceinline__ void add_squares(double (&partial)[V], const vec<T, V> &x)
{
#pragma unroll
    for (int c = 0; c < V; c++) {
        double value = widen<double>(x.at[c]);
        partial[c] += value * value;
    }
}

/* Lane q's part of a leaf's numel elements at x. */
template <typename T, int V, bool VECTORS>
__device__ __forceinline__ void leaf_partials(double (&partial)[V], const T *x, size_t numel, int q)
{
    size_t i = 0;
    if (VECTORS) {
#pragma unroll 4
        for (; i + PARTIALS <= numel; i += PARTIALS)
            add_squares<T, V>(partial, load<V>(x + i + q * V));
    }
    for (; i < numel; i += PARTIALS) {
#pragma unroll
        for (int c = 0; c < V; c++) {
            size_t at = i + q * V + c;
            double value = at < numel ? widen<double>(x[at]) : 0.0;
            partial[c] += value * value;
        }
    }
}

/* The sixteen partial sums as one, in every lane of the leaf. */
template <int V> __device__ __forceinline__ double fold_partials(double (&partial)[V])
{
#pragma unroll
    for (int half = PARTIALS / 2; half; half /= 2) {
        if (half >= V) {
#pragma unroll
            for (int c = 0; c < V; c++)
                partial[c] += __shfl_xor_sync(0xffffffffu, partial[c], half / V);
        } else {
#pragma unroll
            for (int c = 0; c < half; c++)
                partial[c] += partial[c + half];
        }
    }
    return partial[0];
}

__device__ __forceinline__ void carry(int64_t *digits)
{
    for (int d = 0; d + 1 < DIGITS; d++) {
        digits[d + 1] += digits[d] >> 32;
        digits[d] &= 0xffffffff;
    }
}

template <typename T, bool VECTORS>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    sumsq_kernel(const T *x, size_t numel, size_t leaf, size_t leaves, size_t rounds, int64_t *sum)
{
    const int V = 16 / sizeof(T), LANES = PARTIALS / V;
    __shared__ int64_t words[WORDS];
    for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
        words[w] = 0;
    __syncthreads();

    /* A team of LANES lanes takes LANES leaves at a time, so that each lane has one to add. */
    int q = threadIdx.x % LANES;
    size_t team = grid_thread() / LANES, step = grid_threads();
    digit_window window = {0, {0, 0, 0, 0}};
    for (size_t round = 0; round < rounds; round++) { /* all lanes, for the shuffles */
        size_t first = round * step + team * LANES;
        double mine = 0;
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            size_t begin = (first + k) * leaf;
            double partial[V] = {};
            if (first + k < leaves)
                leaf_partials<T, V, VECTORS>(partial, x + begin,
                                             leaf < numel - begin ? leaf : numel - begin, q);
            double total = fold_partials<V>(partial);
            mine = k == q ? total : mine;
        }
        window.add(mine, words);
    }
    window.flush_warp(words);
    __syncthreads();
    if (threadIdx.x == 0)
        carry(words);
    __syncthreads();
    for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
        add_word(sum + w, words[w]);
}

extern "C" fsdpc_status fsdpc_cuda_sumsq(const void *x, fsdpc_dtype dtype, size_t numel,
                                         size_t leaf, fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    if (numel == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    leaf = fsdpc_min_size(leaf, numel);
    size_t bytes = fsdpc_dtype_bytes(dtype), leaves = fsdpc_ceil_div(numel, leaf);
    bool vectors = (uintptr_t)x % 16 == 0 && (leaf * bytes % 16 == 0 || leaves == 1);
    int64_t *sum = sum_io->digits; /* nans and infinities follow, as words DIGITS and DIGITS + 1 */
    /* Fewer blocks than elsewhere: each ends in a carry and some atomics. */
    size_t blocks = fsdpc_ceil_div(leaves, BLOCK_THREADS);
    size_t grid = fsdpc_min_size(blocks, (size_t)queue->multiprocessors * 8);
    size_t rounds = fsdpc_ceil_div(leaves, grid * BLOCK_THREADS);
    FSDPC_FOR_FLOAT(dtype, T, {
        if (vectors)
            FSDPC_LAUNCH((sumsq_kernel<T, true>), grid, BLOCK_THREADS, 0, queue, (const T *)x,
                         numel, leaf, leaves, rounds, sum);
        else
            FSDPC_LAUNCH((sumsq_kernel<T, false>), grid, BLOCK_THREADS, 0, queue, (const T *)x,
                         numel, leaf, leaves, rounds, sum);
    })
    return launched("sumsq");
}
