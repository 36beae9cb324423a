/* Comparisons and masks of any dtype, and arithmetic of integers and doubles (see nn_internal.h for
 * how bodies are compiled).
 *
 * Each combination of kind and type is one dense loop, which the compiler vectorises. Operands that
 * are not dense along the innermost dimension (repeated or strided) are first copied into a block.
 * In comparisons, 16-bit floats are also copied, as fp32, and bool is copied as 0 or 1.
 */

typedef struct binary_row {
    const void *a, *b;
    void *out;
    size_t at_a, at_b, at_out; /* first elements */
    size_t step_a, step_b;
    size_t numel;
} binary_row;

/* Returns the elements from output element `at` up to `last` or the end of its row. */
static binary_row binary_row_at(const nn_binary_plan *plan, size_t at, size_t last)
{
    const nn_box *box = &plan->box;
    size_t inner = box->shape[box->ndim - 1], col = at % inner, offset[NN_OPERANDS];
    size_t step_a = box->stride[0][box->ndim - 1], step_b = box->stride[1][box->ndim - 1];
    nn_box_offsets(box, 1, at / inner, offset);
    return (binary_row){plan->args->a,
                        plan->args->b,
                        plan->args->out,
                        offset[0] + col * step_a,
                        offset[1] + col * step_b,
                        at,
                        step_a,
                        step_b,
                        fsdpc_min_size(inner - col, last - at)};
}

enum { PLAIN_BLOCK = 1024 };

typedef union plain_block {
    float f32[PLAIN_BLOCK];
    uint8_t u8[PLAIN_BLOCK];
    uint16_t u16[PLAIN_BLOCK];
    uint32_t u32[PLAIN_BLOCK];
    uint64_t u64[PLAIN_BLOCK];
} plain_block;

#define PLAIN_EACH(result)                                                                         \
    for (size_t i = 0; i < n; i++)                                                                 \
        out[i] = (result);                                                                         \
    break

#define PLAIN_COMPARE(name, type)                                                                  \
    static void name(fsdpc_binary kind, const void *va, const void *vb, uint8_t *restrict out,     \
                     size_t n)                                                                     \
    {                                                                                              \
        const type *restrict a = va, *restrict b = vb;                                             \
        switch (kind) {                                                                            \
        case FSDPC_BINARY_EQ:                                                                      \
            PLAIN_EACH(a[i] == b[i]);                                                              \
        case FSDPC_BINARY_NE:                                                                      \
            PLAIN_EACH(a[i] != b[i]);                                                              \
        case FSDPC_BINARY_LT:                                                                      \
            PLAIN_EACH(a[i] < b[i]);                                                               \
        case FSDPC_BINARY_LE:                                                                      \
            PLAIN_EACH(a[i] <= b[i]);                                                              \
        case FSDPC_BINARY_GT:                                                                      \
            PLAIN_EACH(a[i] > b[i]);                                                               \
        default:                                                                                   \
            PLAIN_EACH(a[i] >= b[i]);                                                              \
        }                                                                                          \
    }
PLAIN_COMPARE(compare_f32, float)
PLAIN_COMPARE(compare_f64, double)
PLAIN_COMPARE(compare_i32, int32_t)
PLAIN_COMPARE(compare_i64, int64_t)
PLAIN_COMPARE(compare_u8, uint8_t)

#define PLAIN_INTEGERS(name, type, unsigned_type) /* they wrap */                                  \
    static void name(fsdpc_binary kind, const void *va, const void *vb, type *restrict out,        \
                     size_t n)                                                                     \
    {                                                                                              \
        const type *restrict a = va, *restrict b = vb;                                             \
        switch (kind) {                                                                            \
        case FSDPC_BINARY_ADD:                                                                     \
            PLAIN_EACH((type)((unsigned_type)a[i] + (unsigned_type)b[i]));                         \
        case FSDPC_BINARY_SUB:                                                                     \
            PLAIN_EACH((type)((unsigned_type)a[i] - (unsigned_type)b[i]));                         \
        case FSDPC_BINARY_MAXIMUM:                                                                 \
            PLAIN_EACH(a[i] > b[i] ? a[i] : b[i]);                                                 \
        case FSDPC_BINARY_MINIMUM:                                                                 \
            PLAIN_EACH(a[i] < b[i] ? a[i] : b[i]);                                                 \
        default:                                                                                   \
            PLAIN_EACH((type)((unsigned_type)a[i] * (unsigned_type)b[i]));                         \
        }                                                                                          \
    }
PLAIN_INTEGERS(integers_32, int32_t, uint32_t)
PLAIN_INTEGERS(integers_64, int64_t, uint64_t)

static void doubles(fsdpc_binary kind, const void *va, const void *vb, double *restrict out,
                    size_t n)
{
    const double *restrict a = va, *restrict b = vb;
    switch (kind) {
    case FSDPC_BINARY_ADD:
        PLAIN_EACH(a[i] + b[i]);
    case FSDPC_BINARY_SUB:
        PLAIN_EACH(a[i] - b[i]);
    case FSDPC_BINARY_MUL:
        PLAIN_EACH(a[i] * b[i]);
    case FSDPC_BINARY_DIV:
        PLAIN_EACH(a[i] / b[i]);
    case FSDPC_BINARY_MAXIMUM:
        PLAIN_EACH(a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]);
    default:
        PLAIN_EACH(a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]);
    }
}

