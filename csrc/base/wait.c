/* The clock and the futex calls that every wait uses.
 *
 * The futexes are shared (non-private), so the kernel keys them by physical page. Two processes
 * that map the same memfd at different addresses, or two aliases within one process, therefore
 * share a futex. A wait may return early for any reason, such as a signal, a spurious wake-up or a
 * changed word. Callers loop on their own condition with their own deadline, and call the interrupt
 * callback between iterations.
 */
#include "base/wait.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t fsdpc_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void fsdpc_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t max_ns)
{
    if (max_ns <= 0)
        return;
    struct timespec limit = {.tv_sec = (time_t)(max_ns / 1000000000),
                             .tv_nsec = (long)(max_ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, NULL, 0);
}

void fsdpc_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
