/* TorchUnit: the memory of gradients.
 *
 * Gradient shards lie in memory of foreign tensors, whose rows are the pieces' gradients.  So a
 * gradient that its user keeps after zero_grad stays what it was, as in the foreign library: the
 * next backward goes into other memory (renew).  Somebody keeps one if its tensor has more
 * references than when it was made, or its memory more tensors, which the front door counts.
 *
 * On a device where the foreign library has an allocator of its own, memory that nobody keeps goes
 * back to it when a forward begins, and comes when the unit's backward does (lend).  There the
 * activations of that forward have it in between.  Elsewhere the unit keeps it: to map it anew costs
 * more than it saves.
 */
#include "py/py_torch_unit.h"

static void put_away(fsdpc_py_torch_unit *self)
{
    fsdpc_unit_place_grads(fsdpc_torch_unit(self), NULL);
    self->away = true;
}

/* Tells the engine where the shards are. */
static int place(fsdpc_py_torch_unit *self, PyObject *flats)
{
    Py_ssize_t n = PyList_GET_SIZE(flats);
    void **groups = fsdpc_py_room(n, sizeof *groups);
    if (!groups)
        return -1;
    for (Py_ssize_t g = 0; g < n && !PyErr_Occurred(); g++)
        groups[g] = fsdpc_torch_data(self, PyList_GET_ITEM(flats, g));
    if (!PyErr_Occurred()) {
        fsdpc_unit_place_grads(fsdpc_torch_unit(self), groups);
        self->away = false;
    }
    PyMem_Free(groups);
    return PyErr_Occurred() ? -1 : 0;
}

/* place(grads, flats, away): the tensors of gradients, and those they are rows of (None: they lie in
 * the engine's memory), which have no memory where `away`. */
static PyObject *place_method(PyObject *object, PyObject *args)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    PyObject *grads, *flats;
    int away;
    if (!PyArg_ParseTuple(args, "O!Op", &PyList_Type, &grads, &flats, &away))
        return NULL;
    int n_groups = fsdpc_unit_layout(fsdpc_torch_unit(self))->n_groups;
    if (PyList_GET_SIZE(grads) != self->n_params ||
        (flats != Py_None && (!PyList_Check(flats) || PyList_GET_SIZE(flats) != n_groups)))
        return PyErr_Format(PyExc_ValueError,
                            "place: gradients of %d parameters, and memory of %d flat groups",
                            self->n_params, n_groups);
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        Py_XSETREF(p->grad, Py_NewRef(PyList_GET_ITEM(grads, i)));
        Py_XSETREF(p->given, Py_NewRef(p->grad));
    }
    for (int i = 0; i < self->n_params; i++)
        self->params[i].refs = Py_REFCNT(self->params[i].grad);
    if (flats == Py_None)
        Py_RETURN_NONE;
    if (!away && place(self, flats) < 0)
        return NULL;
    if (away)
        put_away(self);
    /* The unit keeps them: a reduction that a dropped model leaves in flight writes there. */
    Py_XSETREF(self->unit->ref->lent, Py_NewRef(flats));
    Py_RETURN_NONE;
}

int fsdpc_torch_lend(fsdpc_py_torch_unit *self)
{
    if (!self->away)
        return 0;
    PyObject *done = PyObject_CallNoArgs(self->lend);
    Py_XDECREF(done);
    return done ? place(self, self->unit->ref->lent) : -1;
}

int fsdpc_torch_renew(fsdpc_py_torch_unit *self, bool idle)
{
    bool kept = false;
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        if (p->given != p->grad)
            Py_SETREF(p->given, Py_NewRef(p->grad));
        kept |= Py_REFCNT(p->grad) > p->refs;
    }
    if (!self->unit->ref->lent || self->away)
        return 0;
    PyObject *args[] = {kept ? Py_True : Py_False, idle ? Py_True : Py_False};
    PyObject *gone = PyObject_Vectorcall(self->renew, args, 2, NULL);
    if (!gone)
        return -1;
    if (gone == Py_True)
        put_away(self);
    Py_DECREF(gone);
    return 0;
}

int fsdpc_torch_drop_grads(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    int any = fsdpc_unit_gave_all(unit) ? fsdpc_torch_has_grads(self) : 1;
    if (any != 0)
        return any < 0 ? -1 : 0;
    fsdpc_unit_zero_grad(unit);
    return fsdpc_torch_renew(self, true);
}

PyMethodDef fsdpc_py_torch_lent_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, place, place_method, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
