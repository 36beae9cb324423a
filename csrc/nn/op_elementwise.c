/* Elementwise operations, with one node kind for all unary operations and one for all binary
 * operations.
 *
 * Promotion is a cast recorded before the operation, so a kernel sees only one dtype. Promotion
 * follows PyTorch's rules: bf16 with fp16 gives fp32, a float with an integer gives the float, and
 * otherwise the wider dtype wins. A zero-dimensional tensor promotes a tensor with dimensions only
 * to a higher category: from bool or integer to float, or from bool to integer.
 *
 * A node saves its input or its output, whichever is cheaper: the output costs nothing if the next
 * operation saves it anyway. A binary operation saves only the operands that the requested
 * gradients need.
 */
#include "nn/op.h"

#include "ops/flat_ops.h"

static const char *const unary_names[] = {
#define X(name, text) text,
    FSDPC_UNARY_TABLE(X)
#undef X
};

static const char *const binary_names[] = {
#define X(name, text) text,
    FSDPC_BINARY_TABLE(X)
#undef X
};

/* ---- unary ---- */

typedef struct unary_extra {
    fsdpc_unary kind;
    double scalar;
} unary_extra;

/* Slots of saved tensors. */
enum { SAVED_X, SAVED_Y };

static fsdpc_status unary_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const unary_extra *extra = node->extra;
    if (extra->kind == FSDPC_UNARY_ADD_SCALAR)
        return fsdpc_edge_give(tape, &node->inputs[0], dy);
    fsdpc_tensor *dx;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, dy->shape, &dx));
    fsdpc_unary_args args = {.kind = extra->kind,
                             .dtype = dy->dtype,
                             .numel = dy->numel,
                             .scalar = extra->scalar,
                             .x = node->saved[SAVED_X] ? node->saved[SAVED_X]->data : NULL,
                             .y = node->saved[SAVED_Y] ? node->saved[SAVED_Y]->data : NULL,
                             .dy = dy->data,
                             .out = dx->data};
    fsdpc_status st = fsdpc_op_kernels(tape)->unary_backward(&args, tape->stream);
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, st);
}

static const fsdpc_node_ops unary_ops[] = {
#define X(NAME, text) {.name = text, .backward = unary_backward},
    FSDPC_UNARY_TABLE(X)
#undef X
};

fsdpc_status fsdpc_op_unary_record(fsdpc_tape *tape, fsdpc_unary kind, double scalar,
                                   fsdpc_tensor *x, fsdpc_tensor *y)
{
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_op_record(tape, &unary_ops[kind], 1, &x, y, sizeof(unary_extra), &node));
    *(unary_extra *)node->extra = (unary_extra){kind, scalar};
    if (fsdpc_unary_reads_x(kind))
        fsdpc_node_save(node, SAVED_X, x);
    return fsdpc_unary_reads_y(kind) ? fsdpc_node_save_output(node, SAVED_Y, y) : FSDPC_OK;
}

const fsdpc_tensor *fsdpc_op_gelu_input(const fsdpc_node *node)
{
    return node->ops == &unary_ops[FSDPC_UNARY_GELU_TANH] ? node->saved[SAVED_X] : NULL;
}

fsdpc_status fsdpc_op_unary(fsdpc_tape *tape, fsdpc_unary kind, double scalar, fsdpc_tensor *x,
                            fsdpc_tensor **out)
{
    if (kind == FSDPC_UNARY_NEG && !fsdpc_dtype_is_float(x->dtype))
        return fsdpc_op_integer_scalar(tape, FSDPC_BINARY_SUB, x, fsdpc_scalar_whole(0), true, out);
    FSDPC_TRY(fsdpc_op_check_float(unary_names[kind], "the tensor", x));
    if (kind == FSDPC_UNARY_CLAMP_MIN || kind == FSDPC_UNARY_CLAMP_MAX) /* rounded to x's dtype */
        FSDPC_TRY(fsdpc_scalar_round(&scalar, x->dtype));
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_unary_args args = {.kind = kind,
                             .dtype = x->dtype,
                             .numel = x->numel,
                             .scalar = scalar,
                             .x = x->data,
                             .out = y->data};
    fsdpc_status st = fsdpc_op_kernels(tape)->unary(&args, tape->stream);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x))
        st = fsdpc_op_unary_record(tape, kind, scalar, x, y);
    return fsdpc_op_return(st, y, out);
}

