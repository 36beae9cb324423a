/* Door: driving the schedule.
 *
 * enter and leave stand around a module's forward, marks (callables for the foreign autograd's
 * nodes) begin a unit's backward, end_backward ends it.  What modules see meanwhile is
 * py_door_show.c's.
 *
 * A forward inside backward is a recomputation: fulls stay shown until the unit's backward ends.
 */
#include "py/py_door.h"

#include <stddef.h>

int fsdpc_door_join(const fsdpc_py_door *door)
{
    if (!door->streams)
        return 0;
    PyObject *number = PyObject_CallNoArgs(door->streams);
    size_t raw = number ? PyLong_AsSize_t(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    fsdpc_status status = fsdpc_device_adopt(fsdpc_unit_device(fsdpc_door_unit(door)), raw);
    return status == FSDPC_OK ? 0 : (fsdpc_py_raise(status), -1);
}

static fsdpc_root *root_of(const fsdpc_py_door *door)
{
    return fsdpc_unit_root(fsdpc_door_unit(door));
}

int fsdpc_door_param_arg(const fsdpc_py_door *door, PyObject *const *args, Py_ssize_t n)
{
    if (n == 0)
        return -1;
    long i = n == 1 ? PyLong_AsLong(args[0]) : -1;
    if (!PyErr_Occurred() && (i < 0 || i >= door->n_params))
        PyErr_Format(PyExc_IndexError, "one parameter of %d, or none", door->n_params);
    return PyErr_Occurred() ? -1 : (int)i;
}

/* ---- the schedule ---- */

static int check_usable(const fsdpc_py_door *door)
{
    if (!door->bound) {
        PyErr_SetString(PyExc_RuntimeError, "a Door is bound to fulls first");
        return -1;
    }
    return fsdpc_py_unit_check_open(door->unit) < 0 ? -1 : fsdpc_door_join(door);
}

/* What became of pieces' gradients since the last backward, once in a backward. */
static int catch_up(fsdpc_py_door *door)
{
    /* What an earlier backward did not wait for may be there by now. */
    if (!door->taken && (fsdpc_door_give_grads(door) < 0 || fsdpc_door_take_grads(door) < 0))
        return -1;
    door->taken = true;
    return 0;
}

int fsdpc_door_begin_backward(fsdpc_py_door *door, uint64_t generation)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    if (check_usable(door) < 0)
        return -1;
    PyObject *asked = PyObject_CallNoArgs(door->at_end);
    if (!asked)
        return -1;
    Py_DECREF(asked);
    if (fsdpc_unit_in_backward(unit) && door->shown)
        return 0;
    if (catch_up(door) < 0)
        return -1;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_begin_backward(unit, generation));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status), -1;
    return fsdpc_door_show(door, true);
}

/* mark(): what a node calls with its gradients before it runs. */
static PyObject *mark_call(PyObject *self, PyObject *Py_UNUSED(grads))
{
    fsdpc_py_door *door = (fsdpc_py_door *)PyTuple_GET_ITEM(self, 0);
    uint64_t generation = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(self, 1));
    if (fsdpc_door_begin_backward(door, generation) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef mark_def = {"mark", mark_call, METH_O, "A unit's backward begins."};

static PyObject *door_mark(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    PyObject *self = Py_BuildValue(
        "(OK)", object, (unsigned long long)fsdpc_unit_generation(fsdpc_door_unit(door)));
    PyObject *mark = self ? PyCFunction_New(&mark_def, self) : NULL;
    Py_XDECREF(self);
    return mark;
}

/* enter(grad, in_task): `in_task` says that the foreign autograd is running backward.  True for the
 * first of the unit's modules to run. */
static PyObject *door_enter(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "enter(grad, in_task)");
        return NULL;
    }
    bool grad = args[0] == Py_True;
    const fsdpc_call call = {
        .grad = grad, .recomputed = grad && args[1] == Py_True, .ran_at = FSDPC_CALL_UNKNOWN};
    if (check_usable(door) < 0)
        return NULL;
    fsdpc_unit *unit = fsdpc_door_unit(door);
    uint64_t generation;
    if (fsdpc_call_begins_backward(unit, &call, &generation) &&
        fsdpc_door_begin_backward(door, generation) < 0)
        return NULL;
    if (fsdpc_door_follow_root(door) < 0)
        return NULL;
    bool first;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_enter(unit, &call, &first));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return fsdpc_door_show(door, true) < 0 ? NULL : PyBool_FromLong(first);
}

static PyObject *door_leave(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (fsdpc_door_join(door) < 0)
        return NULL;
    fsdpc_left left;
    fsdpc_status status = fsdpc_call_leave(fsdpc_door_unit(door), &left);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    if (left == FSDPC_LEFT_INSIDE)
        Py_RETURN_NONE;
    if (left == FSDPC_LEFT_RESHARD)
        fsdpc_door_unpin(door);
    return fsdpc_door_hide(door) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *door_end_backward(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (fsdpc_door_join(door) < 0)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_post_backward(fsdpc_door_unit(door)));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return fsdpc_door_hide(door) < 0 ? NULL : Py_NewRef(Py_None);
}

