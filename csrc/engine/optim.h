/* Optimizers over flat shards.
 *
 * An optimizer holds states as large as the shards of its parameters, and a step count each.  A
 * step is one pass over memory, inside an epoch of its own.  It reads the gradient shard (with the
 * scale that clipping left), updates master and states, and writes the wire.  Parameters of one
 * group share hyper-parameters; neighbours in a shard with the same group and step count are
 * updated as one run.  What the steps compute stands in ops/flat_step.h.
 *
 * There are only as many states as the hyper-parameters ask for, from the first step on: none for
 * SGD without momentum, a third one for amsgrad.  They are fp64 for fp64 parameters, else fp32, or
 * bf16 rounded stochastically by (seed, parameter, step, element), whatever the number of ranks.
 *
 * As in PyTorch, a parameter without a gradient is skipped: its unit was not reduced since
 * zero_grad, or it is frozen.  step() is collective over the ranks of the units' roots.
 */
#ifndef FSDPC_ENGINE_OPTIM_H
#define FSDPC_ENGINE_OPTIM_H

#include "engine/unit.h"
#include "ops/flat_step.h"

typedef struct fsdpc_optim fsdpc_optim;

fsdpc_status fsdpc_optim_create(fsdpc_optim_kind kind, fsdpc_device *device, fsdpc_trace *trace,
                                fsdpc_optim **out);
void fsdpc_optim_destroy(fsdpc_optim *optim);

/* F32, which it is at first, or BF16 and the seed of its rounding; before parameters are added. */
fsdpc_status fsdpc_optim_set_state_dtype(fsdpc_optim *optim, fsdpc_dtype dtype, uint64_t seed);

/* Gives it a parameter, in hyper-parameter group `group`.  A parameter belongs to one group. */
fsdpc_status fsdpc_optim_add(fsdpc_optim *optim, fsdpc_unit *unit, int param, int group);
fsdpc_status fsdpc_optim_set_hyper(fsdpc_optim *optim, int group, const fsdpc_hyper *hyper);

/* NULL before it was set. */
const fsdpc_hyper *fsdpc_optim_hyper(const fsdpc_optim *optim, int group);

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim);

/* -- parameters that stand in no unit ---------------------------------------------------------- */

/* A number for one.  Parameters are numbered in the order in which they are added, these among
 * them, so that a model's states are rounded alike whether it is sharded or not. */
uint32_t fsdpc_optim_take_number(fsdpc_optim *optim);

/* Fills in what the optimizer knows (kind, hyper-parameters of `group`, seed) and steps. */
fsdpc_status fsdpc_optim_step_alone(const fsdpc_optim *optim, int group, fsdpc_step_args *args,
                                    fsdpc_stream *stream);

/* -- captured steps ---------------------------------------------------------------------------- */

typedef struct fsdpc_optim_graph fsdpc_optim_graph; /* optim_graph.h */

/* Steps from here on are captured.  Waits for nothing but the making of states that are missing;
 * before the device's capture.  All units are the root's. */
fsdpc_status fsdpc_optim_capture_begin(fsdpc_optim *optim, const fsdpc_root *root,
                                       fsdpc_optim_graph **out);
/* -- states ------------------------------------------------------------------------------------ */

/* This rank's rows of a state, laid out as the master's piece; `write`: they may be written until
 * the next step. */
typedef struct fsdpc_optim_view {
    fsdpc_piece piece;
    fsdpc_dtype dtype;
    void *data; /* NULL: no step has used this state yet */
} fsdpc_optim_view;

fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               bool write, fsdpc_optim_view *out);

/* Makes, as zeros, the states that the parameter's hyper-parameters ask for and that are missing.
 */
fsdpc_status fsdpc_optim_make_states(fsdpc_optim *optim, const fsdpc_unit *unit, int param);

fsdpc_status fsdpc_optim_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                    int64_t *out);

/* With 0 the parameter is as if it never stepped, and its states become zeros; else what its states
 * hold is taken to be what that many steps left. */
fsdpc_status fsdpc_optim_set_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                        int64_t steps);

/* Takes the own rows of a state's full value, which may be of any float dtype. */
fsdpc_status fsdpc_optim_write(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               const void *full, fsdpc_dtype dtype);

/* Collective: every rank of the shard group gets the whole state, in its dtype. */
fsdpc_status fsdpc_optim_collect(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                                 void *out);

#endif
