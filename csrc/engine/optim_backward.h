/* Steps inside backward: a unit is stepped when its reduction ends.
 *
 * Gradient shards then live from their reduction to the step. Units borrow them from a pool of two
 * blocks, each as large as the largest unit's shards, so a model needs two units' gradients instead
 * of all. Parameters have the bits of a step after backward.
 *
 * The engine refuses to clip or unscale gradients that are gone, and optimizers that read whole
 * matrices, units in deterministic mode, offloaded units, replicas of shards, and GPUs. A backward
 * that fails leaves some units stepped.
 */
#ifndef FSDPC_ENGINE_OPTIM_BACKWARD_H
#define FSDPC_ENGINE_OPTIM_BACKWARD_H

#include "engine/optim.h"

/* Sets the optimizer's options; called before the first step of each backward. */
typedef fsdpc_status (*fsdpc_optim_refresh_fn)(void *arg);

/* Frees the units' gradient shards, which must be empty and not in use, and steps inside backward
 * from then on. Shards in a frontend's memory are its own to free. */
fsdpc_status fsdpc_optim_enter_backward(fsdpc_optim *optim, fsdpc_optim_refresh_fn refresh,
                                        void *arg);

/* Returns whether an optimizer steps the unit inside backward. It then has no gradients after
 * backward. */
bool fsdpc_unit_steps_in_backward(const fsdpc_unit *unit);

/* Returns to steps after backward; units must not have gradients. */
fsdpc_status fsdpc_optim_leave_backward(fsdpc_optim *optim);

#endif
