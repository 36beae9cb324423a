/* Elementwise kernels on one or two buffers: cast, accumulate, scale, equal.
 *
 * Included by flat_cpu_body.h. The *_run functions receive dtypes as constants, so each is one
 * tight loop. The *_range functions select one of them; the functions in the table check arguments
 * and run the team's threads.
 */

/* -- cast -------------------------------------------------------------------------------------- */

FSDPC_INLINE void cast_run(void *dst, fsdpc_dtype dst_dtype, const void *src, fsdpc_dtype src_dtype,
                           size_t numel, bool stream)
{
    size_t i = 0;
    for (; i + 2 * FSDPC_LANES <= numel; i += 2 * FSDPC_LANES) {
        prefetch_ahead(src, i, src_dtype, 2 * FSDPC_LANES);
        fsdpc_vf low = fsdpc_vf_load_as(src, i, src_dtype);
        fsdpc_vf high = fsdpc_vf_load_as(src, i + FSDPC_LANES, src_dtype);
        store_pair(dst, i, dst_dtype, low, high, stream);
    }
    if (stream)
        stream_end();
    for (size_t left; i < numel; i += left) {
        left = fsdpc_min_size(FSDPC_LANES, numel - i);
        fsdpc_vf_store_as_n(dst, i, dst_dtype, fsdpc_vf_load_as_n(src, i, src_dtype, left), left);
    }
}

/* Copies bytes as fp32, because streaming stores exist for fp32. */
static void copy_range(void *dst, const void *src, size_t bytes, bool stream)
{
    size_t moved = stream ? bytes / 4 * 4 : 0;
    if (stream)
        cast_run(dst, FSDPC_F32, src, FSDPC_F32, moved / 4, true);
    if (moved < bytes)
        memcpy((char *)dst + moved, (const char *)src + moved, bytes - moved);
}

FSDPC_INLINE void cast_run_f64(void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel)
{
    for (size_t i = 0; i < numel; i++)
        fsdpc_f64_store_as(dst, i, dst_dtype, fsdpc_f64_load_as(src, i, src_dtype));
}

