/* The GPU's table of flat kernels. Each entry checks its arguments before calling the launcher, and
 * delivers the results afterwards. */
#include "cuda/host_result.h"
#include "cuda/kernel_tables.h"
#include "cuda/kernels.h"
#include "ops/flat_check.h"

static fsdpc_status flat_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                              fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_pair("cast", dst, dst_dtype, src, src_dtype));
    return fsdpc_cuda_cast(dst, dst_dtype, src, src_dtype, numel, stream);
}

static fsdpc_status flat_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                    fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_pair("accumulate", dst, dst_dtype, src, src_dtype));
    return fsdpc_cuda_accumulate(dst, dst_dtype, src, src_dtype, numel, stream);
}

static fsdpc_status flat_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_reduce(args));
    return fsdpc_cuda_reduce(args, stream);
}

static fsdpc_status flat_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                               const double *scale_at, int *nonfinite_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("scale", dtype));
    fsdpc_host_result result;
    void *flag;
    FSDPC_TRY(fsdpc_host_result_begin(&result, nonfinite_io, sizeof *nonfinite_io, stream, &flag));
    return fsdpc_host_result_end(&result,
                                 fsdpc_cuda_scale(x, dtype, numel, scale, scale_at, flag, stream));
}

static fsdpc_status flat_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_leaf("sumsq", dtype, leaf));
    fsdpc_host_result result;
    void *sum;
    FSDPC_TRY(fsdpc_host_result_begin(&result, sum_io, sizeof *sum_io, stream, &sum));
    return fsdpc_host_result_end(&result, fsdpc_cuda_sumsq(x, dtype, numel, leaf, sum, stream));
}

static fsdpc_status flat_sumpow(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                                double p, fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_leaf("sumpow", dtype, leaf));
    FSDPC_TRY(fsdpc_flat_check_power(p));
    fsdpc_host_result result;
    void *sum;
    FSDPC_TRY(fsdpc_host_result_begin(&result, sum_io, sizeof *sum_io, stream, &sum));
    return fsdpc_host_result_end(&result, fsdpc_cuda_sumpow(x, dtype, numel, leaf, p, sum, stream));
}

static fsdpc_status flat_absmax(const void *x, fsdpc_dtype dtype, size_t numel, double *max_io,
                                fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("absmax", dtype));
    fsdpc_host_result result;
    void *most;
    FSDPC_TRY(fsdpc_host_result_begin(&result, max_io, sizeof *max_io, stream, &most));
    return fsdpc_host_result_end(&result, fsdpc_cuda_absmax(x, dtype, numel, most, stream));
}

static fsdpc_status flat_norm_value(const fsdpc_norm *norm, double p, double *out,
                                    fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_norm_value(p));
    return fsdpc_cuda_norm_value(norm, p, out, stream);
}

static fsdpc_status flat_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                               fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_clamp(dtype, limit));
    return fsdpc_cuda_clamp(x, dtype, numel, limit, stream);
}

static fsdpc_status flat_step(const fsdpc_step_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_step(args));
    return fsdpc_cuda_step(args, stream);
}

static fsdpc_status flat_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                               fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("equal", dst_dtype));
    FSDPC_TRY(fsdpc_flat_check_dtype("equal", src_dtype));
    fsdpc_host_result result;
    void *equal;
    FSDPC_TRY(fsdpc_host_result_begin(&result, equal_io, sizeof *equal_io, stream, &equal));
    return fsdpc_host_result_end(
        &result, fsdpc_cuda_equal(dst, dst_dtype, src, src_dtype, numel, equal, stream));
}

static fsdpc_status flat_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_init(args));
    return fsdpc_cuda_init(args, stream);
}

const fsdpc_flat_ops fsdpc_flat_ops_cuda = {
    .name = "cuda",
    .cast = flat_cast,
    .accumulate = flat_accumulate,
    .reduce = flat_reduce,
    .scale = flat_scale,
    .sumsq = flat_sumsq,
    .sumpow = flat_sumpow,
    .absmax = flat_absmax,
    .norm_join = fsdpc_cuda_norm_join,
    .norm_value = flat_norm_value,
    .clip = fsdpc_cuda_clip,
    .clamp = flat_clamp,
    .step = flat_step,
    .equal = flat_equal,
    .init = flat_init,
    .encode = fsdpc_cuda_encode,
    .decode = fsdpc_cuda_decode,
    .factored = fsdpc_cuda_factored,
};
