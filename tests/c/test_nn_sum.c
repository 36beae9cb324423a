/* Sums over dimensions against double: bias gradients, means, full sums. */
#include "nn_rig.h"

typedef struct sum_case {
    int ndim;
    size_t shape[4];
    bool reduced[4];
} sum_case;

static void test_sum(nn_rig *rig, fsdpc_dtype dtype, fsdpc_dtype out_dtype, const sum_case *c,
                     bool accumulate, bool squares)
{
    fsdpc_sum_args args = {
        .dtype = dtype, .out_dtype = out_dtype, .ndim = c->ndim, .scale = 0.25, .squares = squares};
    size_t numel = 1, outputs = 1, stride_out[4];
    for (int d = c->ndim - 1; d >= 0; d--) {
        numel *= args.shape[d] = c->shape[d];
        args.reduced[d] = c->reduced[d];
        stride_out[d] = c->reduced[d] ? 0 : outputs;
        outputs *= c->reduced[d] ? 1 : c->shape[d];
    }
    buffer x = buffer_noise(dtype, numel, 1, -1, 2),
           out = buffer_noise(out_dtype, outputs, 2, 0, 1);
    double *want = calloc(outputs + 1, sizeof *want), *size = calloc(outputs + 1, sizeof *size);
    for (size_t i = 0; i < numel; i++) {
        size_t at = 0, rest = i;
        for (int d = c->ndim - 1; d >= 0; rest /= c->shape[d--])
            at += rest % c->shape[d] * stride_out[d];
        double term = buffer_get(&x, i) * 0.25 * (squares ? buffer_get(&x, i) : 1);
        want[at] += term;
        size[at] += fabs(term);
    }
    for (size_t i = 0; i < outputs; i++)
        want[i] += accumulate ? buffer_get(&out, i) : 0;
    args.accumulate = accumulate;
    args.x = x.data;
    args.out = out.data;
    CHECK_OK(rig->ops->sum(&args, rig->stream));
    buffer_check(rig, &out, "sum");
    bool wide = dtype == FSDPC_F64 && out_dtype == FSDPC_F64;
    for (size_t i = 0; i < outputs; i++) /* long sums are of short ones: about 100 roundings deep */
        check_near(rig, "sum", out_dtype, i, buffer_get(&out, i), want[i],
                   tolerance(out_dtype, want[i], 1, 2) + size[i] * (wide ? 1e-13 : 2e-6));
    buffer_free(&x);
    buffer_free(&out);
    free(want);
    free(size);
}

static void test_cumsum(nn_rig *rig, fsdpc_dtype dtype, size_t outer, size_t extent, size_t inner,
                        bool reverse)
{
    size_t numel = outer * extent * inner;
    bool is_int = dtype > FSDPC_F64;
    buffer x = buffer_noise(dtype, numel, 3, is_int ? -50 : -1, is_int ? 50 : 2);
    buffer out = buffer_make(dtype, numel);
    fsdpc_cumsum_args args = {dtype, outer, extent, inner, reverse, x.data, out.data};
    CHECK_OK(rig->ops->cumsum(&args, rig->stream));
    buffer_check(rig, &out, "cumsum");
    for (size_t line = 0; line < outer * inner; line++) {
        double total = 0;
        for (size_t e = 0; e < extent; e++) {
            size_t along = reverse ? extent - 1 - e : e;
            size_t i = (line / inner * extent + along) * inner + line % inner;
            total += buffer_get(&x, i);
            check_near(rig, "cumsum", dtype, i, buffer_get(&out, i), total,
                       is_int ? 0 : tolerance(dtype, total, fabs(total), 1) + 1e-12);
        }
    }
    buffer_free(&x);
    buffer_free(&out);
}

static void suite(nn_rig *rig)
{
    const size_t lines[][3] = {{0, 5, 3},    {3, 0, 4},    {1, 1, 1},
                               {19, 300, 1}, {3, 40, 270}, {1, 9000, 1}};
    const fsdpc_dtype summed[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16,
                                  FSDPC_F64, FSDPC_I32,  FSDPC_I64};
    for (size_t d = 0; d < 6; d++)
        for (size_t c = 0; c < 6; c++)
            test_cumsum(rig, summed[d], lines[c][0], lines[c][1], lines[c][2], c % 2);
    fsdpc_cumsum_args flags = {.dtype = FSDPC_BOOL, .outer = 1, .extent = 1, .inner = 1};
    CHECK_FAILS(rig->ops->cumsum(&flags, rig->stream), FSDPC_ERR_DTYPE, "bool");
    const sum_case cases[] = {
        {0, {0}, {0}},
        {1, {0}, {0}},
        {1, {0}, {1}},
        {1, {1}, {1}},
        {1, {17}, {1}},
        {1, {100003}, {1}},
        {2, {0, 5}, {1, 0}},
        {2, {33, 5}, {1, 0}},
        {2, {33, 50}, {0, 1}},
        {2, {1000, 770}, {1, 0}},
        {2, {70, 5000}, {0, 1}},
        {3, {4, 30, 19}, {1, 0, 1}},
        {3, {4, 30, 19}, {0, 1, 0}},
        {4, {3, 7, 5, 40}, {1, 0, 1, 0}},
        {4, {3, 7, 5, 40}, {0, 1, 0, 1}},
        {4, {3, 1, 5, 40}, {1, 1, 1, 1}},
        {4, {3, 1, 5, 40}, {0, 0, 0, 0}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (size_t d = 0; d < 4; d++)
            for (size_t o = 0; o < 4; o++)
                for (int squares = 0; squares < 2; squares++)
                    test_sum(rig, float_dtypes[d], float_dtypes[o], &cases[c], (c + o) % 2,
                             squares);
    float nothing = 7;
    fsdpc_sum_args empty = {.dtype = FSDPC_F32, .out_dtype = FSDPC_F32, .ndim = 1};
    empty.reduced[0] = true;
    empty.scale = 1;
    empty.out = &nothing;
    CHECK_OK(rig->ops->sum(&empty, rig->stream));
    CHECK(nothing == 0);
    empty.dtype = FSDPC_I32;
    CHECK_FAILS(rig->ops->sum(&empty, rig->stream), FSDPC_ERR_DTYPE, "int32");
    int64_t integers[3] = {INT64_MAX, 5, -7}, total = 0;
    fsdpc_sum_args exact = {.dtype = FSDPC_I64, .out_dtype = FSDPC_I64, .ndim = 1, .shape = {3}};
    exact.reduced[0] = true;
    exact.scale = 1;
    exact.x = integers;
    exact.out = &total;
    CHECK_OK(rig->ops->sum(&exact, rig->stream));
    CHECK(total == INT64_MAX - 2);
    exact.out_dtype = FSDPC_F32;
    CHECK_FAILS(rig->ops->sum(&exact, rig->stream), FSDPC_ERR_DTYPE, "int64");
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_sum");
}
