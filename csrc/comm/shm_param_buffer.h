/* Functions of the shm communicator's table that manage parameter buffers and epochs. */
#ifndef FSDPC_COMM_SHM_PARAM_BUFFER_H
#define FSDPC_COMM_SHM_PARAM_BUFFER_H

#include "comm/comm.h"

fsdpc_status fsdpc_shm_param_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                           fsdpc_param_buffer **out);
void fsdpc_shm_param_buffer_destroy(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_shm_epoch_arrive(fsdpc_param_buffer *param_buffer, const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_shm_epoch_test(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_shm_epoch_copied_in(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_shm_epoch_copy_in_test(fsdpc_param_buffer *param_buffer);

#endif
