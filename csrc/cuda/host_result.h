/* Returns kernel results in ordinary host memory.
 *
 * A kernel cannot write to ordinary memory, so the result is staged in device memory and copied
 * back after waiting for the stream. begin() returns the address for the kernel, initialised with
 * the caller's value; end() copies the result back. For device and pinned memory, both functions do
 * nothing.
 */
#ifndef FSDPC_CUDA_HOST_RESULT_H
#define FSDPC_CUDA_HOST_RESULT_H

#include "device/device.h"

typedef struct fsdpc_host_result {
    fsdpc_stream *stream;
    void *staged; /* NULL: the caller's own memory is used */
    void *caller;
    size_t bytes;
} fsdpc_host_result;

fsdpc_status fsdpc_host_result_begin(fsdpc_host_result *result, void *caller, size_t bytes,
                                     fsdpc_stream *stream, void **use_out);
/* `status` is the kernel's; returns it, or the error of copying the value back. */
fsdpc_status fsdpc_host_result_end(fsdpc_host_result *result, fsdpc_status status);

#endif
