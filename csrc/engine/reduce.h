/* Reduce buffers and reductions.  Used by the schedule alone.
 *
 * A buffer is taken at a unit's first gradient and given back when its reduction is complete and
 * all peers have read it.  Two pooled buffers serve units that close during backward; a unit that
 * finds both half filled by open units gets one of its own, so that nobody waits for a buffer while
 * holding another.
 */
#ifndef FSDPC_ENGINE_REDUCE_H
#define FSDPC_ENGINE_REDUCE_H

#include "engine/root.h"

fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit); /* unit->buffer is set */
fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit); /* posts what is filled; nothing if nothing is */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root); /* completes what can be without waiting */
fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit);
void fsdpc_reduce_drop(fsdpc_unit *unit); /* forgets what is half filled */

#endif
