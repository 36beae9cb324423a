/* Embedding rows, forward and backward; twin of csrc/ops/nn_embedding_body.h.
 *
 * Backward sorts the positions stably by id (sort.cuh) and finds where the positions of each table
 * row begin. One block per table row then adds the gradients at its positions in order, in fp32,
 * and rounds once; the bits match the CPU's for any grid. An out-of-range id is reported as a
 * fault. Forward writes zeros for it; backward sorts it after the last row and skips it.
 */
#include "rows.cuh"
#include "sort.cuh"

__device__ __forceinline__ long long id_at(const fsdpc_embedding_args &a, size_t i)
{
    return a.id_dtype == FSDPC_I32 ? ((const int32_t *)a.ids)[i]
                                   : (long long)((const int64_t *)a.ids)[i];
}

/* Uses the widest chunks that divide a row evenly. */
template <typename Chunk>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    embedding_kernel(fsdpc_embedding_args a, size_t row_chunks, fsdpc_cuda_fault *fault)
{
    for (size_t i = blockIdx.x; i < a.count; i += gridDim.x) {
        long long id = id_at(a, i);
        bool bad = (unsigned long long)id >= a.rows;
        if (bad && threadIdx.x == 0)
            report_fault(fault, FSDPC_CUDA_FAULT_EMBEDDING_ID, id, i, a.rows);
        const Chunk *from = (const Chunk *)a.table + (bad ? 0 : (size_t)id) * row_chunks;
        Chunk *to = (Chunk *)a.out + i * row_chunks;
        for (size_t c = threadIdx.x; c < row_chunks; c += blockDim.x)
            to[c] = bad ? Chunk{} : from[c];
    }
}

extern "C" fsdpc_status fsdpc_cuda_embedding(const fsdpc_embedding_args *a, fsdpc_stream *stream)
{
    if (a->count == 0 || a->dim == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t row_bytes = a->dim * fsdpc_dtype_bytes(a->dtype);
    size_t all = (uintptr_t)a->table | (uintptr_t)a->out | row_bytes | 16, bytes = all & -all;
    unsigned grid = row_grid(queue, a->count), threads = row_threads(row_bytes / bytes);
    switch (bytes) {
#define CASE(width, Chunk)                                                                         \
    case width:                                                                                    \
        FSDPC_LAUNCH(embedding_kernel<Chunk>, grid, threads, 0, queue, *a, row_bytes / bytes,      \
                     queue->fault);                                                                \
        break;
        CASE(16, uint4)
        CASE(8, uint2)
        CASE(4, uint32_t)
        CASE(2, uint16_t)
        CASE(1, uint8_t)
#undef CASE
    }
    return launched("embedding");
}

/* -- backward ---------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(BLOCK_THREADS)
    items_kernel(fsdpc_embedding_args a, sort_item *items, fsdpc_cuda_fault *fault)
{
    for (size_t i = grid_thread(); i < a.count; i += grid_threads()) {
        long long id = id_at(a, i);
        bool bad = (unsigned long long)id >= a.rows;
        if (bad)
            report_fault(fault, FSDPC_CUDA_FAULT_EMBEDDING_ID, id, i, a.rows);
        items[i] = sort_item{(uint32_t)(bad ? a.rows : (size_t)id), (uint32_t)i};
    }
}

/* starts[row]: the number of items with smaller ids; for rows 0 .. rows. */
static __global__ void __launch_bounds__(BLOCK_THREADS)
    starts_kernel(const sort_item *items, size_t count, size_t rows, uint32_t *starts)
{
    for (size_t i = grid_thread(); i <= count; i += grid_threads()) {
        size_t from = i ? (size_t)items[i - 1].id + 1 : 0, to = i < count ? items[i].id : rows;
        for (size_t row = from; row <= to && row <= rows; row++)
            starts[row] = (uint32_t)i;
    }
}

template <typename T, typename Out, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    embedding_backward_kernel(fsdpc_embedding_args a, const sort_item *items,
                              const uint32_t *starts)
{
    typedef decltype(wide<T>() + wide<Out>()) W;
    for (size_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        uint32_t first = starts[row], last = starts[row + 1];
        if (first == last && a.accumulate)
            continue;
        FSDPC_FOR_ROW(N, c, a.dim)
        {
            Out *to = (Out *)a.dtable + row * a.dim + c;
            vec<W, N> sum = {};
            for (uint32_t k = first; k < last; k++) {
                vec<W, N> d =
                    load_wide<N, W>((const T *)a.dout + (size_t)items[k].position * a.dim + c);
#pragma unroll
                for (int e = 0; e < N; e++)
                    sum.at[e] += d.at[e];
            }
            if (a.accumulate) {
                vec<W, N> old = load_wide<N, W>(to);
#pragma unroll
                for (int e = 0; e < N; e++)
                    sum.at[e] += old.at[e];
            }
            store_narrow<N>(to, sum);
        }
    }
}

template <typename T, typename Out>
static void backward_launch(const fsdpc_embedding_args *a, const sort_item *items,
                            const uint32_t *starts, const fsdpc_cuda_queue *queue)
{
    const int N = 16 / (sizeof(T) < sizeof(Out) ? sizeof(Out) : sizeof(T));
    bool vectors = a->dim % N == 0 && (uintptr_t)a->dout % (N * sizeof(T)) == 0 &&
                   (uintptr_t)a->dtable % (N * sizeof(Out)) == 0;
    unsigned grid = row_grid(queue, a->rows), threads = row_threads(a->dim / (vectors ? N : 1));
    if (vectors)
        FSDPC_LAUNCH((embedding_backward_kernel<T, Out, N>), grid, threads, 0, queue, *a, items,
                     starts);
    else
        FSDPC_LAUNCH((embedding_backward_kernel<T, Out, 1>), grid, threads, 0, queue, *a, items,
                     starts);
}

extern "C" fsdpc_status fsdpc_cuda_embedding_backward(const fsdpc_embedding_args *a,
                                                      fsdpc_stream *stream)
{
    if (a->rows == 0 || a->dim == 0)
        return FSDPC_OK;
    if (a->rows >= UINT32_MAX || a->count >= UINT32_MAX)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "an embedding of %zu rows and %zu ids on CUDA; both must be below 2^32",
                          a->rows, a->count);
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t counters = sort_counters(a->count), bytes;
    bytes = 2 * a->count * sizeof(sort_item) + (counters + a->rows + 1) * sizeof(uint32_t);
    void *memory;
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
    sort_item *items = (sort_item *)memory, *other = items + a->count;
    unsigned *counts = (unsigned *)(other + a->count);
    uint32_t *starts = counts + counters;
    if (a->count) {
        FSDPC_LAUNCH(items_kernel, grid_of(queue, a->count, BLOCK_THREADS), BLOCK_THREADS, 0, queue,
                     *a, items, queue->fault);
        items = sort_launch(items, other, a->count, a->rows + 1, counts, queue);
    }
    FSDPC_LAUNCH(starts_kernel, grid_of(queue, a->count + 1, BLOCK_THREADS), BLOCK_THREADS, 0,
                 queue, items, a->count, a->rows, starts);
    FSDPC_FOR_FLOAT(
        a->dtype, T,
        FSDPC_FOR_FLOAT(a->dtable_dtype, Out, backward_launch<T, Out>(a, items, starts, queue)))
    fsdpc_device_free(stream->device, memory);
    return launched("embedding's backward");
}
