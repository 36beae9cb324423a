/* Which of the plugin's transports ranks use: a create function of the plugin's table. */
#ifndef FSDPC_CUDA_TRANSPORT_H
#define FSDPC_CUDA_TRANSPORT_H

#include "cuda/control.h"

/* Collective over config->control.  "nccl", "local_cuda", or "auto": nccl if every rank has a GPU
 * of its own, else local_cuda.  FSDPC_ERR_MISMATCH on all ranks if they request different ones.
 * FSDPC_ERR_VALUE if there is no such transport.  FSDPC_ERR_UNSUPPORTED if it is an NCCL older than
 * 2.30 and ranks share a GPU. */
fsdpc_status fsdpc_cuda_comm_create(const char *transport, const fsdpc_control_config *config,
                                    fsdpc_comm **out);

#endif
