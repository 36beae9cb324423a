/* Pooling: the maximum or mean of each window of an image (see nn_internal.h for how bodies are
 * compiled).
 *
 * Forward processes one row of windows at a time. Windows whose columns are all inside the image
 * are computed a vector at a time; the few at the borders are computed one by one. Both methods
 * visit a window's elements row by row, so their results have the same bits.
 *
 * Backward finds the maximum again instead of storing indices. It computes dx one image tile at a
 * time, from all windows that overlap the tile; the fp32 sums stay in cache and are rounded once.
 */

/* Loads n elements `step` apart; other lanes are zero or unspecified. */
FSDPC_INLINE fsdpc_vf pool_load(const void *x, size_t at, size_t step, size_t n, fsdpc_dtype dtype)
{
    if (step == 1)
        return fsdpc_vf_load_as_n(x, at, dtype, n);
    if (step == 2 && FSDPC_WHOLE(n)) { /* the very last element is not in this vector */
        fsdpc_vf a = fsdpc_vf_load_as(x, at, dtype);
        fsdpc_vf b = fsdpc_vf_load_as_n(x, at + FSDPC_LANES, dtype, FSDPC_LANES - 1);
#if defined(FSDPC_VEC_AVX512)
        return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                       30);
#elif defined(FSDPC_VEC_AVX2)
        return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
        return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
    }
    float lanes[FSDPC_LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i] = fsdpc_f32_load_as(x, at + i * step, dtype);
    return fsdpc_vf_load(lanes);
}

/* Computes windows starting at `place`, whose first elements are at `at` in the window's first
 * row. */
FSDPC_INLINE void pool_step(const fsdpc_pool_args *args, size_t rows, size_t at, size_t place,
                            size_t n, fsdpc_dtype dtype)
{
    fsdpc_vf all = fsdpc_vf_splat(args->max ? -INFINITY : 0.0f);
    for (size_t i = 0; i < rows; i++, at += args->image[1])
        for (size_t j = 0; j < args->kernel[1]; j++) {
            fsdpc_vf x = pool_load(args->x, at + j, args->stride[1], n, dtype);
            all = args->max ? fsdpc_vf_select((x > all) | (x != x), x, all) : all + x;
        }
    if (!args->max)
        all = all / (float)(args->kernel[0] * args->kernel[1]);
    fsdpc_vf_store_as_n(args->y, place, dtype, all, n);
}

FSDPC_INLINE void pool_one(const fsdpc_pool_args *args, const nn_span *rows, size_t plane,
                           size_t place, size_t x, fsdpc_dtype dtype)
{
    nn_span cols = nn_pool_span(args, 1, x);
    float all = args->max ? -INFINITY : 0.0f;
    for (size_t i = rows->first; i < rows->end; i++)
        for (size_t j = cols.first; j < cols.end; j++) {
            float value = fsdpc_f32_load_as(args->x, plane + i * args->image[1] + j, dtype);
            if (!args->max)
                all += value;
            else if (value > all || value != value)
                all = value;
        }
    if (!args->max)
        all /= (float)(args->kernel[0] * args->kernel[1]);
    fsdpc_f32_store_as(args->y, place + x, dtype, all);
}

/* Computes rows [first, last) of windows, counted over all planes. */
FSDPC_INLINE void pool_range(const fsdpc_pool_args *args, size_t first, size_t last,
                             fsdpc_dtype dtype)
{
    size_t pad = args->padding[1], step = args->stride[1], width = args->image[1];
    size_t inside = fsdpc_min_size(fsdpc_ceil_div(pad, step), args->places[1]);
    size_t end = width + pad < args->kernel[1] ? 0 : (width + pad - args->kernel[1]) / step + 1;
    end = fsdpc_max_size(fsdpc_min_size(end, args->places[1]), inside);
    for (size_t row = first; row < last; row++) {
        size_t plane = row / args->places[0] * args->image[0] * width;
        size_t place = row * args->places[1], x = inside;
        nn_span rows = nn_pool_span(args, 0, row % args->places[0]);
        size_t begin = plane + rows.first * width - pad;
        FSDPC_EACH_VECTOR(
            x, n, end,
            pool_step(args, rows.end - rows.first, begin + x * step, place + x, n, dtype));
        for (x = 0; x < inside; x++)
            pool_one(args, &rows, plane, place, x, dtype);
        for (x = end; x < args->places[1]; x++)
            pool_one(args, &rows, plane, place, x, dtype);
    }
}

NN_FLOAT_KERNELS(pool_range, fsdpc_pool_args, fsdpc_nn_pool_f64)