/* ---- cast ---- */

static fsdpc_status cast_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, &node->inputs[0], &target));
    return fsdpc_target_write(tape, &target, dy->data, dy->dtype, dy->numel);
}

static const fsdpc_node_ops cast_ops = {.name = "cast", .backward = cast_backward};

fsdpc_status fsdpc_op_cast(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_dtype dtype, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    if (x->dtype == dtype) {
        *out = fsdpc_tensor_acquire(x);
        return FSDPC_OK;
    }
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, x->ndim, x->shape, &y));
    fsdpc_status st;
    bool floats = fsdpc_dtype_is_float(dtype) && fsdpc_dtype_is_float(x->dtype);
    if (floats)
        st = fsdpc_flat_cast(y->data, dtype, x->data, x->dtype, x->numel, tape->stream);
    else
        st = fsdpc_op_kernels(tape)->copy(&(fsdpc_copy_args){.ndim = 1,
                                                             .shape = {x->numel},
                                                             .stride_dst = {1},
                                                             .stride_src = {1},
                                                             .dst_dtype = dtype,
                                                             .src_dtype = x->dtype,
                                                             .dst = y->data,
                                                             .src = x->data},
                                          tape->stream);
    fsdpc_node *node;
    if (st == FSDPC_OK && floats && fsdpc_tape_wants(tape, 1, &x))
        st = fsdpc_tape_record(tape, &cast_ops, 1, &x, y, &node);
    return fsdpc_op_return(st, y, out);
}

/* bool, integers, floats */
static int category(fsdpc_dtype dtype)
{
    return fsdpc_dtype_is_float(dtype) ? 2 : dtype == FSDPC_BOOL ? 0 : 1;
}

static fsdpc_dtype wider(fsdpc_dtype a, fsdpc_dtype b)
{
    static const int widths[FSDPC_DTYPE_COUNT] = {
        [FSDPC_U8] = 1,   [FSDPC_I32] = 2, [FSDPC_I64] = 3, [FSDPC_F16] = 4,
        [FSDPC_BF16] = 4, [FSDPC_F32] = 5, [FSDPC_F64] = 6};
    if (a != b && widths[a] == widths[b])
        return FSDPC_F32; /* bf16 and fp16 */
    return widths[a] > widths[b] ? a : b;
}

fsdpc_dtype fsdpc_op_result_type(const fsdpc_tensor *a, const fsdpc_tensor *b)
{
    if ((a->ndim == 0) != (b->ndim == 0) && category(a->dtype) != category(b->dtype))
        return category(a->dtype) > category(b->dtype) ? a->dtype : b->dtype;
    if ((a->ndim == 0) != (b->ndim == 0))
        return a->ndim ? a->dtype : b->dtype;
    return wider(a->dtype, b->dtype);
}

static fsdpc_status promote(fsdpc_binary kind, const fsdpc_tensor *a, const fsdpc_tensor *b,
                            fsdpc_dtype *out)
{
    bool compares = fsdpc_binary_compares(kind);
    if (a->dtype == b->dtype || fsdpc_binary_masks(kind))
        *out = a->dtype;
    else
        *out = fsdpc_op_result_type(a, b);
    /* A narrower integer dtype could change the value of a zero-dimensional operand in a
     * comparison, and U8 does not support arithmetic. */
    if (!fsdpc_dtype_is_float(*out) && (compares || *out == FSDPC_U8))
        *out = wider(a->dtype, b->dtype);
    if (*out != FSDPC_U8 && *out != FSDPC_BOOL)
        return FSDPC_OK;
    if (!compares)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: there is no arithmetic on %s; use to(int32)",
                          binary_names[kind], fsdpc_dtype_name(*out));
    if (a->dtype != b->dtype)
        *out = FSDPC_I32;
    return FSDPC_OK;
}

