/* Checked arithmetic on sizes. All products of shapes and byte counts use these functions, so an
 * overflow is an error instead of a too-small allocation. */
#ifndef FSDPC_BASE_SIZE_H
#define FSDPC_BASE_SIZE_H

#include <stdint.h>

#include "base/status.h"

static inline fsdpc_status fsdpc_mul_size(size_t a, size_t b, size_t *out)
{
    if (__builtin_mul_overflow(a, b, out))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%zu x %zu does not fit in memory", a, b);
    return FSDPC_OK;
}

static inline fsdpc_status fsdpc_add_size(size_t a, size_t b, size_t *out)
{
    if (__builtin_add_overflow(a, b, out))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%zu + %zu does not fit in memory", a, b);
    return FSDPC_OK;
}

static inline size_t fsdpc_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

static inline size_t fsdpc_round_up(size_t a, size_t multiple)
{
    return fsdpc_ceil_div(a, multiple) * multiple;
}

static inline size_t fsdpc_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t fsdpc_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

#endif
