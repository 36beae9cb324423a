/* The schedule: six entry points through which a frontend drives units through a step.
 *
 *     pre_forward  post_forward  pre_backward  post_backward  grad_target  backward_end
 *
 * Both frontends call these functions through call.h, and add the gradients themselves. Only the
 * schedule decides when a unit is gathered, resharded and reduced. The first step gathers on demand
 * and is recorded; later steps follow the execution order and gather `prefetch` units ahead, in
 * forward and in backward. A step that departs from the execution order falls back to gathering on
 * demand, stays correct, and is recorded again.
 *
 * Reductions are posted in post_backward, or in backward_end for units whose inputs needed no
 * gradient, and completed at later entry points. backward_end waits for all of them, unless
 * set_is_last_backward(false) announced another backward. If a unit does not synchronise, its
 * gradients stay in its reduce buffer, and the next backward adds to them.
 */
#ifndef FSDPC_ENGINE_SCHED_H
#define FSDPC_ENGINE_SCHED_H

#include "engine/loan.h"
#include "engine/root.h"

/* `grad`: gradients are recorded. The outermost call begins an epoch. On return the unit is FULL.
 */
fsdpc_status fsdpc_pre_forward(fsdpc_unit *unit, bool grad);
fsdpc_status fsdpc_post_forward(fsdpc_unit *unit);
/* Returns whether the end of its forward reshards the unit. It does not if more of its modules will
 * run, if other ranks may run them, or if the execution order has its backward next. */
bool fsdpc_reshards_after_forward(const fsdpc_unit *unit);

/* `generation` is the root's at the time of the forward (fsdpc_unit_generation). Idempotent. */
fsdpc_status fsdpc_pre_backward(fsdpc_unit *unit, uint64_t generation);
fsdpc_status fsdpc_post_backward(fsdpc_unit *unit);

/* Returns where the next contribution to a parameter's gradient must be written. The backward fails
 * if the caller does not write it there. */
fsdpc_status fsdpc_grad_target_of(fsdpc_unit *unit, int param, void **data_out,
                                  fsdpc_dtype *dtype_out, bool *accumulate_out);
/* In forward, lends memory for the gradient that a parameter will have in this dtype, to which
 * *data_out points from then on, or refuses (loan->lender is NULL). */
fsdpc_status fsdpc_grad_lend(fsdpc_unit *unit, int param, fsdpc_dtype dtype, fsdpc_loan *loan,
                             void **data_out);
/* Makes the lent memory's contents the first contribution in this backward, without a copy;
 * otherwise (*filled_out is false), or without `as_gradient`, they are in private memory now. */
fsdpc_status fsdpc_grad_settle(fsdpc_unit *unit, int param, fsdpc_loan *loan, bool as_gradient,
                               bool *filled_out);
/* Returns whether the unit's reduce buffer is open. The first gradient opens the buffer, which may
 * require waiting for peers. */
bool fsdpc_grad_is_open(const fsdpc_unit *unit);
/* Adds the contribution in `data`, which must be whole, dense, and in the unsharded parameter's
 * dtype. */
fsdpc_status fsdpc_grad_add(fsdpc_unit *unit, int param, const void *data);

/* Returns whether the unit's reduction is in flight, for example after set_is_last_backward(false).
 * grad_wait completes it; every rank must have posted it. */
bool fsdpc_grad_is_posted(const fsdpc_unit *unit);
fsdpc_status fsdpc_grad_wait(fsdpc_unit *unit);

/* Closes units that are still open and waits for every reduction. */
fsdpc_status fsdpc_backward_end(fsdpc_root *root);

/* The generation of the weights. A backward or recomputation passes the generation that its forward
 * saw, and fails if the weights have changed since then. FSDPC_GENERATION_PAST is older than
 * any. */
#define FSDPC_GENERATION_PAST UINT64_MAX
uint64_t fsdpc_unit_generation(const fsdpc_unit *unit);
fsdpc_status fsdpc_unit_check_generation(const fsdpc_unit *unit, uint64_t generation);

/* User control of units. */
/* Sets which units to gather ahead when this unit runs, in forward or in backward. `units` have
 * the same model; NULL: follow the execution order. */
fsdpc_status fsdpc_unit_set_ahead(fsdpc_unit *unit, bool backward, fsdpc_unit *const *units, int n);
/* Gathers the unit and holds it until fsdpc_reshard; fsdpc_unshard_wait makes it FULL. */
fsdpc_status fsdpc_unshard_begin(fsdpc_unit *unit);
fsdpc_status fsdpc_unshard_wait(fsdpc_unit *unit);
fsdpc_status fsdpc_reshard(fsdpc_unit *unit);
/* Fixes the weights until hold_end: no-grad forwards do not communicate, so each rank may run a
 * different number; steps and forwards with gradients fail. Both functions are collective, and
 * pairs of calls may be nested. */
fsdpc_status fsdpc_hold_begin(fsdpc_root *root);
fsdpc_status fsdpc_hold_end(fsdpc_root *root);
/* Call after an exception in user code: resets all units to SHARDED. In backward, this also drops
 * unreduced gradients, immediately on this rank and in the next epoch on every rank. */
void fsdpc_root_reset(fsdpc_root *root);

#endif
