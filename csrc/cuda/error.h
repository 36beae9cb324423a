/* Translates CUDA's errors into ours. Keeps their text, and maps "out of memory" to a separate
 * code.
 */
#ifndef FSDPC_CUDA_ERROR_H
#define FSDPC_CUDA_ERROR_H

#include <cuda_runtime_api.h>

#include "base/status.h"

static inline fsdpc_status fsdpc_cuda_check(cudaError_t error, const char *what)
{
    if (__builtin_expect(error == cudaSuccess, 1))
        return FSDPC_OK;
    (void)cudaGetLastError(); /* so that the next launch does not report it */
    fsdpc_status code = error == cudaErrorMemoryAllocation ? FSDPC_ERR_NOMEM : FSDPC_ERR_INTERNAL;
    return fsdpc_fail(code, "CUDA failed to %s: %s", what, cudaGetErrorString(error));
}

#define FSDPC_CUDA_TRY(call, what) FSDPC_TRY(fsdpc_cuda_check((call), (what)))

#endif
