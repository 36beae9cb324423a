/* Attention on the GPU, both families of kernels, against the CPU's.
 *
 * Tolerances are a part of the largest value there is, as in tests/c/test_attention.c: F32 2e-5,
 * F64 1e-12, 16-bit
 * dtypes 2^-6 for bf16 and 2^-9 for fp16, since P and dS are rounded before they are multiplied.
 */
#include "attention_case.h"
#include "gpu_rig.h"

static void check_part(buffer *b, double part, const char *what)
{
    const void *got = buffer_fetch(b);
    double top = 1, worst = 0;
    for (size_t i = 0; i < b->numel; i++) {
        double want = element_of(b->on_cpu, i, b->dtype);
        top = isfinite(want) ? fmax(top, fabs(want)) : top;
    }
    size_t at = 0;
    for (size_t i = 0; i < b->numel; i++) {
        double x = element_of(got, i, b->dtype), y = element_of(b->on_cpu, i, b->dtype);
        double error = x == y ? 0 : fabs(x - y);
        if (!(error <= worst)) {
            worst = error;
            at = i;
        }
    }
    CHECK_NOTE(worst <= part * top, "%s %s: off by %g of %g at %zu", what,
               fsdpc_dtype_name(b->dtype), worst, top, at);
}

static void check_attention(attention_case c, fsdpc_dtype dtype)
{
    size_t q_numel = c.batch * c.tokens_q * c.heads * c.dim;
    size_t k_numel = c.batch * c.tokens_k * c.kv_heads * c.dim;
    buffer q = buffer_random(dtype, q_numel, 0), k = buffer_random(dtype, k_numel, 0);
    buffer v = buffer_random(dtype, k_numel, 0), dout = buffer_random(dtype, q_numel, 0);
    buffer out = buffer_poison(dtype, q_numel, 0), dq = buffer_poison(dtype, q_numel, 0);
    buffer dk = buffer_poison(dtype, k_numel, 0), dv = buffer_poison(dtype, k_numel, 0);
    buffer lse = buffer_poison(FSDPC_F32, c.batch * c.heads * c.tokens_q, 0);
    fsdpc_attention_args args = attention_args_of(c, dtype);
    for (int side = 0; side < 2; side++) {
        fsdpc_stream *stream = side ? gpu_stream : cpu_stream;
#define AT(buffer) (side ? (buffer).on_gpu : (buffer).on_cpu)
        args.q = AT(q), args.k = AT(k), args.v = AT(v), args.out = AT(out), args.lse = AT(lse);
        args.dout = AT(dout), args.dq = AT(dq), args.dk = AT(dk), args.dv = AT(dv);
#undef AT
        CHECK_OK(stream->device->nn->attention(&args, stream));
        CHECK_OK(stream->device->nn->attention_backward(&args, stream));
    }
    double part = dtype == FSDPC_F32    ? 2e-5
                  : dtype == FSDPC_F64  ? 1e-12
                  : dtype == FSDPC_BF16 ? 0x1p-6
                                        : 0x1p-9;
    check_part(&out, part, "attention");
    check_part(&lse, 1e-5, "attention, lse");
    check_part(&dq, part, "attention, dq");
    check_part(&dk, part, "attention, dk");
    check_part(&dv, part, "attention, dv");
    buffer *all[] = {&q, &k, &v, &dout, &out, &dq, &dk, &dv, &lse};
    for (int b = 0; b < 9; b++)
        buffer_fini(all[b]);
}

static void test_attention(void)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_BF16, FSDPC_F16, FSDPC_F32, FSDPC_F64};
    static const attention_case cases[] = {
        {1, 1, 1, 1, 1, 8, false, 1},        {2, 70, 70, 4, 2, 64, true, 0.125},
        {1, 130, 130, 2, 1, 128, true, 0.1}, {1, 65, 200, 2, 2, 40, false, -0.2},
        {1, 33, 150, 4, 1, 64, true, 0.125}, {1, 150, 33, 2, 2, 128, true, 0.1},
        {2, 9, 17, 3, 3, 20, true, 0.3},     {1, 20, 20, 2, 1, 300, true, 0.05},
        {1, 0, 5, 2, 2, 8, false, 1},        {1, 5, 0, 2, 2, 8, false, 1},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
        for (int d = 0; d < 4; d++)
            check_attention(cases[c], dtypes[d]);
}

int main(void)
{
    static const rig_test_fn tests[] = {test_attention};
    return rig_main("test_attention_kernels", tests, 1);
}
