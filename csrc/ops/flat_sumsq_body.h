/* sumsq and sumpow: sums of squares, magnitudes, or powers of magnitudes over whole leaves, each
 * added to an exact accumulator.
 *
 * Included by flat_cpu_body.h. A leaf is summed into sixteen fp64 partial sums, element i into
 * partial i mod 16, which are then folded: j with j + 8, 4, 2, 1. The order is part of the result,
 * so it is the same on every instruction set. The square of an fp32, bf16 or fp16 number is exact
 * in fp64, so fusing the addition would change nothing. Integer powers up to WHOLE_POWER_MAX are
 * products of repeated squares, from the lowest bit of p up. On every path, other powers call
 * libm's pow for each element, which is a hundred times slower. A short leaf behaves as if padded
 * with zeros. Each thread sums into its own accumulator; the accumulators are then merged exactly.
 *
 * Leaves of one element are added to the accumulator a block of terms at a time: see Note [exact
 * blocks].
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
typedef int64_t f64_bits __attribute__((vector_size(8 * F64_LANES)));
typedef float f32_loose __attribute__((vector_size(4 * F64_LANES), aligned(4), may_alias));

FSDPC_INLINE f64_vec widen(const float *values)
{
#if defined(__AVX512F__) /* gcc 12 converts the halves one by one and joins them */
    return (f64_vec)_mm512_cvtps_pd(_mm256_loadu_ps(values));
#else
    return __builtin_convertvector(*(const f32_loose *)values, f64_vec);
#endif
}

typedef enum term { TERM_SQUARE, TERM_MAGNITUDE, TERM_WHOLE_POWER, TERM_POWER } term;

enum { WHOLE_POWER_MAX = 64 };

FSDPC_INLINE f64_vec term_of(f64_vec value, term kind, double p)
{
    if (kind == TERM_SQUARE)
        return value * value;
    const f64_bits sign = (f64_bits){0} + INT64_MIN;
    value = (f64_vec)((f64_bits)value & ~sign);
    if (kind == TERM_WHOLE_POWER) {
        f64_vec power = value, result = (f64_vec){0} + 1;
        for (unsigned rest = (unsigned)p; rest; rest >>= 1, power *= power)
            result = rest & 1 ? result * power : result;
        return result;
    }
    if (kind == TERM_POWER)
        for (int lane = 0; lane < F64_LANES; lane++)
            value[lane] = pow(value[lane], p);
    return value;
}

/* partial[j] += the term of x[i + j], for sixteen elements */
FSDPC_INLINE void add_terms(f64_vec *partial, const void *x, size_t i, fsdpc_dtype dtype, term kind,
                            double p)
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
        partial[k] += term_of(value, kind, p);
    }
}

