/* Unary functions, forward and backward; twin of csrc/ops/nn_unary_body.h.
 *
 * The CPU computes exponentials with our own polynomials; the GPU uses CUDA's functions, whose
 * error is at most 2 ulp. Before rounding to the dtype, results therefore agree to within a few
 * fp32 ulp, but not bit for bit. There is one kernel per function, direction and dtype, because
 * kernels are small and a function known at compile time needs no branches.
 */
#include "map.cuh"

#define RULE __device__ __forceinline__
#define RULE_T float
#include "ops/nn_unary_rules_body.h"
#undef RULE_T
#define RULE_T double
#include "ops/nn_unary_rules_body.h"
#undef RULE_T
#undef RULE

__host__ __device__ constexpr bool reads_y(fsdpc_unary kind)
{
    return kind == FSDPC_UNARY_EXP || kind == FSDPC_UNARY_SQRT || kind == FSDPC_UNARY_TANH ||
           kind == FSDPC_UNARY_SIGMOID || kind == FSDPC_UNARY_RELU || kind == FSDPC_UNARY_RSQRT ||
           kind == FSDPC_UNARY_EXPM1;
}

__host__ __device__ constexpr bool reads_x(fsdpc_unary kind)
{
    return !reads_y(kind) && kind != FSDPC_UNARY_NEG && kind != FSDPC_UNARY_SIGN &&
           kind != FSDPC_UNARY_ADD_SCALAR && kind != FSDPC_UNARY_MUL_SCALAR &&
           kind != FSDPC_UNARY_RSUB_SCALAR;
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
            v.at[k] = unary_value(KIND, v.at[k], scalar);
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
            v.at[k] = unary_slope(KIND, vx.at[k], vy.at[k], v.at[k], scalar);
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
