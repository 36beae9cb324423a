/* The launchers' view of a stream: its CUDA stream, and the memory in which kernels report faults.
 *
 * This header is valid in both C and C++, because the kernels are written in C++. A stream that is
 * not async is an alias of the device's main stream.
 *
 * Faults. A kernel that finds an invalid index cannot return an error. It records the first invalid
 * index in the queue's fault, in pinned memory, and continues as if that index were harmless. The
 * stream's next sync reports it once, as an error.
 */
#ifndef FSDPC_CUDA_QUEUE_H
#define FSDPC_CUDA_QUEUE_H

#include <cuda_runtime_api.h>

#include "device/device.h"

typedef enum fsdpc_cuda_fault_kind {
    FSDPC_CUDA_FAULT_NONE,
    FSDPC_CUDA_FAULT_EMBEDDING_ID,
    FSDPC_CUDA_FAULT_TARGET,
} fsdpc_cuda_fault_kind;

typedef struct fsdpc_cuda_fault {
    unsigned kind;          /* claimed by compare-and-swap, so the first fault stays */
    long long value;        /* the invalid index */
    unsigned long long at;  /* its position */
    unsigned long long end; /* indices are below this */
} fsdpc_cuda_fault;

typedef struct fsdpc_cuda_queue {
    cudaStream_t raw;
    fsdpc_cuda_fault *fault;
    int multiprocessors;
    size_t shared_bytes; /* maximum shared memory per block */
} fsdpc_cuda_queue;

typedef struct fsdpc_cuda_stream {
    fsdpc_stream head; /* first */
    fsdpc_cuda_queue queue;
    cudaEvent_t synced; /* awaited by a watched sync; NULL: not used yet */
    fsdpc_status error; /* first error of its submitted work, until sync */
    char message[512];
} fsdpc_cuda_stream;

typedef struct fsdpc_cuda_device {
    fsdpc_device head; /* first */
    int multiprocessors;
    size_t shared_bytes;
    fsdpc_cuda_stream *main; /* for plain streams and for memory: see device_cuda.h */
    cudaStream_t own;        /* the stream behind main unless another is adopted */
    cudaEvent_t behind;      /* a point in main that another stream waits for */
    struct fsdpc_cuda_pool *pool;
    struct fsdpc_cuda_pool *pinned;           /* for host memory */
    struct fsdpc_cuda_windows *windows;       /* NULL: not supported */
    struct fsdpc_cuda_products *gemm;         /* NULL until the first product needs cuBLASLt */
    struct fsdpc_cuda_attentions *attentions; /* NULL until the first attention needs cuDNN */
    struct fsdpc_cuda_graph *capture;         /* being recorded; NULL: none */
    struct fsdpc_cuda_graph *graphs;          /* all live ones */
    int cudnn;                                /* attention may use cuDNN; 2: in any order */
    bool lost;                                /* see fsdpc_device_cuda_lose */
} fsdpc_cuda_device;

static inline bool fsdpc_cuda_is_lost(const fsdpc_device *device)
{
    return ((const fsdpc_cuda_device *)device)->lost;
}

static inline const fsdpc_cuda_queue *fsdpc_cuda_queue_of(const fsdpc_stream *stream)
{
    if (stream->async)
        return &((const fsdpc_cuda_stream *)stream)->queue;
    return &((const fsdpc_cuda_device *)stream->device)->main->queue;
}

#endif
