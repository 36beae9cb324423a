/* Arithmetic and comparisons between a tensor and a number.
 *
 * For float tensors, the number is passed as the kernel's scalar argument if the kernel has one,
 * and otherwise as a zero-dimensional tensor. For integer tensors, an integer is passed exactly, as
 * a zero-dimensional tensor.
 */
#include "nn/op.h"

#include <math.h>

/* Returns the comparison to use when the operands are swapped. */
static fsdpc_binary mirrored(fsdpc_binary kind)
{
    static const fsdpc_binary kinds[] = {
        [FSDPC_BINARY_EQ] = FSDPC_BINARY_EQ, [FSDPC_BINARY_NE] = FSDPC_BINARY_NE,
        [FSDPC_BINARY_LT] = FSDPC_BINARY_GT, [FSDPC_BINARY_LE] = FSDPC_BINARY_GE,
        [FSDPC_BINARY_GT] = FSDPC_BINARY_LT, [FSDPC_BINARY_GE] = FSDPC_BINARY_LE};
    return kinds[kind];
}

/* Compares a float tensor with a number rounded to its dtype. No float equals a finite number
 * outside the dtype's range, and only an infinity exceeds it in magnitude. */
static fsdpc_status compare_float(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                  fsdpc_scalar s, fsdpc_tensor **out)
{
    double rounded = s.real;
    if (fsdpc_scalar_round(&rounded, x->dtype) != FSDPC_OK) {
        bool above = kind == FSDPC_BINARY_GT || kind == FSDPC_BINARY_GE;
        rounded = s.real > 0 ? INFINITY : -INFINITY;
        if (kind == FSDPC_BINARY_EQ || kind == FSDPC_BINARY_NE)
            rounded = NAN;
        else if (above)
            kind = s.real > 0 ? FSDPC_BINARY_GE : FSDPC_BINARY_GT;
        else
            kind = s.real > 0 ? FSDPC_BINARY_LT : FSDPC_BINARY_LE;
    }
    return fsdpc_op_with_scalar(tape, kind, x, fsdpc_scalar_real(rounded), x->dtype, false, out);
}

/* Compares integers exactly with any number: a fraction is rounded in the direction that preserves
 * the result. */
static fsdpc_status compare_integer(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                    fsdpc_scalar s, fsdpc_tensor **out)
{
    bool equals = kind == FSDPC_BINARY_EQ || kind == FSDPC_BINARY_NE;
    bool up = kind == FSDPC_BINARY_LT || kind == FSDPC_BINARY_GE;
    if (!s.integral && (!equals || s.real == trunc(s.real))) {
        double whole = up ? ceil(s.real) : floor(s.real);
        if (whole >= -0x1p63 && whole < 0x1p63)
            s = fsdpc_scalar_whole((int64_t)whole);
    }
    if (s.fits) {
        bool byte = fsdpc_dtype_bytes(x->dtype) == 1 && s.whole >= 0 &&
                    s.whole <= (x->dtype == FSDPC_BOOL ? 1 : UINT8_MAX);
        bool narrow = s.whole >= INT32_MIN && s.whole <= INT32_MAX && x->dtype != FSDPC_I64;
        fsdpc_dtype dtype = byte ? x->dtype : narrow ? FSDPC_I32 : FSDPC_I64;
        return fsdpc_op_with_scalar(tape, kind, x, s, dtype, false, out);
    }
    /* NaN, a fraction that equals no integer, or a number beyond all integers */
    double bound = isfinite(s.real) && s.real != trunc(s.real) ? NAN : s.real;
    if (!isnan(bound))
        bound = bound > 0 ? INFINITY : -INFINITY;
    fsdpc_tensor *wide;
    FSDPC_TRY(fsdpc_op_cast(tape, x, FSDPC_F64, &wide));
    fsdpc_status st =
        fsdpc_op_with_scalar(tape, kind, wide, fsdpc_scalar_real(bound), FSDPC_F64, false, out);
    fsdpc_tensor_release(wide);
    return st;
}

/* Multiplies by the reciprocal, unless the reciprocal underflows or overflows. */
static fsdpc_status divide(fsdpc_tape *tape, fsdpc_tensor *x, double s, fsdpc_tensor **out)
{
    double by = 1 / s, size = fabs(by);
    bool narrow = x->dtype != FSDPC_F64;
    if (s == 0 || isnan(s) ||
        (size >= (narrow ? 0x1p-126 : 0x1p-1022) && size < (narrow ? 0x1p127 : 0x1p1023)))
        return fsdpc_op_unary(tape, FSDPC_UNARY_MUL_SCALAR, by, x, out);
    fsdpc_tensor *wide = NULL, *y = NULL;
    FSDPC_TRY(fsdpc_op_cast(tape, x, FSDPC_F64, &wide));
    fsdpc_status st = fsdpc_op_with_scalar(tape, FSDPC_BINARY_DIV, wide, fsdpc_scalar_real(s),
                                           FSDPC_F64, false, &y);
    if (st == FSDPC_OK)
        st = fsdpc_op_cast(tape, y, x->dtype, out);
    fsdpc_tensor_release(wide);
    fsdpc_tensor_release(y);
    return st;
}

fsdpc_status fsdpc_op_binary_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                    fsdpc_scalar s, bool reversed, fsdpc_tensor **out)
{
    bool floats = fsdpc_dtype_is_float(x->dtype);
    if (fsdpc_binary_compares(kind))
        return (floats ? compare_float : compare_integer)(tape, reversed ? mirrored(kind) : kind, x,
                                                          s, out);
    if (!floats) {
        if (s.integral && kind != FSDPC_BINARY_DIV)
            return fsdpc_op_integer_scalar(tape, kind, x, s, reversed, out);
        fsdpc_tensor *f;
        FSDPC_TRY(fsdpc_op_cast(tape, x, FSDPC_F32, &f));
        fsdpc_status st = fsdpc_op_binary_scalar(tape, kind, f, s, reversed, out);
        fsdpc_tensor_release(f);
        return st;
    }
    switch (kind) {
    case FSDPC_BINARY_ADD:
        return fsdpc_op_unary(tape, FSDPC_UNARY_ADD_SCALAR, s.real, x, out);
    case FSDPC_BINARY_SUB:
        if (reversed)
            return fsdpc_op_unary(tape, FSDPC_UNARY_RSUB_SCALAR, s.real, x, out);
        return fsdpc_op_unary(tape, FSDPC_UNARY_ADD_SCALAR, -s.real, x, out);
    case FSDPC_BINARY_MUL:
        return fsdpc_op_unary(tape, FSDPC_UNARY_MUL_SCALAR, s.real, x, out);
    case FSDPC_BINARY_DIV:
        if (reversed)
            return fsdpc_op_unary(tape, FSDPC_UNARY_RDIV_SCALAR, s.real, x, out);
        return divide(tape, x, s.real, out);
    default:
        return fsdpc_op_with_scalar(tape, kind, x, s, x->dtype, reversed, out);
    }
}
