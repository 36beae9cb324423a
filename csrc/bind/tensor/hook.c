/* Gradient hooks in Python, and the handle that removes them. */
#include "bind/tensor/ops.h"

#include "bind/stub_args.h"
#include "bind/tensor/tensor.h"

typedef struct python_hook {
    PyObject *callable;
    fsdpc_py_state *state;
} python_hook;

/* Called from backward, without the GIL. */
static fsdpc_status run_hook(void *arg, fsdpc_tensor *gradient, fsdpc_tensor **replacement_io)
{
    python_hook *hook = arg;
    fsdpc_status status = FSDPC_OK;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *callable = Py_NewRef(hook->callable); /* the hook may remove itself */
    PyObject *object = fsdpc_py_tensor_new(hook->state, fsdpc_tensor_acquire(gradient));
    PyObject *result = object ? PyObject_CallOneArg(callable, object) : NULL;
    if (result && result != Py_None) {
        fsdpc_tensor *t = fsdpc_py_tensor_of(result);
        if (t)
            *replacement_io = fsdpc_tensor_acquire(t);
        else
            Py_CLEAR(result);
    }
    if (!result)
        status = fsdpc_fail(FSDPC_ERR_CALLBACK, "a gradient hook raised an exception");
    Py_XDECREF(result);
    Py_XDECREF(object);
    Py_DECREF(callable);
    PyGILState_Release(gil);
    return status;
}

static void release_hook(void *arg)
{
    python_hook *hook = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(hook->callable);
    PyMem_Free(hook);
    PyGILState_Release(gil);
}

int fsdpc_py_hooks_traverse(const fsdpc_tensor *t, visitproc visit, void *arg)
{
    if (!t || !t->hooks || atomic_load(&t->refs) != 1)
        return 0;
    for (const fsdpc_hook *hook = t->hooks->first; hook; hook = hook->next)
        if (hook->fn == run_hook)
            Py_VISIT(((python_hook *)hook->arg)->callable);
    return 0;
}

void fsdpc_py_hooks_clear(fsdpc_tensor *t)
{
    if (!t || !t->hooks || atomic_load(&t->refs) != 1)
        return;
    for (fsdpc_hook *hook = t->hooks->first; hook; hook = hook->next)
        if (hook->fn == run_hook)
            fsdpc_hook_remove(hook);
}

/* ---- the handle ---- */

typedef struct fsdpc_py_handle {
    PyObject_HEAD fsdpc_hook *hook;
} fsdpc_py_handle;

static void handle_dealloc(PyObject *object)
{
    fsdpc_hook_release(((fsdpc_py_handle *)object)->hook);
    fsdpc_py_free(object);
}

static PyObject *handle_remove(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_hook_remove(((fsdpc_py_handle *)object)->hook);
    Py_RETURN_NONE;
}

static PyMethodDef handle_methods[] = {
    FSDPC_PY_METHOD(RemovableHandle, remove, handle_remove, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_methods, handle_methods},
    {Py_tp_doc, (void *)fsdpc_doc_RemovableHandle},
    {0, NULL},
};

FSDPC_PY_TYPE(handle, RemovableHandle, fsdpc_py_handle, Py_TPFLAGS_DISALLOW_INSTANTIATION,
              handle_slots);

FSDPC_PY_TENSOR_OP(register_hook)
{
    PyTypeObject *type = (PyTypeObject *)state->handle_type;
    fsdpc_py_handle *handle = (fsdpc_py_handle *)type->tp_alloc(type, 0);
    python_hook *hook = handle ? PyMem_Malloc(sizeof *hook) : NULL;
    if (!hook) {
        Py_XDECREF(handle);
        return PyErr_NoMemory();
    }
    *hook = (python_hook){a->hook, state};
    fsdpc_status status = fsdpc_tape_add_hook(state->runtime.tape, a->self, run_hook, hook,
                                              release_hook, &handle->hook);
    if (status != FSDPC_OK) {
        PyMem_Free(hook);
        Py_DECREF(handle);
        return fsdpc_py_raise(status);
    }
    Py_INCREF(a->hook);
    return (PyObject *)handle;
}

PyMethodDef fsdpc_py_hook_methods[] = {
    FSDPC_PY_TENSOR_ROW(register_hook),
    {NULL, NULL, 0, NULL},
};
