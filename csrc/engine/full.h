/* Fulls: how a unit's unsharded parameters are made, and their memory.
 *
 * A root chooses one way for all its units, once, as a table of functions:
 *
 *     fsdpc_full_shared    ranks share a parameter buffer that holds every full; a gather copies nothing
 *     fsdpc_full_file      the same parameter buffer, in a file on a disk
 *     fsdpc_full_moved     a gather moves bytes into slots that units share (slots.h)
 *     fsdpc_full_lent      a shard group of one rank casts its masters into memory of a
 *                          frontend
 *     fsdpc_full_private   no-alias mode: the unit's own pages, unreadable while it is SHARDED
 *
 * A new way is a new table.  The simplest, full_shared.c, is the template.
 *
 * The address of a full is fixed from place to remove, unless it is lent. place and remove announce
 * it to base/fault.h, so that the report of a bad write, or of a read after reshard, names rank,
 * unit and parameter.
 *
 * Publishing writes a rank's own slices, after all ranks have arrived in an epoch and before the
 * rank itself publishes (epoch.h).  Modules read between reveal and drop.
 */
#ifndef FSDPC_ENGINE_FULL_H
#define FSDPC_ENGINE_FULL_H

#include "engine/root_internal.h"

struct fsdpc_full_ops {
    const char *name;
    bool at_use; /* each use casts the masters: nothing is published */

    /* Once per root. */
    fsdpc_status (*create)(fsdpc_root *root, const bool *encloses); /* collective; NULL: needs only
                                                                     * the parameter buffer */
    fsdpc_status (*place)(fsdpc_unit *unit, fsdpc_unit_group *group); /* sets `full` and `target` */
    void (*remove)(fsdpc_unit *unit); /* also for a unit that was not placed; NULL: does nothing */

    /* Before a gather. */
    bool (*has_room)(const fsdpc_unit *unit);    /* without evicting another; NULL: always */
    fsdpc_status (*make_room)(fsdpc_unit *unit); /* collective; NULL: it always has room */

    /* Before the first reader, and after the last one. */
    fsdpc_status (*reveal)(fsdpc_unit *unit); /* NULL: gathered memory is readable */
    void (*hide)(fsdpc_unit *unit);           /* cannot fail; NULL: it stays readable */

    /* After this rank's slices were published; NULL: only this rank can change them. */
    void (*seal)(fsdpc_unit *unit);
};

extern const fsdpc_full_ops fsdpc_full_shared, fsdpc_full_file, fsdpc_full_moved,
    fsdpc_full_private, fsdpc_full_lent;

/* A `place` function for fulls that modules read in the parameter buffer. */
fsdpc_status fsdpc_full_place_in_param_buffer(fsdpc_unit *unit, fsdpc_unit_group *group);

/* Call when the parameter buffer exists; units are SHARDED.  Collective. */
fsdpc_status fsdpc_full_create(fsdpc_root *root, const bool *encloses);
void fsdpc_full_remove(fsdpc_unit *unit); /* also for a unit that was not placed, or only partly */

/* Allocates memory for each unit's own slices of fulls, if gathers move bytes. */
fsdpc_status fsdpc_full_own_slices(fsdpc_root *root);

static inline size_t fsdpc_full_bytes(const fsdpc_unit_group *group)
{
    return group->plan->full_numel * fsdpc_dtype_bytes(group->param_dtype);
}

/* Returns a group's offset in the memory of its unit's full. */
static inline size_t fsdpc_full_offset(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return group->param_buffer_offset - unit->groups[0].param_buffer_offset;
}

/* Returns where this rank publishes its slice of a band, starting at element `at` of the shard. */
static inline unsigned char *fsdpc_full_own_slice(const fsdpc_unit *unit,
                                                  const fsdpc_unit_group *group,
                                                  const fsdpc_slice *band, size_t at)
{
    size_t element = fsdpc_dtype_bytes(group->param_dtype);
    if (group->own_slices)
        return group->own_slices + at * element;
    return unit->root->param_buffer->write + group->param_buffer_offset +
           fsdpc_slice_full(band, fsdpc_unit_rank(unit), at) * element;
}

/* Casts masters into this rank's published slices; writes `bytes_out` bytes. */
fsdpc_status fsdpc_full_cast(fsdpc_unit *unit, size_t *bytes_out);

/* Call when the published slices are complete. */
static inline void fsdpc_full_seal(fsdpc_unit *unit)
{
    if (unit->root->full->seal)
        unit->root->full->seal(unit);
}

/* Returns whether the unit can be gathered now without evicting another. */
static inline bool fsdpc_full_has_room(const fsdpc_unit *unit)
{
    const fsdpc_full_ops *ops = unit->root->full;
    return !ops->has_room || ops->has_room(unit);
}

/* Waits for the gather in flight, or orders main's work after it (order.h). */
fsdpc_status fsdpc_full_settle(fsdpc_unit *unit);

/* Reshards the unit unless it is held; posted operations stay in flight. */
void fsdpc_full_drop(fsdpc_unit *unit);

#endif
