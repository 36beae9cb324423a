/* The operations as functions of the module.
 *
 * Each takes its arguments apart, calls one function of csrc/nn (without the GIL if it is worth it)
 * and wraps what comes back.  Results are plain Tensors, whatever subclass the inputs are.
 */
#include "py/py_ops.h"

#include "py/py_tensor.h"

#include <stdlib.h>
#include <string.h>

#define FASTCALL PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords

/* Parses into `a`, an array as long as `names`. */
#define PARSE(function, required, ...)                                                             \
    static const char *const names[] = {__VA_ARGS__};                                              \
    PyObject *a[sizeof names / sizeof *names];                                                     \
    if (fsdpc_py_args(function, (int)(sizeof names / sizeof *names), names, required, args, nargs, \
                      keywords, a) < 0)                                                            \
    return NULL

PyObject *fsdpc_py_result(fsdpc_py_state *state, fsdpc_status status, fsdpc_tensor *t)
{
    return status == FSDPC_OK ? fsdpc_py_tensor_new(state, t) : fsdpc_py_raise(status);
}

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

PyObject *fsdpc_py_op_unary(fsdpc_py_state *state, fsdpc_unary kind, double scalar, fsdpc_tensor *x)
{
    RETURN_OP(state, x->numel, fsdpc_op_unary(r->tape, kind, scalar, x, &y));
}

PyObject *fsdpc_py_op_reduce(fsdpc_py_state *state, fsdpc_tensor *x, PyObject *dim, bool keepdim,
                             bool mean)
{
    bool reduced[FSDPC_MAX_DIMS];
    if (fsdpc_py_dims(mean ? "mean" : "sum", dim, x->ndim, reduced) < 0)
        return NULL;
    RETURN_OP(state, x->numel, fsdpc_op_sum(r->tape, x, reduced, keepdim, mean, &y));
}

/* Over any dimension: moved to the end and back. */
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

PyObject *fsdpc_py_op_softmax(fsdpc_py_state *state, fsdpc_tensor *x, int dim, bool log)
{
    RETURN_OP(state, x->numel, softmax_over(r->tape, x, dim, log, &y));
}

PyObject *fsdpc_py_op_matmul(fsdpc_py_state *state, fsdpc_tensor *a, fsdpc_tensor *b)
{
    RETURN_OP(state, a->numel + b->numel, fsdpc_op_matmul(r->tape, a, b, &y));
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

PyObject *fsdpc_py_op_permute(fsdpc_py_state *state, fsdpc_tensor *x, const int *dims)
{
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

#define UNARY(name, kind)                                                                          \
    static PyObject *op_##name(PyObject *module, PyObject *object)                                 \
    {                                                                                              \
        fsdpc_tensor *x = fsdpc_py_tensor_of(object);                                              \
        return x ? fsdpc_py_op_unary(PyModule_GetState(module), FSDPC_UNARY_##kind, 0, x) : NULL;  \
    }
UNARY(neg, NEG)
UNARY(abs, ABS)
UNARY(exp, EXP)
UNARY(log, LOG)
UNARY(sqrt, SQRT)
UNARY(tanh, TANH)
UNARY(sigmoid, SIGMOID)
UNARY(silu, SILU)
UNARY(relu, RELU)
#undef UNARY

static PyObject *op_gelu(FASTCALL)
{
    PARSE("gelu", 1, "x", "approximate");
    bool by_tanh = false;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    const char *const forms[] = {"none", "tanh"};
    if (!x || fsdpc_py_arg_second("gelu: approximate", forms, a[1], &by_tanh) < 0)
        return NULL;
    return fsdpc_py_op_unary(PyModule_GetState(module),
                             by_tanh ? FSDPC_UNARY_GELU_TANH : FSDPC_UNARY_GELU_ERF, 0, x);
}

static PyObject *binary(const char *name, fsdpc_binary kind, PyObject *const *args,
                        Py_ssize_t nargs)
{
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "%s() takes two arguments, %zd given", name, nargs);
    PyObject *result = fsdpc_py_tensor_number(args[0], args[1], kind);
    if (result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return PyErr_Format(PyExc_TypeError, "%s() of %s and %s: a tensor and a tensor or number", name,
                        Py_TYPE(args[0])->tp_name, Py_TYPE(args[1])->tp_name);
}

#define BINARY(name, kind)                                                                         \
    static PyObject *op_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs)          \
    {                                                                                              \
        (void)module;                                                                              \
        return binary(#name, FSDPC_BINARY_##kind, args, nargs);                                    \
    }
BINARY(add, ADD)
BINARY(sub, SUB)
BINARY(mul, MUL)
BINARY(div, DIV)
#undef BINARY

static PyObject *op_pow(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    double exponent;
    bool integral;
    fsdpc_tensor *x = nargs == 2 ? fsdpc_py_tensor_of(args[0]) : NULL;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "pow() takes two arguments, %zd given", nargs);
    if (!x)
        return NULL;
    if (!fsdpc_py_number(args[1], &exponent, &integral))
        return PyErr_Format(PyExc_TypeError, "pow: the exponent is a number, not %s",
                            Py_TYPE(args[1])->tp_name);
    return fsdpc_py_op_unary(PyModule_GetState(module), FSDPC_UNARY_POW_SCALAR, exponent, x);
}

static PyObject *op_swiglu(FASTCALL)
{
    PARSE("swiglu", 2, "gate", "up");
    fsdpc_tensor *gate = fsdpc_py_tensor_of(a[0]), *up = gate ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!up)
        return NULL;
    RETURN_OP(PyModule_GetState(module), gate->numel, fsdpc_op_swiglu(r->tape, gate, up, &y));
}

static PyObject *op_dropout(FASTCALL)
{
    PARSE("dropout", 1, "x", "p", "training");
    double p = 0.5;
    bool training = true;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_double(a[1], &p) < 0 || fsdpc_py_arg_bool(a[2], &training) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel, fsdpc_op_dropout(r->tape, x, p, training, &y));
}

