/* Order between the streams of a remote device.  Used by the files of csrc/engine.
 *
 * Four streams: main, which computes, and those of gathers, of reductions and of sums over
 * replicas.  The host waits for none of them.  A stream waits for an event before it reads what
 * another one wrote, or overwrites what another one read; order.c lists these events.
 *
 * Where the device is not remote, or one rank is alone and its communicator leaves all on main,
 * they are one stream and nothing is to be ordered.
 */
#ifndef FSDPC_ENGINE_ORDER_H
#define FSDPC_ENGINE_ORDER_H

#include "engine/root_internal.h"

fsdpc_status fsdpc_order_create(fsdpc_root *root); /* units are adopted */
/* Waits for the streams, or aborts their operations with peers, before their memory is freed. */
void fsdpc_order_destroy(fsdpc_root *root);

/* `stream` goes on when main has come to here; the event says when that is. */
fsdpc_status fsdpc_order_behind(fsdpc_device *device, fsdpc_event *event, fsdpc_stream *stream);
void fsdpc_order_note_released(fsdpc_unit *unit);

/* The functions below do nothing where streams do not overlap. */

/* Main has written own slices of the wire: gathers to come are behind it. */
static inline fsdpc_status fsdpc_order_published(fsdpc_root *root)
{
    return root->overlaps ? fsdpc_order_behind(root->device, root->published, root->gather_stream)
                          : FSDPC_OK;
}
/* Main has filled a reduce buffer, and has done with the gradient shard that its sums go to. */
static inline fsdpc_status fsdpc_order_filled(fsdpc_root *root)
{
    return root->overlaps ? fsdpc_order_behind(root->device, root->filled, root->reduce_stream)
                          : FSDPC_OK;
}
/* Main has read a unit's full for the last time... */
static inline void fsdpc_order_released(fsdpc_unit *unit)
{
    if (unit->root->overlaps)
        fsdpc_order_note_released(unit);
}
/* ... so the gather that follows may overwrite it. */
static inline fsdpc_status fsdpc_order_gather(fsdpc_unit *unit)
{
    const fsdpc_root *root = unit->root;
    return root->overlaps ? fsdpc_stream_wait(root->gather_stream, unit->released) : FSDPC_OK;
}
/* Every stream waits for main, and every event is recorded there.  A capture begins with this, to
 * include the streams, and ends with it, since events recorded in a capture mean nothing outside.
 */
fsdpc_status fsdpc_order_fork(fsdpc_root *root);
/* The streams alone: a graph was launched. */
fsdpc_status fsdpc_order_follow(fsdpc_root *root);
/* Main waits for all other streams. */
fsdpc_status fsdpc_order_join(fsdpc_root *root);
#endif
