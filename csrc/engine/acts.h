/* Records the engine's actions on units, both in the trace and as the acts that schedule()
 * returns. */
#ifndef FSDPC_ENGINE_ACTS_H
#define FSDPC_ENGINE_ACTS_H

#include "engine/root_internal.h"

/* Records an event on a unit in the trace and in the current step's acts. */
void fsdpc_root_trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes, bool backward);

static inline void fsdpc_model_begin_acts(fsdpc_model *model)
{
    if (model->acts.whole) {
        fsdpc_acts spare = model->last_acts;
        model->last_acts = model->acts;
        model->acts = spare;
    }
    model->acts.length = 0;
    model->acts.whole = false;
    model->notes_acts = true;
}

static inline void fsdpc_model_end_acts(fsdpc_model *model)
{
    model->acts.whole = model->acts.whole || model->notes_acts;
    model->notes_acts = false;
}

#endif
