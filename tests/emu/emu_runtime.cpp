/* A CUDA device that is this processor: streams as threads, a block's threads as fibers.
 *
 * Streams.  Each is a thread with a queue.  The host hands work over by a release store that the
 * thread acquires, and takes nothing back but in a wait that CUDA has too (synchronize, query,
 * an event's wait).  So ThreadSanitizer sees exactly the order that CUDA promises: no lock that
 * both sides take hides a missing event.
 *
 * Fibers.  A stream's thread keeps as many as its largest block had threads.  It resumes them in
 * ascending or descending order; a fiber comes back when its thread has ended or waits in a barrier
 * that others have not reached.  A warp runs as far ahead of the others as barriers let it, so that
 * what a barrier should have kept apart meets.  A round in which nobody got further is an error of
 * the kernel.
 *
 * Gate.  A GPU's memory is out of the host's reach, this processor's is not, and a host that reads
 * a tensor by a pointer would work here and end the process there.  Once emu_gate_memory was
 * called, device memory lies in pages that nobody may touch, but for the time that the host spends
 * inside a call that waits for the device; and only then streams run what touches memory.  So the
 * mistake ends the process here too, every time and at its place, and kernels run as late as a GPU
 * may run them.
 */
#include "cuda_runtime_api.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <linux/futex.h>
#include <map>
#include <memory>
#include <mutex>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#include "emu_capture.h"
#include "emu_kernel.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMU_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#endif

thread_local emu_index threadIdx, blockIdx, blockDim, gridDim;

enum { WARP_THREADS = 32, STACK_BYTES = 256 << 10, OFFER_BYTES = 64, SHARED_BYTES = 228 << 10 };

static std::atomic<int> descending;
static std::atomic<unsigned> delay_seed;
static std::atomic<unsigned long long> waits, queries, allocations;

/* -- fibers ------------------------------------------------------------------------------------ */

namespace
{

/* Threads that wait for each other. */
struct meeting {
    unsigned live, arrived, generation;

    void arrive()
    {
        arrived++;
        release();
    }
    void leave()
    {
        live--;
        release();
    }
    void release()
    {
        if (arrived && arrived == live) {
            arrived = 0;
            generation++;
        }
    }
};

struct warp_state {
    meeting all;
    alignas(16) unsigned char offers[2][WARP_THREADS][OFFER_BYTES];
};

struct late_copy {
    void *to;
    const void *from;
    bool valid;

    void make() const
    {
        if (valid)
            memcpy(to, from, 16);
        else
            memset(to, 0, 16);
    }
};

/* Where a fiber, or the scheduler, goes on.  Changing places by swapcontext costs two system calls;
 * _setjmp and _longjmp cost none, but sanitizers do not understand them. */
struct place {
    ucontext_t context;
    jmp_buf jump;
    bool entered; /* false: not yet, by its context */
};

void change_places(place *from, place *to)
{
#if defined(EMU_TSAN) || defined(EMU_ASAN)
    swapcontext(&from->context, &to->context);
#else
    if (_setjmp(from->jump))
        return;
    if (to->entered)
        _longjmp(to->jump, 1);
    to->entered = true;
    setcontext(&to->context);
#endif
}

struct fiber {
    place at;
    std::vector<std::vector<late_copy>> copies; /* groups, the last one open */
    void *stack;
    bool done;
    const meeting *waits_for; /* NULL: ready */
    unsigned generation;      /* waits while the meeting is in this one */
#if defined(EMU_TSAN)
    void *tsan;
#endif
#if defined(EMU_ASAN)
    void *fake_stack;
#endif

