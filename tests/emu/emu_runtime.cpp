/* A CUDA device that is this processor: streams as threads, a block's threads as fibers
 * (emu_fibers.cpp), memory behind a gate (emu_gate.h).
 *
 * Streams. Each is a thread with a queue. The host hands work over by a release store that the
 * thread acquires, and takes nothing back but in a wait that CUDA has too (synchronize, query,
 * an event's wait). So ThreadSanitizer sees exactly the order that CUDA promises: no lock that
 * both sides take hides a missing event.
 */
#include "cuda_runtime_api.h"

#include <algorithm>
#include <atomic>
#include <limits.h>
#include <linux/futex.h>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "emu_capture.h"
#include "emu_fibers.h"
#include "emu_gate.h"
#include "emu_kernel.h"

static std::atomic<unsigned> delay_seed;
static std::atomic<unsigned long long> waits, queries;

/* -- streams ----------------------------------------------------------------------------------- */

namespace
{

struct work {
    std::function<void()> run;
    bool touches_memory;
    std::atomic<work *> next{nullptr};
};

void run_gated(const std::function<void()> &run, bool touches_memory)
{
    if (touches_memory)
        emu_gate.work_begins();
    run();
    if (touches_memory)
        emu_gate.work_ends();
}

void futex(std::atomic<uint32_t> *word, int operation, uint32_t value,
           const struct timespec *at_most = nullptr)
{
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation, value, at_most, NULL, 0);
}

/* A place in a stream's work. Who waits for it sleeps: most ranks here have no core of their own.
 */
class place
{
    enum : uint32_t { AHEAD, AWAITED, REACHED };
    std::atomic<uint32_t> state{AHEAD};

  public:
    bool is_reached() const
    {
        return state.load(std::memory_order_acquire) == REACHED;
    }
    void reach()
    {
        if (state.exchange(REACHED, std::memory_order_release) == AWAITED)
            futex(&state, FUTEX_WAKE_PRIVATE, INT_MAX);
    }
    void wait(const struct timespec *at_most = nullptr)
    {
        uint32_t seen = AHEAD;
        state.compare_exchange_strong(seen, AWAITED, std::memory_order_relaxed);
        futex(&state, FUTEX_WAIT_PRIVATE, AWAITED, at_most);
    }
};

/* Random delays of one stream. Some streams are much slower than others, by the seed, so that what
 * should have waited for a slow one comes long before it. */
struct delays {
    unsigned state, slower;

    explicit delays(unsigned seed) : state(seed * 2654435761u), slower(state >> 30) {}
    void one()
    {
        state = state * 1664525u + 1013904223u;
        long most_ns = 16384L << 2 * slower; /* to 1 ms */
        struct timespec pause = {0, (long)((uint64_t)(state >> 16) * (uint64_t)most_ns >> 16)};
        nanosleep(&pause, NULL);
    }
};

} // namespace

struct emu_stream {
    work *head; /* the last one done; the thread's */
    work *tail; /* the host's */
    std::atomic<uint32_t> posted{0};
    bool stop = false;  /* set by the last work */
    emu_part part;      /* in a capture; the host's */
    std::thread thread; /* last: it uses the others at once */

    emu_stream() : head(new work()), tail(head), thread([this] { loop(); }) {}

    void post(std::function<void()> run, bool touches_memory)
    {
        if (part.open()) {
            part.add([run = std::move(run), touches_memory] { run_gated(run, touches_memory); });
            return;
        }
        work *added = new work();
        added->run = std::move(run);
        added->touches_memory = touches_memory;
        tail->next.store(added, std::memory_order_release);
        tail = added;
        posted.fetch_add(1, std::memory_order_release);
        futex(&posted, FUTEX_WAKE_PRIVATE, 1);
    }

