/* Tracks a unit's gradient shards: whether they have contents, and their pending factor.
 *
 * Reductions write them (reduce.h). Reading a gradient first folds its micro-steps together and
 * applies the factor left by clipping; optimizers instead apply that factor as they read.
 */
#ifndef FSDPC_ENGINE_GRADS_H
#define FSDPC_ENGINE_GRADS_H

#include "engine/unit.h"

/* Returns whether an optimizer or a norm may use the parameter's gradient. */
bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param);

/* Returns whether the shards have contents. */
bool fsdpc_unit_has_grads(const fsdpc_unit *unit);

/* Fails for a unit that is stepped inside backward, whose gradients cannot be clipped. */
fsdpc_status fsdpc_unit_refuse_stepped(const fsdpc_unit *unit);

/* Gets this rank's shard of a parameter's gradient with any pending scale applied, or NULL if there
 * is none. `write`: the caller may write to it. */
fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, bool write, fsdpc_local_shard *local_out,
                             void **out);

/* Drops gradients, including unreduced ones; all ranks must do the same. Touches no memory. */
void fsdpc_unit_zero_grad(fsdpc_unit *unit);

/* Returns whether clipping left a factor that has not been applied yet. */
bool fsdpc_unit_has_factor(const fsdpc_unit *unit);

/* Folds micro-steps together and applies the pending factor. */
fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit);

/* Call after zero_grad if other code still reads the shards. The caller takes ownership of their
 * memory, and the unit gets new, zeroed memory. Does nothing if the memory belongs to a frontend,
 * is offloaded, is about to be written, or is used by a captured step. */
fsdpc_status fsdpc_unit_part_grads(fsdpc_unit *unit, void **groups_out, bool *parted_out);

/* ---- Gradients that a frontend keeps for its users ---- */

/* Adopts gradients that users have changed. The frontend writes users' values into the rows,
 * between take_begin and one take_grad per parameter. `given` false: it has no value. It announces
 * each write in advance, so that the pending factor is applied to the existing rows and not to the
 * new values. */
fsdpc_status fsdpc_unit_take_begin(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_take_write(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_take_grad(fsdpc_unit *unit, int param, bool given);

/* Returns whether a backward has left gradients to hand out. If so, give_grad returns, for each
 * parameter, whether its gradient has received a contribution since it was last handed out. */
fsdpc_status fsdpc_unit_give_begin(fsdpc_unit *unit, bool *any_out);
bool fsdpc_unit_give_grad(fsdpc_unit *unit, int param);

/* Returns whether gradients exist, all of them have been handed out, and none will be added. */
bool fsdpc_unit_gave_all(const fsdpc_unit *unit);

/* Returns whether the shards are empty and nothing is about to read or write them. */
bool fsdpc_unit_grads_rest(const fsdpc_unit *unit);

#endif