/* x if keep is true, otherwise `other`, which is a zero of x's dtype */
#define PLAIN_MASK(name, type)                                                                     \
    static void name(const void *x, const void *vkeep, type *restrict out, type other, size_t n)   \
    {                                                                                              \
        const type *restrict a = x;                                                                \
        const uint8_t *restrict keep = vkeep;                                                      \
        for (size_t i = 0; i < n; i++)                                                             \
            out[i] = keep[i] ? a[i] : other;                                                       \
    }
PLAIN_MASK(mask_2, uint16_t)
PLAIN_MASK(mask_4, uint32_t)
PLAIN_MASK(mask_8, uint64_t)

#define PLAIN_STEPS(member, type)                                                                  \
    for (size_t i = 0; i < n; i++)                                                                 \
        block->member[i] = ((const type *)base)[at + i * step];                                    \
    break

/* Returns n dense elements starting at `at`, either in place or copied to the block. */
FSDPC_INLINE const void *plain_operand(plain_block *block, const void *base, size_t at, size_t step,
                                       size_t n, fsdpc_dtype dtype, bool compares)
{
    size_t bytes = fsdpc_dtype_bytes(dtype);
    if (dtype == FSDPC_BOOL) {
        for (size_t i = 0; i < n; i++)
            block->u8[i] = ((const uint8_t *)base)[at + i * step] != 0;
        return block;
    }
    if (compares && bytes == 2) {
        if (step == 1)
            widen(block->f32, base, at, n, dtype);
        else
            for (size_t i = 0; i < n; i++)
                block->f32[i] = fsdpc_f32_load_as(base, at + i * step, dtype);
        return block;
    }
    if (step == 1)
        return (const char *)base + at * bytes;
    switch (bytes) {
    case 1:
        PLAIN_STEPS(u8, uint8_t);
    case 2:
        PLAIN_STEPS(u16, uint16_t);
    case 4:
        PLAIN_STEPS(u32, uint32_t);
    default:
        PLAIN_STEPS(u64, uint64_t);
    }
    return block;
}

static void plain_compute(const fsdpc_binary_args *args, const void *a, const void *b, size_t at,
                          size_t n)
{
    fsdpc_dtype dtype = args->dtype;
    bool is_float = dtype <= FSDPC_F64, keeps = args->kind == FSDPC_BINARY_KEEP;
    uint8_t *flags = (uint8_t *)args->out + at;
    if (args->kind == FSDPC_BINARY_MASK || keeps) {
        size_t bytes = fsdpc_dtype_bytes(dtype);
        void *out = (char *)args->out + at * bytes;
        if (bytes == 2)
            mask_2(a, b, out, keeps ? 0 : 0x8000, n);
        else if (bytes == 4)
            mask_4(a, b, out, is_float && !keeps ? 0x80000000u : 0, n);
        else
            mask_8(a, b, out, is_float && !keeps ? (uint64_t)1 << 63 : 0, n);
    } else if (!fsdpc_binary_compares(args->kind)) {
        if (dtype == FSDPC_I32)
            integers_32(args->kind, a, b, (int32_t *)args->out + at, n);
        else if (dtype == FSDPC_F64)
            doubles(args->kind, a, b, (double *)args->out + at, n);
        else
            integers_64(args->kind, a, b, (int64_t *)args->out + at, n);
    } else if (dtype == FSDPC_F64) {
        compare_f64(args->kind, a, b, flags, n);
    } else if (is_float) {
        compare_f32(args->kind, a, b, flags, n);
    } else if (dtype == FSDPC_I32) {
        compare_i32(args->kind, a, b, flags, n);
    } else if (dtype == FSDPC_I64) {
        compare_i64(args->kind, a, b, flags, n);
    } else {
        compare_u8(args->kind, a, b, flags, n);
    }
}

static void plain_range(const void *arg, size_t first, size_t last)
{
    const nn_binary_plan *plan = arg;
    fsdpc_dtype dtype = plan->args->dtype;
    bool masks = fsdpc_binary_masks(plan->args->kind);
    bool compares = fsdpc_binary_compares(plan->args->kind);
    plain_block block_a, block_b;
    for (size_t at = first; at < last;) {
        binary_row row = binary_row_at(plan, at, last);
        const void *a = NULL, *b = NULL;
        for (size_t i = 0, n; i < row.numel; i += n) { /* a repeated operand stays in its block */
            n = fsdpc_min_size(PLAIN_BLOCK, row.numel - i);
            if (i == 0 || row.step_a)
                a = plain_operand(&block_a, row.a, row.at_a + i * row.step_a, row.step_a, n, dtype,
                                  compares);
            if (i == 0 || row.step_b)
                b = plain_operand(&block_b, row.b, row.at_b + i * row.step_b, row.step_b, n,
                                  masks ? FSDPC_BOOL : dtype, compares);
            plain_compute(plan->args, a, b, at + i, n);
        }
        at += row.numel;
    }
}
