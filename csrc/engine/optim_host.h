/* Steps units of a remote device on the CPU if their masters and states are in host memory.
 *
 * Gradients and the clipping factor are copied to the host chunk by chunk, ahead of use. After the
 * CPU step, the device copies in the masters from host memory. If a unit has only its masters or
 * only its states in host memory, it is stepped on the device like any other.
 */
#ifndef FSDPC_ENGINE_OPTIM_HOST_H
#define FSDPC_ENGINE_OPTIM_HOST_H

#include "engine/optim_internal.h"

/* Call before ranks begin an epoch. Creates optim->host if any unit is stepped on the CPU; the
 * functions below require it. */
fsdpc_status fsdpc_optim_host_prepare(fsdpc_optim *optim);
/* Starts copying the first gradients. */
fsdpc_status fsdpc_optim_host_begin(fsdpc_optim *optim);
/* Makes a CPU-stepped unit's gradients and factor available from element `at` of a group's shard;
 * they are valid until the next call. Lowers *end_io to their end. */
fsdpc_status fsdpc_optim_host_bring(const fsdpc_optim *optim, const unit_states *states, int group,
                                    size_t at, size_t *end_io, fsdpc_step_args *args);
/* Call after stepping a unit: the device then copies it in, unless the step already has. */
fsdpc_status fsdpc_optim_host_stepped(fsdpc_unit *unit);
/* Ends the copies. Fails if any copy has failed, which leaves the model partly stepped. */
fsdpc_status fsdpc_optim_host_end(fsdpc_optim *optim);
void fsdpc_optim_host_destroy(fsdpc_optim *optim);

#endif
