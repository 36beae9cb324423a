/* A GPU device: csrc/device/device.h's table, implemented with CUDA's runtime.
 *
 * Every async stream is a CUDA stream that does not synchronise with the legacy default stream.
 * All other streams are aliases of the device's main stream; the pool hands out memory in that
 * stream's order (pool.h). If the stream is NULL, copy and fill run on the main stream and wait for
 * completion.
 *
 * stream_submit calls the function immediately, on the calling thread, and the function enqueues
 * its work.
 *
 * Threads: each thread that uses the device selects it first (fsdpc_device_cuda_select); the
 * backward pass may run on a different thread from the forward pass.
 */
#ifndef FSDPC_CUDA_DEVICE_CUDA_H
#define FSDPC_CUDA_DEVICE_CUDA_H

#include "device/device.h"

/* `mem` is borrowed; it counts this device's memory. */
fsdpc_status fsdpc_device_cuda_create(fsdpc_mem *mem, int ordinal, fsdpc_device **out);
fsdpc_status fsdpc_device_cuda_select(const fsdpc_device *device);

/* Marks a device whose streams are blocked for ever. Afterwards, waits for the device are brief,
 * and unfinished work is an error. Memory that CUDA cannot free without waiting stays allocated
 * until the process ends. */
void fsdpc_device_cuda_lose(fsdpc_device *device);

/* Writes the device's PCI address, such as "0000:1b:00.0", which is the same for all processes that
 * share the GPU. */
fsdpc_status fsdpc_device_cuda_address(const fsdpc_device *device, char *text, size_t bytes);

/* Determines whether memory belongs to a GPU rather than to the host (pinned or not). */
fsdpc_status fsdpc_cuda_is_device_memory(const void *pointer, bool *out);

#endif
