/* The rows of the table of optimizers.
 *
 * A new element-wise optimizer is a row here and, unless an existing rule serves it, a rule in
 * step_rules.h. States keep their place in a row whatever the hyper-parameters are, and a step uses
 * the first ones.
 */
#include "ops/optim_table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- AdamW and Adam ---- */

static fsdpc_step_rule adam_rule(const fsdpc_hyper *hyper)
{
    return hyper->amsgrad ? FSDPC_RULE_AMSGRAD : FSDPC_RULE_ADAM;
}

static void adam_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    k->root_bias2 = sqrt(1 - pow(hyper->beta2, (double)step));
    k->minus_step = -(hyper->lr / (1 - pow(hyper->beta1, (double)step)));
}

/* ---- SGD ---- */

static fsdpc_step_rule sgd_rule(const fsdpc_hyper *hyper)
{
    return hyper->momentum != 0 ? FSDPC_RULE_MOMENTUM : FSDPC_RULE_SGD;
}

static void sgd_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    (void)step;
    k->beta1 = hyper->momentum;
    k->add_gradient = 1 - hyper->dampening;
}

static void sgd_refuse(const fsdpc_hyper *hyper, char *why, size_t bytes)
{
    if (hyper->nesterov && (hyper->momentum == 0 || hyper->dampening != 0))
        snprintf(why, bytes,
                 "nesterov needs momentum and no dampening, got momentum %g and dampening %g",
                 hyper->momentum, hyper->dampening);
}

/* ---- Lion ---- */

static fsdpc_step_rule lion_rule(const fsdpc_hyper *hyper)
{
    (void)hyper;
    return FSDPC_RULE_LION;
}

/* ---- RMSprop ---- */

static fsdpc_step_rule rmsprop_rule(const fsdpc_hyper *hyper)
{
    if (hyper->centered) /* with a momentum buffer even if momentum is 0 */
        return FSDPC_RULE_RMSPROP_CENTERED;
    return hyper->momentum != 0 ? FSDPC_RULE_RMSPROP_MOMENTUM : FSDPC_RULE_RMSPROP;
}

static void rmsprop_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    (void)step;
    k->beta1 = hyper->momentum;
    k->beta2 = hyper->alpha;
    k->add_square = 1 - hyper->alpha;
}

/* ---- Muon and OrthogonalSGD ---- */

static fsdpc_step_rule matrix_rule(const fsdpc_hyper *hyper)
{
    (void)hyper;
    return FSDPC_RULE_AHEAD;
}

static void matrix_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    (void)step;
    k->beta1 = hyper->momentum;
    k->add_gradient = 1 - hyper->momentum;
}

static void matrix_refuse(const fsdpc_hyper *hyper, char *why, size_t bytes)
{
    if (hyper->ns_steps != floor(hyper->ns_steps))
        snprintf(why, bytes, "ns_steps is a whole number of iterations, got %g", hyper->ns_steps);
}

/* ---- Adafactor ---- */

static fsdpc_step_rule adafactor_rule(const fsdpc_hyper *hyper)
{
    (void)hyper;
    return FSDPC_RULE_VARIANCE;
}

/* A beta2_decay above 0, which users cannot set, leaves the state as it is. */
static void adafactor_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    k->add_square = hyper->beta2_decay > 0 ? 0 : pow((double)step, hyper->beta2_decay);
    k->eps = hyper->eps1;
    k->minus_step = -1;
}

/* ---- EMA ---- */

static fsdpc_step_rule ema_rule(const fsdpc_hyper *hyper)
{
    return hyper->swap ? FSDPC_RULE_SWAP : FSDPC_RULE_AVERAGE;
}

static void ema_scalars(const fsdpc_hyper *hyper, int64_t step, fsdpc_step_scalars *k)
{
    k->add_gradient = step == 1 ? 1 : 1 - hyper->decay;
}

/* ---- The table ---- */

