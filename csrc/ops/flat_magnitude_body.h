/* absmax and clamp: the largest magnitude, and clamping by magnitude.
 *
 * Included by flat_cpu_body.h. Magnitudes are compared as integers, using the bits without the
 * sign. Non-negative floats sort like their bit patterns, and NaN sorts above infinity, so a
 * maximum propagates NaN without a check. A maximum does not depend on the order of its elements,
 * so results are identical for all thread counts and instruction sets. clamp compares as floats: a
 * NaN is neither above nor below, and stays unchanged.
 */

/* Processes whole registers of bit patterns, selecting the maximum in each lane by a comparison. */
#define ABSMAX_RUN(name, type, mask)                                                               \
    typedef type name##_vec __attribute__((vector_size(4 * FSDPC_LANES)));                         \
    typedef type name##_loose                                                                      \
        __attribute__((vector_size(4 * FSDPC_LANES), aligned(sizeof(type)), may_alias));           \
    static int64_t name(const void *x, size_t begin, size_t end)                                   \
    {                                                                                              \
        enum { N = 4 * FSDPC_LANES / sizeof(type) };                                               \
        const type *bits = x;                                                                      \
        name##_vec most[2] = {{0}};                                                                \
        size_t i = begin;                                                                          \
        for (; i + 2 * N <= end; i += 2 * N) {                                                     \
            __builtin_prefetch((const char *)(bits + i) + 2048);                                   \
            for (int k = 0; k < 2; k++) {                                                          \
                name##_vec v = (name##_vec)(*(const name##_loose *)(bits + i + k * N)) & (mask);   \
                name##_vec above = (name##_vec)(v > most[k]);                                      \
                most[k] = (v & above) | (most[k] & ~above);                                        \
            }                                                                                      \
        }                                                                                          \
        type largest = 0;                                                                          \
        for (; i < end; i++)                                                                       \
            largest = (type)(bits[i] & (mask)) > largest ? (type)(bits[i] & (mask)) : largest;     \
        for (int k = 0; k < 2; k++)                                                                \
            for (int lane = 0; lane < N; lane++)                                                   \
                largest = most[k][lane] > largest ? most[k][lane] : largest;                       \
        return largest;                                                                            \
    }

ABSMAX_RUN(absmax_16, int16_t, INT16_MAX)
ABSMAX_RUN(absmax_32, int32_t, INT32_MAX)
ABSMAX_RUN(absmax_64, int64_t, INT64_MAX)

typedef struct absmax_args {
    const void *x;
    fsdpc_dtype dtype;
    int64_t most; /* bits of the largest magnitude in the dtype */
} absmax_args;

static void absmax_part(void *arg, size_t begin, size_t end)
{
    absmax_args *a = arg;
    size_t bytes = fsdpc_dtype_bytes(a->dtype);
    int64_t mine = bytes == 2   ? absmax_16(a->x, begin, end)
                   : bytes == 4 ? absmax_32(a->x, begin, end)
                                : absmax_64(a->x, begin, end);
    /* relaxed: only this number is shared, and the team's end orders it before the reader */
    int64_t seen = __atomic_load_n(&a->most, __ATOMIC_RELAXED);
    while (mine > seen && !__atomic_compare_exchange_n(&a->most, &seen, mine, false,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static fsdpc_status flat_absmax(const void *x, fsdpc_dtype dtype, size_t numel, double *max_io,
                                fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("absmax", dtype));
    absmax_args args = {.x = x, .dtype = dtype};
    fsdpc_flat_split(stream, numel, 64, absmax_part, &args);
    uint64_t bits = (uint64_t)args.most;
    uint32_t word = (uint32_t)bits;
    double most;
    if (dtype == FSDPC_F64)
        memcpy(&most, &bits, sizeof most);
    else if (dtype == FSDPC_F32)
        most = (double)fsdpc_f32_from_bits(word);
    else
        most = (double)(dtype == FSDPC_BF16 ? fsdpc_bf16_to_f32((uint16_t)word)
                                            : fsdpc_f16_to_f32((uint16_t)word));
    if (most > *max_io || most != most)
        *max_io = most != most ? (double)NAN : most; /* the same NaN for all */
    return FSDPC_OK;
}

FSDPC_INLINE fsdpc_vf clamp_lanes(fsdpc_vf v, float limit)
{
    fsdpc_vf high = fsdpc_vf_splat(limit), low = fsdpc_vf_splat(-limit);
    v = fsdpc_vf_select((fsdpc_vi)(v > high), high, v);
    return fsdpc_vf_select((fsdpc_vi)(v < low), low, v);
}

FSDPC_INLINE void clamp_run(void *x, size_t begin, size_t end, float limit, fsdpc_dtype dtype)
{
    size_t i = begin;
    FSDPC_EACH_VECTOR(i, n, end,
                      fsdpc_vf_store_as_n(
                          x, i, dtype, clamp_lanes(fsdpc_vf_load_as_n(x, i, dtype, n), limit), n));
}

typedef struct clamp_args {
    void *x;
    fsdpc_dtype dtype;
    double limit; /* rounded to the dtype */
} clamp_args;

static void clamp_part(void *arg, size_t begin, size_t end)
{
    const clamp_args *a = arg;
    double *wide = a->x;
    switch (a->dtype) {
    case FSDPC_F32:
        clamp_run(a->x, begin, end, (float)a->limit, FSDPC_F32);
        break;
    case FSDPC_BF16:
        clamp_run(a->x, begin, end, (float)a->limit, FSDPC_BF16);
        break;
    case FSDPC_F16:
        clamp_run(a->x, begin, end, (float)a->limit, FSDPC_F16);
        break;
    default:
        for (size_t i = begin; i < end; i++)
            wide[i] = wide[i] > a->limit ? a->limit : wide[i] < -a->limit ? -a->limit : wide[i];
    }
}

static fsdpc_status flat_clamp(void *x, fsdpc_dtype dtype, size_t numel, double limit,
                               fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_clamp(dtype, limit));
    uint64_t rounded; /* as an element, so that clamped elements equal it */
    fsdpc_f64_store_as(&rounded, 0, dtype, limit);
    clamp_args args = {.x = x, .dtype = dtype, .limit = fsdpc_f64_load_as(&rounded, 0, dtype)};
    fsdpc_flat_split(stream, numel, 64, clamp_part, &args);
    return FSDPC_OK;
}
