/* reduce: a tree sum over many sources, scaled, rounded and stored, in one pass over memory.
 *
 * Included by flat_cpu_body.h. Up to four sources are added in registers and stored directly.
 * More sources are added in groups of four, a block of REDUCE_BLOCK elements at a time. Group sums
 * are written to blocks in L1 and merged like the digits of a binary counter (equal heights merge),
 * so only logarithmically many exist at once. The result equals the header's pairwise tree, level
 * by level. Reading a block from one source after another, instead of a vector from every source,
 * keeps the number of prefetch streams small.
 *
 * If any dtype is F64, as in tests and rare models, elements are added one by one with the same
 * counter.
 */

enum { REDUCE_BLOCK = 1024, REDUCE_GROUP = 4, REDUCE_HEIGHT_MAX = 32 };

/* Computes the tree over 1 to 4 sources; `tail` is 0 or the number of remaining elements. */
FSDPC_INLINE fsdpc_vf group_sum(const void *const *srcs, int n, size_t i, fsdpc_dtype dtype,
                                size_t tail)
{
#define LOAD(k)                                                                                    \
    (tail ? fsdpc_vf_load_as_n(srcs[k], i, dtype, tail) : fsdpc_vf_load_as(srcs[k], i, dtype))
    fsdpc_vf sum = LOAD(0);
    if (n > 1)
        sum = sum + LOAD(1);
    if (n == 3)
        sum = sum + LOAD(2);
    if (n > 3)
        sum = sum + (LOAD(2) + LOAD(3));
#undef LOAD
    return sum;
}

/* Returns the value stored to out for one vector of sums: cast(round through round_dtype(scale *
 * sum)) [+ out]. */
FSDPC_INLINE fsdpc_vf reduce_value(const fsdpc_reduce_args *a, size_t i, fsdpc_vf sum,
                                   fsdpc_dtype out_dtype, size_t tail)
{
    fsdpc_vf value = sum * fsdpc_vf_splat((float)a->scale);
    if (a->round_dtype == FSDPC_BF16)
        value = fsdpc_vf_from_bf16(fsdpc_vf_to_bf16(value));
    else if (a->round_dtype == FSDPC_F16)
        value = fsdpc_vf_from_f16(fsdpc_vf_to_f16(value));
    if (!a->accumulate)
        return value;
    if (out_dtype == FSDPC_BF16)
        value = fsdpc_vf_from_bf16(fsdpc_vf_to_bf16(value));
    else if (out_dtype == FSDPC_F16)
        value = fsdpc_vf_from_f16(fsdpc_vf_to_f16(value));
    return value + (tail ? fsdpc_vf_load_as_n(a->out, i, out_dtype, tail)
                         : fsdpc_vf_load_as(a->out, i, out_dtype));
}

/* The sources of reduce_run: element i of out is the sum of element i - origin of every source. */
typedef struct reduce_from {
    const void *const *srcs;
    int n; /* 1 to 4 */
    fsdpc_dtype dtype;
    size_t origin;
} reduce_from;

FSDPC_INLINE void reduce_run(const fsdpc_reduce_args *a, reduce_from from, size_t begin, size_t end,
                             fsdpc_dtype out_dtype, bool stream)
{
    size_t i = begin;
    for (; i + 2 * FSDPC_LANES <= end; i += 2 * FSDPC_LANES) {
        size_t at = i - from.origin;
        for (int k = 0; k < from.n; k++)
            prefetch_ahead(from.srcs[k], at, from.dtype, 2 * FSDPC_LANES);
        fsdpc_vf low = group_sum(from.srcs, from.n, at, from.dtype, 0);
        fsdpc_vf high = group_sum(from.srcs, from.n, at + FSDPC_LANES, from.dtype, 0);
        low = reduce_value(a, i, low, out_dtype, 0);
        high = reduce_value(a, i + FSDPC_LANES, high, out_dtype, 0);
        store_pair(a->out, i, out_dtype, low, high, stream);
    }
    if (stream)
        stream_end();
    for (size_t left; i < end; i += left) {
        left = fsdpc_min_size(FSDPC_LANES, end - i);
        fsdpc_vf sum = group_sum(from.srcs, from.n, i - from.origin, from.dtype, left);
        fsdpc_vf_store_as_n(a->out, i, out_dtype, reduce_value(a, i, sum, out_dtype, left), left);
    }
}

