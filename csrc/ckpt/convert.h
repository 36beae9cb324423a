/* Converts elements from one dtype to another, on the way to or from a file.
 *
 * These are plain loops over the conversions in base/dtype.h (round to nearest even, NaNs and
 * subnormals preserved), so a writing thread needs neither a device nor its team. Any pair of float
 * types works; integers and bools cannot be converted.
 */
#ifndef FSDPC_CKPT_CONVERT_H
#define FSDPC_CKPT_CONVERT_H

#include "base/dtype.h"

/* Returns FSDPC_ERR_DTYPE with both dtypes' names unless fsdpc_ckpt_convert supports the pair. */
fsdpc_status fsdpc_ckpt_convert_check(fsdpc_dtype to, fsdpc_dtype from);

/* `dst` and `src` do not overlap; the caller has checked the pair. */
void fsdpc_ckpt_convert(void *dst, fsdpc_dtype to, const void *src, fsdpc_dtype from, size_t numel);

#endif
