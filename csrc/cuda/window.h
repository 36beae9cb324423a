/* Windows: fixed address ranges over shared memory.
 *
 * Only a few units of a model are unsharded at a time, but kernels, graphs and tensors need each
 * unit at a fixed address for the whole run. Each unit therefore has a window, and several windows
 * are mapped onto one slot of physical memory. A slot also has a fixed address, which is passed to
 * NCCL, because NCCL registers memory by its first mapping.
 *
 * Order. Data written through one address is visible through another address to work that is
 * ordered after the write by an event or a stream.
 *
 * Creating, mapping and destroying windows may stop the device. They should be called before the
 * first step, or when the caller has made the device idle. These functions fill slots of the table
 * in csrc/device/device.h.
 */
#ifndef FSDPC_CUDA_WINDOW_H
#define FSDPC_CUDA_WINDOW_H

#include "device/device.h"

typedef struct fsdpc_cuda_windows fsdpc_cuda_windows; /* per device: driver features */

/* Returns FSDPC_ERR_UNSUPPORTED if the driver or the GPU does not provide, or does not permit,
 * virtual memory that NCCL can register like its own. */
fsdpc_status fsdpc_cuda_windows_create(fsdpc_device *device, fsdpc_cuda_windows **out);
void fsdpc_cuda_windows_destroy(fsdpc_cuda_windows *windows); /* after all of its windows */
size_t fsdpc_cuda_windows_granule(const fsdpc_cuda_windows *windows);

fsdpc_status fsdpc_cuda_window_create(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes,
                                      const fsdpc_window *like, fsdpc_window **out);
fsdpc_status fsdpc_cuda_window_part(fsdpc_window *window);
fsdpc_status fsdpc_cuda_window_destroy(fsdpc_window *window);

#endif
