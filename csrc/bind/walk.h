/* The walk through what a module takes or returns, for both frontends.
 *
 * Tuples, lists, dicts and dataclasses are searched at any depth, also named tuples and other
 * subclasses.  One whose tensors change is rebuilt; one that stays the same is passed on.  A
 * structure that contains itself may not change.
 */
#ifndef FSDPC_BIND_WALK_H
#define FSDPC_BIND_WALK_H

#include "bind/state.h"

typedef struct fsdpc_py_walk fsdpc_py_walk;
struct fsdpc_py_walk {
    /* Returns a tensor's replacement, or the tensor.  NULL without an exception: not a tensor. */
    PyObject *(*tensor)(fsdpc_py_walk *walk, PyObject *object);
    /* Checks an object that is not searched; -1 with an exception.  May be NULL. */
    int (*other)(fsdpc_py_walk *walk, PyObject *object);
    struct fsdpc_py_around *around; /* the enclosing structures; NULL at the outset */
};

PyObject *fsdpc_py_rebuild(fsdpc_py_walk *walk, PyObject *object);

#endif
