/* Graphs of the emulated device, and a trace of what the host asked of it.
 *
 * A capture keeps the work of its streams as nodes, with what each comes after. A launch is one
 * piece of work that runs all nodes, each after those that it names and otherwise in the order in
 * which they were captured or, where threads descend too, as far in the reverse of it as that
 * allows: so an order that no event asked for does not come by itself.
 *
 * Nodes of a graph pass the gate one by one, as some wait for other ranks and touch no memory; on
 * all ranks they run in one order, that of the capture, or none would end.
 *
 * What CUDA forbids in a capture is refused with CUDA's error, and the capture is over for it then,
 * as there: waits, queries, memory that is not ordered by a stream, and events of work outside.
 * Copies from or to ordinary host memory are refused too: a graph would copy again from where that
 * memory was.
 */
#include "emu_capture.h"

#include <algorithm>
#include <atomic>
#include <fcntl.h>
#include <mutex>
#include <queue>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <unistd.h>

struct emu_graph {
    std::vector<emu_node> nodes;
};

struct emu_graph_exec {
    std::shared_ptr<const emu_graph> graph;
};

namespace
{

std::mutex captures_lock;
std::vector<std::shared_ptr<emu_capture>> captures; /* those that are open */
std::atomic<bool> backwards;
std::atomic<int> trace_file{-1};

bool is_unsafe_in(const emu_capture &capture)
{
    if (capture.mode == cudaStreamCaptureModeThreadLocal)
        return capture.thread == std::this_thread::get_id();
    return capture.mode == cudaStreamCaptureModeGlobal;
}

/* Does every node come before the end of the origin? */
bool is_joined(const emu_capture &capture)
{
    std::vector<bool> before(capture.nodes.size());
    for (size_t end : emu_part_of(capture.origin).ends)
        before[end] = true;
    bool joined = true;
    for (size_t i = capture.nodes.size(); i-- > 0;) {
        joined = joined && before[i];
        for (size_t earlier : capture.nodes[i].after)
            before[earlier] = before[earlier] || before[i];
    }
    return joined;
}

void run_graph(const emu_graph &graph)
{
    size_t n = graph.nodes.size();
    std::vector<size_t> left(n), rank(n);
    std::vector<std::vector<size_t>> next(n);
    std::priority_queue<size_t> ready; /* of ranks: the highest goes first */
    bool reverse = backwards;
    for (size_t i = 0; i < n; i++) {
        left[i] = graph.nodes[i].after.size();
        for (size_t earlier : graph.nodes[i].after)
            next[earlier].push_back(i);
        if (!left[i])
            ready.push(reverse ? i : n - 1 - i);
    }
    while (!ready.empty()) {
        size_t i = reverse ? ready.top() : n - 1 - ready.top();
        ready.pop();
        graph.nodes[i].run();
        for (size_t later : next[i])
            if (--left[later] == 0)
                ready.push(reverse ? later : n - 1 - later);
    }
}

} // namespace

void emu_part::add(std::function<void()> run)
{
    of->nodes.push_back({std::move(run), ends});
    ends = {of->nodes.size() - 1};
}

void emu_part::join(const emu_part &other)
{
    if (!open())
        *this = other;
    else
        for (size_t end : other.ends)
            if (std::find(ends.begin(), ends.end(), end) == ends.end())
                ends.push_back(end);
}

cudaError_t emu_check_unsafe(void)
{
    std::lock_guard<std::mutex> guard(captures_lock);
    cudaError_t error = cudaSuccess;
    for (auto &capture : captures) {
        if (is_unsafe_in(*capture)) {
            capture->broken = true;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    return error;
}

cudaError_t emu_check_captured(const emu_part &part)
{
    if (!part.open())
        return cudaSuccess;
    part.of->broken = true;
    return cudaErrorStreamCaptureUnsupported;
}

void emu_run_backwards(bool yes)
{
    backwards = yes;
}

void emu_trace(const char *format, ...)
{
    int file = trace_file;
    if (file < 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    vdprintf(file, format, arguments);
    va_end(arguments);
}

void emu_trace_launch(unsigned grid, unsigned block, const void *arguments, size_t bytes)
{
    if (trace_file < 0)
        return;
    std::string line = "launch " + std::to_string(grid) + " x " + std::to_string(block);
    char text[24];
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, static_cast<const char *>(arguments) + at, sizeof word);
        if (emu_is_device_memory(word)) {
            snprintf(text, sizeof text, " %zx", word);
            line += text;
        }
    }
    emu_trace("%s\n", line.c_str());
}

extern "C" {

void emu_set_trace(const char *path)
{
    int file = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (path && file < 0) {
        perror(path);
        abort();
    }
    int old = trace_file.exchange(file);
    if (old >= 0)
        close(old);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (reinterpret_cast<uintptr_t>(stream) <= 1)
        return cudaErrorStreamCaptureUnsupported; /* the legacy default stream */
    emu_part &part = emu_part_of(stream);
    if (part.open())
        return cudaErrorIllegalState;
    auto capture = std::make_shared<emu_capture>();
    *capture = {mode, std::this_thread::get_id(), stream, {}, false, false};
    part = {capture, {}};
    std::lock_guard<std::mutex> guard(captures_lock);
    captures.push_back(capture);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    const emu_part &part = emu_part_of(stream);
    *status = !part.open()      ? cudaStreamCaptureStatusNone
              : part.of->broken ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    std::shared_ptr<emu_capture> capture = emu_part_of(stream).of;
    *graph = nullptr;
    if (!capture || capture->over)
        return cudaErrorIllegalState;
    if (capture->origin != stream)
        return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id())
        return cudaErrorStreamCaptureWrongThread;
    bool joined = is_joined(*capture);
    {
        std::lock_guard<std::mutex> guard(captures_lock);
        captures.erase(std::find(captures.begin(), captures.end(), capture));
        capture->over = true;
    }
    std::vector<emu_node> nodes = std::move(capture->nodes); /* which streams and events keep */
    capture->nodes.clear();
    if (capture->broken)
        return cudaErrorStreamCaptureInvalidated;
    if (!joined)
        return cudaErrorStreamCaptureUnjoined;
    *graph = new emu_graph{std::move(nodes)};
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    if (nodes)
        return cudaErrorInvalidValue; /* only the count is known */
    *count = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    *exec = new emu_graph_exec{std::make_shared<const emu_graph>(*graph)};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    cudaError_t error = emu_check_captured(emu_part_of(stream));
    if (error != cudaSuccess)
        return error;
    emu_trace("graph of %zu\n", exec->graph->nodes.size());
    emu_post_graph(stream, [graph = exec->graph] { run_graph(*graph); });
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec; /* launches that are under way keep the graph */
    return cudaSuccess;
}

} // extern "C"
