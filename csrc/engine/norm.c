/* One face for exact sums and maxima.
 *
 * The maximum is kept as bits, so that 0, the empty norm, is all zeros for both kinds and an
 * all-reduce of integers serves both; the words it does not use stay zero.
 *
 * Scaling afterwards is what lets a gradient keep a factor pending, unread: a power of two moves
 * the exponent of every term alike, so the sum of the scaled terms is the shifted sum.  (Elements
 * that the factor would push below the smallest normal number would round; the shifted sum does
 * not.)  Others are left out: libm's pow does not promise that a scaled argument gives the
 * scaled result to the last bit.
 */
#include "engine/norm.h"

#include <math.h>
#include <stdlib.h>

#include "ops/flat_ops.h"

fsdpc_status fsdpc_norm_check(double p)
{
    if (p > 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "norm_type %g is not supported: give 1, 2, inf or another number above 0", p);
}

static double as_double(int64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int64_t as_bits(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

fsdpc_status fsdpc_norm_add(fsdpc_norm *norm, double p, const void *x, fsdpc_dtype dtype,
                            size_t numel, size_t leaf, fsdpc_stream *stream)
{
    if (p == 2)
        return fsdpc_flat_sumsq(x, dtype, numel, leaf, &norm->sum, stream);
    if (p < (double)INFINITY)
        return fsdpc_flat_sumpow(x, dtype, numel, leaf, p, &norm->sum, stream);
    double largest = as_double(norm->largest);
    FSDPC_TRY(fsdpc_flat_absmax(x, dtype, numel, &largest, stream));
    norm->largest = as_bits(isnan(largest) ? fabs((double)NAN) : largest);
    return FSDPC_OK;
}

bool fsdpc_norm_can_scale(double p, double factor)
{
    int exponent;
    bool power_of_two = frexp(factor, &exponent) == 0.5;
    return power_of_two && abs(exponent) < 500 && (p == 1 || p == 2 || isinf(p));
}

void fsdpc_norm_scale(fsdpc_norm *norm, double p, double factor)
{
    int exponent;
    frexp(factor, &exponent);
    if (isinf(p))
        norm->largest = as_bits(as_double(norm->largest) * factor);
    else
        fsdpc_exact_sum_shift(&norm->sum, (exponent - 1) * (int)p);
}

void fsdpc_norm_merge(fsdpc_norm *norm, double p, const fsdpc_norm *other)
{
    if (!isinf(p))
        fsdpc_exact_sum_merge(&norm->sum, &other->sum);
    else if (other->largest > norm->largest)
        norm->largest = other->largest;
}

void fsdpc_norm_normalize(fsdpc_norm *norm, double p)
{
    if (!isinf(p))
        fsdpc_exact_sum_normalize(&norm->sum);
}

fsdpc_red fsdpc_norm_red(double p)
{
    return isinf(p) ? FSDPC_RED_MAX : FSDPC_RED_SUM;
}

double fsdpc_norm_value(const fsdpc_norm *norm, double p)
{
    if (isinf(p))
        return as_double(norm->largest);
    double sum = fsdpc_exact_sum_value(&norm->sum);
    return p == 2 ? sqrt(sum) : p == 1 ? sum : pow(sum, 1 / p);
}
