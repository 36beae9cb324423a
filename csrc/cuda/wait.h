/* Waiting for a GPU, and memory that a wait brings.
 *
 * All host waits for a GPU go through this file, so that a dead peer, a lost device or a capture
 * makes them an error instead of a hang.
 */
#ifndef FSDPC_CUDA_WAIT_H
#define FSDPC_CUDA_WAIT_H

#include "cuda/queue.h"

/* An error inside a capture: the host is about to wait for the GPU. */
fsdpc_status fsdpc_cuda_may_wait(const fsdpc_device *device);

/* Until everything on the stream has run.  Not inside a capture. */
fsdpc_status fsdpc_cuda_wait_stream(fsdpc_cuda_stream *stream);

/* Until everything on the main stream has run, before memory is given back.  Errors of submitted
 * work stay for the next sync.  An error inside a capture, and of a lost device: its other streams
 * may still use the memory, which then stays allocated. */
fsdpc_status fsdpc_cuda_wait(fsdpc_device *device);

/* After an allocation has failed: waits, and gives CUDA the memory that was kept for reuse.  Then
 * try once more.  An error inside a capture. */
fsdpc_status fsdpc_cuda_make_room(fsdpc_device *device);

#endif
