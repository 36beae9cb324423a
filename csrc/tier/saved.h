/* Saved tensors that leave memory in forward and come back in backward.
 *
 * What a unit's forward saves for its backward is a set of arrays. Backward uses the sets in
 * reverse order, so a store moves whole sets between memory and another place, in this schedule:
 *
 *     forward    the set of the unit that ended last stays in memory; the one before it is leaving,
 *                while the next unit runs; all older ones are away
 *     backward   the set in use is in memory; the one before it is returning
 *
 * The place is a disk (saved_disk.c) or, for a remote device, memory of the host (nn/saved_host.c).
 *
 * Every transition happens in a call of the owner: memory is released when the next forward begins
 * (fsdpc_saved_begin), and allocated when a backward needs a set (fsdpc_saved_need). A run
 * therefore uses the same memory whatever the speed of the copies is, and a plan that makes the same
 * calls counts the same bytes.
 *
 * The owner of a set knows the tensors, through fsdpc_saved_ops; the store sees arrays of bytes.
 * A file has no name, and a CRC-32C of each chunk stays in memory, as for a tier.
 *
 * Errors. The first failed read or write names the rank and the unit, and all later calls return
 * it. Threads: calls of several threads wait for each other, and any thread may release a set. A
 * disk has its own threads. A forked child must not use a store.
 */
#ifndef FSDPC_TIER_SAVED_H
#define FSDPC_TIER_SAVED_H

#include "tier/tier.h"

typedef struct fsdpc_saved fsdpc_saved;
typedef struct fsdpc_saved_set fsdpc_saved_set;

/* Moves sets; saved_internal.h has its functions. */
typedef struct fsdpc_saved_mover fsdpc_saved_mover;

typedef struct fsdpc_saved_ops {
    /* The set is about to leave: calls fsdpc_saved_add for each array that may. */
    fsdpc_status (*collect)(void *arg, fsdpc_saved_set *set);
    /* The copies are complete: frees the memory of the arrays. */
    void (*release)(void *arg);
    /* Allocates memory for the arrays again, in the order in which they were added. */
    fsdpc_status (*restore)(void *arg, void **memory_out);
    /* The arrays are in memory, and the set will not leave again; `restored` unless they never
     * left. */
    void (*settle)(void *arg, bool restored);
    /* A part of the set, such as a node, frees its tensors; only called by fsdpc_saved_forget. */
    void (*forget)(void *arg, void *part);
    void (*destroy)(void *arg);
} fsdpc_saved_ops;

/* The store owns the mover, also on failure; NULL: a plan, in which arrays have no contents. `part`
 * (0 to 1) is the fraction of the arrays that leave. */
fsdpc_status fsdpc_saved_open(fsdpc_saved_mover *mover, double part, fsdpc_saved **out);
/* Creates a file in the tier's folder. */
fsdpc_status fsdpc_saved_disk_create(fsdpc_tier *tier, fsdpc_mem *mem, fsdpc_saved_mover **out);
fsdpc_saved *fsdpc_saved_acquire(fsdpc_saved *saved);
void fsdpc_saved_release(fsdpc_saved *saved); /* sets hold a reference too; NULL is fine */
uint64_t fsdpc_saved_away_bytes(const fsdpc_saved *saved); /* in the other place, at most */
size_t fsdpc_saved_staging_bytes(void);                    /* of a disk */

/* A unit's forward begins: releases the memory of the set being written, after waiting for the
 * disk, and begins to write the one that has ended. */
fsdpc_status fsdpc_saved_begin(fsdpc_saved *saved);
/* A unit's forward has ended: creates its set, which leaves at the next fsdpc_saved_begin. On
 * failure, the caller keeps `arg`. */
fsdpc_status fsdpc_saved_end(fsdpc_saved *saved, const char *unit, const fsdpc_saved_ops *ops,
                             void *arg, fsdpc_saved_set **out);

fsdpc_saved_set *fsdpc_saved_set_acquire(fsdpc_saved_set *set);
/* The last holder's release drops the contents, wherever they are; NULL is fine. */
void fsdpc_saved_set_release(fsdpc_saved_set *set);
/* Releases the reference of a part of the set that frees its tensors. */
void fsdpc_saved_forget(fsdpc_saved_set *set, void *part);
/* Only in `collect`. Arrays of less than FSDPC_SAVED_LEAST bytes stay, as does the fraction that is
 * not to leave; returns whether this one leaves. */
enum { FSDPC_SAVED_LEAST = 4096 };
bool fsdpc_saved_add(fsdpc_saved_set *set, void *memory, size_t bytes);

/* Returns once the arrays are in memory, and then begins to read the set that left before. */
fsdpc_status fsdpc_saved_need(fsdpc_saved_set *set);

#endif
