/* Flat kernels: casts, reductions over ranks, norms, optimizers.
 *
 * There is one table per device and instruction set. Callers use fsdpc_flat_*(…, stream), never a
 * slot. Lengths are in elements; dtypes are F32, BF16, F16 and F64 unless stated otherwise. Buffers
 * need only be aligned to their elements, but are fastest if aligned to 64 bytes. Casts copy, and
 * equal compares, other dtypes if both are the same. `dst` and `src`
 * may be equal (in place) if their elements have equal size, but must not partly overlap.
 *
 * Casts round to nearest even in integer arithmetic (NaN stays NaN, subnormals are kept). Sums use
 * fp32 or a wider dtype. Results do not depend on threads, alignment or how the caller splits the
 * range into calls, except that norms are summed over whole leaves (see sumsq).
 */
#ifndef FSDPC_OPS_FLAT_OPS_H
#define FSDPC_OPS_FLAT_OPS_H

#include <string.h>

#include "device/device.h"
#include "ops/factored.h"
#include "ops/flat_norm.h"
#include "ops/flat_step.h"

/* out = cast(scale * (tree sum over srcs)) [+ out]. The tree is pairwise over the index:
 * ((0+1)+(2+3))+..., and a node without a partner is passed up unchanged. Partial sums are in the
 * wider of fp32 and `dtype`. The scaled sum is rounded once through `round_dtype`: the reduce
 * dtype, so that one rank rounds like several, or, to leave partial sums unrounded, the wide dtype.
 * The sum is then cast to out_dtype and, with `accumulate`, added to out in fp32 (F64 if out is
 * F64). */
typedef struct fsdpc_reduce_args {
    const void *const *srcs; /* n_srcs pointers to numel elements of dtype */
    int n_srcs;              /* >= 1 */
    fsdpc_dtype dtype;
    size_t numel;
    double scale; /* rounded to fp32 unless dtype is F64 */
    fsdpc_dtype round_dtype;
    void *out;
    fsdpc_dtype out_dtype;
    bool accumulate;
} fsdpc_reduce_args;

typedef enum fsdpc_init_kind {
    FSDPC_INIT_CONSTANT,
    FSDPC_INIT_NORMAL,
    FSDPC_INIT_UNIFORM
} fsdpc_init_kind;

/* dst[j] = value of element first + j of stream (seed, stream): constant a; normal with mean a and
 * standard deviation b (Box-Muller over Philox words); uniform in [a, b). */
typedef struct fsdpc_init_args {
    void *dst;
    fsdpc_dtype dtype;
    size_t numel;
    fsdpc_init_kind kind;
    double a, b;
    uint64_t seed, stream, first;
} fsdpc_init_args;

