/* Reduce buffers while they are filled.  Used by reduce.c alone, but for dropping.
 *
 * A buffer is taken at a unit's first gradient and given back when its reduction is complete and
 * all peers have read it.  Two pooled buffers serve units that close during backward.  A unit gets
 * its own one if it finds both half filled by open units, or keeps its gradients over several
 * backwards.  So nobody waits for a buffer while holding another.
 *
 * A rank that is alone needs no buffer for gradients that nothing is to be added to: they are
 * written where they stay.
 */
#ifndef FSDPC_ENGINE_FILL_H
#define FSDPC_ENGINE_FILL_H

#include "engine/root_internal.h"

/* At the creation of a root: `encloses` as there. */
fsdpc_status fsdpc_fill_create_buffers(fsdpc_root *root, const bool *encloses);

/* Which pooled buffer a unit without an open one would fill; -1: its own one. */
int fsdpc_fill_choose(const fsdpc_unit *unit);
bool fsdpc_fill_lacks_own(const fsdpc_unit *unit); /* taking its own one creates it */
/* Opens it: unit->buffer is set.  Its reduction is complete; none is in flight if the unit is to
 * get its first own one, whose creation is collective. */
fsdpc_status fsdpc_fill_take(fsdpc_unit *unit, int pooled);
/* Whether its gradient shard can be filled itself, and opening it so. */
bool fsdpc_fill_suits_shard(const fsdpc_unit *unit);
void fsdpc_fill_take_shard(fsdpc_unit *unit);
/* The shard is wanted for something else: what is half filled goes on in a buffer of its own. */
fsdpc_status fsdpc_fill_leave_shard(fsdpc_unit *unit);
static inline bool fsdpc_fill_is_in_shard(const fsdpc_unit *unit)
{
    return unit->buffer == &unit->shard;
}
/* Zeroes the parts that no kernel wrote and notes the others as gradients; from here on the buffer,
 * which was open, belongs to the reduction. */
fsdpc_status fsdpc_fill_close(fsdpc_unit *unit, fsdpc_buffer **out);
void fsdpc_fill_released(fsdpc_unit *unit); /* its reduction has read it */
void fsdpc_fill_drop(fsdpc_unit *unit);     /* forgets what is half filled */
/* Of all units, as a backward failed; warns if earlier ones had left sums there. */
void fsdpc_fill_drop_failed(fsdpc_root *root);

/* Where the partial sums of a posted reduction go; set in unit->partial.  `keep`: they stay over
 * several backwards, in a partial of the unit's own.  Creating that is collective over the
 * replicas, with no reduction in flight. */
bool fsdpc_fill_creates_partial(const fsdpc_unit *unit, bool keep);
fsdpc_status fsdpc_fill_partial(fsdpc_unit *unit, const fsdpc_buffer *filled, bool keep);

#endif
