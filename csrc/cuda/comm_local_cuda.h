/* Several ranks on one GPU, or on GPUs of one host without NCCL: for correctness, not for speed.
 *
 * Where the driver lets processes hand over memory, own slices of the wire and reduce buffers lie
 * in memory of the GPU that all ranks map: gathers copy from it, and each rank sums its slices
 * there. Elsewhere, or if FSDPC_STAGED says so on any rank, all ranks stage: the control (comm_shm,
 * or comm_self for one rank) has a wire and buffers as large as ours, every operation is copied out
 * to it, carried there, and copied back.  A host then holds one copy of the wire more than each
 * rank has on its GPU, and every rank one of each of its buffers.  comm->about says which it is.
 *
 * Either way sums have exactly the bits of shared memory: the pairwise tree over ranks.
 */
#ifndef FSDPC_CUDA_COMM_LOCAL_CUDA_H
#define FSDPC_CUDA_COMM_LOCAL_CUDA_H

#include "comm/comm.h"

/* config->control is taken over on success and stays the caller's otherwise.  config->device is a
 * GPU, which ranks may share. */
fsdpc_status fsdpc_comm_local_cuda_create(const fsdpc_comm_config *config, fsdpc_comm **out);

#endif