static PyObject *op_cast(FASTCALL)
{
    PARSE("cast", 2, "x", "dtype");
    fsdpc_dtype dtype;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_dtype_parse(a[1], &dtype) < 0)
        return NULL;
    return fsdpc_py_op_cast(PyModule_GetState(module), x, dtype);
}

/* ---- products, reductions ---- */

static PyObject *op_matmul(FASTCALL)
{
    PARSE("matmul", 2, "a", "b");
    fsdpc_tensor *left = fsdpc_py_tensor_of(a[0]), *right = left ? fsdpc_py_tensor_of(a[1]) : NULL;
    return right ? fsdpc_py_op_matmul(PyModule_GetState(module), left, right) : NULL;
}

typedef fsdpc_status (*linear_fn)(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                  fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out);

static PyObject *linear(const char *function, linear_fn fn, FASTCALL)
{
    PARSE(function, 2, "x", "weight", "bias", "layout");
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *w = x ? fsdpc_py_tensor_of(a[1]) : NULL, *bias;
    bool in_out = false;
    const char *const layouts[] = {"oi", "io"};
    if (!w || fsdpc_py_arg_tensor(a[2], &bias) < 0 ||
        fsdpc_py_arg_second("linear: layout", layouts, a[3], &in_out) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel + w->numel, fn(r->tape, x, w, bias, in_out, &y));
}

static PyObject *op_linear(FASTCALL)
{
    return linear("linear", fsdpc_op_linear, module, args, nargs, keywords);
}

static PyObject *op_linear_gelu(FASTCALL)
{
    return linear("linear_gelu", fsdpc_op_linear_gelu, module, args, nargs, keywords);
}

static PyObject *reduce(const char *function, FASTCALL, bool mean)
{
    PARSE(function, 1, "x", "dim", "keepdim");
    bool keepdim = false;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_bool(a[2], &keepdim) < 0)
        return NULL;
    return fsdpc_py_op_reduce(PyModule_GetState(module), x, a[1], keepdim, mean);
}

static PyObject *op_sum(FASTCALL)
{
    return reduce("sum", module, args, nargs, keywords, false);
}

static PyObject *op_mean(FASTCALL)
{
    return reduce("mean", module, args, nargs, keywords, true);
}

static PyObject *softmax(const char *function, FASTCALL, bool log)
{
    PARSE(function, 1, "x", "dim");
    int dim = -1;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim) < 0)
        return NULL;
    return fsdpc_py_op_softmax(PyModule_GetState(module), x, dim, log);
}

static PyObject *op_softmax(FASTCALL)
{
    return softmax("softmax", module, args, nargs, keywords, false);
}

static PyObject *op_log_softmax(FASTCALL)
{
    return softmax("log_softmax", module, args, nargs, keywords, true);
}

/* ---- layers ---- */

