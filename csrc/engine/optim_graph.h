/* Scalars of captured steps (learning rates, bias corrections, step numbers).
 *
 * From capture_begin to capture_end, steps of this optimizer read these scalars from the device's
 * memory. Before each replay, advance writes the next step's scalars there, in stream order.
 */
#ifndef FSDPC_ENGINE_OPTIM_GRAPH_H
#define FSDPC_ENGINE_OPTIM_GRAPH_H

#include "engine/optim_internal.h"

/* On devices with graphs, allocates the scalars of captured steps. */
fsdpc_status fsdpc_optim_graph_room(fsdpc_optim *optim);

/* Steps are recorded in the graph until capture_end; the optimizer's states must already exist. */
fsdpc_status fsdpc_optim_graph_create(fsdpc_optim *optim, const fsdpc_root *root,
                                      fsdpc_optim_graph **out);
/* Inside a capture, points a step's arguments to scalars in device memory. */
fsdpc_status fsdpc_optim_graph_take(const fsdpc_optim *optim, int group, fsdpc_step_args *args);
/* `keep`: the captured step is about to be launched for the first time. If it is false, restores
 * the previous step counts, which is not an error. */
fsdpc_status fsdpc_optim_capture_end(fsdpc_optim_graph *graph, bool keep);
/* Fails if parameters, groups or step counts have changed such that the captured calls no longer
 * match the next step. */
fsdpc_status fsdpc_optim_graph_check(fsdpc_optim_graph *graph);
/* Counts a step; call before each launch except the first, after the check. */
fsdpc_status fsdpc_optim_graph_advance(fsdpc_optim_graph *graph);
void fsdpc_optim_graph_destroy(fsdpc_optim_graph *graph); /* NULL is fine */

#endif
