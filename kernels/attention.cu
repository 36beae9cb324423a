/* Row-by-row attention, and the selection between it and the blocked kernels; twin of
 * csrc/ops/attention.c.
 *
 * A warp handles one query (or, for dK and dV, one key) and visits the keys (or queries) 32 at a
 * time. Each lane computes one of the 32 scores. The warp then adds up the 32 rows, with each lane
 * handling every 32nd element. Sums do not use atomics, so results are the same in every run.
 *
 * Rows wider than 256 elements are processed in several passes, each of which recomputes the
 * scores.
 */
#include "attention.cuh"
#include "reduce.cuh"

enum { ROW_WARPS = 4, ROW_ELEMENTS = 8, ROW_SPAN = ROW_ELEMENTS * WARP };

template <typename T>
__device__ __forceinline__ wide<T> dot_rows(const T *a, const T *b, size_t dim)
{
    wide<T> sum = 0;
    for (size_t c = 0; c < dim; c++)
        sum += widen<wide<T>>(a[c]) * widen<wide<T>>(b[c]);
    return sum;
}

/* sum[e] += weight of lane k times x_k[span + lane + 32 e], over the lanes k below `count`. */
template <typename T>
__device__ __forceinline__ void add_rows(wide<T> (&sum)[ROW_ELEMENTS], wide<T> weight,
                                         const T *mine, unsigned count, size_t span, size_t dim)
{
    for (unsigned k = 0; k < count; k++) {
        wide<T> w = __shfl_sync(0xffffffffu, weight, k);
        const T *row = (const T *)__shfl_sync(0xffffffffu, (unsigned long long)(uintptr_t)mine, k);
#pragma unroll
        for (int e = 0; e < ROW_ELEMENTS; e++) {
            size_t c = span + threadIdx.x % WARP + WARP * e;
            if (c < dim)
                sum[e] += w * widen<wide<T>>(row[c]);
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_row(T *row, const wide<T> (&sum)[ROW_ELEMENTS], wide<T> scale,
                                          size_t span, size_t dim)
{
#pragma unroll
    for (int e = 0; e < ROW_ELEMENTS; e++) {
        size_t c = span + threadIdx.x % WARP + WARP * e;
        if (c < dim)
            row[c] = narrow<T>(sum[e] * scale);
    }
}

/* A row index into lse, split into (b, h, t). */
struct row_place {
    size_t b, t, h;
};

__device__ __forceinline__ row_place place_of(size_t row, size_t tokens, size_t heads)
{
    return row_place{row / tokens / heads, row % tokens, row / tokens % heads};
}

template <typename T>
static __global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_row_kernel(fsdpc_attention_args a, size_t rows)
{
    typedef wide<T> W;
    unsigned lane = threadIdx.x % WARP;
    for (size_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) {
        row_place at = place_of(row, a.tokens_q, a.heads);
        size_t kv = at.h / (a.heads / a.kv_heads), visible = visible_keys(a, at.t);
        const T *q = row_of<const T>(a.q, a.stride_q, at.b, at.t, at.h);
        for (size_t span = 0; span < a.dim; span += ROW_SPAN) {
            W sum[ROW_ELEMENTS] = {}, top = -INFINITY, total = 0;
            for (size_t j0 = 0; j0 < visible; j0 += WARP) {
                size_t j = j0 + lane;
                unsigned count = (unsigned)(visible - j0 < WARP ? visible - j0 : WARP);
                bool in = lane < count;
                W s = -INFINITY;
                if (in)
                    s = (W)a.scale *
                        dot_rows(q, row_of<const T>(a.k, a.stride_k, at.b, j, kv), a.dim);
                W higher = max_values::of(top, warp_fold<max_values>(s));
                W p = in ? exp(s - higher) : (W)0, shrink = exp(top - higher);
                total = total * shrink + warp_sum(p);
                top = higher;
                for (int e = 0; e < ROW_ELEMENTS; e++)
                    sum[e] *= shrink;
                add_rows<T>(sum, p, row_of<const T>(a.v, a.stride_v, at.b, in ? j : 0, kv), count,
                            span, a.dim);
            }
            store_row(row_of<T>(a.out, a.stride_out, at.b, at.t, at.h), sum,
                      total == 0 ? (W)0 : (W)1 / total, span, a.dim);
            if (lane == 0)
                a.lse[row] = (float)(visible ? top + log(total) : -INFINITY);
        }
    }
}

/* -- backward ---------------------------------------------------------------------------------- */

template <typename T>
static __global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_stats_kernel(fsdpc_attention_args a, size_t rows, attention_rows<wide<T>> stats)
{
    typedef wide<T> W;
    unsigned lane = threadIdx.x % WARP;
    for (size_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) {
        row_place at = place_of(row, a.tokens_q, a.heads);
        const T *out = row_of<const T>(a.out, a.stride_out, at.b, at.t, at.h);
        const T *dout = row_of<const T>(a.dout, a.stride_out, at.b, at.t, at.h);
        W delta = 0;
        for (size_t c = lane; c < a.dim; c += WARP)
            delta += widen<W>(out[c]) * widen<W>(dout[c]);
        delta = warp_sum(delta);
        if (lane == 0)
            stats.delta[row] = delta;
        if (sizeof(W) == sizeof(float))
            continue;
        const T *q = row_of<const T>(a.q, a.stride_q, at.b, at.t, at.h);
        size_t kv = at.h / (a.heads / a.kv_heads), visible = visible_keys(a, at.t);
        W about = (W)a.lse[row], total = 0; /* accurate enough as a reference */
        for (size_t j = lane; j < visible; j += WARP)
            total +=
                exp((W)a.scale * dot_rows(q, row_of<const T>(a.k, a.stride_k, at.b, j, kv), a.dim) -
                    about);
        total = warp_sum(total);
        if (lane == 0)
            stats.lse[row] = visible ? about + log(total) : -(W)INFINITY;
    }
}

template <typename W> struct pair_grads {
    W p, ds;
};

/* Returns the attention probability of a query-key pair, and the gradient of its score before
 * scaling. */
template <typename T>
__device__ __forceinline__ pair_grads<wide<T>> pair_of(const fsdpc_attention_args &a,
                                                       const row_place &query, size_t j, size_t kv,
                                                       const attention_rows<wide<T>> &stats)
{
    typedef wide<T> W;
    size_t row = (query.b * a.heads + query.h) * a.tokens_q + query.t;
    W lse = sizeof(W) == sizeof(float) ? (W)a.lse[row] : stats.lse[row];
    W s = (W)a.scale * dot_rows(row_of<const T>(a.q, a.stride_q, query.b, query.t, query.h),
                                row_of<const T>(a.k, a.stride_k, query.b, j, kv), a.dim);
    W dp = dot_rows(row_of<const T>(a.dout, a.stride_out, query.b, query.t, query.h),
                    row_of<const T>(a.v, a.stride_v, query.b, j, kv), a.dim);
    W p = exp(s - lse);
    return pair_grads<W>{p, p * (dp - stats.delta[row])};
}

template <typename T>
static __global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_dq_kernel(fsdpc_attention_args a, size_t rows, attention_rows<wide<T>> stats)
{
    typedef wide<T> W;
    unsigned lane = threadIdx.x % WARP;
    for (size_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) {
        row_place at = place_of(row, a.tokens_q, a.heads);
        size_t kv = at.h / (a.heads / a.kv_heads), visible = visible_keys(a, at.t);
        for (size_t span = 0; span < a.dim; span += ROW_SPAN) {
            W dq[ROW_ELEMENTS] = {};
            for (size_t j0 = 0; j0 < visible; j0 += WARP) {
                unsigned count = (unsigned)(visible - j0 < WARP ? visible - j0 : WARP);
                size_t j = lane < count ? j0 + lane : 0;
                W ds = lane < count ? pair_of<T>(a, at, j, kv, stats).ds : (W)0;
                add_rows<T>(dq, ds, row_of<const T>(a.k, a.stride_k, at.b, j, kv), count, span,
                            a.dim);
            }
            store_row(row_of<T>(a.dq, a.stride_q, at.b, at.t, at.h), dq, (W)a.scale, span, a.dim);
        }
    }
}

template <typename T>
static __global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_dkv_kernel(fsdpc_attention_args a, size_t rows, attention_rows<wide<T>> stats)
{
    typedef wide<T> W;
    unsigned lane = threadIdx.x % WARP;
    size_t group = a.heads / a.kv_heads;
    for (size_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) {
        row_place key = place_of(row, a.tokens_k, a.kv_heads);
        for (size_t span = 0; span < a.dim; span += ROW_SPAN) {
            W dk[ROW_ELEMENTS] = {}, dv[ROW_ELEMENTS] = {};
            for (size_t h = key.h * group; h < (key.h + 1) * group; h++)
                for (size_t t0 = first_query(a, key.t); t0 < a.tokens_q; t0 += WARP) {
                    unsigned count = (unsigned)(a.tokens_q - t0 < WARP ? a.tokens_q - t0 : WARP);
                    row_place query = {key.b, lane < count ? t0 + lane : t0, h};
                    pair_grads<W> pair = {0, 0};
                    if (lane < count)
                        pair = pair_of<T>(a, query, key.t, key.h, stats);
                    add_rows<T>(dk, pair.ds, row_of<const T>(a.q, a.stride_q, key.b, query.t, h),
                                count, span, a.dim);
                    add_rows<T>(dv, pair.p,
                                row_of<const T>(a.dout, a.stride_out, key.b, query.t, h), count,
                                span, a.dim);
                }
            store_row(row_of<T>(a.dk, a.stride_k, key.b, key.t, key.h), dk, (W)a.scale, span,
                      a.dim);
            store_row(row_of<T>(a.dv, a.stride_v, key.b, key.t, key.h), dv, (W)1, span, a.dim);
        }
    }
}

/* -- launchers --------------------------------------------------------------------------------- */

static unsigned warps_grid(const fsdpc_cuda_queue *queue, size_t rows)
{
    return grid_of(queue, rows, ROW_WARPS);
}

extern "C" fsdpc_status fsdpc_cuda_attention(const fsdpc_attention_args *a, fsdpc_stream *stream)
{
    size_t rows = a->batch * a->heads * a->tokens_q;
    if (rows == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    if (attention_tiles_take(a, false))
        return attention_tiles(a, queue);
    FSDPC_FOR_FLOAT(a->dtype, T,
                    FSDPC_LAUNCH(attention_row_kernel<T>, warps_grid(queue, rows), ROW_WARPS * WARP,
                                 0, queue, *a, rows))
    return launched("attention");
}

template <typename T>
static fsdpc_status backward_launch(const fsdpc_attention_args *a, size_t rows, void *memory,
                                    const fsdpc_cuda_queue *queue)
{
    attention_rows<wide<T>> stats = {(wide<T> *)memory, (wide<T> *)memory + rows};
    if (rows)
        FSDPC_LAUNCH(attention_stats_kernel<T>, warps_grid(queue, rows), ROW_WARPS * WARP, 0, queue,
                     *a, rows, stats);
    if (rows && attention_tiles_take(a, true))
        return attention_tiles_backward(a, (const float *)memory, queue);
    if (rows)
        FSDPC_LAUNCH(attention_dq_kernel<T>, warps_grid(queue, rows), ROW_WARPS * WARP, 0, queue,
                     *a, rows, stats);
    size_t keys = a->batch * a->kv_heads * a->tokens_k;
    if (keys)
        FSDPC_LAUNCH(attention_dkv_kernel<T>, warps_grid(queue, keys), ROW_WARPS * WARP, 0, queue,
                     *a, keys, stats);
    return launched("attention's backward");
}

extern "C" fsdpc_status fsdpc_cuda_attention_backward(const fsdpc_attention_args *a,
                                                      fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t rows = a->batch * a->heads * a->tokens_q, bytes;
    size_t row_bytes = a->dtype == FSDPC_F64 ? 2 * sizeof(double) : sizeof(float);
    void *memory;
    FSDPC_TRY(fsdpc_mul_size(rows, row_bytes, &bytes));
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &memory));
    fsdpc_status status = FSDPC_ERR_DTYPE;
    FSDPC_FOR_FLOAT(a->dtype, T, status = backward_launch<T>(a, rows, memory, queue))
    fsdpc_device_free(stream->device, memory);
    return status;
}