    ~fiber()
    {
        munmap(stack, STACK_BYTES);
#if defined(EMU_TSAN)
        __tsan_destroy_fiber(tsan);
#endif
    }
};

struct block_state {
    place scheduler;
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<warp_state> warps;
    meeting all;
    fiber *current;
    const std::function<void()> *thread;
    std::unique_ptr<unsigned char[]> shared;
#if defined(EMU_TSAN)
    void *tsan;
#endif
#if defined(EMU_ASAN)
    void *fake_stack;
    const void *stack;
    size_t stack_bytes;
#endif
};

thread_local block_state *running;

[[noreturn]] void give_up(const char *why)
{
    fprintf(stderr, "emu: block %u of %u, %u threads: %s\n", blockIdx.x, gridDim.x, blockDim.x,
            why);
    abort();
}

void to_scheduler()
{
    block_state *block = running;
    fiber *self = block->current;
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(block->tsan, 0);
#endif
#if defined(EMU_ASAN)
    __sanitizer_start_switch_fiber(&self->fake_stack, block->stack, block->stack_bytes);
#endif
    change_places(&self->at, &block->scheduler);
#if defined(EMU_ASAN)
    __sanitizer_finish_switch_fiber(self->fake_stack, &block->stack, &block->stack_bytes);
#endif
}

void to_fiber(block_state *block, fiber *next)
{
    block->current = next;
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(next->tsan, 0);
#endif
#if defined(EMU_ASAN)
    __sanitizer_start_switch_fiber(&block->fake_stack, next->stack, STACK_BYTES);
#endif
    block->scheduler.entered = true;
    change_places(&block->scheduler, &next->at);
#if defined(EMU_ASAN)
    __sanitizer_finish_switch_fiber(block->fake_stack, NULL, NULL);
#endif
}

void fiber_main()
{
#if defined(EMU_ASAN)
    __sanitizer_finish_switch_fiber(NULL, &running->stack, &running->stack_bytes);
#endif
    for (;;) {
        (*running->thread)();
        running->current->done = true;
        to_scheduler();
    }
}

std::unique_ptr<fiber> fiber_make()
{
    std::unique_ptr<fiber> made(new fiber());
    made->stack =
        mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&made->at.context);
    made->at.context.uc_stack.ss_sp = made->stack;
    made->at.context.uc_stack.ss_size = STACK_BYTES;
    made->at.context.uc_link = NULL;
    makecontext(&made->at.context, fiber_main, 0);
#if defined(EMU_TSAN)
    made->tsan = __tsan_create_fiber(0);
#endif
    return made;
}

/* One turn for a thread, if it can go on. */
bool run_thread(block_state *block, unsigned t, unsigned *left)
{
    fiber *f = block->fibers[t].get();
    if (f->done || (f->waits_for && f->waits_for->generation == f->generation))
        return false;
    f->waits_for = NULL;
    threadIdx.x = t;
    to_fiber(block, f);
    if (f->done) {
        (*left)--;
        block->all.leave();
        block->warps[t / WARP_THREADS].all.leave();
    }
    return true;
}

/* Every warp as far as it comes without the others; false if none moved. */
bool run_round(block_state *block, unsigned threads, unsigned *left)
{
    unsigned warps = (threads + WARP_THREADS - 1) / WARP_THREADS;
    bool moved = false;
    for (unsigned n = 0; n < warps; n++) {
        unsigned first = (descending ? warps - 1 - n : n) * WARP_THREADS;
        unsigned lanes = threads - first < WARP_THREADS ? threads - first : WARP_THREADS;
        for (bool goes_on = true; goes_on;) {
            goes_on = false;
            for (unsigned l = 0; l < lanes; l++) {
                unsigned t = first + (descending ? lanes - 1 - l : l);
                goes_on = run_thread(block, t, left) || goes_on;
            }
            moved = moved || goes_on;
        }
    }
    return moved;
}

void run_block(block_state *block, unsigned threads)
{
    unsigned left = threads;
    block->all = {threads, 0, 0};
    for (unsigned w = 0; w * WARP_THREADS < threads; w++) {
        unsigned lanes = threads - w * WARP_THREADS;
        block->warps[w].all = {lanes < WARP_THREADS ? lanes : WARP_THREADS, 0, 0};
    }
    for (unsigned t = 0; t < threads; t++) {
        block->fibers[t]->done = false;
        block->fibers[t]->waits_for = NULL;
        block->fibers[t]->copies.clear();
    }
    memset(block->shared.get(), 0xa5, SHARED_BYTES);
    while (left)
        if (!run_round(block, threads, &left))
            give_up("threads wait in barriers that others do not reach");
}

