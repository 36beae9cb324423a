/* Optimizers over flat shards.
 *
 * An optimizer holds, for the parameters it was given, states as large as the shards (fp32) and a
 * step count each.  A step is one pass over memory: it reads the gradient shard (with the scale
 * that clipping left), updates master and states and writes the wire, inside an epoch of its own.
 * Parameters of one group share hyper-parameters; neighbours in a shard with the same group and
 * step count are updated as one run.
 *
 * A parameter is skipped, as in PyTorch, while it has no gradient: its unit was not reduced since
 * zero_grad, or it is frozen.  step() is collective over the ranks of the units' roots.
 */
#ifndef FSDPC_ENGINE_OPTIM_H
#define FSDPC_ENGINE_OPTIM_H

#include "engine/root.h"

typedef enum fsdpc_optim_kind { FSDPC_OPTIM_ADAMW, FSDPC_OPTIM_ADAM } fsdpc_optim_kind;

enum { FSDPC_OPTIM_MAX_STATES = 2 };

typedef struct fsdpc_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    bool maximize;
} fsdpc_hyper;

typedef struct fsdpc_optim fsdpc_optim;

fsdpc_status fsdpc_optim_create(fsdpc_optim_kind kind, fsdpc_device *device, fsdpc_trace *trace,
                                fsdpc_optim **out);
void fsdpc_optim_destroy(fsdpc_optim *optim);

/* Gives it a parameter, in hyper-parameter group `group`.  A parameter belongs to one group. */
fsdpc_status fsdpc_optim_add(fsdpc_optim *optim, fsdpc_unit *unit, int param, int group);
fsdpc_status fsdpc_optim_set_hyper(fsdpc_optim *optim, int group, const fsdpc_hyper *hyper);

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim);

/* This rank's piece of a state (0: exp_avg, 1: exp_avg_sq), laid out as the master's piece. */
fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               fsdpc_piece *piece_out, float **out);
fsdpc_status fsdpc_optim_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                    int64_t **out);

#endif
