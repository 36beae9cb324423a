/* The tape: reverse-mode automatic differentiation.
 *
 * An operation on tensors that require gradients creates a node, which holds the data that its
 * backward needs and an edge to each input. Nodes are numbered in creation order, and a node's
 * consumers are always created after it. Backward therefore runs the reachable nodes in descending
 * order, a topological order that is the same in every run. A node has one output.
 *
 * A boundary marks a place on the tape: it is an identity whose backward first calls a function. A
 * boundary on a unit's outputs tells the engine, at its first call, that the unit's backward
 * begins; one on its inputs tells it that backward ends. The boundary on the inputs is created
 * before all nodes inside the unit, so its backward runs after theirs.
 *
 * Backward frees a node's saved tensors as it goes unless the graph is retained; using them again
 * is an error. Backward may be nested (activation checkpointing runs one inside another).
 */
#ifndef FSDPC_NN_TAPE_H
#define FSDPC_NN_TAPE_H

#include <pthread.h>

#include "nn/node.h"

typedef fsdpc_status (*fsdpc_boundary_fn)(void *arg);

#define FSDPC_NOT_RECOMPUTING UINT64_MAX

struct fsdpc_tape {
    fsdpc_device *device;
    fsdpc_stream *stream; /* where compute runs */
    bool few_chunks;      /* losses prefer few passes to little memory: op_head.c */
    bool grad_enabled;
    _Atomic uint64_t next_number; /* atomic: operations run outside the GIL on several threads */
    int backward_depth;           /* > 0 inside backward */
    uint64_t seed, next_stream;   /* for dropout and initialisation */
    /* In device memory, for captured steps; NULL before the first dropout or if the device does not
     * support graphs. */
    struct fsdpc_dropout_key *dropout_key;
    bool in_region;                  /* nn/saved_tensors.h */
    struct fsdpc_products *products; /* of the running checkpoint; nn/products.h; NULL: none */
    uint64_t recomputing;            /* next_number when the running recomputation first ran */

    /* of the running backward */
    pthread_t backward_thread;
    bool retain_graph;
    struct fsdpc_frame *frame; /* the innermost; nn/frame.h */
    fsdpc_tensor *unwanted;    /* scratch for the gradient of a leaf frozen after forward */
    struct fsdpc_tape_end *ends;
    size_t n_ends, ends_capacity;
    bool leaf_hooks; /* some leaf has had a hook: count uses before backward */
    uint64_t next_mark;
};

fsdpc_status fsdpc_tape_create(fsdpc_device *device, fsdpc_stream *stream, fsdpc_tape **out);
void fsdpc_tape_destroy(fsdpc_tape *tape);

/* Computes the gradient of `root`, a scalar unless `grad` is given, with respect to every leaf that
 * it depends on. */
fsdpc_status fsdpc_tape_backward(fsdpc_tape *tape, fsdpc_tensor *root, fsdpc_tensor *grad,
                                 bool retain_graph);

/* Does the same for several roots at once; grads and any grads[i] may be NULL. */
fsdpc_status fsdpc_tape_backward_many(fsdpc_tape *tape, int n, fsdpc_tensor *const *roots,
                                      fsdpc_tensor *const *grads, bool retain_graph);

/* y = x (shared storage). Backward calls fn(arg), then passes dy through unchanged. release(arg),
 * if given, runs when the node is freed. If no gradients flow, y is a plain view.
 */
fsdpc_status fsdpc_tape_boundary(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_boundary_fn fn, void *arg,
                                 void (*release)(void *arg), fsdpc_tensor **out);

/* Runs fn(arg, status) once when the outermost running backward ends, even if it fails. Functions
 * run in the order in which they were added, and each (fn, arg) runs only once. */
fsdpc_status fsdpc_tape_at_end(fsdpc_tape *tape, fsdpc_status (*fn)(void *arg, fsdpc_status status),
                               void *arg);

/* Adds a hook to a tensor that requires grad. On failure, the caller keeps ownership of `arg`. */
fsdpc_status fsdpc_tape_add_hook(fsdpc_tape *tape, fsdpc_tensor *t, fsdpc_hook_fn fn, void *arg,
                                 void (*release)(void *arg), fsdpc_hook **out);

/* ---- for operations ---- */

/* Returns whether any input needs a gradient and gradients are enabled. */
bool fsdpc_tape_wants(const fsdpc_tape *tape, int n, fsdpc_tensor *const *inputs);

/* Creates out's node with edges to the inputs. The caller then fills node->saved and
 * node->extra. */
fsdpc_status fsdpc_tape_record(fsdpc_tape *tape, const fsdpc_node_ops *ops, int n,
                               fsdpc_tensor *const *inputs, fsdpc_tensor *out,
                               fsdpc_node **node_out);

/* Backward: does input i need a gradient? A leaf that was frozen after forward needs no
 * gradient. */
bool fsdpc_edge_wanted(const fsdpc_edge *edge);

/* In backward, passes on a finished gradient: the call acquires and stores it, or adds it to the
 * existing one. The gradient must have the input's shape and dtype, and must not be written
 * afterwards. */
fsdpc_status fsdpc_edge_give(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *gradient);

/* In backward, stores a leaf's finished gradient in its sink or in `grad`, after its hooks have
 * run. */
fsdpc_status fsdpc_leaf_give(fsdpc_tape *tape, fsdpc_tensor *leaf, fsdpc_tensor *gradient);

/* In backward, returns a target for this edge's gradient, for operations whose kernels support
 * `accumulate` and any output dtype. The operation must then either write the target or fail.
 * `shape` and `dtype` are the input's; the target's dtype may differ (a reduce buffer's). */
fsdpc_status fsdpc_edge_target(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_dtype dtype,
                               int ndim, const size_t *shape, fsdpc_grad_target *out);
/* Copies a contribution to its target, or adds it to the target's contents. */
fsdpc_status fsdpc_target_write(const fsdpc_tape *tape, const fsdpc_grad_target *target,
                                const void *data, fsdpc_dtype dtype, size_t numel);

#endif
