/* The table of optimizers: what each reads, keeps and computes.
 *
 * An optimizer is a row of optim_table.c. The engine, the checks, the memory plan and both
 * frontends read the row; kernels read only the rule that it selects (step_rules.h). The
 * definitions are those of torch.optim.AdamW, Adam, SGD and RMSprop, and the paper's for Lion (Chen et
 * al. 2023); with g = grad * grad_scale, negated to maximize:
 *
 *     AdamW    p -= lr decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
 *              p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps)      bias = 1 - b^step
 *              amsgrad: x = max(x, v) replaces v in the last line
 *     Adam     g += decay p;  the rest as AdamW
 *     SGD      g += decay p;  b = momentum b + (1 - dampening) g, or g the first time;
 *              p -= lr b;  nesterov: p -= lr (g + momentum b);  without momentum: p -= lr g
 *     RMSprop  g += decay p;  v = alpha v + (1 - alpha) g^2;  p -= lr g / (sqrt(v) + eps);
 *              momentum: b = momentum b + g / (sqrt(v) + eps);  p -= lr b
 *              centered: a = alpha a + (1 - alpha) g;  v - a^2 replaces v in the quotients
 *     Lion     p -= lr decay p;  p -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
 *     Muon     b = momentum b + (1 - momentum) g;  nesterov: b' = momentum b + (1 - momentum) g;
 *              p -= lr decay p;  p -= lr update(b or b'), of whole matrices
 *     OrthogonalSGD  the same with another update
 *     EMA      a = decay a + (1 - decay) p, or p the first time;  swap: a and p are exchanged
 *     Outer    a is stepped as by SGD, with the mean over replicas of a - p as g;  p = a
 *
 *     Adafactor  w = step^beta2_decay;  r, c = means of g^2 by row and by column, each moved by w;
 *              u = g / max(sqrt(r c / max(mean(r), eps1)), eps1);  or, for vectors, v moved to g^2
 *              by w and u = g / max(sqrt(v), eps1);  p -= lr decay p;
 *              p -= max(eps2, rms(p)) min(lr, 1 / sqrt(step)) / max(1, rms(u) / d) u
 *
 * Muon and OrthogonalSGD are matrix rules: matrix_rules.h has their updates. Adafactor's step is in
 * engine/optim_factored.h. EMA reads no gradient; its arithmetic is that of torch.lerp. Outer's step is
 * in engine/optim_outer.h; its rule is that of the SGD inside.
 */
#ifndef FSDPC_OPS_OPTIM_TABLE_H
#define FSDPC_OPS_OPTIM_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/step_rules.h"

typedef enum fsdpc_optim_kind {
    FSDPC_OPTIM_ADAMW,
    FSDPC_OPTIM_ADAM,
    FSDPC_OPTIM_SGD,
    FSDPC_OPTIM_LION,
    FSDPC_OPTIM_RMSPROP,
    FSDPC_OPTIM_MUON,
    FSDPC_OPTIM_ORTHOGONAL_SGD,
    FSDPC_OPTIM_ADAFACTOR,
    FSDPC_OPTIM_EMA,
    FSDPC_OPTIM_OUTER,
    FSDPC_OPTIM_KINDS
} fsdpc_optim_kind;

enum { FSDPC_OPTIM_MAX_STATES = 3 };

/* X(type, field, lowest, below): the range of a hyper-parameter is [lowest, below). Numbers must
 * also be finite. */
#define FSDPC_HYPER_TABLE(X)                                                                       \
    X(double, lr, 0, INFINITY)                                                                     \
    X(double, beta1, 0, 1)                                                                         \
    X(double, beta2, 0, 1)                                                                         \
    X(double, eps, 0, INFINITY)                                                                    \
    X(double, weight_decay, 0, INFINITY)                                                           \
    X(double, momentum, 0, INFINITY)                                                               \
    X(double, dampening, -INFINITY, INFINITY)                                                      \
    X(double, alpha, 0, INFINITY)                                                                  \
    X(double, ns_steps, 1, 100)                                                                    \
    X(double, ns_a, -INFINITY, INFINITY)                                                           \
    X(double, ns_b, -INFINITY, INFINITY)                                                           \
    X(double, ns_c, -INFINITY, INFINITY)                                                           \
    X(double, beta2_decay, -INFINITY, 0x1p-1074)                                                   \
    X(double, eps1, -1, INFINITY) /* -1: the epsilon of the parameter's dtype */                   \
    X(double, eps2, 0, INFINITY)                                                                   \
    X(double, d, 1, INFINITY)                                                                      \
    X(double, decay, 0, 1)                                                                         \
    X(bool, swap, 0, 2)                                                                            \
    X(bool, match_rms_adamw, 0, 2)                                                                 \
    X(bool, ns_bf16, 0, 2)                                                                         \
    X(bool, centered, 0, 2)                                                                        \
    X(bool, nesterov, 0, 2)                                                                        \
    X(bool, amsgrad, 0, 2)                                                                         \
    X(bool, maximize, 0, 2)

/* Each optimizer reads only the fields in its row. */
typedef struct fsdpc_hyper {
#define X(type, field, lowest, below) type field;
    FSDPC_HYPER_TABLE(X)
#undef X
} fsdpc_hyper;

/* A field of fsdpc_hyper, for code that handles all of them. */
typedef struct fsdpc_hyper_range {
    const char *name;
    size_t offset;
    bool flag; /* a bool, else a double */
    double lowest, below;
} fsdpc_hyper_range;

/* Returns the field's entry, or NULL if there is none of that name. */
const fsdpc_hyper_range *fsdpc_hyper_find(const char *name);

/* A step's scalars in fp64; the arithmetic rounds each to its own precision. */
typedef struct fsdpc_step_scalars {
#define X(field) double field;
    FSDPC_STEP_SCALARS(X)
#undef X
    uint32_t step; /* for random bits */
    bool copy_gradient, nesterov;
} fsdpc_step_scalars;

typedef struct fsdpc_optim_row {
    const char *name;
    const char *hypers; /* names of the fields that it reads, each followed by a space */
    const char *states[FSDPC_OPTIM_MAX_STATES];
    fsdpc_step_rule (*rule)(const fsdpc_hyper *hyper);
    bool decoupled; /* weight decay shrinks the parameter; else it is added to the gradient */
    /* Changes scalars that fsdpc_step_prepare has set from the fields of their names. Optional. */
    void (*scalars)(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k);
    /* Writes why these values contradict each other, if they do. Optional. */
    void (*refuse)(const fsdpc_hyper *hyper, char *why, size_t bytes);
} fsdpc_optim_row;

extern const fsdpc_optim_row fsdpc_optim_table[FSDPC_OPTIM_KINDS];

/* Returns the kind of that name, or FSDPC_OPTIM_KINDS. */
int fsdpc_optim_find(const char *name);

/* Returns whether the optimizer reads the field. */
bool fsdpc_optim_reads(fsdpc_optim_kind kind, const char *field);

/* Returns the name, for example "AdamW". */
static inline const char *fsdpc_optim_kind_name(fsdpc_optim_kind kind)
{
    return fsdpc_optim_table[kind].name;
}

/* Returns the number of states that a step uses: 0 to FSDPC_OPTIM_MAX_STATES. */
int fsdpc_optim_states(fsdpc_optim_kind kind, const fsdpc_hyper *hyper);

/* Returns the name, for example "exp_avg", or NULL if the optimizer has no such state. */
static inline const char *fsdpc_optim_state_name(fsdpc_optim_kind kind, int state)
{
    return fsdpc_optim_table[kind].states[state];
}

#endif
