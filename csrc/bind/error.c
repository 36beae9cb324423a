/* One table (base/status.h) maps each code to an exception. Two of the exceptions are defined by
 * the module and looked up when needed, which avoids static pointers.
 */
#include "bind/error.h"

#include <string.h>

#include "bind/stub_docs.h"

static PyObject *own_exception(const char *name)
{
    PyObject *module = PyImport_ImportModule("fsdpc._core");
    PyObject *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    if (found)
        return found;
    PyErr_Clear();
    return Py_NewRef(PyExc_RuntimeError);
}

/* The table's third column names the exception; the module's own exceptions are looked up. */
#define PyExc_PeerError NULL
#define PyExc_MismatchError NULL

static PyObject *exception_of(fsdpc_status status)
{
    switch (status) {
#define X(name, code, exception, text)                                                             \
    case FSDPC_ERR_##name:                                                                         \
        return PyExc_##exception ? Py_NewRef(PyExc_##exception) : own_exception(#exception);
        FSDPC_STATUS_TABLE(X)
#undef X
    default:
        return Py_NewRef(PyExc_SystemError);
    }
}

PyObject *fsdpc_py_raise(fsdpc_status status)
{
    if (status == FSDPC_ERR_CALLBACK && PyErr_Occurred())
        return NULL;
    PyErr_Clear();
    const char *message = fsdpc_last_error();
    if (!*message)
        message = fsdpc_status_text(status);
    /* Paths need not be UTF-8, and a truncated message may end inside a character. */
    PyObject *exception = exception_of(status);
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "backslashreplace");
    if (text)
        PyErr_SetObject(exception, text);
    Py_XDECREF(text);
    Py_DECREF(exception);
    return NULL;
}

static int add_exception(PyObject *module, const char *name, const char *unsharded, const char *doc)
{
    PyObject *exception = PyErr_NewExceptionWithDoc(unsharded, doc, PyExc_RuntimeError, NULL);
    int result = exception ? PyModule_AddObjectRef(module, name, exception) : -1;
    Py_XDECREF(exception);
    return result;
}

PyObject *fsdpc_py_none(fsdpc_status status)
{
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    Py_RETURN_NONE;
}

int fsdpc_py_check(fsdpc_status status)
{
    return status == FSDPC_OK ? 0 : (fsdpc_py_raise(status), -1);
}

void *fsdpc_py_array(Py_ssize_t n, size_t element_bytes)
{
    void *room = PyMem_Calloc((size_t)n + 1, element_bytes);
    return room ? room : PyErr_NoMemory();
}

void fsdpc_py_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

int fsdpc_py_error_setup(PyObject *module)
{
    if (add_exception(module, "PeerError", "fsdpc.PeerError", fsdpc_doc_PeerError) < 0)
        return -1;
    return add_exception(module, "MismatchError", "fsdpc.MismatchError", fsdpc_doc_MismatchError);
}
