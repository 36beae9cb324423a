/* nn/tape: order, sinks, boundaries, ends, guards, hooks, nesting, failures, writes. */
#include "check.h"

#include "nn/ops.h"
#include "ops/flat_ops.h"

static fsdpc_mem *mem;
static fsdpc_device *device;
static fsdpc_stream *stream;
static fsdpc_tape *tape;
static char journal[256]; /* what ran, a letter each */

static void note(char letter)
{
    size_t used = strlen(journal);
    journal[used] = letter;
    journal[used + 1] = 0;
}

static size_t bytes_now(void)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    return stats.now_bytes[FSDPC_MEM_ACTIVATION];
}

/* A matrix whose elements are all `value`. */
static fsdpc_tensor *matrix(size_t rows, size_t cols, float value, bool requires_grad)
{
    fsdpc_tensor *t = NULL;
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F32, 2, (size_t[]){rows, cols}, &t));
    for (size_t i = 0; i < t->numel; i++)
        ((float *)t->data)[i] = value;
    t->requires_grad = requires_grad;
    return t;
}

static float first(const fsdpc_tensor *t)
{
    return *(const float *)t->data;
}

/* op(x) with x released. */
static fsdpc_tensor *unary(fsdpc_unary kind, double s, fsdpc_tensor *x)
{
    fsdpc_tensor *y = NULL;
    CHECK_OK(fsdpc_op_unary(tape, kind, s, x, &y));
    fsdpc_tensor_release(x);
    return y;
}

static fsdpc_tensor *total(fsdpc_tensor *x)
{
    fsdpc_tensor *y = NULL;
    bool all[FSDPC_MAX_DIMS] = {true, true};
    CHECK_OK(fsdpc_op_sum(tape, x, all, false, false, &y));
    fsdpc_tensor_release(x);
    return y;
}

/* ---- a sink: a reduce buffer, as the engine has ---- */

typedef struct sink_state {
    float buffer[4];
    bool filled;
    int targets;
    bool fail;
} sink_state;

static fsdpc_status sink_target(void *arg, fsdpc_grad_target *out)
{
    sink_state *sink = arg;
    if (sink->fail)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no reduce buffer");
    *out = (fsdpc_grad_target){sink->buffer, FSDPC_F32, sink->filled};
    sink->filled = true;
    sink->targets++;
    return FSDPC_OK;
}

static void test_sinks(void)
{
    size_t start = bytes_now();
    sink_state sink = {.buffer = {-1, -1, -1, -1}};
    fsdpc_tensor *w = matrix(2, 2, 3, true), *x = matrix(1, 2, 2, false), *y, *z, *sum;
    w->sink = (fsdpc_grad_sink){.target = sink_target, .arg = &sink};
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &y));
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &z));
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_ADD, y, z, &sum));
    fsdpc_tensor_release(y);
    fsdpc_tensor_release(z);
    /* and once as itself: given, not written */
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_ADD, sum, w, &y));
    fsdpc_tensor_release(sum);
    sum = total(y);
    CHECK_OK(fsdpc_tape_backward(tape, sum, NULL, false));
    CHECK(sink.targets == 3 && !w->grad);
    for (int i = 0; i < 4; i++)
        CHECK_NOTE(sink.buffer[i] == 9, "%g", sink.buffer[i]); /* 2 rows x 2 x 2, and 1 */
    fsdpc_tensor_release(sum);

    sink.fail = true;
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &y));
    sum = total(y);
    CHECK_FAILS(fsdpc_tape_backward(tape, sum, NULL, false), FSDPC_ERR_NOMEM, "no reduce buffer");
    CHECK(tape->backward_depth == 0 && tape->frame == NULL && tape->grad_enabled);
    fsdpc_tensor_release(sum);
    fsdpc_tensor_release(w);
    fsdpc_tensor_release(x);
    CHECK(bytes_now() == start);
}

static fsdpc_status bf16_sink_target(void *arg, fsdpc_grad_target *out)
{
    *out = (fsdpc_grad_target){arg, FSDPC_BF16, false};
    return FSDPC_OK;
}

