/* Exact gradient norms, and clipping by the global norm.
 *
 * A norm is an exact sum (engine/norm.h) over leaves that are never split, so its bits do not
 * depend on world size, layout or order. Tied parameters occur once in a layout and count once; a
 * replicated shard counts once, because only shard groups are summed.
 *
 * The norm includes any scale that is pending on the gradients. If p is 1, 2 or INFINITY, a power
 * of two below 1 (from a loss scaler) is applied to the norm and stays pending. Any other scale is
 * applied to the gradients first.
 */
#ifndef FSDPC_ENGINE_CLIP_H
#define FSDPC_ENGINE_CLIP_H

#include "engine/norm.h"
#include "engine/unit.h"

/* Collective, with one operation for each shard group among the units. Adds the p-norm of all
 * gradients to `total_io`, and writes each parameter's norm to `params_out`; both are in device
 * memory. `params_out` may be NULL. `params_out` has one value per parameter, in unit order; a
 * parameter without a gradient gets 0. */
fsdpc_status fsdpc_clip_norms(fsdpc_unit *const *units, int n_units, double p, fsdpc_norm *total_io,
                              fsdpc_norm *params_out);

/* Makes FSDPC_CLIP_FACTOR (at most 1) pending on the gradients and returns it. */
double fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm);

/* Like fsdpc_clip_scale, but for a norm in a remote device's memory (fsdpc_norm_put), and without
 * waiting. */
fsdpc_status fsdpc_clip_scale_remote(fsdpc_unit *const *units, int n_units, const double *norm,
                                     double max_norm, fsdpc_stream *stream);

/* Multiplies the pending scale by `factor` (to undo a loss scale). */
void fsdpc_clip_multiply(fsdpc_unit *const *units, int n_units, double factor);

#endif
