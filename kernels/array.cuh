/* Arrays whose dtype is known at compile time or only at run time.
 *
 * A kernel that uses several arrays can be called with many combinations of dtypes. The few
 * combinations that are common in training are compiled separately, using typed<T>. All other
 * combinations share one kernel that uses untyped; its branches are uniform across threads and cost
 * little compared to its memory accesses.
 */
#ifndef FSDPC_KERNELS_ARRAY_CUH
#define FSDPC_KERNELS_ARRAY_CUH

#include "dtype.cuh"

template <typename T> struct typed {
    T *base;

    __host__ __device__ typed(const void *pointer, fsdpc_dtype) : base((T *)pointer) {}
    template <int N, typename W> __device__ __forceinline__ vec<W, N> load(size_t i) const
    {
        return load_wide<N, W>((const T *)base + i);
    }
    /* Rounds each value once and returns the stored values. */
    template <int N, typename W>
    __device__ __forceinline__ vec<W, N> store(size_t i, const vec<W, N> &values) const
    {
        vec<T, N> narrowed;
        vec<W, N> stored;
#pragma unroll
        for (int k = 0; k < N; k++) {
            narrowed.at[k] = narrow<T>(values.at[k]);
            stored.at[k] = widen<W>(narrowed.at[k]);
        }
        ::store<N>(base + i, narrowed);
        return stored;
    }
};

struct untyped {
    void *base;
    fsdpc_dtype dtype;

    __host__ __device__ untyped(const void *pointer, fsdpc_dtype its_dtype)
        : base((void *)pointer), dtype(its_dtype)
    {
    }
    template <int N, typename W> __device__ __forceinline__ vec<W, N> load(size_t i) const
    {
        FSDPC_FOR_FLOAT(dtype, T, return (typed<T>(base, dtype).template load<N, W>(i)))
        return vec<W, N>{};
    }
    template <int N, typename W>
    __device__ __forceinline__ vec<W, N> store(size_t i, const vec<W, N> &values) const
    {
        FSDPC_FOR_FLOAT(dtype, T, return (typed<T>(base, dtype).template store<N, W>(i, values)))
        return values;
    }
};

#endif
