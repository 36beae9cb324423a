/* nn/op_linear: gelu beside products; when it goes with them, and that nothing else can tell.
 *
 * Kernels are the CPU's behind a table that counts; weights are (out, in), then (in, out). A chain
 * w1, gelu, w2 is run with gelu fused and apart, and what comes out has to have the same bits; who
 * alone uses gelu's result, and who does not, shows in the counts.
 */
#include "check.h"

#include "nn/ops.h"
#include "ops/flat_ops.h"

static fsdpc_mem *mem;
static fsdpc_device *device;
static fsdpc_stream *stream;
static fsdpc_tape *tape;
static fsdpc_nn_ops counting;
static const fsdpc_nn_ops *plain;
static int forwards, backwards; /* of gemm_gelu, since the last look */
static bool in_out;             /* the layout of the weights */

static fsdpc_status count_gemm_gelu(const fsdpc_gemm_gelu_args *args, fsdpc_stream *on)
{
    ++*(args->backward ? &backwards : &forwards);
    return plain->gemm_gelu(args, on);
}

static void expect_counts(int forward, int backward)
{
    CHECK_NOTE(forwards == forward && backwards == backward, "%d forwards, %d backwards", forwards,
               backwards);
    forwards = backwards = 0;
}

static size_t bytes_now(void)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    return stats.now_bytes[FSDPC_MEM_ACTIVATION];
}

enum { ROWS = 5, IN = 7, INNER = 11, OUT = 3 };

/* The parameters of a chain and what it is run on; leaves with gradients. */
typedef struct chain {
    fsdpc_tensor *x, *w1, *b1, *w2, *dy;
} chain;

static fsdpc_tensor *numbers(fsdpc_dtype dtype, int ndim, size_t rows, size_t cols, bool leaf)
{
    static uint32_t state = 1;
    fsdpc_tensor *t = NULL;
    size_t shape[] = {rows, cols};
    CHECK_OK(fsdpc_tensor_create(device, dtype, ndim, ndim == 1 ? shape + 1 : shape, &t));
    for (size_t i = 0; i < t->numel; i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-23f - 1;
        if (dtype == FSDPC_F32)
            ((float *)t->data)[i] = value;
        else
            ((uint16_t *)t->data)[i] = fsdpc_f32_to_bf16(value);
    }
    t->requires_grad = leaf;
    return t;
}

static chain chain_make(fsdpc_dtype dtype)
{
    return (chain){.x = numbers(dtype, 2, ROWS, IN, true),
                   .w1 = numbers(dtype, 2, in_out ? IN : INNER, in_out ? INNER : IN, true),
                   .b1 = numbers(dtype, 1, 1, INNER, true),
                   .w2 = numbers(dtype, 2, in_out ? INNER : OUT, in_out ? OUT : INNER, true),
                   .dy = numbers(dtype, 2, ROWS, OUT, false)};
}

static void chain_release(chain *c)
{
    fsdpc_tensor *all[] = {c->x, c->w1, c->b1, c->w2, c->dy};
    for (int i = 0; i < 5; i++)
        fsdpc_tensor_release(all[i]);
}

/* gelu(x w1^T + b1), in one operation or in two. */
static fsdpc_tensor *first_half(const chain *c, bool fused)
{
    fsdpc_tensor *h = NULL, *y = NULL;
    if (fused) {
        CHECK_OK(fsdpc_op_linear_gelu(tape, c->x, c->w1, c->b1, in_out, &y));
        return y;
    }
    CHECK_OK(fsdpc_op_linear(tape, c->x, c->w1, c->b1, in_out, &h));
    CHECK_OK(fsdpc_op_unary(tape, FSDPC_UNARY_GELU_TANH, 0, h, &y));
    fsdpc_tensor_release(h);
    return y;
}

static fsdpc_tensor *second_half(const chain *c, fsdpc_tensor *gelu)
{
    fsdpc_tensor *y = NULL;
    CHECK_OK(fsdpc_op_linear(tape, gelu, c->w2, NULL, in_out, &y));
    return y;
}

/* The result and all gradients, copied; gradients are cleared. */
typedef struct bits {
    unsigned char bytes[5][4 * INNER * INNER];
} bits;

static void bits_take(bits *b, int i, const fsdpc_tensor *t)
{
    CHECK(t && fsdpc_tensor_bytes(t) <= sizeof b->bytes[i]);
    if (t)
        memcpy(b->bytes[i], t->data, fsdpc_tensor_bytes(t));
}

