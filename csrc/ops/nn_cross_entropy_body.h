/* Cross entropy over rows of logits (see nn_internal.h for how bodies are compiled).
 *
 * Forward reads the logits once from memory, in pieces of a row that fit in the first-level cache.
 * Each piece's maximum updates the row's maximum, rescaling the sum if it grew, and then the
 * piece's exponentials are added. One thread computes the mean over rows in fp64, in row order.
 * Backward is one pass, which may overwrite the logits:
 *
 *     dlogits = (exp(x - lse) * (1 + 2 z_loss lse) - (1 - smoothing) [target] - smoothing / cols)
 *               * scale, and times 1 - (x / softcap)^2 if logits are softcapped.
 */

enum { CROSS_ENTROPY_PIECE = 4096 };

FSDPC_INLINE fsdpc_vf row_sum_step(const void *x, size_t i, size_t n, fsdpc_dtype dtype)
{
    fsdpc_vf v = fsdpc_vf_load_as_n(x, i, dtype, n);
    return FSDPC_WHOLE(n) ? v : fsdpc_vf_select(fsdpc_vi_first(n), v, (fsdpc_vf){0});
}

FSDPC_INLINE float row_sum(const void *x, size_t first, size_t last, fsdpc_dtype dtype)
{
    fsdpc_vf sum = {0};
    size_t i = first;
    FSDPC_EACH_VECTOR(i, n, last, sum += row_sum_step(x, i, n, dtype));
    return fsdpc_vf_sum(sum);
}

FSDPC_INLINE void cross_entropy_range(const fsdpc_cross_entropy_args *args, size_t first,
                                      size_t last, fsdpc_dtype dtype)
{
    for (size_t row = first; row < last; row++) {
        size_t begin = row * args->cols, end = begin + args->cols;
        float max = -INFINITY, sum = 0;
        for (size_t i = begin; i < end; i += CROSS_ENTROPY_PIECE) {
            size_t stop = fsdpc_min_size(i + CROSS_ENTROPY_PIECE, end);
            float piece_max = row_max(args->logits, i, stop, dtype);
            if (piece_max > max) {
                sum *= expf(max - piece_max);
                max = piece_max;
            }
            /* before any finite value: 0 for -inf (not -inf - -inf = NaN), NaN for NaN */
            sum += row_exp_sum(args->logits, i, stop, dtype, max > -INFINITY ? max : 0, NULL);
        }
        args->lse[row] = max + logf(sum);
        if (args->means)
            args->means[row] = row_sum(args->logits, begin, end, dtype) / (float)args->cols;
    }
}

/* What the gradients of a row have in common. */
typedef struct loss_row {
    float lse, scale;
    float factor;  /* of the probabilities */
    float even;    /* smoothing's part of each class */
    float inverse; /* 1 / softcap, or 0 */
} loss_row;

FSDPC_INLINE fsdpc_vf loss_slope(fsdpc_vf x, const loss_row *row)
{
    fsdpc_vf g = (fsdpc_vf_exp(x - row->lse) * row->factor - row->even) * row->scale;
    if (row->inverse == 0)
        return g;
    fsdpc_vf t = x * row->inverse;
    return g * (1.0f - t * t);
}

FSDPC_INLINE void cross_entropy_backward_step(const fsdpc_cross_entropy_args *args, size_t i,
                                              size_t n, fsdpc_dtype dtype, const loss_row *row)
{
    fsdpc_vf x = fsdpc_vf_load_as_n(args->logits, i, dtype, n);
    fsdpc_vf_store_as_n(args->dlogits, i, dtype, loss_slope(x, row), n);
}

FSDPC_INLINE void cross_entropy_backward_range(const fsdpc_cross_entropy_args *args, size_t first,
                                               size_t last, fsdpc_dtype dtype)
{
    float all = args->dloss ? (float)fsdpc_nn_loss_scale(args->sum, args->dloss) : 1.0f;
    for (size_t row = first; row < last; row++) {
        float scale = args->dlosses ? args->dlosses[row] : all;
        size_t i = row * args->cols, end = i + args->cols;
        int64_t target = fsdpc_nn_load_id(args->targets, row, args->id_dtype);
        if (target == args->ignore_index || !args->lse) {
            size_t bytes = dtype == FSDPC_F32 ? 4 : 2;
            memset((char *)args->dlogits + i * bytes, 0, args->cols * bytes);
            if (target != args->ignore_index)
                fsdpc_f32_store_as(args->dlogits, i + (size_t)target, dtype, -scale);
            continue;
        }
        size_t hit = i + (size_t)target;
        float lse = args->lse[row], at_target = fsdpc_f32_load_as(args->logits, hit, dtype);
        loss_row common = {.lse = lse,
                           .scale = scale,
                           .factor = 1.0f + 2.0f * args->z_loss * lse,
                           .even = args->smoothing / (float)args->cols,
                           .inverse = args->softcap > 0 ? 1.0f / args->softcap : 0};
        FSDPC_EACH_VECTOR(i, n, end, cross_entropy_backward_step(args, i, n, dtype, &common));
        common.even += 1.0f - args->smoothing;
        fsdpc_vf slope = loss_slope(fsdpc_vf_splat(at_target), &common);
        fsdpc_f32_store_as(args->dlogits, hit, dtype, slope[0]);
    }
}

NN_FLOAT_KERNELS(cross_entropy_range, fsdpc_cross_entropy_args, fsdpc_nn_cross_entropy_f64)
NN_FLOAT_KERNELS(cross_entropy_backward_range, fsdpc_cross_entropy_args,
                 fsdpc_nn_cross_entropy_backward_f64)

static fsdpc_status cross_entropy(const fsdpc_cross_entropy_args *args, fsdpc_stream *stream)
{
    size_t count;
    FSDPC_TRY(nn_check_float(args->dtype, "cross entropy"));
    FSDPC_TRY(fsdpc_nn_cross_entropy_check(args, &count));
    if (args->lse)
        nn_for(stream, args->rows, nn_row_grain(args->cols),
               cross_entropy_range_kernels[args->dtype], args);
    fsdpc_nn_cross_entropy_mean(args, count);
    return FSDPC_OK;
}

static fsdpc_status cross_entropy_backward(const fsdpc_cross_entropy_args *args,
                                           fsdpc_stream *stream)
{
    size_t count;
    FSDPC_TRY(nn_check_float(args->dtype, "cross entropy"));
    FSDPC_TRY(fsdpc_nn_cross_entropy_check(args, &count));
    nn_for(stream, args->rows, nn_row_grain(args->cols),
           cross_entropy_backward_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

static fsdpc_status loss_gradient(const fsdpc_loss_gradient_args *args, fsdpc_stream *stream)
{
    double scale = fsdpc_nn_loss_scale(args->sum, args->dloss);
    if (scale == 1 && args->out == args->x)
        return FSDPC_OK;
    return unary(&(fsdpc_unary_args){.kind = FSDPC_UNARY_MUL_SCALAR,
                                     .dtype = args->dtype,
                                     .numel = args->numel,
                                     .scalar = scale,
                                     .x = args->x,
                                     .out = args->out},
                 stream);
}
