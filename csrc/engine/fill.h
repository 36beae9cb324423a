/* Reduce buffers while they are filled.  Used by reduce.c and the schedule alone.
 *
 * A buffer is taken at a unit's first gradient and given back when its reduction is complete and
 * all peers have read it.  Two pooled buffers serve units that close during backward; a unit that
 * finds both half filled by open units, or that keeps its gradients over several backwards, gets
 * one of its own, so that nobody waits for a buffer while holding another.
 */
#ifndef FSDPC_ENGINE_FILL_H
#define FSDPC_ENGINE_FILL_H

#include "engine/root.h"

/* At the creation of a root: `encloses` as there. */
fsdpc_status fsdpc_fill_create_buffers(fsdpc_root *root, const bool *encloses);

fsdpc_status fsdpc_fill_open(fsdpc_unit *unit); /* unit->buffer is set */
/* What no kernel wrote is zeroed, what one did is noted as a gradient; from here on the buffer,
 * which was open, belongs to the reduction.
 */
fsdpc_status fsdpc_fill_close(fsdpc_unit *unit, fsdpc_buffer **out);
void fsdpc_fill_released(fsdpc_unit *unit); /* its reduction has read it */
void fsdpc_fill_drop(fsdpc_unit *unit);     /* forgets what is half filled */

/* Where the partial sums of a posted reduction go; set in unit->partial.  `keep`: they stay over
 * several backwards.  Collective over the replicas the first time that is asked for. */
fsdpc_status fsdpc_fill_partial(fsdpc_unit *unit, const fsdpc_buffer *filled, bool keep);

#endif
