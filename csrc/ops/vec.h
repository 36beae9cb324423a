/* fp32 vectors, for kernels compiled from one source once per instruction set.
 *
 * fsdpc_vf is a GCC/clang vector of FSDPC_LANES floats, as wide as the registers the file is
 * compiled for: 16 with AVX-512, 8 with AVX2, 4 elsewhere. (A fixed width of 16 was tried: gcc
 * spills every vector wider than its registers, which is five times slower.)  Vectors support + - *
 * / and comparisons, which return an fsdpc_vi of 0 or -1, also with a scalar on one side. A
 * typical loop is
 *
 *     FSDPC_EACH_VECTOR(i, n, numel,
 *                       fsdpc_vf_store_n(y + i, fsdpc_vf_exp(fsdpc_vf_load_n(x + i, n)), n));
 *
 * Operations without an operator are functions: loads and stores with conversion, masked tails,
 * min/max/select, fused multiply-add, sums in a fixed order, and (ops/vec_math.h) exp, log, sin,
 * pow.
 *
 * On every path, conversions give the same bits as their scalar twins in base/dtype.h (NaN and
 * subnormals kept, nearest even). Sums over lanes add the upper half to the lower until one lane
 * is left. fma is fused if the instruction set supports it. Results may thus differ between paths
 * in the last bits, but each path is reproducible.
 *
 * Everything is force-inlined: the linker must never keep a function's AVX-512 copy for baseline
 * code, and vectors must never be passed in calls, whose ABI depends on compiler flags.
 */
#ifndef FSDPC_OPS_VEC_H
#define FSDPC_OPS_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FSDPC_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FSDPC_VEC_AVX512 1
enum { FSDPC_LANES = 16 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FSDPC_VEC_AVX2 1
enum { FSDPC_LANES = 8 };
#else
enum { FSDPC_LANES = 4 };
#endif

typedef float fsdpc_vf __attribute__((vector_size(FSDPC_LANES * 4)));
typedef int32_t fsdpc_vi __attribute__((vector_size(FSDPC_LANES * 4)));
typedef uint32_t fsdpc_vu __attribute__((vector_size(FSDPC_LANES * 4)));
typedef uint16_t fsdpc_vh __attribute__((vector_size(FSDPC_LANES * 2))); /* bf16 or fp16 bits */

/* The same types without alignment, for loads and stores. */
typedef float fsdpc_vf_loose __attribute__((vector_size(FSDPC_LANES * 4), aligned(4), may_alias));
typedef uint16_t fsdpc_vh_loose
    __attribute__((vector_size(FSDPC_LANES * 2), aligned(2), may_alias));

/* -- construction ------------------------------------------------------------------------------ */

FSDPC_INLINE fsdpc_vf fsdpc_vf_splat(float x)
{
    return x - (fsdpc_vf){0}; /* x - 0 is x, -0 included */
}

FSDPC_INLINE fsdpc_vi fsdpc_vi_splat(int32_t x)
{
    return x + (fsdpc_vi){0};
}

/* Returns -1 in the first n lanes, 0 in the others; n is at most FSDPC_LANES. */
FSDPC_INLINE fsdpc_vi fsdpc_vi_first(size_t n)
{
    static const int32_t edge[2 * 16] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                         -1, -1, -1, -1, -1, -1, -1, -1};
    fsdpc_vi mask;
    memcpy(&mask, edge + 16 - n, sizeof mask);
    return mask;
}

/* `mask` must be 0 or -1 in each lane */
FSDPC_INLINE fsdpc_vf fsdpc_vf_select(fsdpc_vi mask, fsdpc_vf yes, fsdpc_vf no)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_mask_mov_ps((__m512)no, _mm512_movepi32_mask((__m512i)mask),
                                        (__m512)yes);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (fsdpc_vf)((mask & (fsdpc_vi)yes) | (~mask & (fsdpc_vi)no));
