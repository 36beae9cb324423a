/* Steps by the CPU beside a remote device: of units whose masters and states lie in its memory.
 *
 * Copies bring gradients and the clipping factor there, a chunk at a time, ahead of their use.  The
 * device publishes stepped masters, which it reads where they lie.  If a unit has only one of
 * masters and states there, the device steps it like any other.
 */
#ifndef FSDPC_ENGINE_OPTIM_HOST_H
#define FSDPC_ENGINE_OPTIM_HOST_H

#include "engine/optim_internal.h"

/* Before ranks begin an epoch.  Makes optim->host if a unit is stepped so; the others need it. */
fsdpc_status fsdpc_optim_host_prepare(fsdpc_optim *optim);
/* The first gradients are on their way. */
fsdpc_status fsdpc_optim_host_begin(fsdpc_optim *optim);
/* For a unit stepped on the host, from element `at` of a group's shard on: gradients and the
 * factor, in host memory until the next call. *end_io is cut to their end. */
fsdpc_status fsdpc_optim_host_bring(const fsdpc_optim *optim, const unit_states *states, int group,
                                    size_t at, size_t *end_io, fsdpc_step_args *args);
/* The unit is stepped: the device publishes it, unless the step did. */
fsdpc_status fsdpc_optim_host_stepped(fsdpc_unit *unit);
/* Nothing is on its way any more.  An error if anything could not be brought: part is stepped. */
fsdpc_status fsdpc_optim_host_end(fsdpc_optim *optim);
void fsdpc_optim_host_destroy(fsdpc_optim *optim);

#endif
