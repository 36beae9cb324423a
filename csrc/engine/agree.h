/* Ranks reach agreement when a backward begins and when it ends, before gradients become visible.
 *
 * requires_grad may change between steps, but must do so on all ranks. It determines which units
 * are reduced, so ranks that disagreed would reduce units in different orders. If requires_grad has
 * changed on a rank since the last agreement, that rank announces the change before starting its
 * backward. Peers that post a different operation get an error that names the parameter.
 *
 * A parameter has a gradient on all ranks if any rank used it, and on none otherwise. If only some
 * ranks updated their shards of a parameter, the ranks would diverge.
 *
 * Replicas hold the same weights. Each backward that sums over replicas compares 1/128 of the
 * masters, so 128 backwards compare all of them. If any differ, every rank gets FSDPC_ERR_MISMATCH,
 * and the message names the first differing parameter. Masters on a remote device, which the host
 * cannot read, are compared only when saving.
 */
#ifndef FSDPC_ENGINE_AGREE_H
#define FSDPC_ENGINE_AGREE_H

#include "engine/root_internal.h"

/* Collective, over replicas too. This adds no wait: all reductions have already been posted, and
 * peers that wait here advance them. */
fsdpc_status fsdpc_backward_agree(fsdpc_root *root);

/* Returns the number of bytes that the agreement sends for `n_params` parameters, over the shard
 * group or over the replicas.
 */
size_t fsdpc_agree_bytes(size_t n_params, bool replicas);

/* Collective over the ranks on which requires_grad has changed. */
fsdpc_status fsdpc_trainable_agree(fsdpc_root *root);

#endif
