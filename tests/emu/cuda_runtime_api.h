/* The part of CUDA's runtime that the back end uses, for a device that is this processor.
 *
 * Found instead of CUDA's own header by -Itests/emu. Names, types and meanings are CUDA's; codes
 * are the few that are looked at. emu_runtime.cpp and its neighbours implement it: streams are
 * threads, memory is the heap or, behind the gate, pages that the host may not touch.
 */
#ifndef FSDPC_TESTS_EMU_CUDA_RUNTIME_API_H
#define FSDPC_TESTS_EMU_CUDA_RUNTIME_API_H

#include <stddef.h>

#define CUDART_VERSION 13000

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908,
} cudaError_t;

typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
typedef struct emu_graph *cudaGraph_t;
typedef struct emu_graph_exec *cudaGraphExec_t;
typedef struct emu_node *cudaGraphNode_t;

enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocPortable = 1 };

enum cudaMemcpyKind { cudaMemcpyDefault = 4 };

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed,
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated,
};

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError(void);
cudaError_t cudaDriverGetVersion(int *version); /* cuda/driver.c alone calls it, not emulated */
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
typedef void (*cudaHostFn_t)(void *arg);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *arg);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

/* Not CUDA's: the order in which a block's threads run, random delays before work of a stream (0:
 * none), and device memory that the host may not touch, from the next allocation on
 * (emu_gate.h). */
void emu_set_descending(int descending);
void emu_set_delays(unsigned seed);
void emu_gate_memory(void);
/* Device memory that emu_driver.c maps: a file's bytes at an address that it has reserved, there to
 * be read alone unless `writable`; -1 if the processor cannot. */
int emu_map(void *address, size_t bytes, int file, int writable);
void emu_unmap(void *address, size_t bytes);
/* Memory for the driver, of what cudaMalloc has it from; -1 where there is too little. */
int emu_take_memory(size_t bytes);
void emu_give_memory(size_t bytes);

/* Whether the calling thread has selected a device. */
int emu_selected(void);

/* cudaLaunchHostFunc for a function that touches device memory, or for one that may wait long and
 * touches none, which does not keep the host inside a call. */
void emu_launch_host(cudaStream_t stream, cudaHostFn_t function, void *arg, int touches_memory);
typedef void (*emu_launch_host_fn)(cudaStream_t stream, cudaHostFn_t function, void *arg,
                                   int touches_memory);

/* The same for one that touches none, with what it works on: `drop` is called with that when
 * nothing can run the function any more, also if it was captured. */
void emu_launch_owned(cudaStream_t stream, cudaHostFn_t function, void *arg, cudaHostFn_t drop);
typedef void (*emu_launch_owned_fn)(cudaStream_t stream, cudaHostFn_t function, void *arg,
                                    cudaHostFn_t drop);
/* How much the capture that a stream takes part in has captured; -1: it takes part in none. */
long emu_captured(cudaStream_t stream);
typedef long (*emu_captured_fn)(cudaStream_t stream);
/* Around a wait of the host, outside of this runtime, for what streams do. */
void emu_host_waits(int yes);
typedef void (*emu_host_waits_fn)(int yes);

/* How often, since the process began, the host waited for the device (also by a copy into ordinary
 * memory), asked whether an event was reached, and asked for memory or gave it back. */
unsigned long long emu_waits(void);
unsigned long long emu_queries(void);
unsigned long long emu_allocations(void);

/* Whether the device stands still: what touches its memory does not run until it goes on. */
void emu_stall(int yes);

/* A line in a file for everything that the host asks of the device from now on: memory, waits,
 * copies, fills, launches, graphs, with every address in the device's memory. NULL: no more. */
void emu_set_trace(const char *path);

#ifdef __cplusplus
}
#endif

#endif
