/* Door: following what the user may change between steps.
 *
 * An epoch publishes the masters of every unit of its root, whichever unit it begins with.  So all
 * of them are followed before it, not the one that is called: a piece whose `.data` was replaced
 * stands on other memory, and what is there is taken over into the master (`adopt`).  Whatever else
 * reads or writes masters (gathers of full values, loading, an optimizer's step) follows its unit.
 */
#include "py/py_door.h"

static int follow_piece(const fsdpc_py_door *door, int i)
{
    const fsdpc_door_param *p = &door->params[i];
    if (!p->master)
        return 0;
    PyObject *number = PyObject_CallMethodNoArgs(p->piece, door->names.data_ptr);
    void *data = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    if (data == p->master)
        return 0;
    PyObject *done = PyObject_CallFunction(door->adopt, "i", i);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int follow_memory(const fsdpc_py_door *door)
{
    for (int i = 0; i < door->n_params; i++) {
        if (follow_piece(door, i) < 0)
            return -1;
    }
    return 0;
}

static int listen(fsdpc_py_door *door, fsdpc_door_param *p)
{
    PyObject *handle =
        PyObject_CallMethodOneArg(p->full, door->names.register_post_accumulate_grad_hook, p->hook);
    Py_XDECREF(handle);
    p->listening = handle != NULL;
    return handle ? 0 : -1;
}

static int follow_trainable(fsdpc_py_door *door)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    for (int i = 0; i < door->n_params; i++) {
        fsdpc_door_param *p = &door->params[i];
        PyObject *flag = PyObject_GetAttr(p->piece, door->names.requires_grad);
        if (!flag)
            return -1;
        bool trainable = flag == Py_True;
        Py_DECREF(flag);
        fsdpc_unit_set_trainable(unit, i, trainable);
        if (trainable == p->trainable)
            continue;
        if (PyObject_SetAttr(p->full, door->names.requires_grad, trainable ? Py_True : Py_False) <
            0)
            return -1;
        p->trainable = trainable;
        if (trainable && !p->listening && listen(door, p) < 0)
            return -1;
    }
    return 0;
}

int fsdpc_door_follow_root(fsdpc_py_door *door)
{
    const fsdpc_root *root = fsdpc_unit_root(fsdpc_door_unit(door));
    if (fsdpc_root_in_backward(root) || fsdpc_root_forward_depth(root) > 0)
        return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(door->mates); i++) {
        fsdpc_py_door *mate = (fsdpc_py_door *)PyList_GET_ITEM(door->mates, i);
        if (follow_memory(mate) < 0 || follow_trainable(mate) < 0)
            return -1;
    }
    return 0;
}

PyObject *fsdpc_door_follow_method(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    int i = fsdpc_door_param_arg(door, args, n);
    if (i < 0 && PyErr_Occurred())
        return NULL;
    int result = i < 0 ? follow_memory(door) : follow_piece(door, i);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *fsdpc_door_follow_root_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (!door->mates)
        Py_RETURN_NONE;
    return fsdpc_door_follow_root(door) < 0 ? NULL : Py_NewRef(Py_None);
}
