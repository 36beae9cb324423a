/* Fulls: how the whole parameters of a unit come into being, and where they lie.
 *
 * A root chooses one way for all its units, once, by a table:
 *
 *     fsdpc_full_shared    ranks share a wire that holds every full; a gather copies nothing
 *     fsdpc_full_file      the same wire, in a file on a disk
 *     fsdpc_full_moved     a gather moves bytes, into slots that units share (slots.h)
 *     fsdpc_full_lent      a rank alone in its shard group casts its masters, into memory of a
 *                          front door
 *     fsdpc_full_private   no-alias mode: pages of the unit's own, unreadable while it is SHARDED
 *
 * Another way is another table.  The simplest, full_shared.c, is the
 * template.
 *
 * The address of a full is fixed from place to remove, unless it is lent.  Both announce it to
 * base/fault.h, so that a write to a full, or a read of one that was given up, names rank, unit and
 * parameter.
 *
 * Publishing writes a rank's own slices, between the arrival of all ranks in an epoch and its own
 * publication (epoch.h).  Modules read between reveal and drop.
 */
#ifndef FSDPC_ENGINE_FULL_H
#define FSDPC_ENGINE_FULL_H

#include "engine/root_internal.h"

struct fsdpc_full_ops {
    const char *name;
    bool at_use; /* masters are cast where they are used: nothing is published */

    /* Once for each root. */
    fsdpc_status (*create)(fsdpc_root *root, const bool *encloses); /* collective; NULL: no room is
                                                                       needed but the wire */
    fsdpc_status (*place)(fsdpc_unit *unit, fsdpc_unit_group *group); /* sets `full` and `target` */
    void (*remove)(fsdpc_unit *unit); /* also of a unit that was not placed; NULL: nothing */

    /* Before a gather. */
    bool (*has_room)(const fsdpc_unit *unit);    /* without taking another's; NULL: always */
    fsdpc_status (*make_room)(fsdpc_unit *unit); /* collective; NULL: it is there */

    /* Before the first reader, and behind the last one. */
    fsdpc_status (*reveal)(fsdpc_unit *unit); /* NULL: gathered memory is readable */
    void (*hide)(fsdpc_unit *unit);           /* cannot fail; NULL: it stays readable */

    /* After this rank's slices were published; NULL: nobody else can change them. */
    void (*seal)(fsdpc_unit *unit);
};

extern const fsdpc_full_ops fsdpc_full_shared, fsdpc_full_file, fsdpc_full_moved,
    fsdpc_full_private, fsdpc_full_lent;

/* `place` of fulls that modules read where the wire has them. */
fsdpc_status fsdpc_full_place_in_wire(fsdpc_unit *unit, fsdpc_unit_group *group);

/* When the wire exists; units are SHARDED.  Collective. */
fsdpc_status fsdpc_full_create(fsdpc_root *root, const bool *encloses);
void fsdpc_full_remove(fsdpc_unit *unit); /* also of a unit that was not placed, or half */

/* Gives every unit memory for its own slices of fulls that gathers move. */
fsdpc_status fsdpc_full_own_slices(fsdpc_root *root);

static inline size_t fsdpc_full_bytes(const fsdpc_unit_group *group)
{
    return group->plan->full_numel * fsdpc_dtype_bytes(group->wire_dtype);
}

/* Where a group begins in the memory of its unit's full. */
static inline size_t fsdpc_full_offset(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return group->wire_offset - unit->groups[0].wire_offset;
}

/* Where this rank's slice of a band is published: its elements from `at` on, counted in the shard.
 */
static inline unsigned char *fsdpc_full_published(const fsdpc_unit *unit,
                                                  const fsdpc_unit_group *group,
                                                  const fsdpc_slice *band, size_t at)
{
    size_t element = fsdpc_dtype_bytes(group->wire_dtype);
    if (group->published)
        return group->published + at * element;
    return unit->root->wire->write + group->wire_offset +
           fsdpc_slice_full(band, fsdpc_unit_rank(unit), at) * element;
}

/* Casts masters to where this rank's slices are published; `bytes_out` are written. */
fsdpc_status fsdpc_full_cast(fsdpc_unit *unit, size_t *bytes_out);

/* What was published is complete. */
static inline void fsdpc_full_seal(fsdpc_unit *unit)
{
    if (unit->root->full->seal)
        unit->root->full->seal(unit);
}

/* Whether the unit could be gathered now without taking memory from another. */
static inline bool fsdpc_full_has_room(const fsdpc_unit *unit)
{
    const fsdpc_full_ops *ops = unit->root->full;
    return !ops->has_room || ops->has_room(unit);
}

/* Waits for the gather in flight, or puts main's work to come behind it (order.h). */
fsdpc_status fsdpc_full_settle(fsdpc_unit *unit);

/* -> SHARDED, unless it is held; posted operations stay in flight. */
void fsdpc_full_drop(fsdpc_unit *unit);

#endif
