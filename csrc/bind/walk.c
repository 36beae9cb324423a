/* Handles lists, tuples and dicts; nn/_structures.py converts other classes to those and back. */
#include "bind/walk.h"

/* One of the structures that enclose the current object. */
typedef struct fsdpc_py_around {
    struct fsdpc_py_around *outer;
    PyObject *object;
    bool recurs; /* it contains itself */
} around;

static bool is_dataclass(PyObject *object)
{
    return !PyType_Check(object) && PyObject_HasAttrString(object, "__dataclass_fields__");
}

static PyObject *copy_sequence(PyObject *sequence)
{
    if (!PyTuple_Check(sequence))
        return PySequence_List(sequence);
    PyObject *copy = PyTuple_New(PyTuple_GET_SIZE(sequence));
    for (Py_ssize_t i = 0; copy && i < PyTuple_GET_SIZE(copy); i++)
        PyTuple_SET_ITEM(copy, i, Py_NewRef(PyTuple_GET_ITEM(sequence, i)));
    return copy;
}

static PyObject *rebuild_items(fsdpc_py_walk *walk, PyObject *sequence)
{
    int (*set)(PyObject *, Py_ssize_t, PyObject *) =
        PyTuple_Check(sequence) ? PyTuple_SetItem : PyList_SetItem;
    PyObject *made = Py_NewRef(sequence);
    for (Py_ssize_t i = 0; made && i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *old = Py_NewRef(PySequence_Fast_GET_ITEM(sequence, i));
        PyObject *item = fsdpc_py_rebuild(walk, old);
        if (item && item != old && made == sequence)
            Py_SETREF(made, copy_sequence(sequence));
        if (!item || (made && item != old && set(made, i, Py_NewRef(item)) < 0))
            Py_CLEAR(made);
        Py_XDECREF(item);
        Py_DECREF(old);
    }
    return made;
}

static PyObject *rebuild_values(fsdpc_py_walk *walk, PyObject *dict)
{
    PyObject *made = Py_NewRef(dict), *key, *old;
    Py_ssize_t position = 0;
    while (made && PyDict_Next(dict, &position, &key, &old)) {
        Py_INCREF(key);
        Py_INCREF(old);
        PyObject *value = fsdpc_py_rebuild(walk, old);
        if (value && value != old && made == dict)
            Py_SETREF(made, PyDict_Copy(dict));
        if (!value || (made && value != old && PyDict_SetItem(made, key, value) < 0))
            Py_CLEAR(made);
        Py_XDECREF(value);
        Py_DECREF(old);
        Py_DECREF(key);
    }
    return made;
}

/* Rebuilds the object's contents, which are a list or a dict, and then the object. */
static PyObject *rebuild_contents(fsdpc_py_walk *walk, PyObject *object)
{
    PyObject *structures = PyImport_ImportModule("fsdpc.nn._structures");
    PyObject *contents =
        structures ? PyObject_CallMethod(structures, "contents", "(O)", object) : NULL;
    PyObject *made = contents ? fsdpc_py_rebuild(walk, contents) : NULL;
    if (made)
        Py_SETREF(made, made == contents
                            ? Py_NewRef(object)
                            : PyObject_CallMethod(structures, "copy_with", "(OO)", object, made));
    Py_XDECREF(contents);
    Py_XDECREF(structures);
    return made;
}

static PyObject *rebuild_structure(fsdpc_py_walk *walk, PyObject *object)
{
    for (around *each = walk->around; each; each = each->outer)
        if (each->object == object) {
            each->recurs = true;
            return Py_NewRef(object);
        }
    if (Py_EnterRecursiveCall(" in what a module takes or returns"))
        return NULL;
    around own = {.outer = walk->around, .object = object};
    walk->around = &own;
    bool sequence = PyTuple_CheckExact(object) || PyList_CheckExact(object);
    PyObject *made = sequence                    ? rebuild_items(walk, object)
                     : PyDict_CheckExact(object) ? rebuild_values(walk, object)
                                                 : rebuild_contents(walk, object);
    walk->around = own.outer;
    Py_LeaveRecursiveCall();
    if (made && made != object && own.recurs) {
        Py_CLEAR(made);
        PyErr_Format(PyExc_TypeError,
                     "a %s that holds itself, with tensors that the unit around this forward "
                     "casts or marks: pass these apart from it",
                     Py_TYPE(object)->tp_name);
    }
    return made;
}

PyObject *fsdpc_py_rebuild(fsdpc_py_walk *walk, PyObject *object)
{
    PyObject *tensor = walk->tensor(walk, object);
    if (tensor || PyErr_Occurred())
        return tensor;
    if (object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
        PyUnicode_Check(object) || PyBytes_Check(object))
        return Py_NewRef(object);
    if (PyTuple_Check(object) || PyList_Check(object) || PyDict_Check(object) ||
        is_dataclass(object))
        return rebuild_structure(walk, object);
    return walk->other && walk->other(walk, object) < 0 ? NULL : Py_NewRef(object);
}

/* ---- for other tensors than ours ---- */

typedef struct foreign_walk {
    fsdpc_py_walk base;
    PyTypeObject *kind;
    PyObject *change;
} foreign_walk;

static PyObject *visit_foreign(fsdpc_py_walk *base, PyObject *object)
{
    const foreign_walk *walk = (const foreign_walk *)base;
    if (!PyObject_TypeCheck(object, walk->kind))
        return NULL;
    PyObject *made = PyObject_CallOneArg(walk->change, object);
    if (made == Py_None)
        Py_SETREF(made, Py_NewRef(object));
    return made;
}

static PyObject *rebuild(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyType_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "rebuild(value, kind, change)");
    foreign_walk walk = {{.tensor = visit_foreign}, (PyTypeObject *)args[1], args[2]};
    return fsdpc_py_rebuild(&walk.base, args[0]);
}

PyMethodDef fsdpc_py_walk_functions[] = {
    FSDPC_PY_FUNCTION(rebuild, rebuild, METH_FASTCALL),
    {NULL, NULL, 0, NULL},
};
