/* The operations, each defined once, as module functions and as methods of Tensor.
 *
 * An operation receives its arguments already parsed, in an array with NULL for each omitted one.
 * It calls one function of csrc/nn (without the GIL if there is enough work) and wraps the result.
 * Results are plain Tensors, whatever subclass the inputs have.
 *
 * OPERATIONS is the table: every row becomes a function of the module, and rows that begin with M
 * also become methods, with self as the first argument.
 */
#include "bind/tensor/ops.h"

#include "bind/tensor/tensor.h"

#include <stdlib.h>
#include <string.h>

/* Runs `expression`, which writes `y`, on the runtime `r`, and returns the result. */
#define RETURN_OP(state, work, expression)                                                         \
    do {                                                                                           \
        fsdpc_runtime *r = fsdpc_py_state_runtime(state);                                          \
        fsdpc_tensor *y = NULL;                                                                    \
        fsdpc_status status;                                                                       \
        if (!r)                                                                                    \
            return NULL;                                                                           \
        FSDPC_PY_RUN(r, work, status, expression);                                                 \
        return fsdpc_py_result(state, status, y);                                                  \
    } while (0)

/* ---- shared with methods ---- */

static PyObject *unary_of(fsdpc_py_state *state, fsdpc_unary kind, double scalar, fsdpc_tensor *x)
{
    RETURN_OP(state, x->numel, fsdpc_op_unary(r->tape, kind, scalar, x, &y));
}

PyObject *fsdpc_py_op_cast(fsdpc_py_state *state, fsdpc_tensor *x, fsdpc_dtype dtype)
{
    RETURN_OP(state, x->numel, fsdpc_op_cast(r->tape, x, dtype, &y));
}

PyObject *fsdpc_py_op_reshape(fsdpc_py_state *state, fsdpc_tensor *x, int ndim,
                              const int64_t *shape)
{
    RETURN_OP(state, 0, fsdpc_op_reshape(r->tape, x, ndim, shape, &y));
}

PyObject *fsdpc_py_op_permute(fsdpc_py_state *state, fsdpc_tensor *x, int n, const int64_t *given)
{
    int dims[FSDPC_MAX_DIMS];
    if (n != x->ndim)
        return PyErr_Format(PyExc_ValueError, "permute: %d dimensions named of %d", n, x->ndim);
    for (int i = 0; i < n; i++)
        dims[i] = (int)given[i];
    RETURN_OP(state, x->numel, fsdpc_op_permute(r->tape, x, dims, &y));
}

PyObject *fsdpc_py_op_expand(fsdpc_py_state *state, fsdpc_tensor *x, int ndim, const int64_t *shape)
{
    size_t sizes[FSDPC_MAX_DIMS], numel = 1;
    for (int i = 0; i < ndim; i++) {
        int at = i - (ndim - x->ndim);
        if (shape[i] < -1 || (shape[i] == -1 && at < 0))
            return PyErr_Format(PyExc_ValueError, "expand: extent %lld of dimension %d",
                                (long long)shape[i], i);
        sizes[i] = shape[i] == -1 ? x->shape[at] : (size_t)shape[i];
        numel *= sizes[i];
    }
    RETURN_OP(state, numel, fsdpc_op_expand(r->tape, x, ndim, sizes, &y));
}

/* ---- elementwise ---- */

static PyObject *unary(fsdpc_py_state *state, PyObject *const *a, fsdpc_unary kind)
{
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    return x ? unary_of(state, kind, 0, x) : NULL;
}

static PyObject *gelu(fsdpc_py_state *state, PyObject *const *a)
{
    bool by_tanh = false;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    const char *const forms[] = {"none", "tanh"};
    if (!x || fsdpc_py_arg_second("gelu: approximate", forms, a[1], &by_tanh) < 0)
        return NULL;
    return unary_of(state, by_tanh ? FSDPC_UNARY_GELU_TANH : FSDPC_UNARY_GELU_ERF, 0, x);
}

