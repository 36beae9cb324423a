/* The Transport type, on which a communicator is created; see bind/engine/transport.c. */
#ifndef FSDPC_BIND_ENGINE_TRANSPORT_H
#define FSDPC_BIND_ENGINE_TRANSPORT_H

#include "comm/transport_relay.h"
#include "bind/state.h"

/* Hands a Transport object's transport to a communicator, which then destroys it. This works only
 * once; returns NULL with an exception on failure. */
fsdpc_transport *fsdpc_py_transport_give(PyObject *module, PyObject *object);

#endif
