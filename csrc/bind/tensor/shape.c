/* Operations that change shapes or join tensors, as functions, methods of Tensor, or both. */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"
#include "nn/op.h"

FSDPC_PY_TENSOR_OP(size)
{
    (void)state;
    PyObject *shape = fsdpc_py_shape_tuple(a->self->ndim, a->self->shape);
    if (!shape || !a->dim)
        return shape;
    PyObject *extent = PyObject_GetItem(shape, a->dim);
    Py_DECREF(shape);
    return extent;
}

static PyObject *method_dim(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(fsdpc_py_self(object)->tensor->ndim);
}

static PyObject *method_numel(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(fsdpc_py_self(object)->tensor->numel);
}

static PyObject *method_contiguous(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(object);
}

/* ---- other shapes of the same elements, and copies in another order ---- */

/* Defines the function and the method with this name. The result may share the input's memory. */
#define SHAPED(name, shape)                                                                        \
    FSDPC_PY_OP(name)                                                                              \
    {                                                                                              \
        return fsdpc_py_tensor_over(a->object, name(state, a->x, &a->shape));                      \
    }                                                                                              \
    FSDPC_PY_TENSOR_OP(name)                                                                       \
    {                                                                                              \
        return fsdpc_py_tensor_over(a->object, name(state, a->self, &a->shape));                   \
    }

static PyObject *reshape(fsdpc_py_state *state, fsdpc_tensor *x, const fsdpc_py_extents *shape)
{
    FSDPC_PY_RETURN(0, fsdpc_op_reshape(r->tape, x, shape->n, shape->at, &y));
}
SHAPED(reshape, shape)

static PyObject *permute(fsdpc_py_state *state, fsdpc_tensor *x, const fsdpc_py_extents *given)
{
    int dims[FSDPC_MAX_DIMS];
    if (given->n != x->ndim)
        return PyErr_Format(PyExc_ValueError, "permute: %d dimensions named of %d", given->n,
                            x->ndim);
    for (int i = 0; i < given->n; i++) {
        dims[i] = (int)given->at[i];
        if (dims[i] != given->at[i])
            return PyErr_Format(PyExc_OverflowError, "%lld does not fit an int",
                                (long long)given->at[i]);
    }
    FSDPC_PY_RETURN(x->numel, fsdpc_op_permute(r->tape, x, dims, &y));
}
SHAPED(permute, dims)

static PyObject *expand(fsdpc_py_state *state, fsdpc_tensor *x, const fsdpc_py_extents *shape)
{
    size_t sizes[FSDPC_MAX_DIMS], numel = 1;
    for (int i = 0; i < shape->n; i++) {
        int at = i - (shape->n - x->ndim);
        int64_t extent = shape->at[i];
        if (extent < -1 || (extent == -1 && at < 0))
            return PyErr_Format(PyExc_ValueError, "expand: extent %lld of dimension %d",
                                (long long)extent, i);
        sizes[i] = extent == -1 ? x->shape[at] : (size_t)extent;
        numel *= sizes[i];
    }
    FSDPC_PY_RETURN(numel, fsdpc_op_expand(r->tape, x, shape->n, sizes, &y));
}
SHAPED(expand, shape)

FSDPC_PY_TENSOR_OP(flatten)
{
    fsdpc_tensor *t = a->self;
    fsdpc_py_extents shape = {.n = 0};
    int start, end;
    fsdpc_status status = fsdpc_op_dim("flatten", a->start_dim, t->ndim, &start);
    if (status == FSDPC_OK)
        status = fsdpc_op_dim("flatten", a->end_dim, t->ndim, &end);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    for (int i = 0; i < t->ndim; i++) {
        if (i > start && i <= end)
            shape.at[shape.n - 1] *= (int64_t)t->shape[i];
        else
            shape.at[shape.n++] = (int64_t)t->shape[i];
    }
    if (t->ndim == 0)
        shape.at[shape.n++] = 1;
    return fsdpc_py_tensor_over(a->object, reshape(state, t, &shape));
}

/* x with a dimension of size 1 at `dim`. */
static fsdpc_status widen(fsdpc_tape *tape, fsdpc_tensor *x, int dim, fsdpc_tensor **out)
{
    int64_t shape[FSDPC_MAX_DIMS + 1];
    for (int i = 0; i <= x->ndim; i++)
        shape[i] = i == dim ? 1 : (int64_t)x->shape[i - (i > dim)];
    return fsdpc_op_reshape(tape, x, x->ndim + 1, shape, out);
}

