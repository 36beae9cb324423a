/* Matrix products of the GPU against the CPU's, alone and with gelu: sums have another order, and
 * tensor cores round where the CPU does not, so within the roundings that the dtype leaves.
 *
 * On a GPU they are cuBLASLt's where it is found. On the emulated device they are the plain
 * kernel's first, and then those of the fake of tests/emu, which also says what it was told.
 */
#include "gpu_rig.h"

#if defined(FSDPC_EMU)
#include "cuda/cublaslt_abi.h"
#include "fake_cublaslt.h"
#include "open_beside.h"
#endif

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
enum { FLOATS = 4 };

static const fsdpc_nn_ops *on(const fsdpc_stream *stream)
{
    return stream->device->nn;
}

static void fini_all(buffer *const *all, size_t n)
{
    for (size_t b = 0; b < n; b++)
        buffer_fini(all[b]);
}

/* A product that is rounded before something is added to it (cuBLASLt's may be): steps of fp32. */
static double rounded(fsdpc_dtype dtype)
{
    return dtype == FSDPC_BF16 ? 0x1p15 : dtype == FSDPC_F16 ? 0x1p12 : 1;
}

static void check_gemm(fsdpc_dtype dtype, fsdpc_dtype c_dtype, fsdpc_gemm_args args)
{
    size_t batch = args.batch ? args.batch : 1;
    args.dtype = dtype, args.c_dtype = c_dtype;
    args.lda = (args.trans_a ? args.m : args.k) + 8,
    args.ldb = (args.trans_b ? args.k : args.n) + 8;
    args.ldc = args.n + 8;
    args.stride_a = (args.trans_a ? args.k : args.m) * args.lda;
    args.stride_b = (args.trans_b ? args.n : args.k) * args.ldb;
    args.stride_c = args.m * args.ldc;
    buffer a = buffer_random(dtype, batch * args.stride_a, 0);
    buffer b = buffer_random(dtype, batch * args.stride_b, 0);
    buffer c = buffer_random(c_dtype, batch * args.stride_c, 0);
    buffer bias = buffer_random(dtype, args.n, 0);
    bool with_bias = args.bias != NULL;
    args.a = a.on_cpu, args.b = b.on_cpu, args.c = c.on_cpu;
    args.bias = with_bias ? bias.on_cpu : NULL;
    CHECK_OK(on(cpu_stream)->gemm(&args, cpu_stream));
    args.a = a.on_gpu, args.b = b.on_gpu, args.c = c.on_gpu;
    args.bias = with_bias ? bias.on_gpu : NULL;
    CHECK_OK(on(gpu_stream)->gemm(&args, gpu_stream));
    char what[96];
    snprintf(what, sizeof what, "gemm %zux%zux%zu x%zu%s%s%s%s", args.m, args.n, args.k, batch,
             args.trans_a ? " A^T" : "", args.trans_b ? " B^T" : "",
             args.accumulate ? " accumulate" : "", with_bias ? " bias" : "");
    check_close(&c, 1 + sqrt((double)args.k), 32 + (args.accumulate ? rounded(c_dtype) : 0), what);
    fini_all((buffer *[]){&a, &b, &c, &bias}, 4);
}

static void test_gemm(void)
{
    static const size_t shapes[][3] = {
        {1, 1, 1}, {7, 9, 5}, {64, 64, 64}, {100, 130, 70}, {3, 4, 0}};
    for (size_t s = 0; s < 5; s++)
        for (unsigned bits = 0; bits < 8; bits++)
            for (int d = 0; d < FLOATS; d++) {
                fsdpc_gemm_args args = {.m = shapes[s][0],
                                        .n = shapes[s][1],
                                        .k = shapes[s][2],
                                        .trans_a = bits & 1,
                                        .trans_b = bits & 2,
                                        .accumulate = bits & 4,
                                        .batch = bits % 3,
                                        .bias = bits % 3 == 1 ? "" : NULL};
                check_gemm(floats[d], bits & 1 && d < 3 ? FSDPC_F32 : floats[d], args);
            }
}

/* C = gelu(A B + bias), or A B gelu'(before): what lies between may be rounded by one and not by
 * the other, which counts as far as gelu is steep, 1.13 at most. */
