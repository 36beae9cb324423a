/* A frame represents one call of backward, with the nodes that have a gradient but have not run
 * yet.
 *
 * Frames nest (a recomputation runs one inside another). The tape pushes nodes onto the innermost
 * frame, and nn/backward.c runs them.
 */
#ifndef FSDPC_NN_FRAME_H
#define FSDPC_NN_FRAME_H

#include "nn/node.h"

typedef struct fsdpc_frame {
    struct fsdpc_frame *outer;
    fsdpc_node **heap; /* owned references */
    size_t n, capacity;
    fsdpc_tensor **hooked; /* leaves with hooks; owned references */
    size_t n_hooked, hooked_capacity;
} fsdpc_frame;

/* Adds a node that is about to receive its first gradient. */
fsdpc_status fsdpc_frame_push(fsdpc_frame *frame, fsdpc_node *node);
/* Removes the node with the highest number; the caller then owns the reference. */
fsdpc_node *fsdpc_frame_pop(fsdpc_frame *frame);

/* Grows one of backward's arrays, if needed, to fit one more element of `element` bytes. */
fsdpc_status fsdpc_frame_grow(void *array_io, size_t n, size_t *capacity_io, size_t element);

#endif
