/* Elementwise kernels: one loop in which every operation uses 16-byte accesses.
 *
 * An operation is a struct of plain values with an enum WIDTH and
 *     template <int N> __device__ void run(size_t i) const;
 * which handles elements i .. i + N - 1, where N is WIDTH or 1. Both variants must compute the same
 * result for an element, because only its address decides whether it is part of a vector or an
 * edge.
 *
 * Values that each thread needs to compute only once, before the loop, are returned by
 *     __device__ K begin() const;
 * and passed to every run<N>(i, k). Values computed inside the loop would be reloaded for each
 * vector, because a store might have changed them.
 *
 * WIDTH is the number of elements in 16 bytes of the widest type that is stored. With a larger
 * WIDTH, each thread's store would be split into several 16-byte stores that are not adjacent to
 * those of neighbouring threads. Each of these would fill at most half of a 32-byte sector. (Loads
 * may be wider: the second finds the remainder of the first load's sector in L1.)
 *
 * If skipping the same few elements aligns all buffers, the elements between the two edges are read
 * in vectors. If the buffers cannot be aligned together, they are read one element at a time, which
 * is still coalesced.
 */
#ifndef FSDPC_KERNELS_MAP_CUH
#define FSDPC_KERNELS_MAP_CUH

#include "dtype.cuh"

struct map_plan {
    size_t numel, head, vectors;
};

/* A buffer that an operation reads or writes. */
struct map_buffer {
    const void *base; /* NULL: not used */
    size_t bytes;     /* of one element */
};

static inline map_plan map_plan_of(size_t numel, size_t width, const map_buffer *buffers, int n)
{
    for (size_t head = 0; head < width; head++) {
        bool fits = true;
        for (int b = 0; b < n && fits; b++) {
            size_t bytes = buffers[b].bytes * width, align = bytes < 16 ? bytes : 16;
            if (buffers[b].base)
                fits = ((uintptr_t)buffers[b].base + head * buffers[b].bytes) % align == 0;
        }
        if (fits && head < numel)
            return map_plan{numel, head, (numel - head) / width};
    }
    return map_plan{numel, 0, 0};
}

/* An operation together with the result of its begin(). */
template <typename Op, typename K> struct map_begun {
    const Op &op;
    K k;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        op.template run<N>(i, k);
    }
};

template <typename Op>
__device__ __forceinline__ auto map_begin(const Op &op, int)
    -> map_begun<Op, decltype(op.begin())> /* not a candidate if begin is missing */
{
    return {op, op.begin()};
}
template <typename Op> __device__ __forceinline__ const Op &map_begin(const Op &op, long)
{
    return op;
}

template <typename Op>
__global__ void __launch_bounds__(BLOCK_THREADS) map_kernel(Op op, map_plan p)
{
    const auto &begun = map_begin(op, 0);
    size_t thread = grid_thread(), threads = grid_threads();
    for (size_t v = thread; v < p.vectors; v += threads)
        begun.template run<Op::WIDTH>(p.head + v * Op::WIDTH);
    size_t in_vectors = p.vectors * Op::WIDTH;
    for (size_t j = thread; j < p.numel - in_vectors; j += threads)
        begun.template run<1>(j < p.head ? j : j + in_vectors);
}

/* Runs the operation over [0, numel). */
template <typename Op, int N>
static fsdpc_status map_launch(const char *what, const Op &op, size_t numel,
                               const map_buffer (&buffers)[N], const fsdpc_stream *stream)
{
    if (numel == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    map_plan plan = map_plan_of(numel, Op::WIDTH, buffers, N);
    size_t items = fsdpc_max_size(plan.vectors, numel - plan.vectors * Op::WIDTH);
    FSDPC_LAUNCH(map_kernel<Op>, grid_of(queue, items, BLOCK_THREADS), BLOCK_THREADS, 0, queue, op,
                 plan);
    return launched(what);
}

#endif