static bits bits_of(chain *c, const fsdpc_tensor *y)
{
    bits b = {{{0}}};
    bits_take(&b, 0, y);
    fsdpc_tensor *leaves[] = {c->x, c->w1, c->b1, c->w2};
    for (int i = 0; i < 4; i++) {
        if (leaves[i]->requires_grad)
            bits_take(&b, i + 1, leaves[i]->grad);
        fsdpc_tensor_release(leaves[i]->grad);
        leaves[i]->grad = NULL;
    }
    return b;
}

/* Forward and backward of a chain. `keep`: gelu's result is held until after backward. */
static bits chain_run(chain *c, bool fused, bool keep)
{
    fsdpc_tensor *gelu = first_half(c, fused), *y = second_half(c, gelu);
    if (!keep)
        fsdpc_tensor_release(gelu);
    CHECK_OK(fsdpc_tape_backward(tape, y, c->dy, false));
    if (keep)
        fsdpc_tensor_release(gelu);
    bits b = bits_of(c, y);
    fsdpc_tensor_release(y);
    return b;
}

static void test_bits(fsdpc_dtype dtype)
{
    chain c = chain_make(dtype);
    size_t start = bytes_now();
    bits want = chain_run(&c, false, true);
    expect_counts(0, 1); /* a hand-written gelu is found too */
    for (int keep = 0; keep < 2; keep++) {
        bits got = chain_run(&c, true, keep);
        CHECK(memcmp(&got, &want, sizeof got) == 0);
        expect_counts(1, 1);
    }
    c.b1->requires_grad = c.w1->requires_grad = false;
    want = chain_run(&c, false, true);
    bits got = chain_run(&c, true, false);
    CHECK(memcmp(&got, &want, sizeof got) == 0);
    expect_counts(1, 2);
    c.x->requires_grad = false; /* nothing before gelu wants a gradient */
    want = chain_run(&c, false, true);
    got = chain_run(&c, true, false);
    CHECK(memcmp(&got, &want, sizeof got) == 0);
    expect_counts(1, 0);
    tape->grad_enabled = false; /* nothing but the result is kept then */
    fsdpc_tensor *gelu = first_half(&c, true);
    size_t bytes = bytes_now() - start;
    fsdpc_tensor *apart = first_half(&c, false);
    CHECK(!gelu->node && memcmp(gelu->data, apart->data, fsdpc_tensor_bytes(gelu)) == 0);
    CHECK_NOTE(bytes_now() - start == 2 * bytes, "%zu bytes, %zu", bytes, bytes_now() - start);
    fsdpc_tensor_release(gelu);
    fsdpc_tensor_release(apart);
    tape->grad_enabled = true;
    expect_counts(1, 0);
    CHECK(bytes_now() == start);
    chain_release(&c);
}

/* The product behind gelu has a frozen weight: it does not keep gelu's result, so whether someone
 * else holds that cannot be told from the references. */
static void test_frozen_weight_behind(void)
{
    chain c = chain_make(FSDPC_F32);
    c.w2->requires_grad = false;
    bits want = chain_run(&c, true, true);
    expect_counts(1, 0);
    bits got = chain_run(&c, true, false);
    expect_counts(1, 1);
    CHECK(memcmp(&got, &want, sizeof got) == 0);
    chain_release(&c);
}

/* Two products use gelu's result: neither may take its backward, and gradients add up. */
static void test_two_users(void)
{
    chain c = chain_make(FSDPC_F32);
    bits both[2];
    for (int fused = 0; fused < 2; fused++) {
        fsdpc_tensor *gelu = first_half(&c, fused), *sum = NULL;
        fsdpc_tensor *y = second_half(&c, gelu), *z = second_half(&c, gelu);
        fsdpc_tensor_release(gelu);
        CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_ADD, y, z, &sum));
        CHECK_OK(fsdpc_tape_backward(tape, sum, c.dy, false));
        both[fused] = bits_of(&c, sum);
        expect_counts(fused, 0);
        fsdpc_tensor_release(sum);
        fsdpc_tensor_release(y);
        fsdpc_tensor_release(z);
    }
    CHECK(memcmp(&both[0], &both[1], sizeof *both) == 0);
    chain_release(&c);
}

/* Gelu's result is a root of backward beside what is made of it. */
static void test_a_root_between(void)
{
    chain c = chain_make(FSDPC_F32);
    bits both[2];
    for (int fused = 0; fused < 2; fused++) {
        fsdpc_tensor *gelu = first_half(&c, fused), *y = second_half(&c, gelu);
        fsdpc_tensor *roots[] = {y, gelu}, *grads[] = {c.dy, gelu};
        CHECK_OK(fsdpc_tape_backward_many(tape, 2, roots, grads, false));
        both[fused] = bits_of(&c, y);
        expect_counts(fused, 0);
        fsdpc_tensor_release(gelu);
        fsdpc_tensor_release(y);
    }
    CHECK(memcmp(&both[0], &both[1], sizeof *both) == 0);
    chain_release(&c);
}

