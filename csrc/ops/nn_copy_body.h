/* Copies over strided boxes: casts, slices, transposes (see nn_internal.h for how bodies are
 * compiled).
 *
 * Dimensions are ordered by the destination's strides and merged if both sides allow it. Then one
 * of these forms is used:
 *
 *     rows     both sides dense along the innermost dimension: memcpy, or a vector cast
 *     fill     one element of the source repeated along it
 *     reverse  the source dense along it, backwards
 *     tiles    the source dense along another dimension (a transpose) and elements of 2 or 4 bytes:
 *              squares of FSDPC_LANES, transposed in registers, 32 source elements wide, so that
 *              whole cache lines are read and written
 *     steps    anything else, element by element (fsdpc_nn_cast_row)
 */

enum { COPY_TILE = 64, TILE_ROW = COPY_TILE + 16 /* not a power of two, which would share sets */ };

/* Replaces memcpy: on some processors, its rep movsb is ten times slower if both sides begin at
 * nearly the same offset in a page. */
FSDPC_INLINE void copy_row(char *dst, const char *src, size_t bytes)
{
    enum { STEP = sizeof(fsdpc_vf), MOST = 1 << 16 };
    size_t i = 0;
    for (; bytes <= MOST && i + 4 * STEP <= bytes; i += 4 * STEP) {
        fsdpc_vf v[4];
        memcpy(v, src + i, sizeof v);
        memcpy(dst + i, v, sizeof v);
    }
    memcpy(dst + i, src + i, bytes - i);
}

static void copy_memcpy_range(const void *arg, size_t first, size_t last)
{
    const nn_copy_plan *plan = arg;
    const fsdpc_copy_args *args = plan->args;
    size_t inner = plan->box.shape[plan->box.ndim - 1], bytes = fsdpc_dtype_bytes(args->dst_dtype);
    for (size_t at = first, numel; at < last; at += numel) {
        size_t offset[NN_OPERANDS], col = at % inner;
        numel = fsdpc_min_size(inner - col, last - at);
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        copy_row((char *)args->dst + (offset[0] + col) * bytes,
                 (const char *)args->src + (offset[1] + col) * bytes, numel * bytes);
    }
}

/* Repeats one element along the innermost dimension, as in a sum's backward. */
static void copy_fill_range(const void *arg, size_t first, size_t last)
{
    const nn_copy_plan *plan = arg;
    const fsdpc_copy_args *args = plan->args;
    size_t inner = plan->box.shape[plan->box.ndim - 1];
    for (size_t at = first, numel; at < last; at += numel) {
        size_t offset[NN_OPERANDS], col = at % inner;
        numel = fsdpc_min_size(inner - col, last - at);
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        switch (fsdpc_dtype_bytes(args->dst_dtype)) {
#define FILL(bytes, type)                                                                          \
    case bytes: {                                                                                  \
        type value = ((const type *)args->src)[offset[1]], *dst = (type *)args->dst;               \
        for (size_t i = 0; i < numel; i++)                                                         \
            dst[offset[0] + col + i] = value;                                                      \
        break;                                                                                     \
    }
            FILL(1, uint8_t)
            FILL(2, uint16_t)
            FILL(4, uint32_t)
            FILL(8, uint64_t)
#undef FILL
        }
    }
}

/* Copies in reverse along the innermost dimension. */
static void copy_reverse_range(const void *arg, size_t first, size_t last)
{
    const nn_copy_plan *plan = arg;
    const fsdpc_copy_args *args = plan->args;
    size_t inner = plan->box.shape[plan->box.ndim - 1];
    for (size_t at = first, numel; at < last; at += numel) {
        size_t offset[NN_OPERANDS], col = at % inner;
        numel = fsdpc_min_size(inner - col, last - at);
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        size_t dst_at = offset[0] + col, src_at = offset[1] - col - (numel - 1);
        switch (fsdpc_dtype_bytes(args->dst_dtype)) {
#define REVERSE(bytes, type)                                                                       \
    case bytes: {                                                                                  \
        const type *restrict src = (const type *)args->src + src_at;                               \
        type *restrict dst = (type *)args->dst + dst_at;                                           \
        for (size_t i = 0; i < numel; i++)                                                         \
            dst[i] = src[numel - 1 - i];                                                           \
        break;                                                                                     \
    }
            REVERSE(1, uint8_t)
            REVERSE(2, uint16_t)
            REVERSE(4, uint32_t)
            REVERSE(8, uint64_t)
#undef REVERSE
        }
    }
}

