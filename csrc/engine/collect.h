/* Collects whole parameters and gradients from the rows of all ranks. */
#ifndef FSDPC_ENGINE_COLLECT_H
#define FSDPC_ENGINE_COLLECT_H

#include "engine/unit.h"

/* Collective: every rank of the shard group gets the whole parameter (`grads` false, original
 * dtype) or its whole gradient (grad_dtype, averaged) in `out`. */
fsdpc_status fsdpc_unit_collect(fsdpc_unit *unit, int param, bool grads, void *out);
/* The same for any array that is cut like a parameter: `mine` are this rank's rows. */
fsdpc_status fsdpc_unit_collect_rows(const fsdpc_unit *unit, int param, fsdpc_dtype dtype,
                                     const void *mine, void *out);

#endif
