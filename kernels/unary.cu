/* Functions of one variable, forward and backward; twin of csrc/ops/nn_unary_body.h.
 *
 * The CPU computes exponentials by polynomials of its own; here they are CUDA's, at most 2 ulp off,
 * so results agree to a few ulp of fp32 before the rounding to the dtype, not to the bit.  One
 * kernel for each function, direction and dtype: they are small, and a function that is known at
 * compile time costs no branches.
 */
#include "map.cuh"

template <typename W> __device__ __forceinline__ W sigmoid(W x)
{
    return (W)1 / ((W)1 + exp(-x));
}

template <typename W> __device__ __forceinline__ W gelu_inner(W x)
{
    return tanh((W)0.79788456080286535588 * (x + (W)0.044715 * x * x * x));
}

template <fsdpc_unary KIND, typename W> __device__ __forceinline__ W unary_value(W x, W s)
{
    switch (KIND) {
    case FSDPC_UNARY_NEG:
        return -x;
    case FSDPC_UNARY_ABS:
        return fabs(x);
    case FSDPC_UNARY_EXP:
        return exp(x);
    case FSDPC_UNARY_LOG:
        return log(x);
    case FSDPC_UNARY_SQRT:
        return sqrt(x);
    case FSDPC_UNARY_TANH:
        return tanh(x);
    case FSDPC_UNARY_SIGMOID:
        return sigmoid(x);
    case FSDPC_UNARY_GELU_TANH:
        return (W)0.5 * x * ((W)1 + gelu_inner(x));
    case FSDPC_UNARY_GELU_ERF:
        return (W)0.5 * x * ((W)1 + erf(x * (W)0.70710678118654752440));
    case FSDPC_UNARY_SILU:
        return x * sigmoid(x);
    case FSDPC_UNARY_RELU:
        return x < 0 ? (W)0 : x; /* NaN stays */
    case FSDPC_UNARY_ADD_SCALAR:
        return x + s;
    case FSDPC_UNARY_MUL_SCALAR:
        return x * s;
    case FSDPC_UNARY_RSUB_SCALAR:
        return s - x;
    case FSDPC_UNARY_RDIV_SCALAR:
        return s / x;
    case FSDPC_UNARY_POW_SCALAR:
        return pow(x, s);
    }
    return x;
}

/* dy * f'(x).  y = f(x). */
template <fsdpc_unary KIND, typename W>
__device__ __forceinline__ W unary_slope(W x, W y, W dy, W s)
{
    switch (KIND) {
    case FSDPC_UNARY_NEG:
    case FSDPC_UNARY_RSUB_SCALAR:
        return -dy;
    case FSDPC_UNARY_ABS:
        return x == 0 ? (W)0 : x < 0 ? -dy : x > 0 ? dy : x;
    case FSDPC_UNARY_EXP:
        return dy * y;
    case FSDPC_UNARY_LOG:
        return dy / x;
    case FSDPC_UNARY_SQRT:
        return (W)0.5 * dy / y;
    case FSDPC_UNARY_TANH:
        return dy * ((W)1 - y * y);
    case FSDPC_UNARY_SIGMOID:
        return dy * y * ((W)1 - y);
    case FSDPC_UNARY_GELU_TANH: {
        W t = gelu_inner(x);
        W slope = (W)0.79788456080286535588 * ((W)1 + (W)(3 * 0.044715) * x * x);
        return dy * ((W)0.5 * ((W)1 + t) + (W)0.5 * x * ((W)1 - t * t) * slope);
    }
    case FSDPC_UNARY_GELU_ERF: {
        W below = (W)0.5 * ((W)1 + erf(x * (W)0.70710678118654752440));
        return dy * (below + x * ((W)0.39894228040143267794 * exp((W)-0.5 * x * x)));
    }
    case FSDPC_UNARY_SILU: {
        W g = sigmoid(x);
        return dy * g * ((W)1 + x * ((W)1 - g));
    }
    case FSDPC_UNARY_RELU:
        return y > 0 ? dy : (W)0;
    case FSDPC_UNARY_ADD_SCALAR:
        return dy;
    case FSDPC_UNARY_MUL_SCALAR:
        return dy * s;
    case FSDPC_UNARY_RDIV_SCALAR:
        return -dy * s / (x * x);
    case FSDPC_UNARY_POW_SCALAR: /* x^0 is flat, at x = 0 too */
        return s == 0 ? (W)0 : dy * s * pow(x, s - (W)1);
    }
    return dy;
}

