/* Link, for the communicator that is made on one; see py_link.c. */
#ifndef FSDPC_PY_PY_LINK_H
#define FSDPC_PY_PY_LINK_H

#include "comm/link_relay.h"
#include "py/py_state.h"

/* The link of a Link, once, for a communicator that then destroys it; NULL with an exception. */
fsdpc_link *fsdpc_py_link_give(PyObject *module, PyObject *object);

#endif
