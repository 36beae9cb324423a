/* The backward pass of blocked attention on tensor cores, without atomics.
 *
 * In both kernels, each sum has a single writer, so results are the same in every run. dQ: a block
 * handles 64 queries and visits the keys. dK and dV: a block handles 64 keys of a key-value head
 * and visits the queries of all heads of its group in order. The dK and dV kernel computes
 * transposed scores, so that P^T and dS^T are already in registers as left operands. As a result,
 * scores and dP are computed twice, which accounts for two of the seven products.
 *
 * P = exp(scale s - lse); dS = P (dP - delta) is rounded to the dtype before it is multiplied;
 * scale is applied to the finished sums.
 */
#include "attention_tiles.cuh"

/* The lse (base 2) and delta of each query; rows that see no keys or do not exist have lse = +inf,
 * which makes P zero. */
struct query_rows {
    float lse[TILE_ROWS], delta[TILE_ROWS];
};

__device__ __forceinline__ float lse_of(const fsdpc_attention_args &a, size_t pair, size_t query)
{
    float lse = query < a.tokens_q ? a.lse[pair * a.tokens_q + query] : -INFINITY;
    return lse == -INFINITY ? INFINITY : lse * 1.4426950409f;
}

__device__ __forceinline__ float probability(float score, float scale, float lse, bool seen)
{
    return seen ? exp_2(score * scale - lse) : 0.0f;
}

/* -- dQ ---------------------------------------------------------------------------------------- */

template <typename T, int DIM> struct dq_memory {
    T q[tile_shape<DIM>::ELEMENTS], dout[tile_shape<DIM>::ELEMENTS];
    T k[tile_shape<DIM>::ELEMENTS], v[tile_shape<DIM>::ELEMENTS];
};

template <typename T, int DIM>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_tiles_dq_kernel(fsdpc_attention_args a, const float *delta, size_t query_tiles)
{
    typedef dq_memory<T, DIM> shared_memory;
    FSDPC_DYNAMIC_SHARED(shared_memory, memory);
    size_t tile = query_tiles - 1 - blockIdx.x % query_tiles, pair = blockIdx.x / query_tiles;
    size_t b = pair / a.heads, h = pair % a.heads, kv = h / (a.heads / a.kv_heads);
    size_t q0 = tile * TILE_ROWS;
    size_t last = q0 + TILE_ROWS < a.tokens_q ? q0 + TILE_ROWS : a.tokens_q;
    size_t keys = visible_keys(a, last - 1);
    tile_copy<T, DIM, TILE_ROWS>(memory->q, row_of<const T>(a.q, a.stride_q, b, 0, h),
                                 a.stride_q[1], q0, a.tokens_q, a.dim);
    tile_copy<T, DIM, TILE_ROWS>(memory->dout, row_of<const T>(a.dout, a.stride_out, b, 0, h),
                                 a.stride_out[1], q0, a.tokens_q, a.dim);

    int row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float dq[DIM / 8][4] = {}, s[TILE_ROWS / 8][4], dp[TILE_ROWS / 8][4], lse[2], means[2];
    size_t visible[2];
    for (int half = 0; half < 2; half++) {
        size_t query = q0 + row + g + 8 * half;
        visible[half] = visible_keys(a, query);
        lse[half] = lse_of(a, pair, query);
        means[half] = query < a.tokens_q ? delta[pair * a.tokens_q + query] : 0.0f;
    }
    float scale = (float)(a.scale * 1.4426950408889634);
    for (size_t k0 = 0; k0 < keys; k0 += TILE_ROWS) {
        tile_copy<T, DIM, TILE_ROWS>(memory->k, row_of<const T>(a.k, a.stride_k, b, 0, kv),
                                     a.stride_k[1], k0, keys, a.dim);
        tile_copy<T, DIM, TILE_ROWS>(memory->v, row_of<const T>(a.v, a.stride_v, b, 0, kv),
                                     a.stride_v[1], k0, keys, a.dim);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        const int seen[2] = {rows_below(visible[0], k0), rows_below(visible[1], k0)};
        rows_by_rows<T, DIM, TILE_ROWS>(s, memory->q, row, memory->k);
        rows_by_rows<T, DIM, TILE_ROWS>(dp, memory->dout, row, memory->v);
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                bool sees = n * 8 + 2 * t + e % 2 < seen[e / 2];
                s[n][e] = probability(s[n][e], scale, lse[e / 2], sees) * (dp[n][e] - means[e / 2]);
            }
        registers_by_rows<T, DIM, TILE_ROWS>(dq, s, memory->k);
        __syncthreads();
    }
    copies_commit();
    copies_wait<0>(); /* needed for queries that see no keys */
    const float scales[2] = {(float)a.scale, (float)a.scale};
    rows_store<T, DIM>(row_of<T>(a.dq, a.stride_q, b, 0, h), a.stride_q[1], q0 + row, a.tokens_q,
                       a.dim, dq, scales);
}

