/* GPU streams, events and memory.
 *
 * A table entry makes one or two CUDA runtime calls and translates their errors, with three
 * exceptions. The main stream replaces streams that are not ours. The first error of submitted work
 * is kept until the next sync. Kernels report faults in pinned memory, because they cannot return
 * an error (queue.h). Events carry no timing, so recording one is cheap, and waiting for one does
 * not involve the host.
 *
 * If the device has a peer check, streams are waited for only through wait.h. CUDA itself waits for
 * the stream during copies into ordinary memory, so such copies come after a wait through wait.h.
 */
#include "cuda/device_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/attention_cudnn.h"
#include "cuda/error.h"
#include "cuda/pool.h"
#include "cuda/queue.h"
#include "cuda/wait.h"
#include "cuda/gemm_cublaslt.h"
#include "cuda/graph.h"
#include "cuda/kernel_tables.h"
#include "cuda/window.h"

typedef struct cuda_event {
    fsdpc_event head; /* first */
    cudaEvent_t raw;
} cuda_event;

/* -- streams ----------------------------------------------------------------------------------- */

/* Returns the CUDA stream for any of this device's streams, or for NULL. */
static fsdpc_cuda_stream *own_stream(fsdpc_device *device, fsdpc_stream *stream)
{
    if (stream && stream->async)
        return (fsdpc_cuda_stream *)stream;
    return ((fsdpc_cuda_device *)device)->main;
}

static void stream_free(fsdpc_cuda_stream *stream)
{
    if (stream->synced)
        (void)cudaEventDestroy(stream->synced);
    if (!fsdpc_cuda_is_lost(stream->head.device))
        fsdpc_cuda_pinned_free(stream->queue.fault);
    free((char *)stream->head.name);
    free(stream);
}

static fsdpc_status cuda_stream_create(fsdpc_device *base, const char *name, bool want_async,
                                       fsdpc_stream **out)
{
    const fsdpc_cuda_device *device = (const fsdpc_cuda_device *)base;
    fsdpc_cuda_stream *stream = calloc(1, sizeof *stream);
    char *kept = strdup(name);
    if (!stream || !kept) {
        free(kept);
        free(stream);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for stream '%s'", name);
    }
    stream->head = (fsdpc_stream){.device = base, .name = kept, .async = want_async};
    if (!want_async) { /* an alias of the main stream */
        *out = &stream->head;
        return FSDPC_OK;
    }
    stream->queue.multiprocessors = device->multiprocessors;
    stream->queue.shared_bytes = device->shared_bytes;
    void *fault;
    fsdpc_status status = fsdpc_cuda_pinned_alloc(sizeof *stream->queue.fault, &fault);
    if (status == FSDPC_OK) {
        memset(fault, 0, sizeof *stream->queue.fault);
        stream->queue.fault = fault;
        status =
            fsdpc_cuda_check(cudaStreamCreateWithFlags(&stream->queue.raw, cudaStreamNonBlocking),
                             "create a stream");
    }
    if (status != FSDPC_OK) {
        stream_free(stream);
        return status;
    }
    *out = &stream->head;
    return FSDPC_OK;
}

static void cuda_stream_destroy(fsdpc_stream *base)
{
    fsdpc_cuda_stream *stream = (fsdpc_cuda_stream *)base;
    if (base->async && !fsdpc_cuda_is_lost(base->device)) {
        (void)cudaStreamSynchronize(stream->queue.raw); /* kernels may still write the fault */
        (void)cudaStreamDestroy(stream->queue.raw);
    }
    stream_free(stream);
}

static fsdpc_status cuda_stream_submit(fsdpc_stream *base, fsdpc_stream_fn fn, void *arg)
{
    fsdpc_cuda_stream *stream = own_stream(base->device, base);
    fsdpc_status status = fn(arg, base);
    if (status != FSDPC_OK && stream->error == FSDPC_OK) {
        stream->error = status;
        snprintf(stream->message, sizeof stream->message, "%s", fsdpc_last_error());
    }
    return FSDPC_OK;
}

