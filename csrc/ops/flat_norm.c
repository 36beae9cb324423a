/* Norms in host memory: the CPU's norm_join, norm_value and clip, shared by all tables. */
#include <math.h>
#include <stdbool.h>

#include "ops/flat_cpu.h"

#define RULE static inline
#include "ops/exact_sum_rules_body.h"
#include "ops/flat_norm_rules_body.h"
#undef RULE

fsdpc_status fsdpc_flat_norm_join_cpu(const fsdpc_norm_join_args *args, fsdpc_stream *stream)
{
    (void)stream;
    norm_join(args);
    return FSDPC_OK;
}

fsdpc_status fsdpc_flat_norm_value_cpu(const fsdpc_norm *norm, double p, double *out,
                                       fsdpc_stream *stream)
{
    (void)stream;
    FSDPC_TRY(fsdpc_flat_check_norm_value(p));
    *out = norm_value(norm, p);
    return FSDPC_OK;
}

fsdpc_status fsdpc_flat_clip_cpu(const fsdpc_clip_args *args, fsdpc_stream *stream)
{
    (void)stream;
    clip(args);
    return FSDPC_OK;
}