void run_grid(unsigned grid, unsigned threads, const std::function<void()> &thread)
{
    thread_local block_state block;
    if (!block.shared)
        block.shared.reset(new unsigned char[SHARED_BYTES]);
#if defined(EMU_TSAN)
    block.tsan = __tsan_get_current_fiber();
#endif
    running = &block;
    while (block.fibers.size() < threads)
        block.fibers.push_back(fiber_make());
    if (block.warps.size() * WARP_THREADS < threads)
        block.warps.resize((threads + WARP_THREADS - 1) / WARP_THREADS);
    block.thread = &thread;
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned b = 0; b < grid; b++) {
        blockIdx = {descending ? grid - 1 - b : b, 0, 0};
        run_block(&block, threads);
    }
}

/* The current thread waits until all of `group` have come. */
void meet(meeting *group)
{
    fiber *self = running->current;
    self->generation = group->generation;
    self->waits_for = group;
    group->arrive();
    if (group->generation == self->generation)
        to_scheduler();
    self->waits_for = NULL;
}

} // namespace

void *emu_dynamic_shared(void)
{
    return running->shared.get();
}

void __syncthreads(void)
{
    meet(&running->all);
}

void __syncwarp(unsigned)
{
    meet(&running->warps[threadIdx.x / WARP_THREADS].all);
}

const unsigned char *emu_exchange(const void *mine, size_t bytes)
{
    warp_state *warp = &running->warps[threadIdx.x / WARP_THREADS];
    unsigned parity = warp->all.generation & 1; /* the next exchange uses the other half */
    memcpy(warp->offers[parity][threadIdx.x % WARP_THREADS], mine, bytes);
    meet(&warp->all);
    return warp->offers[parity][0];
}

void emu_copy_later(void *to, const void *from, bool valid)
{
    late_copy copy = {to, from, valid};
    if (!descending) {
        copy.make();
        return;
    }
    auto &copies = running->current->copies;
    if (copies.empty())
        copies.emplace_back();
    copies.back().push_back(copy);
}

void emu_copies_commit(void)
{
    auto &copies = running->current->copies;
    if (copies.empty()) /* a group without copies counts too */
        copies.emplace_back();
    copies.emplace_back();
}

void emu_copies_wait(unsigned left)
{
    auto &copies = running->current->copies;
    while (copies.size() > left + 1) {
        for (const late_copy &copy : copies.front())
            copy.make();
        copies.erase(copies.begin());
    }
}

/* -- the gate ---------------------------------------------------------------------------------- */

namespace
{

enum : size_t { ARENA_BYTES = (size_t)64 << 30 }; /* of addresses; they are not used again */

struct memory_gate {
    std::mutex lock;
    std::condition_variable changed;
    std::atomic<bool> closed{false}; /* false: there is no gate */
    char *begin = nullptr;
    size_t used = 0;
    int inside = 0;  /* host threads in a call that waits */
    int running = 0; /* streams that touch memory now */
    std::map<char *, size_t> mapped; /* by the driver, elsewhere */

    static void protect(char *memory, size_t bytes, int access)
    {
        if (bytes && mprotect(memory, bytes, access)) {
            perror("emu: mprotect");
            abort();
        }
    }
    void protect(int access)
    {
        protect(begin, used, access);
        for (const auto &range : mapped)
            protect(range.first, range.second, access);
    }
    void host_enters()
    {
        std::lock_guard<std::mutex> guard(lock);
        if (closed && inside++ == 0)
            protect(PROT_READ | PROT_WRITE);
        changed.notify_all();
    }
    void host_leaves()
    {
        std::unique_lock<std::mutex> guard(lock);
        if (!closed || --inside > 0)
            return;
        changed.wait(guard, [this] { return running == 0; });
        if (inside == 0)
            protect(PROT_NONE);
    }
    void work_begins()
    {
        if (!closed)
            return;
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return inside > 0; });
        running++;
    }
    void work_ends()
    {
        if (!closed)
            return;
        std::lock_guard<std::mutex> guard(lock);
        running--;
        changed.notify_all();
    }
    void *take(size_t bytes)
    {
        std::lock_guard<std::mutex> guard(lock);
        if (bytes > ARENA_BYTES - used)
            return nullptr;
        char *taken = begin + used;
        used += bytes;
        return taken;
    }
};

memory_gate &gate = *new memory_gate; /* streams may wait at it when the process ends */

/* For as long as a host thread waits for the device. */
struct host_inside {
    host_inside() { gate.host_enters(); }
    ~host_inside() { gate.host_leaves(); }
};

} // namespace

