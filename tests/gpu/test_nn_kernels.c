/* The neural network kernels of the GPU against the CPU's.
 *
 * To the bit where both do the same operations in the same order (dropout, copies, arithmetic,
 * embeddings); else within one rounding of the result's dtype and some roundings of the arithmetic
 * inside, whose sums have another order and whose exponentials are another library's.
 */
#include "gpu_rig.h"

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const size_t sizes[] = {0, 1, 7, 8, 9, 31, 1025, 20011};
static const size_t row_shapes[][2] = {{0, 5},   {1, 1},    {3, 7},    {5, 64},    {2, 100},
                                       {4, 520}, {2, 5003}, {300, 33}, {41, 1024}, {3, 4104}};
enum { FLOATS = 4, SIZES = 8, ROW_SHAPES = 10 };

static const fsdpc_nn_ops *on(const fsdpc_stream *stream)
{
    return stream->device->nn;
}

static void fini_all(buffer *const *all, size_t n)
{
    for (size_t b = 0; b < n; b++)
        buffer_fini(all[b]);
}

static void check_unary(fsdpc_unary kind, fsdpc_dtype dtype, size_t numel, size_t shift)
{
    buffer x = buffer_random(dtype, numel, shift), dy = buffer_random(dtype, numel, shift);
    bool positive = kind == FSDPC_UNARY_LOG || kind == FSDPC_UNARY_SQRT ||
                    kind == FSDPC_UNARY_POW_SCALAR || kind == FSDPC_UNARY_LOG1P;
    for (size_t i = 0; i < numel; i++) {
        double value = element_of(x.on_cpu, i, dtype) * 4;
        element_set(x.on_cpu, i, dtype,
                    positive || kind == FSDPC_UNARY_RDIV_SCALAR || kind == FSDPC_UNARY_RSQRT
                        ? fabs(value) + 0.1
                        : value);
    }
    buffer_send(&x);
    buffer y = buffer_poison(dtype, numel, shift), dx = buffer_poison(dtype, numel, shift);
    fsdpc_unary_args args = {.kind = kind, .dtype = dtype, .numel = numel, .scalar = 1.5};
    args.x = x.on_cpu, args.out = y.on_cpu;
    CHECK_OK(on(cpu_stream)->unary(&args, cpu_stream));
    args.x = x.on_gpu, args.out = y.on_gpu;
    CHECK_OK(on(gpu_stream)->unary(&args, gpu_stream));
    check_close(&y, 8, 8, "unary");
    buffer_send(&y); /* the same y for both backwards */
    args.x = x.on_cpu, args.y = y.on_cpu, args.dy = dy.on_cpu, args.out = dx.on_cpu;
    CHECK_OK(on(cpu_stream)->unary_backward(&args, cpu_stream));
    args.x = x.on_gpu, args.y = y.on_gpu, args.dy = dy.on_gpu, args.out = dx.on_gpu;
    CHECK_OK(on(gpu_stream)->unary_backward(&args, gpu_stream));
    double steep = kind == FSDPC_UNARY_RDIV_SCALAR || kind == FSDPC_UNARY_EXPM1
                       ? 200
                       : 30; /* s / x^2 at 0.1 */
    check_close(&dx, steep, 8, "unary backward");
    fini_all((buffer *[]){&x, &dy, &y, &dx}, 4);
}

static void test_unary(void)
{
    for (int kind = 0; kind <= FSDPC_UNARY_POW_SCALAR; kind++)
        for (int d = 0; d < FLOATS; d++)
            for (size_t n = (size_t)(kind + d) % 2; n < SIZES - 1; n += 2)
                check_unary((fsdpc_unary)kind, floats[d], sizes[n], n % 2);
}

/* The same twice, by keys in the memory of either device. */
static void check_keyed_dropout(const fsdpc_dropout_args *drop, buffer *out, const void *x)
{
    const fsdpc_dropout_key key = {rig_bits(), 1 + rig_bits() % 9};
    void *there;
    CHECK_OK(fsdpc_device_alloc(gpu, FSDPC_MEM_OTHER, sizeof key, &there));
    CHECK_OK(fsdpc_device_copy(gpu, there, &key, sizeof key, gpu_stream));
    fsdpc_dropout_args plain = *drop, keyed = *drop;
    plain.x = x, plain.out = out->on_cpu;
    plain.seed = key.seed, plain.stream += key.shift;
    CHECK_OK(on(cpu_stream)->dropout(&plain, cpu_stream));
    keyed.key = there;
    CHECK_OK(on(gpu_stream)->dropout(&keyed, gpu_stream));
    check_same_bits(out, "dropout by a key");
    fsdpc_device_free(gpu, there);
}

