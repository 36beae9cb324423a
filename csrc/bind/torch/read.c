/* Helpers shared by all files in this folder: the foreign library's streams, plain attribute reads,
 * and gradients. */
#include "bind/torch/unit.h"

#include <stddef.h>

int fsdpc_torch_join(const fsdpc_py_torch_unit *self)
{
    if (!self->streams)
        return 0;
    PyObject *number = PyObject_CallNoArgs(self->streams);
    size_t raw = number ? PyLong_AsSize_t(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    fsdpc_status status = fsdpc_device_adopt(fsdpc_unit_device(fsdpc_torch_unit(self)), raw);
    return fsdpc_py_check(status);
}

int fsdpc_torch_param_arg(const fsdpc_py_torch_unit *self, PyObject *const *args, Py_ssize_t n)
{
    if (n == 0)
        return -1;
    long i = n == 1 ? PyLong_AsLong(args[0]) : -1;
    if (!PyErr_Occurred() && (i < 0 || i >= self->n_params))
        PyErr_Format(PyExc_IndexError, "one parameter of %d, or none", self->n_params);
    return PyErr_Occurred() ? -1 : (int)i;
}

PyObject *fsdpc_torch_plain_begin(const fsdpc_py_torch_unit *self)
{
    PyObject *context = PyObject_CallNoArgs(self->plainly);
    PyObject *entered = context ? PyObject_CallMethodNoArgs(context, self->names.__enter__) : NULL;
    if (!entered)
        Py_CLEAR(context);
    Py_XDECREF(entered);
    return context;
}

void fsdpc_torch_plain_end(PyObject *context)
{
    if (!context)
        return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *left = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
    Py_XDECREF(left);
    Py_DECREF(context);
    if (!left)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, value, trace);
}

int fsdpc_torch_version(const fsdpc_py_torch_unit *self, PyObject *tensor, long long *out)
{
    PyObject *number = PyObject_GetAttr(tensor, self->names._version);
    *out = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *fsdpc_torch_read_grad(const fsdpc_py_torch_unit *self, const fsdpc_torch_param *p)
{
    return Py_TYPE(self->grad_of)
        ->tp_descr_get(self->grad_of, p->piece, (PyObject *)Py_TYPE(p->piece));
}

int fsdpc_torch_has_grads(const fsdpc_py_torch_unit *self)
{
    PyObject *plain = fsdpc_torch_plain_begin(self);
    int any = plain ? 0 : -1;
    for (int i = 0; any == 0 && i < self->n_params; i++) {
        PyObject *grad = fsdpc_torch_read_grad(self, &self->params[i]);
        any = grad ? grad != Py_None : -1;
        Py_XDECREF(grad);
    }
    fsdpc_torch_plain_end(plain);
    return any;
}