/* finish(): of the root; every rank's reductions are done after it. */
static PyObject *door_finish(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    fsdpc_root *root = root_of(door);
    if (fsdpc_door_join(door) < 0)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_call_end_backward(root, FSDPC_OK));
    return fsdpc_py_none(status);
}

/* catch_up(): before the reduction of a unit whose backward may not have run on this rank. */
static PyObject *door_catch_up(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    return fsdpc_door_join(door) < 0 || catch_up(door) < 0 ? NULL : Py_NewRef(Py_None);
}

/* reset(): after an exception; the engine's part concerns the whole root. */
static PyObject *door_reset(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    fsdpc_root_ref *root = door->unit->ref->root;
    if (fsdpc_door_join(door) < 0)
        return NULL;
    if (root)
        fsdpc_root_reset(root->root);
    Py_RETURN_NONE;
}

/* hide(gave_up): pieces again.  Whether what a backward that was given up has posted is in differs
 * from rank to rank, so it goes on all, unless the user adds to gradients of earlier ones. */
static PyObject *door_hide(PyObject *object, PyObject *gave_up)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    door->taken = false;
    fsdpc_unit *unit = fsdpc_door_unit(door);
    for (int i = 0; i < door->n_params; i++)
        (void)fsdpc_unit_give_grad(unit, i); /* as if it had been */
    int any = gave_up == Py_True ? fsdpc_door_has_grads(door) : 1;
    if (any == 0)
        fsdpc_unit_zero_grad(unit);
    return any < 0 || fsdpc_door_hide(door) < 0 ? NULL : Py_NewRef(Py_None);
}

