/* Tensor: its shape, and reshaped views of the same elements. */
#include "bind/tensor/ops.h"
#include "bind/tensor/tensor.h"

#include "nn/op.h"

#define TENSOR(object) (fsdpc_py_self(object)->tensor)
#define STATE(object) (fsdpc_py_self(object)->state)

static PyObject *method_size(FSDPC_PY_FASTCALL(object))
{
    FSDPC_PY_PARSE("size", 0, "dim");
    PyObject *shape = PyObject_GetAttrString(object, "shape");
    if (!shape || !a[0] || a[0] == Py_None)
        return shape;
    PyObject *extent = PyObject_GetItem(shape, a[0]);
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

#define SHAPED(op)                                                                                 \
    static PyObject *method_##op(PyObject *object, PyObject *const *args, Py_ssize_t nargs)        \
    {                                                                                              \
        int64_t shape[FSDPC_MAX_DIMS];                                                             \
        int n = fsdpc_py_extents(#op, args, nargs, shape);                                         \
        return n < 0 ? NULL                                                                        \
                     : fsdpc_py_tensor_over(                                                       \
                           object, fsdpc_py_op_##op(STATE(object), TENSOR(object), n, shape));     \
    }
SHAPED(reshape)
SHAPED(expand)
SHAPED(permute)
#undef SHAPED

static int dim_of(const char *function, PyObject *value, int ndim, int *inout)
{
    if (fsdpc_py_arg_int(value, inout) < 0)
        return -1;
    fsdpc_status status = fsdpc_op_dim(function, *inout, ndim, inout);
    return fsdpc_py_check(status);
}

static PyObject *reshaped(PyObject *object, int ndim, const int64_t *shape)
{
    return fsdpc_py_tensor_over(object,
                                fsdpc_py_op_reshape(STATE(object), TENSOR(object), ndim, shape));
}

static PyObject *method_flatten(FSDPC_PY_FASTCALL(object))
{
    FSDPC_PY_PARSE("flatten", 0, "start_dim", "end_dim");
    const fsdpc_tensor *t = TENSOR(object);
    int64_t shape[FSDPC_MAX_DIMS];
    int start = 0, end = t->ndim - 1, n = 0;
    if (t->ndim == 0)
        return reshaped(object, 1, &(int64_t){1});
    if (dim_of("flatten", a[0], t->ndim, &start) < 0 || dim_of("flatten", a[1], t->ndim, &end) < 0)
        return NULL;
    for (int i = 0; i < t->ndim; i++) {
        if (i > start && i <= end)
            shape[n - 1] *= (int64_t)t->shape[i];
        else
            shape[n++] = (int64_t)t->shape[i];
    }
    return reshaped(object, n, shape);
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
    return reshaped(object, t->ndim + 1, shape);
}
FSDPC_PY_NAMED(method_unsqueeze, "unsqueeze", "dim")

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
    return reshaped(object, n, shape);
}
FSDPC_PY_NAMED(method_squeeze, "squeeze", "dim")

static PyObject *method_contiguous(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(object);
}

PyMethodDef fsdpc_py_shape_methods[] = {
    FSDPC_PY_METHOD(Tensor, size, method_size, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, dim, method_dim, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, numel, method_numel, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, contiguous, method_contiguous, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, reshape, method_reshape, METH_FASTCALL),
    FSDPC_PY_METHOD(Tensor, view, method_reshape, METH_FASTCALL),
    FSDPC_PY_METHOD(Tensor, flatten, method_flatten, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, unsqueeze, method_unsqueeze_named, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, squeeze, method_squeeze_named, FSDPC_PY_FAST),
    FSDPC_PY_METHOD(Tensor, permute, method_permute, METH_FASTCALL),
    FSDPC_PY_METHOD(Tensor, expand, method_expand, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};
