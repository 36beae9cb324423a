/* The optimizer step for fp64 parameters.
 *
 * fp32 steps are vectorised in flat_step_body.h. fp64 parameters are rare, so one plain loop,
 * shared by all tables, runs the rules of step_rules.h in fp64, with states also in fp64. It uses
 * no fused multiply-adds.
 */
#include "ops/flat_cpu.h"

#define STEP_FN static inline
#define STEP_REAL double
#define STEP_VALUE double
#define STEP_SCALARS fsdpc_step_scalars

STEP_FN double step_fused(double a, double b, double c)
{
    return a * b + c;
}

STEP_FN double step_fused_by(double a, double b, double c)
{
    return a * b + c;
}

STEP_FN double step_root(double a)
{
    return sqrt(a);
}

STEP_FN double step_sign(double a)
{
    return a == 0 || a != a ? a : copysign(1, a);
}

STEP_FN double step_most(double a, double b)
{
    return a > b || a != a ? a : b;
}

#include "ops/step_rules.h"

void fsdpc_flat_step_f64(const fsdpc_step_args *a, size_t begin, size_t end)
{
    fsdpc_step_scalars k = fsdpc_step_prepare(a);
    fsdpc_step_rule rule = fsdpc_step_rule_of(a);
    int n_states = fsdpc_rule_states(rule);
    double *param = a->param;
    if (a->grad_scale_at)
        k.grad_scale *= *a->grad_scale_at;
    for (size_t i = begin; i < end; i++) {
        double s[FSDPC_OPTIM_MAX_STATES] = {0};
        for (int n = 0; n < n_states; n++)
            s[n] = ((const double *)a->states[n])[i];
        param[i] =
            step_by_rule(rule, &k, param[i], fsdpc_f64_load_as(a->grad, i, a->grad_dtype), s);
        for (int n = 0; n < n_states; n++)
            ((double *)a->states[n])[i] = s[n];
        if (a->copy_in)
            fsdpc_f64_store_as(a->copy_in, i, a->copy_in_dtype, param[i]);
    }
}
