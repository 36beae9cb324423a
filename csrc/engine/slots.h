/* A memory plan for unsharded parameters if gathers move bytes: a few slots that many units share.
 *
 * If ranks share a parameter buffer, it contains all of them, and slots do not exist.  Otherwise a
 * rank has its own slices of all unsharded parameters, and memory for the unsharded parameters that
 * exist at the same time.  Units of the same size take turns with a few slots, one for each unit
 * that is unsharded at the same time.  Each has a window (device.h) on its slot, so that its
 * parameters have one address for the whole run.  Other units have separate memory: the root, units
 * that enclose others, units that stay unsharded after forward, and units that run only on some
 * ranks.  The same holds for units of a rare size, and for all units of a device without windows.
 *
 * Every slot is attached to the parameter buffer (comm.h) once.  Separate memory that nearly fills
 * whole granules is attached too, and is in a window for that purpose.
 *
 * Only sizes decide which units share, so every rank makes the same choice, as gathers require.
 */
#ifndef FSDPC_ENGINE_SLOTS_H
#define FSDPC_ENGINE_SLOTS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fsdpc_slot_want {
    size_t bytes; /* size of the unit's unsharded parameters */
    bool alone;   /* never shares */
    /* Written by fsdpc_slots_assign: */
    int slot;           /* -1: its own memory */
    size_t block_bytes; /* of its slot or its own memory */
    int n_blocks;       /* how many of them; slots are counted with the first unit of their size */
} fsdpc_slot_want;

/* The `granule` for plans made without a GPU to query: that of NVIDIA's driver. */
#define FSDPC_SLOT_GRANULE ((size_t)2 << 20)

/* Assigns memory to each unit; returns the number of slots.  `per_class` slots serve all units of
 * one size; memory comes in multiples of `granule`, 0 if memory cannot be shared. */
int fsdpc_slots_assign(fsdpc_slot_want *wants, int n, int per_class, size_t granule);

/* Returns whether a unit's own memory is also a window, so that a communicator can prepare it.  It
 * is if it almost fills its granules. */
bool fsdpc_slots_is_windowed(size_t bytes, size_t granule);

#endif
