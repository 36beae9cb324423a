/* Unary functions, forward and backward (see nn_internal.h for how bodies are compiled).
 *
 * The formulas are written once, on fp32 vectors, in unary_value and unary_slope, from which a loop
 * per function is generated. 16-bit dtypes are converted in a block of fp32 on the stack, which
 * costs less than three copies of every loop.
 */

enum { UNARY_BLOCK = 512 };

FSDPC_INLINE fsdpc_vf unary_pow(fsdpc_vf x, float s)
{
    return s == 1 ? x : s == 2 ? x * x : fsdpc_vf_pow(x, fsdpc_vf_splat(s));
}

/* 0.5 (1 + tanh(u)) = sigmoid(2 u), which is cheaper and keeps relative accuracy for very negative
 * x. */
FSDPC_INLINE fsdpc_vf gelu_tanh_gate(fsdpc_vf x)
{
    return fsdpc_vf_sigmoid(1.5957691216f * fsdpc_vf_fma(0.044715f * x * x, x, x));
}

FSDPC_INLINE fsdpc_vf unary_value(fsdpc_unary kind, fsdpc_vf x, float s)
{
    switch (kind) {
    case FSDPC_UNARY_NEG:
        return -x;
    case FSDPC_UNARY_ABS:
        return fsdpc_vf_abs(x);
    case FSDPC_UNARY_EXP:
        return fsdpc_vf_exp(x);
    case FSDPC_UNARY_LOG:
        return fsdpc_vf_log(x);
    case FSDPC_UNARY_SQRT:
        return fsdpc_vf_sqrt(x);
    case FSDPC_UNARY_TANH:
        return fsdpc_vf_tanh(x);
    case FSDPC_UNARY_SIGMOID:
        return fsdpc_vf_sigmoid(x);
    case FSDPC_UNARY_GELU_TANH:
        return x * gelu_tanh_gate(x);
    case FSDPC_UNARY_GELU_ERF: {
        fsdpc_vf half = 0.5f * x;
        return fsdpc_vf_fma(half, fsdpc_vf_erf(x * 0.7071067812f), half);
    }
    case FSDPC_UNARY_SILU:
        return x * fsdpc_vf_sigmoid(x);
    case FSDPC_UNARY_RELU:
        return fsdpc_vf_max((fsdpc_vf){0}, x); /* NaN stays */
    case FSDPC_UNARY_RSQRT:
        return 1.0f / fsdpc_vf_sqrt(x);
    case FSDPC_UNARY_SIN:
        return fsdpc_vf_sin(x);
    case FSDPC_UNARY_COS:
        return fsdpc_vf_cos(x);
    case FSDPC_UNARY_LOG1P:
        return fsdpc_vf_log1p(x);
    case FSDPC_UNARY_EXPM1:
        return fsdpc_vf_expm1(x);
    case FSDPC_UNARY_ERF:
        return fsdpc_vf_erf(x);
    case FSDPC_UNARY_SIGN: {
        const fsdpc_vf zero = {0}, one = fsdpc_vf_splat(1.0f);
        return fsdpc_vf_select(x > zero, one, fsdpc_vf_select(x < zero, -one, x * 0.0f));
    }
    case FSDPC_UNARY_SOFTPLUS:
        return fsdpc_vf_max((fsdpc_vf){0}, x) + fsdpc_vf_log1p(fsdpc_vf_exp(-fsdpc_vf_abs(x)));
    case FSDPC_UNARY_CLAMP_MIN: /* NaN stays */
        return fsdpc_vf_max(fsdpc_vf_splat(s), x);
    case FSDPC_UNARY_CLAMP_MAX:
        return fsdpc_vf_min(fsdpc_vf_splat(s), x);
    case FSDPC_UNARY_HUBER: {
        fsdpc_vf a = fsdpc_vf_abs(x);
        return fsdpc_vf_select(a < s, a * a * (0.5f / s), a - 0.5f * s);
    }
    case FSDPC_UNARY_ADD_SCALAR:
        return x + s;
    case FSDPC_UNARY_MUL_SCALAR:
        return x * s;
    case FSDPC_UNARY_RSUB_SCALAR:
        return s - x;
    case FSDPC_UNARY_RDIV_SCALAR:
        return s / x;
    case FSDPC_UNARY_POW_SCALAR:
        return unary_pow(x, s);
    }
    return x;
}

