/* The gate between the host and the emulated device's memory.
 *
 * A GPU's memory is out of the host's reach, this processor's is not, and a host that reads a
 * tensor by a pointer would work here and end the process there. Once emu_gate_memory was called,
 * device memory lies in pages that nobody may touch, but for the time that the host spends inside a
 * call that waits for the device; and only then streams run what touches memory. So the mistake
 * ends the process here too, every time and at its place, and kernels run as late as a GPU may run
 * them.
 */
#ifndef FSDPC_TESTS_EMU_EMU_GATE_H
#define FSDPC_TESTS_EMU_EMU_GATE_H

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum : size_t { ARENA_BYTES = (size_t)64 << 30 }; /* of addresses; they are not used again */

struct memory_gate {
    std::mutex lock;
    std::condition_variable changed;
    std::atomic<bool> closed{false}; /* false: there is no gate */
    char *begin = nullptr;
    size_t used = 0;
    int inside = 0;  /* host threads in a call that waits */
    int running = 0; /* streams that touch memory now */
    bool stalled = false;
    struct mapping {
        size_t bytes;
        bool writable;
    };
    std::map<char *, mapping> mapped; /* by the driver, elsewhere */

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
            protect(range.first, range.second.bytes,
                    access & (range.second.writable ? ~0 : ~PROT_WRITE));
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
        changed.wait(guard, [this] { return inside > 0 && !stalled; });
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

extern memory_gate &emu_gate;

/* For as long as a host thread waits for the device. */
struct host_inside {
    host_inside()
    {
        emu_gate.host_enters();
    }
    ~host_inside()
    {
        emu_gate.host_leaves();
    }
};

#endif
