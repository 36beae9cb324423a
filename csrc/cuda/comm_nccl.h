/* A communicator for GPUs: it moves data between devices with NCCL, and metadata over the control,
 * another communicator of the same ranks.
 *
 * The control carries small messages between hosts' CPUs: epochs and their notes, agreement on
 * posts, NCCL's unique ids, values in host memory, and reports of dead and late ranks.
 * nccl_internal.h lists the files.
 */
#ifndef FSDPC_CUDA_COMM_NCCL_H
#define FSDPC_CUDA_COMM_NCCL_H

#include "cuda/control.h"

/* Collective over config->control, which may be any communicator of the same ranks over host
 * memory. On success, the new communicator owns the control; otherwise, the caller keeps it.
 * config->comm.device is a GPU, which ranks may share if NCCL is 2.30 or newer (comm_cuda.c).
 * Returns FSDPC_ERR_UNSUPPORTED on all ranks if any rank has no NCCL. */
fsdpc_status fsdpc_comm_nccl_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
