/* Matrix products against an fp64 reference, on every instruction set this machine has.
 *
 * Tolerance. A sum of k products in fp32, in any order, with or without fused steps, differs from
 * the exact one by at most gamma = n u / (1 - n u) times the sum of magnitudes, u = 2^-24 (2^-53
 * for F64), n = k + 3 with product, bias and C (Higham, Accuracy and Stability, 3.1). Rounding to
 * the dtype of C adds half a unit in its last place. AMX and vdpbf16ps flush subnormals: 2^-120
 * covers it. Nothing is fitted to what the kernels happen to give.
 */
#include <math.h>

#include "base/size.h"
#include "base/team.h"
#include "check.h"
#include "ops/gemm.h"

typedef struct rig {
    fsdpc_mem *mem;
    fsdpc_device device;
    fsdpc_stream stream;
} rig;

static uint32_t seed = 1;

static uint32_t draw(uint32_t below)
{
    seed = seed * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(seed >> 4) * below >> 28);
}

static double get(const void *x, size_t i, fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return ((const float *)x)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)x)[i]);
    case FSDPC_F16:
        return fsdpc_f16_to_f32(((const uint16_t *)x)[i]);
    default:
        return ((const double *)x)[i];
    }
}

static void put(void *x, size_t i, fsdpc_dtype dtype, double value)
{
    if (dtype == FSDPC_F32)
        ((float *)x)[i] = (float)value;
    else if (dtype == FSDPC_BF16)
        ((uint16_t *)x)[i] = fsdpc_f32_to_bf16((float)value);
    else if (dtype == FSDPC_F16)
        ((uint16_t *)x)[i] = fsdpc_f32_to_f16((float)value);
    else
        ((double *)x)[i] = value;
}

static double half_unit(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F32    ? 0x1p-24
           : dtype == FSDPC_BF16 ? 0x1p-8
           : dtype == FSDPC_F16  ? 0x1p-11
                                 : 0x1p-53;
}

/* Exactly as long as needed, so that a sanitizer sees any read or write beyond. */
static void *fresh(size_t numel, fsdpc_dtype dtype)
{
    void *x = malloc(numel * fsdpc_dtype_bytes(dtype) + (numel == 0));
    for (size_t i = 0; i < numel; i++)
        put(x, i, dtype, ((double)draw(1 << 20) - (1 << 19)) / (1 << 19));
    return x;
}

static size_t extent(size_t batch, size_t stride, size_t rows, size_t cols, size_t ld)
{
    return rows && cols ? (batch - 1) * stride + (rows - 1) * ld + cols : 0;
}

typedef struct problem {
    fsdpc_gemm_args args;
    size_t a_numel, b_numel, c_numel;
    void *a, *b, *bias, *c_before, *c;
} problem;

/* Sizes, dtypes, transposes and flags are in `args`; the rest is made up here. */
static problem problem_make(fsdpc_gemm_args args, bool with_bias, size_t pad)
{
    size_t batch = fsdpc_max_size(args.batch, 1);
    size_t a_rows = args.trans_a ? args.k : args.m, a_cols = args.trans_a ? args.m : args.k;
    size_t b_rows = args.trans_b ? args.n : args.k, b_cols = args.trans_b ? args.k : args.n;
    args.lda = a_cols + pad;
    args.ldb = b_cols + 2 * pad;
    args.ldc = args.n + 3 * pad;
    if (batch > 1) {
        args.stride_a = a_rows * args.lda + pad;
        args.stride_b = pad ? b_rows * args.ldb + pad : 0;
        args.stride_c = args.m * args.ldc + pad;
    }
    problem p = {.a_numel = extent(batch, args.stride_a, a_rows, a_cols, args.lda),
                 .b_numel = extent(batch, args.stride_b, b_rows, b_cols, args.ldb),
                 .c_numel = extent(batch, args.stride_c, args.m, args.n, args.ldc)};
    args.a = p.a = fresh(p.a_numel, args.dtype);
    args.b = p.b = fresh(p.b_numel, args.dtype);
    args.bias = p.bias = with_bias ? fresh(args.n, args.dtype) : NULL;
    args.c = p.c = fresh(p.c_numel, args.c_dtype);
    size_t bytes = p.c_numel * fsdpc_dtype_bytes(args.c_dtype);
    p.c_before = malloc(bytes + 1);
    memcpy(p.c_before, p.c, bytes);
    p.args = args;
    return p;
}

