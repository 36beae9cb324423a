/* TorchUnit: drives the schedule.
 *
 * enter and leave surround a module's forward; marks (callables for the foreign autograd's nodes)
 * begin a unit's backward, and end_backward ends it. bind/torch/show.c determines what modules see
 * meanwhile.
 *
 * A forward inside backward is a recomputation: the modules keep their unsharded parameters until
 * the unit's backward ends.
 */
#include "bind/torch/unit.h"

#include <stddef.h>

static fsdpc_root *root_of(const fsdpc_py_torch_unit *self)
{
    return fsdpc_unit_root(fsdpc_torch_unit(self));
}

/* ---- the schedule ---- */

static int check_usable(const fsdpc_py_torch_unit *self)
{
    if (!self->bound) {
        PyErr_SetString(PyExc_RuntimeError, "a TorchUnit is bound to unsharded parameters first");
        return -1;
    }
    return fsdpc_py_unit_check_open(self->unit) < 0 ? -1 : fsdpc_torch_join(self);
}

/* Handles changes to the sharded parameters' gradients since the last backward; runs once per
 * backward. */
static int catch_up(fsdpc_py_torch_unit *self)
{
    if (!self->taken && fsdpc_torch_begin_grads(self) < 0)
        return -1;
    self->taken = true;
    return 0;
}

int fsdpc_torch_begin_backward(fsdpc_py_torch_unit *self, uint64_t generation)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (check_usable(self) < 0)
        return -1;
    PyObject *asked = PyObject_CallNoArgs(self->at_end);
    if (!asked)
        return -1;
    Py_DECREF(asked);
    if (fsdpc_unit_in_backward(unit) && self->shown)
        return 0;
    if (catch_up(self) < 0 || fsdpc_torch_follow_writes(self) < 0)
        return -1;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_begin_backward(unit, generation));
    if (fsdpc_py_check(status) < 0)
        return -1;
    return fsdpc_torch_show(self, true, true);
}

int fsdpc_torch_reach_backward(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (fsdpc_torch_join(self) < 0)
        return -1;
    if (fsdpc_root_in_backward(fsdpc_unit_root(unit)))
        return 0;
    return fsdpc_torch_begin_backward(self, fsdpc_unit_generation(unit));
}

/* mark(): called by a node, with its gradients, before the node runs. */
static PyObject *mark_call(PyObject *data, PyObject *Py_UNUSED(grads))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)PyTuple_GET_ITEM(data, 0);
    uint64_t generation = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(data, 1));
    if (fsdpc_torch_begin_backward(self, generation) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef mark_def = {"mark", mark_call, METH_O, "A unit's backward begins."};

static PyObject *torch_unit_mark(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const fsdpc_unit *unit = fsdpc_torch_unit((fsdpc_py_torch_unit *)object);
    PyObject *data = Py_BuildValue("(OK)", object, (unsigned long long)fsdpc_unit_generation(unit));
    PyObject *mark = data ? PyCFunction_New(&mark_def, data) : NULL;
    Py_XDECREF(data);
    return mark;
}

/* enter(grad, in_task): `in_task` is true if the foreign autograd is running backward. Returns
 * True for the first of the unit's modules to run. */
static PyObject *torch_unit_enter(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (n != 2)
        return PyErr_Format(PyExc_TypeError, "enter(grad, in_task)");
    bool grad = args[0] == Py_True;
    const fsdpc_call call = {
        .grad = grad, .recomputed = grad && args[1] == Py_True, .ran_at = FSDPC_CALL_UNKNOWN};
    if (check_usable(self) < 0)
        return NULL;
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    uint64_t generation;
    if (call.recomputed && fsdpc_call_begins_backward(unit, &call, &generation) &&
        fsdpc_torch_begin_backward(self, generation) < 0)
        return NULL;
    if (fsdpc_torch_follow_root(self) < 0)
        return NULL;
    bool first;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_enter(unit, &call, &first));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return fsdpc_torch_show(self, true, grad) < 0 ? NULL : PyBool_FromLong(first);
}

static PyObject *torch_unit_leave(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    fsdpc_left left;
    fsdpc_status status = fsdpc_call_leave(fsdpc_torch_unit(self), &left);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (left == FSDPC_LEFT_INSIDE)
        Py_RETURN_NONE;
    if (left == FSDPC_LEFT_RESHARD)
        fsdpc_torch_unpin(self);
    return fsdpc_torch_hide(self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *torch_unit_end_backward(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (!fsdpc_unit_in_backward(fsdpc_torch_unit(self)))
        Py_RETURN_NONE; /* autograd.grad inside forward, through the unit's inputs */
    if (fsdpc_torch_join(self) < 0 || fsdpc_torch_add_early(self) < 0)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_post_backward(fsdpc_torch_unit(self)));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return fsdpc_torch_hide(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* finish(): called on the root; afterwards every rank's reductions are complete. */
static PyObject *torch_unit_finish(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    fsdpc_root *root = root_of(self);
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->mates); i++) {
        if (fsdpc_torch_add_early((fsdpc_py_torch_unit *)PyList_GET_ITEM(self->mates, i)) < 0)
            return NULL;
    }
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_end_backward(root, FSDPC_OK));
    return fsdpc_py_none(status);
}

