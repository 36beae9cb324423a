/* What the engine did with its units: in the trace, and as the acts of a step for schedule(). */
#ifndef FSDPC_ENGINE_ACTS_H
#define FSDPC_ENGINE_ACTS_H

#include "engine/root_internal.h"

/* Writes an event of a unit to the trace, and to the acts of a step that is under way. */
void fsdpc_root_trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes, bool backward);
void fsdpc_root_begin_acts(fsdpc_root *root);
void fsdpc_root_end_acts(fsdpc_root *root);

#endif
