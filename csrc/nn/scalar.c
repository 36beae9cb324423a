/* Checks numbers and stores them as elements of a dtype. */
#include "nn/scalar.h"

#include <math.h>
#include <stdio.h>

static void scalar_text(fsdpc_scalar s, char *out, size_t size)
{
    if (s.fits)
        snprintf(out, size, "%lld", (long long)s.whole);
    else
        snprintf(out, size, s.integral ? "%.17g" : "%.9g", s.real);
}

static fsdpc_status fail_integer(fsdpc_scalar s, fsdpc_dtype dtype, int64_t low, int64_t high)
{
    char text[64];
    scalar_text(s, text, sizeof text);
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "the number %s does not fit %s, which holds %lld to %lld: use a wider dtype",
                      text, fsdpc_dtype_name(dtype), (long long)low, (long long)high);
}

/* Truncates a float towards 0; returns false if it does not fit in int64. */
static bool whole_of(fsdpc_scalar s, int64_t *out)
{
    if (s.integral) {
        *out = s.whole;
        return s.fits;
    }
    double whole = trunc(s.real);
    if (!(whole >= -0x1p63 && whole < 0x1p63))
        return false;
    *out = (int64_t)whole;
    return true;
}

static fsdpc_status store_integer(fsdpc_scalar s, fsdpc_dtype dtype, void *out)
{
    int64_t low = dtype == FSDPC_I64 ? INT64_MIN : dtype == FSDPC_I32 ? INT32_MIN : 0;
    int64_t high = dtype == FSDPC_I64 ? INT64_MAX : dtype == FSDPC_I32 ? INT32_MAX : UINT8_MAX;
    int64_t whole = 0;
    if (!whole_of(s, &whole) || whole < low || whole > high)
        return fail_integer(s, dtype, low, high);
    if (dtype == FSDPC_I64)
        *(int64_t *)out = whole;
    else if (dtype == FSDPC_I32)
        *(int32_t *)out = (int32_t)whole;
    else
        *(uint8_t *)out = (uint8_t)whole;
    return FSDPC_OK;
}

/* Returns the stored element as a double. */
static double store_float(double real, fsdpc_dtype dtype, void *out)
{
    float narrow = (float)real;
    switch (dtype) {
    case FSDPC_F64:
        *(double *)out = real;
        return real;
    case FSDPC_F32:
        *(float *)out = narrow;
        return narrow;
    case FSDPC_BF16:
        *(uint16_t *)out = fsdpc_f32_to_bf16(narrow);
        return fsdpc_bf16_to_f32(*(uint16_t *)out);
    default:
        *(uint16_t *)out = fsdpc_f32_to_f16(narrow);
        return fsdpc_f16_to_f32(*(uint16_t *)out);
    }
}

static fsdpc_status store_finite(fsdpc_scalar s, fsdpc_dtype dtype, void *out)
{
    if (isfinite(store_float(s.real, dtype, out)) || !(s.integral || isfinite(s.real)))
        return FSDPC_OK;
    char text[64];
    scalar_text(s, text, sizeof text);
    return fsdpc_fail(
        FSDPC_ERR_VALUE,
        "the number %s does not fit %s, where it would be infinite: use a wider dtype", text,
        fsdpc_dtype_name(dtype));
}

fsdpc_status fsdpc_scalar_store(fsdpc_scalar s, fsdpc_dtype dtype, void *out)
{
    if (dtype == FSDPC_BOOL) {
        *(uint8_t *)out = s.fits ? s.whole != 0 : s.real != 0;
        return FSDPC_OK;
    }
    if (!fsdpc_dtype_is_float(dtype))
        return store_integer(s, dtype, out);
    return store_finite(s, dtype, out);
}

fsdpc_status fsdpc_scalar_round(double *inout, fsdpc_dtype dtype)
{
    int64_t element;
    FSDPC_TRY(store_finite(fsdpc_scalar_real(*inout), dtype, &element));
    *inout = store_float(*inout, dtype, &element);
    return FSDPC_OK;
}

fsdpc_status fsdpc_scalar_tensor(fsdpc_device *device, fsdpc_stream *stream, fsdpc_scalar s,
                                 fsdpc_dtype dtype, fsdpc_tensor **out)
{
    int64_t element = 0; /* large enough for every dtype */
    FSDPC_TRY(fsdpc_scalar_store(s, dtype, &element));
    fsdpc_tensor *t;
    FSDPC_TRY(fsdpc_tensor_create(device, dtype, 0, NULL, &t));
    fsdpc_status st = fsdpc_device_copy(device, t->data, &element, fsdpc_tensor_bytes(t), stream);
    if (st == FSDPC_OK)
        *out = t;
    else
        fsdpc_tensor_release(t);
    return st;
}