static void test_gates(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++) {
            size_t shift = n % 2;
            buffer gate = buffer_random(floats[d], sizes[n], shift);
            buffer up = buffer_random(floats[d], sizes[n], shift);
            buffer dout = buffer_random(floats[d], sizes[n], shift);
            buffer out = buffer_poison(floats[d], sizes[n], shift);
            buffer dgate = buffer_poison(floats[d], sizes[n], shift);
            buffer dup = buffer_poison(floats[d], sizes[n], shift);
            fsdpc_swiglu_args args = {.dtype = floats[d], .numel = sizes[n]};
            args.gate = gate.on_cpu, args.up = up.on_cpu, args.out = out.on_cpu;
            args.dout = dout.on_cpu, args.dgate = dgate.on_cpu, args.dup = dup.on_cpu;
            CHECK_OK(on(cpu_stream)->swiglu(&args, cpu_stream));
            CHECK_OK(on(cpu_stream)->swiglu_backward(&args, cpu_stream));
            args.gate = gate.on_gpu, args.up = up.on_gpu, args.out = out.on_gpu;
            args.dout = dout.on_gpu, args.dgate = dgate.on_gpu, args.dup = dup.on_gpu;
            CHECK_OK(on(gpu_stream)->swiglu(&args, gpu_stream));
            CHECK_OK(on(gpu_stream)->swiglu_backward(&args, gpu_stream));
            check_close(&out, 1, 4, "swiglu");
            check_close(&dgate, 1, 8, "swiglu, dgate");
            check_close(&dup, 1, 4, "swiglu, dup");
            fsdpc_dropout_args drop = {.dtype = floats[d],
                                       .numel = sizes[n],
                                       .p = n % 3 * 0.37,
                                       .seed = rig_bits(),
                                       .stream = 3,
                                       .first = n % 5};
            drop.x = gate.on_cpu, drop.out = out.on_cpu;
            CHECK_OK(on(cpu_stream)->dropout(&drop, cpu_stream));
            drop.x = gate.on_gpu, drop.out = out.on_gpu;
            CHECK_OK(on(gpu_stream)->dropout(&drop, gpu_stream));
            check_same_bits(&out, "dropout");
            check_keyed_dropout(&drop, &out, gate.on_cpu);
            fini_all((buffer *[]){&gate, &up, &dout, &out, &dgate, &dup}, 6);
        }
}

static void check_binary(fsdpc_binary kind, fsdpc_dtype dtype, fsdpc_binary_args args,
                         size_t a_numel, size_t b_numel)
{
    size_t numel = 1;
    for (int d = 0; d < args.ndim; d++)
        numel *= args.shape[d];
    buffer a = buffer_random(dtype, a_numel, 0), b = buffer_random(dtype, b_numel, 0);
    if (dtype >= FSDPC_I32) {
        for (size_t i = 0; i < b_numel; i++)
            element_set(b.on_cpu, i, dtype, (double)(int)(rig_bits() % 1000));
        buffer_send(&b);
    }
    bool rounds = kind == FSDPC_BINARY_POW && dtype < FSDPC_I32;
    for (size_t i = 0; rounds && i < a_numel; i++)
        element_set(a.on_cpu, i, dtype, fabs(element_of(a.on_cpu, i, dtype)) + 0.1);
    if (rounds)
        buffer_send(&a);
    buffer out = buffer_poison(fsdpc_binary_compares(kind) ? FSDPC_BOOL : dtype, numel, 0);
    args.kind = kind, args.dtype = dtype;
    args.a = a.on_cpu, args.b = b.on_cpu, args.out = out.on_cpu;
    CHECK_OK(on(cpu_stream)->binary(&args, cpu_stream));
    args.a = a.on_gpu, args.b = b.on_gpu, args.out = out.on_gpu;
    CHECK_OK(on(gpu_stream)->binary(&args, gpu_stream));
    if (rounds)
        check_close(&out, 8, 8, "pow");
    else
        check_same_bits(&out, "binary");
    fini_all((buffer *[]){&a, &b, &out}, 3);
}

