/* Forward pass of blocked attention on tensor cores (FlashAttention-2: Dao 2023).
 *
 * A block handles 64 queries of one head, 16 per warp, and visits the keys 64 at a time. Scores,
 * maxima, exponentials and the unnormalised output stay in registers. The next keys and values are
 * copied to shared memory while the current ones are multiplied. P is rounded to the dtype before
 * it is multiplied; everything else is computed in fp32. Key blocks that the causal mask hides are
 * skipped. Query blocks that see the most keys run first, so that the last blocks to run are short.
 */
#include "attention_tiles.cuh"

template <typename T, int DIM> struct forward_memory {
    T q[tile_shape<DIM>::ELEMENTS];
    T k[2][tile_shape<DIM>::ELEMENTS], v[2][tile_shape<DIM>::ELEMENTS];
};

/* The softmax state of a warp's rows g and g + 8; a quad's lanes share the maxima, but each has its
 * own part of the sums. */
struct row_softmax {
    float top[2], sum[2]; /* base 2; sum is this lane's part */
};

/* Replaces scores with exponentials relative to the rows' maxima; row g sees the tile's first
 * seen[0] keys, and row g + 8 its first seen[1] keys. Sets `shrink` to the factors by which to
 * scale the rows' earlier sums. */
__device__ __forceinline__ void softmax_step(row_softmax *state, float (&s)[TILE_ROWS / 8][4],
                                             float scale, const int (&seen)[2], float (&shrink)[2])
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = state->top[half];
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[n][e] = n * 8 + 2 * t + e % 2 < seen[half] ? s[n][e] * scale : -INFINITY;
                top = fmaxf(top, s[n][e]);
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float reference = top == -INFINITY ? 0.0f : top; /* a row that has not seen any key yet */
        shrink[half] = exp_2(state->top[half] - reference);
        float sum = state->sum[half] * shrink[half];
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[n][e] = exp_2(s[n][e] - reference);
                sum += s[n][e];
            }
        state->top[half] = top;
        state->sum[half] = sum;
    }
}

template <typename T, int DIM>
static __global__ void __launch_bounds__(TILE_THREADS)
    attention_tiles_kernel(fsdpc_attention_args a, size_t query_tiles)
{
    typedef forward_memory<T, DIM> shared_memory;
    FSDPC_DYNAMIC_SHARED(shared_memory, memory);
    size_t tile = query_tiles - 1 - blockIdx.x % query_tiles, pair = blockIdx.x / query_tiles;
    size_t b = pair / a.heads, h = pair % a.heads, kv = h / (a.heads / a.kv_heads);
    size_t q0 = tile * TILE_ROWS;
    const T *k = row_of<const T>(a.k, a.stride_k, b, 0, kv);
    const T *v = row_of<const T>(a.v, a.stride_v, b, 0, kv);
    size_t last = q0 + TILE_ROWS < a.tokens_q ? q0 + TILE_ROWS : a.tokens_q;
    size_t keys = visible_keys(a, last - 1), tiles = (keys + TILE_ROWS - 1) / TILE_ROWS;
    tile_copy<T, DIM, TILE_ROWS>(memory->q, row_of<const T>(a.q, a.stride_q, b, 0, h),
                                 a.stride_q[1], q0, a.tokens_q, a.dim);
    tile_copy<T, DIM, TILE_ROWS>(memory->k[0], k, a.stride_k[1], 0, keys, a.dim);
    tile_copy<T, DIM, TILE_ROWS>(memory->v[0], v, a.stride_v[1], 0, keys, a.dim);
    copies_commit();

    int row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4;
    float out[DIM / 8][4] = {}, s[TILE_ROWS / 8][4], shrink[2];
    size_t visible[2];
    row_softmax state = {{-INFINITY, -INFINITY}, {0, 0}};
    for (int half = 0; half < 2; half++)
        visible[half] = visible_keys(a, q0 + row + g + 8 * half);
    float scale = (float)(a.scale * 1.4426950408889634);
    for (size_t j = 0; j < tiles; j++) {
        if (j + 1 < tiles) {
            size_t next = (j + 1) * TILE_ROWS;
            tile_copy<T, DIM, TILE_ROWS>(memory->k[(j + 1) % 2], k, a.stride_k[1], next, keys,
                                         a.dim);
            tile_copy<T, DIM, TILE_ROWS>(memory->v[(j + 1) % 2], v, a.stride_v[1], next, keys,
                                         a.dim);
        }
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        rows_by_rows<T, DIM, TILE_ROWS>(s, memory->q, row, memory->k[j % 2]);
        const int seen[2] = {rows_below(visible[0], j * TILE_ROWS),
                             rows_below(visible[1], j * TILE_ROWS)};
        softmax_step(&state, s, scale, seen, shrink);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[n][e] *= shrink[e / 2];
        registers_by_rows<T, DIM, TILE_ROWS>(out, s, memory->v[j % 2]);
        __syncthreads(); /* before the tile after next overwrites this one */
    }
    copies_wait<0>(); /* needed for queries that see no keys */

    float inverse[2];
    for (int half = 0; half < 2; half++) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[half] = sum == 0 ? 0.0f : 1 / sum;
        size_t query = q0 + row + g + 8 * half;
        if (threadIdx.x % 4 == 0 && query < a.tokens_q)
            a.lse[pair * a.tokens_q + query] =
                sum == 0 ? -INFINITY : state.top[half] * 0.69314718056f + logf(sum);
    }
    rows_store<T, DIM>(row_of<T>(a.out, a.stride_out, b, 0, h), a.stride_out[1], q0 + row,
                       a.tokens_q, a.dim, out, inverse);
}

/* -- launchers --------------------------------------------------------------------------------- */

static bool starts_at_16(const void *base, const size_t (&stride)[3])
{
    return ((uintptr_t)base | stride[0] * 2 | stride[1] * 2 | stride[2] * 2) % 16 == 0;
}

bool attention_tiles_take(const fsdpc_attention_args *a, bool backward)
{
    bool half = a->dtype == FSDPC_BF16 || a->dtype == FSDPC_F16;
    bool fits = half && a->dim % 8 == 0 && a->dim > 0 && a->dim <= 128 &&
                starts_at_16(a->q, a->stride_q) && starts_at_16(a->k, a->stride_k) &&
                starts_at_16(a->v, a->stride_v) && starts_at_16(a->out, a->stride_out);
    return fits && (!backward ||
                    (starts_at_16(a->dout, a->stride_out) && starts_at_16(a->dq, a->stride_q) &&
                     starts_at_16(a->dk, a->stride_k) && starts_at_16(a->dv, a->stride_v)));
}

template <typename T, int DIM>
static fsdpc_status launch(const fsdpc_attention_args *a, const fsdpc_cuda_queue *queue)
{
    size_t tiles = fsdpc_ceil_div(a->tokens_q, TILE_ROWS);
    size_t bytes = sizeof(forward_memory<T, DIM>);
    auto kernel = attention_tiles_kernel<T, DIM>;
    FSDPC_TRY(allow_shared(kernel, bytes, queue));
    FSDPC_LAUNCH(kernel, a->batch * a->heads * tiles, TILE_THREADS, bytes, queue, *a, tiles);
    return launched("attention");
}

fsdpc_status attention_tiles(const fsdpc_attention_args *a, const fsdpc_cuda_queue *queue)
{
    if (a->dtype == FSDPC_BF16)
        return a->dim <= 64 ? launch<bf16, 64>(a, queue) : launch<bf16, 128>(a, queue);
    return a->dim <= 64 ? launch<f16, 64>(a, queue) : launch<f16, 128>(a, queue);
}
