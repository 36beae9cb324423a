/* Wires and epochs of the shm communicator: functions for its table. */
#ifndef FSDPC_COMM_SHM_WIRE_H
#define FSDPC_COMM_SHM_WIRE_H

#include "comm/comm.h"

fsdpc_status fsdpc_shm_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                   fsdpc_wire **out);
void fsdpc_shm_wire_destroy(fsdpc_wire *wire);
fsdpc_status fsdpc_shm_epoch_arrive(fsdpc_wire *wire, const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_shm_epoch_test(fsdpc_wire *wire, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_shm_epoch_publish(fsdpc_wire *wire);
fsdpc_status fsdpc_shm_epoch_published(fsdpc_wire *wire);

#endif