const fsdpc_optim_row fsdpc_optim_table[FSDPC_OPTIM_KINDS] = {
    [FSDPC_OPTIM_ADAMW] = {.name = "AdamW",
                           .hypers = "lr beta1 beta2 eps weight_decay amsgrad maximize ",
                           .states = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
                           .rule = adam_rule,
                           .decoupled = true,
                           .scalars = adam_scalars},
    [FSDPC_OPTIM_ADAM] = {.name = "Adam",
                          .hypers = "lr beta1 beta2 eps weight_decay amsgrad maximize ",
                          .states = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
                          .rule = adam_rule,
                          .scalars = adam_scalars},
    [FSDPC_OPTIM_SGD] = {.name = "SGD",
                         .hypers = "lr momentum dampening weight_decay nesterov maximize ",
                         .states = {"momentum_buffer"},
                         .rule = sgd_rule,
                         .scalars = sgd_scalars,
                         .refuse = sgd_refuse},
    [FSDPC_OPTIM_LION] = {.name = "Lion",
                          .hypers = "lr beta1 beta2 weight_decay maximize ",
                          .states = {"exp_avg"},
                          .rule = lion_rule,
                          .decoupled = true},
    [FSDPC_OPTIM_RMSPROP] = {.name = "RMSprop",
                             .hypers = "lr alpha eps weight_decay momentum centered maximize ",
                             .states = {"square_avg", "momentum_buffer", "grad_avg"},
                             .rule = rmsprop_rule,
                             .scalars = rmsprop_scalars},
    [FSDPC_OPTIM_MUON] = {.name = "Muon",
                          .hypers = "lr momentum nesterov weight_decay eps ns_steps ns_a ns_b ns_c "
                                    "match_rms_adamw ns_bf16 ",
                          .states = {"momentum_buffer"},
                          .rule = matrix_rule,
                          .decoupled = true,
                          .scalars = matrix_scalars,
                          .refuse = matrix_refuse},
    [FSDPC_OPTIM_ORTHOGONAL_SGD] = {.name = "OrthogonalSGD",
                                    .hypers = "lr momentum nesterov weight_decay eps ns_steps ",
                                    .states = {"momentum_buffer"},
                                    .rule = matrix_rule,
                                    .decoupled = true,
                                    .scalars = matrix_scalars,
                                    .refuse = matrix_refuse},
    [FSDPC_OPTIM_ADAFACTOR] = {.name = "Adafactor",
                               .hypers = "lr beta2_decay eps1 eps2 d weight_decay maximize ",
                               .states = {"variance"},
                               .rule = adafactor_rule,
                               .decoupled = true,
                               .scalars = adafactor_scalars},
    [FSDPC_OPTIM_EMA] = {.name = "EMA",
                         .hypers = "decay swap ",
                         .states = {"average"},
                         .rule = ema_rule,
                         .scalars = ema_scalars},
    [FSDPC_OPTIM_OUTER] = {.name = "Outer",
                           .hypers = "lr momentum nesterov ",
                           .states = {"anchor", "outer_momentum"},
                           .rule = sgd_rule,
                           .scalars = sgd_scalars,
                           .refuse = sgd_refuse},
};

int fsdpc_optim_states(fsdpc_optim_kind kind, const fsdpc_hyper *hyper)
{
    int anchors = kind == FSDPC_OPTIM_OUTER ? 1 : 0; /* which its rule does not see */
    return anchors + fsdpc_rule_states(fsdpc_optim_table[kind].rule(hyper));
}

int fsdpc_optim_find(const char *name)
{
    int kind = 0;
    while (kind < FSDPC_OPTIM_KINDS && strcmp(fsdpc_optim_table[kind].name, name) != 0)
        kind++;
    return kind;
}

bool fsdpc_optim_reads(fsdpc_optim_kind kind, const char *field)
{
    size_t length = strlen(field);
    const char *at = fsdpc_optim_table[kind].hypers;
    for (; at && *at; at = strchr(at, ' ') + 1) {
        if (strncmp(at, field, length) == 0 && at[length] == ' ')
            return true;
    }
    return false;
}

const fsdpc_hyper_range *fsdpc_hyper_find(const char *name)
{
    static const fsdpc_hyper_range fields[] = {
#define X(type, field, lowest, below)                                                              \
    {#field, offsetof(fsdpc_hyper, field), sizeof(type) == sizeof(bool), lowest, below},
        FSDPC_HYPER_TABLE(X)
#undef X
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (strcmp(fields[i].name, name) == 0)
            return &fields[i];
    }
    return NULL;
}