/* dy * f'(x). y = f(x). */
FSDPC_INLINE fsdpc_vf unary_slope(fsdpc_unary kind, fsdpc_vf x, fsdpc_vf y, fsdpc_vf dy, float s)
{
    const fsdpc_vf zero = {0};
    switch (kind) {
    case FSDPC_UNARY_NEG:
    case FSDPC_UNARY_RSUB_SCALAR:
        return -dy;
    case FSDPC_UNARY_ABS:
        return fsdpc_vf_select(x == zero, zero,
                               (fsdpc_vf)((fsdpc_vu)dy ^ ((fsdpc_vu)x & 0x80000000u)));
    case FSDPC_UNARY_EXP:
        return dy * y;
    case FSDPC_UNARY_LOG:
        return dy / x;
    case FSDPC_UNARY_SQRT:
        return 0.5f * dy / y;
    case FSDPC_UNARY_TANH:
        return dy * (1.0f - y * y);
    case FSDPC_UNARY_SIGMOID:
        return dy * y * (1.0f - y);
    case FSDPC_UNARY_GELU_TANH: {
        fsdpc_vf gate = gelu_tanh_gate(x);
        fsdpc_vf inner = 1.5957691216f + (3 * 0.044715f * 1.5957691216f) * x * x; /* (2 u)' */
        return dy * fsdpc_vf_fma(x * gate * (1.0f - gate), inner, gate);
    }
    case FSDPC_UNARY_GELU_ERF: {
        fsdpc_vf below = 0.5f * (1.0f + fsdpc_vf_erf(x * 0.7071067812f));
        return dy * fsdpc_vf_fma(x, 0.3989422804f * fsdpc_vf_exp(-0.5f * x * x), below);
    }
    case FSDPC_UNARY_SILU: {
        fsdpc_vf g = fsdpc_vf_sigmoid(x);
        return dy * g * fsdpc_vf_fma(x, 1.0f - g, fsdpc_vf_splat(1.0f));
    }
    case FSDPC_UNARY_RELU:
        return fsdpc_vf_select(y > zero, dy, zero);
    case FSDPC_UNARY_RSQRT:
        return -0.5f * dy * y * y * y;
    case FSDPC_UNARY_SIN:
        return dy * fsdpc_vf_cos(x);
    case FSDPC_UNARY_COS:
        return -dy * fsdpc_vf_sin(x);
    case FSDPC_UNARY_LOG1P:
        return dy / (1.0f + x);
    case FSDPC_UNARY_EXPM1:
        return dy * (y + 1.0f);
    case FSDPC_UNARY_ERF:
        return dy * (1.1283791671f * fsdpc_vf_exp(-x * x));
    case FSDPC_UNARY_SIGN:
        return zero;
    case FSDPC_UNARY_SOFTPLUS:
        return dy * fsdpc_vf_sigmoid(x);
    case FSDPC_UNARY_CLAMP_MIN:
        return fsdpc_vf_select(x < s, zero, dy);
    case FSDPC_UNARY_CLAMP_MAX:
        return fsdpc_vf_select(x > s, zero, dy);
    case FSDPC_UNARY_HUBER:
        return dy * fsdpc_vf_max(fsdpc_vf_splat(-1.0f),
                                 fsdpc_vf_min(fsdpc_vf_splat(1.0f), x * (1.0f / s)));
    case FSDPC_UNARY_ADD_SCALAR:
        return dy;
    case FSDPC_UNARY_MUL_SCALAR:
        return dy * s;
    case FSDPC_UNARY_RDIV_SCALAR:
        return -dy * s / (x * x);
    case FSDPC_UNARY_POW_SCALAR: /* x^0 is flat, even at x = 0 */
        return s == 0 ? zero : dy * s * unary_pow(x, s - 1.0f);
    }
    return dy;
}

FSDPC_INLINE void unary_loop(fsdpc_unary kind, const float *x, float *out, size_t numel, float s)
{
    size_t i = 0;
    FSDPC_EACH_VECTOR(
        i, n, numel, fsdpc_vf_store_n(out + i, unary_value(kind, fsdpc_vf_load_n(x + i, n), s), n));
}

/* x or y is NULL if the formula does not need it; unused loads cost nothing. */
FSDPC_INLINE void unary_backward_step(fsdpc_unary kind, const float *x, const float *y,
                                      const float *dy, float *out, size_t n, float s)
{
    fsdpc_vf vx = x ? fsdpc_vf_load_n(x, n) : (fsdpc_vf){0};
    fsdpc_vf vy = y ? fsdpc_vf_load_n(y, n) : (fsdpc_vf){0};
    fsdpc_vf_store_n(out, unary_slope(kind, vx, vy, fsdpc_vf_load_n(dy, n), s), n);
}

FSDPC_INLINE void unary_backward_loop(fsdpc_unary kind, const float *x, const float *y,
                                      const float *dy, float *out, size_t numel, float s)
{
    if (!fsdpc_unary_reads_x(kind))
        x = NULL;
    if (!fsdpc_unary_reads_y(kind))
        y = NULL;
    size_t i = 0;
    FSDPC_EACH_VECTOR(
        i, n, numel,
        unary_backward_step(kind, x ? x + i : x, y ? y + i : y, dy + i, out + i, n, s));
}

