/* Steps with block-coded states; twin of csrc/ops/flat_step_coded_body.h.
 *
 * A warp steps a block: it decodes, steps and keeps the states of 8 elements per lane in registers,
 * finds the new maxima by shuffles, and encodes. Dtypes are selected at run time.
 */
#include "array.cuh"
#include "block_code.cuh"
#include "step.cuh"

struct coded_step {
    untyped param, grad, copy_in;
    bool has_copy_in;
    uint8_t *codes[FSDPC_OPTIM_MAX_STATES];
    float *maxima[FSDPC_OPTIM_MAX_STATES];
    fsdpc_code code[FSDPC_OPTIM_MAX_STATES];
    size_t row, blocks;
    step_scalars_at<float> scalars;

    coded_step(const fsdpc_step_args *a)
        : param(a->param, a->param_dtype), grad(a->grad, a->grad_dtype),
          copy_in(a->copy_in, a->copy_in_dtype), has_copy_in(a->copy_in), row(a->code_row),
          blocks(fsdpc_code_blocks(a->numel, a->code_row)), scalars(a)
    {
        for (int s = 0; s < FSDPC_OPTIM_MAX_STATES; s++) {
            codes[s] = (uint8_t *)a->states[s];
            maxima[s] = a->maxima[s];
            code[s] = fsdpc_state_code(a->kind, &a->hyper, s);
        }
    }
};

template <fsdpc_step_rule RULE>
__global__ void __launch_bounds__(BLOCK_THREADS) coded_kernel(coded_step op)
{
    const int STATES = rule_states(RULE);
    const step_scalars<float> k = op.scalars.get();
    int lane = (int)(threadIdx.x % WARP);
    for (size_t b = grid_thread() / WARP; b < op.blocks; b += grid_threads() / WARP) {
        code_span span = code_span_of(b, op.row);
        float states[CODES_PER_LANE][FSDPC_OPTIM_MAX_STATES];
        int most[FSDPC_OPTIM_MAX_STATES] = {};
#pragma unroll
        for (int e = 0; e < CODES_PER_LANE; e++) {
            size_t i = span.begin + lane + e * WARP;
            if (lane + e * WARP >= span.n)
                break;
#pragma unroll
            for (int s = 0; s < STATES; s++)
                states[e][s] = code_decode(op.code[s], op.codes[s][i], op.maxima[s][b]);
            vec<float, 1> p = op.param.template load<1, float>(i);
            vec<float, 1> g = op.grad.template load<1, float>(i);
            p.at[0] = step_by_rule(RULE, &k, p.at[0], g.at[0], states[e]);
            p = op.param.template store<1>(i, p);
            if (op.has_copy_in)
                op.copy_in.template store<1>(i, p);
#pragma unroll
            for (int s = 0; s < STATES; s++)
                most[s] = code_most(most[s], states[e][s]);
        }
#pragma unroll
        for (int s = 0; s < STATES; s++) {
            float maximum = code_maximum(most[s]), inverse = code_inverse(maximum);
#pragma unroll
            for (int e = 0; e < CODES_PER_LANE; e++)
                if (lane + e * WARP < span.n)
                    op.codes[s][span.begin + lane + e * WARP] =
                        code_encode(op.code[s], states[e][s], inverse);
            if (lane == 0) /* after all lanes have read the old one: they met in the shuffles */
                op.maxima[s][b] = maximum;
        }
    }
}

extern "C" fsdpc_status fsdpc_cuda_step_coded(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    const fsdpc_cuda_queue *queue = fsdpc_cuda_queue_of(stream);
    coded_step op(a);
    if (op.blocks == 0)
        return FSDPC_OK;
    unsigned grid = code_grid(queue, op.blocks);
    switch (fsdpc_step_rule_of(a)) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        FSDPC_LAUNCH(coded_kernel<FSDPC_RULE_##NAME>, grid, BLOCK_THREADS, 0, queue, op);          \
        break;
        FSDPC_STEP_RULE_TABLE(X)
#undef X
    }
    return launched("a step of codes");
}
