/* Several ranks on one GPU, or on GPUs of one host without NCCL: for correctness, not for speed.
 *
 * The control (comm_shm, or comm_self for one rank) has a wire and buffers as large as ours.  Every
 * operation is copied out to it, carried there, and copied back.  A host then holds one copy of the
 * wire more than each rank has on its GPU, and every rank one of each of its buffers.
 *
 * Sums have exactly the bits of shared memory: the pairwise tree over ranks.
 */
#ifndef FSDPC_CUDA_COMM_LOCAL_CUDA_H
#define FSDPC_CUDA_COMM_LOCAL_CUDA_H

#include "cuda/control.h"

/* config->control is taken over on success and stays the caller's otherwise.  config->comm.device is a
 * GPU, which ranks may share. */
fsdpc_status fsdpc_comm_local_cuda_create(const fsdpc_control_config *config, fsdpc_comm **out);

#endif
