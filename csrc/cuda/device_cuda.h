/* A GPU as a device: the table of csrc/device/device.h over CUDA's runtime.
 *
 * Every async stream is a CUDA stream, without order to the legacy default stream.  All others are
 * the device's main stream by another name; the pool hands memory out in its order (pool.h).
 * With no stream at all (NULL), copy and fill run on the main stream and are waited for.
 *
 * stream_submit calls the function at once, in the caller, and the function enqueues its work.
 *
 * Threads: each thread that uses the device selects it first (fsdpc_device_cuda_select); a backward
 * pass may run in another thread than the forward.
 */
#ifndef FSDPC_CUDA_DEVICE_CUDA_H
#define FSDPC_CUDA_DEVICE_CUDA_H

#include "device/device.h"

/* `mem` is borrowed; it counts this device's memory. */
fsdpc_status fsdpc_device_cuda_create(fsdpc_mem *mem, int ordinal, fsdpc_device **out);
fsdpc_status fsdpc_device_cuda_select(const fsdpc_device *device);

/* Its streams are blocked for ever.  From now on, waits for it are brief, and work that has not run
 * by then is an error.  Memory whose free would make CUDA wait is not freed until the process
 * ends. */
void fsdpc_device_cuda_lose(fsdpc_device *device);

/* Its PCI address, "0000:1b:00.0": the same for all processes that share the GPU. */
fsdpc_status fsdpc_device_cuda_address(const fsdpc_device *device, char *text, size_t bytes);

/* Whether memory belongs to a GPU and not to the host (pinned or not). */
fsdpc_status fsdpc_cuda_is_device_memory(const void *pointer, bool *out);

#endif
