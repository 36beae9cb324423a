/* Order between the streams of a remote device.  Used by the files of csrc/engine.
 *
 * Four streams: main, on which everything is computed, and those of gathers, of reductions and of
 * sums over replicas.  The host does not wait for any of them; who reads what another stream wrote,
 * or overwrites what it read, has an event waited for.  order.c lists what is ordered by what.
 *
 * Where the device is not remote, or one rank is alone and its communicator leaves all on main,
 * they are one stream and nothing is to be ordered.
 */
#ifndef FSDPC_ENGINE_ORDER_H
#define FSDPC_ENGINE_ORDER_H

#include "engine/root_internal.h"

fsdpc_status fsdpc_order_create(fsdpc_root *root); /* units are adopted */
/* Streams run dry, or what they do with peers is given up, before their memory goes. */
void fsdpc_order_destroy(fsdpc_root *root);

/* What follows does nothing where streams do not overlap. */

/* Main has written own slices of the wire: gathers to come are behind it. */
fsdpc_status fsdpc_order_published(fsdpc_root *root);
/* Main has read a unit's full for the last time... */
void fsdpc_order_released(fsdpc_unit *unit);
/* ... so the gather that follows may overwrite it. */
fsdpc_status fsdpc_order_gather(fsdpc_unit *unit);
/* All streams come behind what main holds, and every event marks that point: a capture begins with
 * it, which takes them in, and ends with it, as what was marked in a capture is nothing outside. */
fsdpc_status fsdpc_order_fork(fsdpc_root *root);
/* The streams alone: a graph was launched. */
fsdpc_status fsdpc_order_follow(fsdpc_root *root);
/* Main comes behind all that the streams hold. */
fsdpc_status fsdpc_order_join(fsdpc_root *root);
/* Main has filled a reduce buffer, and has done with the gradient shard that its sums go to. */
fsdpc_status fsdpc_order_filled(fsdpc_root *root);

#endif
