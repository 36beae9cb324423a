/* Outer steps of replicas that train apart (DiLoCo: Douillard et al., 2023).
 *
 * From fsdpc_optim_outer_begin on, replicas of a mesh do not share gradients: each shard group
 * trains by itself. An optimizer of kind OUTER keeps an anchor for each of its parameters, equal on
 * all replicas and sharded like masters. An outer step of a hyper-parameter group takes the mean
 * over replicas of (anchor - master) as the gradient of SGD, steps the anchors, and makes the
 * masters equal to them. Sums and steps are in the master's dtype, fp32 or fp64.
 *
 * optim.h has the functions that begin and choose a step. Steps are the optimizer's own; this file
 * has what differs: which parameters are stepped, their gradient, and the kernel call. Anchors and
 * momentum are states of the optimizer.
 */
#ifndef FSDPC_ENGINE_OPTIM_OUTER_H
#define FSDPC_ENGINE_OPTIM_OUTER_H

#include "engine/optim_internal.h"

/* Returns whether a parameter is part of the chosen outer step. */
bool fsdpc_optim_outer_steps(const fsdpc_optim *optim, const param_states *own);

/* Averages a unit's differences over its replicas. Collective over them. */
fsdpc_status fsdpc_optim_outer_meet(const fsdpc_optim *optim, const unit_states *states);

/* Returns the mean differences of the unit that met last, from an element of the shard on. */
void *fsdpc_optim_outer_mean(const fsdpc_optim *optim, const fsdpc_unit_group *group, size_t at);

/* Steps anchors, and copies them to masters. `args->states` are the anchor and the momentum. */
fsdpc_status fsdpc_optim_outer_run(const fsdpc_optim *optim, int group, fsdpc_step_args *args);

#endif
