/* Implements the table of guarded descriptors and the fork handler that closes them in a child.
 *
 * The handler runs in the child before fork returns. The child has one thread, and locks may be
 * held by threads that no longer exist, so the handler only performs loads, stores and closes. A
 * slot holds the descriptor plus one, or 0 if it is free. Children inherit any descriptors that do
 * not fit in the table.
 */
#include "comm/fork_guard.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

enum { SLOTS = 2048 };

static _Atomic int guarded[SLOTS];
static _Atomic uint32_t forks;
static pthread_once_t installed = PTHREAD_ONCE_INIT;

static void close_in_child(void)
{
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
    for (size_t i = 0; i < SLOTS; i++) {
        int held = atomic_exchange_explicit(&guarded[i], 0, memory_order_relaxed);
        if (held)
            close(held - 1);
    }
}

static void install(void)
{
    pthread_atfork(NULL, NULL, close_in_child);
}

void fsdpc_fork_guard(int fd)
{
    if (fd < 0)
        return;
    pthread_once(&installed, install);
    for (size_t i = 0; i < SLOTS; i++) {
        int empty = 0;
        if (atomic_compare_exchange_strong(&guarded[i], &empty, fd + 1))
            return;
    }
}

void fsdpc_fork_close(int fd)
{
    if (fd < 0)
        return;
    for (size_t i = 0; i < SLOTS; i++) {
        int held = fd + 1;
        if (atomic_compare_exchange_strong(&guarded[i], &held, 0))
            break;
    }
    close(fd);
}

uint32_t fsdpc_fork_count(void)
{
    return atomic_load_explicit(&forks, memory_order_relaxed);
}
