/* Elements from one dtype to another, on their way to or from a file.
 *
 * Plain loops over base/dtype.h's conversions (round to nearest even, NaN stays NaN, subnormals
 * kept), so that a writing thread needs neither a device nor its team.  Between floats any pair
 * works; integers and bools go unchanged only.
 */
#ifndef FSDPC_CKPT_CONVERT_H
#define FSDPC_CKPT_CONVERT_H

#include "base/dtype.h"

/* FSDPC_ERR_DTYPE, naming both, unless the pair is one that fsdpc_ckpt_convert can do. */
fsdpc_status fsdpc_ckpt_convert_check(fsdpc_dtype to, fsdpc_dtype from);

/* `dst` and `src` do not overlap; the pair was checked. */
void fsdpc_ckpt_convert(void *dst, fsdpc_dtype to, const void *src, fsdpc_dtype from, size_t numel);

#endif
