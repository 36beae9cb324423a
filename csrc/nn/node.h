/* Nodes of the tape: their counts, and the tensors they save for backward. */
#ifndef FSDPC_NN_NODE_H
#define FSDPC_NN_NODE_H

#include "nn/tape.h"

fsdpc_node *fsdpc_node_acquire(fsdpc_node *node);
void fsdpc_node_release(fsdpc_node *node); /* NULL is fine */

/* Keeps a tensor for backward (acquired).  If it is written in place before then, backward
 * refuses. */
void fsdpc_node_save(fsdpc_node *node, int slot, fsdpc_tensor *t);
/* Keeps the node's own output, as a view without a node: otherwise they would form a cycle. */
fsdpc_status fsdpc_node_save_output(fsdpc_node *node, int slot, const fsdpc_tensor *out);
/* All saved tensors may be read: not freed, not overwritten, and their guards agree. */
fsdpc_status fsdpc_node_check(const fsdpc_node *node);
/* Releases saved tensors and the operation's parameters; the edges stay. */
void fsdpc_node_free(fsdpc_node *node);

/* fsdpc_tensor_release in two steps: frees the tensor if this was the last reference and returns
 * the node to release, if any. */
fsdpc_node *fsdpc_tensor_drop(fsdpc_tensor *t);

#endif