static PyObject *op_layer_norm(FASTCALL)
{
    PARSE("layer_norm", 1, "x", "weight", "bias", "eps");
    double eps = 1e-5;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *weight, *bias;
    if (!x || fsdpc_py_arg_tensor(a[1], &weight) < 0 || fsdpc_py_arg_tensor(a[2], &bias) < 0 ||
        fsdpc_py_arg_double(a[3], &eps) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel,
              fsdpc_op_norm(r->tape, true, x, weight, bias, eps, &y));
}

static PyObject *op_rms_norm(FASTCALL)
{
    PARSE("rms_norm", 1, "x", "weight", "eps");
    double eps = 1e-6;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *weight;
    if (!x || fsdpc_py_arg_tensor(a[1], &weight) < 0 || fsdpc_py_arg_double(a[2], &eps) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel,
              fsdpc_op_norm(r->tape, false, x, weight, NULL, eps, &y));
}

static PyObject *op_embedding(FASTCALL)
{
    PARSE("embedding", 2, "ids", "weight");
    fsdpc_tensor *ids = fsdpc_py_tensor_of(a[0]), *weight = ids ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!weight)
        return NULL;
    size_t dim = weight->ndim == 2 ? weight->shape[1] : 0;
    RETURN_OP(PyModule_GetState(module), ids->numel * dim,
              fsdpc_op_embedding(r->tape, ids, weight, &y));
}

static PyObject *op_rotary(FASTCALL)
{
    PARSE("rotary", 3, "x", "cos", "sin");
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *c = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *s = c ? fsdpc_py_tensor_of(a[2]) : NULL;
    if (!s)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel, fsdpc_op_rotary(r->tape, x, c, s, &y));
}

static PyObject *op_attention(FASTCALL)
{
    PARSE("scaled_dot_product_attention", 3, "q", "k", "v", "causal", "scale", "layout");
    fsdpc_attention_options options = {.default_scale = !a[4] || a[4] == Py_None};
    fsdpc_tensor *q = fsdpc_py_tensor_of(a[0]), *k = q ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *v = k ? fsdpc_py_tensor_of(a[2]) : NULL;
    const char *const layouts[] = {"bhtd", "bthd"};
    if (!v || fsdpc_py_arg_bool(a[3], &options.causal) < 0 ||
        fsdpc_py_arg_double(a[4], &options.scale) < 0 ||
        fsdpc_py_arg_second("scaled_dot_product_attention: layout", layouts, a[5],
                            &options.tokens_first) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), 16 * q->numel,
              fsdpc_op_attention(r->tape, q, k, v, &options, &y));
}

/* ---- losses ---- */

static PyObject *op_cross_entropy(FASTCALL)
{
    PARSE("cross_entropy", 2, "logits", "targets", "ignore_index");
    int64_t ignore_index = -100;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *targets = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    if (!targets || fsdpc_py_arg_int64(a[2], &ignore_index) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel,
              fsdpc_op_cross_entropy(r->tape, x, targets, ignore_index, &y));
}

static PyObject *op_linear_cross_entropy(FASTCALL)
{
    PARSE("linear_cross_entropy", 3, "x", "weight", "targets", "ignore_index", "chunk_rows");
    int64_t ignore_index = -100, chunk_rows = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]), *w = x ? fsdpc_py_tensor_of(a[1]) : NULL;
    fsdpc_tensor *targets = w ? fsdpc_py_tensor_of(a[2]) : NULL;
    if (!targets || fsdpc_py_arg_int64(a[3], &ignore_index) < 0 ||
        fsdpc_py_arg_int64(a[4], &chunk_rows) < 0)
        return NULL;
    if (chunk_rows < 0)
        return PyErr_Format(PyExc_ValueError, "linear_cross_entropy: chunk_rows is %lld; 0 chooses",
                            (long long)chunk_rows);
    RETURN_OP(PyModule_GetState(module), x->numel + w->numel,
              fsdpc_op_linear_cross_entropy(r->tape, x, w, targets, ignore_index,
                                            (size_t)chunk_rows, &y));
}

/* ---- shapes ---- */

static PyObject *op_reshape(FASTCALL)
{
    PARSE("reshape", 2, "x", "shape");
    int64_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    int n = x ? fsdpc_py_extents("reshape", &a[1], 1, shape) : -1;
    return n < 0 ? NULL : fsdpc_py_op_reshape(PyModule_GetState(module), x, n, shape);
}

