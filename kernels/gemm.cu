/* A plain matrix product, used if cuBLASLt is missing or does not support the product.
 *
 * Each block computes a 64 by 64 tile of C and loads 16 steps of k at a time into shared memory;
 * each thread computes 4 by 4 elements. It accumulates in fp32 (fp64 for F64) in ascending order of
 * k, without tensor cores. It is correct for every shape, stride and dtype that the contract
 * allows, but tens of times slower than cuBLASLt.
 */
#include "dtype.cuh"

enum { GEMM_TILE = 64, GEMM_K = 16, GEMM_THREADS = 256, GEMM_SUMS = 4 };

/* Returns element (row, col) of A' or B', each of which is the stored matrix or its transpose. */
template <typename T>
__device__ __forceinline__ wide<T> gemm_at(const T *x, size_t ld, bool trans, size_t row,
                                           size_t col)
{
    return widen<wide<T>>(trans ? x[col * ld + row] : x[row * ld + col]);
}

template <typename T, typename C>
__device__ __forceinline__ void gemm_store(const fsdpc_gemm_args &g, C *c, size_t row, size_t col,
                                           wide<T> sum)
{
    if (row >= g.m || col >= g.n)
        return;
    if (g.bias)
        sum += widen<wide<T>>(((const T *)g.bias)[col]);
    C *to = c + row * g.ldc + col;
    if (g.accumulate)
        sum += widen<wide<T>>(*to);
    *to = narrow<C>(sum);
}

template <typename T, typename C>
static __global__ void __launch_bounds__(GEMM_THREADS) gemm_kernel(fsdpc_gemm_args g, size_t tiles)
{
    typedef wide<T> W;
    __shared__ W a_tile[GEMM_K][GEMM_TILE + 1], b_tile[GEMM_K][GEMM_TILE + 1];
    size_t tile_cols = (g.n + GEMM_TILE - 1) / GEMM_TILE;
    size_t per_product = (g.m + GEMM_TILE - 1) / GEMM_TILE * tile_cols;
    unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (size_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        size_t product = t / per_product, rest = t % per_product;
        size_t row = rest / tile_cols * GEMM_TILE, col = rest % tile_cols * GEMM_TILE;
        const T *a = (const T *)g.a + product * g.stride_a;
        const T *b = (const T *)g.b + product * g.stride_b;
        W sums[GEMM_SUMS][GEMM_SUMS] = {};
        for (size_t k0 = 0; k0 < g.k; k0 += GEMM_K) {
            for (unsigned e = threadIdx.x; e < GEMM_K * GEMM_TILE; e += GEMM_THREADS) {
                /* neighbouring threads read along the contiguous dimension */
                unsigned ka = g.trans_a ? e / GEMM_TILE : e % GEMM_K;
                unsigned ra = g.trans_a ? e % GEMM_TILE : e / GEMM_K;
                unsigned kb = g.trans_b ? e % GEMM_K : e / GEMM_TILE;
                unsigned cb = g.trans_b ? e / GEMM_K : e % GEMM_TILE;
                bool in_a = k0 + ka < g.k && row + ra < g.m, in_b = k0 + kb < g.k && col + cb < g.n;
                a_tile[ka][ra] = in_a ? gemm_at(a, g.lda, g.trans_a, row + ra, k0 + ka) : (W)0;
                b_tile[kb][cb] = in_b ? gemm_at(b, g.ldb, g.trans_b, k0 + kb, col + cb) : (W)0;
            }
            __syncthreads();
            for (unsigned k = 0; k < GEMM_K; k++)
#pragma unroll
                for (int i = 0; i < GEMM_SUMS; i++)
#pragma unroll
                    for (int j = 0; j < GEMM_SUMS; j++)
                        sums[i][j] += a_tile[k][y * GEMM_SUMS + i] * b_tile[k][x + 16 * j];
            __syncthreads();
        }
        for (int i = 0; i < GEMM_SUMS; i++)
            for (int j = 0; j < GEMM_SUMS; j++)
                gemm_store<T, C>(g, (C *)g.c + product * g.stride_c, row + y * GEMM_SUMS + i,
                                 col + x + 16 * j, sums[i][j]);
    }
}

/* Launches products that share C one after the other, so that they accumulate in order. */
template <typename T, typename C>
static void gemm_launch(const fsdpc_gemm_args *args, const fsdpc_cuda_queue *queue)
{
    fsdpc_gemm_args g = *args;
    size_t batch = fsdpc_max_size(g.batch, 1), launches = g.stride_c ? 1 : batch;
    size_t per_product = fsdpc_ceil_div(g.m, GEMM_TILE) * fsdpc_ceil_div(g.n, GEMM_TILE);
    size_t tiles = per_product * (batch / launches);
    for (size_t n = 0; n < launches; n++) {
        FSDPC_LAUNCH((gemm_kernel<T, C>), grid_of(queue, tiles, 1), GEMM_THREADS, 0, queue, g,
                     tiles);
        g.a = (const T *)g.a + g.stride_a;
        g.b = (const T *)g.b + g.stride_b;
    }
}

extern "C" fsdpc_status fsdpc_cuda_gemm_plain(const fsdpc_gemm_args *g, fsdpc_stream *stream)
{
    if (g->m == 0 || g->n == 0)
        return FSDPC_OK;
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    FSDPC_FOR_FLOAT(g->dtype, T, {
        if (g->c_dtype == g->dtype)
            gemm_launch<T, T>(g, queue);
        else
            gemm_launch<T, float>(g, queue);
    })
    return launched("a matrix product");
}