static PyObject *binary(PyObject *const *a, const char *name, fsdpc_binary kind)
{
    PyObject *result = fsdpc_py_tensor_number(a[0], a[1], kind);
    if (result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return PyErr_Format(PyExc_TypeError, "%s() of %s and %s: a tensor and a tensor or number", name,
                        Py_TYPE(a[0])->tp_name, Py_TYPE(a[1])->tp_name);
}

static PyObject *power(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_scalar exponent;
    fsdpc_tensor *x = fsdpc_py_tensor_peek(NULL, a[0]);
    if (!x || !fsdpc_dtype_is_float(x->dtype) || fsdpc_py_tensor_peek(NULL, a[1]) ||
        !fsdpc_py_number(a[1], &exponent))
        return binary(a, "pow", FSDPC_BINARY_POW);
    return unary_of(state, FSDPC_UNARY_POW_SCALAR, exponent.real, x);
}

static PyObject *unary_scalar(fsdpc_py_state *state, PyObject *const *a, fsdpc_unary kind)
{
    double s = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    return x && fsdpc_py_arg_double(a[1], &s) == 0 ? unary_of(state, kind, s, x) : NULL;
}

static PyObject *swiglu(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_tensor *gate = fsdpc_py_tensor_of(a[0]), *up = gate ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!up)
        return NULL;
    RETURN_OP(state, gate->numel, fsdpc_op_swiglu(r->tape, gate, up, &y));
}

static PyObject *dropout(fsdpc_py_state *state, PyObject *const *a)
{
    double p = 0.5;
    bool training = true;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_double(a[1], &p) < 0 || fsdpc_py_arg_bool(a[2], &training) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_dropout(r->tape, x, p, training, &y));
}

static PyObject *cast(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_dtype dtype;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_dtype_parse(a[1], &dtype) < 0)
        return NULL;
    return dtype == x->dtype ? Py_NewRef(a[0]) : fsdpc_py_op_cast(state, x, dtype);
}

/* ---- products, reductions ---- */

static PyObject *matmul(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_tensor *left = fsdpc_py_tensor_of(a[0]), *right = left ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!right)
        return NULL;
    RETURN_OP(state, left->numel + right->numel, fsdpc_op_matmul(r->tape, left, right, &y));
}

typedef fsdpc_status (*linear_fn)(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                  fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out);

static PyObject *linear(fsdpc_py_state *state, PyObject *const *a, linear_fn fn)
{
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *w = x ? fsdpc_py_tensor_of(a[1]) : NULL, *bias;
    bool in_out = false;
    const char *const layouts[] = {"oi", "io"};
    if (!w || fsdpc_py_arg_tensor(a[2], &bias) < 0 ||
        fsdpc_py_arg_second("linear: layout", layouts, a[3], &in_out) < 0)
        return NULL;
    RETURN_OP(state, x->numel + w->numel, fn(r->tape, x, w, bias, in_out, &y));
}

static PyObject *reduce(fsdpc_py_state *state, PyObject *const *a, const char *name, bool mean,
                        bool squares)
{
    bool keepdim = false, reduced[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_bool(a[2], &keepdim) < 0 ||
        fsdpc_py_dims(name, a[1], x->ndim, reduced) < 0)
        return NULL;
    if (squares)
        RETURN_OP(state, x->numel, fsdpc_op_sum_squares(r->tape, x, reduced, keepdim, &y));
    RETURN_OP(state, x->numel, fsdpc_op_sum(r->tape, x, reduced, keepdim, mean, &y));
}

static PyObject *cumsum(fsdpc_py_state *state, PyObject *const *a)
{
    int dim = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_cumsum(r->tape, x, dim, &y));
}

static PyObject *logsumexp(fsdpc_py_state *state, PyObject *const *a)
{
    int dim = 0;
    bool keepdim = false;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim) < 0 || fsdpc_py_arg_bool(a[2], &keepdim) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_logsumexp(r->tape, x, dim, keepdim, &y));
}

static PyObject *result_type(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *y = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    return y ? Py_NewRef(state->dtypes[fsdpc_op_result_type(x, y)]) : NULL;
}

