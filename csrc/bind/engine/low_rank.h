/* Sums in low rank as Python passes them: None, or a tuple (rank, start_step, warm_start,
 * error_feedback, min_rate, seed). */
#ifndef FSDPC_BIND_ENGINE_LOW_RANK_H
#define FSDPC_BIND_ENGINE_LOW_RANK_H

#include "engine/low_rank_plan.h"

#include "bind/state.h"

/* NULL counts as None. Returns -1 with an exception set on failure. */
int fsdpc_py_low_rank_parse(PyObject *object, fsdpc_low_rank_options *out);
PyObject *fsdpc_py_low_rank_new(const fsdpc_low_rank_options *options);

#endif