__host__ __device__ constexpr bool reads_y(fsdpc_unary kind)
{
    return kind == FSDPC_UNARY_EXP || kind == FSDPC_UNARY_SQRT || kind == FSDPC_UNARY_TANH ||
           kind == FSDPC_UNARY_SIGMOID || kind == FSDPC_UNARY_RELU;
}

__host__ __device__ constexpr bool reads_x(fsdpc_unary kind)
{
    return !reads_y(kind) && kind != FSDPC_UNARY_NEG && kind != FSDPC_UNARY_ADD_SCALAR &&
           kind != FSDPC_UNARY_MUL_SCALAR && kind != FSDPC_UNARY_RSUB_SCALAR;
}

template <fsdpc_unary KIND, typename T> struct unary_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *out;
    const T *x;
    wide<T> scalar;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<wide<T>, N> v = load_wide<N, wide<T>>(x + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            v.at[k] = unary_value<KIND>(v.at[k], scalar);
        store_narrow<N>(out + i, v);
    }
};

template <fsdpc_unary KIND, typename T> struct unary_backward_op {
    enum { WIDTH = 16 / sizeof(T) };
    T *out;
    const T *x, *y, *dy;
    wide<T> scalar;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<wide<T>, N> vx = {}, vy = {}, v = load_wide<N, wide<T>>(dy + i);
        if (reads_x(KIND))
            vx = load_wide<N, wide<T>>(x + i);
        if (reads_y(KIND))
            vy = load_wide<N, wide<T>>(y + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            v.at[k] = unary_slope<KIND>(vx.at[k], vy.at[k], v.at[k], scalar);
        store_narrow<N>(out + i, v);
    }
};

template <fsdpc_unary KIND>
static fsdpc_status unary_launch(const fsdpc_unary_args *a, const fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {{a->out, bytes}, {a->x, bytes}};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        unary_op<KIND, T> op = {(T *)a->out, (const T *)a->x, (wide<T>)a->scalar};
        return map_launch("a unary function", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}

template <fsdpc_unary KIND>
static fsdpc_status unary_backward_launch(const fsdpc_unary_args *a, const fsdpc_stream *stream)
{
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    map_buffer buffers[] = {{a->out, bytes},
                            {a->dy, bytes},
                            {reads_x(KIND) ? a->x : NULL, bytes},
                            {reads_y(KIND) ? a->y : NULL, bytes}};
    FSDPC_FOR_FLOAT(a->dtype, T, {
        unary_backward_op<KIND, T> op = {(T *)a->out, (const T *)a->x, (const T *)a->y,
                                         (const T *)a->dy, (wide<T>)a->scalar};
        return map_launch("a unary function's backward", op, a->numel, buffers, stream);
    })
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_unary(const fsdpc_unary_args *args, fsdpc_stream *stream)
{
    switch (args->kind) {
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        return unary_launch<FSDPC_UNARY_##name>(args, stream);
        FSDPC_UNARY_TABLE(X)
#undef X
    }
    return FSDPC_ERR_VALUE;
}

extern "C" fsdpc_status fsdpc_cuda_unary_backward(const fsdpc_unary_args *args,
                                                  fsdpc_stream *stream)
{
    switch (args->kind) {
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        return unary_backward_launch<FSDPC_UNARY_##name>(args, stream);
        FSDPC_UNARY_TABLE(X)
#undef X
    }
    return FSDPC_ERR_VALUE;
}