static void problem_free(problem *p)
{
    free(p->a);
    free(p->b);
    free(p->bias);
    free(p->c_before);
    free(p->c);
}

/* `rows` rows of g->k doubles, one behind the other: x[row * along_row + q * along_k]. */
static double *unpacked(const fsdpc_gemm_args *g, const void *x, size_t rows, size_t along_row,
                        size_t along_k)
{
    double *wide = malloc((rows * g->k + 1) * sizeof(double));
    for (size_t row = 0; row < rows; row++)
        for (size_t q = 0; q < g->k; q++)
            wide[row * g->k + q] = get(x, row * along_row + q * along_k, g->dtype);
    return wide;
}

typedef struct reference {
    double sum, size; /* and the sum of magnitudes */
} reference;

/* Adds the product of two rows. All of the test's time is here, in memory of its own: no place for
 * a sanitizer's calls, which made the test three times as long. */
__attribute__((no_sanitize("address"), no_sanitize("thread"))) static void
add_dot(reference *r, const double *a, const double *b, size_t k)
{
    double sum = r->sum, size = r->size;
    for (size_t q = 0; q < k; q++) {
        double term = a[q] * b[q];
        sum += term;
        size += fabs(term);
    }
    *r = (reference){sum, size};
}

/* How many elements of C's matrix z are further from the reference than they may be. Marks all of
 * them in `expected`. */
static size_t wrong_in(const problem *p, size_t z, char *expected)
{
    const fsdpc_gemm_args *g = &p->args;
    size_t element = fsdpc_dtype_bytes(g->dtype), bad = 0;
    double *a = unpacked(g, (char *)p->a + z * g->stride_a * element, g->m, g->trans_a ? 1 : g->lda,
                         g->trans_a ? g->lda : 1);
    double *b = unpacked(g, (char *)p->b + z * g->stride_b * element, g->n, g->trans_b ? g->ldb : 1,
                         g->trans_b ? 1 : g->ldb);
    double u = g->dtype == FSDPC_F64 ? 0x1p-53 : 0x1p-24;
    double gamma = (double)(g->k + 3) * u / (1 - (double)(g->k + 3) * u);
    for (size_t i = 0; i < g->m; i++)
        for (size_t j = 0; j < g->n; j++) {
            size_t at = z * g->stride_c + i * g->ldc + j;
            double bias = g->bias ? get(g->bias, j, g->dtype) : 0;
            double before = g->accumulate ? get(p->c_before, at, g->c_dtype) : 0;
            reference r = {bias + before, fabs(bias) + fabs(before)};
            add_dot(&r, a + i * g->k, b + j * g->k, g->k);
            double slack = gamma * r.size + 0x1p-120;
            slack += half_unit(g->c_dtype) * (fabs(r.sum) + slack);
            if (g->c_dtype == FSDPC_F16)
                slack += 0x1p-25; /* half a subnormal */
            if (!(fabs(get(p->c, at, g->c_dtype) - r.sum) <= slack))
                bad++;
            expected[at] = 1;
        }
    free(a);
    free(b);
    return bad;
}

/* How many elements of C are further from the reference than they may be, or were not to be
 * touched. */
static size_t wrong(const problem *p)
{
    char *expected = calloc(p->c_numel + 1, 1); /* which elements belong to C */
    size_t bad = 0, bytes = fsdpc_dtype_bytes(p->args.c_dtype);
    for (size_t z = 0; z < fsdpc_max_size(p->args.batch, 1); z++)
        bad += wrong_in(p, z, expected);
    for (size_t i = 0; i < p->c_numel; i++)
        if (!expected[i] &&
            memcmp((char *)p->c + i * bytes, (char *)p->c_before + i * bytes, bytes))
            bad++;
    free(expected);
    return bad;
}

static void try_one(rig *r, fsdpc_gemm_args args, bool with_bias, size_t pad)
{
    problem p = problem_make(args, with_bias, pad);
    CHECK_OK(fsdpc_gemm_cpu(&p.args, &r->stream));
    size_t bad = wrong(&p);
    CHECK_NOTE(bad == 0,
               "%s %s -> %s, m %zu n %zu k %zu batch %zu, trans %d %d, accumulate %d, bias %d, pad "
               "%zu: %zu wrong",
               fsdpc_isa_name(r->device.isa), fsdpc_dtype_name(args.dtype),
               fsdpc_dtype_name(args.c_dtype), args.m, args.n, args.k, args.batch, args.trans_a,
               args.trans_b, args.accumulate, with_bias, pad, bad);
    problem_free(&p);
}

