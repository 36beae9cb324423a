/* One step of an optimizer over one run of a flat shard: arguments of the table's `step`.
 *
 * The step is one pass over memory: it reads the gradient, times what clipping and unscaling left,
 * updates parameter and states, and writes the wire where there is one.  The definitions are
 * PyTorch's torch.optim.AdamW, Adam and SGD, and the paper's for Lion (Chen et al. 2023); with
 * g = grad * grad_scale, negated to maximize:
 *
 *     AdamW  p -= lr decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
 *            p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps)      bias = 1 - b^step
 *            amsgrad: x = max(x, v) stands in v's place in the last line
 *     Adam   g += decay p;  the rest as AdamW
 *     SGD    g += decay p;  b = momentum b + (1 - dampening) g, or g the first time;
 *            p -= lr b;  nesterov: p -= lr (g + momentum b);  without momentum: p -= lr g
 *     Lion   p -= lr decay p;  p -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
 *
 * Arithmetic is fp32 for parameters of F32, BF16 and F16, fp64 for those of F64; parameters are
 * rounded to nearest even, and the wire gets the cast of the parameter as stored.
 *
 * States are fp32, fp64 for F64 parameters, or BF16 rounded stochastically: x goes up to the next
 * number of that dtype with the probability that keeps its mean.  The 16 random bits are those of
 * (seed, number, step, first + i, state), so no cut of a parameter changes a result.  The maximum
 * of amsgrad is that of the rounded values.
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

/* Each optimizer reads those that its definition names. */
typedef struct fsdpc_hyper {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    bool nesterov, amsgrad, maximize;
} fsdpc_hyper;

/* What a step computes with beside its elements, in fp64; arithmetic rounds each to its own width.
 */
typedef struct fsdpc_step_scalars {
    double grad_scale; /* negative to maximize */
    double keep;       /* 1 - lr * decay where decay is decoupled */
    double decay;      /* joins the gradient; 0 where decoupled */
    double beta1, beta2, add_gradient, add_square, root_bias2, eps;
    double minus_step; /* -lr, of Adam over its bias */
    uint32_t step;     /* of random bits */
    bool copy_gradient, nesterov;
} fsdpc_step_scalars;

typedef struct fsdpc_step_args {
    fsdpc_optim_kind kind;
    fsdpc_hyper hyper;
    void *param; /* master */
    fsdpc_dtype param_dtype;
    const void *grad;
    fsdpc_dtype grad_dtype; /* F64 with F64 parameters alone */
    void *states[FSDPC_OPTIM_MAX_STATES];
    fsdpc_dtype state_dtype;
    void *wire; /* NULL: nothing to publish */
    fsdpc_dtype wire_dtype;
    size_t numel;
    double grad_scale;           /* F64 parameters see all of it */
    const double *grad_scale_at; /* in the device's memory, times grad_scale; NULL: nothing */
    int64_t step;                /* 1 for the first */
    bool copy_gradient;          /* SGD: the first time with momentum */
    uint64_t seed;               /* of BF16 states, as the next two */
    uint32_t number;             /* of the parameter */
    uint64_t first;              /* the run's first element, in the parameter */
    /* Devices with graphs alone: in their memory, read when the step runs, instead of what they
     * would be by now.  Which rule it is (momentum or none, amsgrad) is decided now.  NULL: no. */
    const fsdpc_step_scalars *scalars;
} fsdpc_step_args;

fsdpc_step_scalars fsdpc_step_prepare(const fsdpc_step_args *args);

/* "AdamW" */
static inline const char *fsdpc_optim_kind_name(fsdpc_optim_kind kind)
{
    static const char *const names[FSDPC_OPTIM_KINDS] = {"AdamW", "Adam", "SGD", "Lion"};
    return names[kind];
}

/* How many states a step uses: 0 to FSDPC_OPTIM_MAX_STATES. */
int fsdpc_optim_states(fsdpc_optim_kind kind, const fsdpc_hyper *hyper);

/* "exp_avg"; NULL where the optimizer has no such state. */
const char *fsdpc_optim_state_name(fsdpc_optim_kind kind, int state);

#endif
