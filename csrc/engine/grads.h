/* The gradient shards of a unit: whether they hold anything, and their pending factor.
 *
 * Reductions write them (reduce.h).  Before a gradient is read, micro-steps are folded together and
 * the pending factor of clipping is applied; optimizers apply it while they read.
 */
#ifndef FSDPC_ENGINE_GRADS_H
#define FSDPC_ENGINE_GRADS_H

#include "engine/unit.h"

/* May an optimizer or a norm use its gradient? */
bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param);

/* Do the shards hold anything? */
bool fsdpc_unit_has_grads(const fsdpc_unit *unit);

/* This rank's piece of a parameter's gradient, any pending scale applied; NULL when there is none.
 * `write`: whoever gets it may write it. */
fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, bool write, fsdpc_piece *piece_out,
                             void **out);

/* On every rank alike: drops gradients, also those that are not reduced yet.  Touches no memory. */
void fsdpc_unit_zero_grad(fsdpc_unit *unit);

/* Whether clipping left a factor that is not applied yet. */
bool fsdpc_unit_has_factor(const fsdpc_unit *unit);

/* Folds micro-steps together and applies the pending factor. */
fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit);

/* After zero_grad: the memory of its shards, which somebody still looks at, is the caller's to free,
 * and the unit has other memory, of zeros.  Not where it is lent, offloaded or about to be written,
 * nor where a graph of a step knows its address: then nothing happens. */
fsdpc_status fsdpc_unit_part_grads(fsdpc_unit *unit, void **groups_out, bool *parted_out);

/* ---- Gradients that a front door keeps for its users ---- */

/* Users may have changed gradients: the front door writes what they gave into the rows, between
 * take_begin and one take for each parameter; `given` false: it has none.  Before it writes rows it
 * says so: then those of others get the pending factor, which the new ones are not to have. */
fsdpc_status fsdpc_unit_take_begin(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_take_write(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_take_grad(fsdpc_unit *unit, int param, bool given);

/* After a backward: are there gradients to hand out?  Then one call for each parameter says whether
 * a contribution came since it was handed out last. */
fsdpc_status fsdpc_unit_give_begin(fsdpc_unit *unit, bool *any_out);
bool fsdpc_unit_give_grad(fsdpc_unit *unit, int param);

/* Are there gradients, all of which were handed out, and nothing is to be added? */
bool fsdpc_unit_gave_all(const fsdpc_unit *unit);

/* Do the shards hold nothing, and is nothing about to write or read them? */
bool fsdpc_unit_grads_rest(const fsdpc_unit *unit);

#endif
