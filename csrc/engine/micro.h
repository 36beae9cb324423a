/* Sums over micro-steps whose bits do not depend on how a batch is split (deterministic mode).
 *
 * The ranks of one micro-step are summed as a pairwise tree.  Micro-steps continue the same tree:
 * sums of equal height merge, as a binary counter counts.  So with powers of two, micro-step m of
 * rank r contributes leaf m * ranks + r of one tree.  Then 1 rank with 4 micro-steps, 2 with 2 and
 * 4 with 1 end with the same bits.  Sums stay wide (fp32, fp64) and are rounded through the reduce
 * dtype once, at the first read.
 *
 * The highest sum lives in the gradient shard itself, lower ones in separate memory that is kept
 * for the next step: one micro-step costs nothing extra.  Looking (a norm, a step, reading
 * .grad) folds what there is into the gradient shard; gradients added after that make another tree.
 */
#ifndef FSDPC_ENGINE_MICRO_H
#define FSDPC_ENGINE_MICRO_H

#include "engine/unit.h"

/* Where the sums of the next micro-step go, and whether they add to the contents.  Group g's go to
 * the returned base + groups[g].grad_offset, or to groups[g].grad if the base is NULL. */
fsdpc_status fsdpc_micro_target(fsdpc_unit *unit, unsigned char **base_out, bool *accumulate_out);
/* They are in. */
fsdpc_status fsdpc_micro_added(fsdpc_unit *unit);
/* Brings all sums together in the gradient shard, rounded. */
fsdpc_status fsdpc_micro_fold(fsdpc_unit *unit);

#endif
