/* TorchUnit: its lifetime, and the foreign tensors that it uses. */
#include "bind/torch/unit.h"

static bool init_names(fsdpc_torch_names *names)
{
#define X(name)                                                                                    \
    if (!(names->name = PyUnicode_InternFromString(#name)))                                        \
        return false;
    FSDPC_TORCH_NAMES(X)
#undef X
    return true;
}

/* Reads the sharded parameters and their places in modules. */
static int fill(fsdpc_py_torch_unit *self, PyObject *slots, PyObject *params)
{
    fsdpc_unit *unit = fsdpc_torch_unit(self);
    if (fsdpc_py_check(fsdpc_unit_mark_shared(unit)) < 0) /* users may write them */
        return -1;
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        const fsdpc_unit_flat flat = fsdpc_unit_flat_with(unit, i);
        fsdpc_local_shard local;
        void *master = fsdpc_unit_master(unit, i, &local);
        p->master = local.numel ? master : NULL;
        p->narrow = flat.dtype != flat.grad_dtype;
        p->sharded = Py_NewRef(PyList_GET_ITEM(params, i));
        if (!(p->hook = fsdpc_torch_hook_new(self, i)))
            return -1;
    }
    for (int s = 0; s < self->n_slots; s++) {
        fsdpc_torch_slot *slot = &self->slots[s];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(slots, s), "O!Ui", &PyDict_Type, &slot->dict,
                              &slot->name, &slot->param)) {
            self->n_slots = s;
            return -1;
        }
        Py_INCREF(slot->dict);
        Py_INCREF(slot->name);
    }
    return 0;
}

static PyObject *torch_unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *unit, *slots, *params, *adopt, *renew, *streams, *local = Py_None;
    int gives_back;
    FSDPC_PY_KEYWORDS(keywords, "unit", "slots", "params", "adopt", "renew", "streams",
                      "gives_back", "local");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!OOOp|O", keywords, &unit, &PyList_Type,
                                     &slots, &PyList_Type, &params, &adopt, &renew, &streams,
                                     &gives_back, &local))
        return NULL;
    fsdpc_py_unit *inner = fsdpc_py_unit_of(PyType_GetModule(type), unit);
    if (!inner)
        return NULL;
    int n = fsdpc_unit_layout(inner->ref->unit)->n_params;
    if (PyList_GET_SIZE(params) != n)
        return PyErr_Format(PyExc_ValueError,
                            "a TorchUnit needs a sharded parameter for each of %d", n);
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->unit_object = Py_NewRef(unit);
    self->unit = inner;
    self->adopt = Py_NewRef(adopt);
    self->renew = Py_NewRef(renew);
    self->gives_back = gives_back;
    self->streams = streams == Py_None ? NULL : Py_NewRef(streams);
    self->local = local == Py_None ? NULL : Py_NewRef(local);
    self->params = fsdpc_py_array(n, sizeof *self->params);
    self->slots = fsdpc_py_array(PyList_GET_SIZE(slots), sizeof *self->slots);
    if (self->params && self->slots) {
        self->n_params = n;
        self->n_slots = (int)PyList_GET_SIZE(slots);
        if (init_names(&self->names) && fill(self, slots, params) == 0) {
            fsdpc_torch_provide_unsharded(self);
            return (PyObject *)self;
        }
    }
    Py_DECREF(self);
    return NULL;
}

/* bind(unsharded, bases, foreign, set_version, at_end, mates, stored): `foreign` is the memory of
 * `bases`, or None; `stored` has a function or None for each parameter. */
static PyObject *torch_unit_bind(PyObject *object, PyObject *args)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    PyObject *unsharded, *bases, *foreign, *set, *at_end, *mates, *stored;
    if (!PyArg_ParseTuple(args, "O!O!OOOO!O!", &PyList_Type, &unsharded, &PyTuple_Type, &bases,
                          &foreign, &set, &at_end, &PyList_Type, &mates, &PyList_Type, &stored))
        return NULL;
    if (PyList_GET_SIZE(unsharded) != self->n_params || PyList_GET_SIZE(stored) != self->n_params)
        return PyErr_Format(PyExc_ValueError,
                            "bind takes an unsharded parameter for each of %d parameters",
                            self->n_params);
    for (int i = 0; i < self->n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        Py_XSETREF(p->unsharded, Py_NewRef(PyList_GET_ITEM(unsharded, i)));
        PyObject *part = PyList_GET_ITEM(stored, i);
        Py_XSETREF(p->stored, part == Py_None ? NULL : Py_NewRef(part));
        Py_XSETREF(p->dtype, PyObject_GetAttr(p->unsharded, self->names.dtype));
        if (!p->dtype)
            return NULL;
    }
    Py_XSETREF(self->bases, Py_NewRef(bases));
    Py_XSETREF(self->unsharded, PyList_Check(foreign) ? Py_NewRef(foreign) : NULL);
    Py_XSETREF(self->set_version, Py_NewRef(set));
    Py_XSETREF(self->at_end, Py_NewRef(at_end));
    Py_XSETREF(self->mates, Py_NewRef(mates));
    /* In the foreign library, gradients replace activations at the end of malloc's heap and stay
     * allocated. Our gradients are freed immediately, so in each backward malloc would return that
     * memory to the system and page-fault it in again. */
    if (!self->gives_back)
        fsdpc_mem_keep_heap();
    self->bound = true;
    Py_RETURN_NONE;
}