static void check_gemm_gelu(fsdpc_dtype dtype, size_t m, size_t n, size_t k, unsigned bits)
{
    bool backward = bits & 1, with_bias = (bits & 3) == 2, keeps = backward || bits & 4;
    bool in_out = bits & 8; /* the weight's layout */
    buffer a = buffer_random(dtype, m * k, 0), b = buffer_random(dtype, k * n, 0);
    buffer bias = buffer_random(dtype, n, 0), c = buffer_poison(dtype, m * n, 0);
    buffer before = (backward ? buffer_random : buffer_poison)(dtype, m * n, 0);
    fsdpc_gemm_gelu_args args = {.backward = backward};
    args.gemm = (fsdpc_gemm_args){.m = m, .n = n, .k = k, .dtype = dtype, .c_dtype = dtype};
    args.gemm.lda = k, args.gemm.ldc = n;
    args.gemm.trans_b = backward == in_out, args.gemm.ldb = args.gemm.trans_b ? k : n;
    args.gemm.a = a.on_cpu, args.gemm.b = b.on_cpu, args.gemm.c = c.on_cpu;
    args.gemm.bias = with_bias ? bias.on_cpu : NULL;
    args.before = keeps ? before.on_cpu : NULL;
    CHECK_OK(on(cpu_stream)->gemm_gelu(&args, cpu_stream));
    args.gemm.a = a.on_gpu, args.gemm.b = b.on_gpu, args.gemm.c = c.on_gpu;
    args.gemm.bias = with_bias ? bias.on_gpu : NULL;
    args.before = keeps ? before.on_gpu : NULL;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    char what[128];
    snprintf(what, sizeof what, "gemm_gelu %zux%zux%zu%s%s%s%s", m, n, k,
             backward ? " backward" : "", with_bias ? " bias" : "", keeps ? " kept" : "",
             in_out ? " (in, out)" : "");
    check_close(&c, 1 + sqrt((double)k), 32 + 1.2 * rounded(dtype), what);
    strncat(what, ": what gelu is taken of", sizeof what - strlen(what) - 1);
    if (keeps)
        check_close(&before, 1 + sqrt((double)k), 32 + (with_bias ? rounded(dtype) : 0), what);
    fini_all((buffer *[]){&a, &b, &bias, &c, &before}, 5);
}

static void test_gemm_gelu(void)
{
    static const size_t shapes[][3] = {{1, 1, 1},    {0, 4, 3}, {7, 9, 5},     {64, 64, 64},
                                       {33, 40, 70}, {3, 8, 0}, {100, 128, 96}};
    /* the way back has neither bias nor choice */
    static const unsigned cases[] = {0, 1, 2, 4, 6, 8, 9, 10, 12, 14};
    for (size_t s = 0; s < 7; s++)
        for (int c = 0; c < 10; c++)
            for (int d = 0; d < FLOATS; d++)
                check_gemm_gelu(floats[d], shapes[s][0], shapes[s][1], shapes[s][2], cases[c]);
}

#if defined(FSDPC_EMU)
static fake_cublaslt_look_fn look;
static fake_cublaslt_refuse_fn refuse;

/* The fake lies beside the program; once it is open, the loader finds it. */
static void fake_open(void)
{
    char path[PATH_MAX];
    void *handle = open_beside("libcublasLt.so.13", path, sizeof path);
    *(void **)&look = dlsym(handle, "fake_cublaslt_look");
    *(void **)&refuse = dlsym(handle, "fake_cublaslt_refuse");
}

static fake_cublaslt_seen seen_now(void)
{
    fake_cublaslt_seen seen;
    look(&seen);
    CHECK_NOTE(seen.forbidden == 0, "%ld calls broke cuBLASLt's rules", seen.forbidden);
    return seen;
}

/* Memory that a product of so many rows and columns may stand on, 64 or less of each. */
static buffer arena;

static void *place(int i, size_t shift_bytes)
{
    return (unsigned char *)arena.on_gpu + (size_t)i * 64 * 64 * 8 + shift_bytes;
}

static fsdpc_gemm_gelu_args linear_args(fsdpc_dtype dtype, size_t n)
{
    return (fsdpc_gemm_gelu_args){.gemm = {.m = 24,
                                           .n = n,
                                           .k = 16,
                                           .dtype = dtype,
                                           .c_dtype = dtype,
                                           .a = place(0, 0),
                                           .lda = 16,
                                           .b = place(1, 0),
                                           .ldb = 16,
                                           .trans_b = true,
                                           .c = place(2, 0),
                                           .ldc = n,
                                           .bias = place(3, 0)},
                                  .before = place(4, 0)};
}

