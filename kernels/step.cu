/* Single-pass optimizer steps, including copy-in; twin of csrc/ops/flat_step_body.h.
 *
 * Adam with fp32 states has specialised kernels for fp32 and bf16 parameters, gradients and
 * parameter buffers. With fp32 masters and a bf16 gradient and parameter buffer, they move 28 bytes
 * per element. SGD, momentum and Lion over fp32 parameters also have specialised kernels. All other
 * cases use one kernel per rule, which selects dtypes at run time. The value that is cast into the
 * parameter buffer is the stored, already rounded parameter.
 *
 * BF16 states are rounded stochastically, using the element's random word (base/random.h). As on
 * the CPU, the first state uses the word's lower half and the others its upper half.
 */
#include "array.cuh"
#include "map.cuh"
#include "random.cuh"
#include "step.cuh"

struct no_array { /* no parameter buffer */
    __host__ __device__ no_array(const void *, fsdpc_dtype) {}
    template <int N, typename W>
    __device__ __forceinline__ void store(size_t, const vec<W, N> &) const
    {
    }
};

struct fp32_states {
    float *at[FSDPC_OPTIM_MAX_STATES];

    fp32_states(const fsdpc_step_args *a)
    {
        for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++)
            at[s] = (float *)a->states[s];
    }
    template <int N> __device__ __forceinline__ vec<float, N> load(int s, size_t i) const
    {
        return ::load<N>(at[s] + i);
    }
    template <int STATES, int N>
    __device__ __forceinline__ void
    store(size_t i, const vec<float, N> (&states)[FSDPC_OPTIM_MAX_STATES], uint32_t) const
    {
#pragma unroll
        for (int s = 0; s < STATES; s++)
            ::store<N>(at[s] + i, states[s]);
    }
};

/* Rounds up to the next bf16 number with a probability proportional to the truncated part; leaves
 * NaN and infinity unchanged. */
__device__ __forceinline__ float round_stochastically(float x, uint32_t random)
{
    uint32_t bits = __float_as_uint(x);
    return x != x ? x : __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
}

/* Stores F32 states unchanged and BF16 states rounded. */
struct any_states {
    void *at[FSDPC_OPTIM_MAX_STATES];
    bool rounded;
    uint64_t seed, number, first;

    any_states(const fsdpc_step_args *a)
    {
        for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++)
            at[s] = a->states[s];
        rounded = a->state_dtype == FSDPC_BF16;
        seed = a->seed;
        number = a->number;
        first = a->first;
    }
    template <int N> __device__ __forceinline__ vec<float, N> load(int s, size_t i) const
    {
        if (rounded)
            return load_wide<N, float>((const bf16 *)at[s] + i);
        return ::load<N>((const float *)at[s] + i);
    }
    template <int STATES, int N>
    __device__ __forceinline__ void
    store(size_t i, const vec<float, N> (&states)[FSDPC_OPTIM_MAX_STATES], uint32_t step) const
    {
        if (!rounded) {
#pragma unroll
            for (int s = 0; s < STATES; s++)
                ::store<N>((float *)at[s] + i, states[s]);
            return;
        }
        vec<uint32_t, N> random = words<N>(number << 32 | step, first + i);
#pragma unroll
        for (int s = 0; s < STATES; s++) {
            vec<float, N> values;
#pragma unroll
            for (int k = 0; k < N; k++)
                values.at[k] =
                    round_stochastically(states[s].at[k], random.at[k] >> (s == 0 ? 0 : 16));
            store_narrow<N>((bf16 *)at[s] + i, values);
        }
    }
    /* Returns the random words of elements at .. at + N - 1 of the parameter. */
    template <int N>
    __device__ __forceinline__ vec<uint32_t, N> words(uint64_t stream, uint64_t element) const
    {
        vec<uint32_t, N> random;
        philox_words four = philox(seed, stream, element / 4);
#pragma unroll
        for (int k = 0; k < N; k++) {
            uint32_t place = (uint32_t)(element + k) % 4;
            if (k > 0 && place == 0)
                four = philox(seed, stream, (element + k) / 4);
            /* not four.at[place], which would put the words into local memory */
            random.at[k] = place < 2 ? (place == 0 ? four.at[0] : four.at[1])
                                     : (place == 2 ? four.at[2] : four.at[3]);
        }
        return random;
    }
};

template <fsdpc_step_rule RULE, typename Param, typename Grad, typename States, typename CopyIn>
struct step_op {
    enum { WIDTH = 4 }; /* for fp32 states; map.cuh */
    Param param;
    Grad grad;
    States states;
    CopyIn copy_in;
    step_scalars_at<float> scalars;

