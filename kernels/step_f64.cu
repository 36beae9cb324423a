/* Optimizer steps for fp64 parameters, whose states are also fp64; twin of csrc/ops/flat_step.c.
 *
 * These steps are rare, so each rule has only one kernel, which processes one element at a time.
 */
#include "array.cuh"
#include "map.cuh"
#include "step.cuh"

template <fsdpc_step_rule RULE> struct step_f64_op {
    enum { WIDTH = 1 };
    double *param;
    untyped grad, copy_in;
    double *states[FSDPC_OPTIM_MAX_STATES];
    step_scalars_at<double> scalars;

    __device__ __forceinline__ step_scalars<double> begin() const
    {
        return scalars.get();
    }
    template <int N>
    __device__ __forceinline__ void run(size_t i, const step_scalars<double> &k) const
    {
        double s[FSDPC_OPTIM_MAX_STATES] = {};
#pragma unroll
        for (int n = 0; n < rule_states(RULE); n++)
            s[n] = states[n][i];
        vec<double, 1> p;
        double g = grad.load<1, double>(i).at[0];
        p.at[0] = param[i] = step_by_rule(RULE, &k, param[i], g, s);
#pragma unroll
        for (int n = 0; n < rule_states(RULE); n++)
            states[n][i] = s[n];
        if (copy_in.base)
            copy_in.store<1>(i, p);
    }
};

template <fsdpc_step_rule RULE>
static fsdpc_status step_f64_launch(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    map_buffer buffers[] = {{a->param, sizeof(double)}};
    step_f64_op<RULE> op = {
        (double *)a->param,
        untyped(a->grad, a->grad_dtype),
        untyped(a->copy_in, a->copy_in_dtype),
        {(double *)a->states[0], (double *)a->states[1], (double *)a->states[2]},
        step_scalars_at<double>(a)};
    return map_launch("a step in fp64", op, a->numel, buffers, stream);
}

extern "C" fsdpc_status fsdpc_cuda_step_f64(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    switch (fsdpc_step_rule_of(a)) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        return step_f64_launch<FSDPC_RULE_##NAME>(a, stream);
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
    return FSDPC_ERR_VALUE;
}