typedef struct fsdpc_flat_ops {
    const char *name;
    fsdpc_status (*cast)(void *dst, fsdpc_dtype dst_dtype, const void *src, fsdpc_dtype src_dtype,
                         size_t numel, fsdpc_stream *stream);
    /* dst = round(dst + src), summed in fp32 (F64 if either is) */
    fsdpc_status (*accumulate)(void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream);
    fsdpc_status (*reduce)(const fsdpc_reduce_args *args, fsdpc_stream *stream);
    /* x *= scale, or scale * *scale_at (in device memory) unless scale_at is NULL; the factor is an
     * fp64 product, rounded once.  *nonfinite_io, unless NULL, is set to 1 if a NaN or infinity was
     * read, otherwise unchanged. */
    fsdpc_status (*scale)(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                          const double *scale_at, int *nonfinite_io, fsdpc_stream *stream);
    /* Adds the sums of squares of whole leaves to an exact accumulator. The range begins at a leaf;
     * a leaf is `leaf` consecutive elements (the last may be short), summed in fp64 in a fixed
     * order.
     */
    fsdpc_status (*sumsq)(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                          fsdpc_exact_sum *sum_io, fsdpc_stream *stream);
    /* Does the same for |x|^p, where p is positive and finite; p = 2 gives sumsq. This slot, like
     * absmax and clamp, is optional: if it is missing, the call returns FSDPC_ERR_UNSUPPORTED. */
    fsdpc_status (*sumpow)(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf, double p,
                           fsdpc_exact_sum *sum_io, fsdpc_stream *stream);
    /* *max_io = max(*max_io, the largest |x|); NaN if either is NaN */
    fsdpc_status (*absmax)(const void *x, fsdpc_dtype dtype, size_t numel, double *max_io,
                           fsdpc_stream *stream);
    fsdpc_status (*norm_join)(const fsdpc_norm_join_args *args, fsdpc_stream *stream);
    /* *out = the norm's value; both are in device memory; p is 1, 2 or INFINITY */
    fsdpc_status (*norm_value)(const fsdpc_norm *norm, double p, double *out, fsdpc_stream *stream);
    fsdpc_status (*clip)(const fsdpc_clip_args *args, fsdpc_stream *stream);
    /* x = the nearest number to x in [-limit, limit], with limit rounded to dtype; NaN stays NaN */
    fsdpc_status (*clamp)(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                          fsdpc_stream *stream);
    fsdpc_status (*step)(const fsdpc_step_args *args, fsdpc_stream *stream);
    /* *equal_io becomes false unless every cast(src) has the same bits as dst. The kernel may stop
     * at the first difference, and does nothing if *equal_io is already false. If equal_io is in
     * device memory, the host does not wait. */
    fsdpc_status (*equal)(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                          fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                          fsdpc_stream *stream);
    fsdpc_status (*init)(const fsdpc_init_args *args, fsdpc_stream *stream);
    /* Block codes and maxima of values, and the reverse. Optional slots. */
    fsdpc_status (*encode)(const fsdpc_code_args *args, fsdpc_stream *stream);
    fsdpc_status (*decode)(const fsdpc_code_args *args, fsdpc_stream *stream);
    /* A pass of Adafactor over a matrix. An optional slot, which the engine looks at. */
    fsdpc_status (*factored)(const fsdpc_factored_args *args, fsdpc_stream *stream);
} fsdpc_flat_ops;

/* Returns the CPU's table for an instruction set (the best kernels up to that set). */
const fsdpc_flat_ops *fsdpc_flat_ops_cpu(fsdpc_isa isa);

/* Returns device_null's table, whose kernels compute nothing and always succeed. */
const fsdpc_flat_ops *fsdpc_flat_ops_null(void);

/* Returns the error for an optional slot that a device lacks. */
static inline fsdpc_status fsdpc_flat_missing(const fsdpc_flat_ops *ops, const char *what)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "the kernels of '%s' have no %s", ops->name, what);
}

static inline fsdpc_status fsdpc_flat_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                           fsdpc_dtype src_dtype, size_t numel,
                                           fsdpc_stream *stream)
{
    if (dst_dtype == src_dtype && !fsdpc_dtype_is_float(dst_dtype))
        return fsdpc_device_copy(stream->device, dst, src, numel * fsdpc_dtype_bytes(dst_dtype),
                                 stream);
    return stream->device->flat->cast(dst, dst_dtype, src, src_dtype, numel, stream);
}

static inline fsdpc_status fsdpc_flat_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                                 fsdpc_dtype src_dtype, size_t numel,
                                                 fsdpc_stream *stream)
{
    return stream->device->flat->accumulate(dst, dst_dtype, src, src_dtype, numel, stream);
}

static inline fsdpc_status fsdpc_flat_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    return stream->device->flat->reduce(args, stream);
}

static inline fsdpc_status fsdpc_flat_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                                            const double *scale_at, int *nonfinite_io,
                                            fsdpc_stream *stream)
{
    return stream->device->flat->scale(x, dtype, numel, scale, scale_at, nonfinite_io, stream);
}

