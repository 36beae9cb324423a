/* Creating a group of some ranks of a shm communicator. */
#ifndef FSDPC_COMM_COMM_SHM_H
#define FSDPC_COMM_COMM_SHM_H

#include "comm/comm.h"

/* Collective over the members only, unlike a split. They pass the same `members` (ranks of `comm`,
 * in their order in the part) and the same id, which no other part of `comm` has. */
fsdpc_status fsdpc_shm_part(fsdpc_comm *comm, const int *members, int n, uint64_t id,
                            fsdpc_comm **out);

#endif
