/* Helpers shared by all files in this folder: the foreign library's streams, tensors' rows and
 * gradients. */
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

PyObject *fsdpc_torch_rows(const fsdpc_py_torch_unit *self, PyObject *tensor)
{
    return self->local ? PyObject_GetAttr(tensor, self->local) : Py_NewRef(tensor);
}

int fsdpc_torch_version(const fsdpc_py_torch_unit *self, PyObject *tensor, long long *out)
{
    PyObject *rows = fsdpc_torch_rows(self, tensor);
    PyObject *number = rows ? PyObject_GetAttr(rows, self->names._version) : NULL;
    Py_XDECREF(rows);
    *out = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

int fsdpc_torch_has_grads(const fsdpc_py_torch_unit *self)
{
    int any = 0;
    for (int i = 0; any == 0 && i < self->n_params; i++) {
        PyObject *grad = PyObject_GetAttr(self->params[i].sharded, self->names.grad);
        any = grad ? grad != Py_None : -1;
        Py_XDECREF(grad);
    }
    return any;
}
