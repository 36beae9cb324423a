/* Reductions: from filled buffers to gradient shards.  Used by the schedule alone.
 *
 * A reduction is posted when a unit's backward ends and completed at later entry points.  Over a
 * mesh with replicas it has two stages, reduce-scatter within the shard group and all-reduce over
 * the replicas; the second may be postponed to a later backward.
 */
#ifndef FSDPC_ENGINE_REDUCE_H
#define FSDPC_ENGINE_REDUCE_H

#include "engine/root.h"

fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit); /* posts what is filled; nothing if nothing is */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root); /* completes what can be without waiting */
fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit);
fsdpc_status fsdpc_reduce_wait_all(fsdpc_root *root);

#endif