static void test_binary(void)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16,
                                         FSDPC_F64, FSDPC_I32,  FSDPC_I64};
    for (int kind = 0; kind <= FSDPC_BINARY_GE; kind++)
        for (int d = 0; d < 6; d++) {
            if (kind == FSDPC_BINARY_DIV && d > 3)
                continue;
            fsdpc_binary_args dense = {
                .ndim = 1, .shape = {1031}, .stride_a = {1}, .stride_b = {1}};
            fsdpc_binary_args bias = {
                .ndim = 2, .shape = {9, 64}, .stride_a = {64, 1}, .stride_b = {0, 1}};
            fsdpc_binary_args turned = {
                .ndim = 3, .shape = {3, 5, 7}, .stride_a = {35, 7, 1}, .stride_b = {1, 0, 3}};
            fsdpc_binary_args scalar = {
                .ndim = 2, .shape = {33, 40}, .stride_a = {40, 1}, .stride_b = {0, 0}};
            fsdpc_binary_args empty = {
                .ndim = 2, .shape = {0, 4}, .stride_a = {4, 1}, .stride_b = {4, 1}};
            check_binary((fsdpc_binary)kind, dtypes[d], dense, 1031, 1031);
            check_binary((fsdpc_binary)kind, dtypes[d], bias, 9 * 64, 64);
            check_binary((fsdpc_binary)kind, dtypes[d], turned, 105, 3 + 21);
            check_binary((fsdpc_binary)kind, dtypes[d], scalar, 33 * 40, 1);
            check_binary((fsdpc_binary)kind, dtypes[d], empty, 0, 0);
        }
}

static const struct {
    int ndim;
    size_t shape[4];
    bool reduced[4];
} sums[] = {{1, {50021}, {true}},
            {2, {700, 37}, {true, false}},
            {2, {5, 3000}, {false, true}},
            {3, {4, 33, 65}, {false, true, false}},
            {4, {3, 5, 2, 31}, {true, false, true, true}},
            {2, {1, 9}, {false, false}},
            {2, {0, 9}, {true, false}},
            {1, {0}, {true}}};

/* Puts a case into the arguments. */
static void sum_shape(size_t c, fsdpc_sum_args *args, size_t *numel_out, size_t *outputs_out)
{
    *numel_out = *outputs_out = 1;
    args->ndim = sums[c].ndim;
    for (int k = 0; k < args->ndim; k++) {
        args->shape[k] = sums[c].shape[k];
        args->reduced[k] = sums[c].reduced[k];
        *numel_out *= args->shape[k];
        *outputs_out *= args->reduced[k] ? 1 : args->shape[k];
    }
}

static void test_sum(void)
{
    for (size_t c = 0; c < 8; c++)
        for (int d = 0; d < FLOATS; d++)
            for (int o = 0; o < FLOATS; o++) {
                size_t numel, outputs;
                fsdpc_sum_args args = {.dtype = floats[d],
                                       .out_dtype = floats[o],
                                       .scale = 0.25,
                                       .accumulate = (d + o) % 2};
                sum_shape(c, &args, &numel, &outputs);
                buffer x = buffer_random(floats[d], numel, 0);
                buffer out = buffer_random(floats[o], outputs, 0);
                args.x = x.on_cpu, args.out = out.on_cpu;
                CHECK_OK(on(cpu_stream)->sum(&args, cpu_stream));
                args.x = x.on_gpu, args.out = out.on_gpu;
                CHECK_OK(on(gpu_stream)->sum(&args, gpu_stream));
                /* Sums of up to 50021 numbers below 1, in two orders: errors grow by chance, as the
                 * root of the terms, and one in some hundreds is 8 times that. fp32 inside unless
                 * all is F64. */
                bool wide = floats[d] == FSDPC_F64 && floats[o] == FSDPC_F64;
                double terms = outputs ? (double)numel / (double)outputs : 0;
                check_close(&out, (1 + sqrt(terms)) * (wide || floats[o] != FSDPC_F64 ? 1 : 0x1p29),
                            32, "sum");
                fini_all((buffer *[]){&x, &out}, 2);
            }
}

