/* Door: what modules see.
 *
 * While a unit is in use its modules' dictionaries hold the fulls, else the pieces: only
 * dictionaries are written, never the tensors, which are made once.
 *
 * Stale reads.  All fulls of a flat group are views of one base tensor and share its version
 * counter.  Showing fulls sets it to the generation of the weights, resharding sets it away, so the
 * foreign autograd refuses a saved full that is no longer what forward saw.  A version that
 * somebody else moved is a write into a full, which no master sees.
 *
 * Pieces read as weights would be other weights: a submodule that is called past its unit (a head
 * from a loss function) would compute with this rank's rows.  So modules that read parameters hold
 * a forward that refuses while pieces are shown.  A forward that the user put there is left alone.
 */
#include "py/py_door.h"

#include <stddef.h>

/* No generation reaches it. */
static const long long RESHARDED = 1LL << 40;

static int set_version(fsdpc_py_door *door, long long version)
{
    Py_ssize_t n = PyTuple_GET_SIZE(door->bases);
    PyObject *number = PyLong_FromLongLong(version), *versions = number ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; versions && i < n; i++)
        PyTuple_SET_ITEM(versions, i, Py_NewRef(number));
    door->version = version;
    PyObject *args[] = {door->bases, versions};
    PyObject *done = versions ? PyObject_Vectorcall(door->set_version, args, 2, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(versions);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int refuse_replaced(const fsdpc_py_door *door, const fsdpc_door_slot *slot)
{
    const fsdpc_unit *unit = fsdpc_door_unit(door);
    PyErr_Format(PyExc_RuntimeError,
                 "parameter '%s' of unit '%s' was replaced after fully_shard: copy into it under "
                 "no_grad() instead (p.copy_(...), load_state_dict), or replace it before",
                 fsdpc_door_place(door, slot->param)->name, fsdpc_unit_name(unit));
    return -1;
}

/* ---- guards ---- */

int fsdpc_door_set_guards(const fsdpc_py_door *door)
{
    bool open = door->shown || door->lifted;
    for (int i = 0; i < door->n_guards; i++) {
        const fsdpc_door_guard *guard = &door->guards[i];
        PyObject *forward = PyDict_GetItem(guard->dict, door->names.forward);
        if (open && forward == guard->refuse) {
            if (PyDict_DelItem(guard->dict, door->names.forward) < 0)
                return -1;
        } else if (!open && !forward) { /* one of the user's own stays */
            if (PyDict_SetItem(guard->dict, door->names.forward, guard->refuse) < 0)
                return -1;
        }
    }
    return 0;
}

int fsdpc_door_take_guards(fsdpc_py_door *door, PyObject *modules)
{
    if (!PyList_Check(modules) || door->guards)
        return PyErr_SetString(PyExc_TypeError, "guard takes a list, once"), -1;
    door->guards = PyMem_Calloc((size_t)PyList_GET_SIZE(modules) + 1, sizeof *door->guards);
    if (!door->guards)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules); i++) {
        fsdpc_door_guard *guard = &door->guards[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(modules, i), "O!O", &PyDict_Type, &guard->dict,
                              &guard->refuse))
            return -1;
        Py_INCREF(guard->dict);
        Py_INCREF(guard->refuse);
        door->n_guards++;
    }
    return fsdpc_door_set_guards(door);
}

/* ---- fulls and pieces ---- */

int fsdpc_door_show(fsdpc_py_door *door, bool full)
{
    if (full && set_version(door, (long long)fsdpc_unit_generation(fsdpc_door_unit(door))) < 0)
        return -1;
    if (door->shown == full)
        return 0;
    for (int s = 0; s < door->n_slots; s++) { /* all of them first: an error changes nothing */
        const fsdpc_door_slot *slot = &door->slots[s];
        const fsdpc_door_param *param = &door->params[slot->param];
        if (PyDict_GetItem(slot->dict, slot->name) != (full ? param->piece : param->full))
            return refuse_replaced(door, slot);
    }
    for (int s = 0; s < door->n_slots; s++) {
        const fsdpc_door_slot *slot = &door->slots[s];
        const fsdpc_door_param *param = &door->params[slot->param];
        if (PyDict_SetItem(slot->dict, slot->name, full ? param->full : param->piece) < 0)
            return -1;
    }
    door->shown = full;
    return fsdpc_door_set_guards(door);
}

/* Has anybody written into the fulls that are shown?  On memory that is read-only that is found by
 * the processor; a world of one and GPUs have none. */
static int find_writes(const fsdpc_py_door *door)
{
    for (Py_ssize_t i = 0; door->shown && i < PyTuple_GET_SIZE(door->bases); i++) {
        PyObject *number = PyObject_GetAttr(PyTuple_GET_ITEM(door->bases, i), door->names._version);
        long long version = number ? PyLong_AsLongLong(number) : -1;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return -1;
        if (version != door->version)
            return 1;
    }
    return 0;
}

int fsdpc_door_hide(fsdpc_py_door *door)
{
    fsdpc_unit *unit = fsdpc_door_unit(door);
    if (!door->bound)
        return 0;
    int written = find_writes(door);
    if (written < 0 ||
        ((written || fsdpc_unit_where(unit) == FSDPC_UNIT_SHARDED) &&
         set_version(door, RESHARDED) < 0) ||
        (!door->held && fsdpc_door_show(door, false) < 0))
        return -1;
    if (!written)
        return 0;
    fsdpc_unit_mark_written(unit); /* what was written is overwritten by what the masters hold */
    PyErr_Format(PyExc_RuntimeError,
                 "a parameter of unit '%s' was written in place while the model ran: what forward "
                 "sees is a copy, and the write is lost; write before or after the call, under "
                 "no_grad()",
                 fsdpc_unit_name(unit));
    return -1;
}

void fsdpc_door_unpin(fsdpc_py_door *door)
{
    for (; door->pins > 0; door->pins--)
        (void)fsdpc_reshard(fsdpc_door_unit(door)); /* gives back one unshard; cannot fail */
    door->held = false;
}

/* ---- methods ---- */

/* guard(modules): [(dict, refuse)] of modules that read parameters of the unit. */
PyObject *fsdpc_door_guard_method(PyObject *object, PyObject *modules)
{
    if (fsdpc_door_take_guards((fsdpc_py_door *)object, modules) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* lift(begin): guarded modules may be called, as their parameters are private copies. */
PyObject *fsdpc_door_lift_method(PyObject *object, PyObject *arg)
{
    fsdpc_py_door *door = (fsdpc_py_door *)object;
    door->lifted = arg == Py_True;
    return fsdpc_door_set_guards(door) < 0 ? NULL : Py_NewRef(Py_None);
}

/* pin(): after Unit.unshard, which is given back by reshard, or by the unit's own next forward or
 * backward, whichever gives parameters up. */
PyObject *fsdpc_door_pin_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((fsdpc_py_door *)object)->pins++;
    Py_RETURN_NONE;
}