/* ---- binary ---- */

/* Computes out's shape and both operands' strides; returns false if the shapes do not broadcast. */
static bool broadcast(const fsdpc_tensor *a, const fsdpc_tensor *b, fsdpc_binary_args *args)
{
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    size_t stride_a = 1, stride_b = 1;
    args->ndim = ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        int ia = i - (ndim - a->ndim), ib = i - (ndim - b->ndim);
        size_t na = ia >= 0 ? a->shape[ia] : 1, nb = ib >= 0 ? b->shape[ib] : 1;
        if (na != nb && na != 1 && nb != 1)
            return false;
        args->shape[i] = na == 1 ? nb : na;
        args->stride_a[i] = na == 1 ? 0 : stride_a;
        args->stride_b[i] = nb == 1 ? 0 : stride_b;
        stride_a *= na;
        stride_b *= nb;
    }
    return true;
}

fsdpc_status fsdpc_op_binary_compute(fsdpc_tape *tape, fsdpc_binary kind, const fsdpc_tensor *a,
                                     const fsdpc_tensor *b, fsdpc_tensor **out)
{
    fsdpc_binary_args args = {.kind = kind, .dtype = a->dtype, .a = a->data, .b = b->data};
    if (!broadcast(a, b, &args))
        return fsdpc_op_fail_shapes(binary_names[kind], "the first tensor", a, "the second", b,
                                    "extents must be equal or 1, counted from the last");
    fsdpc_tensor *y;
    fsdpc_dtype dtype = fsdpc_binary_compares(kind) ? FSDPC_BOOL : a->dtype;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, args.ndim, args.shape, &y));
    args.out = y->data;
    return fsdpc_op_return(fsdpc_op_kernels(tape)->binary(&args, tape->stream), y, out);
}

enum { SAVED_A, SAVED_B, SAVED_RESULT };

static const fsdpc_node_ops binary_ops[FSDPC_BINARY_EQ];

/* d(a b): dy b and dy a;  d(a / b): dy / b and -(dy y) / b */
static fsdpc_status product_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    bool divide = node->ops == &binary_ops[FSDPC_BINARY_DIV];
    fsdpc_tensor *g;
    if (fsdpc_edge_wanted(&node->inputs[0])) {
        FSDPC_TRY(fsdpc_op_binary_compute(tape, divide ? FSDPC_BINARY_DIV : FSDPC_BINARY_MUL, dy,
                                          node->saved[SAVED_B], &g));
        fsdpc_status st = fsdpc_op_give_summed(tape, &node->inputs[0], g, 1);
        fsdpc_tensor_release(g);
        FSDPC_TRY(st);
    }
    if (!fsdpc_edge_wanted(&node->inputs[1]))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_binary_compute(tape, FSDPC_BINARY_MUL, dy,
                                      node->saved[divide ? SAVED_RESULT : SAVED_A], &g));
    if (divide) {
        fsdpc_tensor *quotient;
        fsdpc_status st =
            fsdpc_op_binary_compute(tape, FSDPC_BINARY_DIV, g, node->saved[SAVED_B], &quotient);
        fsdpc_tensor_release(g);
        FSDPC_TRY(st);
        g = quotient;
    }
    fsdpc_status st = fsdpc_op_give_summed(tape, &node->inputs[1], g, divide ? -1 : 1);
    fsdpc_tensor_release(g);
    return st;
}

static fsdpc_status sum_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    bool subtract = node->ops == &binary_ops[FSDPC_BINARY_SUB];
    if (fsdpc_edge_wanted(&node->inputs[0]))
        FSDPC_TRY(fsdpc_op_give_summed(tape, &node->inputs[0], dy, 1));
    if (fsdpc_edge_wanted(&node->inputs[1]))
        FSDPC_TRY(fsdpc_op_give_summed(tape, &node->inputs[1], dy, subtract ? -1 : 1));
    return FSDPC_OK;
}

