/* Collectives of the shm communicator. */
#ifndef FSDPC_COMM_SHM_COLL_H
#define FSDPC_COMM_SHM_COLL_H

#include "comm/shm_internal.h"

fsdpc_status fsdpc_shm_post(fsdpc_work *work);
fsdpc_status fsdpc_shm_test(fsdpc_work *work);
/* Carries on whatever inline operations can go on, of any group of this rank (peers may wait for
 * them while we wait for something else), then health. */
fsdpc_status fsdpc_shm_progress(fsdpc_shm_comm *self);

#endif