static fsdpc_status fault_error(fsdpc_cuda_fault *shared)
{
    fsdpc_cuda_fault fault = *shared;
    memset(shared, 0, sizeof *shared);
    switch ((fsdpc_cuda_fault_kind)fault.kind) {
    case FSDPC_CUDA_FAULT_NONE:
        return FSDPC_OK;
    case FSDPC_CUDA_FAULT_EMBEDDING_ID:
        return fsdpc_fail(
            FSDPC_ERR_INDEX,
            "id %lld at index %llu of an embedding of %llu rows: ids are 0 to rows - 1",
            fault.value, fault.at, fault.end);
    case FSDPC_CUDA_FAULT_TARGET:
        return fsdpc_fail(
            FSDPC_ERR_INDEX,
            "target %lld at row %llu of a cross entropy over %llu classes: targets are "
            "0 to classes - 1, or ignore_index",
            fault.value, fault.at, fault.end);
    }
    return fsdpc_fail(FSDPC_ERR_INTERNAL, "a kernel reported fault %u", fault.kind);
}

static fsdpc_status cuda_stream_sync(fsdpc_stream *base)
{
    FSDPC_TRY(fsdpc_cuda_may_wait(base->device));
    fsdpc_cuda_stream *stream = own_stream(base->device, base);
    FSDPC_TRY(fsdpc_cuda_wait_stream(stream));
    if (stream->error != FSDPC_OK) {
        fsdpc_status status = fsdpc_fail(stream->error, "%s", stream->message);
        stream->error = FSDPC_OK;
        stream->message[0] = 0;
        return status;
    }
    return fault_error(stream->queue.fault);
}

/* -- events ------------------------------------------------------------------------------------ */

static fsdpc_status cuda_event_create(fsdpc_device *device, fsdpc_event **out)
{
    cuda_event *event = calloc(1, sizeof *event);
    if (!event)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an event");
    event->head.device = device;
    fsdpc_status status = fsdpc_cuda_check(
        cudaEventCreateWithFlags(&event->raw, cudaEventDisableTiming), "create an event");
    if (status != FSDPC_OK) {
        free(event);
        return status;
    }
    *out = &event->head;
    return FSDPC_OK;
}

static void cuda_event_destroy(fsdpc_event *base)
{
    cuda_event *event = (cuda_event *)base;
    (void)cudaEventDestroy(event->raw);
    free(event);
}

static fsdpc_status cuda_event_record(fsdpc_event *base, fsdpc_stream *stream)
{
    cudaStream_t raw = own_stream(base->device, stream)->queue.raw;
    return fsdpc_cuda_check(cudaEventRecord(((cuda_event *)base)->raw, raw), "record an event");
}

static fsdpc_status cuda_stream_wait(fsdpc_stream *stream, fsdpc_event *base)
{
    cudaStream_t raw = own_stream(base->device, stream)->queue.raw;
    return fsdpc_cuda_check(cudaStreamWaitEvent(raw, ((cuda_event *)base)->raw, 0),
                            "wait for an event");
}

static fsdpc_status cuda_event_test(fsdpc_event *base)
{
    FSDPC_TRY(fsdpc_cuda_may_wait(base->device));
    cudaError_t error = cudaEventQuery(((cuda_event *)base)->raw);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return FSDPC_IN_PROGRESS;
    }
    return fsdpc_cuda_check(error, "ask for an event");
}

/* -- memory ------------------------------------------------------------------------------------ */

static fsdpc_status cuda_alloc(fsdpc_device *base, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    bool pinned = kind == FSDPC_MEM_PINNED;
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    fsdpc_cuda_pool *pool = pinned ? device->pinned : device->pool;
    fsdpc_status status = fsdpc_cuda_pool_alloc(pool, kind, bytes, out);
    if (status != FSDPC_ERR_NOMEM || base->capturing || pinned)
        return status;
    FSDPC_TRY(fsdpc_cuda_make_room(base));
    return fsdpc_cuda_pool_alloc(pool, kind, bytes, out);
}

static void cuda_free(fsdpc_device *device, void *pointer)
{
    fsdpc_cuda_pool_free(((fsdpc_cuda_device *)device)->pool, pointer);
    fsdpc_cuda_pool_free(((fsdpc_cuda_device *)device)->pinned, pointer);
}

