/* The gradient shards of a unit: whether they hold anything, what is pending on them.
 *
 * Reductions write them (reduce.h).  Whoever reads them has micro-steps brought together and the
 * factor that clipping left applied first, or applies it while reading.
 */
#ifndef FSDPC_ENGINE_GRADS_H
#define FSDPC_ENGINE_GRADS_H

#include "engine/unit.h"

/* May an optimizer or a norm use its gradient? */
bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param);

/* Do the shards hold anything? */
bool fsdpc_unit_has_grads(const fsdpc_unit *unit);

/* This rank's piece of a parameter's gradient, any pending scale applied; NULL when there is none.
 */
fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, fsdpc_piece *piece_out, void **out);

/* On every rank alike: drops gradients, also those that are not reduced yet.  Touches no memory. */
void fsdpc_unit_zero_grad(fsdpc_unit *unit);

/* The factor that is pending, as far as the host knows it. */
double fsdpc_unit_pending_scale(const fsdpc_unit *unit);

/* Makes the gradient shards what they are said to be: micro-steps brought together, multiplied by
 * what clipping left to be applied. */
fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit);

/* ---- Gradients that a front door keeps for its users ---- */

/* Users may have changed gradients: the front door writes what they gave into the rows, between
 * take_begin and one take for each parameter; `given` false: it has none. */
fsdpc_status fsdpc_unit_take_begin(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_take_grad(fsdpc_unit *unit, int param, bool given);

/* After a backward: are there gradients to hand out?  Then one call for each parameter says whether
 * a contribution came since it was handed out last. */
fsdpc_status fsdpc_unit_give_begin(fsdpc_unit *unit, bool *any_out);
bool fsdpc_unit_give_grad(fsdpc_unit *unit, int param);

#endif
