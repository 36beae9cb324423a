/* A p-norm in the making: what sums and ranks add up, and the norm it comes to.
 *
 * For p from above 0 up to, but without, infinity it is an exact sum of |x|^p over leaves
 * (ops/exact_sum.h), whose bits depend on no cut and no order; for p = INFINITY it is the largest
 * |x|, as the bits of a double, which are ordered as integers, a NaN above infinity.  Either way it
 * is FSDPC_NORM_WORDS integers that begin as zeros, and ranks combine theirs by one integer
 * all-reduce (fsdpc_norm_red), many norms at a time.
 *
 * A power that fp64 cannot hold is infinity or 0: norms of large p want elements near 1.
 */
#ifndef FSDPC_ENGINE_NORM_H
#define FSDPC_ENGINE_NORM_H

#include "comm/comm.h"
#include "ops/exact_sum.h"

typedef union fsdpc_norm {
    fsdpc_exact_sum sum;
    int64_t largest;
} fsdpc_norm;

enum { FSDPC_NORM_WORDS = sizeof(fsdpc_norm) / sizeof(int64_t) };

/* FSDPC_ERR_VALUE unless p is a number above 0, or INFINITY. */
fsdpc_status fsdpc_norm_check(double p);

/* Adds elements; they begin at a leaf (layout.h). */
fsdpc_status fsdpc_norm_add(fsdpc_norm *norm, double p, const void *x, fsdpc_dtype dtype,
                            size_t numel, size_t leaf, fsdpc_stream *stream);

/* Can it be told exactly what the norm would be, had all elements been times `factor`?  For powers
 * of two, and p of 1, 2 and INFINITY. */
bool fsdpc_norm_can_scale(double p, double factor);
void fsdpc_norm_scale(fsdpc_norm *norm, double p, double factor); /* where it can */

void fsdpc_norm_merge(fsdpc_norm *norm, double p, const fsdpc_norm *other);

/* Prepares for an all-reduce of words by fsdpc_norm_red(p). */
void fsdpc_norm_normalize(fsdpc_norm *norm, double p);
fsdpc_red fsdpc_norm_red(double p);

double fsdpc_norm_value(const fsdpc_norm *norm, double p);

#endif
