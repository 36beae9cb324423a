/* Functions of the shm communicator's table that manage reduce buffers. */
#ifndef FSDPC_COMM_SHM_BUFFER_H
#define FSDPC_COMM_SHM_BUFFER_H

#include "comm/comm.h"

fsdpc_status fsdpc_shm_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out);
void fsdpc_shm_buffer_destroy(fsdpc_buffer *buffer);
fsdpc_status fsdpc_shm_buffer_idle(fsdpc_buffer *buffer);

#endif
