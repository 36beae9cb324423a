/* How ranks on GPUs join: the function in the plugin's table that creates a communicator. */
#ifndef FSDPC_CUDA_TRANSPORT_H
#define FSDPC_CUDA_TRANSPORT_H

#include "cuda/control.h"

/* Collective over config->control: a communicator over NCCL.  FSDPC_ERR_UNSUPPORTED on all ranks if
 * one of them has no NCCL, or one older than 2.30 while ranks share a GPU. */
fsdpc_status fsdpc_cuda_comm_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
