/* Link, for the communicator created on it; see bind/engine/link.c. */
#ifndef FSDPC_BIND_ENGINE_LINK_H
#define FSDPC_BIND_ENGINE_LINK_H

#include "comm/link_relay.h"
#include "bind/state.h"

/* Passes a Link object's link, once, to a communicator, which then destroys it; NULL with an
 * exception. */
fsdpc_link *fsdpc_py_link_give(PyObject *module, PyObject *object);

#endif