/* -- dK and dV --------------------------------------------------------------------------------- */

/* Wide heads use shorter query tiles, because two 16 by DIM sums occupy most registers. */
template <int DIM> struct dkv_shape {
    enum { QUERIES = DIM > 64 ? 32 : 64 };
};

template <typename T, int DIM> struct dkv_memory {
    T k[tile_shape<DIM>::ELEMENTS], v[tile_shape<DIM>::ELEMENTS];
    T q[dkv_shape<DIM>::QUERIES * tile_shape<DIM>::PITCH];
    T dout[dkv_shape<DIM>::QUERIES * tile_shape<DIM>::PITCH];
    query_rows rows;
};

/* Adds the contribution of one head's query tile to a warp's 16 keys. The tile's first hidden[0]
 * queries do not see key g, and its first hidden[1] queries do not see key g + 8. */
template <typename T, int DIM>
__device__ __forceinline__ void dkv_step(const fsdpc_attention_args &a, dkv_memory<T, DIM> *memory,
                                         const int (&hidden)[2], float (&dk)[DIM / 8][4],
                                         float (&dv)[DIM / 8][4])
{
    const int QUERIES = dkv_shape<DIM>::QUERIES;
    int row = threadIdx.x / 32 * 16, t = threadIdx.x % 4;
    float scale = (float)(a.scale * 1.4426950408889634);
    float p[QUERIES / 8][4], ds[QUERIES / 8][4];
    rows_by_rows<T, DIM, QUERIES>(p, memory->k, row, memory->q);
    rows_by_rows<T, DIM, QUERIES>(ds, memory->v, row, memory->dout);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int query = n * 8 + 2 * t + e % 2;
            bool sees = query >= hidden[e / 2];
            p[n][e] = probability(p[n][e], scale, memory->rows.lse[query], sees);
            ds[n][e] = p[n][e] * (ds[n][e] - memory->rows.delta[query]);
        }
    registers_by_rows<T, DIM, QUERIES>(dv, p, memory->dout);
    registers_by_rows<T, DIM, QUERIES>(dk, ds, memory->q);
}

