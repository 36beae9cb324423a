/* Collects whole parameters and gradients from the ranks' local shards. */
#ifndef FSDPC_ENGINE_COLLECT_H
#define FSDPC_ENGINE_COLLECT_H

#include "engine/unit.h"

/* Collective: writes the whole parameter (`grads` false, original dtype) or its whole gradient
 * (grad_dtype, averaged) to `out` on every rank of the shard group. */
fsdpc_status fsdpc_unit_collect(fsdpc_unit *unit, int param, bool grads, void *out);
/* Collects any array that is sharded like a parameter; `mine` contains this rank's rows. */
fsdpc_status fsdpc_unit_collect_rows(const fsdpc_unit *unit, int param, fsdpc_dtype dtype,
                                     const void *mine, void *out);

#endif