static void test_sum_of_integers(void)
{
    for (size_t c = 0; c < 8; c++) {
        size_t numel, outputs;
        fsdpc_sum_args args = {.dtype = FSDPC_I64, .out_dtype = FSDPC_I64, .scale = 1};
        sum_shape(c, &args, &numel, &outputs);
        buffer x = buffer_make(FSDPC_I64, numel, 0), out = buffer_poison(FSDPC_I64, outputs, 0);
        uint64_t value = 12345;
        for (size_t i = 0; i < numel; i++) /* of all bits */
            ((uint64_t *)x.on_cpu)[i] = value = value * 6364136223846793005u + 1442695040888963407u;
        buffer_send(&x);
        args.x = x.on_cpu, args.out = out.on_cpu;
        CHECK_OK(on(cpu_stream)->sum(&args, cpu_stream));
        args.x = x.on_gpu, args.out = out.on_gpu;
        CHECK_OK(on(gpu_stream)->sum(&args, gpu_stream));
        check_same_bits(&out, "sum of integers");
        fini_all((buffer *[]){&x, &out}, 2);
    }
}

static void test_cumsum(void)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16,
                                         FSDPC_F64, FSDPC_I32,  FSDPC_I64};
    static const size_t lines[][3] = {{3, 1000, 1}, {2, 33, 45}, {0, 4, 4}, {5, 0, 1}};
    for (int d = 0; d < 6; d++)
        for (int c = 0; c < 8; c++) {
            const size_t *n = lines[c / 2];
            buffer x = buffer_random(dtypes[d], n[0] * n[1] * n[2], 0);
            buffer out = buffer_poison(dtypes[d], n[0] * n[1] * n[2], 0);
            fsdpc_cumsum_args args = {dtypes[d], n[0], n[1], n[2], c % 2, x.on_cpu, out.on_cpu};
            CHECK_OK(on(cpu_stream)->cumsum(&args, cpu_stream));
            args.x = x.on_gpu, args.out = out.on_gpu;
            CHECK_OK(on(gpu_stream)->cumsum(&args, gpu_stream));
            if (dtypes[d] > FSDPC_F64)
                check_same_bits(&out, "cumsum");
            else /* sums in double, in two orders, rounded once */
                check_close(&out, dtypes[d] == FSDPC_F64 ? 1 + (double)n[1] : 2, 2, "cumsum");
            fini_all((buffer *[]){&x, &out}, 2);
        }
}

static void check_copy(fsdpc_copy_args args, size_t dst_numel, size_t src_numel)
{
    buffer src = buffer_random(args.src_dtype, src_numel, 0);
    buffer dst = buffer_random(args.dst_dtype, dst_numel, 0);
    for (size_t i = 0; i < src_numel; i++)
        element_set(src.on_cpu, i, args.src_dtype,
                    args.src_dtype == FSDPC_BOOL ? (double)(rig_bits() % 2) : rig_value() * 100);
    buffer_send(&src);
    args.src = src.on_cpu, args.dst = dst.on_cpu;
    CHECK_OK(on(cpu_stream)->copy(&args, cpu_stream));
    args.src = src.on_gpu, args.dst = dst.on_gpu;
    CHECK_OK(on(gpu_stream)->copy(&args, gpu_stream));
    check_same_bits(&dst, "copy");
    fini_all((buffer *[]){&src, &dst}, 2);
}

