/* How ranks on GPUs join: what the plugin's table calls to create a communicator. */
#ifndef FSDPC_CUDA_TRANSPORT_H
#define FSDPC_CUDA_TRANSPORT_H

#include "cuda/control.h"

/* Collective over config->control: a communicator over NCCL.  FSDPC_ERR_UNSUPPORTED on all ranks
 * if one of them finds no NCCL, or one older than 2.30 where ranks share a GPU. */
fsdpc_status fsdpc_cuda_comm_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