static fsdpc_status pool(const fsdpc_pool_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "pooling"));
    nn_for(stream, args->planes * args->places[0], nn_row_grain(args->places[1]),
           pool_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

/* -- backward ---------------------------------------------------------------------------------- */

enum { POOL_TILE = 4096 };

/* A tile of rows x cols elements of dx, and their sums, followed by space for one more vector. */
typedef struct pool_tile {
    nn_span rows, cols;
    float sums[POOL_TILE + FSDPC_LANES];
} pool_tile;

FSDPC_INLINE float *pool_sum(pool_tile *tile, size_t i, size_t j)
{
    size_t width = tile->cols.end - tile->cols.first;
    return tile->sums + (i - tile->rows.first) * width + j - tile->cols.first;
}

/* to[i * step] += dy[i] */
FSDPC_INLINE void pool_add(float *to, size_t step, fsdpc_vf dy, size_t n)
{
    if (step == 1) {
        fsdpc_vf_store_n(to, fsdpc_vf_load_n(to, n) + dy, n);
    } else if (step == 2 && FSDPC_WHOLE(n)) {
        fsdpc_vf none = {0}, low = __builtin_shufflevector(dy, none, ZIP_LOW);
        fsdpc_vf high = __builtin_shufflevector(dy, none, ZIP_HIGH);
        fsdpc_vf_store(to, fsdpc_vf_load(to) + low);
        fsdpc_vf_store(to + FSDPC_LANES, fsdpc_vf_load(to + FSDPC_LANES) + high);
    } else {
        float lanes[FSDPC_LANES];
        fsdpc_vf_store(lanes, dy);
        for (size_t i = 0; i < n; i++)
            to[i * step] += lanes[i];
    }
}

/* Finds the maximum element of each of n windows, whose first elements are at `at`. */
FSDPC_INLINE fsdpc_vi pool_greatest(const fsdpc_pool_args *args, size_t at, size_t rows, size_t n,
                                    fsdpc_dtype dtype)
{
    fsdpc_vf all = fsdpc_vf_splat(-INFINITY);
    fsdpc_vi best = {0};
    int32_t element = 0;
    for (size_t i = 0; i < rows; i++, at += args->image[1])
        for (size_t j = 0; j < args->kernel[1]; j++, element++) {
            fsdpc_vf x = pool_load(args->x, at + j, args->stride[1], n, dtype);
            fsdpc_vi takes = (x > all) | (x != x);
            all = fsdpc_vf_select(takes, x, all);
            best = (takes & element) | (~takes & best);
        }
    return best;
}

/* Adds the gradients of n neighbouring windows whose columns are all in the tile. */
FSDPC_INLINE void pool_spread(const fsdpc_pool_args *args, pool_tile *tile, size_t plane,
                              const nn_span *rows, size_t col, size_t place, size_t n,
                              fsdpc_dtype dtype)
{
    fsdpc_vf dy = fsdpc_vf_load_as_n(args->dy, place, dtype, n);
    nn_span inside = nn_span_meet(rows, &tile->rows);
    fsdpc_vi best = {0};
    if (args->max)
        best = pool_greatest(args, plane + rows->first * args->image[1] + col,
                             rows->end - rows->first, n, dtype);
    else
        dy = dy / (float)(args->kernel[0] * args->kernel[1]);
    for (size_t i = inside.first; i < inside.end; i++)
        for (size_t j = 0; j < args->kernel[1]; j++) {
            int32_t element = (int32_t)((i - rows->first) * args->kernel[1] + j);
            fsdpc_vf part = args->max ? fsdpc_vf_select(best == element, dy, (fsdpc_vf){0}) : dy;
            pool_add(pool_sum(tile, i, col + j), args->stride[1], part, n);
        }
}

/* Adds the part of one window's gradient that falls into the tile. */
FSDPC_INLINE void pool_spread_one(const fsdpc_pool_args *args, pool_tile *tile, size_t plane,
                                  const nn_span *rows, size_t x, float dy, fsdpc_dtype dtype)
{
    nn_span cols = nn_pool_span(args, 1, x);
    nn_span here_rows = nn_span_meet(rows, &tile->rows), here = nn_span_meet(&cols, &tile->cols);
    if (args->max) { /* the window shrinks to its maximum */
        nn_span best_row = {0, 0}, best_col = {0, 0};
        float all = -INFINITY;
        for (size_t i = rows->first; i < rows->end; i++)
            for (size_t j = cols.first; j < cols.end; j++) {
                float value = fsdpc_f32_load_as(args->x, plane + i * args->image[1] + j, dtype);
                if (value > all || value != value || !best_row.end) {
                    all = value;
                    best_row = (nn_span){i, i + 1};
                    best_col = (nn_span){j, j + 1};
                }
            }
        here_rows = nn_span_meet(&best_row, &here_rows);
        here = nn_span_meet(&best_col, &here);
    } else {
        dy /= (float)(args->kernel[0] * args->kernel[1]);
    }
    for (size_t i = here_rows.first; i < here_rows.end; i++)
        for (size_t j = here.first; j < here.end; j++)
            *pool_sum(tile, i, j) += dy;
}

FSDPC_INLINE void pool_fill(const fsdpc_pool_args *args, pool_tile *tile, size_t plane,
                            fsdpc_dtype dtype)
{
    size_t width = tile->cols.end - tile->cols.first, height = tile->rows.end - tile->rows.first;
    size_t pad = args->padding[1], step = args->stride[1];
    nn_span over_y = nn_pool_places(args, 0, &tile->rows);
    nn_span over_x = nn_pool_places(args, 1, &tile->cols), inside = over_x;
    size_t from = plane * args->image[0] * args->image[1];
    memset(tile->sums, 0, height * width * sizeof *tile->sums);
    while (inside.first < over_x.end && inside.first * step < tile->cols.first + pad)
        inside.first++;
    while (inside.end > inside.first &&
           (inside.end - 1) * step + args->kernel[1] > tile->cols.end + pad)
        inside.end--;
    for (size_t y = over_y.first; y < over_y.end; y++) {
        nn_span rows = nn_pool_span(args, 0, y);
        size_t place = (plane * args->places[0] + y) * args->places[1], x = inside.first;
        FSDPC_EACH_VECTOR(
            x, n, inside.end,
            pool_spread(args, tile, from, &rows, x * step - pad, place + x, n, dtype));
        for (x = over_x.first; x < over_x.end; x++) {
            if (x == inside.first && inside.end > x)
                x = inside.end;
            if (x < over_x.end)
                pool_spread_one(args, tile, from, &rows, x,
                                fsdpc_f32_load_as(args->dy, place + x, dtype), dtype);
        }
    }
    for (size_t i = 0; i < height; i++) {
        size_t to = from + (tile->rows.first + i) * args->image[1] + tile->cols.first, c = 0;
        const float *sums = tile->sums + i * width;
        FSDPC_EACH_VECTOR(
            c, n, width,
            fsdpc_vf_store_as_n(args->dx, to + c, dtype, fsdpc_vf_load_n(sums + c, n), n));
    }
}

static size_t pool_tile_cols(const fsdpc_pool_args *args)
{
    return fsdpc_min_size(args->image[1], POOL_TILE);
}

static size_t pool_tile_rows(const fsdpc_pool_args *args)
{
    return fsdpc_min_size(args->image[0], POOL_TILE / pool_tile_cols(args));
}

/* Computes tiles [first, last), counted over all planes. */
FSDPC_INLINE void pool_backward_range(const fsdpc_pool_args *args, size_t first, size_t last,
                                      fsdpc_dtype dtype)
{
    size_t rows = pool_tile_rows(args), cols = pool_tile_cols(args);
    size_t down = fsdpc_ceil_div(args->image[0], rows),
           across = fsdpc_ceil_div(args->image[1], cols);
    pool_tile tile;
    for (size_t item = first; item < last; item++) {
        size_t y = item / across % down * rows, x = item % across * cols;
        tile.rows = (nn_span){y, fsdpc_min_size(y + rows, args->image[0])};
        tile.cols = (nn_span){x, fsdpc_min_size(x + cols, args->image[1])};
        pool_fill(args, &tile, item / across / down, dtype);
    }
}

NN_FLOAT_KERNELS(pool_backward_range, fsdpc_pool_args, NULL)

static fsdpc_status pool_backward(const fsdpc_pool_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "pooling"));
    size_t pixels = args->image[0] * args->image[1];
    if (!pixels)
        return FSDPC_OK;
    if (args->dtype == FSDPC_F64) {
        nn_for(stream, args->planes, nn_row_grain(pixels), fsdpc_nn_pool_backward_f64, args);
        return FSDPC_OK;
    }
    size_t rows = pool_tile_rows(args), cols = pool_tile_cols(args);
    size_t tiles = fsdpc_ceil_div(args->image[0], rows) * fsdpc_ceil_div(args->image[1], cols);
    nn_for(stream, args->planes * tiles, nn_row_grain(rows * cols),
           pool_backward_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
