/* The control page of a group, through which its ranks see each other's state.
 *
 * It is one segment that every rank maps with write access. It contains a bell (which wakes
 * sleepers), the poison message, one slot per rank and, after the slots, two staging chunks per
 * rank for collectives that copy. Each slot is written only by its own rank.
 *
 * Waking. A thread that is about to sleep first increments `sleepers` and reads `bell`. It then
 * checks its condition again, and sleeps while `bell` is unchanged. A rank that has written
 * something rings the bell: it issues a full fence and, only if a rank sleeps, increments `bell`
 * and makes the system call. Either the sleeper's last check sees the write, or the writer sees the
 * sleeper.
 */
#ifndef FSDPC_COMM_SHM_CONTROL_H
#define FSDPC_COMM_SHM_CONTROL_H

#include <stdatomic.h>

#include "comm/comm.h"
#include "comm/shm_segment.h"

enum {
    FSDPC_SHM_RING = 256,         /* fingerprints kept per rank */
    FSDPC_SHM_CHUNK = 128 * 1024, /* bytes staged at a time */
    FSDPC_SHM_WHAT_WORDS = 8,
    FSDPC_SHM_POISON_WORDS = 60,
};

/* One operation as peers see it; its words are atomic because a slow peer may read them while they
 * are overwritten.
 */
typedef struct fsdpc_shm_entry {
    _Atomic uint64_t kind; /* together with dtype and unit */
    _Atomic uint64_t bytes;
    _Atomic uint64_t epoch;
    _Atomic uint64_t detail; /* hash of everything else that must agree */
    _Atomic uint64_t chain;  /* hash of this entry and all before it */
    _Atomic uint64_t what[FSDPC_SHM_WHAT_WORDS];
} fsdpc_shm_entry;

typedef struct fsdpc_shm_slot {
    _Atomic uint64_t posted __attribute__((aligned(128))); /* operations posted so far */
    _Atomic uint64_t step;                                 /* chunks staged so far */
    _Atomic uint32_t left;                                 /* has shut down */
    fsdpc_shm_entry ring[FSDPC_SHM_RING] __attribute__((aligned(128)));
} fsdpc_shm_slot;

typedef struct fsdpc_shm_control {
    _Atomic uint32_t bell __attribute__((aligned(128)));
    _Atomic uint32_t sleepers;
    _Atomic uint32_t poison __attribute__((aligned(128))); /* 0: none, 1: being written, 2:
                                                            * complete */
    _Atomic int32_t poison_status, poison_rank;
    _Atomic uint64_t poison_text[FSDPC_SHM_POISON_WORDS];
    fsdpc_shm_slot slots[] __attribute__((aligned(128)));
} fsdpc_shm_control;

size_t fsdpc_shm_control_bytes(int size);
/* Returns the memory that `rank` uses as its staging area for `step`. */
unsigned char *fsdpc_shm_control_staging(fsdpc_shm_control *control, int size, int rank,
                                         uint64_t step);

void fsdpc_shm_ring_bell(fsdpc_shm_control *control); /* unconditionally */

/* Call after a store that a peer may be waiting for. */
static inline void fsdpc_shm_wake(fsdpc_shm_control *control)
{
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the increment of `sleepers` */
    if (__builtin_expect(atomic_load_explicit(&control->sleepers, memory_order_relaxed) != 0, 0))
        fsdpc_shm_ring_bell(control);
}

/* The first call only counts the thread, which then checks its condition again. */
void fsdpc_shm_nap_take(fsdpc_shm_control *control, fsdpc_nap *nap, int64_t max_ns);
void fsdpc_shm_nap_end(fsdpc_shm_control *control, fsdpc_nap *nap);

/* Sets the reason unless one is already set. Never blocks. */
void fsdpc_shm_poison_set(fsdpc_shm_control *control, int rank, fsdpc_status status,
                          const char *text);
/* Returns true if a poison message exists. */
bool fsdpc_shm_poison_get(fsdpc_shm_control *control, int *rank_out, fsdpc_status *status_out,
                          char *text, size_t bytes);

static inline bool fsdpc_shm_poisoned(fsdpc_shm_control *control)
{
    return atomic_load_explicit(&control->poison, memory_order_acquire) == 2;
}

#endif