static void test_copy(void)
{
    for (int d = 0; d < FSDPC_DTYPE_COUNT; d++)
        for (int s = 0; s < FSDPC_DTYPE_COUNT; s++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                fsdpc_copy_args args = {.ndim = 2,
                                        .shape = {7, 45},
                                        .stride_dst = {45, 1},
                                        .stride_src = {50, 1},
                                        .dst_dtype = (fsdpc_dtype)d,
                                        .src_dtype = (fsdpc_dtype)s,
                                        .accumulate = accumulate};
                check_copy(args, 7 * 45, 7 * 50);
            }
    for (int d = 0; d < FSDPC_DTYPE_COUNT; d++) {
        fsdpc_dtype dtype = (fsdpc_dtype)d;
        fsdpc_copy_args rows = {2, {6, 64}, {64, 1}, {128, 1}, dtype, dtype, NULL, NULL, false, 0};
        fsdpc_copy_args turn = {2, {70, 45}, {45, 1}, {1, 70}, dtype, dtype, NULL, NULL, false, 0};
        fsdpc_copy_args heads = {
            4, {2, 5, 3, 8}, {120, 8, 40, 1}, {120, 24, 8, 1}, dtype, dtype, NULL, NULL, false, 0};
        fsdpc_copy_args expand = {2, {9, 33}, {33, 1}, {0, 1}, dtype, dtype, NULL, NULL, false, 0};
        fsdpc_copy_args steps = {2, {9, 33}, {66, 2}, {99, 3}, dtype, dtype, NULL, NULL, false, 0};
        check_copy(rows, 6 * 64, 6 * 128);
        for (int kind = 1; kind < 4; kind++) { /* columns backwards, rows, both */
            bool up = kind & 2, left = kind & 1;
            fsdpc_copy_args back = {2,       {6, 64},
                                    {64, 1}, {up ? (size_t)-64 : 64, left ? (size_t)-1 : 1},
                                    dtype,   dtype,
                                    NULL,    NULL,
                                    false,   (up ? 5 * 64 : 0) + (left ? 63 : 0)};
            check_copy(back, 6 * 64, 6 * 64);
        }
        fsdpc_copy_args wide = {2,     {500, 700}, {700, 1}, {1, 500}, dtype,
                                dtype, NULL,       NULL,     false,    0};
        check_copy(wide, 500 * 700, 500 * 700); /* more tiles than blocks */
        check_copy(turn, 70 * 45, 70 * 45);
        check_copy(heads, 240, 240);
        check_copy(expand, 9 * 33, 33);
        check_copy(steps, 9 * 66, 9 * 99);
    }
}

static void test_softmax(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < ROW_SHAPES; n++)
            for (int log = 0; log < 2; log++) {
                size_t rows = row_shapes[n][0], cols = row_shapes[n][1], numel = rows * cols;
                buffer x = buffer_random(floats[d], numel, n % 2),
                       dy = buffer_random(floats[d], numel, 0);
                buffer y = buffer_poison(floats[d], numel, 0),
                       dx = buffer_poison(floats[d], numel, 0);
                fsdpc_softmax_args args = {
                    .dtype = floats[d], .rows = rows, .cols = cols, .log = log};
                args.x = x.on_cpu, args.out = y.on_cpu;
                CHECK_OK(on(cpu_stream)->softmax(&args, cpu_stream));
                args.x = x.on_gpu, args.out = y.on_gpu;
                CHECK_OK(on(gpu_stream)->softmax(&args, gpu_stream));
                check_close(&y, log ? 10 : 1, 8, "softmax");
                buffer_send(&y);
                args.y = y.on_cpu, args.dy = dy.on_cpu, args.out = dx.on_cpu;
                CHECK_OK(on(cpu_stream)->softmax_backward(&args, cpu_stream));
                args.y = y.on_gpu, args.dy = dy.on_gpu, args.out = dx.on_gpu;
                CHECK_OK(on(gpu_stream)->softmax_backward(&args, gpu_stream));
                check_close(&dx, log ? sqrt((double)cols) + 1 : 1, 16, "softmax backward");
                buffer sums = buffer_poison(floats[d], rows, 0);
                args.x = x.on_cpu, args.lse = sums.on_cpu;
                CHECK_OK(on(cpu_stream)->softmax(&args, cpu_stream));
                args.x = x.on_gpu, args.lse = sums.on_gpu;
                CHECK_OK(on(gpu_stream)->softmax(&args, gpu_stream));
                check_close(&sums, 10, 8, "logsumexp");
                fini_all((buffer *[]){&x, &dy, &y, &dx, &sums}, 5);
            }
}