FSDPC_INLINE double fold_partials(f64_vec *partial)
{
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

FSDPC_INLINE double leaf_sum(const void *x, size_t begin, size_t numel, fsdpc_dtype dtype,
                             term kind, double p)
{
    f64_vec partial[F64_VECTORS] = {{0}};
    size_t i = 0;
    for (; i + PARTIALS <= numel; i += PARTIALS) {
        prefetch_ahead(x, begin + i, dtype, PARTIALS);
        add_terms(partial, x, begin + i, dtype, kind, p);
    }
    if (i < numel) {
        double padded[PARTIALS] = {0};
        memcpy(padded, fsdpc_flat_at(x, begin + i, dtype), (numel - i) * fsdpc_dtype_bytes(dtype));
        add_terms(partial, padded, 0, dtype, kind, p);
    }
    return fold_partials(partial);
}

/* Note [exact blocks]. One addition to the accumulator costs as much as reading a leaf of 64
 * elements. Leaves of one element are therefore first added in fp64, a block at a time, without
 * rounding.
 *
 * Sigma is a power of two above the block's sum. (term + sigma) - sigma rounds a term to a multiple
 * of 2^-52 sigma: its high part. Any sum of high parts is also a multiple of 2^-52 sigma and below
 * 2 sigma, so it is exact in fp64. The remainder of each term is at most 2^-53 sigma; the
 * remainders sum to at most half of low = 2^-44 sigma. The same step, with low in place of sigma,
 * extracts a low part from each remainder. If every low part equals its remainder, both sums are
 * exact. Squares of fp32 have 48 bits, so this holds for elements down to 2^-24 of the block's
 * norm. Other blocks, including those with a NaN or an infinity, add their terms one by one. Both
 * methods add the same number to the accumulator. */
enum { EXACT_BLOCK = 256 };

/* Adds the high and low parts of the first n terms, a multiple of PARTIALS; returns false, adding
 * nothing, if these do not represent all terms exactly. */
FSDPC_INLINE bool add_parts(const double *terms, size_t n, double bound, fsdpc_exact_sum *sum)
{
    double sigma = ldexp(1, ilogb(bound) + 1), low = sigma * 0x1p-44;
    f64_vec highs[F64_VECTORS] = {{0}}, lows[F64_VECTORS] = {{0}};
    f64_bits left = {0};
    for (size_t i = 0; i < n; i += PARTIALS) {
        for (int k = 0; k < F64_VECTORS; k++) {
            f64_vec whole = (f64_vec) * (const f64_loose *)(terms + i + k * F64_LANES);
            f64_vec high = (whole + sigma) - sigma, rest = whole - high;
            f64_vec part = (rest + low) - low;
            highs[k] += high;
            lows[k] += part;
            left |= (f64_bits)(rest - part); /* +0 if they are equal, whatever their signs */
        }
    }
    int64_t any = 0;
    for (int lane = 0; lane < F64_LANES; lane++)
        any |= left[lane];
    if (any)
        return false;
    double high_sum = fold_partials(highs), low_sum = fold_partials(lows);
    if (low_sum < 0) { /* the accumulator does not accept negative numbers; both stay exact */
        high_sum -= low;
        low_sum += low;
    }
    fsdpc_exact_sum_add(sum, high_sum);
    fsdpc_exact_sum_add(sum, low_sum);
    return true;
}

/* Adds up to EXACT_BLOCK elements, each of which is a leaf. */
FSDPC_INLINE void add_singles(const void *x, size_t begin, size_t numel, fsdpc_dtype dtype,
                              term kind, double p, fsdpc_exact_sum *sum)
{
    double terms[EXACT_BLOCK] __attribute__((aligned(64)));
    f64_vec totals[F64_VECTORS] = {{0}};
    size_t n = 0;
    for (; n < numel; n += PARTIALS) {
        double padded[PARTIALS] = {0};
        const void *from = x;
        size_t at = begin + n;
        if (numel - n < PARTIALS) {
            memcpy(padded, fsdpc_flat_at(x, at, dtype), (numel - n) * fsdpc_dtype_bytes(dtype));
            from = padded, at = 0;
        } else {
            prefetch_ahead(x, at, dtype, PARTIALS);
        }
        f64_vec own[F64_VECTORS] = {{0}};
        add_terms(own, from, at, dtype, kind, p);
        for (int k = 0; k < F64_VECTORS; k++) {
            *(f64_loose *)(terms + n + k * F64_LANES) = (f64_loose)own[k];
            totals[k] += own[k];
        }
    }
    double total = fold_partials(totals); /* rounded; not below any term */
    if (total == 0 || (total < 0x1p1022 && add_parts(terms, n, total, sum)))
        return;
    for (size_t i = 0; i < numel; i++)
        fsdpc_exact_sum_add(sum, terms[i]);
}

typedef struct sumpow_args {
    const void *x;
    fsdpc_dtype dtype;
    size_t leaf;
    term kind;
    double p;
    int lock; /* held while a part is merged into `sum`; a few hundred cycles per part */
    fsdpc_exact_sum *sum;
} sumpow_args;

FSDPC_INLINE void sumpow_run(const sumpow_args *a, size_t begin, size_t end, fsdpc_dtype dtype,
                             term kind, fsdpc_exact_sum *sum)
{
    const void *x = a->x;
    size_t at = begin, leaf = a->leaf;
    double p = a->p;
    if (leaf == 1)
        for (; at < end; at += fsdpc_min_size(EXACT_BLOCK, end - at))
            add_singles(x, at, fsdpc_min_size(EXACT_BLOCK, end - at), dtype, kind, p, sum);
    if (leaf == 64) /* a constant length, for the inner loops */
        for (; at + 64 <= end; at += 64)
            fsdpc_exact_sum_add(sum, leaf_sum(x, at, 64, dtype, kind, p));
    for (; at < end; at += fsdpc_min_size(leaf, end - at))
        fsdpc_exact_sum_add(sum, leaf_sum(x, at, fsdpc_min_size(leaf, end - at), dtype, kind, p));
}

FSDPC_INLINE void sumpow_dtype(const sumpow_args *a, size_t begin, size_t end, term kind,
                               fsdpc_exact_sum *sum)
{
    switch (a->dtype) {
    case FSDPC_F32:
        sumpow_run(a, begin, end, FSDPC_F32, kind, sum);
        break;
    case FSDPC_BF16:
        sumpow_run(a, begin, end, FSDPC_BF16, kind, sum);
        break;
    case FSDPC_F16:
        sumpow_run(a, begin, end, FSDPC_F16, kind, sum);
        break;
    default:
        sumpow_run(a, begin, end, FSDPC_F64, kind, sum);
    }
}

static void sumpow_range(const sumpow_args *a, size_t begin, size_t end, fsdpc_exact_sum *sum)
{
    if (a->kind == TERM_SQUARE)
        sumpow_dtype(a, begin, end, TERM_SQUARE, sum);
    else if (a->kind == TERM_MAGNITUDE)
        sumpow_dtype(a, begin, end, TERM_MAGNITUDE, sum);
    else if (a->kind == TERM_WHOLE_POWER)
        sumpow_dtype(a, begin, end, TERM_WHOLE_POWER, sum);
    else
        sumpow_dtype(a, begin, end, TERM_POWER, sum);
    fsdpc_exact_sum_normalize(sum);
}

/* Number of leaves between normalisations: far fewer than a digit can hold, but enough to hide the
 * cost of normalising.
 */
enum { SUMPOW_LEAVES = 1 << 20 };

static void sumpow_part(void *arg, size_t begin, size_t end)
{
    sumpow_args *a = arg;
    fsdpc_exact_sum sum = {{0}, 0, 0};
    while (begin < end) {
        bool all = (end - begin) / SUMPOW_LEAVES < a->leaf;
        size_t stop = all ? end : begin + a->leaf * SUMPOW_LEAVES;
        sumpow_range(a, begin, stop, &sum);
        begin = stop;
    }
    while (__atomic_exchange_n(&a->lock, 1, __ATOMIC_ACQUIRE))
        ; /* pairs with the release below: another part's merged words are visible */
    fsdpc_exact_sum_merge(a->sum, &sum);
    __atomic_store_n(&a->lock, 0, __ATOMIC_RELEASE);
}

static fsdpc_status sum_terms(const char *operation, sumpow_args args, size_t numel,
                              fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_leaf(operation, args.dtype, args.leaf));
    fsdpc_flat_split(stream, numel, args.leaf, sumpow_part, &args);
    return FSDPC_OK;
}

static fsdpc_status flat_sumsq(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                               fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    sumpow_args args = {.x = x, .dtype = dtype, .leaf = leaf, .kind = TERM_SQUARE, .sum = sum_io};
    return sum_terms("sumsq", args, numel, stream);
}

static fsdpc_status flat_sumpow(const void *x, fsdpc_dtype dtype, size_t numel, size_t leaf,
                                double p, fsdpc_exact_sum *sum_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_power(p));
    term kind = p == 2                                 ? TERM_SQUARE
                : p == 1                               ? TERM_MAGNITUDE
                : p <= WHOLE_POWER_MAX && p == rint(p) ? TERM_WHOLE_POWER
                                                       : TERM_POWER;
    sumpow_args args = {.x = x, .dtype = dtype, .leaf = leaf, .kind = kind, .p = p, .sum = sum_io};
    return sum_terms("sumpow", args, numel, stream);
}
