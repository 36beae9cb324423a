/* The arguments of the table's `step`: one optimizer step over a contiguous run of a flat shard.
 *
 * The step is one pass over memory: it reads the gradient, applies pending clipping and unscaling
 * factors, updates parameter and states, and writes the parameter buffer if there is one.
 * ops/optim_table.h defines the optimizers.
 *
 * Arithmetic is fp32 for F32, BF16 and F16 parameters, and fp64 for F64 parameters. Parameters are
 * rounded to nearest even, and the parameter buffer receives the cast of the stored parameter.
 *
 * States are fp64 for F64 parameters, and otherwise fp32 or stochastically rounded BF16; x is
 * rounded up with the probability that preserves its mean. The 16 random bits depend on (seed,
 * number, step, first + i, state), so splitting a parameter does not change the result. amsgrad's
 * maximum is that of the rounded values.
 *
 * U8 states are block codes (block_code.h): U8 is their dtype, and `maxima` holds the blocks'
 * maxima.
 */
#ifndef FSDPC_OPS_FLAT_STEP_H
#define FSDPC_OPS_FLAT_STEP_H

#include "base/dtype.h"
#include "ops/block_code.h"
#include "ops/optim_table.h"

typedef struct fsdpc_step_args {
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
    void *param; /* master */
    fsdpc_dtype param_dtype;
    const void *grad;
    fsdpc_dtype grad_dtype; /* F64 only with F64 parameters */
    void *states[FSDPC_OPTIM_MAX_STATES];
    fsdpc_dtype state_dtype;
    float *maxima[FSDPC_OPTIM_MAX_STATES]; /* for U8 states, as is the next */
    size_t code_row; /* a block's row (block_code.h); numel is a multiple of it */
    void *copy_in;   /* NULL: no copy-in */
    fsdpc_dtype copy_in_dtype;
    size_t numel;
    double grad_scale;           /* F64 parameters use its full precision */
    const double *grad_scale_at; /* in device memory, times grad_scale; NULL: no factor */
    int64_t step;                /* 1 for the first step */
    bool copy_gradient;          /* SGD: the first step with momentum */
    bool given;                  /* matrix rules: `grad` is the matrix's update (matrix_rules.h) */
    uint64_t seed;               /* for BF16 states, as are the next two */
    uint32_t number;             /* of the parameter */
    uint64_t first;              /* index in the parameter of the run's first element */
    /* Scalars in device memory, only for devices with graphs; they are read when the step runs and
     * replace those derived from the other arguments. The rule (with or without momentum or
     * amsgrad) is selected at the call. NULL: not used. */
    const fsdpc_step_scalars *scalars;
} fsdpc_step_args;

fsdpc_step_scalars fsdpc_step_prepare(const fsdpc_step_args *args);

/* Returns the code of a state that is U8. */
static inline fsdpc_code fsdpc_state_code(fsdpc_optim_kind kind, const fsdpc_hyper *hyper,
                                          int state)
{
    bool square = fsdpc_rule_has_square(fsdpc_optim_table[kind].rule(hyper), state);
    return square ? FSDPC_CODE_UROOT8 : FSDPC_CODE_ROOT8;
}

/* Returns the rule that the hyper-parameters select. */
static inline fsdpc_step_rule fsdpc_step_rule_of(const fsdpc_step_args *args)
{
    return args->given ? FSDPC_RULE_GIVEN : fsdpc_optim_table[args->kind].rule(&args->hyper);
}

#endif
