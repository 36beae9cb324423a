/* Graphs from CUDA stream capture.
 *
 * The main stream is captured in a mode that does not restrict other threads. During a capture, the
 * main stream is the device's own, because another library's stream may be the legacy default
 * stream, which CUDA cannot capture. Afterwards, the previous main stream is restored. Calls whose
 * CUDA errors would invalidate the capture are rejected before they reach CUDA, with an error that
 * suggests an alternative. A capture with a rejected call can therefore still be ended and dropped.
 *
 * Memory. A graph uses the captured addresses, so its blocks must not be reused while it exists:
 * the pool holds them (pool.h). A graph would copy host constants (the 2 in x + 2) again from their
 * original stack addresses, so they are kept in pinned memory with the graph.
 *
 * A graph may still be running when it is destroyed and its blocks are freed. Destroying a graph
 * therefore waits with the same checks as a sync, because its operations may be waiting for dead
 * peers. Inside a capture, waiting is neither possible nor needed, because the capture waited when
 * it began. Pinned memory cannot be freed inside a capture either, so graphs destroyed in a capture
 * are freed when it ends.
 */
#include "cuda/graph.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/error.h"
#include "cuda/pool.h"
#include "cuda/wait.h"

enum { CONSTANT_BYTES = 8, MAX_CONSTANTS = 512 };

typedef struct fsdpc_cuda_graph {
    fsdpc_graph head;    /* first */
    cudaStream_t origin; /* the main stream of the capture */
    cudaStream_t before; /* the main stream before and after it */
    cudaGraphExec_t exec;
    fsdpc_cuda_keep *keep;
    unsigned char *constants; /* pinned */
    size_t n_constants;
    bool lost;                        /* abandoned during the capture */
    struct fsdpc_cuda_graph *dropped; /* during a capture: dropped graphs; in these: the next */
    struct fsdpc_cuda_graph *next;    /* in the device's list, while it exists */
} fsdpc_cuda_graph;

static cudaStream_t main_stream(const fsdpc_device *device)
{
    return ((const fsdpc_cuda_device *)device)->main->queue.raw;
}

/* The graph must have finished running, and no capture may be in progress. */
static void graph_free(fsdpc_cuda_graph *graph)
{
    fsdpc_cuda_graph **at = &((fsdpc_cuda_device *)graph->head.device)->graphs;
    while (*at && *at != graph)
        at = &(*at)->next;
    if (*at)
        *at = graph->next;
    if (graph->exec)
        (void)cudaGraphExecDestroy(graph->exec);
    fsdpc_cuda_pool_keep_release(((fsdpc_cuda_device *)graph->head.device)->pool, graph->keep);
    if (!fsdpc_cuda_is_lost(graph->head.device))
        fsdpc_cuda_pinned_free(graph->constants);
    free(graph);
}

static void free_dropped(fsdpc_cuda_graph *capture)
{
    for (fsdpc_cuda_graph *it = capture->dropped, *next; it; it = next) {
        next = it->dropped;
        graph_free(it);
    }
    capture->dropped = NULL;
}

static fsdpc_status begin_capture(const fsdpc_cuda_graph *graph)
{
    fsdpc_device *device = graph->head.device;
    FSDPC_TRY(fsdpc_device_adopt(device, (uintptr_t)graph->origin));
    fsdpc_status status = fsdpc_cuda_check(
        cudaStreamBeginCapture(graph->origin, cudaStreamCaptureModeThreadLocal), "begin a capture");
    if (status != FSDPC_OK)
        (void)fsdpc_device_adopt(device, (uintptr_t)graph->before);
    return status;
}

fsdpc_status fsdpc_cuda_capture_begin(fsdpc_device *base)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    FSDPC_TRY(fsdpc_stream_sync(&device->main->head));
    fsdpc_cuda_graph *graph = calloc(1, sizeof *graph);
    if (!graph)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a graph");
    graph->head.device = base;
    graph->before = main_stream(base);
    graph->origin = device->own;
    void *constants;
    fsdpc_status status = fsdpc_cuda_pinned_alloc(MAX_CONSTANTS * CONSTANT_BYTES, &constants);
    if (status == FSDPC_OK) {
        graph->constants = constants;
        status = fsdpc_cuda_pool_keep_begin(device->pool, &graph->keep);
    }
    if (status == FSDPC_OK) {
        status = begin_capture(graph);
        if (status != FSDPC_OK)
            fsdpc_cuda_pool_keep_end(device->pool);
    }
    if (status != FSDPC_OK) {
        graph_free(graph);
        return status;
    }
    device->capture = graph;
    return FSDPC_OK;
}

static fsdpc_status end_capture(const fsdpc_cuda_graph *graph, cudaGraph_t *out)
{
    return fsdpc_cuda_check(cudaStreamEndCapture(graph->origin, out), "end a capture");
}

