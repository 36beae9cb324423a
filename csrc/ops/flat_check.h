/* Argument checks shared by all flat kernel tables, so that every device fails with the same
 * message.
 */
#ifndef FSDPC_OPS_FLAT_CHECK_H
#define FSDPC_OPS_FLAT_CHECK_H

#include "ops/flat_ops.h"

/* Returns FSDPC_ERR_DTYPE unless the dtype is F32, BF16, F16 or F64. */
fsdpc_status fsdpc_flat_check_dtype(const char *operation, fsdpc_dtype dtype);

/* Returns FSDPC_ERR_VALUE for an in-place cast between dtypes of unequal size, which would
 * overwrite elements before reading them. */
fsdpc_status fsdpc_flat_check_in_place(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                                       fsdpc_dtype src_dtype);

/* Checks both dtypes and, if the cast is in place, their sizes. */
fsdpc_status fsdpc_flat_check_pair(const char *operation, const void *dst, fsdpc_dtype dst_dtype,
                                   const void *src, fsdpc_dtype src_dtype);

fsdpc_status fsdpc_flat_check_reduce(const fsdpc_reduce_args *args);
fsdpc_status fsdpc_flat_check_leaf(const char *operation, fsdpc_dtype dtype, size_t leaf);
fsdpc_status fsdpc_flat_check_power(double p);
fsdpc_status fsdpc_flat_check_norm_value(double p);
fsdpc_status fsdpc_flat_check_clamp(fsdpc_dtype dtype, double limit);
fsdpc_status fsdpc_flat_check_init(const fsdpc_init_args *args);
fsdpc_status fsdpc_flat_check_step(const fsdpc_step_args *args);

#endif
