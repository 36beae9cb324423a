/* Methods of Tensor: the table of them, values, autograd, dtypes and shapes.  Operations are those
 * of py_ops.c with self as the first argument; py_tensor_write.c has what changes one in place. */
#include "py/py_ops.h"
#include "py/py_tensor.h"

#include "nn/op.h"
#include "ops/flat_ops.h"

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

static PyObject *method_dim(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(TENSOR(object)->ndim);
}

static PyObject *method_numel(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(TENSOR(object)->numel);
}

static PyObject *method_item(PyObject *object, PyObject *Py_UNUSED(unused))
{
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

static PyObject *method_tolist(PyObject *object, PyObject *Py_UNUSED(unused))
{
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

static PyObject *method_backward(FSDPC_PY_FASTCALL(object))
{
    FSDPC_PY_PARSE("backward", 0, "gradient", "retain_graph");
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

static PyObject *method_detach(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_tensor *y = NULL;
    fsdpc_status status = fsdpc_tensor_detach(TENSOR(object), &y);
    return fsdpc_py_result(STATE(object), status, y);
}

static PyObject *method_requires_grad(FSDPC_PY_FASTCALL(object))
{
    FSDPC_PY_PARSE("requires_grad_", 0, "requires_grad");
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

static PyObject *method_clone(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(STATE(object));
    fsdpc_tensor *y = NULL;
    fsdpc_status status;
    if (!runtime)
        return NULL;
    FSDPC_PY_RUN(runtime, TENSOR(object)->numel, status,
                 fsdpc_op_clone(runtime->tape, TENSOR(object), &y));
    return fsdpc_py_result(STATE(object), status, y);
}

static PyObject *method_contiguous(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(object);
}

/* A leaf's copy is a leaf, as copy.deepcopy of a module needs. */
static PyObject *method_deepcopy(PyObject *object, PyObject *Py_UNUSED(memo))
{
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
    int64_t dims[FSDPC_MAX_DIMS];
    int n = fsdpc_py_extents("permute", args, nargs, dims);
    return n < 0 ? NULL : fsdpc_py_op_permute(STATE(object), TENSOR(object), n, dims);
}

static int dim_of(const char *function, PyObject *value, int ndim, int *inout)
{
    if (fsdpc_py_arg_int(value, inout) < 0)
        return -1;
    fsdpc_status status = fsdpc_op_dim(function, *inout, ndim, inout);
    return status == FSDPC_OK ? 0 : (fsdpc_py_raise(status), -1);
}

static PyObject *method_flatten(FSDPC_PY_FASTCALL(object))
{
    FSDPC_PY_PARSE("flatten", 0, "start_dim", "end_dim");
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
    {"copy_", fsdpc_py_tensor_copy, METH_O,
     "Takes the values of a tensor, array or number, broadcast."},
    {"fill_", fsdpc_py_tensor_fill, METH_O, "Sets every element to a number."},
    {"zero_", fsdpc_py_tensor_zero, METH_NOARGS, "Sets every element to 0."},
    {"set_data_", fsdpc_py_tensor_set_data, METH_O,
     "Stands on another tensor's memory from now on."},
    {"materialize_", fsdpc_py_tensor_materialize, METH_NOARGS, "Gives a deferred tensor memory."},
    FAST("reshape", method_reshape, 0, "Another shape over the same memory; -1 is what is left."),
    FAST("view", method_reshape, 0, "reshape()"),
    FAST("flatten", method_flatten, METH_KEYWORDS, "flatten(start_dim=0, end_dim=-1)"),
    {"unsqueeze", method_unsqueeze, METH_O, "A new dimension of one."},
    {"squeeze", method_squeeze, METH_O, "Without that dimension, if it is one."},
    FAST("permute", method_permute, 0, "Dimensions in another order; copies."),
    FAST("expand", method_expand, 0, "Broadcast to a shape; copies."),
#define X(op) FAST(#op, fsdpc_py_method_##op, METH_KEYWORDS, "As the function."),
    FSDPC_PY_OP_METHODS(X)
#undef X
        {"__array__", (PyCFunction)(void (*)(void))fsdpc_py_tensor_array,
         METH_VARARGS | METH_KEYWORDS, "For numpy.asarray()."},
    {"__dlpack_device__", fsdpc_py_tensor_dlpack_device, METH_NOARGS, "(1, 0): the CPU."},
    {NULL, NULL, 0, NULL},
};
