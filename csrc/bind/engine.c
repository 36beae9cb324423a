/* The engine's Python functions, apart from its types: trace, layouts, checksums. */
#include "bind/torch/unit.h"

#include "base/crc32c.h"
#include "comm/comm_hosts.h"
#include "engine/plan.h"
#include "engine/slots.h"
#include "bind/engine/tier.h"

static PyObject *crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long crc;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "ky*", &crc, &view))
        return NULL;
    uint32_t result;
    FSDPC_PY_WITHOUT_GIL(result = fsdpc_crc32c((uint32_t)crc, view.buf, (size_t)view.len));
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(result);
}

/* Returns the event's kind; for a wait, includes the operation waited for. */
static PyObject *event_kind(const fsdpc_trace_event *e)
{
    const char *name = fsdpc_trace_kind_name((fsdpc_trace_kind)e->kind);
    return e->what ? PyUnicode_FromFormat("%s for %s", name, e->what) : PyUnicode_FromString(name);
}

static PyObject *trace_events(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    size_t n = fsdpc_trace_length(runtime->trace);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(runtime->trace, i);
        fsdpc_py_put(&list, (Py_ssize_t)i,
                     Py_BuildValue("(NiKKLO)", event_kind(e), e->unit, (unsigned long long)e->epoch,
                                   (unsigned long long)e->bytes, (long long)e->ns,
                                   e->in_backward ? Py_True : Py_False));
    }
    return list;
}

static PyObject *trace_reset(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_trace_reset(runtime->trace);
    Py_RETURN_NONE;
}

static PyObject *trace_resize(PyObject *module, PyObject *args)
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    Py_ssize_t capacity;
    int waits;
    if (!runtime || !PyArg_ParseTuple(args, "np", &capacity, &waits))
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "a trace of %zd events: give at least 0", capacity);
    size_t before = fsdpc_trace_capacity(runtime->trace);
    if (fsdpc_py_check(fsdpc_trace_resize(runtime->trace, (size_t)capacity, waits)) < 0)
        return NULL;
    return PyLong_FromSize_t(before);
}

static int read_spec(PyObject *item, fsdpc_param_spec *spec)
{
    PyObject *dtype, *shape;
    int frozen = 0;
    if (!PyArg_ParseTuple(item, "OO!|p", &dtype, &PyTuple_Type, &shape, &frozen) ||
        fsdpc_py_dtype_parse(dtype, &spec->dtype) < 0)
        return -1;
    spec->frozen = frozen;
    spec->name = "";
    spec->ndim = (int)PyTuple_GET_SIZE(shape);
    if (spec->ndim > FSDPC_LAYOUT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%d dimensions; at most %d", spec->ndim,
                     FSDPC_LAYOUT_MAX_DIMS);
        return -1;
    }
    for (int d = 0; d < spec->ndim; d++)
        spec->shape[d] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, d));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *plan_unit(PyObject *module, PyObject *args)
{
    PyObject *list, *param_dtype, *reduce_dtype, *offload = NULL, *states = NULL;
    int ranks;
    fsdpc_dtype state_dtype = FSDPC_F32;
    if (!PyArg_ParseTuple(args, "O!iOO|OO", &PyList_Type, &list, &ranks, &param_dtype,
                          &reduce_dtype, &offload, &states) ||
        (states && fsdpc_py_dtype_parse(states, &state_dtype) < 0))
        return NULL;
    fsdpc_unit_options options = {
        .name = "", .cast_params = param_dtype != Py_None, .cast_reduce = reduce_dtype != Py_None};
    if ((options.cast_params && fsdpc_py_dtype_parse(param_dtype, &options.param_dtype) < 0) ||
        (options.cast_reduce && fsdpc_py_dtype_parse(reduce_dtype, &options.reduce_dtype) < 0))
        return NULL;
    if (fsdpc_py_offload_parse(module, offload, &options.offload) < 0)
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_param_spec *specs = fsdpc_py_room(n, sizeof *specs);
    int result = specs ? 0 : -1;
    for (Py_ssize_t i = 0; result == 0 && i < n; i++)
        result = read_spec(PyList_GET_ITEM(list, i), &specs[i]);
    fsdpc_unit_plan plan;
    if (result == 0)
        result =
            fsdpc_py_check(fsdpc_plan_unit(specs, (int)n, ranks, &options, state_dtype, &plan));
    PyMem_Free(specs);
    if (result < 0)
        return NULL;
    return Py_BuildValue(
        "{snsnsnsnsnsnsnsnsnsnsnsnsnsn}", "wire", plan.wire_bytes, "reduce", plan.reduce_bytes,
        "master", plan.master_bytes, "grad", plan.grad_bytes, "partial", plan.partial_bytes,
        "state", plan.state_bytes, "shared_master", plan.shared_master_bytes, "published",
        plan.published_bytes, "contribution", plan.contribution_bytes, "partial_contribution",
        plan.partial_contribution_bytes, "master_file", plan.master_file_bytes, "state_file",
        plan.state_file_bytes, "grad_file", plan.grad_file_bytes, "ring", plan.ring_bytes);
}

