/* Windows: ranges of addresses that stay what they are, over memory that they share.
 *
 * Few units of a model are full at a time, but kernels, graphs and tensors want each at a fixed
 * address for the whole run.  So each has a window, and several windows are mapped onto one slot of
 * physical memory.  A slot has a fixed address too, which NCCL is given, because it registers
 * memory by its first mapping.
 *
 * Order.  Data written by one address is seen by another once the work that wrote it has ended, for
 * work that an event or its stream puts behind it.
 *
 * Creating, mapping and destroying may stop the device and belong where nothing runs: before the
 * first step, or at a point that the caller made idle.  The table's slots of csrc/device/device.h
 * are these functions.
 */
#ifndef FSDPC_CUDA_WINDOW_H
#define FSDPC_CUDA_WINDOW_H

#include "device/device.h"

typedef struct fsdpc_cuda_windows fsdpc_cuda_windows; /* a device's: what the driver offers */

/* FSDPC_ERR_UNSUPPORTED where the driver or the GPU has no virtual memory that NCCL could register,
 * as NCCL's is, or does not let us have it. */
fsdpc_status fsdpc_cuda_windows_create(fsdpc_device *device, fsdpc_cuda_windows **out);
void fsdpc_cuda_windows_destroy(fsdpc_cuda_windows *windows); /* after all of its windows */
size_t fsdpc_cuda_windows_granule(const fsdpc_cuda_windows *windows);

fsdpc_status fsdpc_cuda_window_create(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes,
                                      const fsdpc_window *like, fsdpc_window **out);
fsdpc_status fsdpc_cuda_window_part(fsdpc_window *window);
fsdpc_status fsdpc_cuda_window_destroy(fsdpc_window *window);

#endif
