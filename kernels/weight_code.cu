/* Reading quantised weights: the table's `dequantize`; twin of csrc/ops/nn_weight_body.h.
 *
 * A thread writes two neighbouring elements, whose 4-bit codes share a byte. A value is one product
 * of a level and a scale, so it has the CPU's bits.
 */
#include "array.cuh"
#include "common.cuh"

__device__ __forceinline__ float unaligned_float(const uint8_t *bytes)
{
    unsigned bits = 0;
    for (int i = 3; i >= 0; i--)
        bits = bits << 8 | bytes[i];
    return __uint_as_float(bits);
}

__device__ __forceinline__ float weight_scale(const fsdpc_weight_row &row, const uint8_t *bytes,
                                              size_t b)
{
    if (row.coded_scales)
        return unaligned_float(bytes) +
               (float)bytes[row.scales_at + b] * unaligned_float(bytes + sizeof(float));
    float scale = unaligned_float(bytes + b * sizeof(float));
    return row.nibbles ? scale : scale * (1.0f / 127);
}

/* `pairs` is the number of pairs in a row. */
__global__ void __launch_bounds__(BLOCK_THREADS)
    dequantize_kernel(fsdpc_dequantize_args a, size_t pairs)
{
    __shared__ float levels[FSDPC_WEIGHT_LEVELS];
    if (threadIdx.x < FSDPC_WEIGHT_LEVELS)
        levels[threadIdx.x] = a.row.levels[threadIdx.x];
    __syncthreads();
    const untyped out(a.out, a.dtype);
    for (size_t t = grid_thread(); t < a.rows * pairs; t += grid_threads()) {
        size_t r = t / pairs, i = t % pairs * 2, col = a.first + i;
        const uint8_t *bytes = a.codes + r * a.row.bytes, *codes = bytes + a.row.codes_at;
        for (size_t k = 0; k < 2 && i + k < a.n; k++) {
            float level = a.row.nibbles ? levels[codes[col / 2] >> (k ? 0 : 4) & 15]
                                        : (float)(int8_t)codes[col + k];
            float scale = weight_scale(a.row, bytes, (col + k) / a.row.block);
            if (a.dtype == FSDPC_F64)
                ((double *)a.out)[r * a.n + i + k] = (double)(level * scale);
            else
                out.store<1, float>(r * a.n + i + k, vec<float, 1>{{level * scale}});
        }
    }
}

extern "C" fsdpc_status fsdpc_cuda_dequantize(const fsdpc_dequantize_args *a, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t pairs = fsdpc_ceil_div(a->n, 2);
    if (a->rows == 0 || pairs == 0)
        return FSDPC_OK;
    FSDPC_LAUNCH(dequantize_kernel, grid_of(queue, a->rows * pairs, BLOCK_THREADS), BLOCK_THREADS,
                 0, queue, *a, pairs);
    return launched("a dequantisation");
}
