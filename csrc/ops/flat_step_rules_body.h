/* Arithmetic of optimizer steps, one vector at a time.
 *
 * Included by flat_cpu_body.h. The scalars are computed once in fp64 and rounded to fp32;
 * per-element arithmetic is fp32. AdamW and Adam follow PyTorch's fused CPU kernel
 * (aten/src/ATen/native/cpu/FusedAdamKernel.cpp) operation by operation, including the
 * multiply-adds that its compiler fused. m moves towards g by a fused multiply-add, v adds (1 - b2)
 * g * g fused, and Adam's decay is added to the gradient fused. Everything else is rounded after
 * each operation. In PyTorch, SGD and Lion are sequences of x.mul_(a) and x.add_(y, alpha=b); the
 * latter is one fused multiply-add. An fp32 step thus has the same bits as torch's on machines with
 * FMA, and as every other path here, including tails.
 */

/* The optimizer rules used by kernels; always passed as constants. */
typedef enum step_rule { RULE_ADAM, RULE_AMSGRAD, RULE_SGD, RULE_MOMENTUM, RULE_LION } step_rule;

FSDPC_INLINE int rule_states(step_rule rule)
{
    return rule == RULE_SGD ? 0 : rule == RULE_ADAM ? 2 : rule == RULE_AMSGRAD ? 3 : 1;
}

typedef struct step_scalars {
    float grad_scale; /* negative to maximize */
    float keep;       /* 1 - lr * decay if decay is decoupled */
    float decay;      /* added to the gradient; 0 if decoupled */
    float beta1, beta2, add_gradient, add_square, root_bias2, eps;
    float minus_step; /* -lr; for Adam, divided by its bias correction */
    bool copy_gradient, nesterov;
} step_scalars;

static step_rule rule_of(const fsdpc_step_args *a)
{
    if (a->kind == FSDPC_OPTIM_SGD)
        return a->hyper.momentum != 0 ? RULE_MOMENTUM : RULE_SGD;
    return a->kind == FSDPC_OPTIM_LION ? RULE_LION : a->hyper.amsgrad ? RULE_AMSGRAD : RULE_ADAM;
}

static step_scalars step_prepare(const fsdpc_step_args *a)
{
    fsdpc_step_scalars k = fsdpc_step_prepare(a);
    if (a->grad_scale_at)
        k.grad_scale *= *a->grad_scale_at;
    return (step_scalars){
        .grad_scale = (float)k.grad_scale,
        .keep = (float)k.keep,
        .decay = (float)k.decay,
        .beta1 = (float)k.beta1,
        .beta2 = (float)k.beta2,
        .add_gradient = (float)k.add_gradient,
        .add_square = (float)k.add_square,
        .root_bias2 = (float)k.root_bias2,
        .eps = (float)k.eps,
        .minus_step = (float)k.minus_step,
        .copy_gradient = k.copy_gradient,
        .nesterov = k.nesterov,
    };
}

/* Fused on every path: if the compiler's baseline lacks the instruction, the equally exact libm
 * function is called out of line. */
#if defined(FSDPC_VEC_AVX512) || defined(FSDPC_VEC_AVX2)
FSDPC_INLINE fsdpc_vf fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    return fsdpc_vf_fma(a, b, c);
}
#else
static __attribute__((noinline)) fsdpc_vf fused(fsdpc_vf a, fsdpc_vf b, fsdpc_vf c)
{
    for (int i = 0; i < FSDPC_LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

FSDPC_INLINE fsdpc_vf fused_by(fsdpc_vf a, float b, fsdpc_vf c)
{
    return fused(a, fsdpc_vf_splat(b), c);
}

typedef struct step_states {
    fsdpc_vf a, b, c;
} step_states;

FSDPC_INLINE fsdpc_vf adam_rule(step_rule rule, const step_scalars *k, fsdpc_vf p, fsdpc_vf g,
                                step_states *s)
{
    if (k->decay != 0)
        g = fused_by(p, k->decay, g);
    else
        p = p * fsdpc_vf_splat(k->keep);
    if (k->add_gradient < 0.5f)
        s->a = fused_by(g - s->a, k->add_gradient, s->a);
    else
        s->a = fused_by(g - s->a, k->add_gradient - 1.0f, g);
    s->b = fused(g * fsdpc_vf_splat(k->add_square), g, s->b * fsdpc_vf_splat(k->beta2));
    fsdpc_vf square = s->b;
    if (rule == RULE_AMSGRAD) /* NaN propagates from either side, as in torch.maximum */
        square = s->c = fsdpc_vf_select((s->b > s->c) | (s->b != s->b), s->b, s->c);
    fsdpc_vf root = fsdpc_vf_sqrt(square) / fsdpc_vf_splat(k->root_bias2);
    return p + fsdpc_vf_splat(k->minus_step) * s->a / (root + fsdpc_vf_splat(k->eps));
}

FSDPC_INLINE fsdpc_vf sgd_rule(step_rule rule, const step_scalars *k, fsdpc_vf p, fsdpc_vf g,
                               step_states *s)
{
    if (k->decay != 0)
        g = fused_by(p, k->decay, g);
    if (rule == RULE_MOMENTUM) {
        if (k->copy_gradient)
            s->a = g;
        else
            s->a = fused_by(g, k->add_gradient, s->a * fsdpc_vf_splat(k->beta1));
        g = k->nesterov ? fused_by(s->a, k->beta1, g) : s->a;
    }
    return fused_by(g, k->minus_step, p);
}

FSDPC_INLINE fsdpc_vf lion_rule(const step_scalars *k, fsdpc_vf p, fsdpc_vf g, step_states *s)
{
    fsdpc_vf ahead = fused_by(g, k->add_gradient, s->a * fsdpc_vf_splat(k->beta1));
    fsdpc_vf sign = fsdpc_vf_copysign(fsdpc_vf_splat(1.0f), ahead);
    sign = fsdpc_vf_select((ahead == 0.0f) | (ahead != ahead), ahead, sign); /* NaN stays NaN */
    s->a = fused_by(g, k->add_square, s->a * fsdpc_vf_splat(k->beta2));
    return fused_by(sign, k->minus_step, p * fsdpc_vf_splat(k->keep));
}

FSDPC_INLINE fsdpc_vf step_rule_apply(step_rule rule, const step_scalars *k, fsdpc_vf p, fsdpc_vf g,
                                      step_states *s)
{
    g = g * fsdpc_vf_splat(k->grad_scale);
    if (rule == RULE_LION)
        return lion_rule(k, p, g, s);
    if (rule == RULE_SGD || rule == RULE_MOMENTUM)
        return sgd_rule(rule, k, p, g, s);
    return adam_rule(rule, k, p, g, s);
}
