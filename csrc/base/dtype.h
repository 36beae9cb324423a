/* Element types, and conversions of single elements.
 *
 * Conversions to bf16 and fp16 use integer arithmetic, round to nearest even, and preserve NaNs and
 * subnormals. Every path (portable, SIMD, CUDA) therefore gives the same bits. Kernels that convert
 * many elements have their own vector versions (csrc/ops), which are tested against these
 * conversions.
 */
#ifndef FSDPC_BASE_DTYPE_H
#define FSDPC_BASE_DTYPE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

/* X(name, bytes, text) */
#define FSDPC_DTYPE_TABLE(X)                                                                       \
    X(F32, 4, "float32")                                                                           \
    X(BF16, 2, "bfloat16")                                                                         \
    X(F16, 2, "float16")                                                                           \
    X(F64, 8, "float64")                                                                           \
    X(I32, 4, "int32")                                                                             \
    X(I64, 8, "int64")                                                                             \
    X(U8, 1, "uint8")                                                                              \
    X(BOOL, 1, "bool")

typedef enum fsdpc_dtype {
#define X(name, bytes, text) FSDPC_##name,
    FSDPC_DTYPE_TABLE(X)
#undef X
        FSDPC_DTYPE_COUNT
} fsdpc_dtype;

size_t fsdpc_dtype_bytes(fsdpc_dtype dtype);
const char *fsdpc_dtype_name(fsdpc_dtype dtype);
bool fsdpc_dtype_is_float(fsdpc_dtype dtype);
fsdpc_status fsdpc_dtype_parse(const char *name, fsdpc_dtype *out);

static inline uint32_t fsdpc_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float fsdpc_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float fsdpc_bf16_to_f32(uint16_t x)
{
    return fsdpc_f32_from_bits((uint32_t)x << 16);
}

static inline uint16_t fsdpc_f32_to_bf16(float x)
{
    uint32_t bits = fsdpc_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40); /* quiet NaN, sign and top of the payload kept */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float fsdpc_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
    if (exponent == 31)
        return fsdpc_f32_from_bits(sign | 0x7f800000u | mantissa << 13 |
                                   (mantissa ? 0x400000u : 0));
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return fsdpc_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t fsdpc_f32_to_f16(float x)
{
    uint32_t bits = fsdpc_f32_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal; the addition rounds to 2^-24 */
        float rounded = fsdpc_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (fsdpc_f32_bits(rounded) - 0x3f000000u));
    }
    magnitude += 0xc8000fffu + (magnitude >> 13 & 1); /* exponent - 112, round to nearest even */
    return (uint16_t)(sign | magnitude >> 13);
}

#endif
