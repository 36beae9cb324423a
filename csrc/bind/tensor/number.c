/* Arithmetic and comparisons of tensors with tensors, arrays and Python numbers, and the string
 * form of a tensor. */
#include "bind/tensor/ops.h"
#include "bind/tensor/tensor.h"

static PyObject *both(fsdpc_py_state *state, fsdpc_tensor *a, fsdpc_tensor *b, fsdpc_binary kind)
{
    fsdpc_runtime *runtime = &state->runtime;
    fsdpc_tensor *y = NULL;
    fsdpc_status status;
    FSDPC_PY_RUN(runtime, a->numel > b->numel ? a->numel : b->numel, status,
                 fsdpc_op_binary(runtime->tape, kind, a, b, &y));
    return fsdpc_py_result(state, status, y);
}

PyObject *fsdpc_py_tensor_number(PyObject *a, PyObject *b, fsdpc_binary kind)
{
    fsdpc_tensor *ta = fsdpc_py_tensor_peek(NULL, a), *tb = fsdpc_py_tensor_peek(NULL, b);
    fsdpc_tensor *y = NULL;
    if (!ta && !tb)
        Py_RETURN_NOTIMPLEMENTED;
    fsdpc_py_state *state = fsdpc_py_self(ta ? a : b)->state;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    fsdpc_status status;
    if (!runtime)
        return NULL;
    if (ta && tb)
        return both(state, ta, tb, kind);
    fsdpc_scalar value;
    PyObject *other = ta ? b : a;
    if (!fsdpc_py_number(other, &value)) {
        if (!fsdpc_py_is_array(other))
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
        fsdpc_tensor *of = fsdpc_py_tensor_from_data(state, other, -1);
        PyObject *result = of ? both(state, ta ? ta : of, ta ? of : tb, kind) : NULL;
        fsdpc_tensor_release(of);
        return result;
    }
    fsdpc_tensor *t = ta ? ta : tb;
    FSDPC_PY_RUN(runtime, t->numel, status,
                 fsdpc_op_binary_scalar(runtime->tape, kind, t, value, ta == NULL, &y));
    return fsdpc_py_result(state, status, y);
}

PyObject *fsdpc_py_tensor_compare(PyObject *a, PyObject *b, int op)
{
    static const fsdpc_binary kinds[] = {
        [Py_EQ] = FSDPC_BINARY_EQ, [Py_NE] = FSDPC_BINARY_NE, [Py_LT] = FSDPC_BINARY_LT,
        [Py_LE] = FSDPC_BINARY_LE, [Py_GT] = FSDPC_BINARY_GT, [Py_GE] = FSDPC_BINARY_GE};
    return fsdpc_py_tensor_number(a, b, kinds[op]);
}

/* Formats a zero-dimensional tensor like the number it contains. */
static PyObject *tensor_format(PyObject *object, PyObject *spec)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    if (t->ndim > 0 || fsdpc_tensor_check(t) != FSDPC_OK)
        return PyObject_CallMethod((PyObject *)&PyBaseObject_Type, "__format__", "OO", object,
                                   spec);
    PyObject *item = PyObject_CallMethod(object, "item", NULL);
    PyObject *text = item ? PyObject_Format(item, spec) : NULL;
    Py_XDECREF(item);
    return text;
}

/* Returns "tensor(<values>, dtype=..., requires_grad=True)", with values as NumPy prints them. */
static PyObject *values_text(PyObject *object)
{
    PyObject *plain = fsdpc_py_tensor_plain(object);
    PyObject *array = plain ? fsdpc_py_tensor_numpy(plain, NULL) : NULL;
    PyObject *numpy = array ? PyImport_ImportModule("numpy") : NULL;
    PyObject *text = numpy ? PyObject_CallMethod(numpy, "array2string", "OOOOss", array, Py_None,
                                                 Py_None, Py_None, ", ", "tensor(")
                           : NULL; /* the last two: separator and prefix */
    Py_XDECREF(plain);
    Py_XDECREF(array);
    Py_XDECREF(numpy);
    return text;
}

PyObject *fsdpc_py_tensor_repr(PyObject *object)
{
    const fsdpc_tensor *t = fsdpc_py_self(object)->tensor;
    const char *grad = t->requires_grad ? ", requires_grad=True" : "";
    char shape[FSDPC_SHAPE_TEXT];
    fsdpc_shape_text(t->ndim, t->shape, shape);
    if (fsdpc_tensor_check(t) != FSDPC_OK)
        return PyUnicode_FromFormat("tensor(<%s>, shape=%s, dtype=%s%s)",
                                    t->storage ? "not gathered" : "deferred", shape,
                                    fsdpc_dtype_name(t->dtype), grad);
    PyObject *values = values_text(object);
    if (!values)
        return NULL;
    PyObject *text = t->numel ? PyUnicode_FromFormat("tensor(%U, dtype=%s%s)", values,
                                                     fsdpc_dtype_name(t->dtype), grad)
                              : PyUnicode_FromFormat("tensor([], shape=%s, dtype=%s%s)", shape,
                                                     fsdpc_dtype_name(t->dtype), grad);
    Py_DECREF(values);
    return text;
}

PyMethodDef fsdpc_py_number_methods[] = {
    FSDPC_PY_METHOD(Tensor, __format__, tensor_format, METH_O),
    {NULL, NULL, 0, NULL},
};
