/* Orders the streams of a remote device, for the files of csrc/engine.
 *
 * There are four streams: main, which computes, and one each for gathers, reductions and sums over
 * replicas.  The host waits for none of them.  A stream waits for an event before it reads data
 * that another stream wrote, or overwrites data that another stream read; order.c lists these
 * events.
 *
 * If the device is not remote, or a single rank's communicator keeps all work on main, they are one
 * stream, which needs no ordering.
 */
#ifndef FSDPC_ENGINE_ORDER_H
#define FSDPC_ENGINE_ORDER_H

#include "engine/root_internal.h"

fsdpc_status fsdpc_order_create(fsdpc_root *root); /* the units must know their root */
/* Call before freeing memory that streams use: waits for them, or aborts their operations with
 * peers. */
void fsdpc_order_destroy(fsdpc_root *root);

/* Makes `stream` wait until main reaches this point, which the event marks. */
fsdpc_status fsdpc_order_behind(fsdpc_device *device, fsdpc_event *event, fsdpc_stream *stream);
void fsdpc_order_note_released(fsdpc_unit *unit);

/* The functions below do nothing if streams do not overlap. */

/* Call when main has written its own slices of the parameter buffer: later gathers wait for this.
 */
static inline fsdpc_status fsdpc_order_copied_in(fsdpc_root *root)
{
    return root->overlaps ? fsdpc_order_behind(root->device, root->copied_in, root->gather_stream)
                          : FSDPC_OK;
}
/* Call when main has filled a reduce buffer and no longer uses the gradient shard for its sums. */
static inline fsdpc_status fsdpc_order_filled(fsdpc_root *root)
{
    return root->overlaps ? fsdpc_order_behind(root->device, root->filled, root->reduce_stream)
                          : FSDPC_OK;
}
/* Call when main has read a unit's unsharded parameters for the last time... */
static inline void fsdpc_order_released(fsdpc_unit *unit)
{
    if (unit->root->overlaps)
        fsdpc_order_note_released(unit);
}
/* ... so the next gather may overwrite it. */
static inline fsdpc_status fsdpc_order_gather(fsdpc_unit *unit)
{
    const fsdpc_root *root = unit->root;
    return root->overlaps ? fsdpc_stream_wait(root->gather_stream, unit->released) : FSDPC_OK;
}
/* Every stream waits for main, and every event is recorded there.  A capture begins with this, to
 * include the streams.  It also ends with this call, because events recorded in a capture are
 * invalid outside it.
 */
fsdpc_status fsdpc_order_fork(fsdpc_root *root);
/* Call after launching a graph: only makes the streams wait. */
fsdpc_status fsdpc_order_follow(fsdpc_root *root);
/* Main waits for all other streams. */
fsdpc_status fsdpc_order_join(fsdpc_root *root);
#endif