/* -- streams ----------------------------------------------------------------------------------- */

namespace
{

struct work {
    std::function<void()> run;
    bool touches_memory;
    std::atomic<work *> next{nullptr};
};

void futex(std::atomic<uint32_t> *word, int operation, uint32_t value)
{
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation, value, NULL, NULL, 0);
}

void delay(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    struct timespec pause = {0, (long)(*state >> 16) * 4}; /* up to 0.26 ms */
    nanosleep(&pause, NULL);
}

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
            part.add(std::move(run));
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
        unsigned state = delay_seed.load() + (unsigned)(uintptr_t)this;
        while (!stop) {
            uint32_t seen = posted.load(std::memory_order_relaxed);
            work *next = head->next.load(std::memory_order_acquire);
            if (!next) {
                futex(&posted, FUTEX_WAIT_PRIVATE, seen);
                continue;
            }
            if (delay_seed.load(std::memory_order_relaxed))
                delay(&state);
            if (next->touches_memory)
                gate.work_begins();
            next->run();
            if (next->touches_memory)
                gate.work_ends();
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
    std::shared_ptr<std::atomic<bool>> reached; /* of the last record */
    emu_part part;                              /* of it, in a capture */
};

emu_part &emu_part_of(cudaStream_t stream)
{
    return of(stream)->part;
}

void emu_post(cudaStream_t stream, std::function<void()> run)
{
    of(stream)->post(std::move(run), true);
}

void emu_launch_threads(cudaStream_t stream, unsigned grid, unsigned block, size_t shared,
                        std::function<void()> thread)
{
    if (grid == 0 || block == 0 || block > 1024 || shared > SHARED_BYTES) {
        fprintf(stderr, "emu: a launch of %u blocks of %u threads with %zu bytes\n", grid, block,
                shared);
        abort();
    }
    of(stream)->post([=] { run_grid(grid, block, thread); }, true);
}

/* In a stream. */
static void wait_for(const std::atomic<bool> &flag)
{
    while (!flag.load(std::memory_order_acquire))
        std::this_thread::yield();
}

/* In the host, which lets the streams run meanwhile. */
static void host_waits_for(const std::atomic<bool> &flag)
{
    host_inside here;
    wait_for(flag);
}

/* The same for so long: what is asked for may wait for another process. */
static void host_waits_for(const std::atomic<bool> &flag, std::chrono::nanoseconds patience)
{
    host_inside here;
    auto until = std::chrono::steady_clock::now() + patience;
    while (!flag.load(std::memory_order_acquire) && std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
}

static const std::chrono::milliseconds QUERY_PATIENCE(5);

/* -- the runtime ------------------------------------------------------------------------------- */

namespace
{
struct region {
    size_t bytes;
    cudaMemoryType type;
};
std::mutex regions_lock;
std::map<uintptr_t, region> regions;

/* What cudaMalloc can give: $EMU_MEMORY_BYTES, else plenty. */
size_t device_bytes()
{
    const char *text = getenv("EMU_MEMORY_BYTES");
    return text ? strtoull(text, nullptr, 10) : (size_t)1 << 34;
}

size_t device_bytes_held()
{
    std::lock_guard<std::mutex> guard(regions_lock);
    size_t sum = 0;
    for (const auto &[address, it] : regions)
        sum += it.type == cudaMemoryTypeDevice ? it.bytes : 0;
    return sum;
}

/* Memory that is not ordered by a stream. */
cudaError_t region_add(void **pointer, size_t bytes, cudaMemoryType type)
{
    cudaError_t error = emu_check_unsafe();
    if (error != cudaSuccess)
        return error;
    allocations++;
    if (type == cudaMemoryTypeDevice && device_bytes_held() + bytes > device_bytes())
        return cudaErrorMemoryAllocation;
    size_t whole = (bytes + 511) / 512 * 512 + 512;
    bool gated = gate.closed && type == cudaMemoryTypeDevice;
    void *made = gated ? gate.take(whole) : aligned_alloc(512, whole);
    if (!made)
        return cudaErrorMemoryAllocation;
    {
        host_inside here;
        memset(made, 0xa5, bytes);
    }
    std::lock_guard<std::mutex> guard(regions_lock);
    regions[(uintptr_t)made] = {bytes, type};
    *pointer = made;
    emu_trace("allocate %zu at %p\n", bytes, made);
    return cudaSuccess;
}

cudaError_t region_drop(void *pointer)
{
    cudaError_t error = emu_check_unsafe();
    if (error != cudaSuccess)
        return error;
    emu_trace("free %p\n", pointer);
    allocations++;
    std::lock_guard<std::mutex> guard(regions_lock);
    if (pointer && !regions.erase((uintptr_t)pointer))
        return cudaErrorInvalidValue;
    if ((char *)pointer < gate.begin || (char *)pointer >= gate.begin + gate.used)
        free(pointer);
    return cudaSuccess;
}
} // namespace

bool emu_is_device_memory(uintptr_t address)
{
    struct cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, (const void *)address);
    return attributes.type == cudaMemoryTypeDevice;
}