static void copy_steps_range(const void *arg, size_t first, size_t last)
{
    const nn_copy_plan *plan = arg;
    const fsdpc_copy_args *args = plan->args;
    int d = plan->box.ndim - 1;
    size_t inner = plan->box.shape[d], step[2] = {plan->box.stride[0][d], plan->box.stride[1][d]};
    for (size_t at = first, numel; at < last; at += numel) {
        size_t offset[NN_OPERANDS], col = at % inner;
        numel = fsdpc_min_size(inner - col, last - at);
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        fsdpc_nn_cast_row(args->dst, args->dst_dtype, offset[0] + col * step[0], step[0], args->src,
                          args->src_dtype, offset[1] + col * step[1], step[1], numel,
                          args->accumulate);
    }
}

FSDPC_INLINE void copy_cast_step(const fsdpc_copy_args *args, size_t dst, size_t src, size_t n,
                                 fsdpc_dtype dst_dtype, fsdpc_dtype src_dtype)
{
    fsdpc_vf v = fsdpc_vf_load_as_n(args->src, src, src_dtype, n);
    if (args->accumulate)
        v = v + fsdpc_vf_load_as_n(args->dst, dst, dst_dtype, n);
    fsdpc_vf_store_as_n(args->dst, dst, dst_dtype, v, n);
}

FSDPC_INLINE void copy_cast_range(const nn_copy_plan *plan, size_t first, size_t last,
                                  fsdpc_dtype dst_dtype, fsdpc_dtype src_dtype)
{
    size_t inner = plan->box.shape[plan->box.ndim - 1];
    for (size_t at = first, numel; at < last; at += numel) {
        size_t offset[NN_OPERANDS], col = at % inner, i = 0;
        numel = fsdpc_min_size(inner - col, last - at);
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        size_t dst = offset[0] + col, src = offset[1] + col;
        FSDPC_EACH_VECTOR(i, n, numel,
                          copy_cast_step(plan->args, dst + i, src + i, n, dst_dtype, src_dtype));
    }
}

/* Casts from F32, BF16 or F16; the destination dtype is a constant. */
FSDPC_INLINE void copy_cast_to(const nn_copy_plan *plan, size_t first, size_t last,
                               fsdpc_dtype dst_dtype)
{
    if (plan->args->src_dtype == FSDPC_F32)
        copy_cast_range(plan, first, last, dst_dtype, FSDPC_F32);
    else if (plan->args->src_dtype == FSDPC_BF16)
        copy_cast_range(plan, first, last, dst_dtype, FSDPC_BF16);
    else
        copy_cast_range(plan, first, last, dst_dtype, FSDPC_F16);
}

NN_FLOAT_KERNELS(copy_cast_to, nn_copy_plan, NULL)

/* Dense casts from integers and bool, and to bool, in loops that the compiler vectorises. */
#define CAST(from, to, value)                                                                      \
    do {                                                                                           \
        const from *restrict x = src;                                                              \
        to *restrict y = dst;                                                                      \
        for (size_t i = 0; i < n; i++)                                                             \
            y[i] = (to)(value);                                                                    \
        return;                                                                                    \
    } while (0)

