/* Waiting for a GPU, and freeing memory by waiting.
 *
 * All host waits for a GPU go through this file, so that a dead peer, a lost device or a capture
 * makes them an error instead of a hang.
 */
#ifndef FSDPC_CUDA_WAIT_H
#define FSDPC_CUDA_WAIT_H

#include "cuda/queue.h"

/* An error inside a capture, where the host must not wait for the GPU. */
fsdpc_status fsdpc_cuda_may_wait(const fsdpc_device *device);

/* Waits until everything on the stream has run.  Not allowed inside a capture. */
fsdpc_status fsdpc_cuda_wait_stream(fsdpc_cuda_stream *stream);

/* Waits until everything on the main stream has run, before memory is freed.  Errors of submitted
 * work remain for the next sync.  It is an error inside a capture and on a lost device, whose other
 * streams may still use the memory; that memory then stays allocated. */
fsdpc_status fsdpc_cuda_wait(fsdpc_device *device);

/* After an allocation has failed: waits, and returns the memory kept for reuse to CUDA.  The caller
 * then tries once more.  An error inside a capture. */
fsdpc_status fsdpc_cuda_make_room(fsdpc_device *device);

#endif
