/* Methods of Tensor: shapes, dtypes, reductions, changes in place, autograd.  Operations are those
 * of py_ops.c with self as the first argument. */
#include "py/py_ops.h"
#include "py/py_tensor.h"

#include "ops/flat_ops.h"

#include <string.h>

#define FASTCALL PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords
#define PARSE(function, required, ...)                                                             \
    static const char *const names[] = {__VA_ARGS__};                                              \
    PyObject *a[sizeof names / sizeof *names];                                                     \
    if (fsdpc_py_args(function, (int)(sizeof names / sizeof *names), names, required, args, nargs, \
                      keywords, a) < 0)                                                            \
    return NULL
#define TENSOR(object) (fsdpc_py_self(object)->tensor)
#define STATE(object) (fsdpc_py_self(object)->state)

/* ---- sizes and values ---- */

static PyObject *method_size(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *shape = PyObject_GetAttrString(object, "shape");
    if (!shape || nargs == 0 || args[0] == Py_None)
        return shape;
    PyObject *extent = PyObject_GetItem(shape, args[0]);
    Py_DECREF(shape);
    return extent;
}

static PyObject *method_dim(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(TENSOR(object)->ndim);
}

static PyObject *method_numel(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromSize_t(TENSOR(object)->numel);
}

static PyObject *method_item(PyObject *object, PyObject *unused)
{
    (void)unused;
    const fsdpc_tensor *t = TENSOR(object);
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (t->numel != 1) {
        char text[FSDPC_SHAPE_TEXT];
        return PyErr_Format(PyExc_ValueError,
                            "a tensor of shape %s is not one number: index it, or use tolist()",
                            fsdpc_shape_text(t->ndim, t->shape, text));
    }
    union {
        float f32;
        double f64;
        uint16_t bits;
        int32_t i32;
        int64_t i64;
        uint8_t u8;
    } value;
    status = fsdpc_py_tensor_read(t, &value);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    switch (t->dtype) {
    case FSDPC_F32:
        return PyFloat_FromDouble(value.f32);
    case FSDPC_BF16:
        return PyFloat_FromDouble(fsdpc_bf16_to_f32(value.bits));
    case FSDPC_F16:
        return PyFloat_FromDouble(fsdpc_f16_to_f32(value.bits));
    case FSDPC_F64:
        return PyFloat_FromDouble(value.f64);
    case FSDPC_I32:
        return PyLong_FromLong(value.i32);
    case FSDPC_I64:
        return PyLong_FromLongLong(value.i64);
    case FSDPC_U8:
        return PyLong_FromLong(value.u8);
    default:
        return PyBool_FromLong(value.u8);
    }
}

static PyObject *method_tolist(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *plain = Py_NewRef(object);
    if (TENSOR(object)->dtype == FSDPC_BF16) {
        Py_DECREF(plain);
        plain = fsdpc_py_op_cast(STATE(object), TENSOR(object), FSDPC_F32);
    }
    PyObject *array = plain ? fsdpc_py_tensor_numpy(plain, NULL) : NULL;
    PyObject *list = array ? PyObject_CallMethod(array, "tolist", NULL) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(array);
    return list;
}

/* ---- autograd ---- */

static PyObject *method_backward(FASTCALL)
{
    PARSE("backward", 0, "gradient", "retain_graph");
    fsdpc_tensor *gradient;
    bool retain = false;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    if (!runtime || fsdpc_py_arg_tensor(a[0], &gradient) < 0 ||
        fsdpc_py_arg_bool(a[1], &retain) < 0)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, FSDPC_PY_INLINE_WORK, status,
                 fsdpc_tape_backward(runtime->tape, TENSOR(object), gradient, retain));
    return fsdpc_py_none(status);
}

static PyObject *method_detach(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_tensor *y = NULL;
    fsdpc_status status = fsdpc_tensor_detach(TENSOR(object), &y);
    return fsdpc_py_result(STATE(object), status, y);
}