extern "C" {

void emu_set_descending(int yes)
{
    descending = yes;
    emu_run_backwards(yes);
}

static thread_local bool selected; /* has this thread called cudaSetDevice? */

int emu_selected(void)
{
    return selected;
}

void emu_set_delays(unsigned seed)
{
    delay_seed = seed;
}

int emu_map(void *address, size_t bytes, int file)
{
    std::lock_guard<std::mutex> guard(gate.lock);
    int access = gate.closed && gate.inside == 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
    if (mmap(address, bytes, access, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        return -1;
    gate.mapped[static_cast<char *>(address)] = bytes;
    std::lock_guard<std::mutex> also(regions_lock);
    regions[(uintptr_t)address] = {bytes, cudaMemoryTypeDevice};
    return 0;
}

void emu_unmap(void *address, size_t bytes)
{
    std::lock_guard<std::mutex> guard(gate.lock);
    gate.mapped.erase(static_cast<char *>(address));
    std::lock_guard<std::mutex> also(regions_lock);
    regions.erase((uintptr_t)address);
    if (mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0) == MAP_FAILED) {
        perror("emu: mmap");
        abort();
    }
}

void emu_gate_memory(void)
{
    if (gate.closed)
        return;
    void *made = mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0);
    if (made == MAP_FAILED) {
        perror("emu: addresses for device memory");
        abort();
    }
    gate.begin = static_cast<char *>(made);
    gate.closed = true;
}

unsigned long long emu_waits(void)
{
    return waits;
}

unsigned long long emu_queries(void)
{
    return queries;
}

unsigned long long emu_allocations(void)
{
    return allocations;
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
    selected = true;
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
        *value = SHARED_BYTES - 1024;
    }
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int)
{
    return cudaSuccess; /* a launch that asks for too much ends the process */
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = device_bytes();
    *free_bytes = *total - device_bytes_held();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    return region_add(pointer, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *pointer)
{
    return region_drop(pointer);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned)
{
    return region_add(pointer, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void *pointer)
{
    return region_drop(pointer);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    std::lock_guard<std::mutex> guard(regions_lock);
    *attributes = cudaPointerAttributes{};
    auto after = regions.upper_bound((uintptr_t)pointer);
    if (after == regions.begin())
        return cudaSuccess;
    auto found = std::prev(after);
    if ((uintptr_t)pointer - found->first < found->second.bytes)
        attributes->type = found->second.type;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind,
                            cudaStream_t stream)
{
    /* As CUDA does: ordinary memory is read before the call returns, and written before it too. */
    struct cudaPointerAttributes source, target;
    cudaPointerGetAttributes(&source, from);
    cudaPointerGetAttributes(&target, to);
    bool ordinary = source.type == cudaMemoryTypeUnregistered ||
                    target.type == cudaMemoryTypeUnregistered;
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
    auto reached = std::make_shared<std::atomic<bool>>(false);
    of(stream)->post([reached] { reached->store(true, std::memory_order_release); }, false);
    host_waits_for(*reached);
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
    auto reached = std::make_shared<std::atomic<bool>>(false);
    event->reached = reached;
    of(stream)->post([reached] { reached->store(true, std::memory_order_release); }, false);
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
    if (gate.closed && event->reached) /* else nothing would ever run */
        host_waits_for(*event->reached, QUERY_PATIENCE);
    bool reached = !event->reached || event->reached->load(std::memory_order_acquire);
    return reached ? cudaSuccess : cudaErrorNotReady;
}

} // extern "C"