/* Returns the granule of this process's GPU.  Without a GPU, no runtime is created.  Returns false
 * with an exception on failure. */
static bool slot_granule(fsdpc_py_state *state, size_t *out)
{
    *out = FSDPC_SLOT_GRANULE;
    if (!state->runtime.plugin)
        return true;
    const fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    if (runtime)
        *out = runtime->device->window_granule;
    return runtime;
}

static PyObject *plan_fulls(PyObject *module, PyObject *args)
{
    PyObject *list;
    int ranks, prefetch, remote;
    if (!PyArg_ParseTuple(args, "O!iip", &PyList_Type, &list, &ranks, &prefetch, &remote))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    bool moved = remote && ranks > 1; /* otherwise they are read in place */
    const int per_class = prefetch + 1;
    size_t bytes = 0, granule = 0;
    if (moved && !slot_granule(PyModule_GetState(module), &granule))
        return NULL;
    fsdpc_slot_want *wants = fsdpc_py_room(n, sizeof *wants);
    int *slots = fsdpc_py_room(n, sizeof *slots);
    bool fine = wants && slots;
    for (Py_ssize_t i = 0; fine && i < n; i++) {
        Py_ssize_t full, published;
        int alone;
        fine = PyArg_ParseTuple(PyList_GET_ITEM(list, i), "nnp", &full, &published, &alone);
        if (!fine)
            break;
        wants[i] = (fsdpc_slot_want){.bytes = (size_t)full, .alone = alone};
        bytes += moved ? (size_t)published : 0;
    }
    if (fine) {
        fsdpc_slots_assign(wants, (int)n, per_class, granule, slots);
        bytes += fsdpc_slots_bytes(wants, (int)n, per_class, granule, slots);
    }
    PyMem_Free(wants);
    PyMem_Free(slots);
    return fine ? PyLong_FromSize_t(bytes) : NULL;
}

static PyObject *plan_rooms(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object;
    fsdpc_dtype dtype;
    Py_ssize_t bytes;
    int replicas, hosts, lanes;
    if (!PyArg_ParseTuple(args, "pOnii", &replicas, &object, &bytes, &hosts, &lanes) ||
        fsdpc_py_dtype_parse(object, &dtype) < 0)
        return NULL;
    fsdpc_coll_kind kind = replicas ? FSDPC_COLL_REDUCE_ALL : FSDPC_COLL_REDUCE_SCATTER;
    return PyLong_FromSize_t(fsdpc_comm_hosts_room_bytes(kind, dtype, (size_t)bytes, hosts, lanes));
}

PyMethodDef fsdpc_py_engine_functions[] = {
    FSDPC_PY_FUNCTION(plan_unit, plan_unit, METH_VARARGS),
    FSDPC_PY_FUNCTION(plan_fulls, plan_fulls, METH_VARARGS),
    FSDPC_PY_FUNCTION(plan_rooms, plan_rooms, METH_VARARGS),
    FSDPC_PY_FUNCTION(crc32c, crc32c, METH_VARARGS),
    FSDPC_PY_FUNCTION(trace_events, trace_events, METH_NOARGS),
    FSDPC_PY_FUNCTION(trace_reset, trace_reset, METH_NOARGS),
    FSDPC_PY_FUNCTION(trace_resize, trace_resize, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
