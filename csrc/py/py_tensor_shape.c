/* Tensor: its shape, and other shapes over the same elements. */
#include "py/py_ops.h"
#include "py/py_tensor.h"

#include "nn/op.h"

#define TENSOR(object) (fsdpc_py_self(object)->tensor)
#define STATE(object) (fsdpc_py_self(object)->state)

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
    return fsdpc_py_check(status);
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

static PyObject *method_contiguous(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(object);
}

PyMethodDef fsdpc_py_shape_methods[] = {
    FSDPC_PY_FAST("size", method_size, 0, "The shape, or one extent of it."),
    {"dim", method_dim, METH_NOARGS, "Number of dimensions."},
    {"numel", method_numel, METH_NOARGS, "Number of elements."},
    {"contiguous", method_contiguous, METH_NOARGS, "Itself: tensors are always dense."},
    FSDPC_PY_FAST("reshape", method_reshape, 0,
                  "Another shape over the same memory; -1 is what is left."),
    FSDPC_PY_FAST("view", method_reshape, 0, "reshape()"),
    FSDPC_PY_FAST("flatten", method_flatten, METH_KEYWORDS, "flatten(start_dim=0, end_dim=-1)"),
    {"unsqueeze", method_unsqueeze, METH_O, "A new dimension of one."},
    {"squeeze", method_squeeze, METH_O, "Without that dimension, if it is one."},
    FSDPC_PY_FAST("permute", method_permute, 0, "Dimensions in another order; copies."),
    FSDPC_PY_FAST("expand", method_expand, 0, "Broadcast to a shape; copies."),
    {NULL, NULL, 0, NULL},
};
