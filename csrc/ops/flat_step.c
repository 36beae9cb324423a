/* The optimizer step for fp64 parameters.
 *
 * fp32 steps are vectorised in flat_step_body.h. fp64 parameters are rare, so their steps are plain
 * loops, shared by all tables, with states also in fp64. The loops use the same order of operations
 * as fp32 steps, but no fused multiply-adds.
 */
#include "ops/flat_cpu.h"

static double adam_f64(const fsdpc_step_args *a, double p, double g, size_t i)
{
    const fsdpc_hyper *h = &a->hyper;
    double *m = (double *)a->states[0] + i, *v = (double *)a->states[1] + i;
    double bias1 = 1 - pow(h->beta1, (double)a->step), bias2 = 1 - pow(h->beta2, (double)a->step);
    if (a->kind == FSDPC_OPTIM_ADAMW)
        p *= 1 - h->lr * h->weight_decay;
    else if (h->weight_decay != 0)
        g += h->weight_decay * p;
    *m += (1 - h->beta1) * (g - *m);
    *v = h->beta2 * *v + (1 - h->beta2) * g * g;
    double square = *v;
    if (h->amsgrad) {
        double *most = (double *)a->states[2] + i;
        if (*v > *most || *v != *v)
            *most = *v;
        square = *most;
    }
    return p - h->lr / bias1 * *m / (sqrt(square) / sqrt(bias2) + h->eps);
}

static double sgd_f64(const fsdpc_step_args *a, double p, double g, size_t i)
{
    const fsdpc_hyper *h = &a->hyper;
    if (h->weight_decay != 0)
        g += h->weight_decay * p;
    if (h->momentum != 0) {
        double *buffer = (double *)a->states[0] + i;
        *buffer = a->copy_gradient ? g : h->momentum * *buffer + (1 - h->dampening) * g;
        g = h->nesterov ? g + h->momentum * *buffer : *buffer;
    }
    return p - h->lr * g;
}

static double lion_f64(const fsdpc_step_args *a, double p, double g, size_t i)
{
    const fsdpc_hyper *h = &a->hyper;
    double *m = (double *)a->states[0] + i;
    double ahead = h->beta1 * *m + (1 - h->beta1) * g;
    *m = h->beta2 * *m + (1 - h->beta2) * g;
    double sign = ahead == 0 || ahead != ahead ? ahead : copysign(1, ahead);
    return p * (1 - h->lr * h->weight_decay) - h->lr * sign;
}

void fsdpc_flat_step_f64(const fsdpc_step_args *a, size_t begin, size_t end)
{
    double scale = a->grad_scale * (a->hyper.maximize ? -1 : 1);
    double *param = a->param;
    if (a->grad_scale_at)
        scale *= *a->grad_scale_at;
    for (size_t i = begin; i < end; i++) {
        double g = fsdpc_f64_load_as(a->grad, i, a->grad_dtype) * scale;
        if (a->kind == FSDPC_OPTIM_SGD)
            param[i] = sgd_f64(a, param[i], g, i);
        else if (a->kind == FSDPC_OPTIM_LION)
            param[i] = lion_f64(a, param[i], g, i);
        else
            param[i] = adam_f64(a, param[i], g, i);
        if (a->copy_in)
            fsdpc_f64_store_as(a->copy_in, i, a->copy_in_dtype, param[i]);
    }
}