static PyObject *method_requires_grad(FASTCALL)
{
    PARSE("requires_grad_", 0, "requires_grad");
    PyObject *value = a[0] ? a[0] : Py_True;
    if (PyObject_SetAttrString(object, "requires_grad", value) < 0)
        return NULL;
    return Py_NewRef(object);
}

/* ---- dtypes and copies ---- */

static PyObject *method_to(PyObject *object, PyObject *argument)
{
    fsdpc_dtype dtype;
    if (fsdpc_py_dtype_parse(argument, &dtype) < 0)
        return NULL;
    if (dtype == TENSOR(object)->dtype)
        return Py_NewRef(object);
    return fsdpc_py_op_cast(STATE(object), TENSOR(object), dtype);
}

#define CAST(name, dtype_)                                                                         \
    static PyObject *method_##name(PyObject *object, PyObject *unused)                             \
    {                                                                                              \
        (void)unused;                                                                              \
        if (TENSOR(object)->dtype == FSDPC_##dtype_)                                               \
            return Py_NewRef(object);                                                              \
        return fsdpc_py_op_cast(STATE(object), TENSOR(object), FSDPC_##dtype_);                    \
    }
CAST(float, F32)
CAST(bfloat16, BF16)
CAST(half, F16)
CAST(double, F64)
#undef CAST

static PyObject *method_clone(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    fsdpc_tensor *y = NULL;
    fsdpc_status status;
    if (!runtime)
        return NULL;
    FSDPC_PY_RUN(runtime, TENSOR(object)->numel, status,
                 fsdpc_op_clone(runtime->tape, TENSOR(object), &y));
    return fsdpc_py_result(STATE(object), status, y);
}

static PyObject *method_contiguous(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(object);
}

/* A leaf's copy is a leaf, as copy.deepcopy of a module needs. */
static PyObject *method_deepcopy(PyObject *object, PyObject *memo)
{
    (void)memo;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    const fsdpc_tensor *t = TENSOR(object);
    fsdpc_tensor *leaf, *y = NULL;
    if (!runtime)
        return NULL;
    if (t->node)
        return PyErr_Format(PyExc_RuntimeError,
                            "only leaves can be deep-copied: detach() this tensor first");
    fsdpc_status status = fsdpc_tensor_detach(t, &leaf);
    if (status == FSDPC_OK) {
        status = fsdpc_op_clone(runtime->tape, leaf, &y);
        fsdpc_tensor_release(leaf);
    }
    if (status == FSDPC_OK)
        y->requires_grad = t->requires_grad;
    return fsdpc_py_result(STATE(object), status, y);
}

/* ---- in place ---- */

int fsdpc_py_tensor_check_inplace(fsdpc_py_tensor *self, const char *what)
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(self->state);
    fsdpc_tensor *t = self->tensor;
    if (!runtime)
        return -1;
    if (t->requires_grad && runtime->tape->grad_enabled) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s changes a tensor that requires grad in place: do it inside no_grad()",
                     what);
        return -1;
    }
    fsdpc_status status = fsdpc_tensor_check_write(t);
    if (status == FSDPC_OK)
        return 0;
    fsdpc_py_raise(status);
    return -1;
}

/* The value as a tensor, new reference. */
static fsdpc_tensor *value_tensor(fsdpc_py_tensor *self, PyObject *value)
{
    fsdpc_tensor *t = fsdpc_py_tensor_peek(NULL, value);
    if (!t)
        return fsdpc_py_tensor_from_data(self->state, value, -1);
    fsdpc_status status = fsdpc_tensor_check(t);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return NULL;
    }
    return fsdpc_tensor_acquire(t);
}

