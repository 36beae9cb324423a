/* Fills reduce buffers.  Only reduce.c uses this file, except to drop buffers.
 *
 * A unit takes a buffer at its first gradient and returns it when its reduction is complete and all
 * peers have read it.  Two pooled buffers serve units that close during backward.  A unit gets its
 * own buffer if open units are filling both, or if it keeps gradients over several backwards.  A
 * rank thus never waits for a buffer while it holds another.
 *
 * A single rank needs no buffer for gradients that are not added to others: kernels write them
 * directly to the shard.
 */
#ifndef FSDPC_ENGINE_FILL_H
#define FSDPC_ENGINE_FILL_H

#include "engine/root_internal.h"

/* Call when a root is created, with the same `encloses`. */
fsdpc_status fsdpc_fill_create_buffers(fsdpc_root *root, const bool *encloses);

/* Returns the pooled buffer that a unit without an open one would fill; -1: its own. */
int fsdpc_fill_choose(const fsdpc_unit *unit);
bool fsdpc_fill_lacks_own(const fsdpc_unit *unit); /* taking the unit's own buffer would create
                                                    * it */
/* Opens the buffer: sets unit->buffer.  The unit's reduction must be complete.  If the unit gets
 * its own buffer for the first time, no reduction may be in flight, because creating one is
 * collective. */
fsdpc_status fsdpc_fill_take(fsdpc_unit *unit, int pooled);
/* Returns whether kernels can fill the unit's gradient shard directly; take_shard opens it that
 * way. */
bool fsdpc_fill_suits_shard(const fsdpc_unit *unit);
void fsdpc_fill_take_shard(fsdpc_unit *unit);
/* Frees the shard for another use: half-filled contents move to the unit's own buffer. */
fsdpc_status fsdpc_fill_leave_shard(fsdpc_unit *unit);
static inline bool fsdpc_fill_is_in_shard(const fsdpc_unit *unit)
{
    return unit->buffer == &unit->shard;
}
/* Zeroes the parts that no kernel wrote and records the others as gradients.  The reduction then
 * owns the buffer. */
fsdpc_status fsdpc_fill_close(fsdpc_unit *unit, fsdpc_buffer **out);
void fsdpc_fill_released(fsdpc_unit *unit); /* its reduction has read it */
void fsdpc_fill_drop(fsdpc_unit *unit);     /* discards a half-filled buffer */
/* Discards all half-filled buffers after a failed backward; warns if they held earlier sums. */
void fsdpc_fill_drop_failed(fsdpc_root *root);

/* Chooses where the partial sums of a posted reduction go and sets unit->partial.  `keep`: they
 * stay over several backwards, in the unit's own partial.  Creating it is collective over the
 * replicas and requires that no reduction is in flight. */
bool fsdpc_fill_creates_partial(const fsdpc_unit *unit, bool keep);
fsdpc_status fsdpc_fill_partial(fsdpc_unit *unit, const fsdpc_buffer *filled, bool keep);

#endif
