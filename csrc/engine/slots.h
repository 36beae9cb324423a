/* A plan of memory for fulls where a gather moves bytes: a few slots that many units share.
 *
 * Where ranks share a wire, it holds every full and there are no slots.  Elsewhere a rank has its
 * published slices of all fulls, and room for the fulls that exist at a time.  Units of the same
 * size take turns over as many slots as units are full at once.  Each has a window (device.h) on
 * its slot, so that its full has one address for the whole run.  All other units have separate
 * memory: the root, and units that enclose others, keep their full after forward, or run on some
 * ranks only.  So have sizes that few units have, and all units of a device without windows.
 *
 * Every slot is attached to the wire (comm.h), once.  So is separate memory that nearly fills whole
 * granules; it is in a window for that purpose.
 *
 * Sizes alone decide which units share, so every rank decides alike, as gathers need.
 */
#ifndef FSDPC_ENGINE_SLOTS_H
#define FSDPC_ENGINE_SLOTS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fsdpc_slot_want {
    size_t bytes; /* of the unit's full */
    bool alone;   /* it never shares */
} fsdpc_slot_want;

/* `granule` in plans made where no GPU is there to say it: what NVIDIA's driver maps at a time. */
#define FSDPC_SLOT_GRANULE ((size_t)2 << 20)

/* Pure data: the slot of each unit, -1 for its own memory; returns how many slots there are.
 * `per_class` slots serve all units of one size; memory comes in multiples of `granule`, 0 where
 * nothing can be shared. */
int fsdpc_slots_assign(const fsdpc_slot_want *wants, int n, int per_class, size_t granule,
                       int *slots_out);

/* What they take with the memory of those that share nothing. */
size_t fsdpc_slots_bytes(const fsdpc_slot_want *wants, int n, int per_class, size_t granule,
                         const int *slots);

/* Whether a unit's own memory is a window too, so that a transport can prepare it: granules
 * that are filled but for a little. */
bool fsdpc_slots_is_windowed(size_t bytes, size_t granule);

#endif
