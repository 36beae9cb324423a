/* Unit: manual unshard, settings, and recorded history.
 *
 * Each setting is an attribute: a getter reads a copy of the unit's settings, and a setter passes a
 * changed copy back. The engine decides when a setting may change.
 *
 * Collective calls release the GIL because they wait for the other ranks.
 */
#include "bind/engine.h"
#include "bind/engine/low_rank.h"

#include <stddef.h>

static fsdpc_unit *unit_of(PyObject *object)
{
    return ((fsdpc_py_unit *)object)->ref->unit;
}

/* Returns the unit's root, for calls that need one. */
static fsdpc_root *root_of(PyObject *object)
{
    fsdpc_root *root = fsdpc_unit_root(unit_of(object));
    if (!root)
        PyErr_Format(PyExc_RuntimeError,
                     "unit '%s' has no root yet: the outermost module has not run",
                     fsdpc_unit_name(unit_of(object)));
    return root;
}

/* ---- manual unshard and reshard ---- */

static PyObject *run(PyObject *object, fsdpc_status (*fn)(fsdpc_unit *unit))
{
    fsdpc_status status;
    if (fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0 || !root_of(object))
        return NULL;
    FSDPC_PY_WITHOUT_GIL(status = fn(unit_of(object)));
    return fsdpc_py_none(status);
}

static PyObject *unit_unshard(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return run(object, fsdpc_unshard_begin);
}

static PyObject *unit_unshard_wait(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return run(object, fsdpc_unshard_wait);
}

static PyObject *unit_reshard(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return fsdpc_py_none(fsdpc_reshard(unit_of(object)));
}

static PyObject *unit_reset(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_root *root = fsdpc_unit_root(unit_of(object));
    if (root)
        fsdpc_root_reset(root);
    Py_RETURN_NONE;
}

static PyObject *unit_hold(PyObject *object, PyObject *begin)
{
    fsdpc_status status;
    fsdpc_root *root = root_of(object);
    int begins = PyObject_IsTrue(begin);
    if (!root || begins < 0 || fsdpc_py_unit_check_open((fsdpc_py_unit *)object) < 0)
        return NULL;
    FSDPC_PY_WITHOUT_GIL(status = begins ? fsdpc_hold_begin(root) : fsdpc_hold_end(root));
    return fsdpc_py_none(status);
}

/* ---- settings ---- */

static PyObject *get_flag(PyObject *object, void *offset)
{
    const char *settings = (const char *)fsdpc_unit_settings_of(unit_of(object));
    return PyBool_FromLong(*(const bool *)(settings + (uintptr_t)offset));
}

/* Returns the value's truth as 1 or 0, or -1 with an exception if the attribute is being
 * deleted. */
static int truth(PyObject *value)
{
    if (value)
        return PyObject_IsTrue(value);
    PyErr_SetString(PyExc_TypeError, "a unit's settings cannot be deleted");
    return -1;
}

static int configure(PyObject *object, const fsdpc_unit_settings *settings)
{
    fsdpc_status status = fsdpc_unit_configure(unit_of(object), settings);
    return fsdpc_py_check(status);
}

static int set_flag(PyObject *object, PyObject *value, void *offset)
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(object));
    int flag = truth(value);
    *(bool *)((char *)&settings + (uintptr_t)offset) = flag == 1;
    return flag < 0 ? -1 : configure(object, &settings);
}

static int set_reshard_after_forward(PyObject *object, PyObject *value, void *offset)
{
    ((fsdpc_py_unit *)object)->explicit_reshard = true;
    return set_flag(object, value, offset);
}

FSDPC_PY_GETTER(get_divide_factor,
                PyFloat_FromDouble(fsdpc_unit_settings_of(unit_of(object))->divide_factor))

static int set_divide_factor(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(object));
    if (truth(value) < 0)
        return -1;
    settings.divide_factor = PyFloat_AsDouble(value);
    return PyErr_Occurred() ? -1 : configure(object, &settings);
}

FSDPC_PY_GETTER(get_prefetch, PyLong_FromLong(fsdpc_unit_settings_of(unit_of(object))->prefetch))

