/* Methods of Unit that manage the schedule: gathering by hand, holding, flags, what was recorded.
 *
 * Collective calls release the GIL: they wait for the other ranks.
 */
#include "py/py_engine.h"

#include <stddef.h>

static fsdpc_unit *unit_of(PyObject *object)
{
    return ((fsdpc_py_unit *)object)->ref->unit;
}

/* The unit's root, for calls that need one. */
static fsdpc_root *root_of(PyObject *object)
{
    fsdpc_root *root = unit_of(object)->root;
    if (!root)
        PyErr_Format(PyExc_RuntimeError,
                     "unit '%s' has no root yet: the outermost module has not run",
                     unit_of(object)->name);
    return root;
}

PyObject *fsdpc_py_unit_unshard(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_status status;
    if (fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0 || !root_of(object))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_unshard_begin(unit_of(object));
    Py_END_ALLOW_THREADS;
    return fsdpc_py_none(status);
}

PyObject *fsdpc_py_unit_unshard_wait(PyObject *object, PyObject *unused)
{
    (void)unused;
    fsdpc_status status;
    if (fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0 || !root_of(object))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_unshard_wait(unit_of(object));
    Py_END_ALLOW_THREADS;
    return fsdpc_py_none(status);
}

PyObject *fsdpc_py_unit_reshard(PyObject *object, PyObject *unused)
{
    (void)unused;
    return fsdpc_py_none(fsdpc_reshard(unit_of(object)));
}

PyObject *fsdpc_py_unit_reset(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (unit_of(object)->root)
        fsdpc_root_reset(unit_of(object)->root);
    Py_RETURN_NONE;
}

PyObject *fsdpc_py_unit_hold(PyObject *object, PyObject *begin)
{
    fsdpc_status status;
    fsdpc_root *root = root_of(object);
    int begins = PyObject_IsTrue(begin);
    if (!root || begins < 0 || fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = begins ? fsdpc_hold_begin(root) : fsdpc_hold_end(root);
    Py_END_ALLOW_THREADS;
    return fsdpc_py_none(status);
}

PyObject *fsdpc_py_unit_set_flag(PyObject *object, PyObject *args)
{
    static const struct {
        const char *name;
        size_t offset;
    } flags[] = {
        {"requires_sync", offsetof(fsdpc_unit, requires_sync)},
        {"requires_all_reduce", offsetof(fsdpc_unit, requires_all_reduce)},
        {"reshard_after_backward", offsetof(fsdpc_unit, reshard_after_backward)},
        {"rank_dependent", offsetof(fsdpc_unit, rank_dependent)},
    };
    const char *name;
    int value;
    if (!PyArg_ParseTuple(args, "sp", &name, &value))
        return NULL;
    if (strcmp(name, "is_last_backward") == 0) {
        fsdpc_root *root = root_of(object);
        if (!root)
            return NULL;
        bool before = root->is_last_backward;
        root->is_last_backward = value != 0;
        return PyBool_FromLong(before);
    }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (strcmp(name, flags[i].name) == 0) {
            bool *flag = (bool *)((char *)unit_of(object) + flags[i].offset);
            bool before = *flag;
            if (flag == &unit_of(object)->rank_dependent && before != (value != 0) &&
                unit_of(object)->root)
                return PyErr_Format(PyExc_RuntimeError,
                                    "whether unit '%s' may run on some ranks only is said before "
                                    "its first forward",
                                    unit_of(object)->name);
            *flag = value != 0;
            return PyBool_FromLong(before);
        }
    }
    return PyErr_Format(PyExc_ValueError, "units have no flag '%s'", name);
}

PyObject *fsdpc_py_unit_set_ahead(PyObject *object, PyObject *args)
{
    int backward;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "pO", &backward, &list))
        return NULL;
    fsdpc_unit *unit = unit_of(object), **ahead = NULL;
    PyObject *items = list == Py_None ? NULL : PySequence_Fast(list, "a list of units, or None");
    if (!items && list != Py_None)
        return NULL;
    Py_ssize_t n = items ? PySequence_Fast_GET_SIZE(items) : 0;
    if (items && !(ahead = malloc(((size_t)n + 1) * sizeof(fsdpc_unit *)))) {
        Py_DECREF(items);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        fsdpc_py_unit *other =
            fsdpc_py_unit_of(PyType_GetModule(Py_TYPE(object)), PySequence_Fast_GET_ITEM(items, i));
        if (other && other->ref->unit->root && other->ref->unit->root == unit->root) {
            ahead[i] = other->ref->unit;
            continue;
        }
        if (other)
            PyErr_Format(PyExc_ValueError, "units '%s' and '%s' are not of one model",
                         other->ref->unit->name, unit->name);
        free(ahead);
        Py_DECREF(items);
        return NULL;
    }
    Py_XDECREF(items);
    free(unit->ahead[backward]);
    unit->ahead[backward] = ahead;
    unit->n_ahead[backward] = (int)n;
    Py_RETURN_NONE;
}

PyObject *fsdpc_py_unit_set_prefetch(PyObject *object, PyObject *distance)
{
    fsdpc_unit *unit = unit_of(object);
    int value = (int)PyLong_AsLong(distance);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    *(unit->root ? &unit->root->prefetch : &unit->prefetch) = value;
    Py_RETURN_NONE;
}

static PyObject *acts_of(const fsdpc_acts *acts)
{
    PyObject *list = PyList_New((Py_ssize_t)acts->length);
    for (size_t i = 0; list && i < acts->length; i++) {
        const fsdpc_act *act = &acts->items[i];
        PyObject *item = Py_BuildValue("(isO)", act->unit, fsdpc_trace_kind_name(act->kind),
                                       act->backward ? Py_True : Py_False);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

PyObject *fsdpc_py_unit_schedule(PyObject *object, PyObject *unused)
{
    (void)unused;
    const fsdpc_root *root = root_of(object);
    if (!root)
        return NULL;
    const fsdpc_record *record = &root->record;
    if (!record->complete)
        return Py_BuildValue("(OOi)", Py_None, Py_None, root->prefetch);
    PyObject *acts = acts_of(root->acts.whole ? &root->acts : &root->last_acts);
    PyObject *uses = PyList_New((Py_ssize_t)record->length);
    for (size_t i = 0; acts && uses && i < record->length; i++) {
        const fsdpc_record_entry *entry = &record->entries[i];
        PyObject *use = Py_BuildValue("(iO)", entry->unit, entry->backward ? Py_True : Py_False);
        if (!use) {
            Py_CLEAR(uses);
            break;
        }
        PyList_SET_ITEM(uses, (Py_ssize_t)i, use);
    }
    if (acts && uses)
        return Py_BuildValue("(NNi)", uses, acts, root->prefetch);
    Py_XDECREF(acts);
    Py_XDECREF(uses);
    return NULL;
}
