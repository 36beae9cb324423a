/* In deterministic mode, the bits of sums over micro-steps do not depend on how a batch is split.
 *
 * Micro-step m of rank r contributes leaf m * ranks + r of one pairwise tree. Each node covers 2^k
 * leaves, beginning at a multiple of 2^k. A node's sum is kept until its sibling's sum is complete,
 * and is then added to it, like a carry in a binary counter. The ranks of a micro-step form a run
 * of leaves. If their number is a power of two, that run is one node, and the reduction produces a
 * single sum. Otherwise the run is split into at most 2 log2(ranks) nodes, and the reduction
 * produces a sum for each. As a result, 1 rank with 12 micro-steps, 3 ranks with 4 and 12 ranks
 * with 1 all produce the same bits.
 *
 *     3 ranks   micro-step 0       1       2       3
 *               leaves  0 1  2 | 3  4 5 | 6 7  8 | 9 10 11
 *               nodes   ---  - | -  --- | ---  - | -  ----
 *
 * Two kinds of rank group sum only whole micro-steps: ranks on several hosts, and the shard groups
 * of a hybrid mesh. If their size is not a power of two, the bits depend on the split, and the
 * engine warns.
 *
 * Sums stay wide (fp32, fp64). The first read adds the sums together, divides by any factor that is
 * not a power of two, and rounds through the reduce dtype, each exactly once. (Dividing by a power
 * of two is exact, so reductions do that.)
 *
 * The highest sum is in the gradient shard itself. Lower sums use separate memory that is kept for
 * the next step, so a single micro-step on 2^k ranks costs nothing extra. Any use (computing a
 * norm, stepping, reading .grad) folds the sums into the gradient shard; gradients added after that
 * begin another tree.
 */
#ifndef FSDPC_ENGINE_MICRO_H
#define FSDPC_ENGINE_MICRO_H

#include "engine/unit.h"
#include "engine/unit_internal.h"

/* Returns the number of leaves in a micro-step. `ranks` are in the group whose reduction produces
 * the sums, each after an earlier stage over `before` ranks. */
int fsdpc_micro_leaves(int ranks, int before, bool splits_sums);
/* Returns the maximum number of sums that exist at a time over `n_steps` micro-steps, including the
 * gradient shard. */
int fsdpc_micro_most(int leaves, int n_steps);

/* Chooses where the next micro-step's sums go, just before it is posted, and allocates memory for
 * them. */
fsdpc_status fsdpc_micro_begin(fsdpc_unit *unit);
/* Sets the destination of a group's sums, their scale, and whether they are added to the existing
 * contents. */
void fsdpc_micro_target(const fsdpc_unit *unit, const fsdpc_unit_group *group, fsdpc_coll *op);
/* Call when the sums have arrived. */
fsdpc_status fsdpc_micro_added(fsdpc_unit *unit);
/* Combines all sums into the gradient shard, then divides and rounds them. */
fsdpc_status fsdpc_micro_fold(fsdpc_unit *unit);

#endif
