/* The part of a step that matrix rules (ops/matrix_rules.h) take: the momentum of a whole matrix
 * meets on one rank, which turns it into the update, and the update's rows go back.
 *
 * States are shards by rows, as for all optimizers. Which rank computes which matrix follows from
 * shapes only: matrices are taken in order of cost, and each goes to the rank with the least work
 * so far. Every matrix is computed whole, in a fixed order of sums, so parameters and states have
 * the same bits for any number of ranks. Working memory is two of the largest matrix and two of its
 * smaller Gram matrix, on each rank.
 *
 * A rule steps matrices (two dimensions) and stacks of them (three) in float32, bfloat16 or
 * float16, with masters, gradients and states in the device's memory. Anything else is refused by
 * name before the step begins, as is a captured step, since the host reads the norm of each matrix.
 */
#ifndef FSDPC_ENGINE_OPTIM_MATRIX_H
#define FSDPC_ENGINE_OPTIM_MATRIX_H

#include "engine/optim_internal.h"
#include "ops/matrix_rules.h"

/* Returns whether a parameter is stepped by a matrix rule. */
static inline bool fsdpc_optim_steps_matrix(const fsdpc_optim *optim, const unit_states *states,
                                            int param)
{
    int group = states->params[param].group;
    return group >= 0 && fsdpc_matrix_rule_of(fsdpc_optim_kind_of(optim, group));
}

/* Checks the parameters and creates working memory. */
fsdpc_status fsdpc_optim_matrix_prepare(fsdpc_optim *optim);

/* Steps all matrices of the current step. Collective over the shard groups. */
fsdpc_status fsdpc_optim_matrix_step(fsdpc_optim *optim);

/* Steps a whole parameter outside of units; see fsdpc_optim_step_whole_alone. */
fsdpc_status fsdpc_optim_matrix_alone(fsdpc_optim *optim, int group, const fsdpc_step_args *args,
                                      const char *name, int ndim, const size_t *shape,
                                      fsdpc_stream *stream);

void fsdpc_optim_matrix_destroy(fsdpc_optim *optim);

#endif
