/* Casts between any two dtypes, element by element, for the rare cases.
 *
 * A row is processed in blocks. A block is widened to int64 (integer sources) or double (float
 * sources), which is exact, and then stored. There is thus one loop per source or destination
 * dtype, not one per pair. Float to integer truncates towards zero, saturates and maps NaN to 0;
 * integer to narrower integer wraps; anything to bool is x != 0. double to a 16-bit float is first
 * rounded to fp32, as in PyTorch.
 */
#include "ops/nn_internal.h"

enum { CAST_BLOCK = 256 };

typedef union cast_block {
    int64_t ints[CAST_BLOCK];
    double reals[CAST_BLOCK];
} cast_block;

double fsdpc_nn_load_f64(const void *base, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return ((const float *)base)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)base)[i]);
    case FSDPC_F16:
        return fsdpc_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return ((const double *)base)[i];
    }
}

void fsdpc_nn_store_f64(void *base, size_t i, fsdpc_dtype dtype, double x)
{
    switch (dtype) {
    case FSDPC_F32:
        ((float *)base)[i] = (float)x;
        break;
    case FSDPC_BF16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_bf16((float)x);
        break;
    case FSDPC_F16:
        ((uint16_t *)base)[i] = fsdpc_f32_to_f16((float)x);
        break;
    default:
        ((double *)base)[i] = x;
        break;
    }
}

/* Truncates, and clamps out-of-range values to the nearest limit. */
static int64_t truncate_to(double x, double low, double high)
{
    if (!(x > low))
        return x <= low ? (int64_t)low : 0;
    if (x < high)
        return (int64_t)x;
    return high >= 0x1p63 ? INT64_MAX : (int64_t)high;
}

/* dense rows have a separate loop, which the compiler vectorises */
#define LOAD(type, to, value)                                                                      \
    do {                                                                                           \
        const type *restrict from = (const type *)src + at;                                        \
        for (size_t i = 0; step == 1 && i < numel; i++) {                                          \
            type x = from[i];                                                                      \
            block->to[i] = (value);                                                                \
        }                                                                                          \
        for (size_t i = 0; step != 1 && i < numel; i++) {                                          \
            type x = from[i * step];                                                               \
            block->to[i] = (value);                                                                \
        }                                                                                          \
    } while (0);                                                                                   \
    break

/* Returns whether the block holds integers. */
static bool load_block(cast_block *block, const void *src, fsdpc_dtype dtype, size_t at,
                       size_t step, size_t numel)
{
    switch (dtype) {
    case FSDPC_F32:
        LOAD(float, reals, x);
    case FSDPC_BF16:
        LOAD(uint16_t, reals, fsdpc_bf16_to_f32(x));
    case FSDPC_F16:
        LOAD(uint16_t, reals, fsdpc_f16_to_f32(x));
    case FSDPC_F64:
        LOAD(double, reals, x);
    case FSDPC_I32:
        LOAD(int32_t, ints, x);
    case FSDPC_I64:
        LOAD(int64_t, ints, x);
    case FSDPC_U8:
        LOAD(uint8_t, ints, x);
    default:
        LOAD(uint8_t, ints, x != 0);
    }
    return dtype > FSDPC_F64;
}

#define STORE(type, value)                                                                         \
    do {                                                                                           \
        type *restrict to = (type *)dst + at;                                                      \
        for (size_t i = 0; step == 1 && i < numel; i++)                                            \
            to[i] = (type)(value);                                                                 \
        for (size_t i = 0; step != 1 && i < numel; i++)                                            \
            to[i * step] = (type)(value);                                                          \
    } while (0);                                                                                   \
    break

static void store_ints(const int64_t *x, void *dst, fsdpc_dtype dtype, size_t at, size_t step,
                       size_t numel)
{
    switch (dtype) {
    case FSDPC_F32:
        STORE(float, x[i]);
    case FSDPC_BF16:
        STORE(uint16_t, fsdpc_f32_to_bf16((float)x[i]));
    case FSDPC_F16:
        STORE(uint16_t, fsdpc_f32_to_f16((float)x[i]));
    case FSDPC_F64:
        STORE(double, x[i]);
    case FSDPC_I32:
        STORE(int32_t, x[i]);
    case FSDPC_I64:
        STORE(int64_t, x[i]);
    case FSDPC_U8:
        STORE(uint8_t, x[i]);
    default:
        STORE(uint8_t, x[i] != 0);
    }
}

static void store_reals(const double *x, void *dst, fsdpc_dtype dtype, size_t at, size_t step,
                        size_t numel)
{
    switch (dtype) {
    case FSDPC_F32:
        STORE(float, x[i]);
    case FSDPC_BF16:
        STORE(uint16_t, fsdpc_f32_to_bf16((float)x[i]));
    case FSDPC_F16:
        STORE(uint16_t, fsdpc_f32_to_f16((float)x[i]));
    case FSDPC_F64:
        STORE(double, x[i]);
    case FSDPC_I32:
        STORE(int32_t, truncate_to(x[i], INT32_MIN, INT32_MAX));
    case FSDPC_I64:
        STORE(int64_t, truncate_to(x[i], -0x1p63, 0x1p63));
    case FSDPC_U8:
        STORE(uint8_t, truncate_to(x[i], 0, UINT8_MAX));
    default:
        STORE(uint8_t, x[i] != 0);
    }
}

/* block += old, as integers if both are integers, otherwise as doubles (sums of two floats are then
 * rounded as if computed in fp32). Returns true if the block holds integers. */
static bool add_block(cast_block *block, bool ints, const cast_block *old, bool old_ints,
                      size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        if (ints && old_ints) {
            block->ints[i] = (int64_t)((uint64_t)block->ints[i] + (uint64_t)old->ints[i]);
        } else {
            double a = ints ? (double)block->ints[i] : block->reals[i];
            block->reals[i] = a + (old_ints ? (double)old->ints[i] : old->reals[i]);
        }
    }
    return ints && old_ints;
}

void fsdpc_nn_cast_row(void *dst, fsdpc_dtype dst_dtype, size_t dst_at, size_t dst_step,
                       const void *src, fsdpc_dtype src_dtype, size_t src_at, size_t src_step,
                       size_t numel, bool accumulate)
{
    cast_block block, old;
    for (size_t i = 0; i < numel; i += CAST_BLOCK) {
        size_t n = fsdpc_min_size(CAST_BLOCK, numel - i), to = dst_at + i * dst_step;
        bool ints = load_block(&block, src, src_dtype, src_at + i * src_step, src_step, n);
        if (accumulate) {
            bool old_ints = load_block(&old, dst, dst_dtype, to, dst_step, n);
            ints = add_block(&block, ints, &old, old_ints, n);
        }
        if (ints)
            store_ints(block.ints, dst, dst_dtype, to, dst_step, n);
        else
            store_reals(block.reals, dst, dst_dtype, to, dst_step, n);
    }
}
