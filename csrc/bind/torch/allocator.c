/* TorchUnit: memory owned by the foreign library.
 *
 * Gradient shards use the memory of foreign tensors, whose rows are the sharded parameters'
 * gradients. As in the foreign library, a gradient that the user keeps after zero_grad therefore
 * retains its values: the next backward uses other memory. A gradient counts as kept if its tensor
 * has more references than at creation, or if the user has created other tensors over its memory,
 * which the frontend reports.
 *
 * If the foreign library has its own allocator on the device, memory that the user does not keep is
 * returned to it when a forward begins. The unit takes memory again when its first gradient
 * arrives. Until then, the activations of that forward can use the memory. On other devices the
 * unit keeps the memory: mapping it again costs more than it saves.
 *
 * A unit that encloses others gets some gradients when backward begins (a model's head and norm)
 * and others only when it ends (the embedding). With such an allocator, small gradients therefore
 * wait until the last one arrives.
 *
 * On such a device, a single rank also takes memory for unsharded parameters from that allocator
 * while their unit is in use (engine/unsharded_frontend.c).
 *
 * The frontend has an object for each block of memory. take() returns its address, give() releases
 * it, and `is_kept` tells whether the user has created other tensors over it.
 */
#include "bind/torch/unit.h"

#include "engine/optim_backward.h"

/* Takes memory for every flat group, and tells the engine its addresses. */
static int take(fsdpc_py_torch_unit *self, PyObject *foreign,
                void (*place)(fsdpc_unit *unit, void *const *groups))
{
    Py_ssize_t n = PyList_GET_SIZE(foreign);
    void **groups = fsdpc_py_array(n, sizeof *groups);
    for (Py_ssize_t g = 0; groups && g < n && !PyErr_Occurred(); g++) {
        PyObject *number = PyObject_CallMethodNoArgs(PyList_GET_ITEM(foreign, g), self->names.take);
        groups[g] = number ? PyLong_AsVoidPtr(number) : NULL;
        Py_XDECREF(number);
    }
    if (!PyErr_Occurred())
        place(fsdpc_torch_unit(self), groups);
    PyMem_Free(groups);
    return PyErr_Occurred() ? -1 : 0;
}

static int give(const fsdpc_py_torch_unit *self, PyObject *foreign)
{
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(foreign); g++) {
        PyObject *done = PyObject_CallMethodNoArgs(PyList_GET_ITEM(foreign, g), self->names.give);
        Py_XDECREF(done);
        if (!done)
            return -1;
    }
    return 0;
}

/* ---- gradients ---- */

/* Returns false while a partly filled buffer is waiting to be reduced, which can happen before the
 * unit's backward. */
static bool can_give(const fsdpc_py_torch_unit *self)
{
    return self->gives_back && !fsdpc_grad_is_open(fsdpc_torch_unit(self));
}

static int give_grads(fsdpc_py_torch_unit *self)
{
    fsdpc_unit_place_grads(fsdpc_torch_unit(self), NULL);
    self->away = true;
    return give(self, self->unit->ref->foreign);
}

/* place(grads, foreign): passes the gradients' tensors, which only this list refers to, and the
 * memory of each flat group that contains them; None: the engine's memory. Gradients of frozen
 * groups are empty, and all are None while the unit is stepped inside backward. */