#endif
}

/* Returns whether any lane of a mask is -1. */
FSDPC_INLINE bool fsdpc_vi_any(fsdpc_vi mask)
{
#if defined(FSDPC_VEC_AVX512)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(FSDPC_VEC_AVX2)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

/* -- loads and stores of fp32 ------------------------------------------------------------------ */

FSDPC_INLINE fsdpc_vf fsdpc_vf_load(const float *p)
{
    return (fsdpc_vf) * (const fsdpc_vf_loose *)p;
}

FSDPC_INLINE void fsdpc_vf_store(float *p, fsdpc_vf v)
{
    *(fsdpc_vf_loose *)p = (fsdpc_vf_loose)v;
}

/* True if a count is known at compile time to be a whole vector, in which case _n functions cost
 * nothing extra. */
#define FSDPC_WHOLE(n) (__builtin_constant_p(n) && (n) == FSDPC_LANES)

/* Runs the statement from i to `last`, once per whole vector with a constant n, and once for the
 * remaining `n` elements. */
#define FSDPC_EACH_VECTOR(i, n, last, ...)                                                         \
    for (; (i) + FSDPC_LANES <= (last); (i) += FSDPC_LANES) {                                      \
        enum { n = FSDPC_LANES };                                                                  \
        __VA_ARGS__;                                                                               \
    }                                                                                              \
    if ((i) < (last)) {                                                                            \
        const size_t n = (last) - (i);                                                             \
        __VA_ARGS__;                                                                               \
    }

/* Loads the first n lanes without accessing the memory of the others, which are set to zero. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_load_n(const float *p, size_t n)
{
    if (FSDPC_WHOLE(n))
        return fsdpc_vf_load(p);
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_maskload_ps(p, (__m256i)fsdpc_vi_first(n));
#else
    float lanes[FSDPC_LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i] = p[i];
    return fsdpc_vf_load(lanes);
#endif
}

FSDPC_INLINE void fsdpc_vf_store_n(float *p, fsdpc_vf v, size_t n)
{
    if (FSDPC_WHOLE(n)) {
        fsdpc_vf_store(p, v);
        return;
    }
#if defined(FSDPC_VEC_AVX512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#elif defined(FSDPC_VEC_AVX2)
    _mm256_maskstore_ps(p, (__m256i)fsdpc_vi_first(n), (__m256)v);
#else
    float lanes[FSDPC_LANES];
    fsdpc_vf_store(lanes, v);
    for (size_t i = 0; i < n; i++)
        p[i] = lanes[i];
#endif
}

/* -- 16-bit formats ---------------------------------------------------------------------------- */

FSDPC_INLINE fsdpc_vh fsdpc_vh_load(const uint16_t *p)
{
    return (fsdpc_vh) * (const fsdpc_vh_loose *)p;
}

FSDPC_INLINE void fsdpc_vh_store(uint16_t *p, fsdpc_vh v)
{
    *(fsdpc_vh_loose *)p = (fsdpc_vh_loose)v;
}

FSDPC_INLINE fsdpc_vh fsdpc_vh_load_n(const uint16_t *p, size_t n)
{
    if (FSDPC_WHOLE(n))
        return fsdpc_vh_load(p);
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    uint16_t lanes[FSDPC_LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i] = p[i];
    return fsdpc_vh_load(lanes);
#endif
}

FSDPC_INLINE void fsdpc_vh_store_n(uint16_t *p, fsdpc_vh v, size_t n)
{
    if (FSDPC_WHOLE(n)) {
        fsdpc_vh_store(p, v);
        return;
    }
#if defined(FSDPC_VEC_AVX512)
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)v);
#else
    uint16_t lanes[FSDPC_LANES];
    fsdpc_vh_store(lanes, v);
    for (size_t i = 0; i < n; i++)
        p[i] = lanes[i];
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_from_bf16(fsdpc_vh v)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#elif defined(__SSE2__)
    __m128i low = _mm_loadl_epi64((const __m128i *)(const void *)&v);
    return (fsdpc_vf)_mm_unpacklo_epi16(_mm_setzero_si128(), low);
