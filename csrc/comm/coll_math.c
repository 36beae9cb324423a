/* Computes sums and extrema, and reduces slices.
 *
 * Float sums use the device's reduce kernel, which sums in a fixed order (a pairwise tree over
 * ranks). Every rank therefore gets the same bits from the same contributions. All other reductions
 * are small (counts, flags, maxima of a few elements) and use plain loops that the compiler
 * vectorises.
 */
#include "comm/coll_math.h"

#include "ops/flat_ops.h"

/* Combines `x` with `best`; both have the given type. */
#define FOLD(type, join)                                                                           \
    for (size_t j = 0; j < numel; j++) {                                                           \
        type best = ((const type *)srcs[0])[j];                                                    \
        for (int p = 1; p < n_srcs; p++) {                                                         \
            type x = ((const type *)srcs[p])[j];                                                   \
            best = (join);                                                                         \
        }                                                                                          \
        ((type *)out)[j] = best;                                                                   \
    }                                                                                              \
    break

#define SAME(x) (x)
/* A NaN contribution replaces the best value; a NaN that is already the best value stays, because
 * no comparison with it is true. */
#define FOLD_EXTREMUM(type, wide, better)                                                          \
    FOLD(type, (wide(x) better wide(best) || wide(x) != wide(x)) ? x : best)

#define EXTREMUM(better)                                                                           \
    switch (dtype) {                                                                               \
    case FSDPC_F32:                                                                                \
        FOLD_EXTREMUM(float, SAME, better);                                                        \
    case FSDPC_F64:                                                                                \
        FOLD_EXTREMUM(double, SAME, better);                                                       \
    case FSDPC_BF16:                                                                               \
        FOLD_EXTREMUM(uint16_t, fsdpc_bf16_to_f32, better);                                        \
    case FSDPC_F16:                                                                                \
        FOLD_EXTREMUM(uint16_t, fsdpc_f16_to_f32, better);                                         \
    case FSDPC_I32:                                                                                \
        FOLD(int32_t, x better best ? x : best);                                                   \
    case FSDPC_I64:                                                                                \
        FOLD(int64_t, x better best ? x : best);                                                   \
    case FSDPC_U8:                                                                                 \
    case FSDPC_BOOL:                                                                               \
        FOLD(uint8_t, x better best ? x : best);                                                   \
    case FSDPC_DTYPE_COUNT:                                                                        \
        break;                                                                                     \
    }                                                                                              \
    return FSDPC_OK

static fsdpc_status fold_max(fsdpc_dtype dtype, const void *const *srcs, int n_srcs, size_t numel,
                             void *out)
{
    EXTREMUM(>);
}

static fsdpc_status fold_min(fsdpc_dtype dtype, const void *const *srcs, int n_srcs, size_t numel,
                             void *out)
{
    EXTREMUM(<);
}

static fsdpc_status fold_sum(fsdpc_dtype dtype, const void *const *srcs, int n_srcs, size_t numel,
                             void *out)
{
    switch (dtype) {
    case FSDPC_I32:
        FOLD(uint32_t, best + x);
    case FSDPC_I64:
        FOLD(uint64_t, best + x);
    case FSDPC_U8:
        FOLD(uint8_t, (uint8_t)(best + x));
    case FSDPC_BOOL:
        FOLD(uint8_t, best | x);
    default:
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "sum of %s came to the wrong place",
                          fsdpc_dtype_name(dtype));
    }
    return FSDPC_OK;
}

#define FOLD_INTEGERS(join)                                                                        \
    case FSDPC_I32:                                                                                \
        FOLD(uint32_t, join);                                                                      \
    case FSDPC_I64:                                                                                \
        FOLD(uint64_t, join);                                                                      \
    case FSDPC_U8:                                                                                 \
    case FSDPC_BOOL:                                                                               \
        FOLD(uint8_t, (uint8_t)(join))

static fsdpc_status no_reduction(const char *name, fsdpc_dtype dtype)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "all_reduce: there is no %s of %s", name,
                      fsdpc_dtype_name(dtype));
}

static fsdpc_status fold_product(fsdpc_dtype dtype, const void *const *srcs, int n_srcs,
                                 size_t numel, void *out)
{
    switch (dtype) {
    case FSDPC_F32:
        FOLD(float, best *x);
    case FSDPC_F64:
        FOLD(double, best *x);
        FOLD_INTEGERS(best * x);
    default:
        return no_reduction("product", dtype);
    }
    return FSDPC_OK;
}

