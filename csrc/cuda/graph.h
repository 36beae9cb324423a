/* Graphs of GPU work: the entries in csrc/device/device.h's table, and the checks that other
 * entries need during a capture.
 *
 * The same thread begins and ends a capture. Other threads may use other streams meanwhile.
 */
#ifndef FSDPC_CUDA_GRAPH_H
#define FSDPC_CUDA_GRAPH_H

#include <cuda_runtime_api.h>

#include "device/device.h"

fsdpc_status fsdpc_cuda_capture_begin(fsdpc_device *device);
fsdpc_status fsdpc_cuda_capture_end(fsdpc_device *device, fsdpc_graph **out);
fsdpc_status fsdpc_cuda_graph_launch(fsdpc_graph *graph);
void fsdpc_cuda_graph_destroy(fsdpc_graph *graph);

/* Must be called before NCCL's communicators are aborted, because the abort does not return while a
 * graph or a capture holds their operations. From then on, the device's graphs may only be
 * destroyed; any other use is an error. */
void fsdpc_cuda_graphs_give_up(fsdpc_device *device);

/* Returns an error inside a capture, in which another library's stream must not wait for the main
 * stream. */
fsdpc_status fsdpc_cuda_capture_check_other(const fsdpc_device *device);

/* Performs a copy inside a capture; `stream` is NULL if the caller asked to wait for the copy. */
fsdpc_status fsdpc_cuda_capture_copy(fsdpc_device *device, void *to, const void *from, size_t bytes,
                                     cudaStream_t stream);

#endif
