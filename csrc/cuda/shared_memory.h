/* Memory of a GPU that the ranks of a group share: each has a part, and reads those of all others.
 *
 * A rank's part is physical memory of the driver's, handed to its peers as a file descriptor over
 * the sockets that they have already, and mapped by them to read.  Memory goes when the last rank
 * has let go of it, so ranks destroy theirs when they like.
 *
 * Order between processes is not made here: whoever wrote waits for its streams, tells the others
 * by other means, and writes again only when they have said that they are done.
 *
 * Making and destroying may stop the device, as with windows.
 */
#ifndef FSDPC_CUDA_SHARED_MEMORY_H
#define FSDPC_CUDA_SHARED_MEMORY_H

#include "comm/comm.h"

typedef struct fsdpc_cuda_shared fsdpc_cuda_shared;

/* Collective over `control`: all have it or none.  `bytes` of `device` on every rank, zeroed,
 * counted as asked for (the driver gives whole granules).  FSDPC_ERR_UNSUPPORTED, with the reason,
 * where a driver or what stands between the processes does not let them share, FSDPC_ERR_NOMEM
 * where there is too little, FSDPC_ERR_INTERNAL where the driver failed otherwise; none of them
 * closes the control. */
fsdpc_status fsdpc_cuda_shared_create(fsdpc_comm *control, fsdpc_device *device,
                                      fsdpc_mem_kind kind, size_t bytes, const char *what,
                                      fsdpc_cuda_shared **out);
/* Waits for the main stream; no other may use it any more.  Where it cannot be waited for, all
 * stays mapped for good, and a line in the log says so.  NULL is fine. */
void fsdpc_cuda_shared_destroy(fsdpc_cuda_shared *shared);

unsigned char *fsdpc_cuda_shared_own(const fsdpc_cuda_shared *shared);
/* Where this rank reads each rank's part, its own too, by rank in the group. */
const unsigned char *const *fsdpc_cuda_shared_parts(const fsdpc_cuda_shared *shared);

#endif
