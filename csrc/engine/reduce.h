/* Reductions: from filled buffers to gradient shards.  Only the schedule uses this file.
 *
 * A reduction is posted when a unit's backward ends and completed at later entry points.  On a mesh
 * with replicas it has two stages: reduce-scatter within the shard group and all-reduce over the
 * replicas.  The second may be postponed to a later backward.
 */
#ifndef FSDPC_ENGINE_REDUCE_H
#define FSDPC_ENGINE_REDUCE_H

#include "engine/root_internal.h"

/* Opens a buffer to fill, once the reductions that read it are complete; does nothing if one is
 * open. */
fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit); /* posts the filled buffer, if any */
/* Posts the remaining second stages in the order of the first ones, once those are complete. */
fsdpc_status fsdpc_reduce_post_rest(fsdpc_root *root);
/* Completes reductions that are done, without waiting.  It posts only second stages: if the
 * communicator orders streams and they need no wait, or if replicas are on several hosts. */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root);
/* Does the same if ranks are on several hosts, whose sums a rank must forward; cheap enough to call
 * for each gradient. */
fsdpc_status fsdpc_reduce_carry_on(fsdpc_root *root);
fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_wait_all(fsdpc_root *root);

#endif