static void check_norm(bool layer, fsdpc_dtype dtype, size_t rows, size_t cols, unsigned with)
{
    size_t numel = rows * cols;
    bool weight = with & 1, bias = with & 2, add = with & 4;
    fsdpc_dtype grad = with & 8 ? FSDPC_F32 : dtype;
    buffer x = buffer_random(dtype, numel, 0), w = buffer_random(dtype, cols, 0);
    buffer b = buffer_random(dtype, cols, 0), dy = buffer_random(dtype, numel, 0);
    buffer y = buffer_poison(dtype, numel, 0);
    buffer dx = add ? buffer_random(dtype, numel, 0) : buffer_poison(dtype, numel, 0);
    buffer mean = buffer_poison(FSDPC_F32, rows, 0), rstd = buffer_poison(FSDPC_F32, rows, 0);
    buffer dw = buffer_random(grad, cols, 0), db = buffer_random(grad, cols, 0);
    fsdpc_norm_args args = {.layer = layer,
                            .dtype = dtype,
                            .rows = rows,
                            .cols = cols,
                            .eps = 1e-5,
                            .dgrad_dtype = grad,
                            .dx_accumulate = add,
                            .dweight_accumulate = add,
                            .dbias_accumulate = add};
    for (int side = 0; side < 2; side++) {
        fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
#define AT(buffer) (side ? (buffer).on_gpu : (buffer).on_cpu)
        args.x = AT(x), args.weight = weight ? AT(w) : NULL, args.bias = bias ? AT(b) : NULL;
        args.y = AT(y), args.mean = AT(mean), args.rstd = AT(rstd), args.dy = AT(dy);
        args.dx = AT(dx), args.dweight = weight ? AT(dw) : NULL, args.dbias = bias ? AT(db) : NULL;
#undef AT
        CHECK_OK(on(stream)->norm(&args, stream));
        CHECK_OK(on(stream)->norm_backward(&args, stream));
    }
    check_close(&y, 8, 16, "norm");
    check_close(&rstd, 100, 64, "norm, rstd");
    if (layer)
        check_close(&mean, 1, 16, "norm, mean");
    else if (rows)
        buffer_fetch(&mean);
    /* constant columns make rstd 316 */
    check_close(&dx, cols < 8 ? 4000 : 60, 64, "norm backward, dx");
    check_close(&dw, 4 + sqrt((double)rows), 32, "norm backward, dweight");
    check_close(&db, 4 + sqrt((double)rows), 32, "norm backward, dbias");
    fini_all((buffer *[]){&x, &w, &b, &dy, &y, &dx, &mean, &rstd, &dw, &db}, 10);
}

static void test_norm(void)
{
    for (int layer = 0; layer < 2; layer++)
        for (int d = 0; d < FLOATS; d++)
            for (size_t n = 0; n < ROW_SHAPES; n++)
                check_norm(layer, floats[d], row_shapes[n][0], row_shapes[n][1],
                           (unsigned)(n * 5 + (size_t)d * 3 + 1) % 16);
}

static void test_cross_entropy(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < ROW_SHAPES; n++) {
            size_t rows = row_shapes[n][0], cols = row_shapes[n][1];
            fsdpc_dtype id_dtype = n % 2 ? FSDPC_I32 : FSDPC_I64;
            buffer x = buffer_random(floats[d], rows * cols, 0);
            buffer ids = buffer_make(id_dtype, rows, 0);
            for (size_t r = 0; r < rows; r++)
                element_set(ids.on_cpu, r, id_dtype,
                            rig_bits() % 5 == 0 ? -100.0 : (double)(rig_bits() % cols));
            buffer_send(&ids);
            buffer lse = buffer_poison(FSDPC_F32, rows, 0),
                   dx = buffer_poison(floats[d], rows * cols, 0);
            fsdpc_cross_entropy_args args = {.dtype = floats[d], .id_dtype = id_dtype};
            args.rows = rows, args.cols = cols, args.ignore_index = -100;
            buffer loss = buffer_poison(FSDPC_F32, 2, 0), sum = buffer_poison(FSDPC_I64, 2, 0);
            buffer dloss = buffer_random(FSDPC_F32, 1, 0), of_rows[3];
            for (int i = 0; i < 3; i++)
                of_rows[i] = buffer_random(FSDPC_F32, rows, 0);
            if (n % 3 == 1)
                args.smoothing = 0.25f, args.z_loss = 0.01f, args.softcap = 9;
            args.sums = n % 4 == 2;
            for (int side = 0; side < 2; side++) {
                fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
                args.logits = side ? x.on_gpu : x.on_cpu;
                args.targets = side ? ids.on_gpu : ids.on_cpu;
                args.lse = side ? lse.on_gpu : lse.on_cpu;
                args.dlogits = side ? dx.on_gpu : dx.on_cpu;
                args.loss = side ? loss.on_gpu : loss.on_cpu;
                args.sum = side ? sum.on_gpu : sum.on_cpu;
                args.dloss = side ? dloss.on_gpu : dloss.on_cpu;
                args.losses = side ? of_rows[0].on_gpu : of_rows[0].on_cpu;
                if (args.smoothing > 0) {
                    args.means = side ? of_rows[1].on_gpu : of_rows[1].on_cpu;
                    args.dlosses = side ? of_rows[2].on_gpu : of_rows[2].on_cpu;
                }
                CHECK_OK(on(stream)->cross_entropy(&args, stream));
                args.loss++, args.accumulate = true; /* the same rows once more */
                CHECK_OK(on(stream)->cross_entropy(&args, stream));
                args.dloss = n == 3 ? NULL : args.dloss; /* the sum's gradient */
                CHECK_OK(on(stream)->cross_entropy_backward(&args, stream));
                args.accumulate = false;
            }
            const fsdpc_loss_sum *got = buffer_fetch(&sum), *want = sum.on_cpu;
            CHECK_NOTE(got->count == want->count, "%llu and %llu rows counted",
                       (unsigned long long)got->count, (unsigned long long)want->count);
            CHECK(fabs(got->total - want->total) <= 1e-5 * (double)(1 + want->count));
            check_close(&loss, 10, 8, "cross entropy");
            check_close(&lse, 10, 8, "cross entropy, lse");
            check_close(&of_rows[0], 10, 8, "cross entropy, rows");
            check_close(&dx, 2, 32, "cross entropy backward");
            fini_all((buffer *[]){&x, &ids, &lse, &dx, &loss, &sum, &dloss}, 7);
            fini_all((buffer *[]){of_rows, of_rows + 1, of_rows + 2}, 3);
        }
}

