/* The tree sum over ranks; twin of csrc/ops/flat_reduce_body.h.
 *
 * The sources' addresses are passed as a kernel argument, so they need not be copied before the
 * launch. Up to eight sources are loaded, together with the values they are added to, before any is
 * used. For more sources, the kernel uses the CPU's binary counter; the compiler keeps its few
 * partial sums in local memory. Partial sums are computed in fp32 or the sources' dtype, whichever
 * is wider. The scaled sum is rounded once through round_dtype and then cast to out's dtype.
 */
#include "map.cuh"

enum { FEW_SOURCES = 8, TREE_HEIGHT = 10 };

template <int SOURCES> struct tree_sources {
    const void *at[SOURCES];
    int n;
};

/* The values to add; all of them are loaded before any is used. */
template <int N, typename T> struct tree_leaves {
    vec<T, N> at[FEW_SOURCES];

    __device__ __forceinline__ tree_leaves(const tree_sources<FEW_SOURCES> &s, size_t i)
    {
#pragma unroll
        for (int source = 0; source < FEW_SOURCES; source++)
            at[source] = source < s.n ? load<N>((const T *)s.at[source] + i) : vec<T, N>{};
    }
};

/* Sums the sources in a subtree 2^LEVEL wide that starts at FIRST, skipping missing nodes on the
 * right. */
template <int LEVEL, int FIRST, int N, typename T> struct subtree {
    static __device__ __forceinline__ vec<wide<T>, N> sum(const tree_leaves<N, T> &leaves, int n)
    {
        const int MIDDLE = FIRST + (1 << (LEVEL - 1));
        vec<wide<T>, N> left = subtree<LEVEL - 1, FIRST, N, T>::sum(leaves, n);
        vec<wide<T>, N> right = subtree<LEVEL - 1, MIDDLE, N, T>::sum(leaves, n);
#pragma unroll
        for (int k = 0; k < N; k++)
            left.at[k] = MIDDLE < n ? left.at[k] + right.at[k] : left.at[k];
        return left;
    }
};
template <int FIRST, int N, typename T> struct subtree<0, FIRST, N, T> {
    static __device__ __forceinline__ vec<wide<T>, N> sum(const tree_leaves<N, T> &leaves, int)
    {
        vec<wide<T>, N> wider;
#pragma unroll
        for (int k = 0; k < N; k++)
            wider.at[k] = widen<wide<T>>(leaves.at[FIRST].at[k]);
        return wider;
    }
};

template <int N, typename T>
__device__ __forceinline__ vec<wide<T>, N> tree_sum(const tree_sources<FEW_SOURCES> &s, size_t i)
{
    return subtree<3, 0, N, T>::sum(tree_leaves<N, T>(s, i), s.n);
}

template <int N, typename T>
__device__ vec<wide<T>, N> tree_sum(const tree_sources<FSDPC_CUDA_REDUCE_SOURCES> &s, size_t i)
{
    vec<wide<T>, N> partial[TREE_HEIGHT];
    int height[TREE_HEIGHT], depth = 0;
    for (int source = 0; source < s.n; source++) {
        partial[depth] = load_wide<N, wide<T>>((const T *)s.at[source] + i);
        height[depth++] = 0;
        bool last = source + 1 == s.n;
        while (depth > 1 && (last || height[depth - 1] == height[depth - 2])) {
            depth--;
            for (int k = 0; k < N; k++)
                partial[depth - 1].at[k] += partial[depth].at[k];
            height[depth - 1]++;
        }
    }
    return partial[0];
}

/* Returns x rounded to the dtype. */
template <typename W> __device__ __forceinline__ W round_through(W x, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_BF16)
        return widen<W>(narrow<bf16>(x));
    if (dtype == FSDPC_F16)
        return widen<W>(narrow<f16>(x));
    return dtype == FSDPC_F32 ? widen<W>(narrow<float>(x)) : x;
}

template <typename Out, typename T, int SOURCES> struct tree_op {
    enum { WIDTH = 16 / sizeof(Out) };
    tree_sources<SOURCES> sources;
    Out *out;
    double scale;
    fsdpc_dtype round_dtype;
    bool accumulate;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<Out, N> old = accumulate ? load<N>(out + i) : vec<Out, N>{};
        vec<wide<T>, N> sum = tree_sum<N, T>(sources, i);
        vec<Out, N> result;
#pragma unroll
        for (int k = 0; k < N; k++)
            result.at[k] = narrow<Out>(round_through(sum.at[k] * (wide<T>)scale, round_dtype));
        if (accumulate)
#pragma unroll
            for (int k = 0; k < N; k++)
                result.at[k] =
                    narrow<Out>(widen<wide<Out>>(old.at[k]) + widen<wide<Out>>(result.at[k]));
        store<N>(out + i, result);
    }
};

template <int SOURCES>
static fsdpc_status reduce_launch(const fsdpc_reduce_args *args, const fsdpc_stream *stream)
{
    tree_sources<SOURCES> sources = {};
    map_buffer buffers[SOURCES + 1] = {};
    size_t bytes = fsdpc_dtype_bytes(args->dtype);
    sources.n = args->n_srcs;
    for (int s = 0; s < SOURCES; s++) {
        sources.at[s] = s < args->n_srcs ? args->srcs[s] : NULL;
        buffers[s] = map_buffer{sources.at[s], s < args->n_srcs ? bytes : 0};
    }
    buffers[SOURCES] = map_buffer{args->out, fsdpc_dtype_bytes(args->out_dtype)};
    FSDPC_FOR_FLOAT(args->out_dtype, Out, FSDPC_FOR_FLOAT(args->dtype, T, {
                        tree_op<Out, T, SOURCES> op = {sources, (Out *)args->out, args->scale,
                                                       args->round_dtype, args->accumulate};
                        return map_launch("reduce", op, args->numel, buffers, stream);
                    }))
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    if (args->n_srcs <= FEW_SOURCES)
        return reduce_launch<FEW_SOURCES>(args, stream);
    if (args->n_srcs <= FSDPC_CUDA_REDUCE_SOURCES)
        return reduce_launch<FSDPC_CUDA_REDUCE_SOURCES>(args, stream);
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "a reduction over %d sources on CUDA; at most %d: reduce over smaller groups",
                      args->n_srcs, (int)FSDPC_CUDA_REDUCE_SOURCES);
}
