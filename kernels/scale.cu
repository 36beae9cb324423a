/* Scaling with a check for NaN and infinity, and comparison; twins of csrc/ops/flat_cast_body.h.
 *
 * Both report through one word. All threads that set this word write the same value, so their order
 * does not matter. `equal` compares bits after casting. A thread checks the word only once, when it
 * starts; after a difference is found, most blocks therefore have nothing to do. It does not check
 * the word for every vector, because its vector accesses would have to wait for each check.
 */
#include "map.cuh"

template <typename T> struct scale_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *x;
    double scale;
    const double *scale_at; /* this and the next may be NULL */
    int *nonfinite;

    __device__ __forceinline__ wide<T> begin() const
    {
        return (wide<T>)(scale_at ? scale * *scale_at : scale);
    }
    template <int N> __device__ __forceinline__ void run(size_t i, wide<T> by) const
    {
        if (by == 1 && !nonfinite) /* the gradients were not clipped */
            return;
        vec<wide<T>, N> value = load_wide<N, wide<T>>(x + i);
        bool finite = true;
#pragma unroll
        for (int k = 0; k < N; k++) {
            finite = finite && fabs(value.at[k]) < (wide<T>)INFINITY;
            value.at[k] *= by;
        }
        store_narrow<N>(x + i, value);
        if (!finite && nonfinite)
            *nonfinite = 1;
    }
};

template <typename T> __device__ __forceinline__ bool same_bits(T a, T b)
{
    return a.bits == b.bits;
}
__device__ __forceinline__ bool same_bits(float a, float b)
{
    return __float_as_uint(a) == __float_as_uint(b);
}
__device__ __forceinline__ bool same_bits(double a, double b)
{
    return __double_as_longlong(a) == __double_as_longlong(b);
}

/* Converts src to D; if no cast is needed, the bits are unchanged. */
template <typename D, typename S> struct cast_bits {
    static __device__ __forceinline__ D of(S x)
    {
        return narrow<D>(widen<wide<S>>(x));
    }
};
template <typename D> struct cast_bits<D, D> {
    static __device__ __forceinline__ D of(D x)
    {
        return x;
    }
};

template <typename D, typename S> struct equal_op {
    enum { WIDTH = 8 };
    const D *dst;
    const S *src;
    bool *equal;

    __device__ __forceinline__ bool begin() const
    {
        return *(volatile bool *)equal;
    }
    template <int N> __device__ __forceinline__ void run(size_t i, bool equal_yet) const
    {
        if (!equal_yet)
            return;
        vec<D, N> a = load<N>(dst + i);
        vec<S, N> b = load<N>(src + i);
        bool same = true;
#pragma unroll
        for (int k = 0; k < N; k++)
            same &= same_bits(a.at[k], cast_bits<D, S>::of(b.at[k]));
        if (!same && *(volatile bool *)equal) /* only the first differing elements write */
            *(volatile bool *)equal = false;
    }
};

extern "C" fsdpc_status fsdpc_cuda_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                                         const double *scale_at, int *nonfinite_io,
                                         fsdpc_stream *stream)
{
    map_buffer buffers[] = {{x, fsdpc_dtype_bytes(dtype)}};
    FSDPC_FOR_FLOAT(dtype, T, {
        scale_op<T> op = {(T *)x, scale, scale_at, nonfinite_io};
        return map_launch("scale", op, numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                                         fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                                         fsdpc_stream *stream)
{
    map_buffer buffers[] = {{dst, fsdpc_dtype_bytes(dst_dtype)},
                            {src, fsdpc_dtype_bytes(src_dtype)}};
    FSDPC_FOR_FLOAT(dst_dtype, D, FSDPC_FOR_FLOAT(src_dtype, S, {
                        equal_op<D, S> op = {(const D *)dst, (const S *)src, equal_io};
                        return map_launch("equal", op, numel, buffers, stream);
                    }))
    return FSDPC_ERR_DTYPE;
}