/* catch_up(): called before reducing a unit whose backward may not have run on this rank. */
static PyObject *torch_unit_catch_up(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (fsdpc_torch_join(self) < 0 || catch_up(self) < 0 || fsdpc_torch_provide_grads(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* reset(): called after an exception; the engine resets the whole root. */
static PyObject *torch_unit_reset(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    fsdpc_root_ref *root = self->unit->ref->root;
    if (fsdpc_torch_join(self) < 0)
        return NULL;
    if (root)
        fsdpc_root_reset(root->root);
    Py_RETURN_NONE;
}

/* hide(gave_up): shows sharded parameters again. After an aborted backward, different ranks have
 * completed different reductions. All ranks therefore drop the reduced gradients, unless the user
 * is accumulating onto earlier ones. */
static PyObject *torch_unit_hide(PyObject *object, PyObject *gave_up)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    fsdpc_torch_drop_early(self);
    if (self->taken && fsdpc_torch_restore_grads(self) < 0)
        return NULL;
    self->taken = false;
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    for (int i = 0; gave_up == Py_True && i < self->n_params; i++)
        (void)fsdpc_unit_give_grad(unit, i); /* treat as handed out */
    int any = gave_up == Py_True ? fsdpc_torch_has_grads(self) : 1;
    if (any < 0 || (any == 0 && fsdpc_torch_zero_grad(self, false) < 0))
        return NULL;
    return fsdpc_torch_hide(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* hold(begin): unsharded parameters stay shown after Unit.unshard has gathered them, until they are
 * released. */
static PyObject *torch_unit_hold(PyObject *object, PyObject *arg)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    if (check_usable(self) < 0)
        return NULL;
    if (arg != Py_True) {
        fsdpc_torch_unpin(self);
        (void)fsdpc_reshard(fsdpc_torch_unit(self));
        return fsdpc_torch_hide(self) < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (!self->pins) /* a forward has used and released it */
        Py_RETURN_NONE;
    self->held = true;
    return fsdpc_torch_show(self, true, true) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *get_in_backward(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_root *root = root_of((fsdpc_py_torch_unit *)object);
    return PyBool_FromLong(root && fsdpc_root_in_backward(root));
}

static PyObject *get_depth(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_root *root = root_of((fsdpc_py_torch_unit *)object);
    return PyLong_FromLong(root ? fsdpc_root_forward_depth(root) : 0);
}

FSDPC_PY_GETTER(get_factor, PyBool_FromLong(fsdpc_unit_has_factor(
                                fsdpc_torch_unit((fsdpc_py_torch_unit *)object))))
FSDPC_PY_GETTER(get_generation, PyLong_FromUnsignedLongLong(fsdpc_unit_generation(
                                    fsdpc_torch_unit((fsdpc_py_torch_unit *)object))))

static int set_generation(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    unsigned long long seen = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred())
        return -1;
    fsdpc_call_set_seen(fsdpc_torch_unit((fsdpc_py_torch_unit *)object), seen);
    return 0;
}

PyGetSetDef fsdpc_py_torch_call_getset[] = {
    FSDPC_PY_ATTRIBUTE(TorchUnit, in_backward, get_in_backward, NULL),
    FSDPC_PY_ATTRIBUTE(TorchUnit, depth, get_depth, NULL),
    FSDPC_PY_ATTRIBUTE(TorchUnit, generation, get_generation, set_generation),
    FSDPC_PY_ATTRIBUTE(TorchUnit, has_factor, get_factor, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

PyMethodDef fsdpc_py_torch_call_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, enter, torch_unit_enter, METH_FASTCALL),
    FSDPC_PY_METHOD(TorchUnit, leave, torch_unit_leave, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, mark, torch_unit_mark, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, end_backward, torch_unit_end_backward, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, finish, torch_unit_finish, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, catch_up, torch_unit_catch_up, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, reset, torch_unit_reset, METH_NOARGS),
    FSDPC_PY_METHOD(TorchUnit, hide, torch_unit_hide, METH_O),
    FSDPC_PY_METHOD(TorchUnit, hold, torch_unit_hold, METH_O),
    {NULL, NULL, 0, NULL},
};
