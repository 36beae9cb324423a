/* Norms in the making, in the device's memory; arguments of the table's norm_join and clip.
 *
 * A norm begins as zeros; sumsq, sumpow or absmax add elements to it.  So that nobody has to read
 * it on the way to the optimizer, norms are joined and become a value, and a factor that clips, by
 * calls of the table too.  All of it is fp64 without fused operations, so every device has the same
 * bits.
 */
#ifndef FSDPC_OPS_FLAT_NORM_H
#define FSDPC_OPS_FLAT_NORM_H

#include <math.h>

#include <stddef.h>

#include "ops/exact_sum.h"

/* For p from above 0 up to, but without, infinity an exact sum of |x|^p; for p = INFINITY the
 * largest |x|, whose bits are ordered as integers, a NaN above infinity. */
typedef union fsdpc_norm {
    fsdpc_exact_sum sum;
    int64_t largest;
    double magnitude; /* the same */
} fsdpc_norm;

enum { FSDPC_NORM_WORDS = sizeof(fsdpc_norm) / sizeof(int64_t) };

/* Adds `from`, as it would be had all its elements been times 2^exponent, to `into`, and normalises
 * that. */
typedef struct fsdpc_norm_join_args {
    fsdpc_norm *into;
    const fsdpc_norm *from; /* NULL: only normalises */
    double p;
    int exponent; /* not 0 for p of 1, 2 and INFINITY alone */
} fsdpc_norm_join_args;

/* What clipping multiplies by, on any device.  A NaN norm makes every gradient NaN, as in PyTorch:
 * one that is not finite must not end in a step that others take.  An infinite limit only measures.
 */
#define FSDPC_CLIP_FACTOR(norm, max_norm)                                                          \
    ((max_norm) == (double)INFINITY || (max_norm) / ((norm) + 1e-6) >= 1                           \
         ? 1.0                                                                                     \
         : (max_norm) / ((norm) + 1e-6))

enum { FSDPC_CLIP_FACTORS = 64 };

/* Every factor is to be FSDPC_CLIP_FACTOR; or is multiplied by that, where it is pending already.
 */
typedef struct fsdpc_clip_args {
    const double *norm;
    double max_norm;
    int n; /* factors, up to FSDPC_CLIP_FACTORS */
    double *factors[FSDPC_CLIP_FACTORS];
    uint64_t pending; /* bit i: factors[i] is */
} fsdpc_clip_args;

#endif
