/* A device: memory, streams and events, and the kernels that run on it.
 *
 * Three implementations fill in the table: `cpu`, `null` (which records calls and computes nothing)
 * and, as a plugin, `cuda`. Callers use the inline wrappers below the table, never its entries
 * directly.
 *
 * Streams. Work submitted to one stream runs in order. A CPU stream either is inline, so submit
 * runs the work immediately in the caller, or has a FIFO worker thread. Streams are created inline
 * if the ranks of this host leave no spare core. Kernels in the tables of csrc/ops take their
 * stream as the last argument. On the CPU they run in the calling thread, with the device's team;
 * on CUDA they are enqueued. To run a CPU kernel on a worker stream, submit a function that calls
 * it.
 *
 * A remote device (CUDA) has memory that the host cannot touch, and kernels that run
 * asynchronously. The host accesses that memory through copies. A copy with a stream runs in that
 * stream's order: data copied out is valid after a sync, and the source of a copy-in may change at
 * once. A copy without a stream runs in the main stream's order, and the host waits for it. Every
 * stream that is not async is an alias of the main stream, so work on it needs no events.
 * FSDPC_MEM_PINNED memory is host memory with the same address on the host and the device; kernels
 * access it over the bus. Work sees everything that the host wrote before enqueuing it; the host
 * sees the device's writes after a wait.
 *
 * Events order streams: record marks a point in a stream, and stream_wait makes later work on
 * another stream wait for it. An event that has never been recorded counts as complete. Recording
 * it again moves it to the new point; earlier waits still refer to the old point.
 *
 * Other libraries in the process (torch) have their own streams, identified by a raw handle (CUDA's
 * cudaStream_t). The main stream can become one of them, so that their work and ours run in a
 * single order. Its later work then runs after the work of the previous main stream. If device
 * memory runs out, the other libraries are asked to release cached memory (`reclaim`).
 *
 * Graphs. On a device that supports graphs, work submitted to its streams from capture_begin to
 * capture_end is recorded instead of run. Launching the graph runs all of that work again, on the
 * same memory. The capture records the main stream and streams that wait for its events; the main
 * stream must wait for these streams before the end. During the capture, the main stream is the
 * device's own, even if another was adopted. Nothing may wait during a capture. The following are
 * errors: a sync, an event test, and a copy from or to host memory. The exception is a constant of
 * up to 8 bytes, whose value the graph keeps. It is also an error to make another library's stream
 * follow ours, or to use memory that no earlier step allocated. After such an error, the capture is
 * dropped. A graph keeps its memory. Blocks that were live when the capture began, or acquired
 * during it, are not reused while the graph exists, even if freed.
 *
 * Windows are address ranges over memory that several windows may share; a window's address never
 * changes. They are created, moved and destroyed while nothing on the device uses them. Data
 * written through one address is visible through another if streams and events order the write
 * before the read. If waiting for the main stream fails, the window stays as it is.
 *
 * Errors: submit fails only if the work cannot be accepted. Work that fails does not stop later
 * work; the stream keeps the first error with its text, and the next sync returns it once.
 *
 * Threads: only one thread at a time may submit to a stream or use an event. A forked child cannot
 * use the parent's worker streams. Ownership: a device outlives its streams, events and memory;
 * destroy(NULL) is a no-op everywhere.
 */
#ifndef FSDPC_DEVICE_DEVICE_H
#define FSDPC_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/mem.h"
#include "base/status.h"
#include "base/team.h"
#include "base/wait.h"

typedef struct fsdpc_device fsdpc_device;
typedef struct fsdpc_stream fsdpc_stream;
typedef struct fsdpc_event fsdpc_event;
typedef struct fsdpc_graph fsdpc_graph;

typedef struct fsdpc_window {
    fsdpc_device *device;
    size_t bytes;
    unsigned char *address; /* for kernels: unique and constant */
    unsigned char *memory;  /* for communicators: common to all windows that share the memory */
} fsdpc_window;

/* Work for a stream. `arg` stays valid until the work has run. */
typedef fsdpc_status (*fsdpc_stream_fn)(void *arg, fsdpc_stream *stream);

/* The allowed access to memory; any other access terminates the process. */
typedef enum fsdpc_access { FSDPC_ACCESS_NONE, FSDPC_ACCESS_READ, FSDPC_ACCESS_WRITE } fsdpc_access;