/* Returns whether CUDA would wait for the stream during this copy: it does if the copy writes
 * ordinary memory, or reads more of it than CUDA's staging buffer holds. */
static fsdpc_status copy_waits(const void *to, const void *from, size_t bytes, bool *out)
{
    enum { SET_ASIDE_BYTES = 64 << 10 };
    struct cudaPointerAttributes target, source;
    FSDPC_CUDA_TRY(cudaPointerGetAttributes(&target, to), "ask whose memory this is");
    FSDPC_CUDA_TRY(cudaPointerGetAttributes(&source, from), "ask whose memory this is");
    *out = target.type == cudaMemoryTypeUnregistered ||
           (source.type == cudaMemoryTypeUnregistered && bytes > SET_ASIDE_BYTES);
    return FSDPC_OK;
}

static fsdpc_status cuda_copy(fsdpc_device *device, void *to, const void *from, size_t bytes,
                              fsdpc_stream *stream)
{
    if (bytes == 0)
        return FSDPC_OK;
    fsdpc_cuda_stream *own = own_stream(device, stream);
    if (device->capturing)
        return fsdpc_cuda_capture_copy(device, to, from, bytes, stream ? own->queue.raw : NULL);
    bool waits = false;
    if (device->peer_check.wait_for || fsdpc_cuda_is_lost(device))
        FSDPC_TRY(copy_waits(to, from, bytes, &waits));
    if (waits)
        FSDPC_TRY(fsdpc_cuda_wait_stream(own));
    FSDPC_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own->queue.raw),
                   "copy memory");
    return stream ? FSDPC_OK : cuda_stream_sync(&own->head);
}

static fsdpc_status cuda_fill(fsdpc_device *device, void *to, int byte, size_t bytes,
                              fsdpc_stream *stream)
{
    if (bytes == 0)
        return FSDPC_OK;
    if (!stream)
        FSDPC_TRY(fsdpc_cuda_may_wait(device));
    fsdpc_cuda_stream *own = own_stream(device, stream);
    FSDPC_CUDA_TRY(cudaMemsetAsync(to, byte, bytes, own->queue.raw), "fill memory");
    return stream ? FSDPC_OK : cuda_stream_sync(&own->head);
}

fsdpc_status fsdpc_cuda_is_device_memory(const void *pointer, bool *out)
{
    struct cudaPointerAttributes attributes;
    FSDPC_CUDA_TRY(cudaPointerGetAttributes(&attributes, pointer), "ask whose memory this is");
    *out = attributes.type != cudaMemoryTypeUnregistered && attributes.type != cudaMemoryTypeHost;
    return FSDPC_OK;
}

/* -- foreign streams --------------------------------------------------------------------------- */

static cudaStream_t raw_stream(uintptr_t handle)
{
    return (cudaStream_t)handle; /* NOLINT(performance-no-int-to-ptr): from a library */
}

static fsdpc_status cuda_precede(fsdpc_device *base, uintptr_t raw)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    if (device->main->queue.raw == raw_stream(raw))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_cuda_capture_check_other(base));
    FSDPC_CUDA_TRY(cudaEventRecord(device->behind, device->main->queue.raw), "record an event");
    return fsdpc_cuda_check(cudaStreamWaitEvent(raw_stream(raw), device->behind, 0),
                            "let another library's stream wait");
}

static fsdpc_status cuda_adopt(fsdpc_device *base, uintptr_t raw)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    FSDPC_TRY(fsdpc_device_cuda_select(base));
    FSDPC_TRY(cuda_precede(base, raw));
    device->main->queue.raw = raw_stream(raw);
    return FSDPC_OK;
}

static uintptr_t cuda_handle(const fsdpc_device *base)
{
    return (uintptr_t)((const fsdpc_cuda_device *)base)->main->queue.raw;
}

/* -- lifetime ---------------------------------------------------------------------------------- */