/* A reduce buffer in a dtype that the GEMM cannot write from fp32. */
static void test_a_sink_in_bf16(void)
{
    uint16_t buffer[4] = {0}, bias[2] = {0};
    fsdpc_tensor *w = matrix(2, 2, 3, true), *x = matrix(5, 2, 2, false), *b = NULL, *y;
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F32, 1, (size_t[]){2}, &b));
    memset(b->data, 0, fsdpc_tensor_bytes(b));
    b->requires_grad = true;
    w->sink = (fsdpc_grad_sink){.target = bf16_sink_target, .arg = buffer};
    b->sink = (fsdpc_grad_sink){.target = bf16_sink_target, .arg = bias};
    CHECK_OK(fsdpc_op_linear(tape, x, w, b, false, &y));
    fsdpc_tensor *sum = total(y);
    CHECK_OK(fsdpc_tape_backward(tape, sum, NULL, false));
    for (int i = 0; i < 4; i++)
        CHECK(fsdpc_bf16_to_f32(buffer[i]) == 10);
    CHECK(fsdpc_bf16_to_f32(bias[0]) == 5 && fsdpc_bf16_to_f32(bias[1]) == 5);
    fsdpc_tensor_release(sum);
    fsdpc_tensor_release(b);
    fsdpc_tensor_release(w);
    fsdpc_tensor_release(x);
}

/* ---- boundaries and ends ---- */

static fsdpc_status note_boundary(void *arg)
{
    note(*(const char *)arg);
    return FSDPC_OK;
}

static void note_release(void *arg)
{
    (void)arg;
    note('r');
}

static fsdpc_status end_fn(void *arg, fsdpc_status status)
{
    note(*(const char *)arg);
    return status == FSDPC_OK && *(const char *)arg == 'F'
               ? fsdpc_fail(FSDPC_ERR_VALUE, "an end that fails")
               : FSDPC_OK;
}

static fsdpc_status ask_ends(void *arg)
{
    note('b');
    CHECK_OK(fsdpc_tape_at_end(tape, end_fn, "1"));
    CHECK_OK(fsdpc_tape_at_end(tape, end_fn, arg));
    CHECK_OK(fsdpc_tape_at_end(tape, end_fn, arg));
    return FSDPC_OK;
}

static fsdpc_tensor *bound(fsdpc_tensor *x, fsdpc_boundary_fn fn, void *arg,
                           void (*release)(void *))
{
    fsdpc_tensor *y = NULL;
    CHECK_OK(fsdpc_tape_boundary(tape, x, fn, arg, release, &y));
    CHECK(y->data == x->data);
    fsdpc_tensor_release(x);
    return y;
}

static void test_boundaries(void)
{
    size_t start = bytes_now();
    journal[0] = 0;
    fsdpc_tensor *x = matrix(2, 2, 1, true),
                 *y = bound(fsdpc_tensor_acquire(x), note_boundary, "e", note_release);
    y = unary(FSDPC_UNARY_EXP, 0, y);
    y = bound(y, note_boundary, "b", NULL);
    y = total(unary(FSDPC_UNARY_MUL_SCALAR, 2, y));
    CHECK_OK(fsdpc_tape_backward(tape, y, NULL, false));
    CHECK_NOTE(strcmp(journal, "ber") == 0, "%s", journal);
    CHECK(first(x->grad) > 5.4f && first(x->grad) < 5.5f);
    fsdpc_tensor_release(y);
    fsdpc_tensor_release(x);

    /* without gradients the argument goes at once */
    journal[0] = 0;
    x = matrix(1, 1, 1, false);
    y = bound(x, note_boundary, "e", note_release);
    CHECK(!y->requires_grad && strcmp(journal, "r") == 0);
    fsdpc_tensor_release(y);
    CHECK(bytes_now() == start);
}

