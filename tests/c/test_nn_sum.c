/* Sums over dimensions against double: bias gradients, means, full sums. */
#include "nn_rig.h"

typedef struct sum_case {
    int ndim;
    size_t shape[4];
    bool reduced[4];
} sum_case;

static void test_sum(nn_rig *rig, fsdpc_dtype dtype, fsdpc_dtype out_dtype, const sum_case *c,
                     bool accumulate)
{
    fsdpc_sum_args args = {.dtype = dtype, .out_dtype = out_dtype, .ndim = c->ndim, .scale = 0.25};
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
        want[at] += buffer_get(&x, i) * 0.25;
        size[at] += fabs(buffer_get(&x, i)) * 0.25;
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
                   tolerance(out_dtype, want[i], 1, 2) + size[i] * (wide ? 1e-14 : 2e-6));
    buffer_free(&x);
    buffer_free(&out);
    free(want);
    free(size);
}

static void suite(nn_rig *rig)
{
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
                test_sum(rig, float_dtypes[d], float_dtypes[o], &cases[c], (c + o) % 2);
    float nothing = 7;
    fsdpc_sum_args empty = {.dtype = FSDPC_F32, .out_dtype = FSDPC_F32, .ndim = 1};
    empty.reduced[0] = true;
    empty.scale = 1;
    empty.out = &nothing;
    CHECK_OK(rig->ops->sum(&empty, rig->stream));
    CHECK(nothing == 0);
    empty.dtype = FSDPC_I64;
    CHECK_FAILS(rig->ops->sum(&empty, rig->stream), FSDPC_ERR_DTYPE, "int64");
}

int main(void)
{
    nn_rig_each(suite);
    return check_report("test_nn_sum");
}
