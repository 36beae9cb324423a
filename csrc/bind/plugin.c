/* Python's interface to plugins: opens a plugin, describes its build and its devices, and selects
 * it as the provider of this process's device. */
#include "bind/state.h"

#include "plugin/plugin.h"
#include "bind/error.h"

/* Opening may start a driver, so the GIL is released. */
static PyObject *plugin_config(PyObject *Py_UNUSED(module), PyObject *path)
{
    const char *text = PyUnicode_AsUTF8(path);
    if (!text)
        return NULL;
    const fsdpc_plugin *plugin = NULL;
    char description[512] = "";
    int devices = 0;
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_plugin_load(text, &plugin);
    if (status == FSDPC_OK) {
        plugin->describe(description, sizeof description);
        if (!plugin->device_count || plugin->device_count(&devices) != FSDPC_OK)
            devices = 0; /* the description contains the reason */
    }
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return Py_BuildValue("{s:s,s:i}", "description", description, "devices", devices);
}

static PyObject *plugin_library(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path, *library;
    if (!PyArg_ParseTuple(args, "sz:plugin_library", &path, &library))
        return NULL;
    const fsdpc_plugin *plugin = NULL;
    char text[512] = "";
    fsdpc_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_plugin_load(path, &plugin);
    if (status == FSDPC_OK)
        status = plugin->comm_library ? plugin->comm_library(library, text, sizeof text)
                                      : fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                                                   "plugin '%s' has no communicator", plugin->name);
    Py_END_ALLOW_THREADS;
    return status == FSDPC_OK ? PyUnicode_FromString(text) : fsdpc_py_raise(status);
}

static fsdpc_status choose_device(fsdpc_runtime *runtime, const char *path)
{
    const fsdpc_plugin *plugin = NULL;
    int devices;
    if (path) {
        FSDPC_TRY(fsdpc_plugin_load(path, &plugin));
        if (!plugin->device_create)
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "plugin '%s' brings no device", plugin->name);
        FSDPC_TRY(plugin->device_count(&devices));
    }
    if (runtime->ready && runtime->plugin != plugin)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "tensors live on device '%s' already: choose the device before the first "
                          "tensor is made",
                          runtime->device->ops->name);
    runtime->plugin = plugin;
    return FSDPC_OK;
}

static PyObject *set_device(PyObject *module, PyObject *path)
{
    fsdpc_py_state *state = PyModule_GetState(module);
    const char *text = NULL;
    if (path != Py_None && !(text = PyUnicode_AsUTF8(path)))
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = choose_device(&state->runtime, text));
    return fsdpc_py_none(status);
}

/* Does not create the runtime. */
static PyObject *device_name(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const fsdpc_runtime *r = &((fsdpc_py_state *)PyModule_GetState(module))->runtime;
    return PyUnicode_FromString(r->plugin ? r->plugin->name : "cpu");
}

PyMethodDef fsdpc_py_plugin_functions[] = {
    FSDPC_PY_FUNCTION(plugin_config, plugin_config, METH_O),
    FSDPC_PY_FUNCTION(plugin_library, plugin_library, METH_VARARGS),
    FSDPC_PY_FUNCTION(set_device, set_device, METH_O),
    FSDPC_PY_FUNCTION(device_name, device_name, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};