/* Softmax over any dimension: moves the dimension to the end and back. */
static fsdpc_status softmax_over(fsdpc_tape *tape, fsdpc_tensor *x, int dim, bool log,
                                 fsdpc_tensor **out)
{
    if (x->ndim == 0 && (dim == 0 || dim == -1))
        return fsdpc_op_softmax(tape, x, log, out);
    if (dim < -x->ndim || dim >= x->ndim)
        return fsdpc_fail(FSDPC_ERR_INDEX, "softmax: dimension %d of a tensor with %d dimensions",
                          dim, x->ndim);
    if (dim == -1 || dim == x->ndim - 1)
        return fsdpc_op_softmax(tape, x, log, out);
    fsdpc_tensor *moved, *y;
    FSDPC_TRY(fsdpc_op_transpose(tape, x, dim, -1, &moved));
    fsdpc_status st = fsdpc_op_softmax(tape, moved, log, &y);
    fsdpc_tensor_release(moved);
    FSDPC_TRY(st);
    st = fsdpc_op_transpose(tape, y, dim, -1, out);
    fsdpc_tensor_release(y);
    return st;
}

static PyObject *softmax(fsdpc_py_state *state, PyObject *const *a, bool log)
{
    int dim = -1;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim) < 0)
        return NULL;
    RETURN_OP(state, x->numel, softmax_over(r->tape, x, dim, log, &y));
}

/* ---- layers ---- */

static PyObject *layer_norm(fsdpc_py_state *state, PyObject *const *a)
{
    double eps = 1e-5;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *weight, *bias;
    if (!x || fsdpc_py_arg_tensor(a[1], &weight) < 0 || fsdpc_py_arg_tensor(a[2], &bias) < 0 ||
        fsdpc_py_arg_double(a[3], &eps) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_norm(r->tape, true, x, weight, bias, eps, &y));
}

static PyObject *rms_norm(fsdpc_py_state *state, PyObject *const *a)
{
    double eps = 1e-6;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *weight;
    if (!x || fsdpc_py_arg_tensor(a[1], &weight) < 0 || fsdpc_py_arg_double(a[2], &eps) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_norm(r->tape, false, x, weight, NULL, eps, &y));
}

static int arg_rows(const char *op, PyObject *object, size_t *out)
{
    int64_t rows = 0;
    if (fsdpc_py_arg_int64(object, &rows) < 0)
        return -1;
    *out = (size_t)rows;
    if (rows >= 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %lld rows", op, (long long)rows);
    return -1;
}

static PyObject *row_moments(fsdpc_py_state *state, PyObject *const *a)
{
    size_t rows;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *dy, *shift;
    if (!x || arg_rows("row_moments", a[1], &rows) < 0 || fsdpc_py_arg_tensor(a[2], &dy) < 0 ||
        fsdpc_py_arg_tensor(a[3], &shift) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_row_moments(r->tape, x, rows, dy, shift, &y));
}

static PyObject *row_affine(fsdpc_py_state *state, PyObject *const *a)
{
    size_t rows;
    fsdpc_row_values v;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *other;
    if (!x || arg_rows("row_affine", a[1], &rows) < 0 || !(v.a = fsdpc_py_tensor_of(a[2])) ||
        fsdpc_py_arg_tensor(a[3], &v.c) < 0 || fsdpc_py_arg_tensor(a[4], &v.shift) < 0 ||
        fsdpc_py_arg_tensor(a[5], &other) < 0 || fsdpc_py_arg_tensor(a[6], &v.b) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_row_affine(r->tape, x, rows, &v, other, &y));
}

static PyObject *conv2d(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_conv_options o;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *w = x ? fsdpc_py_tensor_of(a[1]) : NULL, *bias;
    if (!w || fsdpc_py_arg_tensor(a[2], &bias) < 0 ||
        fsdpc_py_arg_sizes("conv2d: stride", a[3], 2, o.stride) < 0 ||
        fsdpc_py_arg_sizes("conv2d: padding", a[4], 4, o.padding[0]) < 0 ||
        fsdpc_py_arg_sizes("conv2d: dilation", a[5], 2, o.dilation) < 0 ||
        fsdpc_py_arg_sizes("conv2d: groups", a[6], 1, &o.groups) < 0)
        return NULL;
    RETURN_OP(state, 16 * x->numel, fsdpc_op_conv2d(r->tape, x, w, bias, &o, &y));
}

static PyObject *pool2d(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_pool_options o = {.max = true};
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_bool(a[1], &o.max) < 0 ||
        fsdpc_py_arg_sizes("pool2d: kernel", a[2], 2, o.kernel) < 0 ||
        fsdpc_py_arg_sizes("pool2d: stride", a[3], 2, o.stride) < 0 ||
        fsdpc_py_arg_sizes("pool2d: padding", a[4], 2, o.padding) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_pool2d(r->tape, x, &o, &y));
}

