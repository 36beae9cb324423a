/* Element types on the device: storage, conversions, and vector loads and stores.
 *
 * Conversions use the integer code of csrc/base/dtype.h, so results match the CPU bit for bit,
 * including NaN payloads and subnormals. (The hardware's conversions produce a different NaN.)
 * Vectors without a NaN are rounded by the hardware, with an eighth of the instructions. With
 * integer conversions only, the norm kernels were limited by instruction throughput rather than
 * memory bandwidth. Kernels compute in wide<T>: double for double, float otherwise.
 */
#ifndef FSDPC_KERNELS_DTYPE_CUH
#define FSDPC_KERNELS_DTYPE_CUH

#include <type_traits>

#include "common.cuh"

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

/* -- single elements --------------------------------------------------------------------------- */

__device__ __forceinline__ float bf16_to_f32(uint16_t x)
{
    return __uint_as_float((uint32_t)x << 16);
}

__device__ __forceinline__ uint16_t f32_to_bf16(float x)
{
    uint32_t bits = __float_as_uint(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40 : rounded);
}

__device__ __forceinline__ float f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
    uint32_t bits = (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 31)
        bits = 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0);
    if (exponent == 0)
        bits = __float_as_uint((float)mantissa * 0x1p-24f);
    return __uint_as_float(sign | bits);
}

__device__ __forceinline__ uint16_t f32_to_f16(float x)
{
    uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    uint32_t half = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1)) >> 13; /* normal */
    if (magnitude < 0x38800000u) /* subnormal: the addition rounds to 2^-24 */
        half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        half = 0x7c00;
    if (magnitude > 0x7f800000u)
        half = 0x7e00 | (magnitude >> 13 & 0x1ff);
    return (uint16_t)(sign | half);
}

/* Converts fp64 to fp32 with rounding to odd, so that a second rounding gives the same result as a
 * single one. */
__device__ __forceinline__ float f64_to_f32_odd(double x)
{
    float rounded = (float)x;
    if ((double)rounded == x || x != x)
        return rounded;
    uint32_t bits = __float_as_uint(rounded);
    bits -= fabs((double)rounded) > fabs(x);
    return __uint_as_float(bits | 1);
}

/* The type used for arithmetic on T. */
template <typename T> struct wide_of {
    typedef float type;
};
template <> struct wide_of<double> {
    typedef double type;
};
template <typename T> using wide = typename wide_of<T>::type;

template <typename W> __device__ __forceinline__ W widen(float x)
{
    return (W)x;
}
template <typename W> __device__ __forceinline__ W widen(double x)
{
    return (W)x;
}
template <typename W> __device__ __forceinline__ W widen(bf16 x)
{
    return (W)bf16_to_f32(x.bits);
}
template <typename W> __device__ __forceinline__ W widen(f16 x)
{
    return (W)f16_to_f32(x.bits);
}

/* narrow<T>(x): x rounded once to T. */
template <typename T> struct narrow_to;
template <> struct narrow_to<float> {
    template <typename W> static __device__ __forceinline__ float from(W x)
    {
        return (float)x;
    }
};
template <> struct narrow_to<double> {
    template <typename W> static __device__ __forceinline__ double from(W x)
    {
        return (double)x;
    }
};
template <> struct narrow_to<bf16> {
    static __device__ __forceinline__ bf16 from(float x)
    {
        return bf16{f32_to_bf16(x)};
    }
    static __device__ __forceinline__ bf16 from(double x)
    {
        return bf16{f32_to_bf16(f64_to_f32_odd(x))};
    }
};
template <> struct narrow_to<f16> {
    static __device__ __forceinline__ f16 from(float x)
    {
        return f16{f32_to_f16(x)};
    }
    static __device__ __forceinline__ f16 from(double x)
    {
        return f16{f32_to_f16(f64_to_f32_odd(x))};
    }
};
template <typename T, typename W> __device__ __forceinline__ T narrow(W x)
{
    return narrow_to<T>::from(x);
}

/* -- several elements -------------------------------------------------------------------------- */

