/* Norms that are still being computed in device memory, and the arguments of the table's norm_join
 * and clip.
 *
 * A norm starts as zeros; sumsq, sumpow or absmax adds elements to it. The host should not have to
 * read the norm before the optimizer can use it. Functions in the table therefore also combine
 * norms, compute their value, and derive the clipping factor. All of them use fp64 without fused
 * operations, so every device computes the same bits.
 */
#ifndef FSDPC_OPS_FLAT_NORM_H
#define FSDPC_OPS_FLAT_NORM_H

#include <math.h>

#include <stddef.h>

#include "ops/exact_sum.h"

/* For 0 < p < infinity, an exact sum of |x|^p. For p = INFINITY, the largest |x|, whose bits are
 * ordered as integers, with NaN above infinity. */
typedef union fsdpc_norm {
    fsdpc_exact_sum sum;
    int64_t largest;
    double magnitude; /* the same bits */
} fsdpc_norm;

enum { FSDPC_NORM_WORDS = sizeof(fsdpc_norm) / sizeof(int64_t) };

/* Adds `from` to `into`, as if all its elements had been multiplied by 2^exponent, and normalises
 * `into`. */
typedef struct fsdpc_norm_join_args {
    fsdpc_norm *into;
    const fsdpc_norm *from; /* NULL: only normalises */
    double p;
    int exponent; /* may be nonzero only for p of 1, 2 and INFINITY */
} fsdpc_norm_join_args;

/* The clipping factor, the same on every device. A NaN norm makes every gradient NaN, as in
 * PyTorch, so a nonfinite gradient affects all parameters alike. An infinite limit only measures.
 */
#define FSDPC_CLIP_FACTOR(norm, max_norm)                                                          \
    ((max_norm) == (double)INFINITY || (max_norm) / ((norm) + 1e-6) >= 1                           \
         ? 1.0                                                                                     \
         : (max_norm) / ((norm) + 1e-6))

enum { FSDPC_CLIP_FACTORS = 64 };

/* Sets every factor to FSDPC_CLIP_FACTOR, or multiplies a pending factor by it. */
typedef struct fsdpc_clip_args {
    const double *norm;
    double max_norm;
    int n; /* number of factors, up to FSDPC_CLIP_FACTORS */
    double *factors[FSDPC_CLIP_FACTORS];
    uint64_t pending; /* bit i: factors[i] is pending */
} fsdpc_clip_args;

#endif