static PyObject *op_transpose(FASTCALL)
{
    PARSE("transpose", 3, "x", "dim0", "dim1");
    int dim0 = 0, dim1 = 0;
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    if (!x || fsdpc_py_arg_int(a[1], &dim0) < 0 || fsdpc_py_arg_int(a[2], &dim1) < 0)
        return NULL;
    RETURN_OP(PyModule_GetState(module), x->numel, fsdpc_op_transpose(r->tape, x, dim0, dim1, &y));
}

static PyObject *op_permute(FASTCALL)
{
    PARSE("permute", 2, "x", "dims");
    int64_t given[FSDPC_MAX_DIMS];
    int dims[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    int n = x ? fsdpc_py_extents("permute", &a[1], 1, given) : -1;
    if (n < 0)
        return NULL;
    if (n != x->ndim)
        return PyErr_Format(PyExc_ValueError, "permute: %d dimensions named of %d", n, x->ndim);
    for (int i = 0; i < n; i++)
        dims[i] = (int)given[i];
    return fsdpc_py_op_permute(PyModule_GetState(module), x, dims);
}

static PyObject *op_expand(FASTCALL)
{
    PARSE("expand", 2, "x", "shape");
    int64_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *x = fsdpc_py_tensor_of(a[0]);
    int n = x ? fsdpc_py_extents("expand", &a[1], 1, shape) : -1;
    return n < 0 ? NULL : fsdpc_py_op_expand(PyModule_GetState(module), x, n, shape);
}

/* Tensors of a sequence, with a new dimension each for stack. */
static int collect(fsdpc_runtime *r, PyObject *fast, int dim, bool stack, fsdpc_tensor **out)
{
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    for (Py_ssize_t i = 0; i < n; i++) {
        fsdpc_tensor *x = fsdpc_py_tensor_of(PySequence_Fast_GET_ITEM(fast, i));
        if (!x)
            return -1;
        if (!stack) {
            out[i] = fsdpc_tensor_acquire(x);
            continue;
        }
        int64_t shape[FSDPC_MAX_DIMS];
        int at = dim < 0 ? dim + x->ndim + 1 : dim;
        if (at < 0 || at > x->ndim || x->ndim == FSDPC_MAX_DIMS) {
            PyErr_Format(PyExc_IndexError, "stack: dimension %d for tensors of %d dimensions", dim,
                         x->ndim);
            return -1;
        }
        for (int d = 0; d <= x->ndim; d++)
            shape[d] = d == at ? 1 : (int64_t)x->shape[d - (d > at)];
        fsdpc_status status = fsdpc_op_reshape(r->tape, x, x->ndim + 1, shape, &out[i]);
        if (status != FSDPC_OK) {
            fsdpc_py_raise(status);
            return -1;
        }
    }
    return 0;
}

static PyObject *concat(const char *function, FASTCALL, bool stack)
{
    PARSE(function, 1, "tensors", "dim");
    int dim = 0;
    fsdpc_runtime *r = fsdpc_py_runtime(module);
    if (!r || fsdpc_py_arg_int(a[1], &dim) < 0)
        return NULL;
    PyObject *fast = PySequence_Fast(a[0], "a sequence of tensors is needed");
    if (!fast)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fsdpc_tensor **xs = PyMem_Calloc((size_t)n + 1, sizeof *xs), *y = NULL;
    PyObject *result = NULL;
    if (!xs) {
        PyErr_NoMemory();
    } else if (collect(r, fast, dim, stack, xs) == 0) {
        size_t work = 0;
        for (Py_ssize_t i = 0; i < n; i++)
            work += xs[i]->numel;
        fsdpc_status status;
        FSDPC_PY_RUN(r, work, status, fsdpc_op_concat(r->tape, (int)n, xs, dim, &y));
        result = fsdpc_py_result(PyModule_GetState(module), status, y);
    }
    for (Py_ssize_t i = 0; xs && i < n; i++)
        fsdpc_tensor_release(xs[i]);
    PyMem_Free(xs);
    Py_DECREF(fast);
    return result;
}

static PyObject *op_concat(FASTCALL)
{
    return concat("concat", module, args, nargs, keywords, false);
}

static PyObject *op_stack(FASTCALL)
{
    return concat("stack", module, args, nargs, keywords, true);
}

static fsdpc_status same_bytes(const fsdpc_tensor *x, const fsdpc_tensor *y, bool *equal_out)
{
    size_t bytes = fsdpc_tensor_bytes(x);
    if (!x->storage->device->remote) {
        *equal_out = memcmp(x->data, y->data, bytes) == 0;
        return FSDPC_OK;
    }
    char *copies = malloc(2 * bytes + 1);
    if (!copies)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to compare tensors of %zu bytes", bytes);
    fsdpc_status status = fsdpc_py_tensor_read(x, copies);
    if (status == FSDPC_OK)
        status = fsdpc_py_tensor_read(y, copies + bytes);
    *equal_out = status == FSDPC_OK && memcmp(copies, copies + bytes, bytes) == 0;
    free(copies);
    return status;
}

static PyObject *op_array_equal(FASTCALL)
{
    (void)module;
    PARSE("array_equal", 2, "a", "b");
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
    status = same_bytes(x, y, &equal);
    return status == FSDPC_OK ? PyBool_FromLong(equal) : fsdpc_py_raise(status);
}

#define FAST(name, function, doc)                                                                  \
    {                                                                                              \
        name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, doc            \
    }
#define PLAIN(name, function, doc)                                                                 \
    {                                                                                              \
        name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, doc                            \
    }

/* fsdpc.functional has the documentation. */
static PyMethodDef functions[] = {
    PLAIN("add", op_add, "a + b"),
    PLAIN("sub", op_sub, "a - b"),
    PLAIN("mul", op_mul, "a * b"),
    PLAIN("div", op_div, "a / b"),
    PLAIN("pow", op_pow, "x ** exponent"),
    {"neg", op_neg, METH_O, "-x"},
    {"abs", op_abs, METH_O, "Absolute values."},
    {"exp", op_exp, METH_O, "e ** x"},
    {"log", op_log, METH_O, "Natural logarithms."},
    {"sqrt", op_sqrt, METH_O, "Square roots."},
    {"tanh", op_tanh, METH_O, "Hyperbolic tangents."},
    {"sigmoid", op_sigmoid, METH_O, "1 / (1 + e ** -x)"},
    {"silu", op_silu, METH_O, "x * sigmoid(x)"},
    {"relu", op_relu, METH_O, "max(x, 0)"},
    FAST("gelu", op_gelu, "gelu(x, approximate='none')"),
    FAST("swiglu", op_swiglu, "swiglu(gate, up): silu(gate) * up"),
    FAST("dropout", op_dropout, "dropout(x, p=0.5, training=True)"),
    FAST("cast", op_cast, "cast(x, dtype)"),
    FAST("matmul", op_matmul, "matmul(a, b)"),
    FAST("linear", op_linear, "linear(x, weight, bias=None, layout='oi')"),
    FAST("linear_gelu", op_linear_gelu, "linear_gelu(x, weight, bias=None, layout='oi')"),
    FAST("sum", op_sum, "sum(x, dim=None, keepdim=False)"),
    FAST("mean", op_mean, "mean(x, dim=None, keepdim=False)"),
    FAST("softmax", op_softmax, "softmax(x, dim=-1)"),
    FAST("log_softmax", op_log_softmax, "log_softmax(x, dim=-1)"),
    FAST("layer_norm", op_layer_norm, "layer_norm(x, weight=None, bias=None, eps=1e-5)"),
    FAST("rms_norm", op_rms_norm, "rms_norm(x, weight=None, eps=1e-6)"),
    FAST("embedding", op_embedding, "embedding(ids, weight)"),
    FAST("rotary", op_rotary, "rotary(x, cos, sin)"),
    FAST("scaled_dot_product_attention", op_attention,
         "scaled_dot_product_attention(q, k, v, causal=False, scale=None, layout='bhtd')"),
    FAST("cross_entropy", op_cross_entropy, "cross_entropy(logits, targets, ignore_index=-100)"),
    FAST("linear_cross_entropy", op_linear_cross_entropy,
         "linear_cross_entropy(x, weight, targets, ignore_index=-100, chunk_rows=0)"),
    FAST("reshape", op_reshape, "reshape(x, shape)"),
    FAST("transpose", op_transpose, "transpose(x, dim0, dim1)"),
    FAST("permute", op_permute, "permute(x, dims)"),
    FAST("expand", op_expand, "expand(x, shape)"),
    FAST("concat", op_concat, "concat(tensors, dim=0)"),
    FAST("stack", op_stack, "stack(tensors, dim=0)"),
    FAST("array_equal", op_array_equal, "Same dtype, shape and bytes."),
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_ops_setup(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
