/* TorchUnit: tracks changes that the user makes between steps.
 *
 * An epoch copies in the masters of all its root's units, whichever unit begins it. Changes to all
 * units, not only to the one that is called, are therefore tracked before an epoch. If the user
 * replaced a sharded parameter's `.data`, the contents of the new memory are copied into the master
 * (`adopt`). All other operations that read or write masters (gathering unsharded values, loading,
 * an optimizer's step) track changes to their own unit only.
 */
#include "bind/torch/unit.h"

static int follow_param(const fsdpc_py_torch_unit *self, int i)
{
    const fsdpc_torch_param *p = &self->params[i];
    if (!p->master)
        return 0;
    PyObject *rows = fsdpc_torch_rows(self, p->sharded);
    PyObject *number = rows ? PyObject_CallMethodNoArgs(rows, self->names.data_ptr) : NULL;
    Py_XDECREF(rows);
    void *data = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    if (data == p->master)
        return 0;
    PyObject *done = PyObject_CallFunction(self->adopt, "i", i);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int fsdpc_torch_follow_writes(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    bool foreign = fsdpc_unit_unsharded_in_frontend(unit), written = false;
    for (int i = 0; foreign && i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        long long before = p->written;
        if (fsdpc_torch_version(self, p->sharded, &p->written) < 0)
            return -1;
        written |= p->written != before;
    }
    return written ? fsdpc_py_check(fsdpc_unit_mark_written(unit)) : 0;
}

static int follow_memory(const fsdpc_py_torch_unit *self)
{
    for (int i = 0; i < self->n_params; i++) {
        if (follow_param(self, i) < 0)
            return -1;
    }
    return 0;
}

int fsdpc_torch_follow_root(fsdpc_py_torch_unit *self)
{
    const fsdpc_root *root = fsdpc_unit_root(fsdpc_torch_unit(self));
    if (fsdpc_root_in_backward(root) || fsdpc_root_forward_depth(root) > 0)
        return 0;
    int done = 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(self->mates); i++) {
        fsdpc_py_torch_unit *mate = (fsdpc_py_torch_unit *)PyList_GET_ITEM(self->mates, i);
        if (follow_memory(mate) < 0 || fsdpc_torch_follow_writes(mate) < 0)
            done = -1;
    }
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(self->mates); i++)
        done = fsdpc_torch_drop_grads((fsdpc_py_torch_unit *)PyList_GET_ITEM(self->mates, i));
    return done;
}

static PyObject *follow_method(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    int i = fsdpc_torch_param_arg(self, args, n);
    if (i < 0 && PyErr_Occurred())
        return NULL;
    int result = i < 0 ? follow_memory(self) : follow_param(self, i);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *follow_root_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (!self->mates)
        Py_RETURN_NONE;
    return fsdpc_torch_follow_root(self) < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef fsdpc_py_torch_follow_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, follow, follow_method, METH_FASTCALL),
    FSDPC_PY_METHOD(TorchUnit, follow_root, follow_root_method, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
