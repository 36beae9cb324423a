/* Row moments, sums of gradients over rows, and row-wise affine maps: the parts of group and batch
 * norm (see nn_internal.h for how bodies are compiled).
 *
 * A row's moments are computed in chunks that stay in the first-level cache. A chunk's mean is
 * computed in fp32, and distances from that mean are squared, so a mean far from 0 loses no
 * precision. The sum of the distances, which is the mean's rounding error, corrects both the mean
 * and the sum of squares. Chunks are combined in double by the formula of Chan, Golub & LeVeque
 * (1979). Each row is computed by one thread, and only its length determines where chunks begin, so
 * the number of threads does not change the result.
 */

enum { MOMENTS_CHUNK = 4096, MOMENTS_SIDES = 4 /* sums side by side */ };

/* Sums of x - shift and its square or, with products, of dy and dy * (x - shift). */
typedef struct moment_sums {
    double first, second;
} moment_sums;

FSDPC_INLINE void moments_step(const fsdpc_row_moments_args *args, size_t at, size_t n, float shift,
                               fsdpc_dtype dtype, bool products, fsdpc_vf *first, fsdpc_vf *second)
{
    fsdpc_vf away = fsdpc_vf_load_as_n(args->x, at, dtype, n) - shift, other = away;
    if (products)
        other = fsdpc_vf_load_as_n(args->dy, at, dtype, n); /* 0 beyond n */
    else if (!FSDPC_WHOLE(n))
        other = away = fsdpc_vf_select(fsdpc_vi_first(n), away, (fsdpc_vf){0});
    *first += other;
    *second = fsdpc_vf_fma(other, away, *second);
}

/* Sums n elements, at most MOMENTS_CHUNK, starting at `at`. */
FSDPC_INLINE moment_sums moments_of(const fsdpc_row_moments_args *args, size_t at, size_t n,
                                    float shift, fsdpc_dtype dtype, bool products)
{
    enum { STRIDE = MOMENTS_SIDES * FSDPC_LANES };
    fsdpc_vf first[MOMENTS_SIDES] = {{0}}, second[MOMENTS_SIDES] = {{0}};
    size_t c = 0;
    for (; c + STRIDE <= n; c += STRIDE)
        for (size_t k = 0; k < MOMENTS_SIDES; k++)
            moments_step(args, at + c + k * FSDPC_LANES, FSDPC_LANES, shift, dtype, products,
                         &first[k], &second[k]);
    FSDPC_EACH_VECTOR(c, count, n,
                      moments_step(args, at + c, count, shift, dtype, products, first, second));
    return (moment_sums){fsdpc_vf_sum((first[0] + first[1]) + (first[2] + first[3])),
                         fsdpc_vf_sum((second[0] + second[1]) + (second[2] + second[3]))};
}

FSDPC_INLINE float moments_mean(const fsdpc_row_moments_args *args, size_t at, size_t n,
                                fsdpc_dtype dtype)
{
    enum { STRIDE = MOMENTS_SIDES * FSDPC_LANES };
    fsdpc_vf sum[MOMENTS_SIDES] = {{0}};
    size_t c = 0;
    for (; c + STRIDE <= n; c += STRIDE)
        for (size_t k = 0; k < MOMENTS_SIDES; k++)
            sum[k] += fsdpc_vf_load_as(args->x, at + c + k * FSDPC_LANES, dtype);
    FSDPC_EACH_VECTOR(c, count, n, sum[0] += fsdpc_vf_load_as_n(args->x, at + c, dtype, count));
    return fsdpc_vf_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n;
}

/* Combines the mean and squared distances of the row's first `seen` elements with those of the next
 * n. */
FSDPC_INLINE void moments_join(const fsdpc_row_moments_args *args, size_t row, size_t seen,
                               size_t n, fsdpc_dtype dtype, moment_sums *total)
{
    size_t at = row * args->cols + seen;
    float near = moments_mean(args, at, n, dtype);
    moment_sums sums = moments_of(args, at, n, near, dtype, false);
    double left = sums.first / (double)n, mean = near + left;
    double gap = mean - total->first, part = (double)n / (double)(seen + n);
    total->first += gap * part;
    total->second += sums.second - left * sums.first + gap * gap * part * (double)seen;
}

FSDPC_INLINE void moments_range(const fsdpc_row_moments_args *args, size_t first, size_t last,
                                fsdpc_dtype dtype)
{
    float *out = args->out;
    const float *shift = args->shift;
    for (size_t row = first; row < last; row++) {
        moment_sums total = {0};
        for (size_t c = 0, n; c < args->cols; c += n) {
            n = fsdpc_min_size(MOMENTS_CHUNK, args->cols - c);
            if (!args->dy) {
                moments_join(args, row, c, n, dtype, &total);
                continue;
            }
            moment_sums sums = moments_of(args, row * args->cols + c, n,
                                          shift ? shift[row % args->values] : 0, dtype, true);
            total.first += sums.first;
            total.second += sums.second;
        }
        out[row] = (float)total.first;
        out[args->rows + row] = (float)total.second;
    }
}

NN_FLOAT_KERNELS(moments_range, fsdpc_row_moments_args, fsdpc_nn_row_moments_f64)

static fsdpc_status row_moments(const fsdpc_row_moments_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "moments"));
    nn_for(stream, args->rows, nn_row_grain(args->cols), moments_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

/* -- affine maps ------------------------------------------------------------------------------- */

typedef struct affine_row {
    const fsdpc_row_affine_args *args;
    size_t at; /* first element */
    float shift, a, b, c;
} affine_row;

FSDPC_INLINE void affine_step(const affine_row *row, size_t c, size_t n, fsdpc_dtype dtype, bool y)
{
    fsdpc_vf x = fsdpc_vf_load_as_n(row->args->x, row->at + c, dtype, n) - row->shift;
    x = fsdpc_vf_fma(x, fsdpc_vf_splat(row->a), fsdpc_vf_splat(row->c));
    if (y)
        x = fsdpc_vf_fma(fsdpc_vf_load_as_n(row->args->y, row->at + c, dtype, n),
                         fsdpc_vf_splat(row->b), x);
    fsdpc_vf_store_as_n(row->args->out, row->at + c, dtype, x, n);
}

FSDPC_INLINE void affine_range(const fsdpc_row_affine_args *args, size_t first, size_t last,
                               fsdpc_dtype dtype)
{
    const float *shift = args->shift, *a = args->a, *b = args->b, *c = args->c;
    for (size_t r = first; r < last; r++) {
        size_t v = r % args->values, i = 0, cols = args->cols;
        affine_row row = {args, r * cols, shift ? shift[v] : 0, a[v], b ? b[v] : 1, c ? c[v] : 0};
        if (args->y) {
            FSDPC_EACH_VECTOR(i, n, cols, affine_step(&row, i, n, dtype, true));
        } else {
            FSDPC_EACH_VECTOR(i, n, cols, affine_step(&row, i, n, dtype, false));
        }
    }
}

NN_FLOAT_KERNELS(affine_range, fsdpc_row_affine_args, fsdpc_nn_row_affine_f64)

static fsdpc_status row_affine(const fsdpc_row_affine_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "an affine map"));
    nn_for(stream, args->rows, nn_row_grain(args->cols), affine_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