    __device__ __forceinline__ step_scalars<float> begin() const
    {
        return scalars.get();
    }
    template <int N>
    __device__ __forceinline__ void run(size_t i, const step_scalars<float> &k) const
    {
        const int STATES = rule_states(RULE);
        vec<float, N> g = grad.template load<N, float>(i), p = param.template load<N, float>(i);
        vec<float, N> s[FSDPC_OPTIM_MAX_STATES];
#pragma unroll
        for (int n = 0; n < STATES; n++)
            s[n] = states.template load<N>(n, i);
#pragma unroll
        for (int e = 0; e < N; e++) {
            float mine[FSDPC_OPTIM_MAX_STATES] = {};
#pragma unroll
            for (int n = 0; n < STATES; n++)
                mine[n] = s[n].at[e];
            p.at[e] = step_by_rule(RULE, &k, p.at[e], g.at[e], mine);
#pragma unroll
            for (int n = 0; n < STATES; n++)
                s[n].at[e] = mine[n];
        }
        states.template store<STATES, N>(i, s, k.step);
        copy_in.template store<N>(i, param.template store<N>(i, p));
    }
};

template <fsdpc_step_rule RULE, typename Param, typename Grad, typename States, typename CopyIn>
static fsdpc_status step_launch(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    map_buffer buffers[3 + FSDPC_OPTIM_MAX_STATES] = {
        {a->param, fsdpc_dtype_bytes(a->param_dtype)},
        {a->grad, fsdpc_dtype_bytes(a->grad_dtype)},
        {a->copy_in, a->copy_in ? fsdpc_dtype_bytes(a->copy_in_dtype) : 0}};
    for (int s = 0; s < rule_states(RULE); s++)
        buffers[3 + s] = map_buffer{a->states[s], fsdpc_dtype_bytes(a->state_dtype)};
    step_op<RULE, Param, Grad, States, CopyIn> op = {
        Param(a->param, a->param_dtype), Grad(a->grad, a->grad_dtype), States(a),
        CopyIn(a->copy_in, a->copy_in_dtype), step_scalars_at<float>(a)};
    return map_launch("a step", op, a->numel, buffers, stream);
}

template <fsdpc_step_rule RULE>
static fsdpc_status step_any(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    if (a->copy_in)
        return step_launch<RULE, untyped, untyped, any_states, untyped>(a, stream);
    return step_launch<RULE, untyped, untyped, any_states, no_array>(a, stream);
}

/* -- common combinations ----------------------------------------------------------------------- */

static bool is_common(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F32 || dtype == FSDPC_BF16;
}

template <fsdpc_step_rule RULE, typename P, typename G>
static fsdpc_status typed_copy_in(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    if (!a->copy_in)
        return step_launch<RULE, typed<P>, typed<G>, fp32_states, no_array>(a, stream);
    if (a->copy_in_dtype == FSDPC_BF16)
        return step_launch<RULE, typed<P>, typed<G>, fp32_states, typed<bf16>>(a, stream);
    return step_launch<RULE, typed<P>, typed<G>, fp32_states, typed<float>>(a, stream);
}

template <fsdpc_step_rule RULE, typename P>
static fsdpc_status typed_grad(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    return a->grad_dtype == FSDPC_BF16 ? typed_copy_in<RULE, P, bf16>(a, stream)
                                       : typed_copy_in<RULE, P, float>(a, stream);
}

/* The rules whose dtypes are compiled in; the others select them at run time. */
constexpr bool is_specialised(fsdpc_step_rule rule)
{
    return rule == FSDPC_RULE_ADAM || rule == FSDPC_RULE_SGD || rule == FSDPC_RULE_MOMENTUM ||
           rule == FSDPC_RULE_LION;
}

template <fsdpc_step_rule RULE>
static fsdpc_status step_of(const fsdpc_step_args *a, const fsdpc_stream *stream)
{
    bool common = is_common(a->grad_dtype) && a->state_dtype == FSDPC_F32 &&
                  (!a->copy_in || is_common(a->copy_in_dtype));
    if constexpr (is_specialised(RULE))
        if (common && a->param_dtype == FSDPC_F32)
            return typed_grad<RULE, float>(a, stream);
    if constexpr (RULE == FSDPC_RULE_ADAM)
        if (common && a->param_dtype == FSDPC_BF16)
            return typed_grad<RULE, bf16>(a, stream);
    return step_any<RULE>(a, stream);
}

extern "C" fsdpc_status fsdpc_cuda_step(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    if (a->param_dtype == FSDPC_F64)
        return fsdpc_cuda_step_f64(a, stream);
    if (a->state_dtype == FSDPC_U8 && fsdpc_rule_states(fsdpc_step_rule_of(a)) > 0)
        return fsdpc_cuda_step_coded(a, stream);
    switch (fsdpc_step_rule_of(a)) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        return step_of<FSDPC_RULE_##NAME>(a, stream);
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
    return FSDPC_ERR_VALUE;
}
