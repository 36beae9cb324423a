/* A scalar operand of a tensor operation.
 *
 * An integer is never converted to a double before it is stored in an integer tensor, because 2^53
 * + 1 would become 2^53. If a dtype cannot hold a number, the error names both.
 */
#ifndef FSDPC_NN_SCALAR_H
#define FSDPC_NN_SCALAR_H

#include "nn/tensor.h"

typedef struct fsdpc_scalar {
    bool integral; /* an int or a bool, not a float */
    bool fits;     /* integral, and `whole` holds it */
    int64_t whole;
    double real; /* the nearest double */
} fsdpc_scalar;

static inline fsdpc_scalar fsdpc_scalar_real(double value)
{
    return (fsdpc_scalar){.real = value};
}

static inline fsdpc_scalar fsdpc_scalar_whole(int64_t value)
{
    return (fsdpc_scalar){.integral = true, .fits = true, .whole = value, .real = (double)value};
}

/* Writes one element of dtype. A float is rounded for a float dtype and truncated for an integer
 * dtype. Fails with ValueError if the number is outside an integer dtype's range, if a finite
 * number would become infinite, or if NaN is stored in an integer dtype. */
fsdpc_status fsdpc_scalar_store(fsdpc_scalar s, fsdpc_dtype dtype, void *out);

/* Rounds a double to a float dtype and fails with the same errors. */
fsdpc_status fsdpc_scalar_round(double *inout, fsdpc_dtype dtype);

/* Stores the number in a new zero-dimensional tensor. */
fsdpc_status fsdpc_scalar_tensor(fsdpc_device *device, fsdpc_stream *stream, fsdpc_scalar s,
                                 fsdpc_dtype dtype, fsdpc_tensor **out);

#endif
