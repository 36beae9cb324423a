/* Records the engine's actions on units, both in the trace and as the acts that schedule()
 * returns. */
#ifndef FSDPC_ENGINE_ACTS_H
#define FSDPC_ENGINE_ACTS_H

#include "engine/root_internal.h"

/* Records an event on a unit in the trace and in the current step's acts. */
void fsdpc_root_trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes, bool backward);

static inline void fsdpc_root_begin_acts(fsdpc_root *root)
{
    if (root->acts.whole) {
        fsdpc_acts spare = root->last_acts;
        root->last_acts = root->acts;
        root->acts = spare;
    }
    root->acts.length = 0;
    root->acts.whole = false;
    root->notes_acts = true;
}

static inline void fsdpc_root_end_acts(fsdpc_root *root)
{
    root->acts.whole = root->acts.whole || root->notes_acts;
    root->notes_acts = false;
}

#endif