static PyObject *embedding(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_tensor *ids = fsdpc_py_tensor_of(a[0]), *weight = ids ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!weight)
        return NULL;
    size_t dim = weight->ndim == 2 ? weight->shape[1] : 0;
    int64_t padding = -1, rows = weight->ndim ? (int64_t)weight->shape[0] : 0;
    if (a[2] && a[2] != Py_None) {
        if (fsdpc_py_arg_int64(a[2], &padding) < 0)
            return NULL;
        if (padding < -rows || padding >= rows)
            return PyErr_Format(PyExc_IndexError, "embedding: padding_idx %lld of %lld rows",
                                (long long)padding, (long long)rows);
        padding += padding < 0 ? rows : 0;
    }
    RETURN_OP(state, ids->numel * dim, fsdpc_op_embedding(r->tape, ids, weight, padding, &y));
}

static PyObject *scatter_rows(fsdpc_py_state *state, PyObject *const *a)
{
    size_t rows;
    fsdpc_tensor *ids = fsdpc_py_tensor_of(a[0]), *x = ids ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!x || arg_rows("scatter_rows", a[2], &rows) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_scatter_rows(r->tape, ids, x, rows, &y));
}

static PyObject *rotary(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *c = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *s = c ? fsdpc_py_tensor_of(a[2]) : NULL;
    if (!s)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_rotary(r->tape, x, c, s, &y));
}

/* Parses causal, scale, layout and window, which both forms of attention share; returns 0, or
 * -1. */
static int attention_options(const char *layout, PyObject *const *a, PyObject *window,
                             fsdpc_attention_options *out)
{
    const char *const layouts[] = {"bhtd", "bthd"};
    int64_t keys = 0;
    out->default_scale = !a[1] || a[1] == Py_None;
    if (fsdpc_py_arg_bool(a[0], &out->causal) < 0 || fsdpc_py_arg_double(a[1], &out->scale) < 0 ||
        fsdpc_py_arg_second(layout, layouts, a[2], &out->tokens_first) < 0 ||
        fsdpc_py_arg_int64(window, &keys) < 0)
        return -1;
    if (keys < 0) {
        PyErr_Format(PyExc_ValueError, "attention in a window of %lld keys: 0 is none",
                     (long long)keys);
        return -1;
    }
    out->window = (size_t)keys;
    return 0;
}

static PyObject *scaled_dot_product_attention(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_attention_options options = {.causal = false};
    fsdpc_tensor *q = fsdpc_py_tensor_of(a[0]), *k = q ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *v = k ? fsdpc_py_tensor_of(a[2]) : NULL, *mask;
    if (!v ||
        attention_options("scaled_dot_product_attention: layout", a + 3, a[7], &options) < 0 ||
        fsdpc_py_arg_tensor(a[6], &mask) < 0)
        return NULL;
    RETURN_OP(state, 16 * q->numel, fsdpc_op_attention(r->tape, q, k, v, mask, &options, &y));
}

static PyObject *varlen_attention(fsdpc_py_state *state, PyObject *const *a)
{
    fsdpc_attention_options options = {.causal = true};
    fsdpc_tensor *q = fsdpc_py_tensor_of(a[0]), *k = q ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *v = k ? fsdpc_py_tensor_of(a[2]) : NULL, *y = NULL;
    if (!v || attention_options("varlen_attention: layout", a + 4, a[7], &options) < 0)
        return NULL;
    fsdpc_runtime *r = fsdpc_py_state_runtime(state);
    size_t n = 0, *lengths = r ? fsdpc_py_sizes("varlen_attention: lengths", a[3], &n) : NULL;
    if (!lengths)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(r, 16 * q->numel, status,
                 fsdpc_op_varlen_attention(r->tape, q, k, v, &options, n, lengths, &y));
    PyMem_Free(lengths);
    return fsdpc_py_result(state, status, y);
}