template <typename T, int DIM>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_tiles_dkv_kernel(fsdpc_attention_args a, const float *delta, size_t key_tiles)
{
    const int QUERIES = dkv_shape<DIM>::QUERIES;
    typedef dkv_memory<T, DIM> shared_memory;
    FSDPC_DYNAMIC_SHARED(shared_memory, memory);
    size_t k0 = blockIdx.x % key_tiles * TILE_ROWS, pair = blockIdx.x / key_tiles;
    size_t b = pair / a.kv_heads, kv = pair % a.kv_heads, group = a.heads / a.kv_heads;
    tile_copy<T, DIM, TILE_ROWS>(memory->k, row_of<const T>(a.k, a.stride_k, b, 0, kv),
                                 a.stride_k[1], k0, a.tokens_k, a.dim);
    tile_copy<T, DIM, TILE_ROWS>(memory->v, row_of<const T>(a.v, a.stride_v, b, 0, kv),
                                 a.stride_v[1], k0, a.tokens_k, a.dim);
    int row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4;
    size_t unseen[2] = {first_query(a, k0 + row + g), first_query(a, k0 + row + g + 8)};
    float dk[DIM / 8][4] = {}, dv[DIM / 8][4] = {};
    size_t start = first_query(a, k0) / QUERIES * QUERIES;
    for (size_t h = kv * group; h < (kv + 1) * group; h++)
        for (size_t q0 = start; q0 < a.tokens_q; q0 += QUERIES) {
            tile_copy<T, DIM, QUERIES>(memory->q, row_of<const T>(a.q, a.stride_q, b, 0, h),
                                       a.stride_q[1], q0, a.tokens_q, a.dim);
            tile_copy<T, DIM, QUERIES>(memory->dout, row_of<const T>(a.dout, a.stride_out, b, 0, h),
                                       a.stride_out[1], q0, a.tokens_q, a.dim);
            copies_commit();
            size_t query = q0 + threadIdx.x, head = b * a.heads + h;
            if (threadIdx.x < QUERIES) {
                memory->rows.lse[threadIdx.x] = lse_of(a, head, query);
                memory->rows.delta[threadIdx.x] =
                    query < a.tokens_q ? delta[head * a.tokens_q + query] : 0.0f;
            }
            copies_wait<0>();
            __syncthreads();
            const int hidden[2] = {rows_below(unseen[0], q0), rows_below(unseen[1], q0)};
            dkv_step<T, DIM>(a, memory, hidden, dk, dv);
            __syncthreads();
        }
    copies_commit();
    copies_wait<0>(); /* needed for keys that no query sees */
    const float scales[2] = {(float)a.scale, (float)a.scale}, ones[2] = {1, 1};
    rows_store<T, DIM>(row_of<T>(a.dk, a.stride_k, b, 0, kv), a.stride_k[1], k0 + row, a.tokens_k,
                       a.dim, dk, scales);
    rows_store<T, DIM>(row_of<T>(a.dv, a.stride_v, b, 0, kv), a.stride_v[1], k0 + row, a.tokens_k,
                       a.dim, dv, ones);
}

/* -- launchers --------------------------------------------------------------------------------- */

template <typename T, int DIM>
static fsdpc_status launch(const fsdpc_attention_args *a, const float *delta,
                           const fsdpc_cuda_queue *queue)
{
    size_t query_tiles = fsdpc_ceil_div(a->tokens_q, TILE_ROWS);
    size_t key_tiles = fsdpc_ceil_div(a->tokens_k, TILE_ROWS);
    auto dq = attention_tiles_dq_kernel<T, DIM>;
    auto dkv = attention_tiles_dkv_kernel<T, DIM>;
    size_t dq_bytes = sizeof(dq_memory<T, DIM>), dkv_bytes = sizeof(dkv_memory<T, DIM>);
    FSDPC_TRY(allow_shared(dq, dq_bytes, queue));
    FSDPC_TRY(allow_shared(dkv, dkv_bytes, queue));
    FSDPC_LAUNCH(dq, a->batch * a->heads * query_tiles, TILE_THREADS, dq_bytes, queue, *a, delta,
                 query_tiles);
    if (key_tiles)
        FSDPC_LAUNCH(dkv, a->batch * a->kv_heads * key_tiles, TILE_THREADS, dkv_bytes, queue, *a,
                     delta, key_tiles);
    return launched("attention's backward");
}

fsdpc_status attention_tiles_backward(const fsdpc_attention_args *a, const float *delta,
                                      const fsdpc_cuda_queue *queue)
{
    if (a->dtype == FSDPC_BF16)
        return a->dim <= 64 ? launch<bf16, 64>(a, delta, queue)
                            : launch<bf16, 128>(a, delta, queue);
    return a->dim <= 64 ? launch<f16, 64>(a, delta, queue) : launch<f16, 128>(a, delta, queue);
}
