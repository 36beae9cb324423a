/* Connects ranks on GPUs: the function in the plugin's table that creates a communicator. */
#ifndef FSDPC_CUDA_COMM_CUDA_H
#define FSDPC_CUDA_COMM_CUDA_H

#include "cuda/control.h"

/* Collective over config->control: creates a communicator over NCCL. Returns FSDPC_ERR_UNSUPPORTED
 * on all ranks if NCCL is missing on one of them, or is older than 2.30 and ranks share a GPU. */
fsdpc_status fsdpc_cuda_comm_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
