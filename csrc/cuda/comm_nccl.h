/* GPUs over NCCL: a communicator whose bytes go from device to device, and whose words go over
 * another communicator, the control, that the ranks have already.
 *
 * The control carries small things on the host.  They are epochs and their notes, agreement on
 * posts, the identities that NCCL begins with, values in host memory, and news of dead and late
 * ranks.  nccl_internal.h lists the files.
 */
#ifndef FSDPC_CUDA_COMM_NCCL_H
#define FSDPC_CUDA_COMM_NCCL_H

#include "cuda/control.h"

/* Collective over config->control, which may be any communicator of the same ranks over host
 * memory.  It is taken over on success and stays the caller's otherwise.  config->comm.device is a
 * GPU, which ranks may share from NCCL 2.30 on (transport.c).  FSDPC_ERR_UNSUPPORTED on all ranks
 * if one has no NCCL. */
fsdpc_status fsdpc_comm_nccl_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