typedef struct fsdpc_device_ops {
    const char *name; /* "cpu", "null", "cuda" */
    void (*destroy)(fsdpc_device *device);

    /* Streams */
    fsdpc_status (*stream_create)(fsdpc_device *device, const char *name, bool want_async,
                                  fsdpc_stream **out);
    void (*stream_destroy)(fsdpc_stream *stream);
    fsdpc_status (*stream_submit)(fsdpc_stream *stream, fsdpc_stream_fn fn, void *arg);
    fsdpc_status (*stream_sync)(fsdpc_stream *stream); /* waits; returns the first error of its
                                                        * work, once */

    /* Events */
    fsdpc_status (*event_create)(fsdpc_device *device, fsdpc_event **out);
    void (*event_destroy)(fsdpc_event *event);
    fsdpc_status (*event_record)(fsdpc_event *event, fsdpc_stream *stream);
    fsdpc_status (*stream_wait)(fsdpc_stream *stream, fsdpc_event *event);
    fsdpc_status (*event_test)(fsdpc_event *event); /* FSDPC_IN_PROGRESS until complete */

    /* Memory */
    fsdpc_status (*alloc)(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes, void **out);
    void (*free)(fsdpc_device *device, void *pointer);
    fsdpc_status (*copy)(fsdpc_device *device, void *to, const void *from, size_t bytes,
                         fsdpc_stream *stream);
    fsdpc_status (*fill)(fsdpc_device *device, void *to, int byte, size_t bytes,
                         fsdpc_stream *stream);
    /* Optional: if NULL, memory can always be read and written. */
    fsdpc_status (*protect)(fsdpc_device *device, void *pages, size_t bytes, fsdpc_access access);

    /* Streams of other libraries, by raw handle. All three are optional, and NULL if not
     * supported. */
    fsdpc_status (*adopt)(fsdpc_device *device, uintptr_t raw);
    fsdpc_status (*precede)(fsdpc_device *device, uintptr_t raw);
    uintptr_t (*handle)(const fsdpc_device *device);

    /* Graphs. These are either all set or, if graphs are not supported, all NULL. */
    fsdpc_status (*capture_begin)(fsdpc_device *device); /* waits for the main stream */
    fsdpc_status (*capture_end)(fsdpc_device *device, fsdpc_graph **out); /* out NULL: drop it */
    fsdpc_status (*graph_launch)(fsdpc_graph *graph);                     /* on the main stream */
    void (*graph_destroy)(fsdpc_graph *graph); /* waits for the main stream */

    /* Windows; only if window_granule is not 0 */
    fsdpc_status (*window_create)(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes,
                                  const fsdpc_window *like, fsdpc_window **out);
    fsdpc_status (*window_part)(fsdpc_window *window);
    fsdpc_status (*window_destroy)(fsdpc_window *window);
} fsdpc_device_ops;

/* Makes the host wait for a remote device whose work may depend on dead ranks. It polls until the
 * result is not IN_PROGRESS, or until the deadline, an interrupt or a failure. */
typedef struct fsdpc_peer_check {
    fsdpc_status (*wait_for)(void *arg, fsdpc_status (*poll)(void *poll_arg), void *poll_arg);
    void *arg;
} fsdpc_peer_check;

struct fsdpc_flat_ops; /* csrc/ops/flat_ops.h */
struct fsdpc_nn_ops;   /* csrc/ops/nn_ops.h */

struct fsdpc_device {
    const fsdpc_device_ops *ops;
    bool remote;      /* the host cannot touch its memory, and its kernels run asynchronously */
    int ordinal;      /* among devices of its kind */
    bool capturing;   /* between capture_begin and capture_end */
    bool ordered;     /* set by the context: excludes kernels with a varying summation order */
    fsdpc_mem *mem;   /* borrowed */
    fsdpc_team *team; /* borrowed; NULL is a team of one */
    fsdpc_isa isa;
    size_t window_granule;             /* window sizes are multiples of it; 0: no windows */
    const struct fsdpc_flat_ops *flat; /* set by the context, which connects kernels to a device */
    const struct fsdpc_nn_ops *nn;
    fsdpc_peer_check
        peer_check; /* set by the communicator that runs on it; zero: waits do not check peers */
    fsdpc_stream *main; /* see fsdpc_device_main */
    fsdpc_device *host; /* for a remote device: the host's CPU device, set by the context; else
                         * NULL */
    void (*reclaim)(void *arg); /* asks another library to release cached memory; NULL: there is
                                 * none */
    void *reclaim_arg;
};

