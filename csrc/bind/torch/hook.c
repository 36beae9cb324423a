/* The hook of an unsharded parameter takes the gradient that the foreign autograd has stored in its
 * `.grad`. */
#include "bind/torch/unit.h"

typedef struct hook_data {
    fsdpc_py_torch_unit *owner; /* borrowed; NULL once freed */
    int param;
} hook_data;

static void free_hook_data(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

static PyObject *hook_call(PyObject *capsule, PyObject *unsharded)
{
    hook_data *hook = PyCapsule_GetPointer(capsule, NULL);
    if (!hook->owner)
        return PyErr_Format(
            PyExc_RuntimeError,
            "a gradient for a model that was deleted: keep the model until backward");
    PyObject *grad_name = hook->owner->names.grad, *grad = PyObject_GetAttr(unsharded, grad_name);
    if (!grad)
        return NULL;
    int result = 0;
    if (grad != Py_None)
        result = fsdpc_torch_reach_backward(hook->owner) < 0
                     ? -1
                     : fsdpc_torch_accept_grad(hook->owner, hook->param, grad);
    Py_DECREF(grad);
    if (result < 0 || PyObject_SetAttr(unsharded, grad_name, Py_None) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef hook_def = {"grad_hook", hook_call, METH_O,
                               "Take an unsharded parameter's gradient."};

PyObject *fsdpc_torch_hook_new(fsdpc_py_torch_unit *self, int param)
{
    hook_data *hook = PyMem_Malloc(sizeof *hook);
    if (!hook)
        return PyErr_NoMemory();
    *hook = (hook_data){.owner = self, .param = param};
    PyObject *capsule = PyCapsule_New(hook, NULL, free_hook_data);
    if (!capsule) {
        PyMem_Free(hook);
        return NULL;
    }
    PyObject *callable = PyCFunction_New(&hook_def, capsule);
    Py_DECREF(capsule);
    return callable;
}

void fsdpc_torch_hook_part(PyObject *callable)
{
    hook_data *hook = PyCapsule_GetPointer(PyCFunction_GET_SELF(callable), NULL);
    hook->owner = NULL;
}
