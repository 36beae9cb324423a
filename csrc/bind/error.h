/* From statuses to Python exceptions; the only place that does that. */
#ifndef FSDPC_BIND_ERROR_H
#define FSDPC_BIND_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"

/* Sets the exception of a failure, with this thread's message, and returns NULL.
 * FSDPC_ERR_CALLBACK keeps the exception that the callback raised. */
PyObject *fsdpc_py_raise(fsdpc_status status);

/* None, or NULL with the exception of a failure. */
PyObject *fsdpc_py_none(fsdpc_status status);

/* 0, or -1 with the exception of a failure. */
int fsdpc_py_check(fsdpc_status status);

/* Zeroed memory for n + 1 elements, freed with PyMem_Free; NULL with MemoryError. */
void *fsdpc_py_room(Py_ssize_t n, size_t element_bytes);

/* The end of a dealloc: frees the object and releases its reference to its type. */
void fsdpc_py_free(PyObject *object);

/* Adds PeerError and MismatchError to the module. */
int fsdpc_py_error_setup(PyObject *module);

#endif
