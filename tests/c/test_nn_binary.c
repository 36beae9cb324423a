/* Arithmetic and comparisons with broadcasting, SwiGLU and dropout against double, all dtypes. */
#include "nn_rig.h"

#include "base/random.h"

typedef struct shape_case {
    int ndim;
    size_t shape[4];
    bool one_a[4], one_b[4]; /* broadcast along */
} shape_case;

static double apply(fsdpc_binary kind, double a, double b)
{
    return kind == FSDPC_BINARY_ADD       ? a + b
           : kind == FSDPC_BINARY_SUB     ? a - b
           : kind == FSDPC_BINARY_MUL     ? a * b
           : kind == FSDPC_BINARY_DIV     ? a / b
           : kind == FSDPC_BINARY_POW     ? pow(a, b)
           : kind == FSDPC_BINARY_MAXIMUM ? fmax(a, b)
           : kind == FSDPC_BINARY_MINIMUM ? fmin(a, b)
           : fsdpc_binary_masks(kind)     ? (b != 0 ? a : 0)
           : kind == FSDPC_BINARY_EQ      ? a == b
           : kind == FSDPC_BINARY_NE      ? a != b
           : kind == FSDPC_BINARY_LT      ? a < b
           : kind == FSDPC_BINARY_LE      ? a <= b
           : kind == FSDPC_BINARY_GT      ? a > b
                                          : a >= b;
}

/* Strides of a dense operand without its broadcast dimensions; returns its numel. */
static size_t operand(const shape_case *c, const bool *one, size_t *stride)
{
    size_t numel = 1;
    for (int d = c->ndim - 1; d >= 0; d--) {
        stride[d] = one[d] ? 0 : numel;
        numel *= one[d] ? 1 : c->shape[d];
    }
    return numel;
}

static void test_binary(nn_rig *rig, fsdpc_dtype dtype, const shape_case *c, fsdpc_binary kind)
{
    fsdpc_binary_args args = {.kind = kind, .dtype = dtype, .ndim = c->ndim};
    size_t numel = 1;
    for (int d = 0; d < c->ndim; d++)
        numel *= args.shape[d] = c->shape[d];
    bool is_int = dtype > FSDPC_F64, masks = fsdpc_binary_masks(kind);
    bool compares = fsdpc_binary_compares(kind);
    double low = is_int ? -1000 : 0.5, high = is_int ? compares ? -997 : 1000 : 2;
    if (fsdpc_dtype_bytes(dtype) == 1) { /* bytes of bool: 0, or what counts as 1 */
        low = 0;
        high = 3;
    }
    buffer a = buffer_noise(dtype, operand(c, c->one_a, args.stride_a), 3, low, high);
    buffer b = buffer_noise(masks ? FSDPC_BOOL : dtype, operand(c, c->one_b, args.stride_b), 4,
                            masks ? 0 : low, masks ? 2 : high);
    buffer out = buffer_make(compares ? FSDPC_BOOL : dtype, numel);
    args.a = a.data;
    args.b = b.data;
    args.out = out.data;
    CHECK_OK(rig->ops->binary(&args, rig->stream));
    buffer_check(rig, &out, "binary");
    for (size_t i = 0; i<numel; i += numel> 1000 ? 13 : 1) {
        size_t at_a = 0, at_b = 0, rest = i;
        for (int d = c->ndim - 1; d >= 0; rest /= c->shape[d--]) {
            at_a += rest % c->shape[d] * args.stride_a[d];
            at_b += rest % c->shape[d] * args.stride_b[d];
        }
        double x = buffer_get(&a, at_a), y = buffer_get(&b, at_b);
        double want = dtype == FSDPC_BOOL ? apply(kind, x != 0, y != 0) : apply(kind, x, y);
        /* one rounding to fp32, one to the dtype */
        check_near(rig, "binary", dtype, i, buffer_get(&out, i), want,
                   is_int || compares
                       ? 0
                       : tolerance(dtype, want, fabs(want), kind == FSDPC_BINARY_POW ? 2 : 0.6));
    }
    buffer_free(&a);
    buffer_free(&b);
    buffer_free(&out);
}

