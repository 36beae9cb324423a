/* Launch configuration and error handling; every kernel file includes this header first.
 *
 * FSDPC_LAUNCH hides the <<<>>> syntax, so that tests/emu can compile the same source for the CPU.
 * A launcher ends in `return launched("name")`, which only checks the launch itself: errors of a
 * running kernel appear at the next sync.
 */
#ifndef FSDPC_KERNELS_COMMON_CUH
#define FSDPC_KERNELS_COMMON_CUH

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern "C" {
#include "cuda/queue.h"
#include "base/size.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"
#include "cuda/kernels.h"
}

#if defined(FSDPC_EMU)
#include "emu_kernel.h"
#else
#define FSDPC_LAUNCH(kernel, grid, block, shared, queue, ...)                                      \
    kernel<<<(unsigned)(grid), (unsigned)(block), (shared), (queue)->raw>>>(__VA_ARGS__)
/* Dynamic shared memory, allocated at launch in addition to the kernels' static shared memory. */
#define FSDPC_DYNAMIC_SHARED(type, name)                                                           \
    extern __shared__ __align__(16) unsigned char name##_[];                                       \
    type *name = reinterpret_cast<type *>(name##_)
#endif

enum { BLOCK_THREADS = 256 };

static inline fsdpc_status launched(const char *what)
{
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_INTERNAL, "CUDA could not start %s: %s", what,
                      cudaGetErrorString(error));
}

/* Allows a kernel's blocks to use more than the default 48 KiB of shared memory. */
template <typename Kernel>
static inline fsdpc_status allow_shared(Kernel *kernel, size_t bytes, const fsdpc_cuda_queue *queue)
{
    if (bytes > queue->shared_bytes)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a kernel needs %zu bytes of shared memory a block, this device has %zu",
                          bytes, queue->shared_bytes);
    cudaError_t error = cudaFuncSetAttribute(
        (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (error != cudaSuccess)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "CUDA refused %zu bytes of shared memory: %s", bytes,
                          cudaGetErrorString(error));
    return FSDPC_OK;
}

/* Returns the number of blocks for a grid-stride loop over `items` items, `block_items` per block.
 * There are enough blocks to fill the device several times, so that the last wave is short, but few
 * enough to launch cheaply.
 */
static inline unsigned grid_of(const fsdpc_cuda_queue *queue, size_t items, size_t block_items)
{
    size_t blocks = fsdpc_ceil_div(items, block_items);
    return (unsigned)fsdpc_max_size(fsdpc_min_size(blocks, (size_t)queue->multiprocessors * 32), 1);
}

__device__ __forceinline__ size_t grid_thread()
{
    return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ size_t grid_threads()
{
    return (size_t)gridDim.x * blockDim.x;
}

/* Records a fault if it is the first one; `at` and `end` are used in the message. */
__device__ __forceinline__ void report_fault(fsdpc_cuda_fault *fault, unsigned kind,
                                             long long value, size_t at, size_t end)
{
    if (atomicCAS(&fault->kind, 0u, kind) != 0)
        return;
    fault->value = value;
    fault->at = at;
    fault->end = end;
}

#endif