static void cast_to_f32(float *dst, const void *src, fsdpc_dtype dtype, size_t n)
{
    if (dtype == FSDPC_BOOL)
        CAST(uint8_t, float, x[i] != 0);
    if (dtype == FSDPC_U8)
        CAST(uint8_t, float, x[i]);
    if (dtype == FSDPC_I32)
        CAST(int32_t, float, x[i]);
    CAST(int64_t, float, x[i]);
}

static void cast_to_i64(int64_t *dst, const void *src, fsdpc_dtype dtype, size_t n)
{
    if (dtype == FSDPC_BOOL)
        CAST(uint8_t, int64_t, x[i] != 0);
    if (dtype == FSDPC_U8)
        CAST(uint8_t, int64_t, x[i]);
    CAST(int32_t, int64_t, x[i]);
}

static void cast_to_bool(uint8_t *dst, const void *src, fsdpc_dtype dtype, size_t n)
{
    if (dtype == FSDPC_F32)
        CAST(float, uint8_t, x[i] != 0);
    CAST(uint16_t, uint8_t, (x[i] & 0x7fff) != 0);
}

static bool copy_casts(fsdpc_dtype dst, fsdpc_dtype src)
{
    if (dst == FSDPC_BOOL)
        return src <= FSDPC_F16;
    return src > FSDPC_F64 && (dst <= FSDPC_F16 || (dst == FSDPC_I64 && src != FSDPC_I64));
}

static void copy_numbers_range(const void *arg, size_t first, size_t last)
{
    const nn_copy_plan *plan = arg;
    fsdpc_dtype to = plan->args->dst_dtype, from = plan->args->src_dtype;
    size_t inner = plan->box.shape[plan->box.ndim - 1], to_bytes = fsdpc_dtype_bytes(to);
    float block[UNARY_BLOCK];
    for (size_t at = first, n; at < last; at += n) {
        size_t offset[NN_OPERANDS], col = at % inner;
        nn_box_offsets(&plan->box, 1, at / inner, offset);
        n = fsdpc_min_size(UNARY_BLOCK, fsdpc_min_size(inner - col, last - at));
        const void *src =
            (const char *)plan->args->src + (offset[1] + col) * fsdpc_dtype_bytes(from);
        void *dst = (char *)plan->args->dst + (offset[0] + col) * to_bytes;
        if (to == FSDPC_BOOL)
            cast_to_bool(dst, src, from, n);
        else if (to == FSDPC_I64)
            cast_to_i64(dst, src, from, n);
        else if (to == FSDPC_F32)
            cast_to_f32(dst, src, from, n);
        else {
            cast_to_f32(block, src, from, n);
            if (to == FSDPC_BF16)
                narrow(dst, 0, block, n, FSDPC_BF16);
            else
                narrow(dst, 0, block, n, FSDPC_F16);
        }
    }
}

/* -- tiles ------------------------------------------------------------------------------------- */

#if defined(FSDPC_VEC_AVX512)
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(FSDPC_VEC_AVX2)
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

/* Interleaving row i with row i + LANES/2 rotates the bits of (row, lane) by one. After one
 * rotation per bit of the lane index, row and lane are swapped. */
#define COPY_TURN(rows, type)                                                                      \
    for (int bit = 1; bit < FSDPC_LANES; bit *= 2) {                                               \
        type turned[FSDPC_LANES];                                                                  \
        for (int i = 0; i < FSDPC_LANES / 2; i++) {                                                \
            type a = (rows)[i], b = (rows)[i + FSDPC_LANES / 2];                                   \
            turned[2 * i] = (type)__builtin_shufflevector(a, b, ZIP_LOW);                          \
            turned[2 * i + 1] = (type)__builtin_shufflevector(a, b, ZIP_HIGH);                     \
        }                                                                                          \
        for (int i = 0; i < FSDPC_LANES; i++)                                                      \
            (rows)[i] = turned[i];                                                                 \
    }

