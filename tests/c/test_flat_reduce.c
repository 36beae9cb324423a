/* reduce: the tree against a recursive definition of it, for every dtype, number of sources and
 * size. */
#include "test_flat_common.h"

enum { SRCS_MAX = 70 };

/* The header's tree, as recursion: level by level, an odd one passes up unchanged. That splits n
 * at the largest power of two below it. */
static double tree(const double *values, int n, fsdpc_dtype dtype)
{
    if (n == 1)
        return values[0];
    int half = 1;
    while (half * 2 < n)
        half *= 2;
    double left = tree(values, half, dtype), right = tree(values + half, n - half, dtype);
    return dtype == FSDPC_F64 ? left + right : (double)((float)left + (float)right);
}

static double expected(const fsdpc_reduce_args *a, size_t i, double before)
{
    double values[SRCS_MAX];
    for (int k = 0; k < a->n_srcs; k++)
        values[k] = element(a->srcs[k], i, a->dtype);
    double sum = tree(values, a->n_srcs, a->dtype), scaled = sum * (double)a->scale;
    if (a->dtype != FSDPC_F64)
        scaled = (double)((float)sum * (float)a->scale);
    double value = round_as(round_as(scaled, a->round_dtype), a->out_dtype);
    if (!a->accumulate)
        return value;
    if (a->out_dtype == FSDPC_F64)
        return before + value;
    return round_as((double)((float)before + (float)value), a->out_dtype);
}

typedef struct sources {
    void *data[SRCS_MAX];
} sources;

static void sources_init(sources *s, int n, size_t numel, fsdpc_dtype dtype)
{
    for (int k = 0; k < n; k++) {
        s->data[k] = test_alloc(numel * fsdpc_dtype_bytes(dtype));
        fill_random(s->data[k], numel, dtype, (uint64_t)k * 1000);
    }
}

static void sources_fini(sources *s, int n)
{
    for (int k = 0; k < n; k++)
        free(s->data[k]);
}

/* Runs it whole, checks every element, then in random cuts, and compares bits. */
static void test_case(rig *r, const sources *s, int n, fsdpc_dtype dtype, fsdpc_dtype out_dtype,
                      size_t numel, bool accumulate)
{
    size_t bytes = numel * fsdpc_dtype_bytes(out_dtype);
    void *before = test_alloc(bytes), *out = test_alloc(bytes + 1), *cut = test_alloc(bytes);
    fill_random(before, numel, out_dtype, 99);
    memcpy(out, before, bytes);
    memcpy(cut, before, bytes);
    ((char *)out)[bytes] = 77;
    fsdpc_dtype wide = dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    fsdpc_reduce_args args = {.srcs = (const void *const *)s->data,
                              .n_srcs = n,
                              .dtype = dtype,
                              .numel = numel,
                              .scale = 1.0 / n,
                              .round_dtype = numel % 3 ? dtype
                                             : n % 2   ? FSDPC_BF16
                                                       : wide,
                              .out = out,
                              .out_dtype = out_dtype,
                              .accumulate = accumulate};
    CHECK_OK(r->ops->reduce(&args, &r->stream));
    size_t wrong = 0;
    for (size_t i = 0; i < numel; i++)
        wrong += !same_value(element(out, i, out_dtype),
                             expected(&args, i, element(before, i, out_dtype)));
    CHECK_NOTE(wrong == 0, "%d x %s -> %s, %zu elements, accumulate %d: %zu wrong", n,
               fsdpc_dtype_name(dtype), fsdpc_dtype_name(out_dtype), numel, accumulate, wrong);
    CHECK(((char *)out)[bytes] == 77);

    uint64_t state = numel + (uint64_t)n;
    for (size_t at = 0, take; at < numel; at += take) {
        const void *moved[SRCS_MAX];
        take = 1 + random_bits(&state) % (numel / 2 + 20);
        take = take > numel - at ? numel - at : take;
        for (int k = 0; k < n; k++)
            moved[k] = at_element(s->data[k], at, dtype);
        fsdpc_reduce_args part = args;
        part.srcs = moved, part.numel = take, part.out = at_element(cut, at, out_dtype);
        CHECK_OK(r->ops->reduce(&part, &r->stream));
    }
    CHECK(memcmp(cut, out, bytes) == 0);
    free(before), free(out), free(cut);
}

