/* Tensor's type: its attributes and operators.
 *
 * A Tensor has no __dict__, but instances of subclasses defined in Python have one. If nothing else
 * refers to a C tensor, the garbage collector visits its Python hooks, so a hook that refers back
 * to its tensor can be collected.
 */
#include "bind/tensor/tensor.h"

#include <structmember.h>

static int tensor_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(fsdpc_py_self(object)->base);
    return fsdpc_py_hooks_traverse(fsdpc_py_self(object)->tensor, visit, arg);
}

static int tensor_clear(PyObject *object)
{
    fsdpc_py_hooks_clear(fsdpc_py_self(object)->tensor);
    Py_CLEAR(fsdpc_py_self(object)->base);
    return 0;
}

/* ---- creation ---- */

/* Tensor(data, dtype=None, requires_grad=False) */
static PyObject *tensor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "data", "dtype", "requires_grad");
    PyObject *data, *dtype_object = NULL;
    int requires_grad = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Op:Tensor", names, &data, &dtype_object,
                                     &requires_grad))
        return NULL;
    fsdpc_py_state *state = fsdpc_py_state_of_type(type);
    if (!state || !fsdpc_py_state_runtime(state))
        return NULL;
    fsdpc_tensor *source = fsdpc_py_tensor_peek(NULL, data), *t;
    fsdpc_dtype dtype = source ? source->dtype : FSDPC_F32;
    if (fsdpc_py_dtype_optional(dtype_object, &dtype) < 0)
        return NULL;
    bool given = dtype_object && dtype_object != Py_None;
    if (source && source->dtype == dtype) {
        fsdpc_status status = fsdpc_tensor_detach(source, &t);
        if (status != FSDPC_OK)
            return fsdpc_py_raise(status);
    } else {
        t = fsdpc_py_tensor_from_data(state, data, given ? (int)dtype : -1);
        if (!t)
            return NULL;
    }
    if (fsdpc_py_check_requires_grad(requires_grad, t->dtype) < 0) {
        fsdpc_tensor_release(t);
        return NULL;
    }
    t->requires_grad = requires_grad;
    return fsdpc_py_tensor_make(type, state, t);
}

/* ---- attributes ---- */

#define GETTER(name) static PyObject *name(PyObject *object, void *Py_UNUSED(unused))
#define TENSOR (fsdpc_py_self(object)->tensor)

FSDPC_PY_GETTER(get_shape, fsdpc_py_shape_tuple(TENSOR->ndim, TENSOR->shape))

GETTER(get_dtype)
{
    const fsdpc_tensor *t = TENSOR;
    return Py_NewRef(fsdpc_py_self(object)->state->dtypes[t->dtype]);
}

FSDPC_PY_GETTER(get_ndim, PyLong_FromLong(TENSOR->ndim))

GETTER(get_device)
{
    const fsdpc_tensor *t = TENSOR;
    return PyUnicode_FromString(t->storage ? t->storage->device->ops->name : "cpu");
}

FSDPC_PY_GETTER(get_nbytes, PyLong_FromSize_t(fsdpc_tensor_bytes(TENSOR)))
FSDPC_PY_GETTER(get_requires_grad, PyBool_FromLong(TENSOR->requires_grad))

static int set_requires_grad(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_tensor *t = TENSOR;
    int truth = value ? PyObject_IsTrue(value) : -1;
    if (!value)
        PyErr_SetString(PyExc_AttributeError, "requires_grad cannot be deleted");
    if (truth < 0)
        return -1;
    if (t->node && !truth) {
        PyErr_SetString(PyExc_RuntimeError,
                        "only a leaf's requires_grad can be switched off, and this tensor was made "
                        "by an operation: use detach()");
        return -1;
    }
    if (fsdpc_py_check_requires_grad(truth, t->dtype) < 0)
        return -1;
    t->requires_grad = truth;
    return 0;
}

GETTER(get_grad)
{
    fsdpc_tensor *grad = TENSOR->grad;
    if (!grad)
        Py_RETURN_NONE;
    return fsdpc_py_tensor_new(fsdpc_py_self(object)->state, fsdpc_tensor_acquire(grad));
}

static int set_grad(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_tensor *t = TENSOR, *grad = NULL;
    if (value && value != Py_None) {
        grad = fsdpc_py_tensor_of(value);
        if (!grad)
            return -1;
        if (t->node || !fsdpc_shape_equal(t, grad) || t->dtype != grad->dtype) {
            char want[FSDPC_SHAPE_TEXT], is[FSDPC_SHAPE_TEXT];
            PyErr_Format(PyExc_ValueError,
                         "grad of shape %s of %s for a tensor of shape %s of %s: a leaf's grad has "
                         "its shape and dtype",
                         fsdpc_shape_text(grad->ndim, grad->shape, is),
                         fsdpc_dtype_name(grad->dtype), fsdpc_shape_text(t->ndim, t->shape, want),
                         fsdpc_dtype_name(t->dtype));
            return -1;
        }
    }
    fsdpc_tensor *old = t->grad;
    t->grad = fsdpc_tensor_acquire(grad);
    fsdpc_tensor_release(old);
    return 0;
}

FSDPC_PY_GETTER(get_is_leaf, PyBool_FromLong(TENSOR->node == NULL))
FSDPC_PY_GETTER(get_version, PyLong_FromLong(TENSOR->storage ? (long)TENSOR->storage->version : 0))

GETTER(get_grad_fn)
{
    const fsdpc_node *node = TENSOR->node;
    if (!node)
        Py_RETURN_NONE;
    return PyUnicode_FromString(node->ops->name);
}