static fsdpc_status see(void *arg, fsdpc_tensor *gradient, fsdpc_tensor **replacement_io)
{
    (void)replacement_io;
    *(size_t *)arg = gradient->numel;
    return FSDPC_OK;
}

static void test_hooks_see_the_gradient_between(void)
{
    chain c = chain_make(FSDPC_F32);
    size_t seen = 0;
    fsdpc_hook *hook = NULL;
    fsdpc_tensor *gelu = first_half(&c, true), *y = second_half(&c, gelu);
    CHECK_OK(fsdpc_tape_add_hook(tape, gelu, see, &seen, NULL, &hook));
    CHECK_OK(fsdpc_tape_backward(tape, y, c.dy, false));
    CHECK_NOTE(seen == ROWS * INNER, "%zu", seen);
    expect_counts(1, 0);
    bits_of(&c, y);
    fsdpc_hook_release(hook);
    fsdpc_tensor_release(gelu);
    fsdpc_tensor_release(y);
    chain_release(&c);
}

static void test_retained_graphs_and_freed_ones(void)
{
    chain c = chain_make(FSDPC_F32);
    fsdpc_tensor *gelu = first_half(&c, true), *y = second_half(&c, gelu), *z = NULL;
    CHECK_OK(fsdpc_tape_backward(tape, y, c.dy, true));
    bits once = bits_of(&c, y);
    size_t kept = bytes_now();
    CHECK_OK(fsdpc_tape_backward(tape, y, c.dy, false));
    bits twice = bits_of(&c, y);
    CHECK(memcmp(&once, &twice, sizeof once) == 0);
    expect_counts(1, 2);
    /* what gelu was taken of went with the graph, though gelu's node did not run itself */
    CHECK_NOTE(bytes_now() < kept, "%zu bytes kept of %zu", bytes_now(), kept);
    CHECK_OK(fsdpc_op_unary(tape, FSDPC_UNARY_NEG, 0, gelu, &z));
    CHECK_FAILS(fsdpc_tape_backward(tape, z, gelu, false), FSDPC_ERR_STATE,
                "backward through 'gelu_tanh' a second time");
    fsdpc_tensor_release(z);
    fsdpc_tensor_release(gelu);
    fsdpc_tensor_release(y);
    chain_release(&c);
}

/* What gelu was taken of was written to: the fused backward refuses as gelu's own would. */
static void test_overwritten(void)
{
    chain c = chain_make(FSDPC_F32);
    fsdpc_tensor *h = NULL, *gelu = NULL;
    CHECK_OK(fsdpc_op_linear(tape, c.x, c.w1, c.b1, in_out, &h));
    CHECK_OK(fsdpc_op_unary(tape, FSDPC_UNARY_GELU_TANH, 0, h, &gelu));
    fsdpc_tensor *y = second_half(&c, gelu);
    CHECK_OK(fsdpc_tensor_check_write(h));
    CHECK_FAILS(fsdpc_tape_backward(tape, y, c.dy, false), FSDPC_ERR_STATE,
                "that 'gelu_tanh' needs");
    fsdpc_tensor_release(h);
    fsdpc_tensor_release(gelu);
    fsdpc_tensor_release(y);
    chain_release(&c);
}

int main(void)
{
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_cpu_create(mem, NULL, FSDPC_ISA_PORTABLE, 0, &device));
    plain = fsdpc_nn_ops_cpu(FSDPC_ISA_PORTABLE);
    counting = *plain;
    counting.gemm_gelu = count_gemm_gelu;
    device->nn = &counting;
    device->flat = fsdpc_flat_ops_cpu(FSDPC_ISA_PORTABLE);
    CHECK_OK(fsdpc_stream_create(device, "compute", false, &stream));
    CHECK_OK(fsdpc_tape_create(device, stream, &tape));
    for (int layout = 0; layout < 2; layout++) {
        in_out = layout;
        test_bits(FSDPC_F32);
        test_bits(FSDPC_BF16);
        test_frozen_weight_behind();
        test_two_users();
        test_a_root_between();
        test_hooks_see_the_gradient_between();
        test_retained_graphs_and_freed_ones();
        test_overwritten();
    }
    CHECK(bytes_now() == 0);
    fsdpc_tape_destroy(tape);
    fsdpc_stream_destroy(stream);
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
    return check_report("op_linear");
}