static int torch_unit_traverse(PyObject *object, visitproc visit, void *arg)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    for (int i = 0; i < self->n_params; i++) {
        Py_VISIT(self->params[i].sharded);
        Py_VISIT(self->params[i].unsharded);
        Py_VISIT(self->params[i].grad);
        Py_VISIT(self->params[i].early);
        Py_VISIT(self->params[i].given);
        Py_VISIT(self->params[i].hook);
        Py_VISIT(self->params[i].stored);
    }
    for (int s = 0; s < self->n_slots; s++)
        Py_VISIT(self->slots[s].dict);
    for (int i = 0; i < self->n_guards; i++) {
        Py_VISIT(self->guards[i].dict);
        Py_VISIT(self->guards[i].refuse);
    }
    Py_VISIT(self->unit_object);
    Py_VISIT(self->bases);
    Py_VISIT(self->set_version);
    Py_VISIT(self->at_end);
    Py_VISIT(self->adopt);
    Py_VISIT(self->renew);
    Py_VISIT(self->unsharded);
    Py_VISIT(self->mates);
    Py_VISIT(self->streams);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int torch_unit_clear(PyObject *object)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    int n_params = self->n_params, n_slots = self->n_slots;
    self->bound = false;
    self->n_params = self->n_slots = 0;
    for (int i = 0; i < n_params; i++) {
        fsdpc_torch_param *p = &self->params[i];
        if (p->hook)
            fsdpc_torch_hook_part(p->hook);
        Py_CLEAR(p->sharded);
        Py_CLEAR(p->unsharded);
        Py_CLEAR(p->grad);
        Py_CLEAR(p->early);
        Py_CLEAR(p->given);
        Py_CLEAR(p->hook);
        Py_CLEAR(p->stored);
        Py_CLEAR(p->dtype);
    }
    for (int s = 0; s < n_slots; s++) {
        Py_CLEAR(self->slots[s].dict);
        Py_CLEAR(self->slots[s].name);
    }
    for (; self->n_guards > 0; self->n_guards--) {
        Py_CLEAR(self->guards[self->n_guards - 1].dict);
        Py_CLEAR(self->guards[self->n_guards - 1].refuse);
    }
    Py_CLEAR(self->bases);
    Py_CLEAR(self->set_version);
    Py_CLEAR(self->at_end);
    Py_CLEAR(self->adopt);
    Py_CLEAR(self->renew);
    if (self->unit)
        fsdpc_unit_set_frontend_memory(fsdpc_torch_unit(self), NULL);
    Py_CLEAR(self->unsharded);
    Py_CLEAR(self->mates);
    Py_CLEAR(self->streams);
    Py_CLEAR(self->local);
    return 0;
}

static void torch_unit_dealloc(PyObject *object)
{
    fsdpc_py_torch_unit *self = (fsdpc_py_torch_unit *)object;
    PyObject_GC_UnTrack(object);
    torch_unit_clear(object);
#define X(name) Py_CLEAR(self->names.name);
    FSDPC_TORCH_NAMES(X)
#undef X
    Py_CLEAR(self->unit_object);
    PyMem_Free(self->params);
    PyMem_Free(self->slots);
    PyMem_Free(self->guards);
    fsdpc_py_free(object);
}

static PyMethodDef methods[] = {
    FSDPC_PY_METHOD(TorchUnit, bind, torch_unit_bind, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot torch_unit_slots[] = {
    {Py_tp_new, torch_unit_new},
    {Py_tp_dealloc, torch_unit_dealloc},
    {Py_tp_traverse, torch_unit_traverse},
    {Py_tp_clear, torch_unit_clear},
    {Py_tp_methods, methods},
    {Py_tp_doc, (void *)fsdpc_doc_TorchUnit},
    {0, NULL},
};

FSDPC_PY_TYPE(torch_unit, TorchUnit, fsdpc_py_torch_unit, Py_TPFLAGS_HAVE_GC, torch_unit_slots);
