/* What the emulated runtime's files share: streams that capture, and the trace.
 *
 * A stream that takes part in a capture does not run what it is given: it adds nodes to the
 * capture's graph. A node comes after the last ones of its stream, and after those of events that
 * the stream was told to wait for.
 */
#ifndef FSDPC_TESTS_EMU_EMU_CAPTURE_H
#define FSDPC_TESTS_EMU_EMU_CAPTURE_H

#include "cuda_runtime_api.h"

#include <functional>
#include <memory>
#include <thread>
#include <vector>

struct emu_node {
    std::function<void()> run;
    std::vector<size_t> after; /* lower indices */
};

struct emu_capture {
    cudaStreamCaptureMode mode;
    std::thread::id thread; /* that began it */
    cudaStream_t origin;
    std::vector<emu_node> nodes;
    bool broken; /* something was asked for that a capture forbids */
    bool over;
};

/* A stream's part in a capture, or the point of one that an event marks. */
struct emu_part {
    std::shared_ptr<emu_capture> of;
    std::vector<size_t> ends; /* what comes next comes after these nodes */

    bool open() const
    {
        return of && !of->over;
    }
    void add(std::function<void()> run);
    void join(const emu_part &other);
};

/* emu_runtime.cpp */
emu_part &emu_part_of(cudaStream_t stream);
/* What is run, piece by piece, passes the gate by itself. */
void emu_post_graph(cudaStream_t stream, std::function<void()> run);
bool emu_is_device_memory(uintptr_t address);

/* emu_graph.cpp. May this thread now do what no capture of its own, and no global one, allows? If
 * not, those captures are broken and the error is CUDA's. */
cudaError_t emu_check_unsafe(void);
/* The same for what no capture of this stream allows. */
cudaError_t emu_check_captured(const emu_part &part);
/* Where nothing orders two nodes, the later one first. */
void emu_run_backwards(bool yes);
/* One line, if there is a trace. */
void emu_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
