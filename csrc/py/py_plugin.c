/* Plugins, as far as Python sees them: opening one, what it was built with and what it finds. */
#include "py/py_state.h"

#include "plugin/plugin.h"
#include "py/py_error.h"

/* Opening may start a driver, so others run meanwhile. */
static PyObject *plugin_config(PyObject *module, PyObject *path)
{
    (void)module;
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
            devices = 0; /* the description says why */
    }
    Py_END_ALLOW_THREADS;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return Py_BuildValue("{s:s,s:i}", "description", description, "devices", devices);
}

static PyObject *plugin_library(PyObject *module, PyObject *args)
{
    (void)module;
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
                                                   "plugin '%s' has no transports", plugin->name);
    Py_END_ALLOW_THREADS;
    return status == FSDPC_OK ? PyUnicode_FromString(text) : fsdpc_py_raise(status);
}

static PyMethodDef functions[] = {
    {"plugin_config", plugin_config, METH_O,
     "Open the plugin at a path; what it was built with and found, and how many devices it has."},
    {"plugin_library", plugin_library, METH_VARARGS,
     "Open the library that a plugin's transports stand on, and say which it is."},
    {NULL, NULL, 0, NULL},
};

int fsdpc_py_plugin_setup(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
