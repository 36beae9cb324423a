/* Agreement of the ranks when a backward begins, and at its end, before anybody sees gradients.
 *
 * requires_grad may change between steps, but must do so on all ranks.  It decides which units are
 * reduced, so a difference would show as another order of units.  A rank on which it changed since
 * ranks agreed last says so before its backward does anything.  Peers that post something else are
 * told which parameter it is.
 *
 * A parameter has a gradient on all ranks if any rank used it, and on none otherwise: pieces that
 * only some optimizers update would part.
 *
 * Replicas hold the same weights.  Each backward that sums over them compares a slice of the
 * masters, 1/128 of them, so that all were compared after 128 backwards.  Where they differ, every
 * rank gets FSDPC_ERR_MISMATCH, which names the first parameter that does.  Masters that the host
 * cannot read (a remote device's) are compared at saves alone.
 */
#ifndef FSDPC_ENGINE_AGREE_H
#define FSDPC_ENGINE_AGREE_H

#include "engine/root_internal.h"

/* Collective, over replicas too.  All reductions are posted by now: peers that wait here still make
 * progress on them, so this adds no wait. */
fsdpc_status fsdpc_backward_agree(fsdpc_root *root);

/* Collective on the ranks where something changed. */
fsdpc_status fsdpc_trainable_agree(fsdpc_root *root);

#endif
