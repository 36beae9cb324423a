/* Codes of arrays and back: the table's `encode` and `decode`. */
#include "block_code.cuh"

__global__ void __launch_bounds__(BLOCK_THREADS) encode_kernel(fsdpc_code_args a, size_t blocks)
{
    int lane = (int)(threadIdx.x % WARP);
    for (size_t b = grid_thread() / WARP; b < blocks; b += grid_threads() / WARP) {
        code_span span = code_span_of(b, a.row);
        int most = 0;
        for (int i = lane; i < span.n; i += WARP)
            most = code_most(most, a.values[span.begin + i]);
        float maximum = code_maximum(most), inverse = code_inverse(maximum);
        for (int i = lane; i < span.n; i += WARP)
            a.codes[span.begin + i] = code_encode(a.code, a.values[span.begin + i], inverse);
        if (lane == 0)
            a.maxima[b] = maximum;
    }
}

__global__ void __launch_bounds__(BLOCK_THREADS) decode_kernel(fsdpc_code_args a, size_t blocks)
{
    int lane = (int)(threadIdx.x % WARP);
    for (size_t b = grid_thread() / WARP; b < blocks; b += grid_threads() / WARP) {
        code_span span = code_span_of(b, a.row);
        for (int i = lane; i < span.n; i += WARP)
            a.values[span.begin + i] = code_decode(a.code, a.codes[span.begin + i], a.maxima[b]);
    }
}

template <typename Kernel>
static fsdpc_status over_blocks(Kernel *kernel, const char *what, const fsdpc_code_args *a,
                                const fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    size_t blocks = fsdpc_code_blocks(a->numel, a->row);
    if (a->code != FSDPC_CODE_ROOT8 && a->code != FSDPC_CODE_UROOT8)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "codes of messages on a GPU");
    if (blocks == 0)
        return FSDPC_OK;
    FSDPC_LAUNCH(kernel, code_grid(queue, blocks), BLOCK_THREADS, 0, queue, *a, blocks);
    return launched(what);
}

extern "C" fsdpc_status fsdpc_cuda_encode(const fsdpc_code_args *a, fsdpc_stream *stream)
{
    return over_blocks(encode_kernel, "an encoding", a, stream);
}

extern "C" fsdpc_status fsdpc_cuda_decode(const fsdpc_code_args *a, fsdpc_stream *stream)
{
    return over_blocks(decode_kernel, "a decoding", a, stream);
}