/* ---- losses ---- */

static PyObject *cross_entropy(fsdpc_py_state *state, PyObject *const *a, bool logs)
{
    int64_t ignore_index = -100;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *targets = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!targets || fsdpc_py_arg_int64(a[2], &ignore_index) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_cross_entropy(r->tape, x, targets, ignore_index, logs, &y));
}

static PyObject *linear_cross_entropy(fsdpc_py_state *state, PyObject *const *a)
{
    int64_t ignore_index = -100, chunk_rows = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *w = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *targets = w ? fsdpc_py_tensor_of(a[2]) : NULL;
    if (!targets || fsdpc_py_arg_int64(a[3], &ignore_index) < 0 ||
        fsdpc_py_arg_int64(a[4], &chunk_rows) < 0)
        return NULL;
    if (chunk_rows < 0)
        return PyErr_Format(PyExc_ValueError, "linear_cross_entropy: chunk_rows is %lld; 0 chooses",
                            (long long)chunk_rows);
    RETURN_OP(state, x->numel + w->numel,
              fsdpc_op_linear_cross_entropy(r->tape, x, w, targets, ignore_index,
                                            (size_t)chunk_rows, &y));
}

/* ---- shapes ---- */

typedef PyObject *(*shape_fn)(fsdpc_py_state *state, fsdpc_tensor *x, int n, const int64_t *shape);

static PyObject *reshaped(fsdpc_py_state *state, PyObject *const *a, const char *name, shape_fn fn)
{
    int64_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    int n = x ? fsdpc_py_extents(name, &a[1], 1, shape) : -1;
    return n < 0 ? NULL : fn(state, x, n, shape);
}

static PyObject *transpose(fsdpc_py_state *state, PyObject *const *a)
{
    int dim0 = 0, dim1 = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim0) < 0 || fsdpc_py_arg_int(a[2], &dim1) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_transpose(r->tape, x, dim0, dim1, &y));
}

static PyObject *flip(fsdpc_py_state *state, PyObject *const *a)
{
    bool dims[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_dims("flip", a[1], x->ndim, dims) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_flip(r->tape, x, dims, &y));
}

static PyObject *roll(fsdpc_py_state *state, PyObject *const *a)
{
    int dim = 0;
    int64_t shift = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int64(a[1], &shift) < 0 || fsdpc_py_arg_int(a[2], &dim) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_roll(r->tape, x, shift, dim, &y));
}

static PyObject *array_equal(PyObject *const *a)
{
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *y = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!y)
        return NULL;
    fsdpc_status status = fsdpc_tensor_check(x);
    if (status == FSDPC_OK)
        status = fsdpc_tensor_check(y);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (x->dtype != y->dtype || !fsdpc_shape_equal(x, y))
        Py_RETURN_FALSE;
    bool equal = false;
    status = fsdpc_py_tensor_same_bytes(x, y, &equal);
    return status == FSDPC_OK ? PyBool_FromLong(equal) : fsdpc_py_raise(status);
}

/* F or M(name, number of required arguments, call, arguments); each call may use the module's
 * `state` and the arguments `a`. */