/* hold(begin): fulls stay shown once Unit.unshard has gathered them, until it is given back. */
static PyObject *door_hold(PyObject *object, PyObject *arg)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    if (check_usable(door) < 0)
        return NULL;
    if (arg != Py_True) {
        fsdpc_door_unpin(door);
        (void)fsdpc_reshard(fsdpc_door_unit(door));
        return fsdpc_door_hide(door) < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (!door->pins) /* a forward has used and given it back */
        Py_RETURN_NONE;
    door->held = true;
    return fsdpc_door_show(door, true) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- life ---- */

static bool init_names(fsdpc_door_names *names)
{
#define X(name)                                                                                    \
    if (!(names->name = PyUnicode_InternFromString(#name)))                                        \
        return false;
    FSDPC_DOOR_NAMES(X)
#undef X
    return true;
}

/* Pieces and gradients of every parameter, and where it stands. */
static int fill(fsdpc_py_door *door, PyObject *slots, PyObject *pieces, PyObject *grads)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    for (int i = 0; i < door->n_params; i++) {
        fsdpc_door_param *p = &door->params[i];
        const fsdpc_unit_flat flat = fsdpc_unit_flat_with(unit, i);
        fsdpc_piece piece;
        void *master = fsdpc_unit_master(unit, i, &piece);
        p->master = piece.numel ? master : NULL;
        p->narrow = flat.dtype != flat.grad_dtype;
        p->piece = Py_NewRef(PyList_GET_ITEM(pieces, i));
        p->grad = Py_NewRef(PyList_GET_ITEM(grads, i));
        p->given = Py_NewRef(p->grad);
        if (!(p->hook = fsdpc_door_hook_new(door, i)))
            return -1;
    }
    for (int s = 0; s < door->n_slots; s++) {
        fsdpc_door_slot *slot = &door->slots[s];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(slots, s), "O!Ui", &PyDict_Type, &slot->dict,
                              &slot->name, &slot->param)) {
            door->n_slots = s;
            return -1;
        }
        Py_INCREF(slot->dict);
        Py_INCREF(slot->name);
    }
    fsdpc_unit_mark_shared(unit); /* whoever holds the pieces may write them */
    return 0;
}

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *unit, *slots, *pieces, *grads, *adopt, *streams;
    static char *keywords[] = {"unit", "slots", "pieces", "grads", "adopt", "streams", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!OO", keywords, &unit, &PyList_Type,
                                     &slots, &PyList_Type, &pieces, &PyList_Type, &grads, &adopt,
                                     &streams))
        return NULL;
    fsdpc_py_unit *inner = fsdpc_py_unit_of(PyType_GetModule(type), unit);
    if (!inner)
        return NULL;
    int n = fsdpc_unit_layout(inner->ref->unit)->n_params;
    if (PyList_GET_SIZE(pieces) != n || PyList_GET_SIZE(grads) != n)
        return PyErr_Format(PyExc_ValueError, "a Door needs a piece and a gradient for each of %d",
                            n);
    fsdpc_py_door *self = (fsdpc_py_door *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->unit_object = Py_NewRef(unit);
    self->unit = inner;
    self->adopt = Py_NewRef(adopt);
    self->streams = streams == Py_None ? NULL : Py_NewRef(streams);
    self->params = PyMem_Calloc(n ? (size_t)n : 1, sizeof *self->params);
    self->slots = PyMem_Calloc((size_t)PyList_GET_SIZE(slots) + 1, sizeof *self->slots);
    if (!self->params || !self->slots) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->n_params = n;
    self->n_slots = (int)PyList_GET_SIZE(slots);
    if (!init_names(&self->names) || fill(self, slots, pieces, grads) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* bind(fulls, bases, set_version, at_end, mates) */
static PyObject *door_bind(PyObject *object, PyObject *args)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    PyObject *fulls, *bases, *set, *at_end, *mates;
    if (!PyArg_ParseTuple(args, "O!O!OOO!", &PyList_Type, &fulls, &PyTuple_Type, &bases, &set,
                          &at_end, &PyList_Type, &mates))
        return NULL;
    if (PyList_GET_SIZE(fulls) != door->n_params)
        return PyErr_Format(PyExc_ValueError, "bind takes a full for each of %d parameters",
                            door->n_params);
    for (int i = 0; i < door->n_params; i++) {
        fsdpc_door_param *p = &door->params[i];
        Py_XSETREF(p->full, Py_NewRef(PyList_GET_ITEM(fulls, i)));
        Py_XSETREF(p->dtype, PyObject_GetAttr(p->full, door->names.dtype));
        if (!p->dtype)
            return NULL;
    }
    Py_XSETREF(door->bases, Py_NewRef(bases));
    Py_XSETREF(door->set_version, Py_NewRef(set));
    Py_XSETREF(door->at_end, Py_NewRef(at_end));
    Py_XSETREF(door->mates, Py_NewRef(mates));
    door->bound = true;
    Py_RETURN_NONE;
}

static int door_traverse(PyObject *object, visitproc visit, void *arg)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    for (int i = 0; i < door->n_params; i++) {
        Py_VISIT(door->params[i].piece);
        Py_VISIT(door->params[i].full);
        Py_VISIT(door->params[i].grad);
        Py_VISIT(door->params[i].given);
        Py_VISIT(door->params[i].hook);
    }
    for (int s = 0; s < door->n_slots; s++)
        Py_VISIT(door->slots[s].dict);
    for (int i = 0; i < door->n_guards; i++) {
        Py_VISIT(door->guards[i].dict);
        Py_VISIT(door->guards[i].refuse);
    }
    Py_VISIT(door->unit_object);
    Py_VISIT(door->bases);
    Py_VISIT(door->set_version);
    Py_VISIT(door->at_end);
    Py_VISIT(door->adopt);
    Py_VISIT(door->mates);
    Py_VISIT(door->streams);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int door_clear(PyObject *object)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    int n_params = door->n_params, n_slots = door->n_slots;
    door->bound = false;
    door->n_params = door->n_slots = 0;
    for (int i = 0; i < n_params; i++) {
        fsdpc_door_param *p = &door->params[i];
        if (p->hook)
            fsdpc_door_hook_part(p->hook);
        Py_CLEAR(p->piece);
        Py_CLEAR(p->full);
        Py_CLEAR(p->grad);
        Py_CLEAR(p->given);
        Py_CLEAR(p->hook);
        Py_CLEAR(p->dtype);
    }
    for (int s = 0; s < n_slots; s++) {
        Py_CLEAR(door->slots[s].dict);
        Py_CLEAR(door->slots[s].name);
    }
    for (; door->n_guards > 0; door->n_guards--) {
        Py_CLEAR(door->guards[door->n_guards - 1].dict);
        Py_CLEAR(door->guards[door->n_guards - 1].refuse);
    }
    Py_CLEAR(door->bases);
    Py_CLEAR(door->set_version);
    Py_CLEAR(door->at_end);
    Py_CLEAR(door->adopt);
    Py_CLEAR(door->mates);
    Py_CLEAR(door->streams);
    return 0;
}

static void door_dealloc(PyObject *object)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    door_clear(object);
#define X(name) Py_CLEAR(door->names.name);
    FSDPC_DOOR_NAMES(X)
