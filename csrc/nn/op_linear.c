/* Linear layers, optionally followed by a gelu.
 *
 * A weight has shape (out, in), or (in, out) if the caller requests it. Products read both layouts
 * in place and sum in the same order. Results are therefore bitwise identical for both layouts,
 * except in products with few rows or columns.
 *
 * A weight's gradient is a separate product, dy^T x, which is written or added directly to its
 * target. The target may be an fp32 reduce buffer even if x is bf16. This avoids a temporary and a
 * second pass.
 *
 * Forward fuses gelu with the linear layer before it, and backward fuses it with the linear layer
 * after it. If a linear layer's input is the result of a gelu, the input's gradient is multiplied
 * by gelu's derivative as soon as it is computed. On the tape, the linear layer and gelu stay
 * separate: linear_gelu records a node for each. If a linear layer is the only user of a gelu node,
 * its backward also runs gelu's and passes the gradient to the node before gelu. If the
 * intermediate tensor has a hook or another user, the operations run separately. The result is
 * bitwise equal to gelu(linear(x)), except that a fused kernel may skip the rounding in between.
 */
#include "nn/op.h"
#include "nn/products.h"

enum { SAVED_X, SAVED_WEIGHT };

typedef struct linear_extra {
    bool in_out; /* the weight's layout */
} linear_extra;

/* ---- backward ---- */

fsdpc_status fsdpc_op_give_bias(fsdpc_tape *tape, const fsdpc_edge *edge, const fsdpc_tensor *dy)
{
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    fsdpc_sum_args args = {.dtype = dy->dtype,
                           .out_dtype = target.dtype,
                           .ndim = 2,
                           .shape = {fsdpc_op_rows(dy), dy->shape[dy->ndim - 1]},
                           .reduced = {true, false},
                           .scale = 1,
                           .x = dy->data,
                           .out = target.data,
                           .accumulate = target.accumulate};
    return fsdpc_op_kernels(tape)->sum(&args, tape->stream);
}

/* Returns the gelu node whose gradient comes only from this linear node, judging by reference
 * counts, or NULL if there is none. The known references are held by our edge and, if gelu's result
 * is kept for the weight's gradient, by that result. Any other reference may belong to a user whose
 * gradient has not arrived yet. */
static fsdpc_node *gelu_before(const fsdpc_node *linear)
{
    fsdpc_node *node = linear->inputs[0].node;
    if (!node || !fsdpc_op_gelu_input(node) || !node->inputs[0].node || node->grad || node->hooks)
        return NULL;
    const fsdpc_tensor *x = linear->saved[SAVED_X];
    int known = x && x->node == node ? 2 : 1;
    return atomic_load_explicit(&node->refs, memory_order_relaxed) == known ? node : NULL;
}

/* Computes dx = dy w, as described by `gemm`, times gelu's derivative: the gradient that gelu's
 * node would pass to its predecessor. */
static fsdpc_status give_through_gelu(fsdpc_tape *tape, fsdpc_node *gelu, fsdpc_gemm_args gemm)
{
    FSDPC_TRY(fsdpc_node_check(gelu));
    const fsdpc_tensor *before = fsdpc_op_gelu_input(gelu);
    fsdpc_tensor *g;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, before->dtype, before->ndim, before->shape, &g));
    gemm.c = g->data;
    gemm.c_dtype = g->dtype;
    gemm.ldc = gemm.n;
    fsdpc_gemm_gelu_args args = {.gemm = gemm, .backward = true, .before = before->data};
    fsdpc_status st = fsdpc_op_kernels(tape)->gemm_gelu(&args, tape->stream);
    FSDPC_TRY(fsdpc_op_give_owned(tape, &gelu->inputs[0], g, st));
    if (!tape->retain_graph)
        fsdpc_node_free(gelu);
    return FSDPC_OK;
}

/* dw = dy^T x, or x^T dy for (in, out), db = sum of dy's rows, dx = dy w */
static fsdpc_status linear_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_tensor *x = node->saved[SAVED_X], *w = node->saved[SAVED_WEIGHT];
    bool in_out = ((const linear_extra *)node->extra)->in_out;
    size_t out = dy->shape[dy->ndim - 1], rows = fsdpc_op_rows(dy);
    if (fsdpc_edge_wanted(&node->inputs[1])) {
        const fsdpc_tensor *a = in_out ? x : dy, *b = in_out ? dy : x;
        fsdpc_gemm_args dw = {.dtype = dy->dtype, .k = rows, .trans_a = true};
        dw.m = dw.lda = a->shape[a->ndim - 1];
        dw.n = dw.ldb = b->shape[b->ndim - 1];
        dw.a = a->data;
        dw.b = b->data;
        FSDPC_TRY(fsdpc_op_gemm_into(tape, &node->inputs[1], &dw));
    }
    if (fsdpc_edge_wanted(&node->inputs[2]))
        FSDPC_TRY(fsdpc_op_give_bias(tape, &node->inputs[2], dy));
    if (!fsdpc_edge_wanted(&node->inputs[0]))
        return FSDPC_OK;
    fsdpc_gemm_args args = {.m = rows,
                            .n = w->shape[in_out ? 0 : 1],
                            .k = out,
                            .dtype = dy->dtype,
                            .a = dy->data,
                            .lda = out,
                            .b = w->data,
                            .ldb = w->shape[1],
                            .trans_b = in_out};
    fsdpc_node *gelu = gelu_before(node);
    return gelu ? give_through_gelu(tape, gelu, args)
                : fsdpc_op_gemm_into(tape, &node->inputs[0], &args);
}