/* Returns the default stream for kernels and copies: the caller itself on the host, or the main
 * stream on a remote device. */
static inline fsdpc_stream *fsdpc_device_main(fsdpc_device *device)
{
    return device->main;
}

/* Common header of every stream; implementations embed it as their first member. */
struct fsdpc_stream {
    fsdpc_device *device;
    const char *name;
    bool async; /* work runs independently; false: in the caller of submit */
};

struct fsdpc_event {
    fsdpc_device *device;
};

struct fsdpc_graph {
    fsdpc_device *device;
};

/* `mem` and `team` are borrowed and outlive the device. `spare_cores`: cores this rank may use for
 * worker streams; 0 makes every stream inline. */
fsdpc_status fsdpc_device_cpu_create(fsdpc_mem *mem, fsdpc_team *team, fsdpc_isa isa,
                                     int spare_cores, fsdpc_device **out);

/* Returns the number of threads that the device's streams use in this process. */
int fsdpc_device_cpu_workers(const fsdpc_device *device);

/* The calls that the null device received, in order; borrowed until the next call on the device. */
typedef struct fsdpc_null_record {
    const char *stream; /* NULL if no stream is involved */
    const char *what;   /* "submit", "record", "wait", "copy", "fill", "sync" */
    const void *object; /* the event, the function's arg, or the address written */
} fsdpc_null_record;

/* Creates a device that records submitted functions, and calls them only if `run_host_work` is
 * set. */
fsdpc_status fsdpc_device_null_create(fsdpc_mem *mem, bool run_host_work, fsdpc_device **out);
size_t fsdpc_device_null_records(const fsdpc_device *device, const fsdpc_null_record **out);
/* Returns the total floating-point operations of the products submitted to the null device; its
 * kernels (ops/nn_null.c) count them. Other devices count nothing. */
const int64_t *fsdpc_device_null_flops(const fsdpc_device *device);
void fsdpc_device_null_add_flops(fsdpc_device *device, double flops);

static inline void fsdpc_device_destroy(fsdpc_device *device)
{
    if (!device)
        return;
    device->ops->stream_destroy(device->main);
    device->ops->destroy(device);
}

static inline fsdpc_status fsdpc_stream_create(fsdpc_device *device, const char *name,
                                               bool want_async, fsdpc_stream **out)
{
    return device->ops->stream_create(device, name, want_async, out);
}

static inline void fsdpc_stream_destroy(fsdpc_stream *stream)
{
    if (stream)
        stream->device->ops->stream_destroy(stream);
}

static inline fsdpc_status fsdpc_stream_submit(fsdpc_stream *stream, fsdpc_stream_fn fn, void *arg)
{
    return stream->device->ops->stream_submit(stream, fn, arg);
}

static inline fsdpc_status fsdpc_stream_sync(fsdpc_stream *stream)
{
    return stream->device->ops->stream_sync(stream);
}

static inline fsdpc_status fsdpc_event_create(fsdpc_device *device, fsdpc_event **out)
{
    return device->ops->event_create(device, out);
}

static inline void fsdpc_event_destroy(fsdpc_event *event)
{
    if (event)
        event->device->ops->event_destroy(event);
}

static inline fsdpc_status fsdpc_event_record(fsdpc_event *event, fsdpc_stream *stream)
{
    return event->device->ops->event_record(event, stream);
}

static inline fsdpc_status fsdpc_stream_wait(fsdpc_stream *stream, fsdpc_event *event)
{
    return stream->device->ops->stream_wait(stream, event);
}

static inline fsdpc_status fsdpc_event_test(fsdpc_event *event)
{
    return event->device->ops->event_test(event);
}

/* Makes the host wait for an event, through the device's peer check if it has one. */
fsdpc_status fsdpc_event_await(fsdpc_event *event);

static inline fsdpc_status fsdpc_device_alloc(fsdpc_device *device, fsdpc_mem_kind kind,
                                              size_t bytes, void **out)
{
    return device->ops->alloc(device, kind, bytes, out);
}

