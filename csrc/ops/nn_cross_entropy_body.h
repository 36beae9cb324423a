/* Cross entropy over rows of logits (see nn_internal.h for how bodies are compiled).
 *
 * Forward reads the logits once from memory, in pieces of a row that fit in the first-level cache.
 * Each piece's maximum updates the row's maximum, rescaling the sum if it grew, and then the
 * piece's exponentials are added. One thread computes the mean over rows in fp64, in row order.
 * Backward is one pass, dlogits = (exp(x - lse) - [target]) * scale, and may overwrite the logits.
 */

enum { CROSS_ENTROPY_PIECE = 4096 };

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
    }
}

FSDPC_INLINE void cross_entropy_backward_step(const fsdpc_cross_entropy_args *args, size_t i,
                                              size_t n, fsdpc_dtype dtype, float lse, float scale)
{
    fsdpc_vf p = fsdpc_vf_exp(fsdpc_vf_load_as_n(args->logits, i, dtype, n) - lse);
    fsdpc_vf_store_as_n(args->dlogits, i, dtype, p * scale, n);
}

FSDPC_INLINE void cross_entropy_backward_range(const fsdpc_cross_entropy_args *args, size_t first,
                                               size_t last, fsdpc_dtype dtype)
{
    float scale = args->dloss ? (float)fsdpc_nn_loss_scale(args->sum, args->dloss) : 1.0f;
    for (size_t row = first; row < last; row++) {
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
        FSDPC_EACH_VECTOR(i, n, end, cross_entropy_backward_step(args, i, n, dtype, lse, scale));
        fsdpc_vf p = fsdpc_vf_exp(fsdpc_vf_splat(at_target - lse));
        fsdpc_f32_store_as(args->dlogits, hit, dtype, (p[0] - 1.0f) * scale);
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
