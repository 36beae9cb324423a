/* Reference counts. */
#ifndef FSDPC_BASE_REF_H
#define FSDPC_BASE_REF_H

#include <stdatomic.h>
#include <stdbool.h>

/* Acquires an object to which the caller has no reference; returns false if the last reference is
 * gone and its release is in progress. The caller must prevent the release from finishing. */
static inline bool fsdpc_ref_try_acquire(_Atomic int *refs)
{
    int seen = atomic_load_explicit(refs, memory_order_relaxed);
    while (seen > 0)
        if (atomic_compare_exchange_weak_explicit(refs, &seen, seen + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return true;
    return false;
}

#endif