#else
    return (fsdpc_vf)(__builtin_convertvector(v, fsdpc_vu) << 16);
#endif
}

/* Rounds with integers, because vcvtneps2bf16 would flush subnormals. */
FSDPC_INLINE fsdpc_vh fsdpc_vf_to_bf16(fsdpc_vf v)
{
    fsdpc_vu bits = (fsdpc_vu)v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(FSDPC_VEC_AVX512) /* the compiler would move the mask through a vector */
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    rounded = (fsdpc_vu)_mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)bits,
                                             _mm512_set1_epi32(0x400000));
    return (fsdpc_vh)_mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
#else
    fsdpc_vu quiet = bits | 0x400000u;
    rounded = (fsdpc_vu)fsdpc_vf_select(v != v, (fsdpc_vf)quiet, (fsdpc_vf)rounded);
#if defined(FSDPC_VEC_AVX2)
    __m256i high = (__m256i)(rounded >> 16);
    return (fsdpc_vh)_mm_packus_epi32(_mm256_castsi256_si128(high),
                                      _mm256_extracti128_si256(high, 1));
#elif defined(__SSE2__)
    __m128i high =
        _mm_srai_epi32((__m128i)rounded, 16); /* signed, so that packing keeps the bits */
    fsdpc_vh out;
    _mm_storel_epi64((__m128i *)(void *)&out, _mm_packs_epi32(high, high));
    return out;
#else
    return __builtin_convertvector(rounded >> 16, fsdpc_vh);
#endif
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_from_f16(fsdpc_vh v)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_cvtph_ps((__m256i)v);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_cvtph_ps((__m128i)v);
#else
    float lanes[FSDPC_LANES];
    for (int i = 0; i < FSDPC_LANES; i++)
        lanes[i] = fsdpc_f16_to_f32(v[i]);
    return fsdpc_vf_load(lanes);
#endif
}

FSDPC_INLINE fsdpc_vh fsdpc_vf_to_f16(fsdpc_vf v)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    uint16_t lanes[FSDPC_LANES];
    for (int i = 0; i < FSDPC_LANES; i++)
        lanes[i] = fsdpc_f32_to_f16(v[i]);
    return fsdpc_vh_load(lanes);
#endif
}

/* Loads elements i .. i + FSDPC_LANES - 1 of an F32, BF16 or F16 array as fp32. Kernels call these
 * functions with a constant dtype, for which the selection costs nothing. */
FSDPC_INLINE fsdpc_vf fsdpc_vf_load_as(const void *base, size_t i, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F32)
        return fsdpc_vf_load((const float *)base + i);
    fsdpc_vh half = fsdpc_vh_load((const uint16_t *)base + i);
    return dtype == FSDPC_BF16 ? fsdpc_vf_from_bf16(half) : fsdpc_vf_from_f16(half);
}

