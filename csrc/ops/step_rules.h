/* The table of step rules, and their arithmetic for one element or one vector of elements.
 *
 * A rule is a row of FSDPC_STEP_RULE_TABLE and a function below. The functions are written once and
 * compiled wherever elements are stepped: in fp32 vectors, once per instruction set
 * (flat_step_body.h), in fp64 (flat_step.c), and in CUDA (kernels/step.cuh, fp32 and fp64). To get
 * them, an includer defines
 *
 *     STEP_FN       the functions' qualifiers
 *     STEP_VALUE    the type of an element, or a vector of elements
 *     STEP_REAL     the type of a scalar
 *     STEP_SCALARS  the type of a step's scalars, with the fields of FSDPC_STEP_SCALARS
 *     step_fused(a, b, c)     a * b + c, rounded once in fp32 and twice in fp64
 *     step_fused_by(a, b, c)  the same with a scalar b
 *     step_root(a), step_sign(a), step_most(a, b)
 *
 * step_sign keeps zeros and NaN; step_most propagates NaN from either side, as torch.maximum does.
 *
 * AdamW and Adam follow PyTorch's fused CPU kernel
 * (aten/src/ATen/native/cpu/FusedAdamKernel.cpp) operation by operation, including the
 * multiply-adds that its compiler fused. m moves towards g by a fused multiply-add, v adds (1 - b2)
 * g * g fused, and Adam's decay is added to the gradient fused. Everything else is rounded after
 * each operation. In PyTorch, the other rules are sequences of x.mul_(a) and x.add_(y, alpha=b); the
 * latter is one fused multiply-add. An fp32 step of AdamW, Adam or SGD thus has the same bits as
 * torch's on machines with FMA. RMSprop's differs in torch's square root, which is not correctly
 * rounded. Every rule has the same bits on every path, including tails.
 */
#ifndef FSDPC_OPS_STEP_RULES_H
#define FSDPC_OPS_STEP_RULES_H

#include <stdbool.h>

/* X(NAME, function, number of states). Kernels take the rule as a constant. */
#define FSDPC_STEP_RULE_TABLE(X)                                                                   \
    X(ADAM, adam, 2)                                                                               \
    X(AMSGRAD, amsgrad, 3)                                                                         \
    X(SGD, sgd, 0)                                                                                 \
    X(MOMENTUM, momentum, 1)                                                                       \
    X(LION, lion, 1)                                                                               \
    X(RMSPROP, rmsprop, 1)                                                                         \
    X(RMSPROP_MOMENTUM, rmsprop_momentum, 2)                                                       \
    X(RMSPROP_CENTERED, rmsprop_centered, 3)                                                       \
    X(AHEAD, ahead, 1)                                                                             \
    X(GIVEN, given, 0)                                                                             \
    X(VARIANCE, variance, 1)                                                                       \
    X(AVERAGE, average, 1)                                                                         \
    X(SWAP, swap, 1)

typedef enum fsdpc_step_rule {
#define X(NAME, function, states) FSDPC_RULE_##NAME,
    FSDPC_STEP_RULE_TABLE(X)
#undef X
} fsdpc_step_rule;

/* Returns the number of states of a rule. Device code has a constexpr twin. */
static inline int fsdpc_rule_states(fsdpc_step_rule rule)
{
    switch (rule) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        return states;
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
    return 0;
}

/* Returns whether a rule uses the gradient; averages of weights do not. */
static inline bool fsdpc_rule_reads_gradient(fsdpc_step_rule rule)
{
    return rule != FSDPC_RULE_AVERAGE && rule != FSDPC_RULE_SWAP;
}

/* Returns whether a state is a mean of squares, which is never negative. */
static inline bool fsdpc_rule_has_square(fsdpc_step_rule rule, int state)
{
    switch (rule) {
    case FSDPC_RULE_ADAM:
    case FSDPC_RULE_AMSGRAD:
        return state > 0;
    case FSDPC_RULE_RMSPROP:
    case FSDPC_RULE_RMSPROP_MOMENTUM:
    case FSDPC_RULE_RMSPROP_CENTERED:
        return state == 0;
    default:
        return false;
    }
}

/* Returns whether the states may be block codes (block_code.h). A maximum over all steps would not
 * survive repeated rounding, nor would a difference of states stay positive; an average is as
 * precise as the parameter. */
static inline bool fsdpc_rule_takes_codes(fsdpc_step_rule rule)
{
    return rule != FSDPC_RULE_AMSGRAD && rule != FSDPC_RULE_RMSPROP_CENTERED &&
           fsdpc_rule_reads_gradient(rule);
}

/* The scalars of a step, in whichever precision. */
#define FSDPC_STEP_SCALARS(X)                                                                      \
    X(grad_scale) /* negative to maximize */                                                       \
    X(keep)       /* 1 - lr * decay if decay is decoupled, else 1 */                               \
    X(decay)      /* added to the gradient; 0 if decoupled */                                      \
    X(beta1)                                                                                       \
    X(beta2)                                                                                       \
    X(add_gradient)                                                                                \
    X(add_square)                                                                                  \
    X(root_bias2)                                                                                  \
    X(eps)                                                                                         \
    X(minus_step) /* -lr; for Adam, divided by its bias correction */

#endif

#ifdef STEP_VALUE

