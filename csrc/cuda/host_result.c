/* Stages results in a pool block, with one copy in, one copy out, and one wait.
 *
 * CUDA reports which memory a pointer belongs to; the query takes well under a microsecond.
 */
#include "cuda/host_result.h"

#include "cuda/error.h"
#include "cuda/wait.h"

fsdpc_status fsdpc_host_result_begin(fsdpc_host_result *result, void *caller, size_t bytes,
                                     fsdpc_stream *stream, void **use_out)
{
    *result = (fsdpc_host_result){.stream = stream, .caller = caller, .bytes = bytes};
    struct cudaPointerAttributes attributes;
    FSDPC_CUDA_TRY(cudaPointerGetAttributes(&attributes, caller), "ask whose memory this is");
    if (!caller || attributes.type != cudaMemoryTypeUnregistered) {
        *use_out = caller;
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_may_wait(stream->device));
    void *staged;
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, bytes, &staged));
    fsdpc_status status = fsdpc_device_copy(stream->device, staged, caller, bytes, stream);
    if (status != FSDPC_OK) {
        fsdpc_device_free(stream->device, staged);
        return status;
    }
    result->staged = staged;
    *use_out = staged;
    return FSDPC_OK;
}

fsdpc_status fsdpc_host_result_end(fsdpc_host_result *result, fsdpc_status status)
{
    if (!result->staged)
        return status;
    fsdpc_device *device = result->stream->device;
    if (status == FSDPC_OK)
        status = fsdpc_device_copy(device, result->caller, result->staged, result->bytes,
                                   result->stream);
    if (status == FSDPC_OK)
        status = fsdpc_stream_sync(result->stream);
    fsdpc_device_free(device, result->staged);
    result->staged = NULL;
    return status;
}