#define BITWISE(name, join)                                                                        \
    static fsdpc_status fold_##name(fsdpc_dtype dtype, const void *const *srcs, int n_srcs,        \
                                    size_t numel, void *out)                                       \
    {                                                                                              \
        switch (dtype) {                                                                           \
            FOLD_INTEGERS(join);                                                                   \
        default:                                                                                   \
            return no_reduction(#name, dtype);                                                     \
        }                                                                                          \
        return FSDPC_OK;                                                                           \
    }

BITWISE(and, best &x)
BITWISE(or, best | x)
BITWISE(xor, best ^ x)

typedef fsdpc_status fold(fsdpc_dtype dtype, const void *const *srcs, int n_srcs, size_t numel,
                          void *out);

fsdpc_status fsdpc_coll_combine(fsdpc_red red, fsdpc_dtype dtype, const void *const *srcs,
                                int n_srcs, size_t numel, void *out, fsdpc_stream *stream)
{
    static fold *const folds[FSDPC_RED_COUNT] = {fold_sum, fold_max, fold_min, fold_product,
                                                 fold_and, fold_or,  fold_xor};
    if (red != FSDPC_RED_SUM || !fsdpc_dtype_is_float(dtype))
        return folds[red](dtype, srcs, n_srcs, numel, out);
    return fsdpc_flat_reduce(&(fsdpc_reduce_args){.srcs = srcs,
                                                  .n_srcs = n_srcs,
                                                  .dtype = dtype,
                                                  .numel = numel,
                                                  .scale = 1,
                                                  .round_dtype = dtype,
                                                  .out = out,
                                                  .out_dtype = dtype},
                             stream);
}

size_t fsdpc_coll_first(const fsdpc_coll *op, const fsdpc_slice *slice, int rank)
{
    bool all = op->kind == FSDPC_COLL_REDUCE_ALL;
    return slice->unsharded_offset + (all ? 0 : (size_t)rank * slice->numel);
}

/* Adds the result of another sum to this one. */
static fsdpc_status join_sums(const fsdpc_coll *op, const fsdpc_slice *slice,
                              const fsdpc_coll_sum *sum, fsdpc_stream *stream)
{
    size_t at = slice->shard_offset * fsdpc_dtype_bytes(op->shard_dtype);
    return fsdpc_flat_accumulate((unsigned char *)sum->shard + at, op->shard_dtype,
                                 (const unsigned char *)sum->from + at, op->shard_dtype,
                                 slice->numel, stream);
}

fsdpc_status fsdpc_coll_reduce_part(const fsdpc_coll *op, const fsdpc_slice *slice,
                                    const void *const *srcs, int n_srcs, fsdpc_stream *stream)
{
    size_t at = slice->shard_offset * fsdpc_dtype_bytes(op->shard_dtype);
    const fsdpc_coll_sum whole = {
        .n_ranks = n_srcs, .shard = op->shard, .accumulate = op->accumulate};
    const fsdpc_coll_sum *sum = op->sums ? op->sums : &whole;
    for (int left = op->sums ? op->n_sums : 1; left > 0; left--, sum++) {
        if (sum->n_ranks == 0) {
            FSDPC_TRY(join_sums(op, slice, sum, stream));
            continue;
        }
        FSDPC_TRY(fsdpc_flat_reduce(&(fsdpc_reduce_args){.srcs = srcs,
                                                         .n_srcs = sum->n_ranks,
                                                         .dtype = op->dtype,
                                                         .numel = slice->numel,
                                                         .scale = op->scale,
                                                         .round_dtype = op->round_dtype,
                                                         .out = (unsigned char *)sum->shard + at,
                                                         .out_dtype = op->shard_dtype,
                                                         .accumulate = sum->accumulate},
                                    stream));
        srcs += sum->n_ranks;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_coll_reduce_slices(const fsdpc_coll *op, int rank, int size,
                                      const unsigned char *const *datas, fsdpc_stream *stream)
{
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    size_t element = fsdpc_dtype_bytes(op->dtype);
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t first = fsdpc_coll_first(op, &op->slices[i], rank);
        if (op->slices[i].numel == 0)
            continue;
        for (int p = 0; p < size; p++)
            srcs[p] = datas[p] + op->offset + first * element;
        FSDPC_TRY(fsdpc_coll_reduce_part(op, &op->slices[i], srcs, size, stream));
    }
    return FSDPC_OK;
}
