/* Sums over some dimensions; twin of csrc/ops/nn_sum_body.h.
 *
 * x is dense, so neighbouring dimensions that are both kept or both reduced are merged first. The
 * first pass divides each output's terms into chunks whose length depends only on the shape. A team
 * of threads sums each chunk in fp32 (fp64 for F64) in a fixed order. The second pass adds the
 * chunks' sums in order, in fp64. If the innermost dimension is reduced, a team is a warp or a
 * block that traverses it. If the innermost dimension is kept, a block handles 32 neighbouring
 * outputs, with eight rows of threads that share each output's terms. Results do not depend on the
 * grid. Integers are summed as unsigned integers, exactly modulo 2^64.
 */
#include <type_traits>

#include "box.cuh"
#include "reduce.cuh"

typedef unsigned long long u64;

template <> struct wide_of<u64> {
    typedef u64 type;
};
template <typename W> __device__ __forceinline__ W widen(u64 x)
{
    return (W)x;
}

/* The type of a chunk's sum. */
template <typename T> using part = std::conditional_t<std::is_same<T, u64>::value, u64, double>;

enum { SUM_CHUNK = 8192, SUM_CHUNK_ROWS = 256, SUM_CHUNKS_MAX = 1024, SUM_COLS = 32, SUM_ROWS = 8 };

struct sum_plan {
    box kept, reduced; /* operand 0 is x; without the innermost dimension */
    size_t inner;      /* of the innermost dimension */
    size_t outputs, terms;
    size_t chunk, chunks; /* terms per chunk; chunks per output */
    bool squares;         /* terms are squares of x */
};

template <typename T>
__device__ __forceinline__ wide<T> term_of(const sum_plan &p, const T *x, size_t at)
{
    wide<T> v = widen<wide<T>>(x[at]);
    return p.squares ? v * v : v;
}

/* Returns the offset of an output's term t, relative to its first term. */
__device__ __forceinline__ size_t term_offset(const sum_plan &p, bool inner_kept, size_t t)
{
    if (inner_kept)
        return box_row(p.reduced, 0, t).at[0];
    size_t fold = t / p.inner;
    return box_row(p.reduced, 0, fold).at[0] + (t - fold * p.inner);
}

/* Each team of TEAM threads (a warp or a whole block) sums one (output, chunk) pair. */
template <typename T, int TEAM>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    sum_inner_kernel(part<T> *partial, const T *x, sum_plan p)
{
    size_t team = grid_thread() / TEAM, teams = grid_threads() / TEAM, items = p.outputs * p.chunks;
    size_t rounds = (items + teams - 1) / teams;
    for (size_t round = 0; round < rounds; round++) { /* all threads take part in the folds */
        size_t item = round * teams + team;
        wide<T> sum = 0;
        if (item < items) {
            size_t output = item / p.chunks, first = item % p.chunks * p.chunk;
            size_t last = p.terms - first < p.chunk ? p.terms : first + p.chunk;
            size_t base = box_row(p.kept, 0, output).at[0];
            for (size_t t = first + threadIdx.x % TEAM; t < last; t += TEAM)
                sum += term_of(p, x, base + term_offset(p, false, t));
        }
        sum = TEAM == WARP ? warp_sum(sum) : block_sum(sum);
        if (threadIdx.x % TEAM == 0 && item < items)
            partial[item] = (part<T>)sum;
    }
}

/* Each block sums one chunk for each of 32 outputs. */
template <typename T>
static __global__ void __launch_bounds__(SUM_COLS *SUM_ROWS)
    sum_rows_kernel(part<T> *partial, const T *x, sum_plan p)
{
    __shared__ wide<T> sums[SUM_ROWS][SUM_COLS];
    size_t col_blocks = (p.inner + SUM_COLS - 1) / SUM_COLS, outer = p.outputs / p.inner;
    unsigned lane = threadIdx.x % SUM_COLS, row = threadIdx.x / SUM_COLS;
    for (size_t item = blockIdx.x; item < outer * p.chunks * col_blocks; item += gridDim.x) {
        size_t col = item % col_blocks * SUM_COLS + lane, rest = item / col_blocks;
        size_t chunk = rest % p.chunks, kept = rest / p.chunks;
        size_t first = chunk * p.chunk;
        size_t last = p.terms - first < p.chunk ? p.terms : first + p.chunk;
        size_t base = box_row(p.kept, 0, kept).at[0];
        wide<T> sum = 0;
        for (size_t t = first + row; t < last && col < p.inner; t += SUM_ROWS)
            sum += term_of(p, x, base + term_offset(p, true, t) + col);
        sums[row][lane] = sum;
        __syncthreads();
        if (row == 0 && col < p.inner) {
            for (int r = 1; r < SUM_ROWS; r++)
                sum += sums[r][lane];
            partial[(kept * p.inner + col) * p.chunks + chunk] = (part<T>)sum;
        }
        __syncthreads();
    }
}

template <typename Out, bool WIDE>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    sum_finish_kernel(Out *out, const double *partial, sum_plan p, double scale, bool accumulate)
{
    for (size_t i = grid_thread(); i < p.outputs; i += grid_threads()) {
        double total = 0;
        for (size_t c = 0; c < p.chunks; c++)
            total += partial[i * p.chunks + c];
        total *= scale;
        double old = accumulate ? widen<double>(out[i]) : 0.0;
        if (WIDE) /* F64 input or output */
            out[i] = narrow<Out>(sizeof(Out) == 2 ? (double)(float)(total + old) : total + old);
        else
            out[i] = narrow<Out>((float)total + (float)old);
    }
}

