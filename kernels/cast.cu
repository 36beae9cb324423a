/* Kernels that cast one flat buffer into another or add it to another; twins of
 * csrc/ops/flat_cast_body.h.
 *
 * Each thread handles the elements of one 16-byte store (map.cuh). A sum is computed in fp32, or in
 * fp64 if either side is fp64, and rounded once.
 */
#include "map.cuh"

template <typename D, typename S> struct cast_op {
    enum { WIDTH = 16 / sizeof(D) };
    D *dst;
    const S *src;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        store_narrow<N>(dst + i, load_wide<N, wide<S>>(src + i));
    }
};

template <typename D, typename S> struct accumulate_op {
    enum { WIDTH = 16 / sizeof(D) };
    D *dst;
    const S *src;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        typedef decltype(wide<D>() + wide<S>()) W;
        vec<W, N> sum = load_wide<N, W>(dst + i), addend = load_wide<N, W>(src + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            sum.at[k] += addend.at[k];
        store_narrow<N>(dst + i, sum);
    }
};

extern "C" fsdpc_status fsdpc_cuda_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                        fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    if (dst_dtype == src_dtype)
        return dst == src ? FSDPC_OK
                          : fsdpc_device_copy(stream->device, dst, src,
                                              numel * fsdpc_dtype_bytes(dst_dtype), stream);
    map_buffer buffers[] = {{dst, fsdpc_dtype_bytes(dst_dtype)},
                            {src, fsdpc_dtype_bytes(src_dtype)}};
    FSDPC_FOR_FLOAT(dst_dtype, D, FSDPC_FOR_FLOAT(src_dtype, S, {
                        cast_op<D, S> op = {(D *)dst, (const S *)src};
                        return map_launch("cast", op, numel, buffers, stream);
                    }))
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                              fsdpc_dtype src_dtype, size_t numel,
                                              fsdpc_stream *stream)
{
    map_buffer buffers[] = {{dst, fsdpc_dtype_bytes(dst_dtype)},
                            {src, fsdpc_dtype_bytes(src_dtype)}};
    FSDPC_FOR_FLOAT(dst_dtype, D, FSDPC_FOR_FLOAT(src_dtype, S, {
                        accumulate_op<D, S> op = {(D *)dst, (const S *)src};
                        return map_launch("accumulate", op, numel, buffers, stream);
                    }))
    return FSDPC_ERR_DTYPE;
}