/* Sizes around every tile (4, 6, 14, 16, 32) and block of k (256, 384, 512, 768), forms, dtypes. */
static void test_forms(rig *r)
{
    static const size_t sizes[] = {0,  1,  2,  3,  4,  5,  6,  7,  8, 13,
                                   14, 15, 16, 17, 28, 31, 32, 33, 65};
    static const size_t depths[] = {0,  1,  2,  3,   15,  16,  17,  31, 32,
                                    33, 64, 70, 255, 257, 385, 513, 800};
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    for (int round = 0; round < 600; round++) {
        uint32_t flags = draw(32);
        fsdpc_gemm_args args = {.dtype = dtypes[draw(5)]};
        args.c_dtype = flags & 1 ? FSDPC_F32 : args.dtype;
        args.trans_a = flags & 2;
        args.trans_b = flags & 4;
        args.accumulate = flags & 8;
        args.m = sizes[draw(19)];
        args.n = sizes[draw(19)];
        args.k = depths[draw(17)];
        args.batch = draw(8) ? 0 : 1 + draw(4);
        try_one(r, args, flags & 16, draw(3));
    }
}

/* Several blocks of rows, columns and k at once; a large product is one that needs a second slab.
 */
static void test_large(rig *r)
{
    for (int form = 0; form < 4; form++)
        for (int half = 0; half < 2; half++)
            try_one(r,
                    (fsdpc_gemm_args){.m = 270,
                                      .n = 555,
                                      .k = 539,
                                      .dtype = half ? FSDPC_BF16 : FSDPC_F32,
                                      .c_dtype = half && form < 2 ? FSDPC_BF16 : FSDPC_F32,
                                      .trans_a = form & 1,
                                      .trans_b = form & 2,
                                      .accumulate = form == 3},
                    true, 1);
    try_one(
        r, (fsdpc_gemm_args){.m = 70, .n = 9, .k = 66000, .dtype = FSDPC_F32, .c_dtype = FSDPC_F32},
        false, 0);
}

/* bf16 partial sums would show: C in bf16 must be the rounded C of fp32, whatever k. */
static void test_rounds_once(rig *r)
{
    static const size_t shapes[][3] = {{1, 40, 1000}, {33, 47, 1500}, {100, 3, 700}, {64, 600, 90}};
    for (size_t s = 0; s < 4; s++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            fsdpc_gemm_args args = {.m = shapes[s][0],
                                    .n = shapes[s][1],
                                    .k = shapes[s][2],
                                    .dtype = FSDPC_BF16,
                                    .c_dtype = FSDPC_BF16,
                                    .trans_b = true,
                                    .accumulate = accumulate};
            problem p = problem_make(args, true, 0);
            float *wide = malloc(p.c_numel * sizeof(float));
            for (size_t i = 0; i < p.c_numel; i++)
                wide[i] = (float)get(p.c, i, FSDPC_BF16);
            CHECK_OK(fsdpc_gemm_cpu(&p.args, &r->stream));
            args = p.args;
            args.c = wide;
            args.c_dtype = FSDPC_F32;
            CHECK_OK(fsdpc_gemm_cpu(&args, &r->stream));
            size_t differ = 0;
            for (size_t i = 0; i < p.c_numel; i++)
                differ += ((uint16_t *)p.c)[i] != fsdpc_f32_to_bf16(wide[i]);
            CHECK_NOTE(differ == 0, "%s shape %zu: %zu", fsdpc_isa_name(r->device.isa), s, differ);
            free(wide);
            problem_free(&p);
        }
}

