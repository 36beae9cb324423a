/* Tensor: conversion between the Python object and the fsdpc_tensor that it refers to.
 *
 * Several objects may refer to one tensor (each `p.grad` creates one). Their common state
 * (gradient, hooks, node) is in the C tensor, so they always agree. bind/tensor/type.c has the
 * type.
 */
#include "bind/tensor/tensor.h"

void fsdpc_py_tensor_drop_unseen(fsdpc_py_tensor *self)
{
    while (self->base && Py_REFCNT(self->base) == 1) {
        fsdpc_py_tensor *unseen = (fsdpc_py_tensor *)self->base;
        self->base = unseen->base;
        unseen->base = NULL;
        Py_DECREF(unseen);
    }
}

void fsdpc_py_tensor_dealloc(PyObject *object)
{
    fsdpc_py_tensor *self = fsdpc_py_self(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(object);
    fsdpc_tensor_release(self->tensor);
    fsdpc_py_tensor_drop_unseen(self); /* one by one: a long chain would overflow the stack */
    Py_XDECREF(self->base);
    fsdpc_py_free(object);
}

static bool is_tensor(PyObject *object)
{
    for (PyTypeObject *t = Py_TYPE(object); t; t = t->tp_base)
        if (t->tp_dealloc == fsdpc_py_tensor_dealloc)
            return true;
    return false;
}

fsdpc_tensor *fsdpc_py_tensor_of(PyObject *object)
{
    if (is_tensor(object))
        return fsdpc_py_self(object)->tensor;
    PyErr_Format(PyExc_TypeError, "a Tensor is needed, not %s: make one with fsdpc.tensor()",
                 Py_TYPE(object)->tp_name);
    return NULL;
}

fsdpc_tensor *fsdpc_py_tensor_peek(PyObject *Py_UNUSED(module), PyObject *object)
{
    return is_tensor(object) ? fsdpc_py_self(object)->tensor : NULL;
}

PyObject *fsdpc_py_tensor_make(PyTypeObject *type, fsdpc_py_state *state, fsdpc_tensor *t)
{
    fsdpc_py_tensor *self = (fsdpc_py_tensor *)type->tp_alloc(type, 0);
    if (!self) {
        fsdpc_tensor_release(t);
        return NULL;
    }
    self->tensor = t;
    self->state = state;
    return (PyObject *)self;
}

PyObject *fsdpc_py_tensor_new(fsdpc_py_state *state, fsdpc_tensor *t)
{
    return fsdpc_py_tensor_make((PyTypeObject *)state->tensor_type, state, t);
}

PyObject *fsdpc_py_result(fsdpc_py_state *state, fsdpc_status status, fsdpc_tensor *t)
{
    if (status == FSDPC_OK)
        return fsdpc_py_tensor_new(state, t);
    fsdpc_tensor_release(t);
    return fsdpc_py_raise(status);
}

PyObject *fsdpc_py_tensor_wrap(PyObject *module, fsdpc_tensor *t)
{
    return fsdpc_py_tensor_new(PyModule_GetState(module), t);
}

int fsdpc_py_check_requires_grad(bool requires_grad, fsdpc_dtype dtype)
{
    if (!requires_grad || fsdpc_dtype_is_float(dtype))
        return 0;
    PyErr_Format(PyExc_TypeError, "a tensor of %s cannot require grad: use a float dtype",
                 fsdpc_dtype_name(dtype));
    return -1;
}