static inline void fsdpc_device_free(fsdpc_device *device, void *pointer)
{
    if (pointer)
        device->ops->free(device, pointer);
}

static inline fsdpc_status fsdpc_device_copy(fsdpc_device *device, void *to, const void *from,
                                             size_t bytes, fsdpc_stream *stream)
{
    return device->ops->copy(device, to, from, bytes, stream);
}

static inline fsdpc_status fsdpc_device_fill(fsdpc_device *device, void *to, int byte, size_t bytes,
                                             fsdpc_stream *stream)
{
    return device->ops->fill(device, to, byte, bytes, stream);
}

static inline fsdpc_status fsdpc_device_alloc_zeroed(fsdpc_device *device, fsdpc_mem_kind kind,
                                                     size_t bytes, void **out)
{
    void *memory;
    FSDPC_TRY(fsdpc_device_alloc(device, kind, bytes, &memory));
    fsdpc_status status = fsdpc_device_fill(device, memory, 0, bytes, NULL);
    if (status != FSDPC_OK)
        fsdpc_device_free(device, memory);
    else
        *out = memory;
    return status;
}

/* Protects whole pages immediately rather than in stream order; set ACCESS_WRITE again before
 * freeing them. */
static inline fsdpc_status fsdpc_device_protect(fsdpc_device *device, void *pages, size_t bytes,
                                                fsdpc_access access)
{
    return device->ops->protect ? device->ops->protect(device, pages, bytes, access) : FSDPC_OK;
}

/* Makes `raw` the main stream, and lets the calling thread use the device. The stream must live
 * until another is adopted. */
static inline fsdpc_status fsdpc_device_adopt(fsdpc_device *device, uintptr_t raw)
{
    return device->ops->adopt ? device->ops->adopt(device, raw) : FSDPC_OK;
}

/* Makes later work on the stream `raw` run after the current work of the main stream. */
static inline fsdpc_status fsdpc_device_precede(fsdpc_device *device, uintptr_t raw)
{
    return device->ops->precede ? device->ops->precede(device, raw) : FSDPC_OK;
}

/* Returns the main stream's handle, which is 0 for CUDA's default stream or if the device has no
 * handles. */
static inline uintptr_t fsdpc_device_handle(const fsdpc_device *device)
{
    return device->ops->handle ? device->ops->handle(device) : 0;
}

static inline fsdpc_status fsdpc_capture_begin(fsdpc_device *device)
{
    if (!device->ops->capture_begin)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "device '%s' has no graphs", device->ops->name);
    if (device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "a capture on device '%s' inside another one",
                          device->ops->name);
    FSDPC_TRY(device->ops->capture_begin(device));
    device->capturing = true;
    return FSDPC_OK;
}

static inline fsdpc_status fsdpc_capture_end(fsdpc_device *device, fsdpc_graph **out)
{
    device->capturing = false;
    return device->ops->capture_end(device, out);
}

static inline fsdpc_status fsdpc_graph_launch(fsdpc_graph *graph)
{
    return graph->device->ops->graph_launch(graph);
}

static inline void fsdpc_graph_destroy(fsdpc_graph *graph)
{
    if (graph)
        graph->device->ops->graph_destroy(graph);
}

/* `like`: shares the memory of that window, which must have the same size; NULL: allocates memory,
 * counted as `kind`. */
static inline fsdpc_status fsdpc_window_create(fsdpc_device *device, fsdpc_mem_kind kind,
                                               size_t bytes, const fsdpc_window *like,
                                               fsdpc_window **out)
{
    return device->ops->window_create(device, kind, bytes, like, out);
}

/* Gives a window separate memory at the same address, with undefined contents. If this fails, the
 * window is unchanged. */
static inline fsdpc_status fsdpc_window_part(fsdpc_window *window)
{
    return window->device->ops->window_part(window);
}

/* Waits for the main stream. If that fails, returns the error and leaves the window unchanged;
 * callers that cannot retry leak it. Errors from submitted work are left for the next sync. */
static inline fsdpc_status fsdpc_window_destroy(fsdpc_window *window)
{
    return window ? window->device->ops->window_destroy(window) : FSDPC_OK;
}

#endif
