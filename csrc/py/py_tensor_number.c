/* Arithmetic of tensors with tensors and Python numbers, and how a tensor prints. */
#include "py/py_ops.h"
#include "py/py_tensor.h"

PyObject *fsdpc_py_tensor_number(PyObject *a, PyObject *b, fsdpc_binary kind)
{
    fsdpc_tensor *ta = fsdpc_py_tensor_peek(NULL, a), *tb = fsdpc_py_tensor_peek(NULL, b), *y;
    if (!ta && !tb)
        Py_RETURN_NOTIMPLEMENTED;
    fsdpc_py_state *state = fsdpc_py_self(ta ? a : b)->state;
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    fsdpc_status status;
    if (!runtime)
        return NULL;
    if (ta && tb) {
        size_t work = ta->numel > tb->numel ? ta->numel : tb->numel;
        FSDPC_PY_RUN(runtime, work, status, fsdpc_op_binary(runtime->tape, kind, ta, tb, &y));
        return fsdpc_py_result(state, status, y);
    }
    double value;
    bool integral;
    if (!fsdpc_py_number(ta ? b : a, &value, &integral))
        Py_RETURN_NOTIMPLEMENTED;
    fsdpc_tensor *t = ta ? ta : tb;
    FSDPC_PY_RUN(runtime, t->numel, status,
                 fsdpc_op_binary_scalar(runtime->tape, kind, t, value, integral, ta == NULL, &y));
    return fsdpc_py_result(state, status, y);
}

/* "tensor(<values>, dtype=..., requires_grad=True)", values as NumPy prints them. */
static PyObject *values_text(PyObject *object)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    PyObject *plain = NULL, *array = NULL, *numpy = NULL, *text = NULL;
    if (self->tensor->dtype == FSDPC_BF16) {
        fsdpc_tensor *leaf, *wide = NULL;
        fsdpc_status status = fsdpc_tensor_detach(self->tensor, &leaf);
        if (status == FSDPC_OK) {
            status = fsdpc_op_cast(self->state->runtime.tape, leaf, FSDPC_F32, &wide);
            fsdpc_tensor_release(leaf);
        }
        plain = fsdpc_py_result(self->state, status, wide);
    } else {
        plain = Py_NewRef(object);
    }
    if (plain)
        array = fsdpc_py_tensor_numpy(plain, NULL);
    if (array)
        numpy = PyImport_ImportModule("numpy");
    if (numpy) {
        PyObject *function = PyObject_GetAttrString(numpy, "array2string");
        PyObject *args = PyTuple_Pack(1, array);
        PyObject *options = Py_BuildValue("{s:s,s:s}", "separator", ", ", "prefix", "tensor(");
        if (function && args && options)
            text = PyObject_Call(function, args, options);
        Py_XDECREF(function);
        Py_XDECREF(args);
        Py_XDECREF(options);
    }
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
