/* The engine's Python functions that do not belong to a type: trace and checksums. */
#include "bind/torch/unit.h"

#include "base/crc32c.h"

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

/* Returns the event's kind and, for a wait, the operation waited for. */
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

PyMethodDef fsdpc_py_engine_functions[] = {
    FSDPC_PY_FUNCTION(crc32c, crc32c, METH_VARARGS),
    FSDPC_PY_FUNCTION(trace_events, trace_events, METH_NOARGS),
    FSDPC_PY_FUNCTION(trace_reset, trace_reset, METH_NOARGS),
    FSDPC_PY_FUNCTION(trace_resize, trace_resize, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
