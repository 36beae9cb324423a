/* Scalars of captured steps (rates, bias corrections, the number of the step).
 *
 * From capture_begin to capture_end, steps of this optimizer read them from the device's memory.
 * Before each replay, advance writes those of the next step there, in stream order.
 */
#ifndef FSDPC_ENGINE_OPTIM_GRAPH_H
#define FSDPC_ENGINE_OPTIM_GRAPH_H

#include "engine/optim_internal.h"

/* Memory for the scalars of captured steps, on devices with graphs. */
fsdpc_status fsdpc_optim_graph_room(fsdpc_optim *optim);

/* Steps write into it until capture_end; the optimizer's states are there. */
fsdpc_status fsdpc_optim_graph_create(fsdpc_optim *optim, const fsdpc_root *root,
                                      fsdpc_optim_graph **out);
/* Inside a capture: points a step's arguments to scalars in the device's memory. */
fsdpc_status fsdpc_optim_graph_take(const fsdpc_optim *optim, int group, fsdpc_step_args *args);
/* `keep`: the captured step will be launched, now for the first time.  Otherwise step counts return
 * to their earlier values, and there is no error. */
fsdpc_status fsdpc_optim_capture_end(fsdpc_optim_graph *graph, bool keep);
/* An error if parameters, groups or counts are no longer such that the captured calls are those of
 * the step that comes. */
fsdpc_status fsdpc_optim_graph_check(fsdpc_optim_graph *graph);
/* Before each launch but the first, and checked: counts the step. */
fsdpc_status fsdpc_optim_graph_advance(fsdpc_optim_graph *graph);
void fsdpc_optim_graph_destroy(fsdpc_optim_graph *graph); /* NULL is fine */

#endif