static void unary_f32(fsdpc_unary kind, const float *x, float *out, size_t numel, float s)
{
    switch (kind) {
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        unary_loop(FSDPC_UNARY_##name, x, out, numel, s);                                          \
        break;
        FSDPC_UNARY_TABLE(X)
#undef X
    }
}

static void unary_backward_f32(fsdpc_unary kind, const float *x, const float *y, const float *dy,
                               float *out, size_t numel, float s)
{
    switch (kind) {
#define X(name, text)                                                                              \
    case FSDPC_UNARY_##name:                                                                       \
        unary_backward_loop(FSDPC_UNARY_##name, x, y, dy, out, numel, s);                          \
        break;
        FSDPC_UNARY_TABLE(X)
#undef X
    }
}

FSDPC_INLINE void widen(float *block, const void *src, size_t at, size_t numel, fsdpc_dtype dtype)
{
    size_t i = 0;
    FSDPC_EACH_VECTOR(i, n, numel,
                      fsdpc_vf_store_n(block + i, fsdpc_vf_load_as_n(src, at + i, dtype, n), n));
}

FSDPC_INLINE void narrow(void *dst, size_t at, const float *block, size_t numel, fsdpc_dtype dtype)
{
    size_t i = 0;
    FSDPC_EACH_VECTOR(i, n, numel,
                      fsdpc_vf_store_as_n(dst, at + i, dtype, fsdpc_vf_load_n(block + i, n), n));
}

FSDPC_INLINE void unary_range(const fsdpc_unary_args *args, size_t first, size_t last,
                              fsdpc_dtype dtype)
{
    float s = (float)args->scalar;
    if (dtype == FSDPC_F32) {
        unary_f32(args->kind, (const float *)args->x + first, (float *)args->out + first,
                  last - first, s);
        return;
    }
    if (args->kind == FSDPC_UNARY_GELU_ERF) { /* common in transformers: worth a separate loop */
        size_t i = first;
        FSDPC_EACH_VECTOR(
            i, n, last,
            fsdpc_vf_store_as_n(
                args->out, i, dtype,
                unary_value(FSDPC_UNARY_GELU_ERF, fsdpc_vf_load_as_n(args->x, i, dtype, n), s), n));
        return;
    }
    if (args->kind == FSDPC_UNARY_NEG || args->kind == FSDPC_UNARY_ABS) { /* only changes signs */
        const uint16_t *x = args->x, flip = args->kind == FSDPC_UNARY_NEG ? 0x8000 : 0;
        uint16_t *out = args->out, keep = flip ? 0xffff : 0x7fff;
        for (size_t i = first; i < last; i++)
            out[i] = (uint16_t)((x[i] ^ flip) & keep);
        return;
    }
    float block[UNARY_BLOCK];
    for (size_t i = first; i < last; i += UNARY_BLOCK) {
        size_t numel = fsdpc_min_size(UNARY_BLOCK, last - i);
        widen(block, args->x, i, numel, dtype);
        unary_f32(args->kind, block, block, numel, s);
        narrow(args->out, i, block, numel, dtype);
    }
}

FSDPC_INLINE void unary_backward_range(const fsdpc_unary_args *args, size_t first, size_t last,
                                       fsdpc_dtype dtype)
{
    float s = (float)args->scalar;
    bool reads_x = fsdpc_unary_reads_x(args->kind), reads_y = fsdpc_unary_reads_y(args->kind);
    if (dtype == FSDPC_F32) {
        unary_backward_f32(args->kind, reads_x ? (const float *)args->x + first : NULL,
                           reads_y ? (const float *)args->y + first : NULL,
                           (const float *)args->dy + first, (float *)args->out + first,
                           last - first, s);
        return;
    }
    float x[UNARY_BLOCK], y[UNARY_BLOCK], dy[UNARY_BLOCK];
    for (size_t i = first; i < last; i += UNARY_BLOCK) {
        size_t numel = fsdpc_min_size(UNARY_BLOCK, last - i);
        if (reads_x)
            widen(x, args->x, i, numel, dtype);
        if (reads_y)
            widen(y, args->y, i, numel, dtype);
        widen(dy, args->dy, i, numel, dtype);
        unary_backward_f32(args->kind, x, y, dy, dy, numel, s);
        narrow(args->out, i, dy, numel, dtype);
    }
}

NN_FLOAT_KERNELS(unary_range, fsdpc_unary_args, fsdpc_nn_unary_f64)
NN_FLOAT_KERNELS(unary_backward_range, fsdpc_unary_args, fsdpc_nn_unary_backward_f64)

static fsdpc_status unary(const fsdpc_unary_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "a unary function"));
    nn_for(stream, args->numel, NN_GRAIN, unary_range_kernels[args->dtype], args);
    return FSDPC_OK;
}

static fsdpc_status unary_backward(const fsdpc_unary_args *args, fsdpc_stream *stream)
{
    FSDPC_TRY(nn_check_float(args->dtype, "a unary function"));
    nn_for(stream, args->numel, NN_GRAIN, unary_backward_range_kernels[args->dtype], args);
    return FSDPC_OK;
}
