/* Unsharded parameters: how each unit's are produced, and their memory.
 *
 * A root chooses one way for all its units, once, as a table of functions:
 *
 *     fsdpc_unsharded_shared    ranks share a parameter buffer; a gather copies nothing
 *     fsdpc_unsharded_file      the same parameter buffer, in a file on a disk
 *     fsdpc_unsharded_slots     a gather moves bytes into slots that units share (slots.h)
 *     fsdpc_unsharded_lent      a shard group of one rank casts its masters into memory of a
 *                               frontend
 *     fsdpc_unsharded_private   no-alias mode: the unit's own pages, unreadable while it is SHARDED
 *
 * To add another method, add another table. The simplest, unsharded_shared.c, is the template.
 *
 * The address of an unsharded parameter does not change between place and remove, unless a frontend
 * provides its memory. place and remove announce it to base/fault.h, so that the report of a bad
 * write, or of a read after reshard, names rank, unit and parameter.
 *
 * Copy-in writes a rank's own slices, after all ranks have arrived in an epoch and before this rank
 * reports its copy-in (epoch.h). If the unit has a codec, it then rounds them: modules of every rank
 * compute with what the codec would decode, even if nothing travels. A gather between hosts
 * encodes the rounded slices without loss, so the values do not depend on the number of ranks or
 * hosts. Modules may read the parameters between reveal and drop.
 */
#ifndef FSDPC_ENGINE_UNSHARDED_H
#define FSDPC_ENGINE_UNSHARDED_H

#include "engine/root_internal.h"

struct fsdpc_unsharded_ops {
    const char *name;
    bool at_use; /* each use casts the masters: nothing is copied in */

    /* Once per root. */
    fsdpc_status (*create)(fsdpc_root *root, const bool *encloses); /* collective; NULL: needs only
                                                                     * the parameter buffer */
    fsdpc_status (*place)(fsdpc_unit *unit,
                          fsdpc_unit_group *group); /* sets `unsharded` and `target` */
    void (*remove)(fsdpc_unit *unit); /* also for a unit that was not placed; NULL: does nothing */

    /* Before a gather. */
    bool (*has_room)(const fsdpc_unit *unit);    /* without evicting another; NULL: always */
    fsdpc_status (*make_room)(fsdpc_unit *unit); /* collective; NULL: it always has room */

    /* reveal is called before the first reader, and hide after the last one. */
    fsdpc_status (*reveal)(fsdpc_unit *unit); /* NULL: gathered memory is readable */
    void (*hide)(fsdpc_unit *unit);           /* cannot fail; NULL: it stays readable */

    /* Called after this rank's copy-in; NULL if only this rank can change the slices. */
    void (*seal)(fsdpc_unit *unit);
};

extern const fsdpc_unsharded_ops fsdpc_unsharded_shared, fsdpc_unsharded_file,
    fsdpc_unsharded_slots, fsdpc_unsharded_private, fsdpc_unsharded_frontend;

/* A `place` function for unsharded parameters that modules read in the parameter buffer. */
fsdpc_status fsdpc_unsharded_place_in_param_buffer(fsdpc_unit *unit, fsdpc_unit_group *group);

/* Call when the parameter buffer exists and all units are SHARDED. Collective. */
fsdpc_status fsdpc_unsharded_create(fsdpc_root *root, const bool *encloses);
void fsdpc_unsharded_remove(
    fsdpc_unit *unit); /* also for a unit that was not placed, or only partly */

/* Allocates memory for each unit's own slices of unsharded parameters, if gathers move bytes. */
fsdpc_status fsdpc_unsharded_own_slices(fsdpc_root *root);

static inline size_t fsdpc_unsharded_bytes(const fsdpc_unit_group *group)
{
    return group->plan->unsharded_numel * fsdpc_dtype_bytes(group->param_dtype);
}

/* Returns a group's offset in the memory of its unit's unsharded parameters. */
static inline size_t fsdpc_unsharded_offset(const fsdpc_unit *unit, const fsdpc_unit_group *group)
{
    return group->param_buffer_offset - unit->groups[0].param_buffer_offset;
}

/* Returns where this rank copies in its slice of a band, starting at element `at` of the shard. */
static inline unsigned char *fsdpc_unsharded_own_slice(const fsdpc_unit *unit,
                                                       const fsdpc_unit_group *group,
                                                       const fsdpc_slice *band, size_t at)
{
    size_t element = fsdpc_dtype_bytes(group->param_dtype);
    if (group->own_slices)
        return group->own_slices + at * element;
    return unit->root->param_buffer->write + group->param_buffer_offset +
           fsdpc_slice_unsharded(band, fsdpc_unit_rank(unit), at) * element;
}

/* Casts masters into this rank's own slices and stores the number of bytes in *bytes_out. */
fsdpc_status fsdpc_unsharded_cast(fsdpc_unit *unit, size_t *bytes_out);

static inline fsdpc_codec_rows fsdpc_unsharded_rows(const fsdpc_unit_group *group,
                                                    const fsdpc_slice *band)
{
    return (fsdpc_codec_rows){group->param_dtype, band->row, band->numel};
}

/* Returns whether a codec rounds this band. */
static inline bool fsdpc_unsharded_rounds(fsdpc_codec codec, const fsdpc_unit_group *group,
                                          const fsdpc_slice *band)
{
    fsdpc_codec_rows rows = fsdpc_unsharded_rows(group, band);
    return fsdpc_codec_shortens(codec, &rows);
}

/* Rounds this rank's own slices as the unit's codec does. */
fsdpc_status fsdpc_unsharded_round(fsdpc_unit *unit);

/* Call when the copy-in is complete. */
static inline fsdpc_status fsdpc_unsharded_seal(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unsharded_round(unit));
    if (unit->root->unsharded->seal)
        unit->root->unsharded->seal(unit);
    return FSDPC_OK;
}

/* Returns whether the unit can be gathered now without evicting another unit. */
static inline bool fsdpc_unsharded_has_room(const fsdpc_unit *unit)
{
    const fsdpc_unsharded_ops *ops = unit->root->unsharded;
    return !ops->has_room || ops->has_room(unit);
}

/* Waits for the gather in flight, or orders main's work after it (order.h). */
fsdpc_status fsdpc_unsharded_settle(fsdpc_unit *unit);

/* Reshards the unit unless it is held; posted operations stay in flight. */
void fsdpc_unsharded_drop(fsdpc_unit *unit);

#endif