/* Sets each element of the result to 1 if `a kind b` holds and to 0 otherwise, in dy's dtype. */
static fsdpc_status compared(fsdpc_tape *tape, fsdpc_binary kind, const fsdpc_node *node,
                             fsdpc_dtype dtype, fsdpc_tensor **out)
{
    fsdpc_tensor *flags;
    FSDPC_TRY(
        fsdpc_op_binary_compute(tape, kind, node->saved[SAVED_A], node->saved[SAVED_B], &flags));
    fsdpc_status st = fsdpc_op_cast(tape, flags, dtype, out);
    fsdpc_tensor_release(flags);
    return st;
}

/* Passes the gradient to the selected operand, or half to each if both are equal, as in PyTorch. */
static fsdpc_status extremum_side(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy, int side)
{
    bool above = (node->ops == &binary_ops[FSDPC_BINARY_MAXIMUM]) == (side == 0);
    fsdpc_tensor *strict, *loose = NULL, *share = NULL, *g = NULL;
    FSDPC_TRY(compared(tape, above ? FSDPC_BINARY_GT : FSDPC_BINARY_LT, node, dy->dtype, &strict));
    fsdpc_status st =
        compared(tape, above ? FSDPC_BINARY_GE : FSDPC_BINARY_LE, node, dy->dtype, &loose);
    if (st == FSDPC_OK)
        st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_ADD, strict, loose, &share);
    if (st == FSDPC_OK)
        st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_MUL, dy, share, &g);
    if (st == FSDPC_OK)
        st = fsdpc_op_give_summed(tape, &node->inputs[side], g, 0.5);
    fsdpc_tensor_release(strict);
    fsdpc_tensor_release(loose);
    fsdpc_tensor_release(share);
    fsdpc_tensor_release(g);
    return st;
}

static fsdpc_status extremum_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    for (int side = 0; side < 2; side++)
        if (fsdpc_edge_wanted(&node->inputs[side]))
            FSDPC_TRY(extremum_side(tape, node, dy, side));
    return FSDPC_OK;
}

/* *g = *g kind x, in place */
static fsdpc_status fold(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor **g, fsdpc_tensor *x)
{
    fsdpc_tensor *y, *other;
    FSDPC_TRY(fsdpc_op_cast(tape, x, kind == FSDPC_BINARY_MASK ? FSDPC_BOOL : x->dtype, &other));
    fsdpc_status st = fsdpc_op_binary_compute(tape, kind, *g, other, &y);
    fsdpc_tensor_release(other);
    FSDPC_TRY(st);
    fsdpc_tensor_release(*g);
    *g = y;
    return FSDPC_OK;
}

static fsdpc_status unary_compute(fsdpc_tape *tape, fsdpc_unary kind, double s,
                                  const fsdpc_tensor *x, fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_unary_args args = {kind, x->dtype, x->numel, s, x->data, NULL, NULL, y->data};
    return fsdpc_op_return(fsdpc_op_kernels(tape)->unary(&args, tape->stream), y, out);
}

/* d(a ^ b): dy b a^(b-1), 0 where b is 0, and dy y log(a), 0 where a is 0 */
static fsdpc_status power_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *a = node->saved[SAVED_A], *b = node->saved[SAVED_B], *g = NULL;
    for (int side = 0; side < 2; side++) {
        if (!fsdpc_edge_wanted(&node->inputs[side]))
            continue;
        FSDPC_TRY(side ? unary_compute(tape, FSDPC_UNARY_LOG, 0, a, &g)
                       : unary_compute(tape, FSDPC_UNARY_ADD_SCALAR, -1, b, &g));
        fsdpc_status st = FSDPC_OK;
        if (side == 0) { /* g = a^(b-1), to be multiplied by b */
            fsdpc_tensor *power;
            st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_POW, a, g, &power);
            if (st == FSDPC_OK) {
                fsdpc_tensor_release(g);
                g = power;
            }
        }
        if (st == FSDPC_OK)
            st = fold(tape, FSDPC_BINARY_MUL, &g, side ? node->saved[SAVED_RESULT] : b);
        if (st == FSDPC_OK)
            st = fold(tape, FSDPC_BINARY_MASK, &g, side ? a : b);
        if (st == FSDPC_OK)
            st = fold(tape, FSDPC_BINARY_MUL, &g, dy);
        if (st == FSDPC_OK)
            st = fsdpc_op_give_summed(tape, &node->inputs[side], g, 1);
        fsdpc_tensor_release(g);
        FSDPC_TRY(st);
    }
    return FSDPC_OK;
}

