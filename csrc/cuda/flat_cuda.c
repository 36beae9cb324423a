/* The GPU's table of flat kernels: checks in front of the launchers, results behind them.
 *
 * The checks are those of the CPU's table, with the same words, so that a program fails alike on
 * both.  Where a slot has nothing to add, its launcher is the slot.
 */
#include "cuda/host_result.h"
#include "cuda/kernel_tables.h"
#include "cuda/kernels.h"

static fsdpc_status check_dtype(const char *operation, fsdpc_dtype dtype)
{
    if (dtype <= FSDPC_F64)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE,
                      "%s takes float32, bfloat16, float16 or float64, not %s; convert it first",
                      operation, fsdpc_dtype_name(dtype));
}

static fsdpc_status check_pair(const char *operation, const void *dst, fsdpc_dtype dst_dtype,
                               const void *src, fsdpc_dtype src_dtype)
{
    FSDPC_TRY(check_dtype(operation, dst_dtype));
    FSDPC_TRY(check_dtype(operation, src_dtype));
    if (dst != src || fsdpc_dtype_bytes(dst_dtype) == fsdpc_dtype_bytes(src_dtype))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "cannot cast %s to %s in place, their sizes differ; give another buffer",
                      fsdpc_dtype_name(src_dtype), fsdpc_dtype_name(dst_dtype));
}

static fsdpc_status flat_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                              fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(check_pair("cast", dst, dst_dtype, src, src_dtype));
    return fsdpc_cuda_cast(dst, dst_dtype, src, src_dtype, numel, stream);
}

static fsdpc_status flat_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                    fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(check_pair("accumulate", dst, dst_dtype, src, src_dtype));
    return fsdpc_cuda_accumulate(dst, dst_dtype, src, src_dtype, numel, stream);
}

static fsdpc_status flat_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    if (args->n_srcs < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "reduce needs at least one source, not %d; give one",
                          args->n_srcs);
    for (int s = 0; s < args->n_srcs; s++)
        FSDPC_TRY(check_pair("reduce", args->out, args->out_dtype, args->srcs[s], args->dtype));
    return fsdpc_cuda_reduce(args, stream);
}

static fsdpc_status flat_scale(void *x, fsdpc_dtype dtype, size_t numel, float scale,
                               int *nonfinite_io, fsdpc_stream *stream)
{
    FSDPC_TRY(check_dtype("scale", dtype));
    fsdpc_host_result result;
    void *flag;
    FSDPC_TRY(fsdpc_host_result_begin(&result, nonfinite_io, sizeof *nonfinite_io, stream, &flag));
    return fsdpc_host_result_end(&result, fsdpc_cuda_scale(x, dtype, numel, scale, flag, stream));
}

static fsdpc_status flat_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    FSDPC_TRY(check_dtype("sumsq", dtype));
    if (leaf == 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "sumsq: a leaf has at least 1 element, not 0; give 64");
    fsdpc_host_result result;
    void *sum;
    FSDPC_TRY(fsdpc_host_result_begin(&result, sum_io, sizeof *sum_io, stream, &sum));
    return fsdpc_host_result_end(&result, fsdpc_cuda_sumsq(x, dtype, numel, leaf, sum, stream));
}

/* AdamW and Adam alone so far, with fp32 states. */
static fsdpc_status flat_step(const fsdpc_step_args *a, fsdpc_stream *stream)
{
    const char *name = fsdpc_optim_kind_name(a->kind);
    bool adam = a->kind == FSDPC_OPTIM_ADAMW || a->kind == FSDPC_OPTIM_ADAM;
    if (!adam || a->hyper.amsgrad || a->state_dtype != FSDPC_F32)
        return fsdpc_fail(
            FSDPC_ERR_UNSUPPORTED,
            "%s%s with %s states does not run on this device; it takes AdamW and Adam "
            "without amsgrad, with float32 states",
            name, a->hyper.amsgrad ? " (amsgrad)" : "", fsdpc_dtype_name(a->state_dtype));
    bool param_ok = a->param_dtype == FSDPC_F32 || a->param_dtype == FSDPC_BF16;
    bool grad_ok = a->grad_dtype == FSDPC_F32 || a->grad_dtype == FSDPC_BF16;
    if (!param_ok || !grad_ok)
        return fsdpc_fail(FSDPC_ERR_DTYPE,
                          "%s takes float32 or bfloat16, not a %s parameter with a %s gradient; "
                          "keep masters in float32",
                          name, fsdpc_dtype_name(a->param_dtype), fsdpc_dtype_name(a->grad_dtype));
    if (a->wire)
        FSDPC_TRY(check_dtype(name, a->wire_dtype));
    if (a->step < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s's step is %lld; the first is 1", name,
                          (long long)a->step);
    return fsdpc_cuda_adamw(a, stream);
}

static fsdpc_status flat_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel, bool *equal_out,
                               fsdpc_stream *stream)
{
    FSDPC_TRY(check_dtype("equal", dst_dtype));
    FSDPC_TRY(check_dtype("equal", src_dtype));
    fsdpc_host_result result;
    void *equal;
    FSDPC_TRY(fsdpc_host_result_begin(&result, equal_out, sizeof *equal_out, stream, &equal));
    return fsdpc_host_result_end(
        &result, fsdpc_cuda_equal(dst, dst_dtype, src, src_dtype, numel, equal, stream));
}

static fsdpc_status flat_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(check_dtype("init", args->dtype));
    if (args->kind == FSDPC_INIT_UNIFORM && !(args->a <= args->b))
        return fsdpc_fail(FSDPC_ERR_VALUE, "uniform values in [%g, %g): give the lower bound first",
                          args->a, args->b);
    if (args->kind == FSDPC_INIT_NORMAL && !(args->b >= 0))
        return fsdpc_fail(FSDPC_ERR_VALUE, "a standard deviation of %g; give 0 or more", args->b);
    return fsdpc_cuda_init(args, stream);
}

const fsdpc_flat_ops fsdpc_flat_ops_cuda = {
    .name = "cuda",
    .cast = flat_cast,
    .accumulate = flat_accumulate,
    .reduce = flat_reduce,
    .scale = flat_scale,
    .sumsq = flat_sumsq,
    .step = flat_step,
    .equal = flat_equal,
    .init = flat_init,
};