    void loop()
    {
        delays own(delay_seed.load() + (unsigned)((uintptr_t)this >> 4));
        while (!stop) {
            uint32_t seen = posted.load(std::memory_order_relaxed);
            work *next = head->next.load(std::memory_order_acquire);
            if (!next) {
                futex(&posted, FUTEX_WAIT_PRIVATE, seen);
                continue;
            }
            if (delay_seed.load(std::memory_order_relaxed))
                own.one();
            run_gated(next->run, next->touches_memory);
            next->run = nullptr; /* with what it owns */
            delete head;
            head = next;
        }
        delete head;
    }
};

/* The stream behind the handles 0, 1 and 2, which CUDA gives to its default streams; and all. */
static emu_stream *of(cudaStream_t handle)
{
    static emu_stream &standard = *new emu_stream;
    return reinterpret_cast<uintptr_t>(handle) <= 2 ? &standard : handle;
}
static std::mutex made_lock;
static std::vector<emu_stream *> made;

struct emu_event {
    std::shared_ptr<place> reached; /* of the last record */
    emu_part part;                  /* of it, in a capture */
};

emu_part &emu_part_of(cudaStream_t stream)
{
    return of(stream)->part;
}

void emu_post_graph(cudaStream_t stream, std::function<void()> run)
{
    of(stream)->post(std::move(run), false);
}

void emu_launch_threads(cudaStream_t stream, unsigned grid, unsigned block, size_t shared,
                        std::function<void()> thread)
{
    if (grid == 0 || block == 0 || block > 1024 || shared > EMU_SHARED_BYTES) {
        fprintf(stderr, "emu: a launch of %u blocks of %u threads with %zu bytes\n", grid, block,
                shared);
        abort();
    }
    of(stream)->post([=] { emu_run_grid(grid, block, thread); }, true);
}

static void wait_for(place &awaited)
{
    while (!awaited.is_reached())
        awaited.wait();
}

/* Of a query, which may wait for another process. */
static const struct timespec QUERY_PATIENCE = {0, 5000000};

/* -- the runtime ------------------------------------------------------------------------------- */

