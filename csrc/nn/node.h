/* Tape nodes: their reference counts, and the tensors that they save for backward. */
#ifndef FSDPC_NN_NODE_H
#define FSDPC_NN_NODE_H

#include "nn/tensor.h"
#include "tier/saved.h"

typedef struct fsdpc_tape fsdpc_tape; /* nn/tape.h */

typedef struct fsdpc_edge {
    fsdpc_node *node;   /* owned; the input's node; NULL if it is a leaf or needs no gradient */
    fsdpc_tensor *leaf; /* owned; a leaf that requires grad */
} fsdpc_edge;

typedef struct fsdpc_node_ops {
    const char *name;
    /* Passes a gradient to each input that needs one; dy has the output's dtype and shape. */
    fsdpc_status (*backward)(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy);
    void (*release)(fsdpc_node *node); /* frees node->extra; NULL: free(extra) */
} fsdpc_node_ops;

enum { FSDPC_NODE_MAX_INPUTS = 4, FSDPC_NODE_MAX_SAVED = 8 };

struct fsdpc_node {
    _Atomic int refs;
    const fsdpc_node_ops *ops;
    uint64_t number;
    int n_inputs;
    fsdpc_edge *inputs; /* inline_inputs, or allocated for more (concat) */
    fsdpc_edge inline_inputs[FSDPC_NODE_MAX_INPUTS];
    fsdpc_tensor *saved[FSDPC_NODE_MAX_SAVED]; /* owned; unused ones are NULL */
    uint32_t saved_version[FSDPC_NODE_MAX_SAVED];
    bool freed;        /* saved tensors were freed: backward ran without retain_graph */
    fsdpc_dtype dtype; /* of the output */
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    fsdpc_tensor *grad;   /* of the output, accumulated so far in the running backward */
    void *extra;          /* the operation's parameters; freed by ops->release */
    fsdpc_saved_set *set; /* owned; its saved tensors may leave memory; NULL: they stay */
    size_t set_at;        /* for nn/saved_tensors.c */
    fsdpc_hook *hooks;
    uint64_t mark;    /* of the last walk that visited this node */
    fsdpc_node *next; /* while being freed */
};

fsdpc_node *fsdpc_node_acquire(fsdpc_node *node);
void fsdpc_node_release(fsdpc_node *node); /* may be NULL */

/* Saves a tensor for backward and acquires a reference to it. If the tensor is modified in place
 * before then, backward fails. */
void fsdpc_node_save(fsdpc_node *node, int slot, fsdpc_tensor *t);
/* Saves the node's own output as a view that has no node, which avoids a reference cycle. */
fsdpc_status fsdpc_node_save_output(fsdpc_node *node, int slot, const fsdpc_tensor *out);
/* Brings the saved tensors back into memory, and checks that all may be read: they have not been
 * freed or overwritten, and their guards agree. */
fsdpc_status fsdpc_node_check(const fsdpc_node *node);
/* Releases saved tensors and the operation's parameters; the edges stay. */
void fsdpc_node_free(fsdpc_node *node);

#endif
