/* Softmax and log-softmax over rows (see nn_internal.h for how bodies are compiled).
 *
 * Three passes over a row that stays in cache compute the maximum, the sum of exponentials, and the
 * result. exp(x - max) * (1 / sum) is used instead of exp(x - lse), whose error grows with |lse|.
 * For short rows, the second pass keeps the exponentials in fp32 on the stack for the third.
 */

enum { SOFTMAX_KEPT = 2048 };

FSDPC_INLINE fsdpc_vf row_max_step(const void *x, size_t i, size_t n, fsdpc_dtype dtype,
                                   fsdpc_vf max)
{
    fsdpc_vf v = fsdpc_vf_load_as_n(x, i, dtype, n);
    if (!FSDPC_WHOLE(n))
        v = fsdpc_vf_select(fsdpc_vi_first(n), v, fsdpc_vf_splat(-INFINITY));
    return fsdpc_vf_max(v, max);
}

FSDPC_INLINE float row_max(const void *x, size_t first, size_t last, fsdpc_dtype dtype)
{
    fsdpc_vf max = fsdpc_vf_splat(-INFINITY), other = max;
    size_t i = first;
    for (; i + 2 * FSDPC_LANES <= last; i += 2 * FSDPC_LANES) {
        max = row_max_step(x, i, FSDPC_LANES, dtype, max);
        other = row_max_step(x, i + FSDPC_LANES, FSDPC_LANES, dtype, other);
    }
    FSDPC_EACH_VECTOR(i, n, last, max = row_max_step(x, i, n, dtype, max));
    return fsdpc_vf_max_lane(fsdpc_vf_max(max, other));
}

FSDPC_INLINE fsdpc_vf exp_step(const void *x, size_t i, size_t n, fsdpc_dtype dtype, float max,
                               float *keep, size_t at)
{
    fsdpc_vf e = fsdpc_vf_exp(fsdpc_vf_load_as_n(x, i, dtype, n) - max);
    if (keep)
        fsdpc_vf_store_n(keep + at, e, n);
    return FSDPC_WHOLE(n) ? e : fsdpc_vf_select(fsdpc_vi_first(n), e, (fsdpc_vf){0});
}

/* Returns the sum of exp(x - max) over [first, last), and stores the exponentials in `keep` unless
 * it is NULL. */
FSDPC_INLINE float row_exp_sum(const void *x, size_t first, size_t last, fsdpc_dtype dtype,
                               float max, float *keep)
{
    fsdpc_vf sum = {0}, other = {0};
    size_t i = first;
    for (; i + 2 * FSDPC_LANES <= last; i += 2 * FSDPC_LANES) {
        size_t next = i + FSDPC_LANES;
        sum += exp_step(x, i, FSDPC_LANES, dtype, max, keep, i - first);
        other += exp_step(x, next, FSDPC_LANES, dtype, max, keep, next - first);
    }
    for (; i + FSDPC_LANES <= last; i += FSDPC_LANES)
        sum += exp_step(x, i, FSDPC_LANES, dtype, max, keep, i - first);
    if (i < last)
        other += exp_step(x, i, last - i, dtype, max, keep, i - first);
    return fsdpc_vf_sum(sum + other);
}

FSDPC_INLINE void softmax_step(const fsdpc_softmax_args *args, size_t i, size_t n,
                               fsdpc_dtype dtype, float max, float scale)
{
    fsdpc_vf x = fsdpc_vf_load_as_n(args->x, i, dtype, n) - max;
    fsdpc_vf_store_as_n(args->out, i, dtype, args->log ? x - scale : fsdpc_vf_exp(x) * scale, n);
}

/* Infinite rows are not shifted. */
FSDPC_INLINE void row_lse(const fsdpc_softmax_args *args, size_t row, fsdpc_dtype dtype)
{
    size_t begin = row * args->cols, end = begin + args->cols;
    float max = row_max(args->x, begin, end, dtype);
    float shift = isfinite(max) ? max : 0.0f;
    float sum = row_exp_sum(args->x, begin, end, dtype, shift, NULL);
    fsdpc_f32_store_as(args->lse, row, dtype, logf(sum) + shift);
}

