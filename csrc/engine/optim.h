/* Optimizers over flat shards.
 *
 * An optimizer has states as large as its parameters' shards, and a step count for each parameter.
 * A step is one pass over memory, in its own epoch. It reads the gradient shard (with the scale
 * left by clipping), updates the masters and states, and writes the parameter buffer. Parameters of
 * one group share hyper-parameters; neighbours in a shard with the same group and step count are
 * updated as one run. ops/flat_step.h defines the steps.
 *
 * The first step creates only the states that the hyper-parameters require: none for SGD without
 * momentum, three for amsgrad. States are fp64 for fp64 parameters and otherwise fp32 or, if
 * requested, bf16 with stochastic rounding by (seed, parameter, step, element), or block codes of a
 * byte per element (state_format.h). All are independent of the number of ranks.
 *
 * As in PyTorch, a parameter without a gradient is skipped: its unit was not reduced since
 * zero_grad, or it is frozen. step() is collective over the ranks of the units' roots.
 *
 * Averages of weights (EMA) are such states too. Their step reads the masters, not gradients: it
 * covers trainable parameters, and frozen ones that it has averaged before. It is local to the rank,
 * unless it exchanges averages and parameters (`swap`), which counts no step. Until the next
 * exchange, the units refuse steps.
 */
#ifndef FSDPC_ENGINE_OPTIM_H
#define FSDPC_ENGINE_OPTIM_H

#include "engine/factors.h"
#include "engine/state_format.h"
#include "engine/unit.h"
#include "ops/codec.h"
#include "ops/flat_step.h"

typedef struct fsdpc_optim fsdpc_optim;

fsdpc_status fsdpc_optim_create(fsdpc_optim_kind kind, fsdpc_device *device, fsdpc_trace *trace,
                                fsdpc_optim **out);
void fsdpc_optim_destroy(fsdpc_optim *optim);

/* Sets the states' format (F32 by default) and the seed of BF16 rounding; call before adding
 * parameters. */
fsdpc_status fsdpc_optim_set_format(fsdpc_optim *optim, const fsdpc_state_format *format,
                                    uint64_t seed);

/* Adds a parameter to hyper-parameter group `group`. A parameter belongs to one group. */
fsdpc_status fsdpc_optim_add(fsdpc_optim *optim, fsdpc_unit *unit, int param, int group);
fsdpc_status fsdpc_optim_set_hyper(fsdpc_optim *optim, int group, const fsdpc_hyper *hyper);

/* Makes a group step by another row of the table than the optimizer's own. Call before the
 * optimizer's first step. */
fsdpc_status fsdpc_optim_set_kind(fsdpc_optim *optim, int group, fsdpc_optim_kind kind);
fsdpc_optim_kind fsdpc_optim_group_kind(const fsdpc_optim *optim, int group);

/* Returns NULL if the hyper-parameters are not set. */
const fsdpc_hyper *fsdpc_optim_hyper(const fsdpc_optim *optim, int group);

fsdpc_status fsdpc_optim_step(fsdpc_optim *optim);

/* -- parameters outside of units
 * ---------------------------------------------------------------- */

/* Returns the next number, for a parameter outside of units. All parameters, including those in
 * units, are numbered in the order in which they are added. A model's states are therefore rounded
 * identically whether or not the model is sharded. */
uint32_t fsdpc_optim_take_number(fsdpc_optim *optim);

/* Fills in the optimizer's values (kind, seed, hyper-parameters of `group`) and runs the step. */
fsdpc_status fsdpc_optim_step_alone(const fsdpc_optim *optim, int group, fsdpc_step_args *args,
                                    fsdpc_stream *stream);

/* The same for a whole parameter of a group with a matrix rule, whose momentum is states[0], or with
 * Adafactor, whose states are row_var and col_var or, for a vector, the variance. */