/* -- up to four sources ------------------------------------------------------------------------ */

FSDPC_INLINE void reduce_few(const fsdpc_reduce_args *a, size_t begin, size_t end,
                             fsdpc_dtype dtype, fsdpc_dtype out_dtype, bool stream)
{
    if (a->n_srcs == 1)
        reduce_run(a, (reduce_from){a->srcs, 1, dtype, 0}, begin, end, out_dtype, stream);
    else if (a->n_srcs == 2)
        reduce_run(a, (reduce_from){a->srcs, 2, dtype, 0}, begin, end, out_dtype, stream);
    else if (a->n_srcs == 3)
        reduce_run(a, (reduce_from){a->srcs, 3, dtype, 0}, begin, end, out_dtype, stream);
    else
        reduce_run(a, (reduce_from){a->srcs, 4, dtype, 0}, begin, end, out_dtype, stream);
}

/* -- many sources ------------------------------------------------------------------------------ */

FSDPC_INLINE void group_block_as(float *block, const void *const *srcs, int n, size_t at,
                                 size_t numel, fsdpc_dtype dtype)
{
    size_t i = 0;
    for (; i + FSDPC_LANES <= numel; i += FSDPC_LANES)
        fsdpc_vf_store(block + i, group_sum(srcs, n, at + i, dtype, 0));
    if (i < numel)
        fsdpc_vf_store(block + i, group_sum(srcs, n, at + i, dtype, numel - i));
}

static void group_block(float *block, const void *const *srcs, int n, size_t at, size_t numel,
                        fsdpc_dtype dtype)
{
    if (dtype == FSDPC_F32)
        group_block_as(block, srcs, n, at, numel, FSDPC_F32);
    else if (dtype == FSDPC_BF16)
        group_block_as(block, srcs, n, at, numel, FSDPC_BF16);
    else
        group_block_as(block, srcs, n, at, numel, FSDPC_F16);
}

/* Sums every source into blocks[0], elements at .. at + numel - 1. */
static void tree_block(float (*blocks)[REDUCE_BLOCK], const fsdpc_reduce_args *a, size_t at,
                       size_t numel)
{
    int height[REDUCE_HEIGHT_MAX], depth = 0;
    for (int src = 0; src < a->n_srcs; src += REDUCE_GROUP) {
        int n = a->n_srcs - src < REDUCE_GROUP ? a->n_srcs - src : REDUCE_GROUP;
        group_block(blocks[depth], a->srcs + src, n, at, numel, a->dtype);
        height[depth++] = 0;
        bool last = src + n == a->n_srcs; /* then unpaired blocks also merge, the smallest first */
        while (depth > 1 && (last || height[depth - 1] == height[depth - 2])) {
            float *left = blocks[depth - 2], *right = blocks[depth - 1];
            for (size_t i = 0; i < numel; i += FSDPC_LANES)
                fsdpc_vf_store(left + i, fsdpc_vf_load(left + i) + fsdpc_vf_load(right + i));
            depth--;
            height[depth - 1]++;
        }
    }
}

FSDPC_INLINE void reduce_many(const fsdpc_reduce_args *a, size_t begin, size_t end,
                              fsdpc_dtype out_dtype, bool stream)
{
    _Alignas(64) float blocks[REDUCE_HEIGHT_MAX][REDUCE_BLOCK];
    const void *const sums[] = {blocks[0]};
    for (size_t at = begin; at < end; at += REDUCE_BLOCK) {
        size_t numel = fsdpc_min_size(REDUCE_BLOCK, end - at);
        tree_block(blocks, a, at, numel);
        reduce_run(a, (reduce_from){sums, 1, FSDPC_F32, at}, at, at + numel, out_dtype, stream);
    }
}

