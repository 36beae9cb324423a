/* Tier, for units whose arrays lie in one; see py_tier.c. */
#ifndef FSDPC_PY_PY_TIER_H
#define FSDPC_PY_PY_TIER_H

#include "engine/plan.h"
#include "py/py_state.h"

/* (Tier, "host" or None, params, masters, states, gradients, part), or None: `out` stays as it is.
 * -1 with an exception. */
int fsdpc_py_offload_parse(PyObject *module, PyObject *object, fsdpc_offload *out);

#endif