static void test_ends(void)
{
    journal[0] = 0;
    CHECK_FAILS(fsdpc_tape_at_end(tape, end_fn, "1"), FSDPC_ERR_STATE, "no backward");
    fsdpc_tensor *x = matrix(1, 1, 1, true);
    fsdpc_tensor *y = bound(fsdpc_tensor_acquire(x), ask_ends, "2", NULL);
    y = total(bound(y, ask_ends, "3", NULL));
    CHECK_OK(fsdpc_tape_backward(tape, y, NULL, true));
    CHECK_NOTE(strcmp(journal, "bb132") == 0, "%s", journal);
    fsdpc_tensor_release(y);

    journal[0] = 0;
    y = total(bound(fsdpc_tensor_acquire(x), ask_ends, "F", NULL));
    CHECK_FAILS(fsdpc_tape_backward(tape, y, NULL, false), FSDPC_ERR_VALUE, "an end that fails");
    CHECK(strcmp(journal, "b1F") == 0);
    fsdpc_tensor_release(y);
    fsdpc_tensor_release(x);
}

static fsdpc_status fail_boundary(void *arg)
{
    (void)arg;
    CHECK_OK(fsdpc_tape_at_end(tape, end_fn, "3"));
    return fsdpc_fail(FSDPC_ERR_PEER, "rank 1 died");
}

static void test_failures_run_the_ends_and_leave_nothing(void)
{
    size_t start = bytes_now();
    journal[0] = 0;
    fsdpc_tensor *x = matrix(2, 2, 1, true), *y, *z;
    y = bound(fsdpc_tensor_acquire(x), fail_boundary, NULL, NULL);
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_MUL, x, y, &z)); /* a second way to x */
    fsdpc_tensor_release(y);
    z = total(z);
    CHECK_FAILS(fsdpc_tape_backward(tape, z, NULL, false), FSDPC_ERR_PEER, "rank 1 died");
    CHECK(strcmp(journal, "3") == 0 && tape->backward_depth == 0 && tape->n_ends == 0);
    fsdpc_tensor_release(z);
    fsdpc_tensor_release(x);
    CHECK(bytes_now() == start);
}

/* ---- guards ---- */

static bool gathered = true;

static fsdpc_status guard(void *arg)
{
    (void)arg;
    return gathered ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_STATE, "'w' is not gathered");
}

static fsdpc_status gather(void *arg)
{
    (void)arg;
    gathered = true;
    return FSDPC_OK;
}

static void test_guarded_weights(void)
{
    fsdpc_tensor *w = matrix(2, 2, 3, true), *x = matrix(1, 2, 2, true), *y, *z;
    w->guard = (fsdpc_guard){guard, NULL};
    gathered = false;
    CHECK_FAILS(fsdpc_op_linear(tape, x, w, NULL, false, &y), FSDPC_ERR_STATE,
                "'w' is not gathered");
    gathered = true;
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &y));
    z = total(fsdpc_tensor_acquire(y));
    gathered = false;
    CHECK_FAILS(fsdpc_tape_backward(tape, z, NULL, true), FSDPC_ERR_STATE, "'w' is not gathered");
    fsdpc_tensor_release(z);
    z = total(bound(y, gather, NULL, NULL)); /* as a unit does before its backward */
    CHECK_OK(fsdpc_tape_backward(tape, z, NULL, false));
    CHECK(gathered && first(x->grad) == 6 && first(w->grad) == 2);
    fsdpc_tensor_release(z);
    fsdpc_tensor_release(x);
    fsdpc_tensor_release(w);
}

/* ---- hooks, nesting ---- */

static fsdpc_status note_hook(void *arg, fsdpc_tensor *gradient, fsdpc_tensor **replacement_io)
{
    (void)replacement_io;
    CHECK(first(gradient) == *(const float *)arg);
    note('h');
    return FSDPC_OK;
}

static void hook_released(void *arg)
{
    (void)arg;
    note('x');
}

