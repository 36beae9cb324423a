/* Time, deadlines and interrupts.
 *
 * Every wait in the library has a deadline, and calls the interrupt callback (Python's signal
 * check) at least every 100 ms, so that Ctrl-C works.
 */
#ifndef FSDPC_BASE_WAIT_H
#define FSDPC_BASE_WAIT_H

#include <stdint.h>
#if !defined(__cplusplus)
#include <stdatomic.h>
#endif

#include "base/status.h"

int64_t fsdpc_clock_ns(void); /* monotonic */

/* Returns FSDPC_OK to continue, or an error (FSDPC_ERR_INTERRUPT) to end the wait. It is called
 * without any lock held. */
typedef fsdpc_status (*fsdpc_interrupt_fn)(void *arg);

typedef struct fsdpc_interrupt {
    fsdpc_interrupt_fn fn; /* may be NULL */
    void *arg;
} fsdpc_interrupt;

static inline fsdpc_status fsdpc_interrupt_check(const fsdpc_interrupt *interrupt)
{
    return interrupt && interrupt->fn ? interrupt->fn(interrupt->arg) : FSDPC_OK;
}

#if !defined(__cplusplus) /* kernels are C++ and include this header through device.h */
/* Sleeps while *word == expected, for at most max_ns; may wake spuriously. Works across
 * processes. */
void fsdpc_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t max_ns);
void fsdpc_futex_wake(_Atomic uint32_t *word);
#endif

static inline void fsdpc_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
