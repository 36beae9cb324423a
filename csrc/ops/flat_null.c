/* Flat kernels that compute nothing: device_null's table.
 *
 * Every call is accepted, and memory is neither read nor written. Callers branch on only one
 * output: whether two ranges are equal. That output stays unchanged, because memory never changes.
 */
#include "ops/flat_ops.h"

static fsdpc_status null_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                              fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    (void)dst, (void)dst_dtype, (void)src, (void)src_dtype, (void)numel, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                               const double *scale_at, int *nonfinite_io, fsdpc_stream *stream)
{
    (void)x, (void)dtype, (void)numel, (void)scale, (void)scale_at, (void)nonfinite_io;
    (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    (void)x, (void)dtype, (void)numel, (void)leaf, (void)sum_io, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_sumpow(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                                double p, fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    (void)x, (void)dtype, (void)numel, (void)leaf, (void)p, (void)sum_io, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_absmax(const void *x, fsdpc_dtype dtype, size_t numel, double *max_io,
                                fsdpc_stream *stream)
{
    (void)x, (void)dtype, (void)numel, (void)max_io, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_norm_join(const fsdpc_norm_join_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_norm_value(const fsdpc_norm *norm, double p, double *out,
                                    fsdpc_stream *stream)
{
    (void)norm, (void)p, (void)out, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_clip(const fsdpc_clip_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                               fsdpc_stream *stream)
{
    (void)x, (void)dtype, (void)numel, (void)limit, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_step(const fsdpc_step_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_code(const fsdpc_code_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                               fsdpc_stream *stream)
{
    (void)dst, (void)dst_dtype, (void)src, (void)src_dtype, (void)numel, (void)equal_io,
        (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static fsdpc_status null_factored(const fsdpc_factored_args *args, fsdpc_stream *stream)
{
    (void)args, (void)stream;
    return FSDPC_OK;
}

static const fsdpc_flat_ops null_ops = {
    .name = "null",
    .cast = null_cast,
    .accumulate = null_cast, /* same arguments, also does nothing */
    .reduce = null_reduce,
    .scale = null_scale,
    .sumsq = null_sumsq,
    .sumpow = null_sumpow,
    .absmax = null_absmax,
    .norm_join = null_norm_join,
    .norm_value = null_norm_value,
    .clip = null_clip,
    .clamp = null_clamp,
    .step = null_step,
    .equal = null_equal,
    .init = null_init,
    .encode = null_code,
    .decode = null_code,
    .factored = null_factored,
};

const fsdpc_flat_ops *fsdpc_flat_ops_null(void)
{
    return &null_ops;
}
