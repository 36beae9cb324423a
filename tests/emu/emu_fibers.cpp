/* A block's threads as fibers of the stream's thread.
 *
 * A stream's thread keeps as many fibers as its largest block had threads. It resumes them in
 * ascending or descending order; a fiber comes back when its thread has ended or waits in a barrier
 * that others have not reached. A warp runs as far ahead of the others as barriers let it, so that
 * what a barrier should have kept apart meets. A round in which nobody got further is an error of
 * the kernel.
 */
#include "emu_fibers.h"

#include <atomic>
#include <memory>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "cuda_runtime_api.h"
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

enum { WARP_THREADS = 32, STACK_BYTES = 256 << 10, OFFER_BYTES = 64 };

static std::atomic<int> descending;

void emu_fibers_descend(bool yes)
{
    descending = yes;
}

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

#if defined(__x86_64__) && !defined(EMU_TSAN) && !defined(EMU_ASAN)

/* Where a fiber, or the scheduler, goes on: its stack, with the registers that a call keeps on top.
 * swapcontext would make two system calls, but it is what sanitizers and other processors have. */
struct place {
    void **top;

    void begin(char *stack, size_t bytes, void (*entry)())
    {
        top = reinterpret_cast<void **>(stack + bytes) - 8;
        top[6] = reinterpret_cast<void *>(entry);
    }
};

extern "C" void emu_change_stacks(void ***from, void **to);
asm(".local emu_change_stacks\n"
    "emu_change_stacks:\n"
    "  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
    "  ret\n");

void change_places(place *from, const place *to)
{
    emu_change_stacks(&from->top, to->top);
}

#else

struct place {
    ucontext_t context;

    void begin(char *stack, size_t bytes, void (*entry)())
    {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = NULL;
        makecontext(&context, entry, 0);
    }
};

void change_places(place *from, const place *to)
{
    swapcontext(&from->context, &to->context);
}

#endif

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
    made->at.begin(static_cast<char *>(made->stack), STACK_BYTES, fiber_main);
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
        for (const auto &group : f->copies)
            if (!group.empty())
                give_up("a thread ends before its copies to shared memory do");
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
    memset(block->shared.get(), 0xa5, EMU_SHARED_BYTES);
    while (left)
        if (!run_round(block, threads, &left))
            give_up("threads wait in barriers that others do not reach");
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

void emu_run_grid(unsigned grid, unsigned threads, const std::function<void()> &thread)
{
    thread_local block_state block;
    if (!block.shared)
        block.shared.reset(new unsigned char[EMU_SHARED_BYTES]);
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
