/* Reductions move gradients from filled buffers into gradient shards. Only the schedule uses this
 * file.
 *
 * A reduction is posted when a unit's backward ends and completed at later entry points. On a mesh
 * with replicas it has two stages: reduce-scatter within the shard group and all-reduce over the
 * replicas. The second stage may be postponed to a later backward.
 */
#ifndef FSDPC_ENGINE_REDUCE_H
#define FSDPC_ENGINE_REDUCE_H

#include "engine/root_internal.h"

/* Opens a buffer to fill, once the reductions that read it are complete; does nothing if one is
 * already open. */
fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit); /* posts the filled buffer, if any */
/* Posts the remaining second stages in the order of their first stages, waiting for each first
 * stage. */
fsdpc_status fsdpc_reduce_post_rest(fsdpc_root *root);
/* Finishes the reductions that are already complete, without waiting. Posts second stages only if
 * the communicator orders streams (they then need no wait), or if replicas are on several hosts. */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root);
/* Like fsdpc_reduce_progress, but only if ranks are on several hosts, where each rank must forward
 * sums; cheap enough to call for each gradient. */
fsdpc_status fsdpc_reduce_carry_on(fsdpc_root *root);
fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_wait_all(fsdpc_root *root);

#endif