static fsdpc_status mask_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *g;
    if (!fsdpc_edge_wanted(&node->inputs[0]))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_binary_compute(tape, (fsdpc_binary)(node->ops - binary_ops), dy,
                                      node->saved[SAVED_B], &g));
    fsdpc_status st = fsdpc_op_give_summed(tape, &node->inputs[0], g, 1);
    fsdpc_tensor_release(g);
    return st;
}

static const fsdpc_node_ops binary_ops[] = {
    [FSDPC_BINARY_ADD] = {.name = "add", .backward = sum_backward},
    [FSDPC_BINARY_SUB] = {.name = "sub", .backward = sum_backward},
    [FSDPC_BINARY_MUL] = {.name = "mul", .backward = product_backward},
    [FSDPC_BINARY_DIV] = {.name = "div", .backward = product_backward},
    [FSDPC_BINARY_POW] = {.name = "pow", .backward = power_backward},
    [FSDPC_BINARY_MAXIMUM] = {.name = "maximum", .backward = extremum_backward},
    [FSDPC_BINARY_MINIMUM] = {.name = "minimum", .backward = extremum_backward},
    [FSDPC_BINARY_MASK] = {.name = "mask", .backward = mask_backward},
    [FSDPC_BINARY_KEEP] = {.name = "keep", .backward = mask_backward},
};

static fsdpc_status binary_record(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *a,
                                  fsdpc_tensor *b, fsdpc_tensor *y)
{
    fsdpc_node *node;
    fsdpc_tensor *inputs[] = {a, b};
    FSDPC_TRY(fsdpc_op_record(tape, &binary_ops[kind], 2, inputs, y, 0, &node));
    bool da = fsdpc_edge_wanted(&node->inputs[0]), db = fsdpc_edge_wanted(&node->inputs[1]);
    bool both =
        kind == FSDPC_BINARY_MAXIMUM || kind == FSDPC_BINARY_MINIMUM || kind == FSDPC_BINARY_POW;
    bool divides = kind == FSDPC_BINARY_DIV;
    if (both || (kind == FSDPC_BINARY_MUL && db))
        fsdpc_node_save(node, SAVED_A, a);
    if (both || divides || fsdpc_binary_masks(kind) || (kind == FSDPC_BINARY_MUL && da))
        fsdpc_node_save(node, SAVED_B, b);
    return (divides || kind == FSDPC_BINARY_POW) && db
               ? fsdpc_node_save_output(node, SAVED_RESULT, y)
               : FSDPC_OK;
}

fsdpc_status fsdpc_op_binary(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *a, fsdpc_tensor *b,
                             fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(a));
    FSDPC_TRY(fsdpc_tensor_check(b));
    fsdpc_dtype dtype = a->dtype;
    if (a->dtype != b->dtype || !fsdpc_dtype_is_float(dtype))
        FSDPC_TRY(promote(kind, a, b, &dtype));
    if (kind == FSDPC_BINARY_DIV && !fsdpc_dtype_is_float(dtype))
        dtype = FSDPC_F32;
    fsdpc_tensor *ca, *cb, *y = NULL;
    FSDPC_TRY(fsdpc_op_cast(tape, a, dtype, &ca));
    fsdpc_status st = fsdpc_op_cast(tape, b, fsdpc_binary_masks(kind) ? FSDPC_BOOL : dtype, &cb);
    if (st == FSDPC_OK) {
        st = fsdpc_op_binary_compute(tape, kind, ca, cb, &y);
        fsdpc_tensor *inputs[] = {ca, cb};
        bool passes = !fsdpc_binary_compares(kind) && fsdpc_tape_wants(tape, 2, inputs);
        if (st == FSDPC_OK && passes)
            st = binary_record(tape, kind, ca, cb, y);
        fsdpc_tensor_release(cb);
    }
    fsdpc_tensor_release(ca);
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_with_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                  fsdpc_scalar s, fsdpc_dtype dtype, bool reversed,
                                  fsdpc_tensor **out)
{
    fsdpc_tensor *t;
    FSDPC_TRY(fsdpc_scalar_tensor(tape->device, tape->stream, s, dtype, &t));
    fsdpc_status st = fsdpc_op_binary(tape, kind, reversed ? t : x, reversed ? x : t, out);
    fsdpc_tensor_release(t);
    return st;
}