/* Sets prefetching on the root, or on the unit that will become the root. */
static int set_prefetch(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(object));
    fsdpc_root *root = fsdpc_unit_root(unit_of(object));
    if (truth(value) < 0)
        return -1;
    settings.prefetch = (int)PyLong_AsLong(value);
    if (PyErr_Occurred())
        return -1;
    if (!root)
        return configure(object, &settings);
    fsdpc_root_set_prefetch(root, settings.prefetch);
    return 0;
}

/* set_is_last_backward(flag) */
static PyObject *unit_set_is_last_backward(PyObject *object, PyObject *value)
{
    int last = PyObject_IsTrue(value);
    fsdpc_root *root = last < 0 ? NULL : root_of(object);
    return root ? PyBool_FromLong(fsdpc_root_set_last_backward(root, last == 1)) : NULL;
}

/* take_options(other): copies the settings of a unit that this one replaces. */
static PyObject *unit_take_options(PyObject *object, PyObject *other)
{
    if (!Py_IS_TYPE(other, Py_TYPE(object)))
        return PyErr_Format(PyExc_TypeError, "take_options takes a Unit, got %.100s",
                            Py_TYPE(other)->tp_name);
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(other));
    ((fsdpc_py_unit *)object)->explicit_reshard = ((fsdpc_py_unit *)other)->explicit_reshard;
    return configure(object, &settings) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *unit_train_apart(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return fsdpc_py_none(fsdpc_unit_train_apart(unit_of(object)));
}

static PyObject *unit_set_ahead(PyObject *object, PyObject *args)
{
    int backward;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "pO!", &backward, &PyList_Type, &list))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_unit **ahead = fsdpc_py_array(n, sizeof *ahead);
    if (!ahead)
        return NULL;
    bool fine = true;
    for (Py_ssize_t i = 0; fine && i < n; i++) {
        const fsdpc_py_unit *other =
            fsdpc_py_unit_of(PyType_GetModule(Py_TYPE(object)), PyList_GET_ITEM(list, i));
        fine = other;
        ahead[i] = other ? other->ref->unit : NULL;
    }
    fsdpc_status status = FSDPC_ERR_CALLBACK;
    if (fine)
        status = fsdpc_unit_set_ahead(unit_of(object), backward != 0, ahead, (int)n);
    PyMem_Free(ahead);
    return fsdpc_py_none(status);
}

/* ---- properties ---- */

FSDPC_PY_GETTER(get_trained_groups, PyLong_FromLong(fsdpc_unit_trained_groups(unit_of(object))))
FSDPC_PY_GETTER(get_has_root, PyBool_FromLong(fsdpc_unit_root(unit_of(object)) != NULL))
FSDPC_PY_GETTER(get_name, PyUnicode_FromString(fsdpc_unit_name(unit_of(object))))

static int set_name(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    const char *name = truth(value) < 0 ? NULL : PyUnicode_AsUTF8(value);
    if (!name)
        return -1;
    fsdpc_status status = fsdpc_unit_rename(unit_of(object), name);
    return fsdpc_py_check(status);
}

/* Returns the mixed-precision dtype of the first flat group that does not keep its own dtype, or
 * None if all groups do. */
static PyObject *get_policy_dtype(PyObject *object, bool of_gradients)
{
    const fsdpc_unit *unit = unit_of(object);
    const fsdpc_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    for (int g = 0; g < fsdpc_unit_layout(unit)->n_groups; g++) {
        const fsdpc_unit_flat flat = fsdpc_unit_flat_of(unit, g);
        fsdpc_dtype own = of_gradients ? flat.param_dtype : flat.dtype;
        fsdpc_dtype became = of_gradients ? flat.reduce_dtype : flat.param_dtype;
        if (became != own)
            return Py_NewRef(state->dtypes[became]);
    }
    Py_RETURN_NONE;
}

FSDPC_PY_GETTER(get_param_dtype, get_policy_dtype(object, false))
FSDPC_PY_GETTER(get_reduce_dtype, get_policy_dtype(object, true))

FSDPC_PY_GETTER(get_gather_codec,
                PyUnicode_FromString(fsdpc_codec_name(fsdpc_unit_gather_codec(unit_of(object)))))

