/* Argument checks, and the scalars of an optimizer's step.
 *
 * Plugins also compile this file, so it uses only fsdpc_fail and the dtype table.
 */
#include "ops/flat_check.h"

#include <math.h>

fsdpc_status fsdpc_flat_check_dtype(const char *operation, fsdpc_dtype dtype)
{
    if (fsdpc_dtype_is_float(dtype))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE,
                      "%s takes float32, bfloat16, float16 or float64, not %s; convert it first",
                      operation, fsdpc_dtype_name(dtype));
}

fsdpc_status fsdpc_flat_check_in_place(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                                       fsdpc_dtype src_dtype)
{
    if (dst != src || fsdpc_dtype_bytes(dst_dtype) == fsdpc_dtype_bytes(src_dtype))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "cannot cast %s to %s in place, their sizes differ; give another buffer",
                      fsdpc_dtype_name(src_dtype), fsdpc_dtype_name(dst_dtype));
}

fsdpc_status fsdpc_flat_check_pair(const char *operation, const void *dst, fsdpc_dtype dst_dtype,
                                   const void *src, fsdpc_dtype src_dtype)
{
    FSDPC_TRY(fsdpc_flat_check_dtype(operation, dst_dtype));
    FSDPC_TRY(fsdpc_flat_check_dtype(operation, src_dtype));
    return fsdpc_flat_check_in_place(dst, dst_dtype, src, src_dtype);
}

fsdpc_status fsdpc_flat_check_reduce(const fsdpc_reduce_args *args)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("reduce", args->dtype));
    FSDPC_TRY(fsdpc_flat_check_dtype("reduce", args->out_dtype));
    if (args->n_srcs < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "reduce needs at least one source, not %d; give one",
                          args->n_srcs);
    for (int src = 0; src < args->n_srcs; src++)
        FSDPC_TRY(
            fsdpc_flat_check_in_place(args->out, args->out_dtype, args->srcs[src], args->dtype));
    return FSDPC_OK;
}

fsdpc_status fsdpc_flat_check_leaf(const char *operation, fsdpc_dtype dtype, size_t leaf)
{
    FSDPC_TRY(fsdpc_flat_check_dtype(operation, dtype));
    if (leaf > 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE, "%s: a leaf has at least 1 element, not 0; give 64",
                      operation);
}

fsdpc_status fsdpc_flat_check_power(double p)
{
    if (p > 0 && p < INFINITY)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE, "sumpow: the power must be above 0 and finite, got %g", p);
}

fsdpc_status fsdpc_flat_check_norm_value(double p)
{
    if (p == 1 || p == 2 || p == (double)INFINITY)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "norm_value: p is 1, 2 or inf, not %g: read the norm and take its root", p);
}

fsdpc_status fsdpc_flat_check_clamp(fsdpc_dtype dtype, double limit)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("clamp", dtype));
    if (limit >= 0)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE, "clamp: the limit must be at least 0, got %g", limit);
}

fsdpc_status fsdpc_flat_check_init(const fsdpc_init_args *args)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("init", args->dtype));
    if (args->kind == FSDPC_INIT_UNIFORM && !(args->a <= args->b))
        return fsdpc_fail(FSDPC_ERR_VALUE, "uniform values in [%g, %g): give the lower bound first",
                          args->a, args->b);
    if (args->kind == FSDPC_INIT_NORMAL && !(args->b >= 0))
        return fsdpc_fail(FSDPC_ERR_VALUE, "a standard deviation of %g; give 0 or more", args->b);
    return FSDPC_OK;
}

/* -- optimizers -------------------------------------------------------------------------------- */

fsdpc_step_scalars fsdpc_step_prepare(const fsdpc_step_args *a)
{
    const fsdpc_hyper *h = &a->hyper;
    const fsdpc_optim_row *row = &fsdpc_optim_table[a->kind];
    fsdpc_step_scalars k = {
        .grad_scale = h->maximize ? -a->grad_scale : a->grad_scale,
        .keep = row->decoupled ? 1 - h->lr * h->weight_decay : 1,
        .decay = row->decoupled ? 0 : h->weight_decay,
        .beta1 = h->beta1,
        .beta2 = h->beta2,
        .add_gradient = 1 - h->beta1,
        .add_square = 1 - h->beta2,
        .eps = h->eps,
        .minus_step = -h->lr,
        .step = (uint32_t)a->step,
        .copy_gradient = a->copy_gradient,
        .nesterov = h->nesterov,
    };
    if (row->scalars)
        row->scalars(h, a->step, &k);
    return k;
}

fsdpc_status fsdpc_flat_check_step(const fsdpc_step_args *a)
{
    const char *name = fsdpc_optim_kind_name(a->kind);
    FSDPC_TRY(fsdpc_flat_check_dtype(name, a->param_dtype));
    FSDPC_TRY(fsdpc_flat_check_dtype(name, a->grad_dtype));
    bool wide = a->param_dtype == FSDPC_F64;
    if (a->grad_dtype == FSDPC_F64 && !wide)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "%s: a %s parameter with a float64 gradient; give both one dtype", name,
                          fsdpc_dtype_name(a->param_dtype));
    bool coded = a->state_dtype == FSDPC_U8 && fsdpc_rule_takes_codes(fsdpc_step_rule_of(a));
    bool state_ok = wide ? a->state_dtype == FSDPC_F64
                         : a->state_dtype == FSDPC_F32 || a->state_dtype == FSDPC_BF16 || coded;
    if (!state_ok && fsdpc_optim_states(a->kind, &a->hyper) > 0)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: states of a %s parameter are %s, not %s", name,
                          fsdpc_dtype_name(a->param_dtype),
                          wide ? "float64" : "float32, bfloat16 or codes",
                          fsdpc_dtype_name(a->state_dtype));
    if (a->state_dtype == FSDPC_U8 && (a->code_row == 0 || a->numel % a->code_row != 0))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: %zu elements are not whole rows of %zu", name,
                          a->numel, a->code_row);
    if (a->copy_in)
        FSDPC_TRY(fsdpc_flat_check_dtype(name, a->copy_in_dtype));
    if (a->step < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s's step is %lld; the first is 1", name,
                          (long long)a->step);
    return FSDPC_OK;
}