static inline fsdpc_status fsdpc_flat_sumsq(const void *x, fsdpc_dtype dtype, size_t numel,
                                            size_t leaf, fsdpc_exact_sum *sum_io,
                                            fsdpc_stream *stream)
{
    return stream->device->flat->sumsq(x, dtype, numel, leaf, sum_io, stream);
}

static inline fsdpc_status fsdpc_flat_sumpow(const void *x, fsdpc_dtype dtype, size_t numel,
                                             size_t leaf, double p, fsdpc_exact_sum *sum_io,
                                             fsdpc_stream *stream)
{
    const fsdpc_flat_ops *ops = stream->device->flat;
    if (!ops->sumpow)
        return fsdpc_flat_missing(ops, "sums of powers: take the 2-norm");
    return ops->sumpow(x, dtype, numel, leaf, p, sum_io, stream);
}

static inline fsdpc_status fsdpc_flat_absmax(const void *x, fsdpc_dtype dtype, size_t numel,
                                             double *max_io, fsdpc_stream *stream)
{
    const fsdpc_flat_ops *ops = stream->device->flat;
    if (!ops->absmax)
        return fsdpc_flat_missing(ops, "maxima: take the 2-norm");
    return ops->absmax(x, dtype, numel, max_io, stream);
}

static inline fsdpc_status fsdpc_flat_norm_join(const fsdpc_norm_join_args *args,
                                                fsdpc_stream *stream)
{
    return stream->device->flat->norm_join(args, stream);
}

static inline fsdpc_status fsdpc_flat_norm_value(const fsdpc_norm *norm, double p, double *out,
                                                 fsdpc_stream *stream)
{
    return stream->device->flat->norm_value(norm, p, out, stream);
}

static inline fsdpc_status fsdpc_flat_clip(const fsdpc_clip_args *args, fsdpc_stream *stream)
{
    return stream->device->flat->clip(args, stream);
}

static inline fsdpc_status fsdpc_flat_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                                            fsdpc_stream *stream)
{
    const fsdpc_flat_ops *ops = stream->device->flat;
    if (!ops->clamp)
        return fsdpc_flat_missing(ops, "clamp: clip by the norm");
    return ops->clamp(x, dtype, numel, limit, stream);
}

static inline fsdpc_status fsdpc_flat_step(const fsdpc_step_args *args, fsdpc_stream *stream)
{
    return stream->device->flat->step(args, stream);
}

/* Clears *equal_io if bytes differ; those of a remote device are copied to the host. */
fsdpc_status fsdpc_flat_same_bytes(const void *a, const void *b, size_t bytes, bool *equal_io,
                                   fsdpc_stream *stream);

static inline fsdpc_status fsdpc_flat_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                                            fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                                            fsdpc_stream *stream)
{
    if (dst_dtype == src_dtype && !fsdpc_dtype_is_float(dst_dtype))
        return fsdpc_flat_same_bytes(dst, src, numel * fsdpc_dtype_bytes(dst_dtype), equal_io,
                                     stream);
    return stream->device->flat->equal(dst, dst_dtype, src, src_dtype, numel, equal_io, stream);
}

static inline fsdpc_status fsdpc_flat_init(const fsdpc_init_args *args, fsdpc_stream *stream)
{
    return stream->device->flat->init(args, stream);
}

static inline fsdpc_status fsdpc_flat_encode(const fsdpc_code_args *args, fsdpc_stream *stream)
{
    const fsdpc_flat_ops *ops = stream->device->flat;
    return ops->encode ? ops->encode(args, stream) : fsdpc_flat_missing(ops, "block codes");
}

static inline fsdpc_status fsdpc_flat_decode(const fsdpc_code_args *args, fsdpc_stream *stream)
{
    const fsdpc_flat_ops *ops = stream->device->flat;
    return ops->decode ? ops->decode(args, stream) : fsdpc_flat_missing(ops, "block codes");
}

#endif
