/* Indexing by integers, slices, None and an ellipsis, for reading and writing. Indices with arrays
 * or masks are handled by methods that fsdpc.functional adds to the type.
 *
 * An index becomes one fsdpc_range per dimension. Reading returns a view if the box is contiguous
 * (rows of the leading dimension), otherwise a copy. Each None then adds a dimension of size one.
 */
#include "bind/tensor/tensor.h"

typedef struct parsed_index {
    fsdpc_range slices[FSDPC_MAX_DIMS];
    int ndim;                          /* of the result, including new dimensions */
    int64_t shape[2 * FSDPC_MAX_DIMS]; /* of the result */
    bool has_new;
} parsed_index;

static int add_extent(parsed_index *p, size_t extent)
{
    if (p->ndim == FSDPC_MAX_DIMS) {
        PyErr_Format(PyExc_IndexError, "the result would have more than %d dimensions",
                     FSDPC_MAX_DIMS);
        return -1;
    }
    p->shape[p->ndim++] = (int64_t)extent;
    return 0;
}

static int refuse(PyObject *item)
{
    PyErr_Format(PyExc_TypeError,
                 "a tensor is indexed by integers, slices, None, ... and arrays of integers or "
                 "bool, not %s",
                 Py_TYPE(item)->tp_name);
    return -1;
}

/* Returns whether the items include an array, a list or a tensor. */
static bool has_arrays(PyObject *index)
{
    PyObject **items = PyTuple_Check(index) ? ((PyTupleObject *)index)->ob_item : &index;
    Py_ssize_t n = PyTuple_Check(index) ? PyTuple_GET_SIZE(index) : 1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (PyList_Check(items[i]) || fsdpc_py_tensor_peek(NULL, items[i]) ||
            (PySequence_Check(items[i]) && fsdpc_py_is_array(items[i])))
            return true;
    return false;
}

static int parse_one(parsed_index *p, const fsdpc_tensor *t, int dim, PyObject *item)
{
    Py_ssize_t extent = (Py_ssize_t)t->shape[dim];
    if (PySlice_Check(item)) {
        Py_ssize_t start, stop, step;
        if (PySlice_Unpack(item, &start, &stop, &step) < 0)
            return -1;
        if (step < 1) {
            PyErr_Format(PyExc_ValueError, "a slice's step is %zd; tensors go forward only", step);
            return -1;
        }
        Py_ssize_t count = PySlice_AdjustIndices(extent, &start, &stop, step);
        p->slices[dim] = (fsdpc_range){(size_t)start, (size_t)count, (size_t)step, false};
        return add_extent(p, (size_t)count);
    }
    if (!PyIndex_Check(item) || PyBool_Check(item) || fsdpc_py_tensor_peek(NULL, item))
        return refuse(item);
    Py_ssize_t at = PyNumber_AsSsize_t(item, PyExc_IndexError);
    if (at == -1 && PyErr_Occurred())
        return PyErr_ExceptionMatches(PyExc_TypeError) ? refuse(item) : -1; /* an array */
    if (at < -extent || at >= extent) {
        PyErr_Format(PyExc_IndexError, "index %zd of dimension %d with %zd elements", at, dim,
                     extent);
        return -1;
    }
    p->slices[dim] = (fsdpc_range){(size_t)(at < 0 ? at + extent : at), 1, 1, true};
    return 0;
}

static int parse_items(parsed_index *p, const fsdpc_tensor *t, PyObject *const *items, Py_ssize_t n)
{
    Py_ssize_t used = 0, ellipses = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        ellipses += items[i] == Py_Ellipsis;
        used += items[i] != Py_None && items[i] != Py_Ellipsis;
    }
    if (ellipses > 1) {
        PyErr_SetString(PyExc_IndexError, "an index has one ellipsis (...) at most");
        return -1;
    }
    if (used > t->ndim) {
        PyErr_Format(PyExc_IndexError, "%zd indices for a tensor with %d dimensions", used,
                     t->ndim);
        return -1;
    }
    int dim = 0;
    for (Py_ssize_t i = 0; i < n || dim < t->ndim; i++) {
        if (i < n && items[i] == Py_None) {
            p->has_new = true;
            if (add_extent(p, 1) < 0)
                return -1;
        } else if (i < n && items[i] != Py_Ellipsis) {
            if (parse_one(p, t, dim++, items[i]) < 0)
                return -1;
        } else {
            /* the ellipsis, or the end: whole dimensions */
            Py_ssize_t whole = i < n ? t->ndim - used : t->ndim - dim;
            for (; whole > 0; whole--, dim++) {
                p->slices[dim] = (fsdpc_range){0, t->shape[dim], 1, false};
                if (add_extent(p, t->shape[dim]) < 0)
                    return -1;
            }
        }
    }
    return 0;
}

static int parse_index(parsed_index *p, const fsdpc_tensor *t, PyObject *index)
{
    *p = (parsed_index){0};
    if (PyTuple_Check(index))
        return parse_items(p, t, ((PyTupleObject *)index)->ob_item, PyTuple_GET_SIZE(index));
    return parse_items(p, t, &index, 1);
}

PyObject *fsdpc_py_tensor_getitem(PyObject *object, PyObject *index)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(self->state);
    parsed_index p;
    if (has_arrays(index))
        return PyObject_CallMethod(object, "_take", "(O)", index);
    if (!runtime || parse_index(&p, self->tensor, index) < 0)
        return NULL;
    fsdpc_tensor *y = NULL, *reshaped = NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, self->tensor->numel, status,
                 fsdpc_op_slice(runtime->tape, self->tensor, p.slices, &y));
    if (status == FSDPC_OK && p.has_new) {
        status = fsdpc_op_reshape(runtime->tape, y, p.ndim, p.shape, &reshaped);
        fsdpc_tensor_release(y);
        y = reshaped;
    }
    return fsdpc_py_tensor_over(object, fsdpc_py_result(self->state, status, y));
}

int fsdpc_py_tensor_setitem(PyObject *object, PyObject *index, PyObject *value)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    const fsdpc_tensor *t = self->tensor;
    parsed_index p;
    if (!value) {
        PyErr_SetString(PyExc_TypeError, "elements of a tensor cannot be deleted");
        return -1;
    }
    if (has_arrays(index)) {
        PyObject *done = PyObject_CallMethod(object, "_put", "(OO)", index, value);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    if (parse_index(&p, t, index) < 0)
        return -1;
    fsdpc_box box = {0};
    size_t stride = 1, numel = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        box.offset += p.slices[i].count ? stride * p.slices[i].start : 0;
        numel *= p.slices[i].count;
        stride *= t->shape[i];
    }
    if (!numel)
        box.offset = 0;
    for (int i = 0; i < t->ndim; i++) {
        stride = t->shape[i] ? stride / t->shape[i] : 0; /* an empty tensor writes nothing */
        if (p.slices[i].drop)
            continue;
        box.shape[box.ndim] = p.slices[i].count;
        box.strides[box.ndim++] = stride * p.slices[i].step;
    }
    return fsdpc_py_tensor_assign(self, "[...] =", &box, value, NULL);
}