static void cuda_destroy(fsdpc_device *base)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    if (!device->lost) {
        fsdpc_cuda_products_destroy(device->gemm);
        fsdpc_cuda_attentions_destroy(device->attentions);
    }
    if (device->main) {
        if (device->main->queue.raw != device->own && !device->lost) /* it may be gone */
            (void)cudaDeviceSynchronize();
        device->main->queue.raw = device->own;
        cuda_stream_destroy(&device->main->head);
    }
    if (device->behind)
        (void)cudaEventDestroy(device->behind);
    if (!device->lost) {
        fsdpc_cuda_pool_destroy(device->pool);
        fsdpc_cuda_pool_destroy(device->pinned);
        fsdpc_cuda_windows_destroy(device->windows);
    }
    free(device);
}

static const fsdpc_device_ops cuda_ops = {
    .name = "cuda",
    .destroy = cuda_destroy,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_submit = cuda_stream_submit,
    .stream_sync = cuda_stream_sync,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .stream_wait = cuda_stream_wait,
    .event_test = cuda_event_test,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .adopt = cuda_adopt,
    .precede = cuda_precede,
    .handle = cuda_handle,
    .capture_begin = fsdpc_cuda_capture_begin,
    .capture_end = fsdpc_cuda_capture_end,
    .graph_launch = fsdpc_cuda_graph_launch,
    .graph_destroy = fsdpc_cuda_graph_destroy,
    .window_create = fsdpc_cuda_window_create,
    .window_part = fsdpc_cuda_window_part,
    .window_destroy = fsdpc_cuda_window_destroy,
};

fsdpc_status fsdpc_device_cuda_select(const fsdpc_device *base)
{
    return fsdpc_cuda_check(cudaSetDevice(base->ordinal), "select a device");
}

void fsdpc_device_cuda_lose(fsdpc_device *base)
{
    ((fsdpc_cuda_device *)base)->lost = true;
}

fsdpc_status fsdpc_device_cuda_address(const fsdpc_device *base, char *text, size_t bytes)
{
    return fsdpc_cuda_check(cudaDeviceGetPCIBusId(text, (int)bytes, base->ordinal),
                            "say where a device sits");
}

static fsdpc_status init(fsdpc_cuda_device *device)
{
    int shared_bytes;
    FSDPC_TRY(fsdpc_device_cuda_select(&device->head));
    FSDPC_CUDA_TRY(cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount,
                                          device->head.ordinal),
                   "count multiprocessors");
    FSDPC_CUDA_TRY(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          device->head.ordinal),
                   "ask for the shared memory of a block");
    device->shared_bytes = (size_t)shared_bytes;
    FSDPC_TRY(fsdpc_cuda_pool_create(device->head.mem, false, &device->pool));
    FSDPC_TRY(fsdpc_cuda_pool_create(device->head.mem, true, &device->pinned));
    fsdpc_stream *main;
    FSDPC_TRY(cuda_stream_create(&device->head, "main", true, &main));
    device->main = (fsdpc_cuda_stream *)main;
    device->own = device->main->queue.raw;
    FSDPC_CUDA_TRY(cudaEventCreateWithFlags(&device->behind, cudaEventDisableTiming),
                   "create an event");
    fsdpc_status status = fsdpc_cuda_windows_create(&device->head, &device->windows);
    if (status == FSDPC_OK)
        device->head.window_granule = fsdpc_cuda_windows_granule(device->windows);
    return status == FSDPC_ERR_UNSUPPORTED ? FSDPC_OK : status;
}

fsdpc_status fsdpc_device_cuda_create(fsdpc_mem *mem, int ordinal, fsdpc_device **out)
{
    fsdpc_cuda_device *device = calloc(1, sizeof *device);
    if (!device)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a device");
    device->head = (fsdpc_device){.ops = &cuda_ops,
                                  .remote = true,
                                  .ordinal = ordinal,
                                  .mem = mem,
                                  .flat = &fsdpc_flat_ops_cuda,
                                  .nn = &fsdpc_nn_ops_cuda};
    fsdpc_status status = init(device);
    if (status == FSDPC_OK)
        status = cuda_stream_create(&device->head, "main", false, &device->head.main);
    if (status != FSDPC_OK) {
        cuda_destroy(&device->head);
        return status;
    }
    *out = &device->head;
    return FSDPC_OK;
}