#define OPERATIONS(F, M)                                                                           \
    F(add, 2, binary(a, "add", FSDPC_BINARY_ADD), "a", "b")                                        \
    F(sub, 2, binary(a, "sub", FSDPC_BINARY_SUB), "a", "b")                                        \
    F(mul, 2, binary(a, "mul", FSDPC_BINARY_MUL), "a", "b")                                        \
    F(div, 2, binary(a, "div", FSDPC_BINARY_DIV), "a", "b")                                        \
    M(maximum, 2, binary(a, "maximum", FSDPC_BINARY_MAXIMUM), "a", "b")                            \
    M(minimum, 2, binary(a, "minimum", FSDPC_BINARY_MINIMUM), "a", "b")                            \
    F(mask, 2, binary(a, "mask", FSDPC_BINARY_MASK), "x", "keep")                                  \
    F(keep, 2, binary(a, "keep", FSDPC_BINARY_KEEP), "x", "keep")                                  \
    M(pow, 2, power(state, a), "x", "exponent")                                                    \
    M(neg, 1, unary(state, a, FSDPC_UNARY_NEG), "x")                                               \
    M(abs, 1, unary(state, a, FSDPC_UNARY_ABS), "x")                                               \
    M(exp, 1, unary(state, a, FSDPC_UNARY_EXP), "x")                                               \
    M(log, 1, unary(state, a, FSDPC_UNARY_LOG), "x")                                               \
    M(sqrt, 1, unary(state, a, FSDPC_UNARY_SQRT), "x")                                             \
    M(tanh, 1, unary(state, a, FSDPC_UNARY_TANH), "x")                                             \
    M(sigmoid, 1, unary(state, a, FSDPC_UNARY_SIGMOID), "x")                                       \
    M(rsqrt, 1, unary(state, a, FSDPC_UNARY_RSQRT), "x")                                           \
    M(sin, 1, unary(state, a, FSDPC_UNARY_SIN), "x")                                               \
    M(cos, 1, unary(state, a, FSDPC_UNARY_COS), "x")                                               \
    M(log1p, 1, unary(state, a, FSDPC_UNARY_LOG1P), "x")                                           \
    M(expm1, 1, unary(state, a, FSDPC_UNARY_EXPM1), "x")                                           \
    M(erf, 1, unary(state, a, FSDPC_UNARY_ERF), "x")                                               \
    M(sign, 1, unary(state, a, FSDPC_UNARY_SIGN), "x")                                             \
    F(softplus, 1, unary(state, a, FSDPC_UNARY_SOFTPLUS), "x")                                     \
    F(clamp_min, 2, unary_scalar(state, a, FSDPC_UNARY_CLAMP_MIN), "x", "bound")                   \
    F(clamp_max, 2, unary_scalar(state, a, FSDPC_UNARY_CLAMP_MAX), "x", "bound")                   \
    F(huber, 2, unary_scalar(state, a, FSDPC_UNARY_HUBER), "x", "beta")                            \
    F(silu, 1, unary(state, a, FSDPC_UNARY_SILU), "x")                                             \
    M(relu, 1, unary(state, a, FSDPC_UNARY_RELU), "x")                                             \
    F(gelu, 1, gelu(state, a), "x", "approximate")                                                 \
    F(swiglu, 2, swiglu(state, a), "gate", "up")                                                   \
    F(dropout, 1, dropout(state, a), "x", "p", "training")                                         \
    F(cast, 2, cast(state, a), "x", "dtype")                                                       \
    M(matmul, 2, matmul(state, a), "a", "b")                                                       \
    F(linear, 2, linear(state, a, fsdpc_op_linear), "x", "weight", "bias", "layout")               \
    F(linear_gelu, 2, linear(state, a, fsdpc_op_linear_gelu), "x", "weight", "bias", "layout")     \
    M(sum, 1, reduce(state, a, "sum", false, false), "x", "dim", "keepdim")                        \
    M(mean, 1, reduce(state, a, "mean", true, false), "x", "dim", "keepdim")                       \
    F(sum_squares, 1, reduce(state, a, "sum_squares", false, true), "x", "dim", "keepdim")         \
    F(cumsum, 2, cumsum(state, a), "x", "dim")                                                     \
    F(logsumexp, 2, logsumexp(state, a), "x", "dim", "keepdim")                                    \
    F(result_type, 2, result_type(state, a), "x", "y")                                             \
    M(softmax, 1, softmax(state, a, false), "x", "dim")                                            \
    M(log_softmax, 1, softmax(state, a, true), "x", "dim")                                         \
    F(layer_norm, 1, layer_norm(state, a), "x", "weight", "bias", "eps")                           \
    F(rms_norm, 1, rms_norm(state, a), "x", "weight", "eps")                                       \
    F(row_moments, 2, row_moments(state, a), "x", "rows", "dy", "shift")                           \
    F(row_affine, 3, row_affine(state, a), "x", "rows", "a", "c", "shift", "y", "b")               \
    F(conv2d, 7, conv2d(state, a), "x", "weight", "bias", "stride", "padding", "dilation",         \
      "groups")                                                                                    \
    F(pool2d, 5, pool2d(state, a), "x", "max", "kernel", "stride", "padding")                      \
    F(embedding, 2, embedding(state, a), "ids", "weight", "padding_idx")                           \
    F(scatter_rows, 3, scatter_rows(state, a), "ids", "x", "rows")                                 \
    F(element_places, 3, fsdpc_py_element_places(state, a), "index", "shape", "dim")               \
    F(rotary, 3, rotary(state, a), "x", "cos", "sin")                                              \
    F(scaled_dot_product_attention, 3, scaled_dot_product_attention(state, a), "q", "k", "v",      \
      "causal", "scale", "layout", "mask", "window")                                               \
    F(varlen_attention, 4, varlen_attention(state, a), "q", "k", "v", "lengths", "causal",         \
      "scale", "layout", "window")                                                                 \
    F(cross_entropy, 2, cross_entropy(state, a, false), "logits", "targets", "ignore_index")       \
    F(nll_loss, 2, cross_entropy(state, a, true), "log_p", "targets", "ignore_index")              \
    F(linear_cross_entropy, 3, linear_cross_entropy(state, a), "x", "weight", "targets",           \
      "ignore_index", "chunk_rows")                                                                \
    F(reshape, 2, reshaped(state, a, "reshape", fsdpc_py_op_reshape), "x", "shape")                \
    M(transpose, 3, transpose(state, a), "x", "dim0", "dim1")                                      \
    F(permute, 2, reshaped(state, a, "permute", fsdpc_py_op_permute), "x", "dims")                 \
    F(expand, 2, reshaped(state, a, "expand", fsdpc_py_op_expand), "x", "shape")                   \
    F(flip, 2, flip(state, a), "x", "dims")                                                        \
    F(roll, 3, roll(state, a), "x", "shift", "dim")                                                \
    F(concat, 1, fsdpc_py_op_concat(state, a, false), "tensors", "dim")                            \
    F(stack, 1, fsdpc_py_op_concat(state, a, true), "tensors", "dim")                              \
    F(array_equal, 2, array_equal(a), "a", "b")

