/* Captures a whole training step as one graph of the device.
 *
 *     begin  - a normal step: forward, backward, clipping, the optimizer's step -  end  replay*
 *
 * Between begin and end the device computes nothing; it only records. Calling end launches the
 * recording, which performs one step. A replay runs another step on the same memory. A replay also
 * makes the step's changes on the host (step counts, generations) and uses the optimizer's scalars
 * for the new step.
 *
 * A replay repeats the recorded work, so the host must make the same decisions again. At the end of
 * the capture and at each replay, the engine compares pending gradients, settings, and whether
 * weights match the parameter buffer. If anything differs, the call launches nothing and returns an
 * error that names the unit. An error between begin and end abandons the step. This restores the
 * host's state and drops gradients computed in the step; tensors created in the step are left
 * uninitialised.
 *
 * All functions are collective if operations are ordered on the device (fsdpc_comm_order);
 * otherwise only a single rank may use them. An error on one rank is returned on all ranks, except
 * for an attempt to nest graphs.
 */
#ifndef FSDPC_ENGINE_STEP_GRAPH_H
#define FSDPC_ENGINE_STEP_GRAPH_H

#include "engine/optim.h"

typedef struct fsdpc_step_graph fsdpc_step_graph;

/* The root and the optimizer are borrowed and must outlive the graph. All units of the optimizer
 * must belong to the root. */
fsdpc_status fsdpc_step_graph_begin(fsdpc_root *root, fsdpc_optim *optim, fsdpc_step_graph **out);
/* An error abandons the step. */
fsdpc_status fsdpc_step_graph_end(fsdpc_step_graph *step);
/* Abandons the capture; `end` fails on the peers with the reason. */
void fsdpc_step_graph_abandon(fsdpc_step_graph *step, const char *why);
fsdpc_status fsdpc_step_graph_replay(fsdpc_step_graph *step);
/* Destroying a graph before `end` abandons it only on this rank. */
void fsdpc_step_graph_destroy(fsdpc_step_graph *step);

#endif
