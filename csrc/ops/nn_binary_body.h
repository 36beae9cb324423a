/* a + b, a - b, a * b, a / b, powers, maxima and minima of floats with broadcasting;
 * nn_compare_body.h has the others. (See nn_internal.h for how bodies are compiled.)
 *
 * The shape is first collapsed, so equal shapes become one long row, and a broadcast bias becomes a
 * loop over rows. Operands that are dense or repeated along the innermost dimension use vector
 * loops; any other stride, as in a transposed view, uses a scalar loop.
 */

FSDPC_INLINE fsdpc_vf binary_value(fsdpc_binary kind, fsdpc_vf a, fsdpc_vf b)
{
    switch (kind) {
    case FSDPC_BINARY_ADD:
        return a + b;
    case FSDPC_BINARY_SUB:
        return a - b;
    case FSDPC_BINARY_MUL:
        return a * b;
    case FSDPC_BINARY_DIV:
        return a / b;
    case FSDPC_BINARY_POW:
        return fsdpc_vf_pow(a, b);
    case FSDPC_BINARY_MAXIMUM:
        return fsdpc_vf_select((a > b) | (a != a), a, b);
    case FSDPC_BINARY_MINIMUM:
        return fsdpc_vf_select((a < b) | (a != a), a, b);
    default: /* nn_compare_body.h */
        break;
    }
    return a;
}

FSDPC_INLINE void binary_step(fsdpc_binary kind, const binary_row *row, size_t i, size_t n,
                              fsdpc_dtype dtype, bool one_a, bool one_b)
{
    fsdpc_vf a = one_a ? fsdpc_vf_splat(fsdpc_f32_load_as(row->a, row->at_a, dtype))
                       : fsdpc_vf_load_as_n(row->a, row->at_a + i, dtype, n);
    fsdpc_vf b = one_b ? fsdpc_vf_splat(fsdpc_f32_load_as(row->b, row->at_b, dtype))
                       : fsdpc_vf_load_as_n(row->b, row->at_b + i, dtype, n);
    fsdpc_vf_store_as_n(row->out, row->at_out + i, dtype, binary_value(kind, a, b), n);
}

FSDPC_INLINE void binary_vectors(fsdpc_binary kind, const binary_row *row, fsdpc_dtype dtype,
                                 bool one_a, bool one_b)
{
    size_t i = 0;
    FSDPC_EACH_VECTOR(i, n, row->numel, binary_step(kind, row, i, n, dtype, one_a, one_b));
}

FSDPC_INLINE void binary_strided(fsdpc_binary kind, const binary_row *row, fsdpc_dtype dtype)
{
    for (size_t i = 0; i < row->numel; i++) {
        float a = fsdpc_f32_load_as(row->a, row->at_a + i * row->step_a, dtype);
        float b = fsdpc_f32_load_as(row->b, row->at_b + i * row->step_b, dtype);
        fsdpc_f32_store_as(row->out, row->at_out + i, dtype,
                           binary_value(kind, fsdpc_vf_splat(a), fsdpc_vf_splat(b))[0]);
    }
}

FSDPC_INLINE void binary_row_of_kind(fsdpc_binary kind, const binary_row *row, fsdpc_dtype dtype)
{
    if (row->step_a == 1 && row->step_b == 1)
        binary_vectors(kind, row, dtype, false, false);
    else if (row->step_a == 1 && row->step_b == 0)
        binary_vectors(kind, row, dtype, false, true);
    else if (row->step_a == 0 && row->step_b == 1)
        binary_vectors(kind, row, dtype, true, false);
    else
        binary_strided(kind, row, dtype);
}

FSDPC_INLINE void binary_range(const nn_binary_plan *plan, size_t first, size_t last,
                               fsdpc_dtype dtype)
{
    for (size_t at = first; at < last;) {
        const binary_row row = binary_row_at(plan, at, last);
        at += row.numel;
        switch (plan->args->kind) {
#define ROW(KIND)                                                                                  \
    case FSDPC_BINARY_##KIND:                                                                      \
        binary_row_of_kind(FSDPC_BINARY_##KIND, &row, dtype);                                      \
        break;
            ROW(ADD)
            ROW(SUB)
            ROW(MUL)
            ROW(DIV)
            ROW(POW)
            ROW(MAXIMUM)
            ROW(MINIMUM)
#undef ROW
        default:
            break;
        }
    }
}

NN_FLOAT_KERNELS(binary_range, nn_binary_plan, NULL)

static fsdpc_status binary(const fsdpc_binary_args *args, fsdpc_stream *stream)
{
    bool is_int = args->dtype == FSDPC_I32 || args->dtype == FSDPC_I64;
    bool compares = fsdpc_binary_compares(args->kind);
    if (!is_int && !compares)
        FSDPC_TRY(nn_check_float(args->dtype, "arithmetic"));
    else if (args->kind == FSDPC_BINARY_DIV)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "division of %s: cast to a float dtype first",
                          fsdpc_dtype_name(args->dtype));
    nn_binary_plan plan = {.args = args, .box = {.ndim = args->ndim}};
    for (int d = 0; d < args->ndim; d++) {
        plan.box.shape[d] = args->shape[d];
        plan.box.stride[0][d] = args->stride_a[d];
        plan.box.stride[1][d] = args->stride_b[d];
    }
    size_t numel = nn_box_numel(&plan.box);
    if (numel == 0)
        return FSDPC_OK;
    nn_box_collapse(&plan.box);
    bool power = args->kind == FSDPC_BINARY_POW, wide = is_int || args->dtype == FSDPC_F64;
    bool plain = compares || fsdpc_binary_masks(args->kind) || (wide && !power);
    nn_range_fn run = plain  ? plain_range
                      : wide ? fsdpc_nn_power_wide
                             : binary_range_kernels[args->dtype];
    nn_for(stream, numel, NN_GRAIN, run, &plan);
    return FSDPC_OK;
}
