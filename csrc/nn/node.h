/* Tape nodes: their reference counts, and the tensors that they save for backward. */
#ifndef FSDPC_NN_NODE_H
#define FSDPC_NN_NODE_H

#include "nn/tape.h"

fsdpc_node *fsdpc_node_acquire(fsdpc_node *node);
void fsdpc_node_release(fsdpc_node *node); /* may be NULL */

/* Saves a tensor for backward (acquired).  If it is written in place before then, backward
 * fails. */
void fsdpc_node_save(fsdpc_node *node, int slot, fsdpc_tensor *t);
/* Saves the node's own output, as a view without a node to avoid a reference cycle. */
fsdpc_status fsdpc_node_save_output(fsdpc_node *node, int slot, const fsdpc_tensor *out);
/* Checks that all saved tensors may be read: not freed, not overwritten, and their guards agree. */
fsdpc_status fsdpc_node_check(const fsdpc_node *node);
/* Releases saved tensors and the operation's parameters; the edges stay. */
void fsdpc_node_free(fsdpc_node *node);

/* fsdpc_tensor_release in two steps: frees the tensor if this was the last reference and returns
 * the node to release, if any. */
fsdpc_node *fsdpc_tensor_drop(fsdpc_tensor *t);

#endif
