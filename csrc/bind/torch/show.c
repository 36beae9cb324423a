/* TorchUnit: which tensors modules see.
 *
 * The dictionaries of a unit's modules contain the unsharded parameters while the unit is in use,
 * and the sharded parameters otherwise. Only the dictionaries change; the tensors are created once
 * and never replaced.
 *
 * Stale reads. All unsharded parameters of a flat group are views of one base tensor and share its
 * version counter. Showing unsharded parameters sets the counter to the weights' generation, and
 * resharding sets it to an unreachable value. The foreign autograd therefore rejects a saved
 * unsharded parameter that has changed since forward. Any other version change means that the user
 * wrote to an unsharded parameter, and no master receives that write.
 *
 * Trainable or not. Users set requires_grad on sharded parameters, and unsharded parameters copy it
 * whenever they are shown. Each forward therefore records which parameters are trainable; as in the
 * foreign library, a backward computes gradients for those that are trainable when it begins. A
 * frozen forward in between, such as that of a policy's reference with adapters disabled, has no
 * effect.
 *
 * Shards must not be used as weights: a submodule called outside its unit, such as a head called
 * from a loss function, would compute with only this rank's rows. While sharded parameters are
 * shown, modules that read parameters therefore have a forward that raises. A forward set by the
 * user is left unchanged.
 */
#include "bind/torch/unit.h"

#include <stddef.h>

/* No generation reaches this value. */
static const long long RESHARDED = 1LL << 40;

static int set_version(fsdpc_py_torch_unit *self, long long version)
{
    Py_ssize_t n = PyTuple_GET_SIZE(self->bases);
    PyObject *number = PyLong_FromLongLong(version), *versions = number ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; versions && i < n; i++)
        PyTuple_SET_ITEM(versions, i, Py_NewRef(number));
    self->version = version;
    PyObject *args[] = {self->bases, versions};
    PyObject *done = versions ? PyObject_Vectorcall(self->set_version, args, 2, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(versions);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int refuse_replaced(const fsdpc_py_torch_unit *self, const fsdpc_torch_slot *slot)
{
    const fsdpc_unit *unit = fsdpc_torch_unit(self);
    PyErr_Format(PyExc_RuntimeError,
                 "parameter '%s' of unit '%s' was replaced after fully_shard: copy into it under "
                 "no_grad() instead (p.copy_(...), load_state_dict), or replace it before",
                 fsdpc_torch_place(self, slot->param)->name, fsdpc_unit_name(unit));
    return -1;
}

/* ---- guards ---- */

static int set_guards(const fsdpc_py_torch_unit *self)
{
    bool open = self->shown || self->lifted;
    for (int i = 0; i < self->n_guards; i++) {
        const fsdpc_torch_guard *guard = &self->guards[i];
        PyObject *forward = PyDict_GetItem(guard->dict, self->names.forward);
        if (open && forward == guard->refuse) {
            if (PyDict_DelItem(guard->dict, self->names.forward) < 0)
                return -1;
        } else if (!open && !forward) { /* a forward set by the user stays */
            if (PyDict_SetItem(guard->dict, self->names.forward, guard->refuse) < 0)
                return -1;
        }
    }
    return 0;
}

static int take_guards(fsdpc_py_torch_unit *self, PyObject *modules)
{
    if (!PyList_Check(modules) || self->guards)
        return PyErr_SetString(PyExc_TypeError, "guard takes a list, once"), -1;
    self->guards = fsdpc_py_array(PyList_GET_SIZE(modules), sizeof *self->guards);
    if (!self->guards)
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules); i++) {
        fsdpc_torch_guard *guard = &self->guards[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(modules, i), "O!O", &PyDict_Type, &guard->dict,
                              &guard->refuse))
            return -1;
        Py_INCREF(guard->dict);
        Py_INCREF(guard->refuse);
        self->n_guards++;
    }
    return set_guards(self);
}

/* ---- unsharded parameters and sharded parameters ---- */

static int listen(const fsdpc_py_torch_unit *self, fsdpc_torch_param *p)
{
    PyObject *handle = PyObject_CallMethodOneArg(
        p->unsharded, self->names.register_post_accumulate_grad_hook, p->hook);
    Py_XDECREF(handle);
    p->listening = handle != NULL;
    return handle ? 0 : -1;
}

/* Returns a foreign tensor's flag as 1 or 0, or -1 on error. */
static int requires_grad(const fsdpc_py_torch_unit *self, PyObject *tensor)
{
    PyObject *flag = PyObject_GetAttr(tensor, self->names.requires_grad);
    Py_XDECREF(flag);
    return flag ? flag == Py_True : -1;
}

/* A forward without gradients freezes no parameters, because ranks may evaluate differently. If a
 * backward bypasses the unit's outputs, no unsharded parameters are shown before it needs the
 * flags. */
