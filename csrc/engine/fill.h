/* Fills reduce buffers. Only reduce.c uses this file, except that sched.c drops buffers, lends them
 * and notes what kernels filled.
 *
 * A unit takes a buffer at its first gradient and returns it when its reduction is complete and all
 * peers have read it. Two pooled buffers serve units that close during backward. A unit gets its
 * own buffer if open units are filling both pooled ones, or if it keeps gradients over several
 * backwards. A rank therefore never waits for a buffer while it holds another.
 *
 * A single rank needs no buffer unless gradients are added to earlier ones: kernels write directly
 * into the shard.
 */
#ifndef FSDPC_ENGINE_FILL_H
#define FSDPC_ENGINE_FILL_H

#include "engine/root_internal.h"

/* Call when a root is created, with the `encloses` array passed to fsdpc_unsharded_create. */
fsdpc_status fsdpc_fill_create_buffers(fsdpc_root *root, const bool *encloses);

/* Returns the pooled buffer that a unit without an open buffer would fill, or -1 if it would fill
 * its own. */
int fsdpc_fill_choose(const fsdpc_unit *unit);
bool fsdpc_fill_lacks_own(const fsdpc_unit *unit); /* taking the unit's own buffer would create
                                                    * it */
/* Opens the buffer: sets unit->buffer. The unit's reduction must be complete. Creating a unit's own
 * buffer is collective, so no reduction may be in flight when the unit first gets it. */
fsdpc_status fsdpc_fill_take(fsdpc_unit *unit, int pooled);
/* Returns whether kernels can fill the unit's gradient shard directly; take_shard opens the shard
 * for this. */
bool fsdpc_fill_suits_shard(const fsdpc_unit *unit);
void fsdpc_fill_take_shard(fsdpc_unit *unit);
/* Frees the shard for other uses by moving its half-filled contents to the unit's own buffer. */
fsdpc_status fsdpc_fill_leave_shard(fsdpc_unit *unit);
static inline bool fsdpc_fill_is_in_shard(const fsdpc_unit *unit)
{
    return unit->buffer == &unit->shard;
}
/* Returns a parameter's place in a reduce buffer. */
static inline unsigned char *fsdpc_fill_place(const fsdpc_unit *unit, const fsdpc_buffer *buffer,
                                              int param)
{
    const fsdpc_place *place = &unit->layout->params[param];
    const fsdpc_unit_group *group = &unit->groups[place->group];
    return buffer->data + group->reduce_offset +
           place->unsharded_offset * fsdpc_dtype_bytes(group->reduce_dtype);
}
static inline void fsdpc_fill_note(fsdpc_unit *unit, int param) /* it has a contribution */
{
    unit->n_filled += !unit->filled[param];
    unit->filled[param] = true;
}
/* Lends a parameter's place in the buffer that the unit would fill now; sets `loan` and *data_out,
 * or neither, if it refuses. */
fsdpc_status fsdpc_fill_lend(fsdpc_unit *unit, int param, fsdpc_dtype dtype, fsdpc_loan *loan,
                             void **data_out);
/* Zeroes the parts that no kernel wrote, and marks the written parameters as having gradients. The
 * reduction then owns the buffer. */
fsdpc_status fsdpc_fill_close(fsdpc_unit *unit, fsdpc_buffer **out);
void fsdpc_fill_released(fsdpc_unit *unit); /* its reduction has read it */
void fsdpc_fill_drop(fsdpc_unit *unit);     /* discards a half-filled buffer */
/* Discards all half-filled buffers after a failed backward; warns if they held earlier sums. */
void fsdpc_fill_drop_failed(fsdpc_root *root);

/* Chooses the destination of a posted reduction's partial sums and sets unit->partial. `keep`: they
 * stay over several backwards, in the unit's own partial. Creating a partial is collective over the
 * replicas and requires that no reduction is in flight. */
bool fsdpc_fill_creates_partial(const fsdpc_unit *unit, bool keep);
fsdpc_status fsdpc_fill_partial(fsdpc_unit *unit, const fsdpc_buffer *filled, bool keep);

#endif
