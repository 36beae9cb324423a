/* SwiGLU, forward and backward, and dropout; twin of csrc/ops/nn_gate_body.h.
 *
 * Dropout keeps element i if the upper 24 bits of word first + i of its Philox stream are at least
 * p 2^24, as on the CPU. The masks, and the bits of 16-bit and fp32 results, are therefore the same
 * as on the CPU.
 */
#include "map.cuh"
#include "random.cuh"

template <typename W> __device__ __forceinline__ W sigmoid(W x)
{
    return (W)1 / ((W)1 + exp(-x));
}

template <typename T> struct swiglu_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *out;
    const T *gate, *up;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        typedef wide<T> W;
        vec<W, N> g = load_wide<N, W>(gate + i), u = load_wide<N, W>(up + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            u.at[k] *= g.at[k] * sigmoid(g.at[k]);
        store_narrow<N>(out + i, u);
    }
};

template <typename T> struct swiglu_backward_op {
    enum { WIDTH = 16 / sizeof(T) };
    const T *gate, *up, *dout;
    T *dgate, *dup;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        typedef wide<T> W;
        vec<W, N> g = load_wide<N, W>(gate + i), u = load_wide<N, W>(up + i);
        vec<W, N> d = load_wide<N, W>(dout + i);
#pragma unroll
        for (int k = 0; k < N; k++) {
            W s = sigmoid(g.at[k]), silu = g.at[k] * s;
            u.at[k] *= d.at[k] * (s * ((W)1 + g.at[k] * ((W)1 - s)));
            d.at[k] *= silu;
        }
        store_narrow<N>(dgate + i, u);
        store_narrow<N>(dup + i, d);
    }
};

template <typename T> struct dropout_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *out;
    const T *x;
    wide<T> scale; /* float: a factor; double: a divisor, as on the CPU */
    uint32_t threshold;
    uint64_t seed, stream, first;
    const fsdpc_dropout_key *key;

    static __device__ __forceinline__ float scaled(float v, float s)
    {
        return v * s;
    }
    static __device__ __forceinline__ double scaled(double v, double s)
    {
        return v / s;
    }

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<wide<T>, N> v = load_wide<N, wide<T>>(x + i);
        uint64_t word = first + i;
        uint64_t from = key ? key->seed : seed, of = stream + (key ? key->shift : 0);
        philox_words words = philox(from, of, word / 4);
#pragma unroll
        for (int k = 0; k < N; k++) {
            unsigned place = (unsigned)(word + k) % 4;
            if (k && place == 0)
                words = philox(from, of, (word + k) / 4);
            uint32_t low = place & 1 ? words.at[1] : words.at[0];
            uint32_t high = place & 1 ? words.at[3] : words.at[2];
            bool keep = (place & 2 ? high : low) >> 8 >= threshold;
            v.at[k] = keep ? scaled(v.at[k], scale) : (wide<T>)0;
        }
        store_narrow<N>(out + i, v);
    }
};

extern "C" fsdpc_status fsdpc_cuda_swiglu(const fsdpc_swiglu_args *a, fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {{a->out, bytes}, {a->gate, bytes}, {a->up, bytes}};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        swiglu_op<T> op = {(T *)a->out, (const T *)a->gate, (const T *)a->up};
        return map_launch("swiglu", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_swiglu_backward(const fsdpc_swiglu_args *a, fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {
        {a->gate, bytes}, {a->up, bytes}, {a->dout, bytes}, {a->dgate, bytes}, {a->dup, bytes}};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        swiglu_backward_op<T> op = {(const T *)a->gate, (const T *)a->up, (const T *)a->dout,
                                    (T *)a->dgate, (T *)a->dup};
        return map_launch("swiglu's backward", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_dropout(const fsdpc_dropout_args *a, fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {{a->out, bytes}, {a->x, bytes}};
    uint32_t threshold = (uint32_t)ceil(a->p * 0x1p24);
    double left = 1 - a->p, scale = a->p < 1 ? 1 / left : 0;
    if (a->dtype == FSDPC_F64)
        scale = left;
    FSDPC_FOR_FLOAT(a->dtype, T, {
        dropout_op<T> op = {(T *)a->out, (const T *)a->x, (wide<T>)scale, threshold,
                            a->seed,     a->stream,       a->first,       a->key};
        return map_launch("dropout", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}