static void test_all(rig *r)
{
    const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, SRCS_MAX};
    const size_t sizes[] = {0, 1, 17, 1023, 2100};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
        for (size_t d = 0; d < 4; d++) {
            sources s;
            sources_init(&s, counts[c], 2100, all_floats[d]);
            for (size_t o = 0; o < 4; o++)
                for (size_t z = 0; z < sizeof sizes / sizeof sizes[0]; z++)
                    test_case(r, &s, counts[c], all_floats[d], all_floats[o], sizes[z],
                              (z + c + o) % 2);
            sources_fini(&s, counts[c]);
        }
    for (int n = 1; n <= 5; n++) {
        sources s;
        sources_init(&s, n, LARGE_NUMEL, FSDPC_BF16);
        test_case(r, &s, n, FSDPC_BF16, FSDPC_F32, LARGE_NUMEL, n % 2);
        sources_fini(&s, n);
    }
}

/* Outputs long enough to be written past the cache. */
static void test_streamed(rig *r)
{
    enum { N = (1 << 20) + 333 };
    sources s;
    sources_init(&s, 5, N, FSDPC_F32);
    float *out = aligned_alloc(64, (N * 4 + 63) / 64 * 64);
    for (int n = 1; n <= 5; n++) {
        fsdpc_reduce_args args = {
            (const void *const *)s.data, n, FSDPC_F32, N, 0.3f, FSDPC_F32, out, FSDPC_F32, false};
        CHECK_OK(r->ops->reduce(&args, &r->stream));
        size_t wrong = 0;
        for (size_t i = 0; i < N; i++)
            wrong += !same_value((double)out[i], expected(&args, i, 0));
        CHECK_NOTE(wrong == 0, "%d sources: %zu", n, wrong);
    }
    sources_fini(&s, 5);
    free(out);
}

/* In place over a source, and what is not a number stays none. */
static void test_in_place_and_nan(rig *r)
{
    float a[40], b[40];
    for (int i = 0; i < 40; i++)
        a[i] = (float)i, b[i] = 100;
    a[3] = NAN, a[20] = INFINITY, b[21] = -INFINITY, a[21] = INFINITY;
    const void *srcs[] = {a, b};
    fsdpc_reduce_args args = {srcs, 2, FSDPC_F32, 40, 0.5f, FSDPC_F32, a, FSDPC_F32, false};
    CHECK_OK(r->ops->reduce(&args, &r->stream));
    CHECK(a[0] == 50 && a[39] == 69.5f);
    CHECK(isnan(a[3]) && isinf(a[20]) && isnan(a[21]));
    args.n_srcs = 0;
    CHECK_FAILS(r->ops->reduce(&args, &r->stream), FSDPC_ERR_VALUE, "at least one source");
    args.n_srcs = 1, args.dtype = FSDPC_I32;
    CHECK_FAILS(r->ops->reduce(&args, &r->stream), FSDPC_ERR_DTYPE, "int32");
    args.dtype = FSDPC_BF16;
    CHECK_FAILS(r->ops->reduce(&args, &r->stream), FSDPC_ERR_VALUE, "in place");
}

int main(void)
{
    fsdpc_isa isas[FSDPC_ISA_COUNT];
    int n_isas = usable_isas(isas);
    for (int k = 0; k < 2 * n_isas; k++) {
        rig r;
        rig_init(&r, isas[k / 2], k % 2 ? 3 : 1);
        test_all(&r);
        test_streamed(&r);
        test_in_place_and_nan(&r);
        rig_fini(&r);
    }
    return check_report("flat_reduce");
}
