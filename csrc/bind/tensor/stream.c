/* The main stream and other libraries' streams; see csrc/device/device.h.
 *
 * The CPU has no such streams: adopting one does nothing, and the handle is 0.
 */
#include "bind/state.h"

static PyObject *adopt_stream(PyObject *module, PyObject *handle)
{
    size_t raw = PyLong_AsSize_t(handle);
    if (raw == (size_t)-1 && PyErr_Occurred())
        return NULL;
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? fsdpc_py_none(fsdpc_device_adopt(runtime->device, raw)) : NULL;
}

static PyObject *stream_handle(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyLong_FromSize_t(fsdpc_device_handle(runtime->device)) : NULL;
}

static PyObject *device_ordinal(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    return runtime ? PyLong_FromLong(runtime->device->ordinal) : NULL;
}

/* May be called on any thread that allocates memory, with or without the GIL. */
static void reclaim(void *arg)
{
    const fsdpc_py_state *state = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = state->reclaim ? PyObject_CallNoArgs(state->reclaim) : Py_NewRef(Py_None);
    if (!done)
        PyErr_WriteUnraisable(state->reclaim); /* the allocation then fails and reports it */
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

static PyObject *set_reclaim(PyObject *module, PyObject *callable)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    bool nobody = callable == Py_None;
    Py_XSETREF(state->reclaim, nobody ? NULL : Py_NewRef(callable));
    runtime->device->reclaim_arg = state;
    runtime->device->reclaim = nobody ? NULL : reclaim;
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_stream_functions[] = {
    FSDPC_PY_FUNCTION(adopt_stream, adopt_stream, METH_O),
    FSDPC_PY_FUNCTION(set_reclaim, set_reclaim, METH_O),
    FSDPC_PY_FUNCTION(stream_handle, stream_handle, METH_NOARGS),
    FSDPC_PY_FUNCTION(device_ordinal, device_ordinal, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