/* Same bits with 1, 2, 3 and 7 threads, twice each. */
static void test_threads(rig *r)
{
    static const size_t shapes[][4] = {{200, 333, 700, 0},
                                       {1, 3000, 500, 0},
                                       {700, 40, 129, 0},
                                       {2000, 2, 300, 0},
                                       {40, 50, 60, 9}};
    for (size_t s = 0; s < 5; s++)
        for (int form = 0; form < 8; form++) {
            fsdpc_dtype dtype = form & 4 ? FSDPC_BF16 : FSDPC_F32;
            problem p = problem_make((fsdpc_gemm_args){.m = shapes[s][0],
                                                       .n = shapes[s][1],
                                                       .k = shapes[s][2],
                                                       .batch = shapes[s][3],
                                                       .dtype = dtype,
                                                       .c_dtype = dtype,
                                                       .trans_a = form & 1,
                                                       .trans_b = form & 2},
                                     true, 0);
            size_t bytes = p.c_numel * fsdpc_dtype_bytes(dtype);
            CHECK_OK(fsdpc_gemm_cpu(&p.args, &r->stream));
            memcpy(p.c_before, p.c, bytes);
            for (int threads = 1; threads <= 7; threads += threads < 3 ? 1 : 4) {
                fsdpc_team *team;
                CHECK_OK(fsdpc_team_create(threads, &team));
                r->device.team = team;
                for (int again = 0; again < 2; again++) {
                    memset(p.c, 0, bytes);
                    CHECK_OK(fsdpc_gemm_cpu(&p.args, &r->stream));
                    CHECK_NOTE(memcmp(p.c, p.c_before, bytes) == 0,
                               "%s shape %zu form %d threads %d", fsdpc_isa_name(r->device.isa), s,
                               form, threads);
                }
                r->device.team = NULL;
                fsdpc_team_destroy(team);
            }
            problem_free(&p);
        }
}

/* Batches that share operands: B, A, or C (products take turns and add up). */
static void test_shared(rig *r)
{
    for (int threads = 1; threads <= 3; threads += 2) {
        CHECK_OK(fsdpc_team_create(threads, &r->device.team));
        float a[5 * 6 * 8], b[8 * 7], c[6 * 7] = {0}, once[6 * 7] = {0};
        for (size_t i = 0; i < 5 * 6 * 8; i++)
            a[i] = (float)draw(16); /* small integers: sums are exact in any order */
        for (size_t i = 0; i < 8 * 7; i++)
            b[i] = (float)draw(16);
        fsdpc_gemm_args args = {.m = 6,
                                .n = 7,
                                .k = 8,
                                .a = a,
                                .lda = 8,
                                .b = b,
                                .ldb = 7,
                                .c = c,
                                .ldc = 7,
                                .accumulate = true,
                                .batch = 5,
                                .stride_a = 48};
        CHECK_OK(fsdpc_gemm_cpu(&args, &r->stream));
        for (size_t z = 0; z < 5; z++)
            for (size_t i = 0; i < 6; i++)
                for (size_t j = 0; j < 7; j++)
                    for (size_t k = 0; k < 8; k++)
                        once[i * 7 + j] += a[z * 48 + i * 8 + k] * b[k * 7 + j];
        CHECK(memcmp(c, once, sizeof c) == 0);
        fsdpc_team_destroy(r->device.team);
        r->device.team = NULL;
    }
}

/* Padding must not spread an infinity: only the row of A and the column of B that hold one notice.
 */
static void test_infinity(rig *r)
{
    for (int form = 0; form < 8; form++) {
        fsdpc_dtype dtype = form & 4 ? FSDPC_BF16 : FSDPC_F32;
        problem p = problem_make((fsdpc_gemm_args){.m = 37,
                                                   .n = 45,
                                                   .k = 51,
                                                   .dtype = dtype,
                                                   .c_dtype = dtype,
                                                   .trans_a = form & 1,
                                                   .trans_b = form & 2},
                                 false, 0);
        put(p.a, form & 1 ? 50 * 37 + 36 : 36 * 51 + 50, dtype, INFINITY);
        put(p.b, form & 2 ? 44 * 51 + 50 : 50 * 45 + 44, dtype, NAN);
        CHECK_OK(fsdpc_gemm_cpu(&p.args, &r->stream));
        size_t bad = 0;
        for (size_t i = 0; i < 37; i++)
            for (size_t j = 0; j < 45; j++)
                bad += (bool)isfinite(get(p.c, i * 45 + j, dtype)) == (i == 36 || j == 44);
        CHECK_NOTE(bad == 0, "%s form %d", fsdpc_isa_name(r->device.isa), form);
        problem_free(&p);
    }
}

/* Results around 2^-126, made of normal operands, and NaN and infinity: bf16 results are the
 * rounded ones of fp32 as base/dtype.h rounds, bit by bit, in tiles that are whole and in those
 * that are not; so a row does not tell of how many rows C is. (Up to four rows have kernels of
 * their own.)
 */