#undef X
    Py_CLEAR(door->unit_object);
    PyMem_Free(door->params);
    PyMem_Free(door->slots);
    PyMem_Free(door->guards);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef door_methods[] = {
    {"bind", door_bind, METH_VARARGS,
     "bind(fulls, bases, set_version, at_end, mates): the root is made, of these doors."},
    {"enter", (PyCFunction)(void (*)(void))door_enter, METH_FASTCALL,
     "enter(grad, in_task): a module's forward begins."},
    {"leave", door_leave, METH_NOARGS, "leave(): it has ended."},
    {"mark", door_mark, METH_NOARGS, "A callable for nodes: the unit's backward begins."},
    {"end_backward", door_end_backward, METH_NOARGS, "The unit's backward has ended."},
    {"finish", door_finish, METH_NOARGS, "The root's backward has ended: wait for reductions."},
    {"catch_up", door_catch_up, METH_NOARGS, "Take gradients, unless this backward has."},
    {"follow", (PyCFunction)(void (*)(void))fsdpc_door_follow_method, METH_FASTCALL,
     "follow(i=all): take over what `.data` of pieces was replaced by."},
    {"follow_root", fsdpc_door_follow_root_method, METH_NOARGS,
     "Before an epoch: what became of the pieces of all units."},
    {"settle", fsdpc_door_settle_method, METH_NOARGS,
     "Hand out gradients; whether hooks wait for them."},
    {"take_grads", (PyCFunction)(void (*)(void))fsdpc_door_take_grads_method, METH_FASTCALL,
     "take_grads(i=all): learn what became of the pieces' gradients."},
    {"add_product", fsdpc_door_add_product, METH_VARARGS,
     "add_product(i, dy, x, rows, n_out, n_in): dy' x, of dense memory at these addresses, is a "
     "gradient of parameter i; False where the unit reduces in a dtype that cannot take it."},
    {"apply_scale", fsdpc_door_apply_scale_method, METH_NOARGS, "Apply what clipping left."},
    {"reset", door_reset, METH_NOARGS, "After an exception: all units of the root are sharded."},
    {"hide", door_hide, METH_O, "hide(gave_up): show pieces, forget half a backward."},
    {"pin", fsdpc_door_pin_method, METH_NOARGS, "pin(): Unit.unshard was called."},
    {"hold", door_hold, METH_O, "hold(begin): keep fulls shown, or no longer."},
    {"guard", fsdpc_door_guard_method, METH_O,
     "guard([(dict, refuse)]): modules that read its parameters."},
    {"lift", fsdpc_door_lift_method, METH_O,
     "lift(begin): guarded modules may be called, or no longer."},
    {NULL, NULL, 0, NULL},
};

static PyObject *get_in_backward(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_root *root = root_of((fsdpc_py_door *)object);
    return PyBool_FromLong(root && fsdpc_root_in_backward(root));
}

static PyObject *get_depth(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_root *root = root_of((fsdpc_py_door *)object);
    return PyLong_FromLong(root ? fsdpc_root_forward_depth(root) : 0);
}

static PyObject *get_live(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(fsdpc_unit_has_grads(fsdpc_door_unit((fsdpc_py_door *)object)));
}

static PyObject *get_pending(PyObject *object, void *Py_UNUSED(unused))
{
    return PyFloat_FromDouble(fsdpc_unit_pending_scale(fsdpc_door_unit((fsdpc_py_door *)object)));
}

static PyObject *get_generation(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(
        fsdpc_unit_generation(fsdpc_door_unit((fsdpc_py_door *)object)));
}

static int set_generation(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    unsigned long long seen = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred())
        return -1;
    fsdpc_call_set_seen(fsdpc_door_unit((fsdpc_py_door *)object), seen);
    return 0;
}

static PyGetSetDef door_getset[] = {
    {"in_backward", get_in_backward, NULL, "Whether the root's backward runs.", NULL},
    {"depth", get_depth, NULL, "Forwards of the root that are running.", NULL},
    {"grad_live", get_live, NULL, "Whether the gradient shard holds anything.", NULL},
    {"generation", get_generation, set_generation,
     "Of the weights; set: what the forward saw that is computed again.", NULL},
    {"pending_scale", get_pending, NULL, "What clipping left to be applied.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot door_slots[] = {
    {Py_tp_new, door_new},
    {Py_tp_dealloc, door_dealloc},
    {Py_tp_traverse, door_traverse},
    {Py_tp_clear, door_clear},
    {Py_tp_methods, door_methods},
    {Py_tp_getset, door_getset},
    {Py_tp_doc, "Door(unit, slots, pieces, grads, adopt, streams): a unit for foreign tensors."},
    {0, NULL},
};

static PyType_Spec door_spec = {
    .name = "fsdpc._core.Door",
    .basicsize = sizeof(fsdpc_py_door),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = door_slots,
};

int fsdpc_py_door_setup(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &door_spec, NULL);
    if (!type)
        return -1;
    int result = PyModule_AddObjectRef(module, "Door", type);
    Py_DECREF(type);
    if (result < 0 || fsdpc_py_door_memory_setup(module) < 0)
        return -1;
    return fsdpc_py_door_product_setup(module);
}