FSDPC_INLINE void softmax_range(const fsdpc_softmax_args *args, size_t first, size_t last,
                                fsdpc_dtype dtype)
{
    float kept[SOFTMAX_KEPT];
    bool keep = !args->log && args->cols <= SOFTMAX_KEPT;
    for (size_t row = first; row < last; row++) {
        size_t begin = row * args->cols, i = begin, end = i + args->cols;
        if (args->lse) {
            row_lse(args, row, dtype);
            continue;
        }
        float max = row_max(args->x, i, end, dtype);
        if (keep) {
            float sum = row_exp_sum(args->x, i, end, dtype, max, kept);
            float by = args->slopes && max == INFINITY ? 1.0f : 1.0f / sum;
            FSDPC_EACH_VECTOR(i, n, end,
                              fsdpc_vf_store_as_n(args->out, i, dtype,
                                                  fsdpc_vf_load_n(kept + (i - begin), n) * by, n));
            continue;
        }
        float sum = row_exp_sum(args->x, i, end, dtype, max, NULL);
        float scale = args->log ? logf(sum) : args->slopes && max == INFINITY ? 1.0f : 1.0f / sum;
        FSDPC_EACH_VECTOR(i, n, end, softmax_step(args, i, n, dtype, max, scale));
    }
}

/* softmax: sum of dy * y; log-softmax: sum of dy */
FSDPC_INLINE fsdpc_vf softmax_dot_step(const fsdpc_softmax_args *args, size_t i, size_t n,
                                       fsdpc_dtype dtype, fsdpc_vf sum)
{
    fsdpc_vf dy = fsdpc_vf_load_as_n(args->dy, i, dtype, n);
    return args->log ? sum + dy : fsdpc_vf_fma(dy, fsdpc_vf_load_as_n(args->y, i, dtype, n), sum);
}

FSDPC_INLINE void softmax_backward_step(const fsdpc_softmax_args *args, size_t i, size_t n,
                                        fsdpc_dtype dtype, float dot)
{
    fsdpc_vf dy = fsdpc_vf_load_as_n(args->dy, i, dtype, n);
    fsdpc_vf y = fsdpc_vf_load_as_n(args->y, i, dtype, n);
    fsdpc_vf_store_as_n(args->out, i, dtype,
                        args->log ? dy - fsdpc_vf_exp(y) * dot : y * (dy - dot), n);
}

FSDPC_INLINE void softmax_backward_range(const fsdpc_softmax_args *args, size_t first, size_t last,
                                         fsdpc_dtype dtype)
{
    for (size_t row = first; row < last; row++) {
        size_t begin = row * args->cols, end = begin + args->cols, i = begin;
        fsdpc_vf sum = {0};
        FSDPC_EACH_VECTOR(i, n, end, sum = softmax_dot_step(args, i, n, dtype, sum));
        float dot = fsdpc_vf_sum(sum);
        i = begin;
        FSDPC_EACH_VECTOR(i, n, end, softmax_backward_step(args, i, n, dtype, dot));
    }
}

NN_FLOAT_KERNELS(softmax_range, fsdpc_softmax_args, fsdpc_nn_softmax_f64)
NN_FLOAT_KERNELS(softmax_backward_range, fsdpc_softmax_args, fsdpc_nn_softmax_backward_f64)

static fsdpc_status softmax(const fsdpc_softmax_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "softmax"));
    nn_for(stream, args->rows, nn_row_grain(args->cols), softmax_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

static fsdpc_status softmax_backward(const fsdpc_softmax_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "softmax"));
    nn_for(stream, args->rows, nn_row_grain(args->cols),
           softmax_backward_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
