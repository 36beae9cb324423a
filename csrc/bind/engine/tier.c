/* Tier: a per-rank file for data that does not fit into memory. */
#include "bind/engine/tier.h"

#include <stddef.h>
#include <structmember.h>

typedef struct py_tier {
    PyObject_HEAD fsdpc_tier *tier;
    PyObject *weakrefs;
} py_tier;

static PyObject *tier_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "folder", "rank", "chunk");
    PyObject *folder;
    Py_ssize_t chunk = 0;
    int rank;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&i|n", names, PyUnicode_FSConverter, &folder,
                                     &rank, &chunk))
        return NULL;
    const fsdpc_runtime *runtime = fsdpc_py_runtime_of_type(type);
    py_tier *self = runtime ? (py_tier *)type->tp_alloc(type, 0) : NULL;
    if (self) {
        fsdpc_tier_config config = {.folder = PyBytes_AS_STRING(folder),
                                    .mem = runtime->mem,
                                    .rank = rank,
                                    .chunk = (size_t)chunk};
        if (fsdpc_py_check(fsdpc_tier_open(&config, &self->tier)) < 0)
            Py_CLEAR(self);
    }
    Py_DECREF(folder);
    return (PyObject *)self;
}

static void tier_dealloc(PyObject *object)
{
    py_tier *self = (py_tier *)object;
    if (self->weakrefs)
        PyObject_ClearWeakRefs(object);
    fsdpc_tier_release(self->tier);
    fsdpc_py_free(object);
}

int fsdpc_py_tier_parse(PyObject *module, PyObject *object, fsdpc_tier **out)
{
    const fsdpc_py_state *state = PyModule_GetState(module);
    bool given = object != Py_None;
    if (given && !Py_IS_TYPE(object, (PyTypeObject *)state->tier_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Tier, got %.100s", Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = given ? ((py_tier *)object)->tier : NULL;
    return 0;
}

int fsdpc_py_offload_parse(PyObject *module, PyObject *object, fsdpc_offload *out)
{
    PyObject *tier;
    int params, masters, states, gradients;
    if (!object || object == Py_None)
        return 0;
    if (!PyTuple_Check(object) || !PyArg_ParseTuple(object, "Oppppd", &tier, &params, &masters,
                                                    &states, &gradients, &out->part))
        return -1;
    out->host = PyUnicode_Check(tier);
    if (!out->host && fsdpc_py_tier_parse(module, tier, &out->tier) < 0)
        return -1;
    out->params = params != 0;
    out->masters = masters != 0;
    out->states = states != 0;
    out->gradients = gradients != 0;
    return 0;
}

static PyObject *tier_stats(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_tier_stats stats = fsdpc_tier_stats_of(((py_tier *)object)->tier);
    return Py_BuildValue("{sKsKsKsO}", "file_bytes", (unsigned long long)stats.file_bytes,
                         "read_bytes", (unsigned long long)stats.read_bytes, "written_bytes",
                         (unsigned long long)stats.written_bytes, "direct",
                         stats.direct ? Py_True : Py_False);
}

static PyMethodDef tier_methods[] = {
    FSDPC_PY_METHOD(Tier, stats, tier_stats, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef tier_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_tier, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot tier_slots[] = {
    {Py_tp_new, tier_new},
    {Py_tp_dealloc, tier_dealloc},
    {Py_tp_methods, tier_methods},
    {Py_tp_members, tier_members},
    {Py_tp_doc, (void *)fsdpc_doc_Tier},
    {0, NULL},
};

FSDPC_PY_TYPE(tier, Tier, py_tier, 0, tier_slots);
