/* Traverses the arguments and results of a module, for both frontends.
 *
 * Tuples, lists, dicts and dataclasses are searched at any depth, including named tuples and other
 * subclasses. A structure whose tensors change is rebuilt; any other structure is passed on
 * unchanged. A structure that contains itself must not change.
 */
#ifndef FSDPC_BIND_WALK_H
#define FSDPC_BIND_WALK_H

#include "bind/state.h"

typedef struct fsdpc_py_walk fsdpc_py_walk;
struct fsdpc_py_walk {
    /* Returns the tensor's replacement, or the tensor itself. Returns NULL without an exception if
     * the object is not a tensor. */
    PyObject *(*tensor)(fsdpc_py_walk *walk, PyObject *object);
    /* Checks an object whose contents are not searched; returns -1 with an exception to reject it.
     * May be NULL. */
    int (*other)(fsdpc_py_walk *walk, PyObject *object);
    struct fsdpc_py_around *around; /* the enclosing structures; NULL at the outset */
};

PyObject *fsdpc_py_rebuild(fsdpc_py_walk *walk, PyObject *object);

#endif
