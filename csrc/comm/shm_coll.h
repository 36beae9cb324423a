/* Collectives of the shm communicator. */
#ifndef FSDPC_COMM_SHM_COLL_H
#define FSDPC_COMM_SHM_COLL_H

#include "comm/shm_internal.h"

fsdpc_status fsdpc_shm_post(fsdpc_work *work);
fsdpc_status fsdpc_shm_test(fsdpc_work *work);
/* Advances the inline operations in flight in all of this rank's groups, because peers may be
 * waiting for them, and then checks for failures. */
fsdpc_status fsdpc_shm_progress(fsdpc_shm_comm *self);

#endif
