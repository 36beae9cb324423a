/* The main stream beside streams of other libraries; see csrc/device/device.h.
 *
 * A CPU has no such streams: adopting does nothing there, and the handle is 0.
 */
#include "py/py_state.h"

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

static PyObject *synchronize(PyObject *module, PyObject *Py_UNUSED(unused))
{
    fsdpc_runtime *runtime = fsdpc_py_runtime(module);
    if (!runtime)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_stream_sync(runtime->compute));
    return fsdpc_py_none(status);
}

PyMethodDef fsdpc_py_stream_functions[] = {
    FSDPC_PY_FUNCTION(adopt_stream, adopt_stream, METH_O),
    FSDPC_PY_FUNCTION(stream_handle, stream_handle, METH_NOARGS),
    FSDPC_PY_FUNCTION(device_ordinal, device_ordinal, METH_NOARGS),
    FSDPC_PY_FUNCTION(synchronize, synchronize, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