static void test_leaf_hooks(void)
{
    journal[0] = 0;
    sink_state sink = {.filled = false};
    float expected = 4;
    fsdpc_hook *hook;
    fsdpc_tensor *w = matrix(2, 2, 3, true), *x = matrix(1, 2, 2, false), *y, *z, *sum;
    w->sink = (fsdpc_grad_sink){.target = sink_target, .arg = &sink};
    CHECK_OK(fsdpc_tape_add_hook(tape, w, note_hook, &expected, hook_released, &hook));
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &y));
    CHECK_OK(fsdpc_op_linear(tape, x, w, NULL, false, &z));
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_ADD, y, z, &sum));
    fsdpc_tensor_release(y);
    fsdpc_tensor_release(z);
    sum = total(sum);
    CHECK_OK(fsdpc_tape_backward(tape, sum, NULL, true));
    /* one hook on the sum, one contribution to the sink */
    CHECK(strcmp(journal, "h") == 0 && sink.targets == 1 && sink.buffer[0] == 4);
    fsdpc_hook_remove(hook);
    fsdpc_hook_release(hook);
    CHECK_OK(fsdpc_tape_backward(tape, sum, NULL, false));
    CHECK(strcmp(journal, "hx") == 0 && sink.targets == 3 && sink.buffer[0] == 8);
    fsdpc_tensor_release(sum);
    fsdpc_tensor_release(x);
    fsdpc_tensor_release(w);
}

typedef struct nested_state {
    fsdpc_tensor *w;
} nested_state;

/* dy w by a backward inside the backward, as recomputation does. */
static fsdpc_status nested_backward(void *arg, int n_out, fsdpc_tensor *const *dys, int n_in,
                                    const bool *wanted, fsdpc_tensor **dxs_out)
{
    nested_state *state = arg;
    CHECK(n_out == 1 && n_in == 1 && wanted[0] && tape->backward_depth == 1);
    fsdpc_tensor *x = matrix(1, 1, 5, true), *y;
    tape->grad_enabled = true;
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_MUL, x, state->w, &y));
    tape->grad_enabled = false;
    CHECK_OK(fsdpc_tape_at_end(tape, end_fn, "n"));
    CHECK_OK(fsdpc_tape_backward(tape, y, dys[0], false));
    CHECK(strchr(journal, 'n') == NULL); /* ends wait for the outermost backward */
    dxs_out[0] = fsdpc_tensor_acquire(x->grad);
    fsdpc_tensor_release(x);
    fsdpc_tensor_release(y);
    return FSDPC_OK;
}

static void test_nested_backward(void)
{
    static const fsdpc_custom_ops ops = {"nested", nested_backward, NULL};
    size_t start = bytes_now();
    journal[0] = 0;
    nested_state state = {matrix(1, 1, 7, true)};
    fsdpc_tensor *x = matrix(1, 1, 5, true), *y = matrix(1, 1, 35, false), *z;
    CHECK_OK(fsdpc_op_custom(tape, &ops, &state, NULL, 1, &x, 1, &y));
    CHECK(y->requires_grad);
    CHECK_OK(fsdpc_op_binary(tape, FSDPC_BINARY_MUL, y, state.w, &z));
    CHECK_OK(fsdpc_tape_backward(tape, z, NULL, false));
    CHECK(strcmp(journal, "n") == 0);
    CHECK(first(x->grad) == 49 && first(state.w->grad) == 35 + 7 * 5);
    fsdpc_tensor_release(z);
    fsdpc_tensor_release(y);
    fsdpc_tensor_release(x);
    fsdpc_tensor_release(state.w);
    CHECK(bytes_now() == start);
}

static void test_many_roots_and_order(void)
{
    fsdpc_tensor *x = matrix(1, 1, 2, true), *roots[3];
    for (int i = 0; i < 3; i++)
        roots[i] = unary(FSDPC_UNARY_MUL_SCALAR, i + 1, fsdpc_tensor_acquire(x));
    fsdpc_tensor *grads[3] = {NULL, NULL, x};
    CHECK_OK(fsdpc_tape_backward_many(tape, 3, roots, grads, false));
    CHECK(first(x->grad) == 1 + 2 + 3 * 2);
    for (int i = 0; i < 3; i++)
        fsdpc_tensor_release(roots[i]);
    fsdpc_tensor_release(x);
}

