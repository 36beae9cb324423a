/* The arithmetic of optimizer steps, one element at a time; twin of csrc/ops/flat_step_rules_body.h
 * and of the fp64 rules in csrc/ops/flat_step.c.
 *
 * The same operations, in the same order and on the same scalars, give the same bits as on the CPU.
 * Operations are fused only if the CPU's kernel uses a fused multiply-add; all others are rounded
 * separately. Files that include this header are compiled with -fmad=false and use correctly
 * rounded division and square root.
 */
#ifndef FSDPC_KERNELS_STEP_CUH
#define FSDPC_KERNELS_STEP_CUH

#include "common.cuh"

enum step_rule { RULE_ADAM, RULE_AMSGRAD, RULE_SGD, RULE_MOMENTUM, RULE_LION };

static inline step_rule rule_of(const fsdpc_step_args *a)
{
    if (a->kind == FSDPC_OPTIM_SGD)
        return a->hyper.momentum != 0 ? RULE_MOMENTUM : RULE_SGD;
    return a->kind == FSDPC_OPTIM_LION ? RULE_LION : a->hyper.amsgrad ? RULE_AMSGRAD : RULE_ADAM;
}

__host__ __device__ constexpr int rule_states(step_rule rule)
{
    return rule == RULE_SGD ? 0 : rule == RULE_ADAM ? 2 : rule == RULE_AMSGRAD ? 3 : 1;
}

template <typename W> struct step_scalars {
    W grad_scale; /* negative to maximize */
    W keep;       /* 1 - lr * decay if decay is decoupled */
    W decay;      /* added to the gradient; 0 if decoupled */
    W beta1, beta2, add_gradient, add_square, root_bias2, eps;
    W minus_step; /* -lr; for Adam, divided by its bias correction */
    uint32_t step;
    bool copy_gradient, nesterov;
};

template <typename W>
__host__ __device__ __forceinline__ step_scalars<W> step_rounded(const fsdpc_step_scalars &k)
{
    return step_scalars<W>{(W)k.grad_scale, (W)k.keep,         (W)k.decay,      (W)k.beta1,
                           (W)k.beta2,      (W)k.add_gradient, (W)k.add_square, (W)k.root_bias2,
                           (W)k.eps,        (W)k.minus_step,   k.step,          k.copy_gradient,
                           k.nesterov};
}

/* A step's scalars, passed with the launch or read from device memory at run time. */
template <typename W> struct step_scalars_at {
    step_scalars<W> given;
    const fsdpc_step_scalars *at;
    double grad_scale; /* unrounded; multiplied by *grad_scale_at unless that is NULL */
    const double *grad_scale_at;

    step_scalars_at(const fsdpc_step_args *a)
        : given(step_rounded<W>(fsdpc_step_prepare(a))), at(a->scalars),
          grad_scale(fsdpc_step_prepare(a).grad_scale), grad_scale_at(a->grad_scale_at)
    {
    }
    __device__ __forceinline__ step_scalars<W> get() const
    {
        step_scalars<W> k = at ? step_rounded<W>(*at) : given;
        if (grad_scale_at)
            k.grad_scale = (W)((at ? at->grad_scale : grad_scale) * *grad_scale_at);
        return k;
    }
};

/* -- fp32 -------------------------------------------------------------------------------------- */

__device__ __forceinline__ float adam_rule(step_rule rule, const step_scalars<float> &k, float p,
                                           float g, float (&s)[FSDPC_OPTIM_MAX_STATES])
{
    if (k.decay != 0)
        g = __fmaf_rn(p, k.decay, g);
    else
        p = p * k.keep;
    if (k.add_gradient < 0.5f)
        s[0] = __fmaf_rn(g - s[0], k.add_gradient, s[0]);
    else
        s[0] = __fmaf_rn(g - s[0], k.add_gradient - 1.0f, g);
    s[1] = __fmaf_rn(g * k.add_square, g, s[1] * k.beta2);
    float square = s[1];
    if (rule == RULE_AMSGRAD) /* NaN propagates from either side */
        square = s[2] = s[1] > s[2] || s[1] != s[1] ? s[1] : s[2];
    float root = __fsqrt_rn(square) / k.root_bias2;
    return p + k.minus_step * s[0] / (root + k.eps);
}

__device__ __forceinline__ float sgd_rule(step_rule rule, const step_scalars<float> &k, float p,
                                          float g, float (&s)[FSDPC_OPTIM_MAX_STATES])
{
    if (k.decay != 0)
        g = __fmaf_rn(p, k.decay, g);
    if (rule == RULE_MOMENTUM) {
        s[0] = k.copy_gradient ? g : __fmaf_rn(g, k.add_gradient, s[0] * k.beta1);
        g = k.nesterov ? __fmaf_rn(s[0], k.beta1, g) : s[0];
    }
    return __fmaf_rn(g, k.minus_step, p);
}

template <typename W> __device__ __forceinline__ W sign_of(W x)
{
    return x == 0 || x != x ? x : copysign((W)1, x); /* NaN stays NaN */
}

__device__ __forceinline__ float lion_rule(const step_scalars<float> &k, float p, float g,
                                           float (&s)[FSDPC_OPTIM_MAX_STATES])
{
    float ahead = __fmaf_rn(g, k.add_gradient, s[0] * k.beta1);
    s[0] = __fmaf_rn(g, k.add_square, s[0] * k.beta2);
    return __fmaf_rn(sign_of(ahead), k.minus_step, p * k.keep);
}

/* -- fp64, without fused operations ------------------------------------------------------------ */

__device__ __forceinline__ double adam_rule(step_rule rule, const step_scalars<double> &k, double p,
                                            double g, double (&s)[FSDPC_OPTIM_MAX_STATES])
{
    if (k.decay != 0)
        g += k.decay * p;
    else
        p *= k.keep;
    s[0] += k.add_gradient * (g - s[0]);
    s[1] = k.beta2 * s[1] + k.add_square * g * g;
    double square = s[1];
    if (rule == RULE_AMSGRAD)
        square = s[2] = s[1] > s[2] || s[1] != s[1] ? s[1] : s[2];
    return p + k.minus_step * s[0] / (sqrt(square) / k.root_bias2 + k.eps);
}

__device__ __forceinline__ double sgd_rule(step_rule rule, const step_scalars<double> &k, double p,
                                           double g, double (&s)[FSDPC_OPTIM_MAX_STATES])
{
    if (k.decay != 0)
        g += k.decay * p;
    if (rule == RULE_MOMENTUM) {
        s[0] = k.copy_gradient ? g : k.beta1 * s[0] + k.add_gradient * g;
        g = k.nesterov ? g + k.beta1 * s[0] : s[0];
    }
    return p + k.minus_step * g;
}

__device__ __forceinline__ double lion_rule(const step_scalars<double> &k, double p, double g,
                                            double (&s)[FSDPC_OPTIM_MAX_STATES])
{
    double ahead = k.beta1 * s[0] + k.add_gradient * g;
    s[0] = k.beta2 * s[0] + k.add_square * g;
    return p * k.keep + k.minus_step * sign_of(ahead);
}

template <step_rule RULE, typename W>
__device__ __forceinline__ W step_rule_apply(const step_scalars<W> &k, W p, W g,
                                             W (&s)[FSDPC_OPTIM_MAX_STATES])
{
    g = g * k.grad_scale;
    if (RULE == RULE_LION)
        return lion_rule(k, p, g, s);
    if (RULE == RULE_SGD || RULE == RULE_MOMENTUM)
        return sgd_rule(RULE, k, p, g, s);
    return adam_rule(RULE, k, p, g, s);
}

#endif