static PyObject *place_method(PyObject *object, PyObject *args)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    PyObject *grads, *foreign;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &grads, &foreign))
        return NULL;
    int n_groups = fsdpc_unit_trained_groups(fsdpc_torch_unit(self));
    if (PyList_GET_SIZE(grads) != self->n_params ||
        (foreign != Py_None && (!PyList_Check(foreign) || PyList_GET_SIZE(foreign) != n_groups)))
        return PyErr_Format(PyExc_ValueError,
                            "place: gradients of %d parameters, and memory of %d flat groups",
                            self->n_params, n_groups);
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        Py_XSETREF(p->grad, Py_NewRef(PyList_GET_ITEM(grads, i)));
        Py_XSETREF(p->given, Py_NewRef(p->grad));
    }
    for (int i = 0; i < self->n_params; i++)
        self->params[i].refs = Py_REFCNT(self->params[i].grad) - 1; /* without the list */
    if (foreign == Py_None) {
        self->pooled = fsdpc_unit_steps_in_backward(fsdpc_torch_unit(self));
        Py_CLEAR(self->unit->ref->foreign);
        Py_RETURN_NONE;
    }
    bool away = can_give(self);
    if (!away && take(self, foreign, fsdpc_unit_place_grads) < 0)
        return NULL;
    /* The unit keeps a reference to the memory, because a reduction in flight still writes there
     * after the model is dropped. */
    Py_XSETREF(self->unit->ref->foreign, Py_NewRef(foreign));
    if (away && give_grads(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Replaces the memory and the gradients' tensors. */
static int renew(fsdpc_py_torch_unit *self)
{
    PyObject *done = PyObject_CallNoArgs(self->renew);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int fsdpc_torch_set_trainable(fsdpc_py_torch_unit *self, int param, bool trainable)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    int before = fsdpc_unit_trained_groups(unit);
    if (fsdpc_py_check(fsdpc_unit_set_trainable(unit, param, trainable)) < 0)
        return -1;
    if (fsdpc_unit_trained_groups(unit) == before)
        return 0;
    return renew(self);
}

int fsdpc_torch_provide_grads(fsdpc_py_torch_unit *self)
{
    if (self->pooled && !fsdpc_unit_steps_in_backward(fsdpc_torch_unit(self))) {
        self->pooled = false;
        return renew(self);
    }
    if (!self->away)
        return 0;
    self->away = take(self, self->unit->ref->foreign, fsdpc_unit_place_grads) < 0;
    return self->away ? -1 : 0;
}

/* Waiting gradients may use at most a third of the shard's size. In half precision, the gradient of
 * a model's head therefore waits for the embedding's, unless it is as wide as the shard. */
bool fsdpc_torch_can_wait(const fsdpc_py_torch_unit *self, size_t bytes)
{
    const fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (!self->away || bytes == 0 || !fsdpc_unit_stays_open(unit))
        return false;
    size_t room = 0;
    for (int g = 0; g < fsdpc_unit_trained_groups(unit); g++) {
        const fsdpc_unit_flat flat = fsdpc_unit_flat_of(unit, g);
        room += flat.shard_numel * fsdpc_dtype_bytes(flat.grad_dtype);
    }
    return self->early_bytes + bytes <= room / 3;
}

/* Returns whether the user holds references to a gradient, or has tensors over its memory; -1 with
 * an exception on failure. */
static int are_kept(fsdpc_py_torch_unit *self, PyObject *foreign)
{
    int kept = 0;
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        if (p->given != p->grad)
            Py_SETREF(p->given, Py_NewRef(p->grad));
        kept |= Py_REFCNT(p->grad) > p->refs;
    }
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(foreign) && !kept; g++) {
        PyObject *flag = PyObject_GetAttr(PyList_GET_ITEM(foreign, g), self->names.is_kept);
        kept = flag ? flag == Py_True : -1;
        Py_XDECREF(flag);
    }
    return kept;
}

int fsdpc_torch_renew(fsdpc_py_torch_unit *self, bool idle)
{
    PyObject *foreign = self->unit->ref->foreign;
    if (!foreign || self->away || !fsdpc_unit_grads_rest(fsdpc_torch_unit(self)))
        return 0;
    int kept = are_kept(self, foreign);
    if (kept == 0 && idle && can_give(self))
        return give_grads(self);
    if (kept <= 0)
        return kept;
    return renew(self);
}

int fsdpc_torch_zero_grad(fsdpc_py_torch_unit *self, bool idle)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    PyObject *foreign = self->unit->ref->foreign;
    int kept = foreign && fsdpc_unit_has_factor(unit) ? are_kept(self, foreign) : 0;
    if (kept < 0 || (kept && fsdpc_py_check(fsdpc_unit_apply_scale(unit)) < 0))
        return -1;
    fsdpc_unit_zero_grad(unit);
    return fsdpc_torch_renew(self, idle);
}

int fsdpc_torch_drop_grads(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    int any = fsdpc_unit_gave_all(unit) ? fsdpc_torch_has_grads(self) : 1;
    if (any < 0)
        return -1;
    return any == 0 ? fsdpc_torch_zero_grad(self, true) : fsdpc_torch_renew(self, true);
}

/* ---- unsharded parameters ---- */

static fsdpc_status take_unsharded(void *of)
{
    fsdpc_py_torch_unit *self = of;
    PyGILState_STATE gil = PyGILState_Ensure();
    fsdpc_status status = FSDPC_OK;
    if (take(self, self->unsharded, fsdpc_unit_place_unsharded) < 0)
        status = fsdpc_fail(FSDPC_ERR_CALLBACK, "no memory for the parameters of unit '%s'",
                            fsdpc_unit_name(fsdpc_torch_unit(self)));
    PyGILState_Release(gil);
    return status;
}

static void give_unsharded(void *of)
{
    fsdpc_py_torch_unit *self = of;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* an exception may be the reason for resharding */
    if (give(self, self->unsharded) < 0)
        PyErr_WriteUnraisable((PyObject *)self);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

void fsdpc_torch_provide_unsharded(fsdpc_py_torch_unit *self)
{
    const fsdpc_frontend_memory room = {.take = take_unsharded, .give = give_unsharded, .of = self};
    if (self->gives_back)
        fsdpc_unit_set_frontend_memory(fsdpc_torch_unit(self), &room);
}

static PyObject *get_lends(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_unit *unit = fsdpc_torch_unit((fsdpc_py_torch_unit *)object);
    return PyBool_FromLong(fsdpc_unit_unsharded_in_frontend(unit) &&
                           !fsdpc_unit_reads_masters(unit));
}

PyGetSetDef fsdpc_py_torch_allocator_getset[] = {
    FSDPC_PY_ATTRIBUTE(TorchUnit, lends_unsharded, get_lends, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

PyMethodDef fsdpc_py_torch_allocator_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, place, place_method, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