/* x[:, 0] = 3 w, which x is then used for as it was before: no cycle holds the memory. */
static void test_writes(void)
{
    size_t start = bytes_now();
    fsdpc_tensor *v = matrix(2, 2, 5, true), *w = matrix(1, 1, 2, true), *written = NULL, *sum;
    fsdpc_tensor *x =
        unary(FSDPC_UNARY_EXP, 0, unary(FSDPC_UNARY_MUL_SCALAR, 0, fsdpc_tensor_acquire(v)));
    CHECK(fsdpc_tensor_sharers(x) == 1 && !fsdpc_tensor_is_exclusive(x)); /* exp keeps it */
    fsdpc_tensor *value = unary(FSDPC_UNARY_MUL_SCALAR, 3, fsdpc_tensor_acquire(w));
    fsdpc_box column = {.ndim = 2, .shape = {2, 1}, .strides = {2, 1}};
    fsdpc_box wide = {.offset = 1, .ndim = 1, .shape = {3}, .strides = {1}};
    uint32_t version = x->storage->version;
    CHECK_FAILS(fsdpc_op_write(tape, x, &wide, v, NULL), FSDPC_ERR_SHAPE, "(2, 2) do not broad");
    CHECK(x->storage->version == version);
    CHECK_OK(fsdpc_op_write(tape, x, &column, value, &written));
    CHECK(written && written->storage == x->storage && x->storage->version == version + 1);
    CHECK(fsdpc_tensor_sharers(x) == 2);
    CHECK(fsdpc_box_overlaps(x, &wide, x) && !fsdpc_box_overlaps(x, &wide, v));
    const float *values = written->data;
    CHECK(values[0] == 6 && values[1] == 1 && values[2] == 6 && values[3] == 1);
    fsdpc_tensor_release(value);
    fsdpc_tensor_release(x);
    sum = total(written);
    CHECK_FAILS(fsdpc_tape_backward(tape, sum, NULL, false), FSDPC_ERR_STATE, "'exp' needs");
    CHECK(w->grad && first(w->grad) == 6); /* of two rows */
    fsdpc_tensor_release(sum);

    fsdpc_tensor_release(w->grad);
    w->grad = NULL;
    x = unary(FSDPC_UNARY_MUL_SCALAR, 4, fsdpc_tensor_acquire(v));
    written = NULL;
    CHECK_OK(fsdpc_op_write(tape, x, &column, w, &written));
    fsdpc_tensor_release(x);
    sum = total(written);
    CHECK_OK(fsdpc_tape_backward(tape, sum, NULL, false));
    const float *grad = v->grad->data;
    CHECK(first(w->grad) == 2 && grad[0] == 0 && grad[1] == 4 && grad[2] == 0 && grad[3] == 4);
    fsdpc_tensor_release(sum);

    tape->grad_enabled = false;
    x = matrix(2, 2, 0, false);
    written = NULL;
    CHECK_OK(fsdpc_op_write(tape, x, &column, w, &written));
    CHECK(!written && ((const float *)x->data)[2] == 2);
    tape->grad_enabled = true;
    fsdpc_tensor_release(x);
    fsdpc_tensor_release(v);
    fsdpc_tensor_release(w);
    CHECK(bytes_now() == start);
}

int main(void)
{
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_cpu_create(mem, NULL, FSDPC_ISA_PORTABLE, 0, &device));
    device->nn = fsdpc_nn_ops_cpu(FSDPC_ISA_PORTABLE);
    device->flat = fsdpc_flat_ops_cpu(FSDPC_ISA_PORTABLE);
    CHECK_OK(fsdpc_stream_create(device, "compute", false, &stream));
    CHECK_OK(fsdpc_tape_create(device, stream, &tape));
    test_sinks();
    test_a_sink_in_bf16();
    test_boundaries();
    test_ends();
    test_failures_run_the_ends_and_leave_nothing();
    test_guarded_weights();
    test_nested_backward();
    test_many_roots_and_order();
    test_writes();
    test_leaf_hooks();
    test_nested_backward(); /* with counting of uses switched on */
    CHECK(bytes_now() == 0);
    fsdpc_tape_destroy(tape);
    fsdpc_stream_destroy(stream);
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
    return check_report("tape");
}