extern "C" {

void emu_set_descending(int yes)
{
    emu_fibers_descend(yes);
    emu_run_backwards(yes);
}

static thread_local int selected = -1; /* device of this thread; -1: it has called for none */

int emu_selected(void)
{
    return selected >= 0;
}

/* For the fake NCCL, by name. */
extern "C" int emu_selected_device(void)
{
    return selected;
}

void emu_set_delays(unsigned seed)
{
    delay_seed = seed;
}

unsigned long long emu_waits(void)
{
    return waits;
}

unsigned long long emu_queries(void)
{
    return queries;
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
        return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
        return "dependency created on uncaptured work in another stream";
    default:
        return "emulated error";
    }
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    const char *wanted = getenv("EMU_GPUS");
    *count = wanted ? atoi(wanted) : 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    int count;
    cudaGetDeviceCount(&count);
    selected = device;
    return device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    snprintf(text, (size_t)bytes, "0000:%02x:00.0", 0x1b + device);
    return cudaSetDevice(device);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int)
{
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = 3; /* few, so that loops over the grid take several rounds */
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        break;
    default:
        *value = EMU_SHARED_BYTES - 1024;
    }
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int)
{
    return cudaSuccess; /* a launch that asks for too much ends the process */
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind,
                            cudaStream_t stream)
{
    /* As CUDA does: ordinary memory is read before the call returns, and written before it too. */
    struct cudaPointerAttributes source, target;
    cudaPointerGetAttributes(&source, from);
    cudaPointerGetAttributes(&target, to);
    bool ordinary =
        source.type == cudaMemoryTypeUnregistered || target.type == cudaMemoryTypeUnregistered;
    if (ordinary && of(stream)->part.open())
        return emu_check_captured(of(stream)->part);
    emu_trace("copy %zu from %p to %p\n", bytes,
              source.type == cudaMemoryTypeDevice ? from : nullptr,
              target.type == cudaMemoryTypeDevice ? to : nullptr);
    if (source.type == cudaMemoryTypeUnregistered) {
        auto begin = static_cast<const unsigned char *>(from);
        auto kept = std::make_shared<std::vector<unsigned char>>(begin, begin + bytes);
        of(stream)->post([=] { memmove(to, kept->data(), bytes); }, true);
    } else {
        of(stream)->post([=] { memmove(to, from, bytes); }, true);
    }
    return target.type == cudaMemoryTypeUnregistered ? cudaStreamSynchronize(stream) : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    emu_trace("fill %zu at %p\n", bytes, to);
    of(stream)->post([=] { memset(to, value, bytes); }, true);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = new emu_stream();
    std::lock_guard<std::mutex> guard(made_lock);
    made.push_back(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t error = emu_check_captured(of(stream)->part);
    if (error != cudaSuccess)
        return error;
    stream->post([=] { stream->stop = true; }, false);
    {
        std::lock_guard<std::mutex> guard(made_lock);
        made.erase(std::find(made.begin(), made.end(), stream));
    }
    host_inside here;
    stream->thread.join();
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t error = emu_check_captured(of(stream)->part);
    if (error == cudaSuccess)
        error = emu_check_unsafe();
    if (error != cudaSuccess)
        return error;
    emu_trace("wait\n");
    waits++;
    auto reached = std::make_shared<place>();
    of(stream)->post([reached] { reached->reach(); }, false);
    host_inside here; /* which lets the streams run meanwhile */
    wait_for(*reached);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    std::vector<emu_stream *> all = {of(NULL)};
    {
        std::lock_guard<std::mutex> guard(made_lock);
        all.insert(all.end(), made.begin(), made.end());
    }
    for (emu_stream *stream : all)
        cudaStreamSynchronize(stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *arg)
{
    of(stream)->post([=] { function(arg); }, true);
    return cudaSuccess;
}

void emu_launch_host(cudaStream_t stream, cudaHostFn_t function, void *arg, int touches_memory)
{
    of(stream)->post([=] { function(arg); }, touches_memory != 0);
}

void emu_launch_owned(cudaStream_t stream, cudaHostFn_t function, void *arg, cudaHostFn_t drop)
{
    std::shared_ptr<void> owned(arg, drop);
    of(stream)->post([=] { function(owned.get()); }, false);
}

long emu_captured(cudaStream_t stream)
{
    const emu_part &part = of(stream)->part;
    return part.open() ? (long)part.of->nodes.size() : -1;
}

void emu_host_waits(int yes)
{
    if (yes)
        emu_gate.host_enters();
    else
        emu_gate.host_leaves();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = new emu_event();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    event->part = {};
    event->reached = nullptr;
    if (of(stream)->part.open()) { /* it marks a place in the graph */
        event->part = of(stream)->part;
        return cudaSuccess;
    }
    auto reached = std::make_shared<place>();
    event->reached = reached;
    of(stream)->post([reached] { reached->reach(); }, false);
    return cudaSuccess;
}

/* On an event that was last recorded in a capture. */
static cudaError_t wait_in_capture(cudaStream_t stream, cudaEvent_t event)
{
    if (!event->part.open())
        return cudaErrorCapturedEvent;
    if (of(stream)->part.open() && of(stream)->part.of != event->part.of)
        return cudaErrorStreamCaptureMerge;
    of(stream)->part.join(event->part);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    if (event->part.of)
        return wait_in_capture(stream, event);
    auto reached = event->reached;
    if (reached && of(stream)->part.open()) {
        of(stream)->part.of->broken = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (reached)
        of(stream)->post([reached] { wait_for(*reached); }, false);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    cudaError_t error = event->part.of ? cudaErrorCapturedEvent : emu_check_unsafe();
    if (error != cudaSuccess) {
        emu_check_captured(event->part);
        return error;
    }
    emu_trace("query\n");
    queries++;
    if (emu_gate.closed && event->reached && !event->reached->is_reached()) {
        host_inside here; /* else nothing would ever run */
        event->reached->wait(&QUERY_PATIENCE);
    }
    return !event->reached || event->reached->is_reached() ? cudaSuccess : cudaErrorNotReady;
}

} // extern "C"
