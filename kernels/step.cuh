/* The rules of optimizer steps (csrc/ops/step_rules.h) for one element in CUDA, in fp32 and fp64.
 *
 * The same operations, in the same order and on the same scalars, give the same bits as on the CPU.
 * Operations are fused only if the CPU's kernel uses a fused multiply-add; all others are rounded
 * separately. Files that include this header are compiled with -fmad=false and use correctly
 * rounded division and square root.
 */
#ifndef FSDPC_KERNELS_STEP_CUH
#define FSDPC_KERNELS_STEP_CUH

#include "common.cuh"

__host__ __device__ constexpr int rule_states(fsdpc_step_rule rule)
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

template <typename W> struct step_scalars {
#define X(field) W field;
    FSDPC_STEP_SCALARS(X)
#undef X
    uint32_t step;
    bool copy_gradient, nesterov;
};

template <typename W>
__host__ __device__ __forceinline__ step_scalars<W> step_rounded(const fsdpc_step_scalars &k)
{
    return step_scalars<W>{
#define X(field) (W) k.field,
        FSDPC_STEP_SCALARS(X)
#undef X
            k.step,
        k.copy_gradient, k.nesterov};
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

/* -- the rules, in fp32 and in fp64 without fused operations ----------------------------------- */

__device__ __forceinline__ float step_fused(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

__device__ __forceinline__ double step_fused(double a, double b, double c)
{
    return a * b + c;
}

template <typename W> __device__ __forceinline__ W step_fused_by(W a, W b, W c)
{
    return step_fused(a, b, c);
}

__device__ __forceinline__ float step_root(float a)
{
    return __fsqrt_rn(a);
}

__device__ __forceinline__ double step_root(double a)
{
    return sqrt(a);
}

template <typename W> __device__ __forceinline__ W step_sign(W a)
{
    return a == 0 || a != a ? a : copysign((W)1, a);
}

template <typename W> __device__ __forceinline__ W step_most(W a, W b)
{
    return a > b || a != a ? a : b;
}

#define STEP_FN __device__ __forceinline__
#define STEP_SCALARS step_scalars<STEP_REAL>
#define STEP_REAL float
#define STEP_VALUE float
#include "ops/step_rules.h"
#undef STEP_REAL
#undef STEP_VALUE
#define STEP_REAL double
#define STEP_VALUE double
#include "ops/step_rules.h"

#endif