FSDPC_PY_GETTER(get_reduce_codec, PyUnicode_FromString(fsdpc_codec_name(
                                      fsdpc_unit_settings_of(unit_of(object))->reduce_codec)))

static int set_reduce_codec(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(object));
    const char *name = truth(value) < 0 ? NULL : PyUnicode_AsUTF8(value);
    if (!name || fsdpc_py_check(fsdpc_codec_find(name, &settings.reduce_codec)) < 0)
        return -1;
    return configure(object, &settings);
}

FSDPC_PY_GETTER(get_low_rank,
                fsdpc_py_low_rank_new(&fsdpc_unit_settings_of(unit_of(object))->low_rank))

static int set_low_rank(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    fsdpc_unit_settings settings = *fsdpc_unit_settings_of(unit_of(object));
    if (fsdpc_py_low_rank_parse(value, &settings.low_rank) < 0)
        return -1;
    return configure(object, &settings);
}

FSDPC_PY_GETTER(get_gather_bytes, PyLong_FromSize_t(fsdpc_unit_gather_bytes(unit_of(object))))

static PyObject *get_mesh_shape(PyObject *object, void *Py_UNUSED(unused))
{
    const fsdpc_mesh *mesh = fsdpc_unit_mesh(unit_of(object));
    return Py_BuildValue("ii", mesh->replicate ? mesh->replicate->size : 1, mesh->shard->size);
}

FSDPC_PY_GETTER(get_apart, PyBool_FromLong(fsdpc_unit_mesh(unit_of(object))->apart))

static PyObject *get_comms(PyObject *object, void *Py_UNUSED(unused))
{
    PyObject *const *comms = ((fsdpc_py_unit *)object)->ref->comms;
    return comms[1] ? Py_BuildValue("[OO]", comms[0], comms[1]) : Py_BuildValue("[O]", comms[0]);
}

static PyObject *get_state(PyObject *object, void *Py_UNUSED(unused))
{
    static const char *const names[] = {"sharded", "gathering", "unsharded"};
    return PyUnicode_FromString(names[fsdpc_unit_where(unit_of(object))]);
}

static PyObject *unit_schedule(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const fsdpc_root *root = root_of(object);
    if (!root)
        return NULL;
    const fsdpc_schedule schedule = fsdpc_root_schedule(root);
    if (!schedule.complete)
        return Py_BuildValue("(OOi)", Py_None, Py_None, fsdpc_root_prefetch(root));
    PyObject *uses = PyList_New((Py_ssize_t)schedule.n_uses);
    PyObject *acts = PyList_New((Py_ssize_t)schedule.n_acts);
    for (size_t i = 0; uses && i < schedule.n_uses; i++) {
        const fsdpc_exec_entry *use = &schedule.uses[i];
        fsdpc_py_put(&uses, (Py_ssize_t)i,
                     Py_BuildValue("(iO)", use->unit, use->backward ? Py_True : Py_False));
    }
    for (size_t i = 0; acts && i < schedule.n_acts; i++) {
        const fsdpc_act *act = &schedule.acts[i];
        fsdpc_py_put(&acts, (Py_ssize_t)i,
                     Py_BuildValue("(isO)", act->unit, fsdpc_trace_kind_name(act->kind),
                                   act->backward ? Py_True : Py_False));
    }
    return Py_BuildValue("(NNi)", uses, acts, fsdpc_root_prefetch(root));
}