int fsdpc_py_tensor_assign(fsdpc_py_tensor *self, void *dst, int ndim, const size_t *shape,
                           const size_t *strides, PyObject *value)
{
    fsdpc_runtime *runtime = &self->state->runtime;
    fsdpc_tensor *src = value_tensor(self, value);
    if (!src)
        return -1;
    fsdpc_copy_args args = {.ndim = ndim,
                            .dst_dtype = self->tensor->dtype,
                            .src_dtype = src->dtype,
                            .dst = dst,
                            .src = src->data};
    size_t stride = 1, numel = 1;
    bool fits = src->ndim <= ndim;
    for (int i = ndim - 1; fits && i >= 0; i--) {
        int at = i - (ndim - src->ndim);
        size_t extent = at >= 0 ? src->shape[at] : 1;
        fits = extent == 1 || extent == shape[i];
        args.shape[i] = shape[i];
        args.stride_dst[i] = strides[i];
        args.stride_src[i] = extent == 1 ? 0 : stride;
        stride *= extent;
        numel *= shape[i];
    }
    if (!fits) {
        char want[FSDPC_SHAPE_TEXT], is[FSDPC_SHAPE_TEXT];
        PyErr_Format(PyExc_ValueError, "values of shape %s do not broadcast to shape %s",
                     fsdpc_shape_text(src->ndim, src->shape, is),
                     fsdpc_shape_text(ndim, shape, want));
        fsdpc_tensor_release(src);
        return -1;
    }
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, numel, status, runtime->device->nn->copy(&args, runtime->compute));
    fsdpc_tensor_release(src);
    if (status == FSDPC_OK)
        return 0;
    fsdpc_py_raise(status);
    return -1;
}

static PyObject *method_copy(PyObject *object, PyObject *source)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    const fsdpc_tensor *t = self->tensor;
    size_t strides[FSDPC_MAX_DIMS], stride = 1;
    if (fsdpc_py_tensor_check_inplace(self, "copy_") < 0)
        return NULL;
    for (int i = t->ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= t->shape[i];
    }
    if (fsdpc_py_tensor_assign(self, t->data, t->ndim, t->shape, strides, source) < 0)
        return NULL;
    return Py_NewRef(object);
}

static PyObject *method_fill(PyObject *object, PyObject *value)
{
    double number;
    bool integral;
    if (!fsdpc_py_number(value, &number, &integral))
        return PyErr_Format(PyExc_TypeError, "fill_: a number is needed, not %s",
                            Py_TYPE(value)->tp_name);
    return method_copy(object, value);
}

