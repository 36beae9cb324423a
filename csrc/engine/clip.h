/* Norms of gradients, exactly, and clipping by the global one.
 *
 * A norm is taken over leaves that no cut splits and added up exactly (engine/norm.h), so its bits
 * do not depend on world size, layout or order.  Tied parameters stand once in a layout and are
 * counted once; a replicated shard is counted once, as only shard groups are summed.
 *
 * A scale that is pending on the gradients counts as applied.  A power of two below 1 (a loss
 * scaler's) is applied to the norm, if p is 1, 2 or INFINITY, and stays pending.  Any other is
 * applied to the gradients first.
 */
#ifndef FSDPC_ENGINE_CLIP_H
#define FSDPC_ENGINE_CLIP_H

#include "engine/norm.h"
#include "engine/unit.h"

/* Collective, one operation for every shard group among the units.  Adds the p-norm of all
 * gradients to `total_io`, and writes that of each parameter to `params_out`, all in the device's
 * memory. `params_out` may be NULL; it has one value per parameter of the units, in their order, 0
 * for one without a gradient. */
fsdpc_status fsdpc_clip_norms(fsdpc_unit *const *units, int n_units, double p, fsdpc_norm *total_io,
                              fsdpc_norm *params_out);

/* Leaves FSDPC_CLIP_FACTOR (at most 1) pending on the gradients; returns it. */
double fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm);

/* The same on a remote device, by a norm in its memory (fsdpc_norm_put): nothing waits. */
fsdpc_status fsdpc_clip_scale_remote(fsdpc_unit *const *units, int n_units, const double *norm,
                                     double max_norm, fsdpc_stream *stream);

/* Multiplies the pending scale by `factor` (loss unscaling). */
void fsdpc_clip_multiply(fsdpc_unit *const *units, int n_units, double factor);

#endif
