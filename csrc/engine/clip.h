/* The global gradient norm, exactly, and clipping by it.
 *
 * The sum of squares is taken in fp64 over leaves that no cut splits and added up exactly, so its
 * bits do not depend on world size, layout or order (ops/exact_sum.h).  Tied parameters stand once
 * in a layout and are counted once; a replicated shard is counted once, as only shard groups are
 * summed.
 */
#ifndef FSDPC_ENGINE_CLIP_H
#define FSDPC_ENGINE_CLIP_H

#include "engine/unit.h"
#include "ops/exact_sum.h"

/* Collective over the units' shard groups: adds the squares of all gradients to the sum. */
fsdpc_status fsdpc_clip_sum(fsdpc_unit *const *units, int n_units, fsdpc_exact_sum *sum_io);

/* The same, as the 2-norm; 0 without any gradient. */
fsdpc_status fsdpc_clip_norm(fsdpc_unit *const *units, int n_units, double *norm_out);

/* Leaves min(1, max_norm / (norm + 1e-6)) to be applied by whoever reads the gradients next. */
void fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm);

#endif
