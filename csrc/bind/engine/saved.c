/* SavedTensors: a store of tensors that leave memory until backward (tier/saved.h).
 *
 * For native tensors, `call` runs a unit's forward as a region of the tape. For tensors of another
 * library, that library's hooks make the sets: an owner object lists the memory that may leave, and
 * frees and allocates it when asked.
 */
#include "bind/engine/tier.h"
#include "bind/walk.h"

#include "nn/saved_host.h"
#include "nn/saved_tensors.h"

typedef struct py_saved {
    PyObject_HEAD fsdpc_saved *saved;
    PyObject *tier; /* strong; NULL: a plan */
} py_saved;

typedef struct py_set {
    PyObject_HEAD fsdpc_saved_set *set;
} py_set;

static PyObject *saved_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "place", "fraction");
    PyObject *place;
    double fraction = 1;
    fsdpc_tier *tier = NULL;
    const fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(type);
    if (!runtime || !PyArg_ParseTupleAndKeywords(args, kwargs, "O|d", names, &place, &fraction))
        return NULL;
    bool on_host = PyUnicode_Check(place);
    if (!on_host && fsdpc_py_tier_parse(PyType_GetModule(type), place, &tier) < 0)
        return NULL;
    py_saved *self = (py_saved *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->tier = tier ? Py_NewRef(place) : NULL;
    fsdpc_saved_mover *mover = NULL;
    fsdpc_status status = FSDPC_OK;
    if (on_host)
        status = fsdpc_saved_host_create(runtime->device, &mover);
    else if (tier)
        status = fsdpc_saved_disk_create(tier, runtime->mem, &mover);
    if (status == FSDPC_OK)
        status = fsdpc_saved_open(mover, fraction, &self->saved);
    if (fsdpc_py_check(status) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void saved_dealloc(PyObject *object)
{
    py_saved *self = (py_saved *)object;
    fsdpc_saved_release(self->saved);
    Py_XDECREF(self->tier);
    fsdpc_py_free(object);
}

/* ---- Native tensors ---- */

typedef struct outputs {
    fsdpc_py_walk base;
    PyObject *module;
    fsdpc_tensor **tensors; /* borrowed from the result */
    Py_ssize_t n, room;
} outputs;

static PyObject *list_output(fsdpc_py_walk *base, PyObject *object)
{
    outputs *all = (outputs *)base;
    fsdpc_tensor *t = fsdpc_py_tensor_peek(all->module, object);
    if (!t)
        return NULL;
    if (all->n == all->room) {
        Py_ssize_t room = all->room ? 2 * all->room : 8;
        fsdpc_tensor **grown = PyMem_Realloc(all->tensors, (size_t)room * sizeof(fsdpc_tensor *));
        if (!grown)
            return PyErr_NoMemory();
        all->tensors = grown;
        all->room = room;
    }
    all->tensors[all->n++] = t;
    return Py_NewRef(object);
}

/* Ends the region with the tensors in `result`, or, if that is NULL, with none. */
static int end_region(PyObject *module, fsdpc_tape *tape, const fsdpc_region *region,
                      const char *unit, PyObject *result)
{
    outputs all = {.base = {.tensor = list_output}, .module = module};
    PyObject *same = result ? fsdpc_py_rebuild(&all.base, result) : NULL;
    fsdpc_status status = fsdpc_region_end(tape, region, unit, same ? (int)all.n : 0, all.tensors);
    PyMem_Free(all.tensors);
    Py_XDECREF(same);
    return same ? fsdpc_py_check(status) : -1;
}

static PyObject *saved_call(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    if (n != 4 || !PyUnicode_Check(args[0]) || !PyTuple_Check(args[2]) || !PyDict_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "call(unit, forward, args, kwargs)");
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    const char *unit = PyUnicode_AsUTF8(args[0]);
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime || !unit)
        return NULL;
    fsdpc_tape *tape = runtime->tape;
    fsdpc_region region;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_region_begin(tape, ((py_saved *)object)->saved, &region));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    PyObject *result = PyObject_Call(args[1], args[2], args[3]);
    if (end_region(module, tape, &region, unit, result) < 0)
        Py_CLEAR(result);
    return result;
}

/* ---- Tensors of another library ---- */

/* Calls owner.name(), or owner.name(value); reports failure as a status. The caller owns the
 * result. */
static fsdpc_status ask(PyObject *owner, const char *name, PyObject *value, PyObject **out)
{
    *out = PyObject_CallMethod(owner, name, value ? "O" : NULL, value);
    return *out ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_CALLBACK, "%s() of saved tensors raised", name);
}

/* Calls a method that has no result and does not fail. */
static void tell(PyObject *owner, const char *name, PyObject *value)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *none;
    if (ask(owner, name, value, &none) != FSDPC_OK)
        PyErr_WriteUnraisable(owner);
    Py_XDECREF(none);
    PyGILState_Release(gil);
}