static fsdpc_status given_up(void)
{
    return fsdpc_fail(FSDPC_ERR_STATE, "this graph went with a communicator that failed, as it may "
                                       "hold operations of it: capture a step again");
}

fsdpc_status fsdpc_cuda_capture_end(fsdpc_device *base, fsdpc_graph **out)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    fsdpc_cuda_graph *graph = device->capture;
    device->capture = NULL;
    cudaGraph_t captured = NULL;
    fsdpc_status status = graph->lost ? given_up() : end_capture(graph, &captured);
    FSDPC_KEEP_FIRST(status, fsdpc_device_adopt(base, (uintptr_t)graph->before));
    fsdpc_cuda_pool_keep_end(device->pool);
    if (status == FSDPC_OK && out)
        status = fsdpc_cuda_check(cudaGraphInstantiate(&graph->exec, captured, 0),
                                  "make a graph of a capture");
    if (captured)
        (void)cudaGraphDestroy(captured);
    free_dropped(graph);
    if (status != FSDPC_OK || !out) {
        graph_free(graph);
        return out ? status : FSDPC_OK; /* a dropped capture may be invalidated */
    }
    graph->next = device->graphs;
    device->graphs = graph;
    *out = &graph->head;
    return FSDPC_OK;
}

void fsdpc_cuda_graphs_give_up(fsdpc_device *base)
{
    const fsdpc_cuda_device *device = (const fsdpc_cuda_device *)base;
    fsdpc_cuda_graph *capture = device->capture;
    cudaGraph_t captured = NULL;
    if (capture && !capture->lost) {
        (void)end_capture(capture, &captured);
        if (captured)
            (void)cudaGraphDestroy(captured);
        capture->lost = true;
    }
    for (fsdpc_cuda_graph *it = device->graphs; it; it = it->next) {
        if (it->exec)
            (void)cudaGraphExecDestroy(it->exec);
        it->exec = NULL;
    }
}

fsdpc_status fsdpc_cuda_graph_launch(fsdpc_graph *base)
{
    const fsdpc_cuda_graph *graph = (const fsdpc_cuda_graph *)base;
    if (!graph->exec)
        return given_up();
    return fsdpc_cuda_check(cudaGraphLaunch(graph->exec, main_stream(base->device)),
                            "launch a graph");
}

void fsdpc_cuda_graph_destroy(fsdpc_graph *base)
{
    fsdpc_cuda_graph *graph = (fsdpc_cuda_graph *)base;
    fsdpc_cuda_graph *capture = ((fsdpc_cuda_device *)base->device)->capture;
    if (capture) {
        graph->dropped = capture->dropped;
        capture->dropped = graph;
        return;
    }
    (void)fsdpc_cuda_wait(base->device);
    graph_free(graph);
}

/* Waiting for captured work would add the other stream and its work to the capture, without the
 * other library's knowledge. */
fsdpc_status fsdpc_cuda_capture_check_other(const fsdpc_device *device)
{
    if (!device->capturing)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "a stream of another library is to wait for the GPU inside a captured step: "
                      "give tensors to other libraries, and call modules of theirs, before it or "
                      "after it");
}

/* Determines whether the pointer points to ordinary host memory, which a graph cannot use. */
static fsdpc_status is_ordinary(const void *pointer, bool *out)
{
    struct cudaPointerAttributes attributes;
    FSDPC_CUDA_TRY(cudaPointerGetAttributes(&attributes, pointer), "ask whose memory this is");
    *out = attributes.type == cudaMemoryTypeUnregistered;
    return FSDPC_OK;
}

/* Copies a constant into the graph's own memory. */
static fsdpc_status keep_constant(fsdpc_cuda_graph *graph, const void *value, size_t bytes,
                                  const void **kept_out)
{
    if (graph->n_constants == MAX_CONSTANTS)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a captured step with more than %d constants given by the host: make "
                          "them tensors before it",
                          (int)MAX_CONSTANTS);
    unsigned char *kept = graph->constants + graph->n_constants++ * CONSTANT_BYTES;
    memcpy(kept, value, bytes);
    *kept_out = kept;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_capture_copy(fsdpc_device *device, void *to, const void *from, size_t bytes,
                                     cudaStream_t stream)
{
    bool from_host, to_host;
    FSDPC_TRY(is_ordinary(from, &from_host));
    FSDPC_TRY(is_ordinary(to, &to_host));
    if (from_host && !to_host && (!stream || bytes > CONSTANT_BYTES))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "%zu bytes of the host are copied to the GPU inside a captured step, and "
                          "replays would copy the same again: make the tensor before it, and "
                          "copy_() new values into it before each replay",
                          bytes);
    if (!stream || to_host)
        FSDPC_TRY(fsdpc_cuda_may_wait(device));
    if (from_host)
        FSDPC_TRY(keep_constant(((fsdpc_cuda_device *)device)->capture, from, bytes, &from));
    return fsdpc_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream),
                            "copy memory");
}
