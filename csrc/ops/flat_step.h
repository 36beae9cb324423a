/* The arguments of the table's `step`: one optimizer step over a contiguous run of a flat shard.
 *
 * The step is one pass over memory: it reads the gradient, applies pending clipping and unscaling
 * factors, updates parameter and states, and writes the parameter buffer if there is one. The
 * definitions are those of torch.optim.AdamW, Adam and SGD, and the paper's for Lion (Chen et al.
 * 2023); with g = grad * grad_scale, negated to maximize:
 *
 *     AdamW  p -= lr decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
 *            p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps)      bias = 1 - b^step
 *            amsgrad: x = max(x, v) replaces v in the last line
 *     Adam   g += decay p;  the rest as AdamW
 *     SGD    g += decay p;  b = momentum b + (1 - dampening) g, or g the first time;
 *            p -= lr b;  nesterov: p -= lr (g + momentum b);  without momentum: p -= lr g
 *     Lion   p -= lr decay p;  p -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
 *
 * Arithmetic is fp32 for F32, BF16 and F16 parameters, and fp64 for F64 parameters. Parameters are
 * rounded to nearest even, and the parameter buffer receives the cast of the stored parameter.
 *
 * States are fp64 for F64 parameters, and otherwise fp32 or stochastically rounded BF16; x is
 * rounded up with the probability that preserves its mean. The 16 random bits depend on (seed,
 * number, step, first + i, state), so splitting a parameter does not change the result. amsgrad's
 * maximum is that of the rounded values.
 */
#ifndef FSDPC_OPS_FLAT_STEP_H
#define FSDPC_OPS_FLAT_STEP_H

#include "base/dtype.h"

typedef enum fsdpc_optim_kind {
    FSDPC_OPTIM_ADAMW,
    FSDPC_OPTIM_ADAM,
    FSDPC_OPTIM_SGD,
    FSDPC_OPTIM_LION,
    FSDPC_OPTIM_KINDS
} fsdpc_optim_kind;

enum { FSDPC_OPTIM_MAX_STATES = 3 };

/* Each optimizer reads only the fields in its definition. */
typedef struct fsdpc_hyper {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    bool nesterov, amsgrad, maximize;
} fsdpc_hyper;

/* A step's scalars in fp64; the arithmetic rounds each to its own precision. */
typedef struct fsdpc_step_scalars {
    double grad_scale; /* negative to maximize */
    double keep;       /* 1 - lr * decay if decay is decoupled */
    double decay;      /* added to the gradient; 0 if decoupled */
    double beta1, beta2, add_gradient, add_square, root_bias2, eps;
    double minus_step; /* -lr; for Adam, divided by its bias correction */
    uint32_t step;     /* for random bits */
    bool copy_gradient, nesterov;
} fsdpc_step_scalars;

typedef struct fsdpc_step_args {
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
    void *param; /* master */
    fsdpc_dtype param_dtype;
    const void *grad;
    fsdpc_dtype grad_dtype; /* F64 only with F64 parameters */
    void *states[FSDPC_OPTIM_MAX_STATES];
    fsdpc_dtype state_dtype;
    void *copy_in; /* NULL: no copy-in */
    fsdpc_dtype copy_in_dtype;
    size_t numel;
    double grad_scale;           /* F64 parameters use its full precision */
    const double *grad_scale_at; /* in device memory, times grad_scale; NULL: no factor */
    int64_t step;                /* 1 for the first step */
    bool copy_gradient;          /* SGD: the first step with momentum */
    uint64_t seed;               /* for BF16 states, as are the next two */
    uint32_t number;             /* of the parameter */
    uint64_t first;              /* index in the parameter of the run's first element */
    /* Scalars in device memory, only for devices with graphs; they are read when the step runs and
     * replace those derived from the other arguments. The rule (with or without momentum or
     * amsgrad) is selected at the call. NULL: not used. */
    const fsdpc_step_scalars *scalars;
} fsdpc_step_args;

fsdpc_step_scalars fsdpc_step_prepare(const fsdpc_step_args *args);

/* Returns the name, for example "AdamW". */
static inline const char *fsdpc_optim_kind_name(fsdpc_optim_kind kind)
{
    static const char *const names[FSDPC_OPTIM_KINDS] = {"AdamW", "Adam", "SGD", "Lion"};
    return names[kind];
}

/* Returns the number of states that a step uses: 0 to FSDPC_OPTIM_MAX_STATES. */
int fsdpc_optim_states(fsdpc_optim_kind kind, const fsdpc_hyper *hyper);

/* Returns the name, for example "exp_avg", or NULL if the optimizer has no such state. */
const char *fsdpc_optim_state_name(fsdpc_optim_kind kind, int state);

#endif
