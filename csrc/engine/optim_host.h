/* CPU steps for a remote device's units whose masters and states are in host memory.
 *
 * Copies bring gradients and the clipping factor to the host, one chunk at a time, ahead of their
 * use.  The device then copies in the stepped masters from host memory.  If only masters or only
 * states of a unit are in host memory, the device steps it like any other.
 */
#ifndef FSDPC_ENGINE_OPTIM_HOST_H
#define FSDPC_ENGINE_OPTIM_HOST_H

#include "engine/optim_internal.h"

/* Call before ranks begin an epoch.  Creates optim->host if any unit is stepped this way; the
 * functions below need it. */
fsdpc_status fsdpc_optim_host_prepare(fsdpc_optim *optim);
/* Starts copying the first gradients. */
fsdpc_status fsdpc_optim_host_begin(fsdpc_optim *optim);
/* Brings gradients and the factor of a unit stepped on the host, from element `at` of a group's
 * shard; they are valid until the next call.  Lowers *end_io to their end. */
fsdpc_status fsdpc_optim_host_bring(const fsdpc_optim *optim, const unit_states *states, int group,
                                    size_t at, size_t *end_io, fsdpc_step_args *args);
/* Call after stepping the unit: the device copies it in, unless the step has done so. */
fsdpc_status fsdpc_optim_host_stepped(fsdpc_unit *unit);
/* Ends the copies.  Fails if any copy failed: the model is then partly stepped. */
fsdpc_status fsdpc_optim_host_end(fsdpc_optim *optim);
void fsdpc_optim_host_destroy(fsdpc_optim *optim);

#endif
