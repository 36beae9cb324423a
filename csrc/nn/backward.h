/* The running backward, for the files of csrc/nn. */
#ifndef FSDPC_NN_BACKWARD_H
#define FSDPC_NN_BACKWARD_H

#include "nn/tape.h"

/* Adds a node that is about to receive its first gradient to the running backward. */
fsdpc_status fsdpc_backward_push(fsdpc_tape *tape, fsdpc_node *node);

/* Stores a leaf's finished gradient, after hooks, in its sink or in `grad`. */
fsdpc_status fsdpc_leaf_give(fsdpc_tape *tape, fsdpc_tensor *leaf, fsdpc_tensor *gradient);

#endif
