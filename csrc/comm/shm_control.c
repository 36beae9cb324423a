/* Implements the bell, naps and the poison message. */
#include "comm/shm_control.h"

#include <stdio.h>
#include <string.h>

#include "base/size.h"
#include "comm/shm_world.h"

static size_t slots_bytes(int size)
{
    return fsdpc_round_up(sizeof(fsdpc_shm_control) + (size_t)size * sizeof(fsdpc_shm_slot), 4096);
}

size_t fsdpc_shm_control_bytes(int size)
{
    return slots_bytes(size) + (size_t)size * 2 * FSDPC_SHM_CHUNK;
}

unsigned char *fsdpc_shm_control_staging(fsdpc_shm_control *control, int size, int rank,
                                         uint64_t step)
{
    return (unsigned char *)control + slots_bytes(size) +
           ((size_t)rank * 2 + (step & 1)) * FSDPC_SHM_CHUNK;
}

void fsdpc_shm_ring_bell(fsdpc_shm_control *control)
{
    atomic_fetch_add_explicit(&control->bell, 1, memory_order_release);
    fsdpc_futex_wake(&control->bell);
}

void fsdpc_shm_nap_take(fsdpc_shm_control *control, fsdpc_nap *nap, int64_t max_ns)
{
    if (!nap->counted) {
        nap->counted = true;
        atomic_fetch_add_explicit(&control->sleepers, 1, memory_order_seq_cst);
    } else {
        fsdpc_futex_wait(&control->bell, nap->seen, max_ns);
    }
    nap->seen = atomic_load_explicit(&control->bell, memory_order_seq_cst);
}

void fsdpc_shm_nap_end(fsdpc_shm_control *control, fsdpc_nap *nap)
{
    if (nap->counted)
        atomic_fetch_sub_explicit(&control->sleepers, 1, memory_order_relaxed);
    nap->counted = false;
}

void fsdpc_shm_poison_set(fsdpc_shm_control *control, int rank, fsdpc_status status,
                          const char *text)
{
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&control->poison, &none, 1))
        return;
    atomic_store_explicit(&control->poison_status, (int32_t)status, memory_order_relaxed);
    atomic_store_explicit(&control->poison_rank, rank, memory_order_relaxed);
    fsdpc_shm_text_store(control->poison_text, FSDPC_SHM_POISON_WORDS, text);
    atomic_store_explicit(&control->poison, 2,
                          memory_order_release); /* pairs with poison_get's acquire */
    fsdpc_shm_ring_bell(control);
}

bool fsdpc_shm_poison_get(fsdpc_shm_control *control, int *rank_out, fsdpc_status *status_out,
                          char *text, size_t bytes)
{
    /* A message that is still being written does not count yet. Its writer either finishes within a
     * few stores or has died between them; callers that keep waiting find out which. */
    if (!fsdpc_shm_poisoned(control))
        return false;
    *status_out = (fsdpc_status)atomic_load_explicit(&control->poison_status, memory_order_relaxed);
    *rank_out = atomic_load_explicit(&control->poison_rank, memory_order_relaxed);
    fsdpc_shm_text_load(control->poison_text, FSDPC_SHM_POISON_WORDS, text, bytes);
    return true;
}