static PyObject *method_zero(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    if (fsdpc_py_tensor_check_inplace(self, "zero_") < 0)
        return NULL;
    fsdpc_runtime *r = &self->state->runtime;
    fsdpc_status status;
    FSDPC_PY_RUN(r, self->tensor->numel, status,
                 fsdpc_device_fill(r->device, self->tensor->data, 0,
                                   fsdpc_tensor_bytes(self->tensor), r->compute));
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

static PyObject *method_set_data(PyObject *object, PyObject *source)
{
    fsdpc_tensor *t = TENSOR(object), *from = fsdpc_py_tensor_of(source);
    if (!from)
        return NULL;
    fsdpc_status status = fsdpc_tensor_check(from);
    if (status == FSDPC_OK && !fsdpc_shape_equal(t, from)) {
        char is[FSDPC_SHAPE_TEXT], want[FSDPC_SHAPE_TEXT];
        status = fsdpc_fail(FSDPC_ERR_SHAPE, "set_data_: shape %s given for a tensor of shape %s",
                            fsdpc_shape_text(from->ndim, from->shape, is),
                            fsdpc_shape_text(t->ndim, t->shape, want));
    }
    if (status == FSDPC_OK)
        status = fsdpc_tensor_bind(t, from->dtype, from->storage, from->data);
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

static PyObject *method_materialize(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_tensor *t = TENSOR(object), *fresh;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    if (!runtime)
        return NULL;
    if (t->storage)
        return Py_NewRef(object);
    fsdpc_status status = fsdpc_tensor_create(runtime->device, t->dtype, t->ndim, t->shape, &fresh);
    if (status == FSDPC_OK) {
        status = fsdpc_tensor_bind(t, t->dtype, fresh->storage, fresh->data);
        fsdpc_tensor_release(fresh);
    }
    return status == FSDPC_OK ? Py_NewRef(object) : fsdpc_py_raise(status);
}

/* ---- shapes ---- */

static PyObject *method_reshape(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t shape[FSDPC_MAX_DIMS];
    int n = fsdpc_py_extents("reshape", args, nargs, shape);
    return n < 0 ? NULL : fsdpc_py_op_reshape(STATE(object), TENSOR(object), n, shape);
}

static PyObject *method_expand(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t shape[FSDPC_MAX_DIMS];
    int n = fsdpc_py_extents("expand", args, nargs, shape);
    return n < 0 ? NULL : fsdpc_py_op_expand(STATE(object), TENSOR(object), n, shape);
}

static PyObject *method_permute(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t given[FSDPC_MAX_DIMS];
    int dims[FSDPC_MAX_DIMS], n = fsdpc_py_extents("permute", args, nargs, given);
    if (n < 0)
        return NULL;
    if (n != TENSOR(object)->ndim)
        return PyErr_Format(PyExc_ValueError, "permute: %d dimensions named of %d", n,
                            TENSOR(object)->ndim);
    for (int i = 0; i < n; i++)
        dims[i] = (int)given[i];
    return fsdpc_py_op_permute(STATE(object), TENSOR(object), dims);
}

static int dim_of(const char *function, PyObject *value, int ndim, int *out)
{
    int dim = *out;
    if (fsdpc_py_arg_int(value, &dim) < 0)
        return -1;
    if (dim < -ndim || dim >= ndim) {
        PyErr_Format(PyExc_IndexError, "%s: dimension %d of a tensor with %d dimensions", function,
                     dim, ndim);
        return -1;
    }
    *out = dim < 0 ? dim + ndim : dim;
    return 0;
}

static PyObject *method_transpose(FASTCALL)
{
    PARSE("transpose", 2, "dim0", "dim1");
    int ndim = TENSOR(object)->ndim, dims[FSDPC_MAX_DIMS], dim0 = 0, dim1 = 0;
    if (dim_of("transpose", a[0], ndim, &dim0) < 0 || dim_of("transpose", a[1], ndim, &dim1) < 0)
        return NULL;
    for (int i = 0; i < ndim; i++)
        dims[i] = i == dim0 ? dim1 : i == dim1 ? dim0 : i;
    return fsdpc_py_op_permute(STATE(object), TENSOR(object), dims);
}

static PyObject *method_flatten(FASTCALL)
{
    PARSE("flatten", 0, "start_dim", "end_dim");
    const fsdpc_tensor *t = TENSOR(object);
    int64_t shape[FSDPC_MAX_DIMS];
    int start = 0, end = t->ndim - 1, n = 0;
    if (t->ndim == 0)
        return fsdpc_py_op_reshape(STATE(object), TENSOR(object), 1, &(int64_t){1});
    if (dim_of("flatten", a[0], t->ndim, &start) < 0 || dim_of("flatten", a[1], t->ndim, &end) < 0)
        return NULL;
    for (int i = 0; i < t->ndim; i++) {
        if (i > start && i <= end)
            shape[n - 1] *= (int64_t)t->shape[i];
        else
            shape[n++] = (int64_t)t->shape[i];
    }
    return fsdpc_py_op_reshape(STATE(object), TENSOR(object), n, shape);
}

static PyObject *method_unsqueeze(PyObject *object, PyObject *argument)
{
    const fsdpc_tensor *t = TENSOR(object);
    int64_t shape[FSDPC_MAX_DIMS + 1];
    int dim = 0;
    if (dim_of("unsqueeze", argument, t->ndim + 1, &dim) < 0)
        return NULL;
    for (int i = 0; i <= t->ndim; i++)
        shape[i] = i == dim ? 1 : (int64_t)t->shape[i - (i > dim)];
    return fsdpc_py_op_reshape(STATE(object), TENSOR(object), t->ndim + 1, shape);
}

static PyObject *method_squeeze(PyObject *object, PyObject *argument)
{
    const fsdpc_tensor *t = TENSOR(object);
    int64_t shape[FSDPC_MAX_DIMS];
    int dim = 0, n = 0;
    if (dim_of("squeeze", argument, t->ndim, &dim) < 0)
        return NULL;
    for (int i = 0; i < t->ndim; i++)
        if (i != dim || t->shape[i] != 1)
            shape[n++] = (int64_t)t->shape[i];
    return fsdpc_py_op_reshape(STATE(object), TENSOR(object), n, shape);
}

/* ---- operations ---- */

static PyObject *reduce(const char *function, FASTCALL, bool mean)
{
    PARSE(function, 0, "dim", "keepdim");
    bool keepdim = false;
    if (fsdpc_py_arg_bool(a[1], &keepdim) < 0)
        return NULL;
    return fsdpc_py_op_reduce(STATE(object), TENSOR(object), a[0], keepdim, mean);
}

static PyObject *method_sum(FASTCALL)
{
    return reduce("sum", object, args, nargs, keywords, false);
}

static PyObject *method_mean(FASTCALL)
{
    return reduce("mean", object, args, nargs, keywords, true);
}

static PyObject *softmax(const char *function, FASTCALL, bool log)
{
    PARSE(function, 0, "dim");
    int dim = -1;
    if (fsdpc_py_arg_int(a[0], &dim) < 0)
        return NULL;
    return fsdpc_py_op_softmax(STATE(object), TENSOR(object), dim, log);
}

static PyObject *method_softmax(FASTCALL)
{
    return softmax("softmax", object, args, nargs, keywords, false);
}

static PyObject *method_log_softmax(FASTCALL)
{
    return softmax("log_softmax", object, args, nargs, keywords, true);
}

static PyObject *method_matmul(PyObject *object, PyObject *other)
{
    fsdpc_tensor *b = fsdpc_py_tensor_of(other);
    return b ? fsdpc_py_op_matmul(STATE(object), TENSOR(object), b) : NULL;
}

static PyObject *method_pow(PyObject *object, PyObject *exponent)
{
    double value;
    bool integral;
    if (!fsdpc_py_number(exponent, &value, &integral))
        return PyErr_Format(PyExc_TypeError, "pow: the exponent is a number, not %s",
                            Py_TYPE(exponent)->tp_name);
    return fsdpc_py_op_unary(STATE(object), FSDPC_UNARY_POW_SCALAR, value, TENSOR(object));
}

#define UNARY(name, kind)                                                                          \
    static PyObject *method_##name(PyObject *object, PyObject *unused)                             \
    {                                                                                              \
        (void)unused;                                                                              \
        return fsdpc_py_op_unary(STATE(object), FSDPC_UNARY_##kind, 0, TENSOR(object));            \
    }
UNARY(exp, EXP)
UNARY(log, LOG)
UNARY(sqrt, SQRT)
UNARY(tanh, TANH)
UNARY(sigmoid, SIGMOID)
UNARY(relu, RELU)
UNARY(abs, ABS)
UNARY(neg, NEG)
#undef UNARY

#define FAST(name, function, flags, doc)                                                           \
    {                                                                                              \
        name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | flags, doc                    \
    }

PyMethodDef fsdpc_py_tensor_methods[] = {
    FAST("size", method_size, 0, "The shape, or one extent of it."),
    {"dim", method_dim, METH_NOARGS, "Number of dimensions."},
    {"numel", method_numel, METH_NOARGS, "Number of elements."},
    {"item", method_item, METH_NOARGS, "The one element, as a Python number."},
    {"tolist", method_tolist, METH_NOARGS, "The elements as nested lists."},
    FAST("backward", method_backward, METH_KEYWORDS,
         "backward(gradient=None, retain_graph=False): gradients of all leaves."),
    {"detach", method_detach, METH_NOARGS, "The same memory, off the tape."},
    FAST("requires_grad_", method_requires_grad, METH_KEYWORDS, "Sets requires_grad."),
    {"register_hook", fsdpc_py_tensor_register_hook, METH_O,
     "register_hook(fn): fn(gradient) runs in backward and may return a replacement."},
    {"numpy", fsdpc_py_tensor_numpy, METH_NOARGS,
     "The same memory as an array; bfloat16 as ml_dtypes' if importable, else copied as float32."},
    {"bits", fsdpc_py_tensor_bits, METH_NOARGS,
     "The same memory as unsigned integers: of bfloat16, uint16."},
    FAST("__dlpack__", fsdpc_py_tensor_dlpack, METH_KEYWORDS, "A DLPack capsule."),
    {"to", method_to, METH_O, "to(dtype): cast; itself if it has that dtype."},
    {"float", method_float, METH_NOARGS, "to(float32)"},
    {"bfloat16", method_bfloat16, METH_NOARGS, "to(bfloat16)"},
    {"half", method_half, METH_NOARGS, "to(float16)"},
    {"double", method_double, METH_NOARGS, "to(float64)"},
    {"clone", method_clone, METH_NOARGS, "A copy, on the tape."},
    {"contiguous", method_contiguous, METH_NOARGS, "Itself: tensors are always dense."},
    {"__format__", fsdpc_py_tensor_format, METH_O, "Of one without dimensions: its number's."},
    {"__deepcopy__", method_deepcopy, METH_O, NULL},
    {"__reduce__", fsdpc_py_tensor_reduce, METH_NOARGS, NULL},
    {"copy_", method_copy, METH_O, "Takes the values of a tensor, array or number, broadcast."},
    {"fill_", method_fill, METH_O, "Sets every element to a number."},
    {"zero_", method_zero, METH_NOARGS, "Sets every element to 0."},
    {"set_data_", method_set_data, METH_O, "Stands on another tensor's memory from now on."},
    {"materialize_", method_materialize, METH_NOARGS, "Gives a deferred tensor memory."},
    FAST("reshape", method_reshape, 0, "Another shape over the same memory; -1 is what is left."),
    FAST("view", method_reshape, 0, "reshape()"),
    FAST("flatten", method_flatten, METH_KEYWORDS, "flatten(start_dim=0, end_dim=-1)"),
    {"unsqueeze", method_unsqueeze, METH_O, "A new dimension of one."},
    {"squeeze", method_squeeze, METH_O, "Without that dimension, if it is one."},
    FAST("transpose", method_transpose, METH_KEYWORDS, "Two dimensions exchanged; copies."),
    FAST("permute", method_permute, 0, "Dimensions in another order; copies."),
    FAST("expand", method_expand, 0, "Broadcast to a shape; copies."),
    FAST("sum", method_sum, METH_KEYWORDS, "sum(dim=None, keepdim=False)"),
    FAST("mean", method_mean, METH_KEYWORDS, "mean(dim=None, keepdim=False)"),
    FAST("softmax", method_softmax, METH_KEYWORDS, "softmax(dim=-1)"),
    FAST("log_softmax", method_log_softmax, METH_KEYWORDS, "log_softmax(dim=-1)"),
    {"matmul", method_matmul, METH_O, "self @ other"},
    {"pow", method_pow, METH_O, "self ** exponent"},
    {"exp", method_exp, METH_NOARGS, "e ** self"},
    {"log", method_log, METH_NOARGS, "Natural logarithms."},
    {"sqrt", method_sqrt, METH_NOARGS, "Square roots."},
    {"tanh", method_tanh, METH_NOARGS, "Hyperbolic tangents."},
    {"sigmoid", method_sigmoid, METH_NOARGS, "1 / (1 + e ** -self)"},
    {"relu", method_relu, METH_NOARGS, "max(self, 0)"},
    {"abs", method_abs, METH_NOARGS, "Absolute values."},
    {"neg", method_neg, METH_NOARGS, "-self"},
    {"__array__", (PyCFunction)(void (*)(void))fsdpc_py_tensor_array, METH_VARARGS | METH_KEYWORDS,
     "For numpy.asarray()."},
    {"__dlpack_device__", fsdpc_py_tensor_dlpack_device, METH_NOARGS, "(1, 0): the CPU."},
    {NULL, NULL, 0, NULL},
};
