/* sumsq: sums of squares of whole leaves, each added to an exact accumulator.
 *
 * Included by flat_cpu_body.h.  A leaf is summed in sixteen fp64 partial sums, element i of the
 * leaf into partial i mod 16, which are then folded: j with j + 8, 4, 2, 1.  The order is part of
 * the result, so it is the same on every instruction set; the square of an fp32, bf16 or fp16
 * number is exact in fp64, so fusing the addition would change nothing.  A short leaf behaves as if
 * padded with zeros.  Threads sum into accumulators of their own, which merge exactly.
 */

/* fp64 vectors as wide as the registers; the sixteen partial sums are a few of them. */
#if defined(__AVX512F__)
enum { F64_LANES = 8 };
#elif defined(__AVX2__)
enum { F64_LANES = 4 };
#else
enum { F64_LANES = 2 };
#endif
enum { PARTIALS = 16, F64_VECTORS = PARTIALS / F64_LANES };

typedef double f64_vec __attribute__((vector_size(8 * F64_LANES)));
typedef double f64_loose __attribute__((vector_size(8 * F64_LANES), aligned(8), may_alias));
typedef float f32_loose __attribute__((vector_size(4 * F64_LANES), aligned(4), may_alias));

FSDPC_INLINE f64_vec widen(const float *values)
{
#if defined(__AVX512F__) /* gcc 12 converts the halves one by one and joins them */
    return (f64_vec)_mm512_cvtps_pd(_mm256_loadu_ps(values));
#else
    return __builtin_convertvector(*(const f32_loose *)values, f64_vec);
#endif
}

/* partial[j] += x[i + j]^2 for sixteen elements */
FSDPC_INLINE void add_squares(f64_vec *partial, const void *x, size_t i, fsdpc_dtype dtype)
{
    float widened[PARTIALS];
    const float *values = (const float *)x + i;
    if (dtype == FSDPC_BF16 || dtype == FSDPC_F16) {
        for (size_t lane = 0; lane < PARTIALS; lane += FSDPC_LANES)
            fsdpc_vf_store(widened + lane, fsdpc_vf_load_as(x, i + lane, dtype));
        values = widened;
    }
    for (int k = 0; k < F64_VECTORS; k++) {
        f64_vec value;
        if (dtype == FSDPC_F64)
            value = (f64_vec) * (const f64_loose *)((const double *)x + i + k * F64_LANES);
        else
            value = widen(values + k * F64_LANES);
        partial[k] += value * value;
    }
}

FSDPC_INLINE double leaf_sum(const void *x, size_t begin, size_t numel, fsdpc_dtype dtype)
{
    f64_vec partial[F64_VECTORS] = {{0}};
    size_t i = 0;
    for (; i + PARTIALS <= numel; i += PARTIALS) {
        prefetch_ahead(x, begin + i, dtype, PARTIALS);
        add_squares(partial, x, begin + i, dtype);
    }
    if (i < numel) {
        double padded[PARTIALS] = {0};
        memcpy(padded, fsdpc_flat_at(x, begin + i, dtype), (numel - i) * fsdpc_dtype_bytes(dtype));
        add_squares(partial, padded, 0, dtype);
    }
    for (int half = F64_VECTORS / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            partial[k] += partial[k + half];
    f64_vec s = partial[0];
#if defined(__AVX512F__)
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
#elif defined(__AVX2__)
    return (s[0] + s[2]) + (s[1] + s[3]);
#else
    return s[0] + s[1];
#endif
}

FSDPC_INLINE void sumsq_run(const void *x, size_t begin, size_t end, size_t leaf, fsdpc_dtype dtype,
                            fsdpc_exact_sum *sum)
{
    size_t at = begin;
    if (leaf == 64) /* a constant length, for the loops inside */
        for (; at + 64 <= end; at += 64)
            fsdpc_exact_sum_add(sum, leaf_sum(x, at, 64, dtype));
    for (; at < end; at += fsdpc_min_size(leaf, end - at))
        fsdpc_exact_sum_add(sum, leaf_sum(x, at, fsdpc_min_size(leaf, end - at), dtype));
}

typedef struct sumsq_args {
    const void *x;
    fsdpc_dtype dtype;
    size_t leaf;
    int lock; /* held while a part merges into `sum`; a few hundred cycles for each part */
    fsdpc_exact_sum *sum;
} sumsq_args;

static void sumsq_range(const sumsq_args *a, size_t begin, size_t end, fsdpc_exact_sum *sum)
{
    switch (a->dtype) {
    case FSDPC_F32:
        sumsq_run(a->x, begin, end, a->leaf, FSDPC_F32, sum);
        break;
    case FSDPC_BF16:
        sumsq_run(a->x, begin, end, a->leaf, FSDPC_BF16, sum);
        break;
    case FSDPC_F16:
        sumsq_run(a->x, begin, end, a->leaf, FSDPC_F16, sum);
        break;
    default:
        sumsq_run(a->x, begin, end, a->leaf, FSDPC_F64, sum);
    }
    fsdpc_exact_sum_normalize(sum);
}

/* Leaves between two normalisations: far fewer than a digit has room for, and enough to hide them.
 */
enum { SUMSQ_LEAVES = 1 << 20 };

static void sumsq_part(void *arg, size_t begin, size_t end)
{
    sumsq_args *a = arg;
    fsdpc_exact_sum sum = {{0}, 0, 0};
    while (begin < end) {
        bool all = (end - begin) / SUMSQ_LEAVES < a->leaf;
        size_t stop = all ? end : begin + a->leaf * SUMSQ_LEAVES;
        sumsq_range(a, begin, stop, &sum);
        begin = stop;
    }
    while (__atomic_exchange_n(&a->lock, 1, __ATOMIC_ACQUIRE))
        ; /* pairs with the release below: the words another part merged are seen */
    fsdpc_exact_sum_merge(a->sum, &sum);
    __atomic_store_n(&a->lock, 0, __ATOMIC_RELEASE);
}

static fsdpc_status flat_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("sumsq", dtype));
    if (leaf == 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "sumsq: a leaf has at least 1 element, not 0; give 64");
    sumsq_args args = {x, dtype, leaf, 0, sum_io};
    fsdpc_flat_split(stream, numel, leaf, sumsq_part, &args);
    return FSDPC_OK;
}
