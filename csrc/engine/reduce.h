/* Reductions: from filled buffers to gradient shards.  Used by the schedule alone.
 *
 * A reduction is posted when a unit's backward ends and completed at later entry points.  Over a
 * mesh with replicas it has two stages, reduce-scatter within the shard group and all-reduce over
 * the replicas; the second may be postponed to a later backward.
 */
#ifndef FSDPC_ENGINE_REDUCE_H
#define FSDPC_ENGINE_REDUCE_H

#include "engine/root_internal.h"

/* A buffer to fill, once reductions that read it are complete; nothing if one is open. */
fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit); /* posts what is filled; nothing if nothing is */
/* Posts the second stages of what was posted, in its order, once the first ones are in. */
fsdpc_status fsdpc_reduce_post_rest(fsdpc_root *root);
/* Completes reductions that are done, without waiting.  Posts nothing, but for second stages where
 * the communicator orders streams and they need no wait, or where replicas are on several hosts. */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root);
/* The same where ranks are on several hosts, whose sums need a rank to send them on: cheap enough
 * to be called for each gradient. */
fsdpc_status fsdpc_reduce_carry_on(fsdpc_root *root);
fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_wait_all(fsdpc_root *root);

#endif