#define FUNCTION(op, required, call, ...)                                                          \
    static const char *const names_##op[] = {__VA_ARGS__};                                         \
    enum { COUNT_##op = sizeof names_##op / sizeof *names_##op };                                  \
    static PyObject *function_##op(FSDPC_PY_FASTCALL(module))                                      \
    {                                                                                              \
        fsdpc_py_state *state = PyModule_GetState(module);                                         \
        PyObject *a[COUNT_##op];                                                                   \
        if (fsdpc_py_args(#op, COUNT_##op, names_##op, required, args, nargs, keywords, a) < 0)    \
            return NULL;                                                                           \
        (void)state;                                                                               \
        return call;                                                                               \
    }
#define METHOD(op, required, call, ...)                                                            \
    FUNCTION(op, required, call, __VA_ARGS__)                                                      \
    static PyObject *method_##op(FSDPC_PY_FASTCALL(self))                                          \
    {                                                                                              \
        fsdpc_py_state *state = fsdpc_py_self(self)->state;                                        \
        PyObject *a[COUNT_##op] = {self};                                                          \
        if (fsdpc_py_args(#op, COUNT_##op - 1, names_##op + 1, (required)-1, args, nargs,          \
                          keywords, a + 1) < 0)                                                    \
            return NULL;                                                                           \
        (void)state;                                                                               \
        return call;                                                                               \
    }
OPERATIONS(FUNCTION, METHOD)
#undef FUNCTION
#undef METHOD

#define FUNCTION(op, ...) FSDPC_PY_FUNCTION(op, function_##op, FSDPC_PY_FAST),
PyMethodDef fsdpc_py_ops_functions[] = {OPERATIONS(FUNCTION, FUNCTION){NULL, NULL, 0, NULL}};
#undef FUNCTION

#define NOTHING(...)
#define METHOD(op, ...) FSDPC_PY_METHOD(Tensor, op, method_##op, FSDPC_PY_FAST),
PyMethodDef fsdpc_py_ops_methods[] = {OPERATIONS(NOTHING, METHOD){NULL, NULL, 0, NULL}};
#undef NOTHING
#undef METHOD