/* -- with F64 ---------------------------------------------------------------------------------- */

/* Returns a partial sum, in fp32 unless the sources are F64. (A sum of two floats, rounded to fp64
 * and then to fp32, equals the sum rounded once.) */
static inline double add_wide(double left, double right, fsdpc_dtype dtype)
{
    double sum = left + right;
    return dtype == FSDPC_F64 ? sum : (double)(float)sum;
}

static double tree_element(const fsdpc_reduce_args *a, size_t i)
{
    double partial[REDUCE_HEIGHT_MAX];
    int height[REDUCE_HEIGHT_MAX], depth = 0;
    for (int src = 0; src < a->n_srcs; src++) {
        partial[depth] = fsdpc_f64_load_as(a->srcs[src], i, a->dtype);
        height[depth++] = 0;
        bool last = src + 1 == a->n_srcs;
        while (depth > 1 && (last || height[depth - 1] == height[depth - 2])) {
            depth--;
            partial[depth - 1] = add_wide(partial[depth - 1], partial[depth], a->dtype);
            height[depth - 1]++;
        }
    }
    return partial[0];
}

/* Returns x rounded to the dtype. */
static double round_as(double x, fsdpc_dtype dtype)
{
    _Alignas(8) unsigned char bytes[8]; /* chars, to hold one element of any dtype */
    fsdpc_f64_store_as(bytes, 0, dtype, x);
    return fsdpc_f64_load_as(bytes, 0, dtype);
}

static void reduce_f64(const fsdpc_reduce_args *a, size_t begin, size_t end)
{
    const double scale = a->dtype == FSDPC_F64 ? a->scale : (double)(float)a->scale;
    for (size_t i = begin; i < end; i++) {
        double value = tree_element(a, i) * scale;
        if (a->dtype != FSDPC_F64)
            value = (double)(float)value;
        value = round_as(value, a->round_dtype);
        if (a->accumulate)
            value = add_wide(fsdpc_f64_load_as(a->out, i, a->out_dtype),
                             round_as(value, a->out_dtype), a->out_dtype);
        fsdpc_f64_store_as(a->out, i, a->out_dtype, value);
    }
}

static void reduce_part(void *arg, size_t begin, size_t end)
{
    const fsdpc_reduce_args *a = arg;
    bool few = a->n_srcs <= REDUCE_GROUP;
    bool stream = !a->accumulate && can_stream(a->out, a->numel);
    if (few && a->dtype == FSDPC_F32 && a->out_dtype == FSDPC_F32 && stream)
        reduce_few(a, begin, end, FSDPC_F32, FSDPC_F32, true);
    else if (few && a->dtype == FSDPC_F32 && a->out_dtype == FSDPC_F32)
        reduce_few(a, begin, end, FSDPC_F32, FSDPC_F32, false);
    else if (few && a->dtype == FSDPC_BF16 && a->out_dtype == FSDPC_F32 && stream)
        reduce_few(a, begin, end, FSDPC_BF16, FSDPC_F32, true);
    else if (few && a->dtype == FSDPC_BF16 && a->out_dtype == FSDPC_F32)
        reduce_few(a, begin, end, FSDPC_BF16, FSDPC_F32, false);
    else if (a->dtype == FSDPC_F64 || a->out_dtype == FSDPC_F64)
        reduce_f64(a, begin, end);
    else if (a->out_dtype == FSDPC_F32 && stream)
        reduce_many(a, begin, end, FSDPC_F32, true);
    else if (a->out_dtype == FSDPC_F32)
        reduce_many(a, begin, end, FSDPC_F32, false);
    else if (a->out_dtype == FSDPC_BF16)
        reduce_many(a, begin, end, FSDPC_BF16, false);
    else
        reduce_many(a, begin, end, FSDPC_F16, false);
}

static fsdpc_status flat_reduce(const fsdpc_reduce_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_reduce(args));
    fsdpc_flat_split(stream, args->numel, REDUCE_BLOCK, reduce_part, (void *)args);
    return FSDPC_OK;
}
