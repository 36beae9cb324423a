/* Passes over a matrix of gradients for Adafactor; factored.h defines them.
 *
 * Included by flat_cpu_body.h. Threads take different elements of every output: passes by column
 * are split into ranges of columns or, in a stack, into matrices, and the others into rows. A range
 * of columns is narrow enough for its sums and units to stay in the first cache.
 */

/* bytes of a range of columns in the first cache, and elements of a part */
enum { FACTORED_CACHED = 1 << 14, FACTORED_PART = 1 << 15 };

FSDPC_INLINE void raise_most(float *most, fsdpc_vf g, size_t n)
{
    fsdpc_vi bits = (fsdpc_vi)g & fsdpc_vi_splat(INT32_MAX);
    fsdpc_vf old = fsdpc_vf_load_n(most, n);
    fsdpc_vf_store_n(most, fsdpc_vf_select(bits > (fsdpc_vi)old, (fsdpc_vf)bits, old), n);
}

/* An fp64 number in [2^52, 2^53) has an integer in its low bits. */
static const double FACTORED_SHIFT = 0x1.8p52;

/* Loads PARTIALS elements, scaled in fp32. */
FSDPC_INLINE void load_scaled(const fsdpc_factored_args *a, size_t i, fsdpc_dtype dtype, float *out)
{
    for (size_t lane = 0; lane < PARTIALS; lane += FSDPC_LANES)
        fsdpc_vf_store(out + lane, fsdpc_vf_load_as(a->grad, i + lane, dtype) * a->scale);
}

FSDPC_INLINE void add_squares(const fsdpc_factored_args *a, size_t i, fsdpc_dtype dtype,
                              const double *units, uint64_t *sums)
{
    float values[PARTIALS];
    const f64_vec shift = (f64_vec){0} + FACTORED_SHIFT;
    load_scaled(a, i, dtype, values);
    for (int k = 0; k < F64_VECTORS; k++) {
        typedef uint64_t loose __attribute__((vector_size(8 * F64_LANES), aligned(8), may_alias));
        f64_vec g = widen(values + k * F64_LANES);
        f64_vec unit = (f64_vec) * (const f64_loose *)(units + k * F64_LANES);
        f64_vec shifted = g * g * unit + shift; /* only the addition rounds */
        *(loose *)(sums + k * F64_LANES) += (loose)shifted - (loose)shift;
    }
}

/* Sixteen partial sums, as for a leaf of a norm. */
FSDPC_INLINE double sum_row(const fsdpc_factored_args *a, size_t first, fsdpc_dtype dtype)
{
    f64_vec partial[F64_VECTORS] = {{0}};
    float values[PARTIALS];
    size_t j = 0;
    for (; j + PARTIALS <= a->cols; j += PARTIALS) {
        load_scaled(a, first + j, dtype, values);
        add_terms(partial, values, 0, FSDPC_F32, TERM_SQUARE, 2);
    }
    if (j < a->cols) {
        memset(values, 0, sizeof values);
        FSDPC_EACH_VECTOR(
            j, n, a->cols,
            fsdpc_vf_store_n(values + j % PARTIALS,
                             fsdpc_vf_load_as_n(a->grad, first + j, dtype, n) * a->scale, n));
        add_terms(partial, values, 0, FSDPC_F32, TERM_SQUARE, 2);
    }
    return fold_partials(partial);
}

FSDPC_INLINE void add_square(float value, double unit, uint64_t *sum)
{
    double g = (double)value, shifted = g * g * unit + FACTORED_SHIFT, shift = FACTORED_SHIFT;
    uint64_t bits, zero;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&zero, &shift, sizeof zero);
    *sum += bits - zero;
}

/* Columns [from, to) of rows [begin, end). */
FSDPC_INLINE void factored_columns(const fsdpc_factored_args *a, size_t begin, size_t end,
                                   size_t from, size_t to, fsdpc_dtype dtype)
{
    for (size_t row = begin; row < end; row++) {
        size_t at = row / a->rows_per_matrix * a->cols, first = row * a->cols, j = from;
        if (a->pass == FSDPC_FACTORED_MOST) {
            FSDPC_EACH_VECTOR(
                j, n, to,
                raise_most(a->most + at + j,
                           fsdpc_vf_load_as_n(a->grad, first + j, dtype, n) * a->scale, n));
            continue;
        }
        for (; j + PARTIALS <= to; j += PARTIALS)
            add_squares(a, first + j, dtype, a->units + at + j, a->sums + at + j);
        for (; j < to; j++)
            add_square((float)fsdpc_f64_load_as(a->grad, first + j, dtype) * a->scale,
                       a->units[at + j], &a->sums[at + j]);
    }
}