static int follow_trainable(fsdpc_py_torch_unit *self, bool grad)
{
    int done = 0;
    for (int i = 0; i < self->n_params && done == 0; i++) {
        fsdpc_torch_param *p = &self->params[i];
        int wanted = requires_grad(self, p->sharded), is = requires_grad(self, p->unsharded);
        done = wanted < 0 || is < 0 ? -1 : 0;
        if (done == 0 && grad)
            done = fsdpc_torch_set_trainable(self, i, wanted == 1);
        if (done == 0 && wanted != is && (grad || wanted))
            done = PyObject_SetAttr(p->unsharded, self->names.requires_grad,
                                    wanted ? Py_True : Py_False);
        if (done == 0 && wanted && !p->listening)
            done = listen(self, p);
    }
    return done;
}

int fsdpc_torch_show(fsdpc_py_torch_unit *self, bool unsharded, bool grad)
{
    if (unsharded &&
        set_version(self, (long long)fsdpc_unit_generation(fsdpc_torch_unit(self))) < 0)
        return -1;
    if (self->shown == unsharded)
        return 0;
    if (unsharded && follow_trainable(self, grad) < 0)
        return -1;
    for (int s = 0; s < self->n_slots; s++) { /* checks all first: an error changes nothing */
        const fsdpc_torch_slot *slot = &self->slots[s];
        const fsdpc_torch_param *param = &self->params[slot->param];
        if (PyDict_GetItem(slot->dict, slot->name) !=
            (unsharded ? param->sharded : param->unsharded))
            return refuse_replaced(self, slot);
    }
    for (int s = 0; s < self->n_slots; s++) {
        const fsdpc_torch_slot *slot = &self->slots[s];
        const fsdpc_torch_param *param = &self->params[slot->param];
        if (PyDict_SetItem(slot->dict, slot->name, unsharded ? param->unsharded : param->sharded) <
            0)
            return -1;
    }
    self->shown = unsharded;
    return set_guards(self);
}

/* Detects whether the user has written to the unsharded parameters that are shown. If the memory is
 * read-only, the processor detects the write; single ranks and GPUs have no such memory. */
static int find_writes(const fsdpc_py_torch_unit *self)
{
    for (Py_ssize_t i = 0; self->shown && i < PyTuple_GET_SIZE(self->bases); i++) {
        PyObject *number = PyObject_GetAttr(PyTuple_GET_ITEM(self->bases, i), self->names._version);
        long long version = number ? PyLong_AsLongLong(number) : -1;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return -1;
        if (version != self->version)
            return 1;
    }
    return 0;
}

int fsdpc_torch_hide(fsdpc_py_torch_unit *self)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (!self->bound)
        return 0;
    int written = find_writes(self);
    if (written < 0 ||
        ((written || fsdpc_unit_where(unit) == FSDPC_UNIT_SHARDED) &&
         set_version(self, RESHARDED) < 0) ||
        (!self->held && fsdpc_torch_show(self, false, false) < 0))
        return -1;
    if (!written)
        return 0;
    /* The next copy-in from the masters overwrites the user's write. */
    if (fsdpc_py_check(fsdpc_unit_mark_written(unit)) < 0)
        return -1;
    PyErr_Format(PyExc_RuntimeError,
                 "a parameter of unit '%s' was written in place while the model ran: %s; write "
                 "before or after the call, under no_grad()",
                 fsdpc_unit_name(unit),
                 fsdpc_unit_reads_masters(unit)
                     ? "on this one rank the write stays, on several it would be lost"
                     : "what forward sees is a copy, and the write is lost");
    return -1;
}

void fsdpc_torch_unpin(fsdpc_py_torch_unit *self)
{
    for (; self->pins > 0; self->pins--)
        (void)fsdpc_reshard(fsdpc_torch_unit(self)); /* releases one unshard; cannot fail */
    self->held = false;
}

/* ---- methods ---- */

/* guard(modules): [(dict, refuse)] per module that reads parameters of the unit. */
static PyObject *guard_method(PyObject *object, PyObject *modules)
{
    if (take_guards((fsdpc_py_torch_unit *)object, modules) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* lift(begin): guarded modules may be called, because their parameters are private copies. */
static PyObject *lift_method(PyObject *object, PyObject *arg)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    self->lifted = arg == Py_True;
    return set_guards(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* pin(): after Unit.unshard. The pin is released by reshard or by the unit's own next forward or
 * backward, whichever frees the parameters. */
static PyObject *pin_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((fsdpc_py_torch_unit *)object)->pins++;
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_torch_show_methods[] = {
    FSDPC_PY_METHOD(TorchUnit, guard, guard_method, METH_O),
    FSDPC_PY_METHOD(TorchUnit, lift, lift_method, METH_O),
    FSDPC_PY_METHOD(TorchUnit, pin, pin_method, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
