/* Converts arrays of elements: directly between fp32 and 16-bit floats, otherwise through blocks of
 * doubles, which represent every value exactly.
 *
 * Converting fp64 to a 16-bit float through fp32 would round twice. The first rounding is therefore
 * to odd (with a sticky last bit), so only the second one affects the result.
 */
#include "ckpt/convert.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 512 };

fsdpc_status fsdpc_ckpt_convert_check(fsdpc_dtype to, fsdpc_dtype from)
{
    if (to == from || (fsdpc_dtype_is_float(to) && fsdpc_dtype_is_float(from)))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE, "%s values cannot be read as %s", fsdpc_dtype_name(from),
                      fsdpc_dtype_name(to));
}

/* Rounds to fp32 such that rounding the result to 16 bits gives the same value as rounding x. */
static float round_to_odd(double x)
{
    float f = (float)x;
    if (isnan(x) || isinf(f) || (double)f == x)
        return f;
    uint32_t bits = fsdpc_f32_bits(f);
    if (fabs((double)f) > fabs(x))
        bits--; /* towards zero */
    return fsdpc_f32_from_bits(bits | 1);
}

static void to_doubles(double *dst, const void *src, fsdpc_dtype from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (from == FSDPC_F32)
            dst[i] = ((const float *)src)[i];
        else if (from == FSDPC_BF16)
            dst[i] = fsdpc_bf16_to_f32(((const uint16_t *)src)[i]);
        else if (from == FSDPC_F16)
            dst[i] = fsdpc_f16_to_f32(((const uint16_t *)src)[i]);
        else
            dst[i] = ((const double *)src)[i];
    }
}

static void from_doubles(void *dst, fsdpc_dtype to, const double *src, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (to == FSDPC_F32)
            ((float *)dst)[i] = (float)src[i];
        else if (to == FSDPC_BF16)
            ((uint16_t *)dst)[i] = fsdpc_f32_to_bf16(round_to_odd(src[i]));
        else if (to == FSDPC_F16)
            ((uint16_t *)dst)[i] = fsdpc_f32_to_f16(round_to_odd(src[i]));
        else
            ((double *)dst)[i] = src[i];
    }
}

void fsdpc_ckpt_convert(void *dst, fsdpc_dtype to, const void *src, fsdpc_dtype from, size_t numel)
{
    if (to == from) {
        memcpy(dst, src, numel * fsdpc_dtype_bytes(to));
    } else if (to == FSDPC_F32 && from == FSDPC_BF16) {
        float *out = dst;
        const uint16_t *in = src;
        for (size_t i = 0; i < numel; i++)
            out[i] = fsdpc_bf16_to_f32(in[i]);
    } else if (to == FSDPC_BF16 && from == FSDPC_F32) {
        uint16_t *out = dst;
        const float *in = src;
        for (size_t i = 0; i < numel; i++)
            out[i] = fsdpc_f32_to_bf16(in[i]);
    } else {
        double block[BLOCK];
        size_t to_bytes = fsdpc_dtype_bytes(to), from_bytes = fsdpc_dtype_bytes(from);
        for (size_t i = 0; i < numel; i += BLOCK) {
            size_t n = numel - i < BLOCK ? numel - i : BLOCK;
            to_doubles(block, (const char *)src + i * from_bytes, from, n);
            from_doubles((char *)dst + i * to_bytes, to, block, n);
        }
    }
}