FSDPC_INLINE void fsdpc_vf_store_as(void *base, size_t i, fsdpc_dtype dtype, fsdpc_vf v)
{
    if (dtype == FSDPC_F32)
        fsdpc_vf_store((float *)base + i, v);
    else
        fsdpc_vh_store((uint16_t *)base + i,
                       dtype == FSDPC_BF16 ? fsdpc_vf_to_bf16(v) : fsdpc_vf_to_f16(v));
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_load_as_n(const void *base, size_t i, fsdpc_dtype dtype, size_t n)
{
    if (dtype == FSDPC_F32)
        return fsdpc_vf_load_n((const float *)base + i, n);
    fsdpc_vh half = fsdpc_vh_load_n((const uint16_t *)base + i, n);
    return dtype == FSDPC_BF16 ? fsdpc_vf_from_bf16(half) : fsdpc_vf_from_f16(half);
}

FSDPC_INLINE void fsdpc_vf_store_as_n(void *base, size_t i, fsdpc_dtype dtype, fsdpc_vf v, size_t n)
{
    if (dtype == FSDPC_F32)
        fsdpc_vf_store_n((float *)base + i, v, n);
    else
        fsdpc_vh_store_n((uint16_t *)base + i,
                         dtype == FSDPC_BF16 ? fsdpc_vf_to_bf16(v) : fsdpc_vf_to_f16(v), n);
}

/* Loads a single element in the same way. */
FSDPC_INLINE float fsdpc_f32_load_as(const void *base, size_t i, fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F32)
        return ((const float *)base)[i];
    uint16_t half = ((const uint16_t *)base)[i];
    return dtype == FSDPC_BF16 ? fsdpc_bf16_to_f32(half) : fsdpc_f16_to_f32(half);
}

FSDPC_INLINE void fsdpc_f32_store_as(void *base, size_t i, fsdpc_dtype dtype, float x)
{
    if (dtype == FSDPC_F32)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = dtype == FSDPC_BF16 ? fsdpc_f32_to_bf16(x) : fsdpc_f32_to_f16(x);
}

/* -- arithmetic -------------------------------------------------------------------------------- */

/* a > b ? a : b, which is the second operand if either is NaN */
FSDPC_INLINE fsdpc_vf fsdpc_vf_max(fsdpc_vf a, fsdpc_vf b)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (fsdpc_vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return fsdpc_vf_select(a > b, a, b);
#endif
}

/* a < b ? a : b */
FSDPC_INLINE fsdpc_vf fsdpc_vf_min(fsdpc_vf a, fsdpc_vf b)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (fsdpc_vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return fsdpc_vf_select(a < b, a, b);
#endif
}

/* a * b + c, rounded once if the instruction set supports that, otherwise twice */
FSDPC_INLINE fsdpc_vf fsdpc_vf_fma(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_sqrt(fsdpc_vf a)
{
#if defined(FSDPC_VEC_AVX512)
    return (fsdpc_vf)_mm512_sqrt_ps((__m512)a);
#elif defined(FSDPC_VEC_AVX2)
    return (fsdpc_vf)_mm256_sqrt_ps((__m256)a);
#elif defined(__SSE2__)
    return (fsdpc_vf)_mm_sqrt_ps((__m128)a);
#else
    for (int i = 0; i < FSDPC_LANES; i++)
        a[i] = sqrtf(a[i]);
    return a;
#endif
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_abs(fsdpc_vf a)
{
    return (fsdpc_vf)((fsdpc_vu)a & 0x7fffffffu);
}

FSDPC_INLINE fsdpc_vf fsdpc_vf_copysign(fsdpc_vf magnitude, fsdpc_vf sign)
{
    return (fsdpc_vf)(((fsdpc_vu)magnitude & 0x7fffffffu) | ((fsdpc_vu)sign & 0x80000000u));
}

/* -- over the lanes, in a fixed order ---------------------------------------------------------- */

FSDPC_INLINE float fsdpc_vf_sum(fsdpc_vf v)
{
#if defined(FSDPC_VEC_AVX512)
    __m256 a =
        _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(FSDPC_VEC_AVX2)
    __m256 a = (__m256)v;
#endif
#if defined(__AVX2__)
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(__SSE2__)
    __m128 b = (__m128)v;
#endif
#if defined(__SSE2__)
    __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(c) + _mm_cvtss_f32(_mm_shuffle_ps(c, c, 1));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* Returns the maximum over lanes; undefined if any is NaN. */
FSDPC_INLINE float fsdpc_vf_max_lane(fsdpc_vf v)
{
    float lanes[FSDPC_LANES];
    fsdpc_vf_store(lanes, v);
    for (int half = FSDPC_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

#include "ops/vec_math.h"

#endif
