/* Rotary position embedding; twin of the rotary part of csrc/ops/nn_embedding_body.h.
 *
 * Each thread rotates N pairs, (x[i], x[i + D/2]), by the angles for their token's position. It
 * writes only elements that it has read, so y may be x.
 */
#include "rows.cuh"

template <typename T, int N>
static __global__ void __launch_bounds__(BLOCK_THREADS)
    rotary_kernel(fsdpc_rotary_args a, size_t vectors)
{
    typedef wide<T> W;
    size_t half = a.dim / 2, row_vectors = half / N;
    for (size_t v = grid_thread(); v < vectors; v += grid_threads()) {
        size_t row = v / row_vectors, i = (v - row * row_vectors) * N; /* row: (b, t, h) */
        size_t at = row * a.dim + i, angle = row / a.heads % a.tokens * half + i;
        vec<W, N> cosine = load_wide<N, W>(a.cosines + angle);
        vec<W, N> sine = load_wide<N, W>(a.sines + angle);
        vec<W, N> x = load_wide<N, W>((const T *)a.x + at);
        vec<W, N> y = load_wide<N, W>((const T *)a.x + at + half);
#pragma unroll
        for (int k = 0; k < N; k++) {
            W s = a.inverse ? -sine.at[k] : sine.at[k], first = x.at[k];
            x.at[k] = first * cosine.at[k] - y.at[k] * s;
            y.at[k] = y.at[k] * cosine.at[k] + first * s;
        }
        store_narrow<N>((T *)a.y + at, x);
        store_narrow<N>((T *)a.y + at + half, y);
    }
}

extern "C" fsdpc_status fsdpc_cuda_rotary(const fsdpc_rotary_args *a, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t pairs = a->batch * a->tokens * a->heads * (a->dim / 2);
    if (pairs == 0)
        return FSDPC_OK;
    const void *bases[] = {a->x, a->y, a->cosines, a->sines};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        const int N = 16 / sizeof(T);
        if (a->dim / 2 % N == 0 && rows_align<T>(a->dim / 2, bases))
            FSDPC_LAUNCH((rotary_kernel<T, N>), grid_of(queue, pairs / N, BLOCK_THREADS),
                         BLOCK_THREADS, 0, queue, *a, pairs / N);
        else
            FSDPC_LAUNCH((rotary_kernel<T, 1>), grid_of(queue, pairs, BLOCK_THREADS), BLOCK_THREADS,
                         0, queue, *a, pairs);
    })
    return launched("rotary embedding");
}
