/* CUDA C++ on this processor, as far as kernels/ speaks it.
 *
 * Included by kernels/common.cuh where FSDPC_EMU is defined. A launch becomes work of the stream's
 * thread, which runs the blocks one after the other; the threads of a block are fibers of that
 * thread and change places only in barriers and warp operations. In ascending and in descending
 * order of threads every missing barrier shows as a wrong result one way or the other.
 *
 * A warp operation is a barrier of the warp's threads that have not ended, with one exchange; masks
 * are taken to be full. What cannot go on (a barrier that some threads do not reach) ends the
 * process with a line on stderr.
 */
#ifndef FSDPC_TESTS_EMU_EMU_KERNEL_H
#define FSDPC_TESTS_EMU_EMU_KERNEL_H

#include <functional>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tuple>

#define __global__ __attribute__((unused))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local
#define __restrict__ __restrict

struct emu_index {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};

extern thread_local emu_index threadIdx, blockIdx, blockDim, gridDim;

void emu_launch_threads(cudaStream_t stream, unsigned grid, unsigned block, size_t shared,
                        std::function<void()> thread);
void emu_trace_launch(unsigned grid, unsigned block, const void *arguments, size_t bytes);

template <typename Thread>
inline void emu_launch(cudaStream_t stream, unsigned grid, unsigned block, size_t shared,
                       const Thread &thread)
{
    emu_trace_launch(grid, block, &thread, sizeof thread);
    emu_launch_threads(stream, grid, block, shared, thread);
}
void *emu_dynamic_shared(void);
void __syncthreads(void);
void __syncwarp(unsigned mask = 0xffffffffu);

/* Gives `bytes` (at most 64) to the warp; returns the warp's 32 offers, 64 bytes apart. */
const unsigned char *emu_exchange(const void *mine, size_t bytes);

/* 16 bytes, or zeros; see emu_mma.h. */
void emu_copy_later(void *to, const void *from, bool valid);
void emu_copies_commit(void);
void emu_copies_wait(unsigned left);

#define FSDPC_LAUNCH(kernel, grid, block, shared, queue, ...)                                      \
    emu_launch((queue)->raw, (unsigned)(grid), (unsigned)(block), (shared),                        \
               [=, emu_args = std::make_tuple(__VA_ARGS__)] {                                      \
                   std::apply([&](auto... emu_arg) { kernel(emu_arg...); }, emu_args);             \
               })
#define FSDPC_DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emu_dynamic_shared())

template <typename T> inline T emu_from_lane(T x, unsigned lane)
{
    T result;
    memcpy(&result, emu_exchange(&x, sizeof x) + lane % 32 * 64, sizeof result);
    return result;
}
template <typename T> inline T __shfl_xor_sync(unsigned, T x, unsigned lanes)
{
    return emu_from_lane(x, (threadIdx.x % 32) ^ lanes);
}
template <typename T> inline T __shfl_sync(unsigned, T x, unsigned lane)
{
    return emu_from_lane(x, lane);
}
template <typename T> inline T __shfl_up_sync(unsigned, T x, unsigned lanes)
{
    unsigned lane = threadIdx.x % 32;
    T other = emu_from_lane(x, lane < lanes ? lane : lane - lanes);
    return lane < lanes ? x : other;
}
inline unsigned __ballot_sync(unsigned, int predicate)
{
    const unsigned char *offers = emu_exchange(&predicate, sizeof predicate);
    unsigned bits = 0, warp_first = threadIdx.x / 32 * 32;
    for (unsigned lane = 0; lane < 32 && warp_first + lane < blockDim.x; lane++) {
        int offer;
        memcpy(&offer, offers + lane * 64, sizeof offer);
        bits |= (offer ? 1u : 0u) << lane;
    }
    return bits;
}
inline unsigned __match_any_sync(unsigned, unsigned value)
{
    const unsigned char *offers = emu_exchange(&value, sizeof value);
    unsigned bits = 0, warp_first = threadIdx.x / 32 * 32;
    for (unsigned lane = 0; lane < 32 && warp_first + lane < blockDim.x; lane++) {
        unsigned offer;
        memcpy(&offer, offers + lane * 64, sizeof offer);
        bits |= (offer == value ? 1u : 0u) << lane;
    }
    return bits;
}

/* Threads of other streams may be at the same address. */
template <typename T> inline T atomicAdd(T *at, T x)
{
    return __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
}
template <typename T> inline T atomicMax(T *at, T x)
{
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < x &&
           !__atomic_compare_exchange_n(at, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
template <typename T> inline T atomicCAS(T *at, T expected, T desired)
{
    __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

template <typename To, typename From> inline To emu_bits(From x)
{
    To result;
    static_assert(sizeof result == sizeof x, "bits are as many");
    memcpy(&result, &x, sizeof result);
    return result;
}
inline float __uint_as_float(uint32_t x)
{
    return emu_bits<float>(x);
}
inline uint32_t __float_as_uint(float x)
{
    return emu_bits<uint32_t>(x);
}
inline long long __double_as_longlong(double x)
{
    return emu_bits<long long>(x);
}
inline double __longlong_as_double(long long x)
{
    return emu_bits<double>(x);
}
inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
/* By products, so that no bit of a NaN is promised, the sign neither. */
inline double emu_ldexp(double x, int exponent)
{
    return x != x ? copysign(x, -1) : ldexp(x, exponent);
}
#define ldexp emu_ldexp
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

#endif