/* Asks the owner which of its arrays, [(address, bytes), ...], may leave, and tells it which do. */
static fsdpc_status owner_collect(void *arg, fsdpc_saved_set *set)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *arrays, *none = NULL, *leave = PyList_New(0);
    fsdpc_status status = ask(arg, "arrays", NULL, &arrays);
    for (Py_ssize_t i = 0; status == FSDPC_OK && i < PyList_GET_SIZE(arrays); i++) {
        unsigned long long address;
        Py_ssize_t bytes;
        if (!leave || !PyArg_ParseTuple(PyList_GET_ITEM(arrays, i), "Kn", &address, &bytes) ||
            PyList_Append(leave, fsdpc_saved_add(set, (void *)(uintptr_t)address, (size_t)bytes)
                                     ? Py_True
                                     : Py_False) < 0)
            status = fsdpc_fail(FSDPC_ERR_CALLBACK, "arrays() of saved tensors");
    }
    if (status == FSDPC_OK)
        status = ask(arg, "leave", leave, &none);
    Py_XDECREF(none);
    Py_XDECREF(arrays);
    Py_XDECREF(leave);
    PyGILState_Release(gil);
    return status;
}

static void owner_release(void *arg)
{
    tell(arg, "release", NULL);
}

static fsdpc_status owner_restore(void *arg, void **memory_out)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *addresses;
    fsdpc_status status = ask(arg, "restore", NULL, &addresses);
    for (Py_ssize_t i = 0; status == FSDPC_OK && i < PyList_GET_SIZE(addresses); i++)
        memory_out[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(PyList_GET_ITEM(addresses, i));
    if (status == FSDPC_OK && PyErr_Occurred())
        status = fsdpc_fail(FSDPC_ERR_CALLBACK, "restore() of saved tensors");
    Py_XDECREF(addresses);
    PyGILState_Release(gil);
    return status;
}

static void owner_settle(void *arg, bool restored)
{
    tell(arg, "settle", restored ? Py_True : Py_False);
}

static void owner_destroy(void *arg)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)arg);
    PyGILState_Release(gil);
}

static const fsdpc_saved_ops owner_ops = {owner_collect, owner_release, owner_restore,
                                          owner_settle,  NULL,          owner_destroy};

static PyObject *saved_begin(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_saved_begin(((py_saved *)object)->saved));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *saved_end(PyObject *object, PyObject *args)
{
    const char *unit;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "sO", &unit, &owner))
        return NULL;
    const fsdpc_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyTypeObject *type = (PyTypeObject *)state->saved_set_type;
    py_set *set = (py_set *)type->tp_alloc(type, 0);
    if (set && fsdpc_py_check(fsdpc_saved_end(((py_saved *)object)->saved, unit, &owner_ops, owner,
                                              &set->set)) < 0)
        Py_CLEAR(set);
    if (set)
        Py_INCREF(owner); /* released by owner_destroy */
    return (PyObject *)set;
}

static PyObject *set_need(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_saved_need(((py_set *)object)->set));
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

static void set_dealloc(PyObject *object)
{
    fsdpc_saved_set_release(((py_set *)object)->set);
    fsdpc_py_free(object);
}

/* ---- The types ---- */

FSDPC_PY_GETTER(saved_away_bytes,
                PyLong_FromUnsignedLongLong(fsdpc_saved_away_bytes(((py_saved *)object)->saved)))

FSDPC_PY_GETTER(saved_staging_bytes, PyLong_FromSize_t(fsdpc_saved_staging_bytes()))

static PyMethodDef saved_methods[] = {
    FSDPC_PY_METHOD(SavedTensors, call, saved_call, METH_FASTCALL),
    FSDPC_PY_METHOD(SavedTensors, begin, saved_begin, METH_NOARGS),
    FSDPC_PY_METHOD(SavedTensors, end, saved_end, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef saved_getset[] = {
    FSDPC_PY_ATTRIBUTE(SavedTensors, away_bytes, saved_away_bytes, NULL),
    FSDPC_PY_ATTRIBUTE(SavedTensors, staging_bytes, saved_staging_bytes, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot saved_slots[] = {
    {Py_tp_new, saved_new},
    {Py_tp_dealloc, saved_dealloc},
    {Py_tp_methods, saved_methods},
    {Py_tp_getset, saved_getset},
    {Py_tp_doc, (void *)fsdpc_doc_SavedTensors},
    {0, NULL},
};

FSDPC_PY_TYPE(saved, SavedTensors, py_saved, 0, saved_slots);

static PyMethodDef set_methods[] = {
    FSDPC_PY_METHOD(SavedSet, need, set_need, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot set_slots[] = {
    {Py_tp_dealloc, set_dealloc},
    {Py_tp_methods, set_methods},
    {Py_tp_doc, (void *)fsdpc_doc_SavedSet},
    {0, NULL},
};

FSDPC_PY_TYPE(saved_set, SavedSet, py_set, Py_TPFLAGS_DISALLOW_INSTANTIATION, set_slots);