static void cast_range(void *dst, fsdpc_dtype dst_dtype, const void *src, fsdpc_dtype src_dtype,
                       size_t numel, bool stream)
{
    if (dst_dtype == src_dtype) {
        if (dst != src)
            copy_range(dst, src, numel * fsdpc_dtype_bytes(dst_dtype), stream);
        return;
    }
    switch (FLAT_PAIR(dst_dtype, src_dtype)) {
#define X(D, S)                                                                                    \
    case FLAT_PAIR(FSDPC_##D, FSDPC_##S):                                                          \
        if (stream)                                                                                \
            cast_run(dst, FSDPC_##D, src, FSDPC_##S, numel, true);                                 \
        else                                                                                       \
            cast_run(dst, FSDPC_##D, src, FSDPC_##S, numel, false);                                \
        break;
        FLAT_F32_PAIRS(X)
#undef X
#define X(D, S)                                                                                    \
    case FLAT_PAIR(FSDPC_##D, FSDPC_##S):                                                          \
        cast_run_f64(dst, FSDPC_##D, src, FSDPC_##S, numel);                                       \
        break;
        FLAT_F64_PAIRS(X)
#undef X
    }
}

typedef struct pair_args {
    void *dst;
    fsdpc_dtype dst_dtype;
    const void *src;
    fsdpc_dtype src_dtype;
    bool stream;  /* cast: can_stream */
    bool differs; /* equal: set by any thread that finds a difference; all then stop */
} pair_args;

static void cast_part(void *arg, size_t begin, size_t end)
{
    const pair_args *a = arg;
    cast_range(fsdpc_flat_at(a->dst, begin, a->dst_dtype), a->dst_dtype,
               fsdpc_flat_at(a->src, begin, a->src_dtype), a->src_dtype, end - begin, a->stream);
}

static fsdpc_status flat_cast(void *dst, fsdpc_dtype dst_dtype, const void *src,
                              fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_pair("cast", dst, dst_dtype, src, src_dtype));
    pair_args args = {dst, dst_dtype, src, src_dtype, can_stream(dst, numel), false};
    fsdpc_flat_split(stream, numel, 64, cast_part, &args);
    return FSDPC_OK;
}

/* -- accumulate -------------------------------------------------------------------------------- */

FSDPC_INLINE void accumulate_run(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                 fsdpc_dtype src_dtype, size_t numel)
{
    size_t i = 0;
    FSDPC_EACH_VECTOR(i, n, numel,
                      fsdpc_vf_store_as_n(dst, i, dst_dtype,
                                          fsdpc_vf_load_as_n(dst, i, dst_dtype, n) +
                                              fsdpc_vf_load_as_n(src, i, src_dtype, n),
                                          n));
}

FSDPC_INLINE void accumulate_run_f64(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                     fsdpc_dtype src_dtype, size_t numel)
{
    for (size_t i = 0; i < numel; i++)
        fsdpc_f64_store_as(dst, i, dst_dtype,
                           fsdpc_f64_load_as(dst, i, dst_dtype) +
                               fsdpc_f64_load_as(src, i, src_dtype));
}

static void accumulate_part(void *arg, size_t begin, size_t end)
{
    const pair_args *a = arg;
    void *dst = fsdpc_flat_at(a->dst, begin, a->dst_dtype);
    const void *src = fsdpc_flat_at(a->src, begin, a->src_dtype);
    size_t numel = end - begin;
    switch (FLAT_PAIR(a->dst_dtype, a->src_dtype)) {
#define X(D, S)                                                                                    \
    case FLAT_PAIR(FSDPC_##D, FSDPC_##S):                                                          \
        accumulate_run(dst, FSDPC_##D, src, FSDPC_##S, numel);                                     \
        break;
        FLAT_F32_PAIRS(X)
#undef X
#define X(D, S)                                                                                    \
    case FLAT_PAIR(FSDPC_##D, FSDPC_##S):                                                          \
        accumulate_run_f64(dst, FSDPC_##D, src, FSDPC_##S, numel);                                 \
        break;
        FLAT_F64_PAIRS(X)
#undef X
    }
}

static fsdpc_status flat_accumulate(void *dst, fsdpc_dtype dst_dtype, const void *src,
                                    fsdpc_dtype src_dtype, size_t numel, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_pair("accumulate", dst, dst_dtype, src, src_dtype));
    pair_args args = {dst, dst_dtype, src, src_dtype, false, false};
    fsdpc_flat_split(stream, numel, 64, accumulate_part, &args);
    return FSDPC_OK;
}

/* -- scale ------------------------------------------------------------------------------------- */

typedef struct scale_args {
    void *x;
    fsdpc_dtype dtype;
    double scale;
    int nonfinite; /* written by any thread, read after all have finished */
} scale_args;

/* Returns -1 in lanes that hold a NaN or an infinity. */
FSDPC_INLINE fsdpc_vi nonfinite_lanes(fsdpc_vf x)
{
    return ((fsdpc_vi)x & 0x7f800000) == fsdpc_vi_splat(0x7f800000);
}

FSDPC_INLINE bool scale_run(void *x, fsdpc_dtype dtype, float scale, size_t numel)
{
    fsdpc_vf by = fsdpc_vf_splat(scale);
    fsdpc_vi nonfinite = {0};
    size_t i = 0;
    for (; i + FSDPC_LANES <= numel; i += FSDPC_LANES) {
        prefetch_ahead(x, i, dtype, FSDPC_LANES);
        fsdpc_vf value = fsdpc_vf_load_as(x, i, dtype);
        nonfinite |= nonfinite_lanes(value);
        fsdpc_vf_store_as(x, i, dtype, value * by);
    }
    if (i < numel) {
        fsdpc_vf value = fsdpc_vf_load_as_n(x, i, dtype, numel - i);
        nonfinite |= nonfinite_lanes(value);
        fsdpc_vf_store_as_n(x, i, dtype, value * by, numel - i);
    }
    bool any = false;
    for (int lane = 0; lane < FSDPC_LANES; lane++)
        any |= nonfinite[lane] != 0;
    return any;
}

static bool scale_run_f64(double *x, double scale, size_t numel)
{
    bool nonfinite = false;
    for (size_t i = 0; i < numel; i++) {
        nonfinite |= !(fabs(x[i]) <= 0x1.fffffffffffffp1023);
        x[i] *= scale;
    }
    return nonfinite;
}

static void scale_part(void *arg, size_t begin, size_t end)
{
    scale_args *a = arg;
    void *x = fsdpc_flat_at(a->x, begin, a->dtype);
    bool nonfinite = false;
    if (a->dtype == FSDPC_F32)
        nonfinite = scale_run(x, FSDPC_F32, (float)a->scale, end - begin);
    else if (a->dtype == FSDPC_BF16)
        nonfinite = scale_run(x, FSDPC_BF16, (float)a->scale, end - begin);
    else if (a->dtype == FSDPC_F16)
        nonfinite = scale_run(x, FSDPC_F16, (float)a->scale, end - begin);
    else
        nonfinite = scale_run_f64(x, a->scale, end - begin);
    if (nonfinite) /* other parts store the same 1; the team's end orders it before the reader */
        __atomic_store_n(&a->nonfinite, 1, __ATOMIC_RELAXED);
}

static fsdpc_status flat_scale(void *x, fsdpc_dtype dtype, size_t numel, double scale,
                               const double *scale_at, int *nonfinite_io, fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("scale", dtype));
    scale_args args = {x, dtype, scale_at ? scale * *scale_at : scale, 0};
    if (args.scale == 1 && !nonfinite_io) /* the gradients were not clipped */
        return FSDPC_OK;
    fsdpc_flat_split(stream, numel, 64, scale_part, &args);
    if (args.nonfinite && nonfinite_io)
        *nonfinite_io = 1;
    return FSDPC_OK;
}

/* -- equal ------------------------------------------------------------------------------------- */

/* Number of elements to compare before checking whether another thread has found a difference; as
 * fp64, they fit in L1. */
enum { EQUAL_BLOCK = 2048 };

static void equal_part(void *arg, size_t begin, size_t end)
{
    pair_args *a = arg;
    _Alignas(64) double block[EQUAL_BLOCK];
    for (size_t at = begin; at < end; at += EQUAL_BLOCK) {
        /* set by a part that found a difference; it only stops other parts, so it needs no
         * ordering */
        if (__atomic_load_n(&a->differs, __ATOMIC_RELAXED))
            return;
        size_t numel = fsdpc_min_size(EQUAL_BLOCK, end - at);
        const void *src = fsdpc_flat_at(a->src, at, a->src_dtype);
        if (a->src_dtype != a->dst_dtype) {
            cast_range(block, a->dst_dtype, src, a->src_dtype, numel, false);
            src = block;
        }
        if (memcmp(fsdpc_flat_at(a->dst, at, a->dst_dtype), src,
                   numel * fsdpc_dtype_bytes(a->dst_dtype)) != 0) {
            __atomic_store_n(&a->differs, true, __ATOMIC_RELAXED);
            return;
        }
    }
}

static fsdpc_status flat_equal(const void *dst, fsdpc_dtype dst_dtype, const void *src,
                               fsdpc_dtype src_dtype, size_t numel, bool *equal_io,
                               fsdpc_stream *stream)
{
    FSDPC_TRY(fsdpc_flat_check_dtype("equal", dst_dtype));
    FSDPC_TRY(fsdpc_flat_check_dtype("equal", src_dtype));
    pair_args args = {(void *)dst, dst_dtype, src, src_dtype, false, !*equal_io};
    fsdpc_flat_split(stream, numel, 64, equal_part, &args);
    *equal_io = !args.differs;
    return FSDPC_OK;
}