static __global__ void __launch_bounds__(BLOCK_THREADS)
    sum_finish_integers_kernel(u64 *out, const u64 *partial, sum_plan p)
{
    for (size_t i = grid_thread(); i < p.outputs; i += grid_threads()) {
        u64 total = 0;
        for (size_t c = 0; c < p.chunks; c++)
            total += partial[i * p.chunks + c];
        out[i] = total;
    }
}

static sum_plan plan_of(const fsdpc_sum_args *args, bool *inner_kept_out)
{
    size_t shape[FSDPC_MAX_DIMS];
    bool reduced[FSDPC_MAX_DIMS];
    int ndim = 0;
    for (int d = 0; d < args->ndim; d++) {
        if (args->shape[d] == 1)
            continue;
        if (ndim && reduced[ndim - 1] == args->reduced[d]) {
            shape[ndim - 1] *= args->shape[d];
        } else {
            shape[ndim] = args->shape[d];
            reduced[ndim++] = args->reduced[d];
        }
    }
    sum_plan p = {};
    p.squares = args->squares;
    p.inner = ndim ? shape[ndim - 1] : 1;
    bool inner_kept = !ndim || !reduced[ndim - 1];
    size_t strides[FSDPC_MAX_DIMS], stride = p.inner;
    for (int d = ndim - 2; d >= 0; stride *= shape[d--])
        strides[d] = stride;
    for (int d = 0; d < ndim - 1; d++) {
        box *b = reduced[d] ? &p.reduced : &p.kept;
        b->shape[b->ndim] = shape[d];
        b->stride[0][b->ndim++] = strides[d];
    }
    p.outputs = box_numel(p.kept) * (inner_kept ? p.inner : 1);
    p.terms = box_numel(p.reduced) * (inner_kept ? 1 : p.inner);
    p.chunk = inner_kept ? SUM_CHUNK_ROWS : SUM_CHUNK;
    p.chunk = fsdpc_max_size(p.chunk, fsdpc_ceil_div(p.terms, SUM_CHUNKS_MAX));
    p.chunks = fsdpc_max_size(fsdpc_ceil_div(p.terms, p.chunk), 1);
    *inner_kept_out = inner_kept;
    return p;
}

template <typename T>
static void sum_launch(const sum_plan &p, bool inner_kept, const T *x, void *memory,
                       const fsdpc_cuda_queue *queue)
{
    part<T> *partial = (part<T> *)memory;
    size_t items = p.outputs * p.chunks;
    if (inner_kept) {
        size_t blocks = items / p.inner * fsdpc_ceil_div(p.inner, SUM_COLS);
        FSDPC_LAUNCH(sum_rows_kernel<T>, grid_of(queue, blocks, 1), SUM_COLS * SUM_ROWS, 0, queue,
                     partial, x, p);
    } else if (p.terms <= 1024) {
        FSDPC_LAUNCH((sum_inner_kernel<T, WARP>), grid_of(queue, items, BLOCK_THREADS / WARP),
                     BLOCK_THREADS, 0, queue, partial, x, p);
    } else {
        FSDPC_LAUNCH((sum_inner_kernel<T, BLOCK_THREADS>), grid_of(queue, items, 1), BLOCK_THREADS,
                     0, queue, partial, x, p);
    }
}

extern "C" fsdpc_status fsdpc_cuda_sum(const fsdpc_sum_args *args, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    bool inner_kept;
    sum_plan p = plan_of(args, &inner_kept);
    if (p.outputs == 0)
        return FSDPC_OK;
    size_t bytes;
    void *memory;
    FSDPC_TRY(fsdpc_mul_size(p.outputs, p.chunks * sizeof(double), &bytes));
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
    double *partial = (double *)memory;
    unsigned grid = grid_of(queue, p.outputs, BLOCK_THREADS);
    if (args->dtype == FSDPC_I64)
        sum_launch<u64>(p, inner_kept, (const u64 *)args->x, memory, queue);
    else
        FSDPC_FOR_FLOAT(args->dtype, T,
                        sum_launch<T>(p, inner_kept, (const T *)args->x, memory, queue))
    if (args->dtype == FSDPC_I64)
        FSDPC_LAUNCH(sum_finish_integers_kernel, grid, BLOCK_THREADS, 0, queue, (u64 *)args->out,
                     (const u64 *)memory, p);
    else if (args->dtype == FSDPC_F64 || args->out_dtype == FSDPC_F64)
        FSDPC_FOR_FLOAT(args->out_dtype, Out,
                        FSDPC_LAUNCH((sum_finish_kernel<Out, true>), grid, BLOCK_THREADS, 0, queue,
                                     (Out *)args->out, partial, p, args->scale, args->accumulate))
    else
        FSDPC_FOR_FLOAT(args->out_dtype, Out,
                        FSDPC_LAUNCH((sum_finish_kernel<Out, false>), grid, BLOCK_THREADS, 0, queue,
                                     (Out *)args->out, partial, p, args->scale, args->accumulate))
    fsdpc_device_free(stream->device, memory);
    return launched("sum");
}