/* dst[r * dst_row + c] = src[c * src_row + r] for a square of FSDPC_LANES */
FSDPC_INLINE void copy_square_4(uint32_t *dst, size_t dst_row, const uint32_t *src, size_t src_row)
{
    fsdpc_vf rows[FSDPC_LANES];
    for (int i = 0; i < FSDPC_LANES; i++)
        rows[i] = fsdpc_vf_load((const float *)(const void *)(src + (size_t)i * src_row));
    COPY_TURN(rows, fsdpc_vf)
    for (int i = 0; i < FSDPC_LANES; i++)
        fsdpc_vf_store((float *)(void *)(dst + (size_t)i * dst_row), rows[i]);
}

FSDPC_INLINE void copy_square_2(uint16_t *dst, size_t dst_row, const uint16_t *src, size_t src_row)
{
    fsdpc_vh rows[FSDPC_LANES];
    for (int i = 0; i < FSDPC_LANES; i++)
        rows[i] = fsdpc_vh_load(src + (size_t)i * src_row);
    COPY_TURN(rows, fsdpc_vh)
    for (int i = 0; i < FSDPC_LANES; i++)
        fsdpc_vh_store(dst + (size_t)i * dst_row, rows[i]);
}

FSDPC_INLINE void copy_square(char *dst, size_t dst_row, const char *src, size_t src_row,
                              size_t n_rows, size_t n_cols, size_t bytes)
{
    if (n_rows == FSDPC_LANES && n_cols == FSDPC_LANES && bytes == 4)
        copy_square_4((uint32_t *)(void *)dst, dst_row, (const uint32_t *)(const void *)src,
                      src_row);
    else if (n_rows == FSDPC_LANES && n_cols == FSDPC_LANES)
        copy_square_2((uint16_t *)(void *)dst, dst_row, (const uint16_t *)(const void *)src,
                      src_row);
    else
        for (size_t r = 0; r < n_rows; r++)
            for (size_t c = 0; c < n_cols; c++)
                memcpy(dst + (r * dst_row + c) * bytes, src + (c * src_row + r) * bytes, bytes);
}

/* Copies the tile's source rows next to each other, because rows far apart would share a few cache
 * sets. */
FSDPC_INLINE void copy_pack(char *tile, const char *src, size_t src_row, size_t n_cols,
                            size_t n_rows, size_t bytes)
{
    if (n_rows == COPY_TILE)
        for (size_t c = 0; c < n_cols; c++)
            memcpy(tile + c * TILE_ROW * bytes, src + c * src_row * bytes, COPY_TILE * bytes);
    else
        for (size_t c = 0; c < n_cols; c++)
            memcpy(tile + c * TILE_ROW * bytes, src + c * src_row * bytes, n_rows * bytes);
}

/* Each item is a strip: COPY_TILE indices of the second-to-last dimension, and all of the last. */
FSDPC_INLINE void copy_tiles_range(const nn_copy_plan *plan, size_t first, size_t last,
                                   size_t bytes)
{
    const fsdpc_copy_args *args = plan->args;
    int d = plan->box.ndim - 2;
    size_t rows = plan->box.shape[d], cols = plan->box.shape[d + 1];
    size_t dst_row = plan->box.stride[0][d], src_row = plan->box.stride[1][d + 1];
    size_t strips = fsdpc_ceil_div(rows, COPY_TILE);
    char tile[COPY_TILE * TILE_ROW * 4] __attribute__((aligned(64)));
    for (size_t item = first; item < last; item++) {
        size_t offset[NN_OPERANDS], begin = item % strips * COPY_TILE;
        size_t end = fsdpc_min_size(begin + COPY_TILE, rows);
        nn_box_offsets(&plan->box, 2, item / strips, offset);
        char *dst = (char *)args->dst + offset[0] * bytes;
        const char *src = (const char *)args->src + offset[1] * bytes;
        for (size_t col = 0; col < cols; col += COPY_TILE) {
            size_t n_cols = fsdpc_min_size(COPY_TILE, cols - col);
            copy_pack(tile, src + (col * src_row + begin) * bytes, src_row, n_cols, end - begin,
                      bytes);
            for (size_t r = 0; r < end - begin; r += FSDPC_LANES)
                for (size_t c = 0; c < n_cols; c += FSDPC_LANES)
                    copy_square(dst + ((begin + r) * dst_row + col + c) * bytes, dst_row,
                                tile + (c * TILE_ROW + r) * bytes, TILE_ROW,
                                fsdpc_min_size(FSDPC_LANES, end - begin - r),
                                fsdpc_min_size(FSDPC_LANES, n_cols - c), bytes);
        }
    }
}