template <typename T, int N> struct vec {
    T at[N];
};

/* The memory access unit for BYTES bytes: as wide as possible, up to 16 bytes. */
template <int BYTES> struct chunk_of {
    typedef uint4 type;
};
template <> struct chunk_of<8> {
    typedef uint2 type;
};
template <> struct chunk_of<4> {
    typedef uint32_t type;
};
template <> struct chunk_of<2> {
    typedef uint16_t type;
};
template <> struct chunk_of<1> {
    typedef uint8_t type;
};

/* Loads N elements from an address that is aligned to N elements or to 16 bytes, whichever is
 * smaller. */
template <int N, typename T> __device__ __forceinline__ vec<T, N> load(const T *from)
{
    typedef typename chunk_of<N * sizeof(T)>::type chunk;
    const int CHUNKS = N * sizeof(T) / sizeof(chunk);
    union {
        chunk chunks[CHUNKS];
        vec<T, N> values;
    } both;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        both.chunks[c] = reinterpret_cast<const chunk *>(from)[c];
    return both.values;
}

template <int N, typename T> __device__ __forceinline__ void store(T *to, const vec<T, N> &values)
{
    typedef typename chunk_of<N * sizeof(T)>::type chunk;
    const int CHUNKS = N * sizeof(T) / sizeof(chunk);
    union both {
        chunk chunks[CHUNKS];
        vec<T, N> values;
        __device__ both() {}
    } both;
    both.values = values;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        reinterpret_cast<chunk *>(to)[c] = both.chunks[c];
}

template <int N, typename W, typename T>
__device__ __forceinline__ vec<W, N> load_wide(const T *from)
{
    vec<T, N> values = load<N>(from);
    vec<W, N> wider;
#pragma unroll
    for (int k = 0; k < N; k++)
        wider.at[k] = widen<W>(values.at[k]);
    return wider;
}

/* Rounds two floats, neither of which is NaN, and packs them with the first in the lower half. */
template <typename T> __device__ __forceinline__ uint32_t narrow_pair(float first, float second)
{
    uint32_t both = 0;
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same<T, bf16>::value)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
    return both;
}

/* Rounds and stores with hardware instructions if it can; returns whether it did. */
template <int N, typename T, typename W>
__device__ __forceinline__ bool store_pairs(T *to, const vec<W, N> &wider)
{
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == 2 && sizeof(W) == 4 && N % 2 == 0) {
        bool nan = false;
#pragma unroll
        for (int k = 0; k < N; k++)
            nan |= wider.at[k] != wider.at[k];
        if (nan)
            return false;
        union both {
            uint32_t pairs[N / 2];
            vec<T, N> values;
            __device__ both() {}
        } both;
#pragma unroll
        for (int k = 0; k < N / 2; k++)
            both.pairs[k] = narrow_pair<T>(wider.at[2 * k], wider.at[2 * k + 1]);
        store<N>(to, both.values);
        return true;
    }
#endif
    return false;
}

template <int N, typename T, typename W>
__device__ __forceinline__ void store_narrow(T *to, const vec<W, N> &wider)
{
    if (store_pairs<N>(to, wider))
        return;
    vec<T, N> values;
#pragma unroll
    for (int k = 0; k < N; k++)
        values.at[k] = narrow<T>(wider.at[k]);
    store<N>(to, values);
}

/* -- choosing a kernel by dtype ---------------------------------------------------------------- */

/* Runs the statement with T as the storage type of `dtype_`; does nothing for other dtypes. */
#define FSDPC_FOR_FLOAT(dtype_, T, ...)                                                            \
    switch (dtype_) {                                                                              \
    case FSDPC_F32: {                                                                              \
        typedef float T;                                                                           \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case FSDPC_BF16: {                                                                             \
        typedef bf16 T;                                                                            \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case FSDPC_F16: {                                                                              \
        typedef f16 T;                                                                             \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case FSDPC_F64: {                                                                              \
        typedef double T;                                                                          \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    default:                                                                                       \
        break;                                                                                     \
    }

#endif