fsdpc_status fsdpc_op_integer_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                     fsdpc_scalar s, bool reversed, fsdpc_tensor **out)
{
    if (kind == FSDPC_BINARY_POW && !reversed && s.real < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "pow: an integer tensor to the power of %lld: use a float tensor",
                          (long long)s.whole);
    fsdpc_dtype dtype = x->dtype == FSDPC_U8 ? FSDPC_I32 : /* U8 does not support arithmetic */
                            x->dtype == FSDPC_BOOL ? FSDPC_I64
                                                   : x->dtype;
    return fsdpc_op_with_scalar(tape, kind, x, s, dtype, reversed, out);
}

/* ---- swiglu ---- */

static fsdpc_status swiglu_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dgate, *dup;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, dy->shape, &dgate));
    fsdpc_status st = fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, dy->shape, &dup);
    if (st != FSDPC_OK) {
        fsdpc_tensor_release(dgate);
        return st;
    }
    st = fsdpc_op_kernels(tape)->swiglu_backward(&(fsdpc_swiglu_args){.dtype = dy->dtype,
                                                                      .numel = dy->numel,
                                                                      .gate = node->saved[0]->data,
                                                                      .up = node->saved[1]->data,
                                                                      .dout = dy->data,
                                                                      .dgate = dgate->data,
                                                                      .dup = dup->data},
                                                 tape->stream);
    if (st == FSDPC_OK && fsdpc_edge_wanted(&node->inputs[0]))
        st = fsdpc_edge_give(tape, &node->inputs[0], dgate);
    if (st == FSDPC_OK && fsdpc_edge_wanted(&node->inputs[1]))
        st = fsdpc_edge_give(tape, &node->inputs[1], dup);
    fsdpc_tensor_release(dgate);
    fsdpc_tensor_release(dup);
    return st;
}

static const fsdpc_node_ops swiglu_ops = {.name = "swiglu", .backward = swiglu_backward};

fsdpc_status fsdpc_op_swiglu(fsdpc_tape *tape, fsdpc_tensor *gate, fsdpc_tensor *up,
                             fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("swiglu", "gate", gate));
    FSDPC_TRY(fsdpc_op_check_float("swiglu", "up", up));
    FSDPC_TRY(fsdpc_op_check_same_dtype("swiglu", "gate", gate, "up", up));
    if (!fsdpc_shape_equal(gate, up))
        return fsdpc_op_fail_shapes("swiglu", "gate", gate, "up", up, "they must be equal");
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, gate->dtype, gate->ndim, gate->shape, &y));
    fsdpc_status st = fsdpc_op_kernels(tape)->swiglu(&(fsdpc_swiglu_args){.dtype = gate->dtype,
                                                                          .numel = gate->numel,
                                                                          .gate = gate->data,
                                                                          .up = up->data,
                                                                          .out = y->data},
                                                     tape->stream);
    fsdpc_tensor *inputs[] = {gate, up};
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 2, inputs)) {
        fsdpc_node *node;
        st = fsdpc_tape_record(tape, &swiglu_ops, 2, inputs, y, &node);
        if (st == FSDPC_OK) {
            fsdpc_node_save(node, 0, gate);
            fsdpc_node_save(node, 1, up);
        }
    }
    return fsdpc_op_return(st, y, out);
}
