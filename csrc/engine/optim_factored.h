/* Adafactor's step, whose second moments are means by row and by column of global matrices.
 *
 * Every sum over ranks is exact or one of integers, so states and parameters have the same bits for
 * any number of ranks. ops/optim_table.h defines the step, factors.h the states. Means by row are
 * sharded like the parameter's rows; means by column of a single matrix are the same on every rank.
 * Parameters with fewer than two dimensions keep a mean for each element.
 *
 * Parameters are float32, bfloat16 or float16 on the CPU, with masters, gradients and states in
 * memory. Anything else is refused by name before the step begins.
 */
#ifndef FSDPC_ENGINE_OPTIM_FACTORED_H
#define FSDPC_ENGINE_OPTIM_FACTORED_H

#include "engine/optim_internal.h"

/* Checks the parameters and creates working memory. */
fsdpc_status fsdpc_optim_factored_prepare(fsdpc_optim *optim);

/* Steps all parameters of Adafactor in the current step. Collective over the shard groups. */
fsdpc_status fsdpc_optim_factored_step(fsdpc_optim *optim);

/* Steps a whole parameter outside of units. states[0] of a vector is its variance; otherwise
 * states[0] and states[1] are row_var and col_var. */
fsdpc_status fsdpc_optim_factored_alone(fsdpc_optim *optim, int group, const fsdpc_step_args *args,
                                        const char *name, int ndim, const size_t *shape,
                                        fsdpc_stream *stream);

void fsdpc_optim_factored_destroy(fsdpc_optim *optim);

#endif