static void test_binary_transposed(nn_rig *rig)
{
    float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {10, 20, 30, 40, 50, 60}, out[6];
    fsdpc_binary_args args = {FSDPC_BINARY_SUB, FSDPC_F32, 2, {3, 2}, {1, 3}, {2, 1}, a, b, out};
    CHECK_OK(rig->ops->binary(&args, rig->stream));
    const float want[6] = {-9, -16, -28, -35, -47, -54};
    CHECK(memcmp(out, want, sizeof want) == 0);
    args.dtype = FSDPC_I32;
    args.kind = FSDPC_BINARY_DIV;
    CHECK_FAILS(rig->ops->binary(&args, rig->stream), FSDPC_ERR_DTYPE, "cast to a float");
    args.dtype = FSDPC_BOOL;
    CHECK_FAILS(rig->ops->binary(&args, rig->stream), FSDPC_ERR_DTYPE, "bool");
}

/* NaN and signed zeros, compared and masked; the transposed form reads by strides. */
static void test_special(nn_rig *rig)
{
    float a[6] = {NAN, NAN, 0.0f, 1, INFINITY, -1}, b[6] = {NAN, 1, -0.0f, 1, INFINITY, 1};
    uint8_t out[6], keep[6] = {1, 0, 1, 1, 0, 0};
    const char *const want[] = {"001110", "110001", "000001", "001111", "000000", "001110"};
    for (int kind = FSDPC_BINARY_EQ; kind <= FSDPC_BINARY_GE; kind++) {
        fsdpc_binary_args args = {(fsdpc_binary)kind, FSDPC_F32, 1, {6}, {1}, {1}, a, b, out};
        CHECK_OK(rig->ops->binary(&args, rig->stream));
        for (int i = 0; i < 6; i++)
            CHECK_NOTE(out[i] == want[kind - FSDPC_BINARY_EQ][i] - '0', "kind %d [%d]", kind, i);
    }
    float masked[6];
    fsdpc_binary_args args = {
        FSDPC_BINARY_MASK, FSDPC_F32, 2, {3, 2}, {1, 3}, {2, 1}, a, keep, masked};
    CHECK_OK(rig->ops->binary(&args, rig->stream));
    CHECK(isnan(masked[0]) && signbit(masked[1]) && isnan(masked[2]) && masked[3] == INFINITY);
    CHECK(masked[4] == 0 && signbit(masked[4]) && masked[5] == 0 && signbit(masked[5]));
    args.kind = FSDPC_BINARY_KEEP;
    CHECK_OK(rig->ops->binary(&args, rig->stream));
    CHECK(isnan(masked[0]) && masked[1] == 0 && !signbit(masked[1]) && masked[3] == INFINITY);
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

static void test_swiglu(nn_rig *rig, fsdpc_dtype dtype, size_t numel)
{
    buffer gate = buffer_noise(dtype, numel, 5, -6, 6), up = buffer_noise(dtype, numel, 6, -2, 2);
    buffer dout = buffer_noise(dtype, numel, 7, -1, 1), out = buffer_make(dtype, numel);
    buffer dgate = buffer_make(dtype, numel), dup = buffer_make(dtype, numel);
    fsdpc_swiglu_args args = {dtype,    numel,     gate.data,  up.data,
                              out.data, dout.data, dgate.data, dup.data};
    CHECK_OK(rig->ops->swiglu(&args, rig->stream));
    CHECK_OK(rig->ops->swiglu_backward(&args, rig->stream));
    buffer_check(rig, &out, "swiglu");
    buffer_check(rig, &dgate, "swiglu dgate");
    buffer_check(rig, &dup, "swiglu dup");
    for (size_t i = 0; i<numel; i += numel> 1000 ? 13 : 1) {
        double g = buffer_get(&gate, i), u = buffer_get(&up, i), d = buffer_get(&dout, i), h = 1e-6;
        double want = silu(g) * u, want_up = d * silu(g);
        double want_gate = d * u * (silu(g + h) - silu(g - h)) / (2 * h);
        check_near(rig, "swiglu", dtype, i, buffer_get(&out, i), want,
                   tolerance(dtype, want, fabs(want), 4));
        check_near(rig, "swiglu dup", dtype, i, buffer_get(&dup, i), want_up,
                   tolerance(dtype, want_up, fabs(want_up), 4));
        check_near(rig, "swiglu dgate", dtype, i, buffer_get(&dgate, i), want_gate,
                   tolerance(dtype, want_gate, 1, 6) + 1e-8);
    }
    buffer_free(&gate);
    buffer_free(&up);
    buffer_free(&dout);
    buffer_free(&out);
    buffer_free(&dgate);
    buffer_free(&dup);
}

static void test_dropout(nn_rig *rig, fsdpc_dtype dtype, size_t numel, uint64_t first, double p)
{
    buffer x = buffer_noise(dtype, numel, 8, 0.5, 2), out = buffer_make(dtype, numel);
    uint64_t seed = 0x123456789abcdefull, stream = 42;
    const fsdpc_dropout_key key = {seed, 2};
    fsdpc_dropout_args args = {dtype, numel, p, seed, stream, first, x.data, out.data, NULL};
    if (numel % 2) { /* the same by a key */
        args.seed = 1;
        args.stream -= key.shift;
        args.key = &key;
    }
    CHECK_OK(rig->ops->dropout(&args, rig->stream));
    buffer_check(rig, &out, "dropout");
    for (size_t i = 0; i < numel; i++) {
        fsdpc_philox block = fsdpc_philox_block(seed, stream, (first + i) / 4);
        bool keep = fsdpc_uniform_from_bits(block.x[(first + i) % 4]) >= p;
        double want = keep ? buffer_get(&x, i) / (1 - p) : 0;
        check_near(rig, "dropout", dtype, i, buffer_get(&out, i), want,
                   tolerance(dtype, want, want, 1));
    }
    buffer_free(&x);
    buffer_free(&out);
}

static void suite(nn_rig *rig)
{
    const shape_case cases[] = {
        {1, {0}, {0}, {0}},
        {0, {0}, {0}, {0}},
        {1, {1}, {0}, {0}},
        {1, {7}, {0}, {1}},
        {2, {5, 33}, {0, 0}, {1, 0}},
        {2, {5, 33}, {0, 0}, {0, 1}},
        {2, {5, 33}, {1, 0}, {0, 1}},
        {3, {4, 3, 17}, {0, 1, 0}, {1, 0, 1}},
        {4, {2, 3, 4, 5}, {1, 0, 0, 1}, {0, 1, 0, 1}},
        {2, {301, 250}, {0, 0}, {1, 0}},
        {2, {300, 251}, {0, 0}, {0, 1}},
        {1, {100001}, {0}, {0}},
        {1, {50001}, {1}, {0}},
    };
    const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64,
                                  FSDPC_I32, FSDPC_I64,  FSDPC_U8,  FSDPC_BOOL};
    for (size_t d = 0; d < 8; d++)
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
            for (int kind = 0; kind <= FSDPC_BINARY_GE; kind++)
                if (d < 4 || (d < 6 && kind != FSDPC_BINARY_DIV && kind != FSDPC_BINARY_POW) ||
                    fsdpc_binary_compares(kind))
                    test_binary(rig, dtypes[d], &cases[c], (fsdpc_binary)kind);
    test_binary_transposed(rig);
    test_special(rig);
    const size_t sizes[] = {0, 1, 15, 16, 100, 70001};
    for (size_t d = 0; d < 4; d++)
        for (size_t n = 0; n < 6; n++) {
            test_swiglu(rig, float_dtypes[d], sizes[n]);
            test_dropout(rig, float_dtypes[d], sizes[n], n, 0.3);
        }
    test_dropout(rig, FSDPC_F32, 1000, 0xfffffffffull, 0);
    test_dropout(rig, FSDPC_F32, 1000, 3, 1);
    fsdpc_dropout_args bad = {.dtype = FSDPC_F32, .p = 1.5};
    CHECK_FAILS(rig->ops->dropout(&bad, rig->stream), FSDPC_ERR_VALUE, "probability");
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_binary");
}