/* To the bit: one division in fp64, one product. */
static void test_loss_gradient(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t n = 0; n < SIZES; n++) {
            buffer x = buffer_random(floats[d], sizes[n], n % 3);
            buffer out = buffer_poison(floats[d], sizes[n], n % 2);
            buffer dloss = buffer_random(FSDPC_F32, 1, 0), sum = buffer_make(FSDPC_I64, 2, 0);
            *(fsdpc_loss_sum *)sum.on_cpu = (fsdpc_loss_sum){.count = n == 5 ? 0 : 3 * n + 1};
            if (sizes[n] > 3) {
                element_set(x.on_cpu, 1, floats[d], NAN);
                element_set(x.on_cpu, 2, floats[d], -INFINITY);
            }
            buffer_send(&x);
            buffer_send(&sum);
            fsdpc_loss_gradient_args args = {.dtype = floats[d], .numel = sizes[n]};
            args.x = x.on_cpu, args.out = out.on_cpu;
            args.sum = sum.on_cpu, args.dloss = dloss.on_cpu;
            CHECK_OK(on(cpu_stream)->loss_gradient(&args, cpu_stream));
            args.x = x.on_gpu, args.out = out.on_gpu;
            args.sum = sum.on_gpu, args.dloss = dloss.on_gpu;
            CHECK_OK(on(gpu_stream)->loss_gradient(&args, gpu_stream));
            check_same_bits(&out, "a loss's gradient");
            fini_all((buffer *[]){&x, &out, &dloss, &sum}, 4);
        }
}

static void test_bad_targets(void)
{
    buffer loss = buffer_poison(FSDPC_F32, 1, 0), sum = buffer_poison(FSDPC_I64, 2, 0);
    buffer x = buffer_random(FSDPC_F32, 4 * 5, 0), lse = buffer_poison(FSDPC_F32, 4, 0);
    buffer ids = buffer_make(FSDPC_I64, 4, 0);
    for (size_t r = 0; r < 4; r++)
        ((int64_t *)ids.on_cpu)[r] = r == 2 ? 5 : 1;
    buffer_send(&ids);
    fsdpc_cross_entropy_args args = {.id_dtype = FSDPC_I64, .rows = 4, .cols = 5};
    args.logits = x.on_gpu, args.targets = ids.on_gpu, args.lse = lse.on_gpu;
    args.loss = loss.on_gpu, args.sum = sum.on_gpu, args.ignore_index = -100;
    CHECK_OK(on(gpu_stream)->cross_entropy(&args, gpu_stream));
    CHECK_FAILS(fsdpc_stream_sync(gpu_stream), FSDPC_ERR_INDEX, "target 5 at row 2");
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    fsdpc_embedding_args embed = {.id_dtype = FSDPC_I64, .count = 4, .rows = 5, .dim = 4};
    embed.ids = ids.on_gpu, embed.table = x.on_gpu, embed.out = lse.on_gpu;
    embed.dim = 1;
    CHECK_OK(on(gpu_stream)->embedding(&embed, gpu_stream));
    CHECK_FAILS(fsdpc_stream_sync(gpu_stream), FSDPC_ERR_INDEX, "id 5 at index 2");
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    fini_all((buffer *[]){&x, &ids, &lse, &loss, &sum}, 5);
}