FSDPC_PY_TENSOR_OP(unsqueeze)
{
    int dim;
    fsdpc_tensor *y = NULL;
    fsdpc_status status = fsdpc_op_dim("unsqueeze", a->dim, a->self->ndim + 1, &dim);
    if (status == FSDPC_OK)
        status = widen(state->runtime.tape, a->self, dim, &y);
    return fsdpc_py_tensor_over(a->object, fsdpc_py_result(state, status, y));
}

FSDPC_PY_TENSOR_OP(squeeze)
{
    fsdpc_tensor *t = a->self;
    fsdpc_py_extents shape = {.n = 0};
    int dim;
    fsdpc_status status = fsdpc_op_dim("squeeze", a->dim, t->ndim, &dim);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    for (int i = 0; i < t->ndim; i++)
        if (i != dim || t->shape[i] != 1)
            shape.at[shape.n++] = (int64_t)t->shape[i];
    return fsdpc_py_tensor_over(a->object, reshape(state, t, &shape));
}

FSDPC_PY_RETURNS(transpose, a->x->numel, fsdpc_op_transpose(r->tape, a->x, a->dim0, a->dim1, &y))
FSDPC_PY_RETURNS(flip, a->x->numel, fsdpc_op_flip(r->tape, a->x, a->dims, &y))
FSDPC_PY_RETURNS(roll, a->x->numel, fsdpc_op_roll(r->tape, a->x, a->shift, a->dim, &y))

/* ---- sequences of tensors ---- */

/* Collects the tensors of a sequence, adding a dimension to each for stack. */
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
        int at = dim < 0 ? dim + x->ndim + 1 : dim;
        if (at < 0 || at > x->ndim || x->ndim == FSDPC_MAX_DIMS) {
            PyErr_Format(PyExc_IndexError, "stack: dimension %d for tensors of %d dimensions", dim,
                         x->ndim);
            return -1;
        }
        fsdpc_status status = widen(r->tape, x, at, &out[i]);
        if (fsdpc_py_check(status) < 0)
            return -1;
    }
    return 0;
}

static PyObject *concat(fsdpc_py_state *state, PyObject *tensors, int dim, bool stack)
{
    fsdpc_runtime *r = &state->runtime;
    PyObject *fast = fsdpc_py_tensors(tensors), *result = NULL;
    if (!fast)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    fsdpc_tensor **xs = fsdpc_py_array(n, sizeof *xs), *y = NULL;
    if (xs && collect(r, fast, dim, stack, xs) == 0) {
        size_t work = 0;
        for (Py_ssize_t i = 0; i < n; i++)
            work += xs[i]->numel;
        fsdpc_status status;
        FSDPC_PY_RUN(r, work, status, fsdpc_op_concat(r->tape, (int)n, xs, dim, &y));
        result = fsdpc_py_result(state, status, y);
    }
    for (Py_ssize_t i = 0; xs && i < n; i++)
        fsdpc_tensor_release(xs[i]);
    PyMem_Free(xs);
    Py_DECREF(fast);
    return result;
}

FSDPC_PY_OP(concat)
{
    return concat(state, a->tensors, a->dim, false);
}

FSDPC_PY_OP(stack)
{
    return concat(state, a->tensors, a->dim, true);
}

/* ---- the tables ---- */

FSDPC_OPERATIONS_SHAPES(FSDPC_PY_DEFINE_FUNCTION, FSDPC_PY_DEFINE_BOTH)

PyMethodDef fsdpc_py_shape_functions[] = {
    FSDPC_OPERATIONS_SHAPES(FSDPC_PY_FUNCTIONS_ROW, FSDPC_PY_FUNCTIONS_ROW){NULL, NULL, 0, NULL},
};
PyMethodDef fsdpc_py_shape_methods[] = {
    FSDPC_OPERATIONS_SHAPES(FSDPC_PY_NO_ROW, FSDPC_PY_METHODS_ROW) FSDPC_PY_TENSOR_ROW(size),
    FSDPC_PY_TENSOR_ROW(reshape),
    FSDPC_PY_METHOD(Tensor, view, method_Tensor_reshape, FSDPC_PY_FAST),
    FSDPC_PY_TENSOR_ROW(permute),
    FSDPC_PY_TENSOR_ROW(expand),
    FSDPC_PY_TENSOR_ROW(flatten),
    FSDPC_PY_TENSOR_ROW(unsqueeze),
    FSDPC_PY_TENSOR_ROW(squeeze),
    FSDPC_PY_METHOD(Tensor, dim, method_dim, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, numel, method_numel, METH_NOARGS),
    FSDPC_PY_METHOD(Tensor, contiguous, method_contiguous, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
