/* The options of an optimizer's parameter group, from a dict. */
#ifndef FSDPC_BIND_ENGINE_OPTIONS_H
#define FSDPC_BIND_ENGINE_OPTIONS_H

#include "bind/engine.h"

/* Reads the options of one group of an optimizer of kind `own`, whose states may be block codes if
 * `coded`; those that are not given become 0. The option "rule" names the row of the table by which
 * the group steps. Returns -1 with an exception on failure. */
int fsdpc_py_read_options(PyObject *options, fsdpc_optim_kind own, bool coded, fsdpc_hyper *out,
                          fsdpc_optim_kind *kind);

#endif