PyMethodDef fsdpc_py_unit_schedule_methods[] = {
    FSDPC_PY_METHOD(Unit, unshard, unit_unshard, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, unshard_wait, unit_unshard_wait, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, reshard, unit_reshard, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, reset, unit_reset, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, hold, unit_hold, METH_O),
    FSDPC_PY_METHOD(Unit, set_is_last_backward, unit_set_is_last_backward, METH_O),
    FSDPC_PY_METHOD(Unit, set_ahead, unit_set_ahead, METH_VARARGS),
    FSDPC_PY_METHOD(Unit, take_options, unit_take_options, METH_O),
    FSDPC_PY_METHOD(Unit, train_apart, unit_train_apart, METH_NOARGS),
    FSDPC_PY_METHOD(Unit, schedule, unit_schedule, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

#define FLAG(name, set)                                                                            \
    {                                                                                              \
#name, get_flag, set, fsdpc_doc_Unit_##name, (void *)offsetof(fsdpc_unit_settings, name)   \
    }

static PyObject *get_codec_errors(PyObject *object, void *Py_UNUSED(unused))
{
    PyObject *reports = PyTuple_New(FSDPC_CODED_COUNT);
    for (int i = 0; reports && i < FSDPC_CODED_COUNT; i++) {
        fsdpc_coded_report r = fsdpc_unit_coded_report(unit_of(object), i);
        PyObject *report = !r.measured
                               ? Py_NewRef(Py_None)
                               : Py_BuildValue("(dKN)", r.error, (unsigned long long)r.backwards,
                                               PyBool_FromLong(r.exact));
        if (!report)
            Py_CLEAR(reports);
        else
            PyTuple_SET_ITEM(reports, i, report);
    }
    return reports;
}

/* Returns a tensor over what sums keep, which keeps steps from being deferred while it lives. */
static PyObject *kept_tensor(PyObject *object, fsdpc_dtype dtype, size_t numel, void *kept)
{
    if (!kept)
        return Py_NewRef(Py_None);
    return fsdpc_py_unit_tensor(PyType_GetModule(Py_TYPE(object)), ((fsdpc_py_unit *)object)->ref,
                                dtype, 1, &numel, kept);
}

static PyObject *residual_of(PyObject *object, int group, fsdpc_stage stage)
{
    size_t numel;
    float *residual;
    if (fsdpc_py_check(fsdpc_unit_residual(unit_of(object), group, stage, &residual, &numel)) < 0)
        return NULL;
    return kept_tensor(object, FSDPC_F32, numel, residual);
}

static PyObject *get_residuals(PyObject *object, void *Py_UNUSED(unused))
{
    int n = fsdpc_unit_layout(unit_of(object))->n_groups;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < n * FSDPC_STAGES; i++) {
        PyObject *residual = residual_of(object, i / FSDPC_STAGES, i % FSDPC_STAGES);
        if (!residual || PyList_Append(list, residual) < 0)
            Py_CLEAR(list);
        Py_XDECREF(residual);
    }
    return list;
}

static PyObject *get_low_rank_state(PyObject *object, void *Py_UNUSED(unused))
{
    size_t numel;
    float *state;
    if (fsdpc_py_check(fsdpc_unit_low_rank_state(unit_of(object), &state, &numel)) < 0)
        return NULL;
    return kept_tensor(object, FSDPC_F32, numel, state);
}

FSDPC_PY_GETTER(get_low_rank_sums,
                kept_tensor(object, FSDPC_I64, 1, fsdpc_unit_low_rank_sums(unit_of(object))))

PyGetSetDef fsdpc_py_unit_schedule_getset[] = {
    FLAG(reshard_after_forward, set_reshard_after_forward),
    FLAG(reshard_after_backward, set_flag),
    FLAG(requires_sync, set_flag),
    FLAG(requires_all_reduce, set_flag),
    FLAG(rank_dependent, set_flag),
    FLAG(keep_grads, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, divide_factor, get_divide_factor, set_divide_factor),
    FSDPC_PY_ATTRIBUTE(Unit, prefetch, get_prefetch, set_prefetch),
    FSDPC_PY_ATTRIBUTE(Unit, trained_groups, get_trained_groups, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, has_root, get_has_root, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, name, get_name, set_name),
    FSDPC_PY_ATTRIBUTE(Unit, param_dtype, get_param_dtype, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, reduce_dtype, get_reduce_dtype, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, gather_codec, get_gather_codec, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, reduce_codec, get_reduce_codec, set_reduce_codec),
    FLAG(error_feedback, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, codec_errors, get_codec_errors, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, residuals, get_residuals, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, low_rank, get_low_rank, set_low_rank),
    FSDPC_PY_ATTRIBUTE(Unit, low_rank_state, get_low_rank_state, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, low_rank_sums, get_low_rank_sums, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, gather_bytes, get_gather_bytes, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, mesh_shape, get_mesh_shape, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, apart, get_apart, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, comms, get_comms, NULL),
    FSDPC_PY_ATTRIBUTE(Unit, state, get_state, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};
