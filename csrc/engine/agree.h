/* Ranks agree when a backward begins and when it ends, before gradients become visible.
 *
 * requires_grad may change between steps, but must do so on all ranks.  It decides which units are
 * reduced, so a difference would appear as a different unit order.  A rank on which it has changed
 * since the last agreement announces that before its backward does anything.  Peers that post
 * something else learn which parameter changed.
 *
 * A parameter has a gradient on all ranks if any rank used it, and on none otherwise.  Otherwise
 * only some ranks would update their shards of it, and the shards would diverge.
 *
 * Replicas hold the same weights.  Each backward that sums over them compares 1/128 of the masters,
 * so that 128 backwards compare them all.  If they differ, every rank gets FSDPC_ERR_MISMATCH,
 * which names the first parameter that differs.  Masters that the host cannot read (a remote
 * device's) are compared only at saves.
 */
#ifndef FSDPC_ENGINE_AGREE_H
#define FSDPC_ENGINE_AGREE_H

#include "engine/root_internal.h"

/* Collective, over replicas too.  All reductions have been posted, and peers that wait here advance
 * them, so this adds no wait. */
fsdpc_status fsdpc_backward_agree(fsdpc_root *root);

/* Returns the bytes that it sends for this many parameters, over the shard group or over replicas.
 */
size_t fsdpc_agree_bytes(size_t n_params, bool replicas);

/* Collective on the ranks where something changed. */
fsdpc_status fsdpc_trainable_agree(fsdpc_root *root);

#endif
