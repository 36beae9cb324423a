/* Waits for a GPU, including the waits that precede freeing memory.
 *
 * All host waits for a GPU use this file, so that a dead peer, a lost device or a capture causes an
 * error instead of a hang.
 */
#ifndef FSDPC_CUDA_WAIT_H
#define FSDPC_CUDA_WAIT_H

#include "cuda/queue.h"

/* Returns an error inside a capture, in which the host must not wait for the GPU. */
fsdpc_status fsdpc_cuda_may_wait(const fsdpc_device *device);

/* Waits until everything on the stream has run. Not allowed inside a capture. */
fsdpc_status fsdpc_cuda_wait_stream(fsdpc_cuda_stream *stream);

/* Waits until everything on the main stream has run; must be called before memory is freed. Errors
 * from submitted work are left for the next sync. Returns an error inside a capture or on a lost
 * device. In the latter case, other streams may still use the memory, so it stays allocated. */
fsdpc_status fsdpc_cuda_wait(fsdpc_device *device);

/* After a failed allocation, waits and then returns to CUDA the memory that was kept for reuse. The
 * caller then retries once. Returns an error inside a capture. */
fsdpc_status fsdpc_cuda_make_room(fsdpc_device *device);

#endif
