/* Operations on values: functions of the module, some of which are also methods of Tensor.
 *
 * Each calls one function of csrc/nn, without the GIL if there is enough work, and wraps the
 * result. Results are plain Tensors, even if the inputs belong to a subclass. The stub lists the
 * operations (bind/tensor/ops.h); declaring one there without defining it here is a compile error.
 */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

#include <string.h>

/* ---- elementwise ---- */

#define UNARY(name, kind, scalar)                                                                  \
    FSDPC_PY_RETURNS(name, a->x->numel,                                                            \
                     fsdpc_op_unary(r->tape, FSDPC_UNARY_##kind, scalar, a->x, &y))
UNARY(neg, NEG, 0)
UNARY(abs, ABS, 0)
UNARY(exp, EXP, 0)
UNARY(log, LOG, 0)
UNARY(sqrt, SQRT, 0)
UNARY(tanh, TANH, 0)
UNARY(sigmoid, SIGMOID, 0)
UNARY(rsqrt, RSQRT, 0)
UNARY(sin, SIN, 0)
UNARY(cos, COS, 0)
UNARY(log1p, LOG1P, 0)
UNARY(expm1, EXPM1, 0)
UNARY(erf, ERF, 0)
UNARY(sign, SIGN, 0)
UNARY(softplus, SOFTPLUS, 0)
UNARY(silu, SILU, 0)
UNARY(relu, RELU, 0)
UNARY(clamp_min, CLAMP_MIN, a->bound)
UNARY(clamp_max, CLAMP_MAX, a->bound)
UNARY(huber, HUBER, a->beta)

FSDPC_PY_RETURNS(gelu, a->x->numel,
                 fsdpc_op_unary(r->tape, a->tanh ? FSDPC_UNARY_GELU_TANH : FSDPC_UNARY_GELU_ERF, 0,
                                a->x, &y))

static PyObject *binary(const char *name, PyObject *a, PyObject *b, fsdpc_binary kind)
{
    PyObject *result = fsdpc_py_tensor_number(a, b, kind);
    if (result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return PyErr_Format(PyExc_TypeError, "%s() of %s and %s: a tensor and a tensor or number", name,
                        Py_TYPE(a)->tp_name, Py_TYPE(b)->tp_name);
}

#define BINARY(name, kind, left, right)                                                            \
    FSDPC_PY_OP(name)                                                                              \
    {                                                                                              \
        (void)state;                                                                               \
        return binary(#name, a->left, a->right, FSDPC_BINARY_##kind);                              \
    }
BINARY(add, ADD, a, b)
BINARY(sub, SUB, a, b)
BINARY(mul, MUL, a, b)
BINARY(div, DIV, a, b)
BINARY(maximum, MAXIMUM, a, b)
BINARY(minimum, MINIMUM, a, b)
BINARY(mask, MASK, x, keep)
BINARY(keep, KEEP, x, keep)

FSDPC_PY_OP(pow)
{
    fsdpc_scalar exponent;
    fsdpc_tensor *x = fsdpc_py_tensor_peek(NULL, a->x);
    if (!x || !fsdpc_dtype_is_float(x->dtype) || fsdpc_py_tensor_peek(NULL, a->exponent) ||
        !fsdpc_py_number(a->exponent, &exponent))
        return binary("pow", a->x, a->exponent, FSDPC_BINARY_POW);
    FSDPC_PY_RETURN(x->numel,
                    fsdpc_op_unary(r->tape, FSDPC_UNARY_POW_SCALAR, exponent.real, x, &y));
}

FSDPC_PY_RETURNS(swiglu, a->gate->numel, fsdpc_op_swiglu(r->tape, a->gate, a->up, &y))
FSDPC_PY_RETURNS(dropout, a->x->numel, fsdpc_op_dropout(r->tape, a->x, a->p, a->training, &y))

PyObject *fsdpc_py_cast(fsdpc_py_state *state, PyObject *object, fsdpc_dtype dtype)
{
    fsdpc_tensor *x = fsdpc_py_self(object)->tensor;
    if (dtype == x->dtype)
        return Py_NewRef(object);
    FSDPC_PY_RETURN(x->numel, fsdpc_op_cast(r->tape, x, dtype, &y));
}

FSDPC_PY_OP(cast)
{
    return fsdpc_py_cast(state, a->object, a->dtype);
}

FSDPC_PY_TENSOR_OP(to)
{
    return fsdpc_py_cast(state, a->object, a->dtype);
}

FSDPC_PY_OP(result_type)
{
    return Py_NewRef(state->dtypes[fsdpc_op_result_type(a->x, a->y)]);
}

FSDPC_PY_OP(array_equal)
{
    bool equal = false;
    (void)state;
    fsdpc_status status = fsdpc_tensor_check(a->a);
    if (status == FSDPC_OK)
        status = fsdpc_tensor_check(a->b);
    if (status == FSDPC_OK && a->a->dtype == a->b->dtype && fsdpc_shape_equal(a->a, a->b))
        status = fsdpc_py_tensor_same_bytes(a->a, a->b, &equal);
    return status == FSDPC_OK ? PyBool_FromLong(equal) : fsdpc_py_raise(status);
}

/* ---- products, reductions ---- */

FSDPC_PY_RETURNS(matmul, a->a->numel + a->b->numel, fsdpc_op_matmul(r->tape, a->a, a->b, &y))
FSDPC_PY_RETURNS(linear, a->x->numel + a->weight->numel,
                 fsdpc_op_linear(r->tape, a->x, a->weight, a->bias, a->io, &y))
FSDPC_PY_RETURNS(linear_gelu, a->x->numel + a->weight->numel,
                 fsdpc_op_linear_gelu(r->tape, a->x, a->weight, a->bias, a->io, &y))
FSDPC_PY_RETURNS(quantized_linear, a->x->numel + a->codes->numel,
                 fsdpc_op_quantized_linear(r->tape, a->x, a->codes, a->scheme, a->bias, &y))
FSDPC_PY_RETURNS(quantize, a->values->numel, fsdpc_op_quantize(r->tape, a->values, a->scheme, &y))
FSDPC_PY_RETURNS(dequantize, a->codes->numel,
                 fsdpc_op_dequantize(r->tape, a->codes, a->scheme, a->columns, a->dtype, &y))
FSDPC_PY_RETURNS(sum, a->x->numel, fsdpc_op_sum(r->tape, a->x, a->dim, a->keepdim, false, &y))
FSDPC_PY_RETURNS(mean, a->x->numel, fsdpc_op_sum(r->tape, a->x, a->dim, a->keepdim, true, &y))
FSDPC_PY_RETURNS(sum_squares, a->x->numel,
                 fsdpc_op_sum_squares(r->tape, a->x, a->dim, a->keepdim, &y))
FSDPC_PY_RETURNS(cumsum, a->x->numel, fsdpc_op_cumsum(r->tape, a->x, a->dim, &y))
FSDPC_PY_RETURNS(logsumexp, a->x->numel, fsdpc_op_logsumexp(r->tape, a->x, a->dim, a->keepdim, &y))
FSDPC_PY_RETURNS(softmax, a->x->numel, fsdpc_op_softmax(r->tape, a->x, a->dim, false, &y))
FSDPC_PY_RETURNS(log_softmax, a->x->numel, fsdpc_op_softmax(r->tape, a->x, a->dim, true, &y))

/* ---- layers ---- */

FSDPC_PY_RETURNS(layer_norm, a->x->numel,
                 fsdpc_op_norm(r->tape, true, a->x, a->weight, a->bias, a->eps, &y))
FSDPC_PY_RETURNS(rms_norm, a->x->numel,
                 fsdpc_op_norm(r->tape, false, a->x, a->weight, NULL, a->eps, &y))
FSDPC_PY_RETURNS(row_moments, a->x->numel,
                 fsdpc_op_row_moments(r->tape, a->x, a->rows, a->dy, a->shift, &y))
FSDPC_PY_RETURNS(row_affine, a->x->numel,
                 fsdpc_op_row_affine(r->tape, a->x, a->rows,
                                     &(fsdpc_row_values){
                                         .a = a->a, .shift = a->shift, .b = a->b, .c = a->c},
                                     a->y, &y))
FSDPC_PY_RETURNS(scatter_rows, a->x->numel,
                 fsdpc_op_scatter_rows(r->tape, a->ids, a->x, a->rows, &y))
FSDPC_PY_RETURNS(rotary, a->x->numel, fsdpc_op_rotary(r->tape, a->x, a->cos, a->sin, &y))

FSDPC_PY_OP(conv2d)
{
    fsdpc_conv_options o = {.groups = a->groups};
    memcpy(o.stride, a->stride, sizeof o.stride);
    memcpy(o.padding, a->padding, sizeof o.padding);
    memcpy(o.dilation, a->dilation, sizeof o.dilation);
    FSDPC_PY_RETURN(16 * a->x->numel, fsdpc_op_conv2d(r->tape, a->x, a->weight, a->bias, &o, &y));
}

FSDPC_PY_OP(pool2d)
{
    fsdpc_pool_options o = {.max = a->max};
    memcpy(o.kernel, a->kernel, sizeof o.kernel);
    memcpy(o.stride, a->stride, sizeof o.stride);
    memcpy(o.padding, a->padding, sizeof o.padding);
    FSDPC_PY_RETURN(a->x->numel, fsdpc_op_pool2d(r->tape, a->x, &o, &y));
}

FSDPC_PY_OP(embedding)
{
    const fsdpc_tensor *weight = a->weight;
    size_t dim = weight->ndim == 2 ? weight->shape[1] : 0;
    int64_t padding = -1, rows = weight->ndim ? (int64_t)weight->shape[0] : 0;
    if (a->padding_idx) {
        if (fsdpc_py_arg_int64(a->padding_idx, &padding) < 0)
            return NULL;
        if (padding < -rows || padding >= rows)
            return PyErr_Format(PyExc_IndexError, "embedding: padding_idx %lld of %lld rows",
                                (long long)padding, (long long)rows);
        padding += padding < 0 ? rows : 0;
    }
    FSDPC_PY_RETURN(a->ids->numel * dim,
                    fsdpc_op_embedding(r->tape, a->ids, a->weight, padding, &y));
}

FSDPC_PY_OP(element_places)
{
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *out;
    if (fsdpc_py_shape("element_places", &a->shape, shape) < 0)
        return NULL;
    fsdpc_status status =
        fsdpc_op_element_places(state->runtime.tape, a->index, a->shape.n, shape, a->dim, &out);
    if (status == FSDPC_OK && !out)
        Py_RETURN_NONE;
    return fsdpc_py_result(state, status, out);
}

/* Sets the scale in the options, using the default for NULL; returns 0, or -1 with an exception. */
static int set_scale(PyObject *scale, fsdpc_attention_options *inout)
{
    inout->default_scale = !scale;
    return scale ? fsdpc_py_arg_double(scale, &inout->scale) : 0;
}

FSDPC_PY_OP(scaled_dot_product_attention)
{
    fsdpc_attention_options o = {.causal = a->causal, .tokens_first = a->bthd, .window = a->window};
    if (set_scale(a->scale, &o) < 0)
        return NULL;
    FSDPC_PY_RETURN(16 * a->q->numel,
                    fsdpc_op_attention(r->tape, a->q, a->k, a->v, a->mask, &o, &y));
}

FSDPC_PY_OP(varlen_attention)
{
    fsdpc_attention_options o = {.causal = a->causal, .tokens_first = a->bthd, .window = a->window};
    if (set_scale(a->scale, &o) < 0)
        return NULL;
    size_t n = 0, *lengths = fsdpc_py_sizes("varlen_attention: lengths", a->lengths, &n);
    if (!lengths)
        return NULL;
    fsdpc_runtime *r = &state->runtime;
    fsdpc_tensor *y = NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(r, 16 * a->q->numel, status,
                 fsdpc_op_varlen_attention(r->tape, a->q, a->k, a->v, &o, n, lengths, &y));
    PyMem_Free(lengths);
    return fsdpc_py_result(state, status, y);
}

/* ---- losses ---- */

/* Returns 0 and the reduction, or -1 with a ValueError. */
static int reduction_of(const char *op, const char *name, fsdpc_loss_reduction *out)
{
    const char *const names[] = {"mean", "sum", "none"};
    for (int i = 0; i < 3; i++) {
        *out = (fsdpc_loss_reduction)i;
        if (strcmp(name, names[i]) == 0)
            return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: reduction is '%s', not 'mean', 'sum' or 'none'", op, name);
    return -1;
}

FSDPC_PY_OP(cross_entropy)
{
    fsdpc_loss_options o = {
        .ignore_index = a->ignore_index, .smoothing = a->label_smoothing, .z_loss = a->z_loss};
    if (reduction_of("cross_entropy", a->reduction, &o.reduction) < 0)
        return NULL;
    FSDPC_PY_RETURN(a->logits->numel,
                    fsdpc_op_cross_entropy(r->tape, a->logits, a->targets, &o, false, &y));
}

FSDPC_PY_OP(nll_loss)
{
    fsdpc_loss_options o = {.ignore_index = a->ignore_index};
    FSDPC_PY_RETURN(a->log_p->numel,
                    fsdpc_op_cross_entropy(r->tape, a->log_p, a->targets, &o, true, &y));
}

FSDPC_PY_OP(linear_cross_entropy)
{
    fsdpc_loss_options o = {.ignore_index = a->ignore_index,
                            .smoothing = a->label_smoothing,
                            .z_loss = a->z_loss,
                            .softcap = a->softcap};
    if (reduction_of("linear_cross_entropy", a->reduction, &o.reduction) < 0)
        return NULL;
    FSDPC_PY_RETURN(
        a->x->numel + a->weight->numel,
        fsdpc_op_linear_cross_entropy(r->tape, a->x, a->weight, a->targets, &o, a->chunk_rows, &y));
}

/* ---- the tables ---- */

FSDPC_OPERATIONS(FSDPC_PY_DEFINE_FUNCTION, FSDPC_PY_DEFINE_BOTH)

PyMethodDef fsdpc_py_ops_functions[] = {
    FSDPC_OPERATIONS(FSDPC_PY_FUNCTIONS_ROW, FSDPC_PY_FUNCTIONS_ROW){NULL, NULL, 0, NULL},
};
PyMethodDef fsdpc_py_ops_methods[] = {
    FSDPC_OPERATIONS(FSDPC_PY_NO_ROW, FSDPC_PY_METHODS_ROW) FSDPC_PY_TENSOR_ROW(to),
    {NULL, NULL, 0, NULL},
};
