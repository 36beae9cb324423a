/* Declares the plugin table's function that creates a communicator for ranks on GPUs. */
#ifndef FSDPC_CUDA_COMM_CUDA_H
#define FSDPC_CUDA_COMM_CUDA_H

#include "cuda/control.h"

/* Collective over config->control: creates a communicator over NCCL. Returns FSDPC_ERR_UNSUPPORTED
 * on all ranks if NCCL is missing on one of them, or if ranks share a GPU and NCCL is older than
 * 2.30. */
fsdpc_status fsdpc_cuda_comm_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