FSDPC_PY_GETTER(get_is_deferred, PyBool_FromLong(TENSOR->storage == NULL))
FSDPC_PY_GETTER(get_data_ptr, PyLong_FromVoidPtr(TENSOR->data))
FSDPC_PY_GETTER(get_transposed, PyObject_CallMethod(object, "transpose", "ii", -2, -1))

static PyGetSetDef getset[] = {
    FSDPC_PY_ATTRIBUTE(Tensor, shape, get_shape, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, dtype, get_dtype, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, ndim, get_ndim, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, device, get_device, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, nbytes, get_nbytes, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, requires_grad, get_requires_grad, set_requires_grad),
    FSDPC_PY_ATTRIBUTE(Tensor, grad, get_grad, set_grad),
    FSDPC_PY_ATTRIBUTE(Tensor, is_leaf, get_is_leaf, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, grad_fn, get_grad_fn, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, _version, get_version, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, is_deferred, get_is_deferred, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, data_ptr, get_data_ptr, NULL),
    FSDPC_PY_ATTRIBUTE(Tensor, T, get_transposed, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static Py_ssize_t tensor_length(PyObject *object)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    if (t->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "len() of a tensor without dimensions");
        return -1;
    }
    return (Py_ssize_t)t->shape[0];
}

/* ---- operators ---- */

#define OPERATOR(name, kind)                                                                       \
    static PyObject *tensor_##name(PyObject *a, PyObject *b)                                       \
    {                                                                                              \
        return fsdpc_py_tensor_number(a, b, FSDPC_BINARY_##kind);                                  \
    }
OPERATOR(add, ADD)
OPERATOR(subtract, SUB)
OPERATOR(multiply, MUL)
OPERATOR(divide, DIV)

static PyObject *call_op(const char *name, PyObject *object)
{
    return PyObject_CallMethod(object, name, NULL);
}

static PyObject *tensor_negative(PyObject *object)
{
    return call_op("neg", object);
}

static PyObject *tensor_absolute(PyObject *object)
{
    return call_op("abs", object);
}

static PyObject *tensor_power(PyObject *a, PyObject *b, PyObject *modulus)
{
    if (modulus != Py_None)
        Py_RETURN_NOTIMPLEMENTED;
    return fsdpc_py_tensor_peek(NULL, a) ? PyObject_CallMethod(a, "pow", "(O)", b)
                                         : fsdpc_py_tensor_number(a, b, FSDPC_BINARY_POW);
}

static PyObject *tensor_matmul(PyObject *a, PyObject *b)
{
    if (!fsdpc_py_tensor_peek(NULL, a) || !fsdpc_py_tensor_peek(NULL, b))
        Py_RETURN_NOTIMPLEMENTED;
    return PyObject_CallMethod(a, "matmul", "O", b);
}

static int tensor_bool(PyObject *object)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    if (t->numel != 1) {
        char text[FSDPC_SHAPE_TEXT];
        PyErr_Format(PyExc_ValueError,
                     "a tensor of shape %s is neither true nor false: compare one element, or ask "
                     "(a == b).mean() for the part that is equal; for one object, use `is`",
                     fsdpc_shape_text(t->ndim, t->shape, text));
        return -1;
    }
    PyObject *item = call_op("item", object);
    int truth = item ? PyObject_IsTrue(item) : -1;
    Py_XDECREF(item);
    return truth;
}

static PyObject *tensor_float(PyObject *object)
{
    PyObject *item = call_op("item", object);
    PyObject *result = item ? PyNumber_Float(item) : NULL;
    Py_XDECREF(item);
    return result;
}

static PyObject *tensor_int(PyObject *object)
{
    PyObject *item = call_op("item", object);
    PyObject *result = item ? PyNumber_Long(item) : NULL;
    Py_XDECREF(item);
    return result;
}

/* Equality compares elements, but a dict looks up a tensor by identity. */
static Py_hash_t tensor_hash(PyObject *object)
{
    return PyBaseObject_Type.tp_hash(object);
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fsdpc_py_tensor, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, tensor_new},
    {Py_tp_dealloc, fsdpc_py_tensor_dealloc},
    {Py_tp_traverse, tensor_traverse},
    {Py_tp_clear, tensor_clear},
    {Py_tp_repr, fsdpc_py_tensor_repr},
    {Py_tp_richcompare, fsdpc_py_tensor_compare},
    {Py_tp_hash, tensor_hash},
    {Py_tp_getset, getset},
    {Py_tp_members, members},
    {Py_tp_doc, (void *)fsdpc_doc_Tensor},
    {Py_mp_length, tensor_length},
    {Py_mp_subscript, fsdpc_py_tensor_getitem},
    {Py_mp_ass_subscript, fsdpc_py_tensor_setitem},
    {Py_nb_add, tensor_add},
    {Py_nb_subtract, tensor_subtract},
    {Py_nb_multiply, tensor_multiply},
    {Py_nb_true_divide, tensor_divide},
    {Py_nb_negative, tensor_negative},
    {Py_nb_absolute, tensor_absolute},
    {Py_nb_power, tensor_power},
    {Py_nb_matrix_multiply, tensor_matmul},
#define X(name, function, sign) {Py_nb_inplace_##name, fsdpc_py_tensor_inplace_##name},
    FSDPC_PY_INPLACE(X)
#undef X
        {Py_nb_inplace_power, fsdpc_py_tensor_inplace_power},
    {Py_nb_bool, tensor_bool},
    {Py_nb_float, tensor_float},
    {Py_nb_int, tensor_int},
    {Py_bf_getbuffer, fsdpc_py_tensor_getbuffer},
    {Py_bf_releasebuffer, fsdpc_py_tensor_releasebuffer},
    {0, NULL},
};

FSDPC_PY_TYPE(tensor, Tensor, fsdpc_py_tensor, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots);