static void copy_tiles_4_range(const void *plan, size_t first, size_t last)
{
    copy_tiles_range(plan, first, last, 4);
}

static void copy_tiles_2_range(const void *plan, size_t first, size_t last)
{
    copy_tiles_range(plan, first, last, 2);
}

static void copy_swap_inner(nn_box *box)
{
    const nn_box old = *box;
    int d = box->ndim - 2;
    for (int k = 0; k < 2; k++) {
        box->shape[d + k] = old.shape[d + 1 - k];
        for (int o = 0; o < NN_OPERANDS; o++)
            box->stride[o][d + k] = old.stride[o][d + 1 - k];
    }
}

static fsdpc_status copy(const fsdpc_copy_args *args, fsdpc_stream *stream)
{
    nn_copy_plan plan = {.args = args};
    size_t numel = fsdpc_nn_copy_plan_init(&plan);
    if (numel == 0)
        return FSDPC_OK;
    int inner = plan.box.ndim - 1;
    size_t bytes = fsdpc_dtype_bytes(args->dst_dtype);
    if (inner > 0 && plan.box.stride[1][inner] == 0 && plan.box.shape[inner] < FSDPC_LANES &&
        plan.box.shape[inner - 1] >= FSDPC_LANES) { /* few repetitions: long rows, in steps */
        copy_swap_inner(&plan.box);
        nn_for(stream, numel, NN_GRAIN, copy_steps_range, &plan);
        return FSDPC_OK;
    }
    bool plain = args->dst_dtype == args->src_dtype && !args->accumulate;
    bool narrow_floats = args->dst_dtype <= FSDPC_F16 && args->src_dtype <= FSDPC_F16;
    bool dense_dst = plan.box.stride[0][inner] == 1;
    if (dense_dst && plan.box.stride[1][inner] == 1 && plain)
        nn_for(stream, numel, NN_GRAIN, copy_memcpy_range, &plan);
    else if (dense_dst && plan.box.stride[1][inner] == 1 && narrow_floats)
        nn_for(stream, numel, NN_GRAIN, copy_cast_to_kernels[args->dst_dtype], &plan);
    else if (dense_dst && plan.box.stride[1][inner] == 0 && plain)
        nn_for(stream, numel, NN_GRAIN, copy_fill_range, &plan);
    else if (dense_dst && plan.box.stride[1][inner] == (size_t)-1 && plain)
        nn_for(stream, numel, NN_GRAIN, copy_reverse_range, &plan);
    else if (dense_dst && plan.box.stride[1][inner] == 1 && !args->accumulate &&
             copy_casts(args->dst_dtype, args->src_dtype))
        nn_for(stream, numel, NN_GRAIN, copy_numbers_range, &plan);
    else if (dense_dst && plain && (bytes == 2 || bytes == 4) && fsdpc_nn_copy_plan_turn(&plan)) {
        size_t strip = COPY_TILE * plan.box.shape[inner];
        size_t strips = fsdpc_ceil_div(plan.box.shape[inner - 1], COPY_TILE);
        size_t items = strips * (numel / (plan.box.shape[inner] * plan.box.shape[inner - 1]));
        nn_for(stream, items, nn_row_grain(strip),
               bytes == 4 ? copy_tiles_4_range : copy_tiles_2_range, &plan);
    } else
        nn_for(stream, numel, NN_GRAIN, copy_steps_range, &plan);
    return FSDPC_OK;
}
