/* Converts statuses to Python exceptions; only this file does so. */
#ifndef FSDPC_BIND_ERROR_H
#define FSDPC_BIND_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"

/* Sets the exception for a failed status, with this thread's message, and returns NULL.
 * FSDPC_ERR_CALLBACK keeps the exception that the callback raised. */
PyObject *fsdpc_py_raise(fsdpc_status status);

/* Returns None, or NULL with the exception for a failed status. */
PyObject *fsdpc_py_none(fsdpc_status status);

/* Returns 0, or -1 with the exception for a failed status. */
int fsdpc_py_check(fsdpc_status status);

/* Returns zeroed memory for n + 1 elements, to be freed with PyMem_Free, or NULL with
 * MemoryError. */
void *fsdpc_py_array(Py_ssize_t n, size_t element_bytes);

/* Finishes a dealloc: frees the object and releases its reference to its type. */
void fsdpc_py_free(PyObject *object);

/* Adds PeerError and MismatchError to the module. */
int fsdpc_py_error_setup(PyObject *module);

#endif