fsdpc_status fsdpc_optim_step_whole_alone(fsdpc_optim *optim, int group,
                                          const fsdpc_step_args *args, const char *name, int ndim,
                                          const size_t *shape, fsdpc_stream *stream);

/* -- outer steps of replicas that train apart (optim_outer.h) ----------------------------------- */

/* Makes a unit's replicas train apart. Call it before the first forward, for all units of a model. */
fsdpc_status fsdpc_unit_train_apart(fsdpc_unit *unit);

/* Makes the units of an optimizer of kind OUTER train apart, and copies the masters to the anchors.
 * Call it after adding parameters. All units have the same replicas, on CPUs, with masters,
 * gradients and states in memory. `codec`: the form of differences between hosts. */
fsdpc_status fsdpc_optim_outer_begin(fsdpc_optim *optim, fsdpc_codec codec);

/* Chooses the hyper-parameter group that the following steps are of. These are collective over
 * replicas too. */
fsdpc_status fsdpc_optim_outer_choose(fsdpc_optim *optim, int group);

/* -- captured steps ---------------------------------------------------------------------------- */

typedef struct fsdpc_optim_graph fsdpc_optim_graph; /* optim_graph.h */

/* Captures subsequent steps. Call it before the device's capture. Waits only if it must create
 * missing states. All units must belong to the root. */
fsdpc_status fsdpc_optim_capture_begin(fsdpc_optim *optim, const fsdpc_root *root,
                                       fsdpc_optim_graph **out);
/* -- states ------------------------------------------------------------------------------------ */

/* This rank's rows of a state, laid out like the master's local shard. `write`: they may be
 * written until the next step. */
typedef struct fsdpc_optim_view {
    fsdpc_local_shard local;
    fsdpc_dtype dtype;     /* U8: block codes */
    void *data;            /* NULL: no step has used this state yet */
    fsdpc_code_args codes; /* of `data`, if it holds codes; `values` is NULL */
} fsdpc_optim_view;

fsdpc_status fsdpc_optim_state(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               bool write, fsdpc_optim_view *out);

/* Adafactor's states of a parameter with two or more dimensions; NULL for one without elements. */
typedef struct fsdpc_factor_view {
    float *row_var, *col_var;
    fsdpc_factors factors;
    fsdpc_local_shard local;
} fsdpc_factor_view;

/* Creates them if they are missing. */
fsdpc_status fsdpc_optim_factors(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                 fsdpc_factor_view *out);

/* Collective: writes all means by row, or by column, to `out` on every rank of the shard group. */
fsdpc_status fsdpc_optim_collect_means(const fsdpc_unit *unit, const fsdpc_factor_view *view,
                                       bool by_column, float *out, size_t numel);

/* Counts a tensor on a state, or with -1 its end. While there are any, states keep their memory, so
 * parameters that need a longer array cannot be added. */
void fsdpc_optim_export(fsdpc_optim *optim, int change);

/* Creates any missing states that the parameter's hyper-parameters require, filled with zeros. */
fsdpc_status fsdpc_optim_make_states(fsdpc_optim *optim, const fsdpc_unit *unit, int param);

fsdpc_status fsdpc_optim_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                    int64_t *out);

/* A count of 0 resets the parameter to its initial state, with zeroed optimizer states. Any other
 * count declares that the states are the result of that many steps. */
fsdpc_status fsdpc_optim_set_step_count(fsdpc_optim *optim, const fsdpc_unit *unit, int param,
                                        int64_t steps);

/* Copies or encodes this rank's rows of the unsharded value of a state, which may have any float
 * dtype. */
fsdpc_status fsdpc_optim_write(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                               const void *unsharded, fsdpc_dtype dtype);

/* Collective: writes the whole state, in its dtype, to `out` on every rank of the shard group.
 * Codes are decoded to fp32. */
fsdpc_status fsdpc_optim_collect(fsdpc_optim *optim, const fsdpc_unit *unit, int param, int state,
                                 void *out);

#endif