static const fsdpc_node_ops linear_ops = {.name = "linear", .backward = linear_backward};

/* ---- forward ---- */

static fsdpc_status linear_check(const char *op, fsdpc_tensor *x, fsdpc_tensor *w,
                                 fsdpc_tensor *bias, bool in_out)
{
    int in = in_out ? 0 : 1;
    FSDPC_TRY(fsdpc_op_check_float(op, "x", x));
    FSDPC_TRY(fsdpc_op_check_float(op, "weight", w));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "weight", w));
    if (w->ndim != 2 || x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[in])
        return fsdpc_op_fail_shapes(op, "x", x, "weight", w,
                                    in_out ? "x must be (..., in) and weight (in, out)"
                                           : "x must be (..., in) and weight (out, in)");
    if (!bias)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_check_float(op, "bias", bias));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "bias", bias));
    if (bias->ndim != 1 || bias->shape[0] != w->shape[1 - in])
        return fsdpc_op_fail_shapes(op, "bias", bias, "weight", w,
                                    in_out ? "bias must be (out) and weight (in, out)"
                                           : "bias must be (out) and weight (out, in)");
    return FSDPC_OK;
}

/* Creates a result, which may be known, and describes the product that computes it. */
static fsdpc_status linear_prepare(fsdpc_tape *tape, const fsdpc_tensor *x, const fsdpc_tensor *w,
                                   const fsdpc_tensor *bias, bool in_out, fsdpc_gemm_args *gemm_out,
                                   fsdpc_tensor **out, bool *known_out)
{
    int in = in_out ? 0 : 1;
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < x->ndim - 1; i++)
        shape[i] = x->shape[i];
    shape[x->ndim - 1] = w->shape[1 - in];
    FSDPC_TRY(fsdpc_products_result(tape, x->dtype, x->ndim, shape, out, known_out));
    *gemm_out = (fsdpc_gemm_args){.m = fsdpc_op_rows(x),
                                  .n = w->shape[1 - in],
                                  .k = w->shape[in],
                                  .dtype = x->dtype,
                                  .c_dtype = x->dtype,
                                  .a = x->data,
                                  .lda = w->shape[in],
                                  .b = w->data,
                                  .ldb = w->shape[1],
                                  .trans_b = !in_out,
                                  .c = (*out)->data,
                                  .ldc = w->shape[1 - in],
                                  .bias = bias ? bias->data : NULL};
    return FSDPC_OK;
}

static fsdpc_status linear_record(fsdpc_tape *tape, fsdpc_tensor *const inputs[3], bool in_out,
                                  fsdpc_tensor *y)
{
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_op_record(tape, &linear_ops, 3, inputs, y, sizeof(linear_extra), &node));
    ((linear_extra *)node->extra)->in_out = in_out;
    if (fsdpc_edge_wanted(&node->inputs[1]))
        fsdpc_node_save(node, SAVED_X, inputs[0]);
    if (fsdpc_edge_wanted(&node->inputs[0]))
        fsdpc_node_save(node, SAVED_WEIGHT, inputs[1]);
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_linear(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                             fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out)
{
    FSDPC_TRY(linear_check("linear", x, weight, bias, in_out));
    fsdpc_gemm_args gemm;
    fsdpc_tensor *inputs[] = {x, weight, bias}, *y;
    bool known;
    FSDPC_TRY(linear_prepare(tape, x, weight, bias, in_out, &gemm, &y, &known));
    fsdpc_status st = known ? FSDPC_OK : fsdpc_op_kernels(tape)->gemm(&gemm, tape->stream);
    if (st == FSDPC_OK)
        st = fsdpc_products_keep(tape, y);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 3, inputs))
        st = linear_record(tape, inputs, in_out, y);
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_linear_gelu(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                  fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out)
{
    FSDPC_TRY(linear_check("linear_gelu", x, weight, bias, in_out));
    fsdpc_gemm_gelu_args args = {0};
    fsdpc_tensor *inputs[] = {x, weight, bias}, *y, *before = NULL;
    fsdpc_status st = FSDPC_OK;
    bool known;
    if (tape->products) { /* the product is kept, and not its gelu */
        FSDPC_TRY(fsdpc_op_linear(tape, x, weight, bias, in_out, &before));
        st = fsdpc_op_unary(tape, FSDPC_UNARY_GELU_TANH, 0, before, out);
        fsdpc_tensor_release(before);
        return st;
    }
    FSDPC_TRY(linear_prepare(tape, x, weight, bias, in_out, &args.gemm, &y, &known));
    if (fsdpc_tape_wants(tape, 3, inputs)) {
        st = fsdpc_tensor_create(tape->device, y->dtype, y->ndim, y->shape, &before);
        args.before = before ? before->data : NULL;
    }
    if (st == FSDPC_OK)
        st = fsdpc_op_kernels(tape)->gemm_gelu(&args, tape->stream);
    if (st == FSDPC_OK && before)
        st = linear_record(tape, inputs, in_out, before);
    if (st == FSDPC_OK && before)
        st = fsdpc_op_unary_record(tape, FSDPC_UNARY_GELU_TANH, 0, before, y);
    fsdpc_tensor_release(before);
    return fsdpc_op_return(st, y, out);
}