static void test_extremes(rig *r)
{
    enum { M = 70, N = 70, K = 40 };
    uint16_t a[M * K], b[N * K], whole[M * N], part[M * N];
    float wide[M * N];
    for (size_t i = 0; i < M * K; i++)
        a[i] = fsdpc_f32_to_bf16(ldexpf((float)draw(512) - 256, -72));
    for (size_t i = 0; i < N * K; i++)
        b[i] = fsdpc_f32_to_bf16(ldexpf((float)draw(512) - 256, -72));
    a[K + 7] = 0x7f80; /* infinity */
    b[9 * K + 3] = 0xffc5;
    fsdpc_gemm_args args = {.m = M,
                            .n = N,
                            .k = K,
                            .dtype = FSDPC_BF16,
                            .c_dtype = FSDPC_F32,
                            .trans_b = true,
                            .a = a,
                            .lda = K,
                            .b = b,
                            .ldb = K,
                            .c = wide,
                            .ldc = N};
    CHECK_OK(fsdpc_gemm_cpu(&args, &r->stream));
    args.c_dtype = FSDPC_BF16;
    args.c = whole;
    CHECK_OK(fsdpc_gemm_cpu(&args, &r->stream));
    size_t small = 0, subnormal = 0, nan = 0, differ = 0;
    for (size_t i = 0; i < M * N; i++) {
        small += fabsf(wide[i]) < 0x1p-120f;
        subnormal += fpclassify(wide[i]) == FP_SUBNORMAL;
        nan += (bool)isnan(wide[i]);
        differ += whole[i] != fsdpc_f32_to_bf16(wide[i]);
    }
    CHECK_NOTE(small > M * N / 2 && nan >= M && differ == 0, "%s: %zu small, %zu nan, %zu differ",
               fsdpc_isa_name(r->device.isa), small, nan, differ);
    /* what lets finish_pairs leave the rounding to an instruction that flushes */
    CHECK((subnormal == 0) == (r->device.isa >= FSDPC_ISA_AVX512BF16));

    args.c = part;
    for (size_t m = 5; m < M; m += 13)
        for (size_t n = 5; n < N; n += 13) {
            args.m = m;
            args.n = n;
            CHECK_OK(fsdpc_gemm_cpu(&args, &r->stream));
            differ = 0;
            for (size_t i = 0; i < m; i++)
                differ += memcmp(part + i * N, whole + i * N, n * sizeof(uint16_t)) != 0;
            CHECK_NOTE(differ == 0, "%s m %zu n %zu: %zu rows differ",
                       fsdpc_isa_name(r->device.isa), m, n, differ);
        }
}

static void test_refusals(rig *r)
{
    float x[64] = {0};
    fsdpc_gemm_args good = {
        .m = 4, .n = 4, .k = 4, .a = x, .lda = 4, .b = x + 16, .ldb = 4, .c = x + 32, .ldc = 4};
    CHECK_OK(fsdpc_gemm_cpu(&good, &r->stream));
    fsdpc_gemm_args bad = good;
    bad.dtype = bad.c_dtype = FSDPC_I32;
    CHECK_FAILS(fsdpc_gemm_cpu(&bad, &r->stream), FSDPC_ERR_DTYPE, "int32");
    bad = good;
    bad.c_dtype = FSDPC_BF16;
    CHECK_FAILS(fsdpc_gemm_cpu(&bad, &r->stream), FSDPC_ERR_DTYPE, "bfloat16");
    bad = good;
    bad.lda = 3;
    CHECK_FAILS(fsdpc_gemm_cpu(&bad, &r->stream), FSDPC_ERR_SHAPE, "lda 3");
    bad = good;
    bad.ldc = 2;
    CHECK_FAILS(fsdpc_gemm_cpu(&bad, &r->stream), FSDPC_ERR_SHAPE, "ldc 2");
}

int main(void)
{
    rig r = {.device.isa = FSDPC_ISA_PORTABLE};
    CHECK_OK(fsdpc_mem_create(&r.mem));
    r.device.mem = r.mem;
    r.stream.device = &r.device;
    for (int isa = 0; isa <= (int)fsdpc_isa_best(); isa++) {
        r.device.isa = (fsdpc_isa)isa;
        test_forms(&r);
        test_large(&r);
        test_rounds_once(&r);
        test_threads(&r);
        test_shared(&r);
        test_infinity(&r);
        test_extremes(&r);
    }
    test_refusals(&r);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r.mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_OTHER] == 0); /* every call gave its workspace back */
    fsdpc_mem_destroy(r.mem);
    return check_report("gemm");
}
