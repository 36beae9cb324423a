/* Steps by the CPU beside a remote device: of units whose masters and states lie in its memory.
 *
 * Gradients and the factor that clipping left are brought there by copies, a chunk at a time, ahead
 * of their use; masters that were stepped are published by the device, which reads them where they
 * lie.  A unit that has only one of both there is stepped by the device, as others are.
 */
#ifndef FSDPC_ENGINE_OPTIM_HOST_H
#define FSDPC_ENGINE_OPTIM_HOST_H

#include "engine/optim_internal.h"

/* All but bring do nothing where no unit is stepped so. */
fsdpc_status fsdpc_optim_host_prepare(fsdpc_optim *optim); /* before ranks begin an epoch */
/* The first gradients are on their way. */
fsdpc_status fsdpc_optim_host_begin(fsdpc_optim *optim);
/* Of a unit that is stepped so, from element `at` of a group's shard on: gradients and the factor,
 * in host memory until it is called again.  *end_io is cut to where they end. */
fsdpc_status fsdpc_optim_host_bring(const fsdpc_optim *optim, const unit_states *states, int group,
                                    size_t at, size_t *end_io, fsdpc_step_args *args);
/* The unit is stepped: the device publishes it, unless the step did. */
fsdpc_status fsdpc_optim_host_stepped(fsdpc_unit *unit);
/* Nothing is on its way any more.  An error if anything could not be brought: part is stepped. */
fsdpc_status fsdpc_optim_host_end(fsdpc_optim *optim);
void fsdpc_optim_host_destroy(fsdpc_optim *optim);

#endif