static void test_rotary(void)
{
    for (int d = 0; d < FLOATS; d++)
        for (size_t half = 1; half <= 32; half *= 2)
            for (int inverse = 0; inverse < 2; inverse++) {
                size_t numel = 2 * 5 * 3 * 2 * half;
                buffer x = buffer_random(floats[d], numel, 0),
                       y = buffer_poison(floats[d], numel, 0);
                buffer c = buffer_random(FSDPC_F32, 5 * half, 0);
                buffer s = buffer_random(FSDPC_F32, 5 * half, 0);
                fsdpc_rotary_args args = {.dtype = floats[d],
                                          .batch = 2,
                                          .tokens = 5,
                                          .heads = 3,
                                          .dim = 2 * half,
                                          .inverse = inverse};
                args.x = x.on_cpu, args.y = y.on_cpu, args.cosines = c.on_cpu,
                args.sines = s.on_cpu;
                CHECK_OK(on(cpu_stream)->rotary(&args, cpu_stream));
                args.x = x.on_gpu, args.y = y.on_gpu, args.cosines = c.on_gpu,
                args.sines = s.on_gpu;
                CHECK_OK(on(gpu_stream)->rotary(&args, gpu_stream));
                check_close(&y, 1, 2, "rotary");
                fini_all((buffer *[]){&x, &y, &c, &s}, 4);
            }
}

static void check_embedding(fsdpc_dtype dtype, fsdpc_dtype grad, size_t count, size_t rows,
                            size_t dim, bool accumulate)
{
    buffer ids = buffer_make(rows % 2 ? FSDPC_I32 : FSDPC_I64, count, 0);
    for (size_t i = 0; i < count; i++) /* some rows often, most never */
        element_set(ids.on_cpu, i, ids.dtype,
                    (double)(rig_bits() % 3 ? rig_bits() % rows : rows - 1));
    buffer_send(&ids);
    buffer table = buffer_random(dtype, rows * dim, 0), out = buffer_poison(dtype, count * dim, 0);
    buffer dout = buffer_random(dtype, count * dim, 0), dtable = buffer_random(grad, rows * dim, 0);
    fsdpc_embedding_args args = {.dtype = dtype,
                                 .id_dtype = ids.dtype,
                                 .count = count,
                                 .rows = rows,
                                 .dim = dim,
                                 .dtable_dtype = grad,
                                 .accumulate = accumulate};
    for (int side = 0; side < 2; side++) {
        fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
#define AT(buffer) (side ? (buffer).on_gpu : (buffer).on_cpu)
        args.ids = AT(ids), args.table = AT(table), args.out = AT(out);
        args.dout = AT(dout), args.dtable = AT(dtable);
#undef AT
        CHECK_OK(on(stream)->embedding(&args, stream));
        CHECK_OK(on(stream)->embedding_backward(&args, stream));
    }
    check_same_bits(&out, "embedding");
    check_same_bits(&dtable, "embedding backward");
    fini_all((buffer *[]){&ids, &table, &out, &dout, &dtable}, 5);
}

static void test_embedding(void)
{
    static const size_t shapes[][3] = {{0, 5, 8},       {1, 1, 1},        {100, 7, 12},
                                       {5000, 300, 16}, {3000, 70001, 3}, {64, 10, 520}};
    for (size_t c = 0; c < 6; c++)
        for (int d = 0; d < FLOATS; d++)
            check_embedding(floats[d], c % 2 ? FSDPC_F32 : floats[d], shapes[c][0], shapes[c][1],
                            shapes[c][2], (c + (size_t)d) % 2);
}

int main(void)
{
    static const rig_test_fn tests[] = {
        test_unary,           test_gates,       test_binary,  test_sum,      test_cumsum,
        test_sum_of_integers, test_copy,        test_softmax, test_norm,     test_cross_entropy,
        test_loss_gradient,   test_bad_targets, test_rotary,  test_embedding};
    return rig_main("test_nn_kernels", tests, sizeof tests / sizeof tests[0]);
}