/* What cuBLASLt is told of a linear layer with gelu behind it, and of gelu's way back. */
static void test_epilogues(void)
{
    fsdpc_gemm_gelu_args args = linear_args(FSDPC_BF16, 40);
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    fake_cublaslt_seen seen = seen_now();
    CHECK_NOTE(seen.epilogue == (32 | 128 | 4), "%u", seen.epilogue);
    CHECK(seen.bias == args.gemm.bias && seen.aux == args.before && seen.aux_ld == 40);
    CHECK(seen.trans_a && !seen.trans_b && seen.beta == 0); /* row-major: the operands change */
    CHECK(seen.rows == 40 && seen.cols == 24 && seen.k == 16);

    args.before = place(5, 0); /* another address, the same product */
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    fake_cublaslt_seen again = seen_now();
    CHECK(again.aux == args.before && again.heuristics == seen.heuristics);
    CHECK(again.products == seen.products + 1);

    args.gemm.bias = NULL;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().epilogue == (32 | 128));
    args.before = NULL;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().epilogue == 32);
    args.gemm.bias = place(3, 0);
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().epilogue == (32 | 4));

    args = linear_args(FSDPC_F16, 40);
    args.backward = true, args.gemm.bias = NULL;
    args.gemm.trans_b = false, args.gemm.ldb = 40;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    seen = seen_now();
    CHECK_NOTE(seen.epilogue == (64 | 128), "%u", seen.epilogue);
    CHECK(seen.aux == args.before && seen.aux_ld == 40 && !seen.trans_a && !seen.trans_b);
}

/* Aux rows that are no multiple of 8 elements, wide dtypes, and what the heuristic has nothing for:
 * the product is cuBLASLt's without gelu. */
static void test_gelu_apart(void)
{
    fsdpc_gemm_gelu_args args = linear_args(FSDPC_BF16, 36);
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().epilogue == 4);
    args.before = NULL;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().epilogue == (32 | 4));
    for (int wide = 0; wide < 2; wide++) {
        args = linear_args(wide ? FSDPC_F64 : FSDPC_F32, 40);
        CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
        CHECK(seen_now().epilogue == 4);
    }

    refuse(32 | 128 | 4);
    args = linear_args(FSDPC_F16, 40);
    for (int i = 0; i < 2; i++) { /* which is remembered */
        CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
        CHECK(seen_now().epilogue == 4);
    }
    long heuristics = seen_now().heuristics;
    CHECK_OK(on(gpu_stream)->gemm_gelu(&args, gpu_stream));
    CHECK(seen_now().heuristics == heuristics);
    check_gemm_gelu(FSDPC_F16, 34, 40, 70, 6);
    CHECK(seen_now().epilogue == 4);
    refuse(64 | 128);
    check_gemm_gelu(FSDPC_BF16, 34, 40, 70, 1);
    CHECK(seen_now().epilogue == 1);
    refuse(0);
}

/* A weight's gradient, dy^T x added to a reduce buffer in fp32, and a bias's alignment. */
static void test_products(void)
{
    fsdpc_gemm_args dw = linear_args(FSDPC_BF16, 40).gemm;
    dw.trans_a = true, dw.trans_b = false, dw.lda = 24, dw.ldb = 40, dw.bias = NULL;
    dw.c_dtype = FSDPC_F32, dw.accumulate = true;
    CHECK_OK(on(gpu_stream)->gemm(&dw, gpu_stream));
    fake_cublaslt_seen seen = seen_now();
    CHECK(seen.epilogue == 1 && seen.beta == 1 && !seen.trans_a && seen.trans_b);
    dw.c_dtype = FSDPC_BF16; /* a gradient of activations, added to another's */
    CHECK_OK(on(gpu_stream)->gemm(&dw, gpu_stream));
    CHECK(seen_now().products == seen.products + 1 && seen_now().beta == 1);

    fsdpc_gemm_args g = linear_args(FSDPC_BF16, 40).gemm;
    CHECK_OK(on(gpu_stream)->gemm(&g, gpu_stream));
    long heuristics = seen_now().heuristics;
    CHECK(seen_now().epilogue == 4 && seen_now().bias == g.bias);
    g.bias = place(3, 4); /* a choice of its own, made for that */
    CHECK_OK(on(gpu_stream)->gemm(&g, gpu_stream));
    g.bias = place(4, 4);
    CHECK_OK(on(gpu_stream)->gemm(&g, gpu_stream));
    CHECK(seen_now().heuristics == heuristics + 1 && seen_now().bias == g.bias);
}

static void test_told(void)
{
    arena = buffer_random(FSDPC_F64, 6 * 64 * 64, 0);
    test_epilogues();
    test_gelu_apart();
    test_products();
    CHECK_OK(fsdpc_stream_sync(gpu_stream));
    buffer_fini(&arena);
}
#endif

int main(void)
{
    static const rig_test_fn tests[] = {test_gemm, test_gemm_gelu};
    int failed = rig_main("test_product_kernels", tests, sizeof tests / sizeof tests[0]);
#if defined(FSDPC_EMU)
    static const rig_test_fn more[] = {test_gemm, test_gemm_gelu, test_told};
    fake_open();
    failed += rig_round("over the fake", more, sizeof more / sizeof more[0], false);
    CHECK_NOTE(seen_now().left == 0, "%ld objects of cuBLASLt are left", seen_now().left);
    failed += check_report("the fake cuBLASLt");
#endif
    return failed;
}
