/* A unit: modules whose parameters are gathered, freed and reduced together.
 *
 * A unit owns its layout and this rank's private memory: masters (original dtype) and gradient
 * shards (fp32, or fp64 for fp64 parameters).  Its full lives in the wire of its root, which is
 * found at the first forward; until then a unit has masters only.
 *
 * Its gradients go into a reduce buffer and from there into the gradient shard.  Over a mesh with
 * replicas the sums of the shard group go into a `partial` first, which is then summed over the
 * replicas; where the shard group is one rank alone, the buffer itself is.
 *
 * Who writes what: masters by optimizers, initialisation and loading (which mark the unit dirty),
 * or by the user through an exported piece (marked foreign: compared when an epoch begins).  Fulls
 * by publishing only.  Gradient shards by reductions; `grad_live` says whether they hold anything,
 * so zeroing gradients touches no memory, and `grads` of which parameters: one that no rank used
 * has no gradient, and one that any rank used has one on all.  `pending_scale` is a factor that
 * clipping left to be applied by whoever reads the gradients next.  On a remote device, where the
 * norm is not known to the host, clipping leaves another one in the device's memory, and says so
 * (`clipped`).
 */
#ifndef FSDPC_ENGINE_UNIT_H
#define FSDPC_ENGINE_UNIT_H

#include "engine/unit_internal.h"

fsdpc_status fsdpc_unit_create(const fsdpc_param_spec *specs, int n_specs,
                               const fsdpc_unit_options *options, fsdpc_unit **out);
void fsdpc_unit_destroy(fsdpc_unit *unit); /* not while its root lives */

/* This rank's piece of a parameter's master; marks nothing. */
void *fsdpc_unit_master(const fsdpc_unit *unit, int param, fsdpc_piece *piece_out);

/* Where its rows of the gradient lie, whatever they hold. */
void *fsdpc_unit_grad_rows(const fsdpc_unit *unit, int param, fsdpc_piece *piece_out);

/* The whole parameter as modules read it: address fixed once the root exists, NULL before. */
void *fsdpc_unit_full(const fsdpc_unit *unit, int param);

/* Writes the own rows of `value` (the full tensor, any float dtype) into the master. */
fsdpc_status fsdpc_unit_write(fsdpc_unit *unit, int param, const void *value, fsdpc_dtype dtype);

/* Initialises the own rows as the whole tensor would be. */
fsdpc_status fsdpc_unit_init_param(fsdpc_unit *unit, int param, int kind, double a, double b,
                                   uint64_t seed, uint64_t stream);

/* An error that names parameter and unit unless the full may be read now. */
fsdpc_status fsdpc_unit_check_full(fsdpc_unit *unit, int param);

#endif
