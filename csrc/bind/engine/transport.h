/* The Transport type, for the communicator created on it; see bind/engine/transport.c. */
#ifndef FSDPC_BIND_ENGINE_TRANSPORT_H
#define FSDPC_BIND_ENGINE_TRANSPORT_H

#include "comm/transport_relay.h"
#include "bind/state.h"

/* Passes a Transport object's transport to a communicator, which then destroys it; possible only
 * once; NULL with an exception. */
fsdpc_transport *fsdpc_py_transport_give(PyObject *module, PyObject *object);

#endif