/* Moves a towards b by the share w. */
STEP_FN STEP_VALUE step_towards(STEP_VALUE a, STEP_VALUE b, STEP_REAL w)
{
    if (w < (STEP_REAL)0.5)
        return step_fused_by(b - a, w, a);
    return step_fused_by(b - a, w - 1, b);
}

/* Decays the parameter or the gradient, then updates both moments. */
STEP_FN STEP_VALUE step_moments(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    if (k->decay != 0)
        g = step_fused_by(p, k->decay, g);
    else
        p = p * k->keep;
    s[0] = step_towards(s[0], g, k->add_gradient);
    s[1] = step_fused(g * k->add_square, g, s[1] * k->beta2);
    return p;
}

STEP_FN STEP_VALUE step_adam(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    p = step_moments(k, p, g, s);
    return p + k->minus_step * s[0] / (step_root(s[1]) / k->root_bias2 + k->eps);
}

STEP_FN STEP_VALUE step_amsgrad(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    p = step_moments(k, p, g, s);
    s[2] = step_most(s[1], s[2]);
    return p + k->minus_step * s[0] / (step_root(s[2]) / k->root_bias2 + k->eps);
}

STEP_FN STEP_VALUE step_sgd(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    (void)s;
    if (k->decay != 0)
        g = step_fused_by(p, k->decay, g);
    return step_fused_by(g, k->minus_step, p);
}

STEP_FN STEP_VALUE step_momentum(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    if (k->decay != 0)
        g = step_fused_by(p, k->decay, g);
    if (k->copy_gradient)
        s[0] = g;
    else
        s[0] = step_fused_by(g, k->add_gradient, s[0] * k->beta1);
    g = k->nesterov ? step_fused_by(s[0], k->beta1, g) : s[0];
    return step_fused_by(g, k->minus_step, p);
}

STEP_FN STEP_VALUE step_lion(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    STEP_VALUE ahead = step_fused_by(g, k->add_gradient, s[0] * k->beta1);
    s[0] = step_fused_by(g, k->add_square, s[0] * k->beta2);
    return step_fused_by(step_sign(ahead), k->minus_step, p * k->keep);
}

/* Adds the decay to the gradient and updates the mean square. */
STEP_FN STEP_VALUE step_mean_square(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g,
                                    STEP_VALUE *s)
{
    if (k->decay != 0)
        g = step_fused_by(p, k->decay, g);
    s[0] = step_fused(g * k->add_square, g, s[0] * k->beta2);
    return g;
}

STEP_FN STEP_VALUE step_rmsprop(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    g = step_mean_square(k, p, g, s);
    return p + k->minus_step * g / (step_root(s[0]) + k->eps);
}

STEP_FN STEP_VALUE step_rmsprop_momentum(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g,
                                         STEP_VALUE *s)
{
    g = step_mean_square(k, p, g, s);
    s[1] = s[1] * k->beta1 + g / (step_root(s[0]) + k->eps);
    return step_fused_by(s[1], k->minus_step, p);
}

STEP_FN STEP_VALUE step_rmsprop_centered(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g,
                                         STEP_VALUE *s)
{
    g = step_mean_square(k, p, g, s);
    s[2] = step_towards(s[2], g, k->add_square);
    STEP_VALUE variance = step_fused(-s[2], s[2], s[0]);
    s[1] = s[1] * k->beta1 + g / (step_root(variance) + k->eps);
    return step_fused_by(s[1], k->minus_step, p);
}

/* Adafactor for vectors: replaces p, which is not the parameter but an element of the update, by
 * the gradient divided by its root mean square. */
STEP_FN STEP_VALUE step_variance(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    (void)p;
    if (k->add_square != 0)
        s[0] = step_towards(s[0], g * g, k->add_square);
    return g / step_most(step_root(s[0]), g * 0 + k->eps);
}

/* Matrix rules (matrix_rules.h), before the update of the whole matrix: replaces p, which is not
 * the parameter but a row of the matrix, by the momentum, or by the momentum one step ahead. */
STEP_FN STEP_VALUE step_ahead(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    (void)p;
    s[0] = step_towards(s[0], g, k->add_gradient);
    return k->nesterov ? step_towards(g, s[0], k->beta1) : s[0];
}

/* And after it: moves the parameter by the given update. */
STEP_FN STEP_VALUE step_given(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    (void)s;
    return step_fused_by(g, k->minus_step, p * k->keep);
}

/* Moves the average towards the parameter. */
STEP_FN STEP_VALUE step_average(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    (void)g;
    s[0] = step_towards(s[0], p, k->add_gradient);
    return p;
}

/* Exchanges the average and the parameter. */
STEP_FN STEP_VALUE step_swap(const STEP_SCALARS *k, STEP_VALUE p, STEP_VALUE g, STEP_VALUE *s)
{
    STEP_VALUE average = s[0];
    (void)k;
    (void)g;
    s[0] = p;
    return average;
}

/* Returns the updated parameter and updates the states. */
STEP_FN STEP_VALUE step_by_rule(fsdpc_step_rule rule, const STEP_SCALARS *k, STEP_VALUE p,
                                STEP_VALUE g, STEP_VALUE *s)
{
    g = g * k->grad_scale;
    switch (rule) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        return step_##function(k, p, g, s);
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
    return p;
}

#endif
