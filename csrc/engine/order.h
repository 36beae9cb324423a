/* Orders the streams of a remote device on behalf of the engine.
 *
 * There are four streams: main, which computes, and one each for gathers, reductions and sums over
 * replicas. The host does not wait for any of them. A stream waits for an event before it reads
 * data that another stream wrote, or overwrites data that another stream reads; order.c lists these
 * events.
 *
 * If the device is not remote, or a single rank's communicator runs everything on main, there is
 * only one stream, which needs no ordering.
 */
#ifndef FSDPC_ENGINE_ORDER_H
#define FSDPC_ENGINE_ORDER_H

#include "engine/root_internal.h"

fsdpc_status fsdpc_order_create(fsdpc_root *root); /* the units must know their root */
/* Call before freeing memory that streams use; waits for them, or aborts their operations with
 * peers. */
void fsdpc_order_destroy(fsdpc_root *root);

/* Records the event on the main stream, and makes `stream` wait for it. */
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
/* Call after main has filled a reduce buffer and stopped using the gradient shard that will receive
 * the sums. */
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
/* Makes every stream wait for main and records every event there. Call it at the beginning of each
 * capture, to include the other streams. Call it again at the end, because events recorded in a
 * capture are invalid outside it.
 */
fsdpc_status fsdpc_order_fork(fsdpc_root *root);
/* Call after launching a graph; makes only the other streams wait for main. */
fsdpc_status fsdpc_order_follow(fsdpc_root *root);
/* Makes main wait for all other streams. */
fsdpc_status fsdpc_order_join(fsdpc_root *root);
#endif
