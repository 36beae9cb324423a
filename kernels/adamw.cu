/* AdamW and Adam in one pass, publishing the wire; twin of csrc/ops/flat_step_body.h.
 *
 * The same operations in the same order on the same scalars: fused where the CPU's kernel names a
 * fused multiply-add, rounded everywhere else (this file is compiled with -fmad=false, and division
 * and square root are the correctly rounded ones), so the bits are the CPU's.  The wire gets the
 * cast of the parameter as stored.  28 bytes an element with fp32 masters, bf16 gradients and wire.
 */
#include "map.cuh"

struct adamw_scalars {
    float grad_scale; /* negative to maximize */
    float keep;       /* 1 - lr * decay, 1 where decay is not decoupled */
    float decay;      /* joins the gradient; 0 where decoupled */
    float toward_grad, beta2, add_square, root_bias2, eps, minus_step;
};

static adamw_scalars adamw_prepare(const fsdpc_step_args *a)
{
    const fsdpc_hyper *h = &a->hyper;
    bool decoupled = a->kind == FSDPC_OPTIM_ADAMW;
    double bias1 = 1 - pow(h->beta1, (double)a->step), bias2 = 1 - pow(h->beta2, (double)a->step);
    adamw_scalars k;
    k.grad_scale = h->maximize ? -a->grad_scale : a->grad_scale;
    k.keep = decoupled ? (float)(1 - h->lr * h->weight_decay) : 1.0f;
    k.decay = decoupled ? 0.0f : (float)h->weight_decay;
    k.toward_grad = (float)(1 - h->beta1);
    k.beta2 = (float)h->beta2;
    k.add_square = (float)(1 - h->beta2);
    k.root_bias2 = (float)sqrt(bias2);
    k.eps = (float)h->eps;
    k.minus_step = (float)-(h->lr / bias1);
    return k;
}

__device__ __forceinline__ float adamw_step(const adamw_scalars &k, float p, float g, float *m,
                                            float *v)
{
    g = g * k.grad_scale;
    if (k.decay != 0)
        g = __fmaf_rn(p, k.decay, g);
    else
        p = p * k.keep;
    if (k.toward_grad < 0.5f)
        *m = __fmaf_rn(g - *m, k.toward_grad, *m);
    else
        *m = __fmaf_rn(g - *m, k.toward_grad - 1.0f, g);
    *v = __fmaf_rn(g * k.add_square, g, *v * k.beta2);
    float root = __fsqrt_rn(*v) / k.root_bias2;
    return p + k.minus_step * *m / (root + k.eps);
}

struct no_wire {
};

template <int N, typename P, typename Wire>
__device__ __forceinline__ void publish(Wire *wire, size_t i, const vec<P, N> &stored)
{
    vec<wide<P>, N> value;
#pragma unroll
    for (int k = 0; k < N; k++)
        value.at[k] = widen<wide<P>>(stored.at[k]);
    store_narrow<N>(wire + i, value);
}
template <int N, typename P>
__device__ __forceinline__ void publish(no_wire *, size_t, const vec<P, N> &)
{
}

template <typename P, typename G, typename Wire> struct adamw_op {
    enum { WIDTH = 8 };
    P *param;
    const G *grad;
    float *exp_avg, *exp_avg_sq;
    Wire *wire;
    adamw_scalars k;

    template <int N> __device__ __forceinline__ void run(size_t i) const
    {
        vec<float, N> g = load_wide<N, float>(grad + i), p = load_wide<N, float>(param + i);
        vec<float, N> m = load<N>(exp_avg + i), v = load<N>(exp_avg_sq + i);
        vec<P, N> stored;
#pragma unroll
        for (int e = 0; e < N; e++)
            stored.at[e] = narrow<P>(adamw_step(k, p.at[e], g.at[e], &m.at[e], &v.at[e]));
        store<N>(param + i, stored);
        store<N>(exp_avg + i, m);
        store<N>(exp_avg_sq + i, v);
        publish<N>(wire, i, stored);
    }
};

template <typename P, typename G, typename Wire>
static fsdpc_status adamw_launch(const fsdpc_step_args *a, size_t wire_bytes,
                                 const fsdpc_stream *stream)
{
    map_buffer buffers[] = {{a->param, sizeof(P)},
                            {a->grad, sizeof(G)},
                            {a->states[0], sizeof(float)},
                            {a->states[1], sizeof(float)},
                            {a->wire, wire_bytes}};
    adamw_op<P, G, Wire> op = {(P *)a->param,         (const G *)a->grad, (float *)a->states[0],
                               (float *)a->states[1], (Wire *)a->wire,    adamw_prepare(a)};
    return map_launch("adamw", op, a->numel, buffers, stream);
}

template <typename P, typename G>
static fsdpc_status adamw_wire(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    if (!a->wire)
        return adamw_launch<P, G, no_wire>(a, 0, stream);
    FSDPC_FOR_FLOAT(a->wire_dtype, Wire, return adamw_launch<P, G, Wire>(a, sizeof(Wire), stream))
    return FSDPC_ERR_DTYPE;
}

extern "C" fsdpc_status fsdpc_cuda_adamw(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    bool half_grad = a->grad_dtype == FSDPC_BF16;
    if (a->param_dtype == FSDPC_F32)
        return half_grad ? adamw_wire<float, bf16>(a, stream) : adamw_wire<float, float>(a, stream);
    return half_grad ? adamw_wire<bf16, bf16>(a, stream) : adamw_wire<bf16, float>(a, stream);
}
