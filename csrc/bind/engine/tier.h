/* The Tier type, for units that store their arrays in a tier; see bind/engine/tier.c. */
#ifndef FSDPC_BIND_ENGINE_TIER_H
#define FSDPC_BIND_ENGINE_TIER_H

#include "engine/plan.h"
#include "bind/state.h"

/* Parses a Tier; None is NULL. Returns -1 with an exception. */
int fsdpc_py_tier_parse(PyObject *module, PyObject *object, fsdpc_tier **out);
/* Parses (Tier, "host" or None, params, masters, states, gradients, part); None leaves `out`
 * unchanged. Returns -1 with an exception. */
int fsdpc_py_offload_parse(PyObject *module, PyObject *object, fsdpc_offload *out);

#endif
