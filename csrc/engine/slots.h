/* The memory plan for unsharded parameters when gathers move bytes: many units share a few slots.
 *
 * If ranks share a parameter buffer, it contains all unsharded parameters, and there are no slots.
 * Otherwise each rank stores its own slices of all unsharded parameters, and has memory only for
 * the units that are unsharded at the same time. Units of the same size take turns using a few
 * slots, one for each unit that may be unsharded at the same time. Each unit has a window
 * (device.h) onto its slot, so its parameters keep the same addresses for the whole run. Some units
 * have separate memory: the root, units that enclose others, units that stay unsharded after
 * forward, and units that run only on some ranks. Units of an uncommon size also have separate
 * memory, as do all units on a device without windows.
 *
 * Every slot is attached to the parameter buffer (comm.h) once. Separate memory that almost fills
 * whole granules is attached too; to make this possible, it is placed in a window.
 *
 * Sharing depends only on size, so every rank makes the same choice, which gathers require.
 */
#ifndef FSDPC_ENGINE_SLOTS_H
#define FSDPC_ENGINE_SLOTS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fsdpc_slot_want {
    size_t bytes;  /* size of the unit's unsharded parameters */
    bool unshared; /* never shares */
    /* Written by fsdpc_slots_assign: */
    int slot;           /* -1: its own memory */
    size_t block_bytes; /* of its slot or its own memory */
    int n_blocks;       /* how many of them; slots are counted with the first unit of their size */
} fsdpc_slot_want;

/* The `granule` for plans made without a GPU to query; NVIDIA's driver uses this value. */
#define FSDPC_SLOT_GRANULE ((size_t)2 << 20)

/* Assigns memory to each unit; returns the number of slots. `per_class` slots serve all units of
 * one size; memory comes in multiples of `granule`, 0 if memory cannot be shared. */
int fsdpc_slots_assign(fsdpc_slot_want *wants, int n, int per_class, size_t granule);

/* Returns whether a unit's own memory is also a window, so that a communicator can prepare it. It
 * is if the memory almost fills its granules. */
bool fsdpc_slots_is_windowed(size_t bytes, size_t granule);

#endif
