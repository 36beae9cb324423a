/* Steps with block-coded states (block_code.h).
 *
 * Included by flat_cpu_body.h. A block is decoded, stepped and kept in L1 while its new maxima are
 * found, and is then encoded, so the states' stream is a byte each way. Blocks are independent:
 * threads split a run between rows.
 */

enum { CODED_ROOM = FSDPC_CODE_BLOCK + FSDPC_LANES };

typedef struct coded_block {
    float *param;
    const float *grad;
    uint8_t *codes[FSDPC_OPTIM_MAX_STATES];
    float *maxima[FSDPC_OPTIM_MAX_STATES];
    size_t n;
} coded_block;

FSDPC_INLINE fsdpc_code code_of(fsdpc_step_rule rule, int state)
{
    return fsdpc_rule_has_square(rule, state) ? FSDPC_CODE_UROOT8 : FSDPC_CODE_ROOT8;
}

/* Steps elements i .. i + n - 1 of a block, and leaves their new states in `states`. */
FSDPC_INLINE void coded_vector(const coded_block *b, const step_scalars *k, fsdpc_step_rule rule,
                               const float *maxima, float (*states)[CODED_ROOM], fsdpc_vi *most,
                               size_t i, size_t n)
{
    const int n_states = fsdpc_rule_states(rule);
    fsdpc_vf s[FSDPC_OPTIM_MAX_STATES] = {0};
    for (int state = 0; state < n_states; state++)
        s[state] = code_decode(code_of(rule, state), b->codes[state] + i, maxima[state], n);
    fsdpc_vf p =
        step_by_rule(rule, k, fsdpc_vf_load_n(b->param + i, n), fsdpc_vf_load_n(b->grad + i, n), s);
    fsdpc_vf_store_n(b->param + i, p, n);
    for (int state = 0; state < n_states; state++) {
        if (n < FSDPC_LANES) /* a rule may turn the zeros of the other lanes into NaN */
            s[state] = (fsdpc_vf)((fsdpc_vi)s[state] & fsdpc_vi_first(n));
        fsdpc_vf_store(states[state] + i, s[state]);
        most[state] = code_most(most[state], s[state]);
    }
}

FSDPC_INLINE void coded_rule(const coded_block *block, const step_scalars *scalars,
                             fsdpc_step_rule rule)
{
    const int n_states = fsdpc_rule_states(rule);
    const coded_block b = *block;
    const step_scalars k = *scalars;
    float states[FSDPC_OPTIM_MAX_STATES][CODED_ROOM], maxima[FSDPC_OPTIM_MAX_STATES] = {0};
    fsdpc_vi most[FSDPC_OPTIM_MAX_STATES] = {{0}};
    size_t i = 0;
    for (int s = 0; s < n_states; s++)
        maxima[s] = *b.maxima[s];
    for (; i + FSDPC_LANES <= b.n; i += FSDPC_LANES)
        coded_vector(&b, &k, rule, maxima, states, most, i, FSDPC_LANES);
    if (i < b.n)
        coded_vector(&b, &k, rule, maxima, states, most, i, b.n - i);
    for (int s = 0; s < n_states; s++) {
        *b.maxima[s] = code_maximum(most[s]);
        code_block(code_of(rule, s), b.codes[s], states[s], *b.maxima[s], b.n);
    }
}

static void step_coded_part(void *arg, size_t begin, size_t end)
{
    const step_part_args *args = arg;
    const fsdpc_step_args *a = args->a;
    const int n_states = fsdpc_rule_states(args->rule);
    const size_t row = a->code_row;
    size_t block = fsdpc_code_blocks(begin, row);
    float param[FSDPC_CODE_BLOCK], grad[FSDPC_CODE_BLOCK];
    for (size_t at = begin, n; at < end; at += n, block++) {
        n = fsdpc_min_size(FSDPC_CODE_BLOCK, row - at % row);
        coded_block b = {
            .param = widened(param, a->param, a->param_dtype, at, n),
            .grad = widened(grad, a->grad, a->grad_dtype, at, n),
            .n = n,
        };
        for (int s = 0; s < n_states; s++) {
            b.codes[s] = (uint8_t *)a->states[s] + at;
            b.maxima[s] = a->maxima[s] + block;
        }
        switch (args->rule) {
#define X(NAME, function, states)                                                                  \
    case FSDPC_RULE_##NAME:                                                                        \
        coded_rule(&b, &args->k, FSDPC_RULE_##NAME);                                               \
        break;
            FSDPC_STEP_RULE_TABLE(X)
#undef X
        }
        void *stored = fsdpc_flat_at(a->param, at, a->param_dtype);
        if (a->param_dtype != FSDPC_F32)
            cast_range(stored, a->param_dtype, param, FSDPC_F32, n, false);
        if (a->copy_in)
            cast_range(fsdpc_flat_at(a->copy_in, at, a->copy_in_dtype), a->copy_in_dtype, stored,
                       a->param_dtype, n, false);
    }
}