FSDPC_INLINE void factored_update(const fsdpc_factored_args *a, size_t row, fsdpc_dtype dtype)
{
    const float *by_col = a->by_col + (a->first_row + row) / a->rows_per_matrix * a->cols;
    const fsdpc_vf most = fsdpc_vf_splat(a->most_factor), by_row = fsdpc_vf_splat(a->by_row[row]);
    size_t first = row * a->cols, j = 0;
    FSDPC_EACH_VECTOR(j, n, a->cols, {
        fsdpc_vf factor = by_row * fsdpc_vf_load_n(by_col + j, n);
        factor = fsdpc_vf_select((fsdpc_vi)(factor > most), most, factor);
        fsdpc_vf g = fsdpc_vf_load_as_n(a->grad, first + j, dtype, n) * a->scale;
        fsdpc_vf_store_n(a->out + first + j, g * factor, n);
    });
}

FSDPC_INLINE void factored_rows(const fsdpc_factored_args *a, size_t begin, size_t end,
                                fsdpc_dtype dtype)
{
    for (size_t row = begin; row < end; row++) {
        if (a->pass == FSDPC_FACTORED_UPDATE)
            factored_update(a, row, dtype);
        else
            a->row_sums[row] = sum_row(a, row * a->cols, dtype);
    }
}

/* A part is all columns of `rows` rows, or `cols` columns of all rows. */
typedef struct factored_split {
    const fsdpc_factored_args *args;
    size_t rows, cols;
} factored_split;

static void factored_part(void *arg, size_t part)
{
    const factored_split *s = arg;
    const fsdpc_factored_args *a = s->args;
    bool by_column = a->pass == FSDPC_FACTORED_MOST || a->pass == FSDPC_FACTORED_SUMS;
    size_t begin = s->rows ? part * s->rows : 0, from = s->rows ? 0 : part * s->cols;
    size_t end = s->rows ? fsdpc_min_size(begin + s->rows, a->rows) : a->rows;
    size_t to = s->rows ? a->cols : fsdpc_min_size(from + s->cols, a->cols);
    switch (a->grad_dtype) {
#define FACTORED(dtype)                                                                            \
    case dtype:                                                                                    \
        if (by_column)                                                                             \
            factored_columns(a, begin, end, from, to, dtype);                                      \
        else                                                                                       \
            factored_rows(a, begin, end, dtype);                                                   \
        break;
        FACTORED(FSDPC_BF16)
        FACTORED(FSDPC_F16)
#undef FACTORED
    default:
        if (by_column)
            factored_columns(a, begin, end, from, to, FSDPC_F32);
        else
            factored_rows(a, begin, end, FSDPC_F32);
    }
}

static fsdpc_status flat_factored(const fsdpc_factored_args *a, fsdpc_stream *stream)
{
    bool by_column = a->pass == FSDPC_FACTORED_MOST || a->pass == FSDPC_FACTORED_SUMS;
    factored_split s = {.args = a};
    size_t unit = by_column ? a->rows_per_matrix : 1, numel = a->rows * a->cols;
    if (numel == 0)
        return FSDPC_OK;
    size_t bytes =
        a->pass == FSDPC_FACTORED_MOST ? sizeof *a->most : sizeof *a->units + sizeof *a->sums;
    if (by_column && a->rows <= unit)
        s.cols = numel < FACTORED_PART ? a->cols : FACTORED_CACHED / bytes;
    else
        s.rows = unit * fsdpc_max_size(1, FACTORED_PART / (unit * a->cols));
    size_t parts = s.rows ? fsdpc_ceil_div(a->rows, s.rows) : fsdpc_ceil_div(a->cols, s.cols);
    fsdpc_team_run(parts > 1 ? stream->device->team : NULL, parts, factored_part, &s);
    return FSDPC_OK;
}
