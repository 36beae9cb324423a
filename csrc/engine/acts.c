/* Records each step's acts, from its forward to its last backward, and keeps those of the last
 * complete step.
 */
#include "engine/acts.h"

#include <stdlib.h>

/* If memory runs out, the step's acts are discarded. */
static void note_act(fsdpc_model *model, fsdpc_act act)
{
    fsdpc_acts *acts = &model->acts;
    if (acts->length == acts->capacity) {
        size_t capacity = acts->capacity ? 2 * acts->capacity : 64;
        fsdpc_act *items = realloc(acts->items, capacity * sizeof act);
        if (!items) {
            acts->length = 0;
            model->notes_acts = false;
            return;
        }
        acts->items = items;
        acts->capacity = capacity;
    }
    acts->items[acts->length++] = act;
}

void fsdpc_root_trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes, bool backward)
{
    const fsdpc_root *root = unit->root;
    fsdpc_trace_add(unit->trace, kind, unit->id, bytes, root->param_buffer->epoch, backward);
    /* A shard group of one rank never gathers or reshards, and its gradients are summed only by the
     * all-reduce over its replicas. */
    bool of_shards =
        kind == FSDPC_TRACE_GATHER || kind == FSDPC_TRACE_RESHARD || kind == FSDPC_TRACE_REDUCE;
    bool shown = of_shards ? root->comm->size > 1
                           : kind == FSDPC_TRACE_FORWARD || kind == FSDPC_TRACE_BACKWARD ||
                                 kind == FSDPC_TRACE_ALL_REDUCE;
    if (root->model->notes_acts && shown)
        note_act(root->model, (fsdpc_act){.unit = unit->id, .kind = kind, .backward = backward});
}
