/* What Python sees of the engine beside its types: the trace, layouts, checksums. */
#include "py/py_engine.h"

#include "base/crc32c.h"

static PyObject *crc32c(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long crc;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "ky*", &crc, &view))
        return NULL;
    uint32_t result;
    Py_BEGIN_ALLOW_THREADS;
    result = fsdpc_crc32c((uint32_t)crc, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(result);
}

static PyObject *trace_events(PyObject *module, PyObject *unused)
{
    (void)unused;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    size_t n = fsdpc_trace_length(runtime->trace);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        const fsdpc_trace_event *e = fsdpc_trace_at(runtime->trace, i);
        PyObject *item =
            Py_BuildValue("(siKKLO)", fsdpc_trace_kind_name((fsdpc_trace_kind)e->kind), e->unit,
                          (unsigned long long)e->epoch, (unsigned long long)e->bytes,
                          (long long)e->ns, e->in_backward ? Py_True : Py_False);
        if (!item) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

static PyObject *trace_counts(PyObject *module, PyObject *unused)
{
    (void)unused;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    PyObject *counts = runtime ? PyDict_New() : NULL;
    for (int k = 0; counts && k < FSDPC_TRACE_KIND_COUNT; k++) {
        PyObject *count =
            PyLong_FromUnsignedLongLong(fsdpc_trace_count(runtime->trace, (fsdpc_trace_kind)k));
        if (!count ||
            PyDict_SetItemString(counts, fsdpc_trace_kind_name((fsdpc_trace_kind)k), count) < 0)
            Py_CLEAR(counts);
        Py_XDECREF(count);
    }
    return counts;
}

static PyObject *trace_reset(PyObject *module, PyObject *unused)
{
    (void)unused;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_trace_reset(runtime->trace);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"crc32c", crc32c, METH_VARARGS, "crc32c(crc, buffer): continue a CRC-32C (0 to begin)."},
    {"trace_events", trace_events, METH_NOARGS,
     "Events of the trace ring, oldest first: (kind, unit, epoch, bytes, ns, in_backward)."},
    {"trace_counts", trace_counts, METH_NOARGS, "Events since the last reset, by kind."},
    {"trace_reset", trace_reset, METH_NOARGS, "Empty the trace."},
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_engine_setup(PyObject *module)
{
    if (fsdpc_py_comm_setup(module) < 0 || fsdpc_py_unit_setup(module) < 0 ||
        fsdpc_py_optim_setup(module) < 0 || fsdpc_py_clip_setup(module) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
