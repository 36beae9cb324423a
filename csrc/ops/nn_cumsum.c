/* Cumulative sums, compiled once for all instruction sets.
 *
 * Additions along a line depend on each other, so several lines are summed concurrently. These are
 * neighbouring columns, which the compiler vectorises, or, along the innermost dimension, a few
 * rows, to hide the latency of additions. Each line is summed by a single thread, so the number of
 * threads does not change the result.
 */
#include "ops/nn_internal.h"

enum { CUMSUM_COLS = 256, CUMSUM_ROWS = 8, CUMSUM_TILE = 16 };

/* add_: `lines` neighbouring lines, whose elements are `inner` apart. rows_: `rows` rows, a tile of
 * each in turn, so that only a few cache lines are in use. */
#define CUMSUM(suffix, type, wide, from, to)                                                       \
    static void add_##suffix(const fsdpc_cumsum_args *args, size_t at, size_t lines)               \
    {                                                                                              \
        const type *restrict x = (const type *)args->x + at;                                       \
        type *restrict out = (type *)args->out + at;                                               \
        wide total[CUMSUM_COLS] = {0};                                                             \
        for (size_t e = 0; e < args->extent; e++) {                                                \
            size_t i = (args->reverse ? args->extent - 1 - e : e) * args->inner;                   \
            for (size_t k = 0; k < lines; k++) {                                                   \
                total[k] += from(x[i + k]);                                                        \
                out[i + k] = to(total[k]);                                                         \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void rows_##suffix(const fsdpc_cumsum_args *args, size_t row, size_t rows)              \
    {                                                                                              \
        size_t extent = args->extent;                                                              \
        wide totals[CUMSUM_ROWS] = {0};                                                            \
        for (size_t first = 0; first < extent; first += CUMSUM_TILE)                               \
            for (size_t k = 0; k < rows; k++) {                                                    \
                const type *restrict x = (const type *)args->x + (row + k) * extent;               \
                type *restrict out = (type *)args->out + (row + k) * extent;                       \
                size_t n = fsdpc_min_size(CUMSUM_TILE, extent - first);                            \
                wide total = totals[k];                                                            \
                for (size_t e = first; e < first + n; e++) {                                       \
                    size_t i = args->reverse ? extent - 1 - e : e;                                 \
                    total += from(x[i]);                                                           \
                    out[i] = to(total);                                                            \
                }                                                                                  \
                totals[k] = total;                                                                 \
            }                                                                                      \
    }                                                                                              \
    static void cumsum_##suffix(const void *arg, size_t first, size_t last)                        \
    {                                                                                              \
        const fsdpc_cumsum_args own = *(const fsdpc_cumsum_args *)arg;                             \
        for (size_t line = first, n; line < last; line += n) {                                     \
            size_t most = own.inner == 1 ? CUMSUM_ROWS : CUMSUM_COLS, col = line % own.inner;      \
            n = fsdpc_min_size(most, last - line);                                                 \
            if (own.inner == 1) {                                                                  \
                rows_##suffix(&own, line, n);                                                      \
                continue;                                                                          \
            }                                                                                      \
            n = fsdpc_min_size(n, own.inner - col);                                                \
            add_##suffix(&own, line / own.inner * own.extent * own.inner + col, n);                \
        }                                                                                          \
    }

#define TO_BF16(x) fsdpc_f32_to_bf16((float)(x))
#define TO_F16(x) fsdpc_f32_to_f16((float)(x))
CUMSUM(f32, float, double, (double), (float))
CUMSUM(bf16, uint16_t, double, fsdpc_bf16_to_f32, TO_BF16)
CUMSUM(f16, uint16_t, double, fsdpc_f16_to_f32, TO_F16)
CUMSUM(f64, double, double, (double), (double))
CUMSUM(i32, int32_t, uint32_t, (uint32_t), (int32_t))
CUMSUM(i64, int64_t, uint64_t, (uint64_t), (int64_t))

fsdpc_status fsdpc_nn_cumsum(const fsdpc_cumsum_args *args, fsdpc_stream *stream)
{
    static const nn_range_fn kernels[] = {
        [FSDPC_F32] = cumsum_f32, [FSDPC_BF16] = cumsum_bf16, [FSDPC_F16] = cumsum_f16,
        [FSDPC_F64] = cumsum_f64, [FSDPC_I32] = cumsum_i32,   [FSDPC_I64] = cumsum_i64};
    if (args->dtype > FSDPC_I64)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "a cumulative sum of %s: cast to int64 first",
                          fsdpc_dtype_name(args->dtype));
    nn_for(stream, args->outer * args->inner, nn_row_grain(args->extent), kernels[args->dtype],
           args);
    return FSDPC_OK;
}
