/* Tensors: dense, row-major, reference counted.
 *
 * A tensor combines a shape and a storage. Views (reshape, a row range, a boundary) share the
 * storage of another tensor; every other tensor owns its storage. Data is always dense: transposes
 * and inner slices copy. Leaves are tensors that no operation created; a leaf with requires_grad
 * accumulates its gradient in `grad`, or passes it to its sink (a sharded parameter's reduce
 * buffer).
 *
 * A guard protects memory that is not always valid, such as an unsharded parameter's. Every
 * operation calls fsdpc_tensor_check on its inputs before reading.
 *
 * Writing to a tensor in place increments its storage's version. A node refuses to run if a saved
 * tensor's version has changed since it was saved (fsdpc_node_save).
 *
 * Threads: a tensor is used by one thread at a time (Python's GIL); reference counts are atomic,
 * because exported memory may be released on another thread.
 */
#ifndef FSDPC_NN_TENSOR_H
#define FSDPC_NN_TENSOR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "nn/hook.h"
#include "ops/nn_ops.h"

typedef struct fsdpc_node fsdpc_node; /* nn/node.h */

typedef struct fsdpc_storage {
    _Atomic int refs;
    _Atomic int kept; /* how many of refs are outputs kept only by their node, for backward */
    void *data;
    size_t bytes;
    fsdpc_device *device;
    void (*release)(struct fsdpc_storage *storage); /* frees data and the owner, not the struct */
    void *owner; /* of foreign memory: a NumPy array, a unit ... */
    /* Of memory that a sink lent; see fsdpc_grad_sink. */
    fsdpc_status (*settle)(struct fsdpc_storage *storage, bool as_gradient, bool *is_gradient_out);
    uint32_t version; /* incremented by every in-place write */
    bool readonly;    /* writes fault: a unit's full, foreign constants */
    bool exported;    /* may be accessed without a reference to it */
} fsdpc_storage;

/* A destination for a leaf's gradient other than `grad`. `target` returns the memory for the next
 * contribution, which the caller then writes. `accumulate` is false for a backward's first
 * contribution (overwrite) and true for later ones. */
typedef struct fsdpc_grad_target {
    void *data;
    fsdpc_dtype dtype;
    bool accumulate;
} fsdpc_grad_target;

/* `lend` (NULL: the sink has nothing to lend) gives memory to an operation that computes a gradient
 * in forward: *out is a new tensor, or NULL if it refuses. The memory may move, to the data of the
 * tensor's storage, so no other tensor may share it. Before backward uses the tensor, it calls the
 * storage's `settle`. With `as_gradient`, the contents may become the leaf's first contribution
 * without a copy; the caller may then still write them, and passes nothing on. Otherwise the memory
 * is private from then on. */
typedef struct fsdpc_grad_sink {
    fsdpc_status (*target)(void *arg, fsdpc_grad_target *out);
    fsdpc_status (*lend)(void *arg, fsdpc_dtype dtype, int ndim, const size_t *shape,
                         fsdpc_tensor **out);
    void *arg;
} fsdpc_grad_sink;

typedef struct fsdpc_guard {
    fsdpc_status (*check)(void *arg); /* an error names the parameter and its unit */
    void *arg;
} fsdpc_guard;

struct fsdpc_tensor {
    _Atomic int refs;
    fsdpc_dtype dtype;
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    size_t numel;
    void *data; /* inside the storage; NULL while deferred */
    fsdpc_storage *storage;
    bool requires_grad, kept; /* kept: counted by storage->kept */
    fsdpc_node *node;         /* the node that created it; NULL for a leaf; owned */
    void (*release_node)(fsdpc_node *node);
    fsdpc_tensor *grad;      /* of a leaf without a sink; owned; NULL: none yet */
    fsdpc_grad_sink sink;    /* sink.target NULL: none */
    fsdpc_guard guard;       /* guard.check NULL: always valid; views inherit it */
    fsdpc_leaf_hooks *hooks; /* of a leaf; NULL: it never had one */
};

/* Creates a tensor with uninitialised memory of category ACTIVATION. */
fsdpc_status fsdpc_tensor_create(fsdpc_device *device, fsdpc_dtype dtype, int ndim,
                                 const size_t *shape, fsdpc_tensor **out);
/* Creates a tensor without memory; reading it is an error until fsdpc_tensor_bind. */
fsdpc_status fsdpc_tensor_create_deferred(fsdpc_dtype dtype, int ndim, const size_t *shape,
                                          fsdpc_tensor **out);
/* Creates a tensor over foreign memory; release(storage) is called once, when the last tensor over
 * it is released. */
fsdpc_status fsdpc_tensor_wrap(fsdpc_device *device, fsdpc_dtype dtype, int ndim,
                               const size_t *shape, void *data, void (*release)(fsdpc_storage *),
                               void *owner, fsdpc_tensor **out);
/* Creates a tensor with a different shape of the same numel over `data` within t's storage; it has
 * no autograd state, which operations add.
 */
fsdpc_status fsdpc_tensor_view(const fsdpc_tensor *t, int ndim, const size_t *shape, void *data,
                               fsdpc_tensor **out);
/* Replaces a leaf's memory in place and releases its old storage. */
fsdpc_status fsdpc_tensor_bind(fsdpc_tensor *t, fsdpc_dtype dtype, fsdpc_storage *storage,
                               void *data);

fsdpc_tensor *fsdpc_tensor_acquire(fsdpc_tensor *t); /* NULL is fine */
void fsdpc_tensor_release(fsdpc_tensor *t);          /* NULL is fine */
/* fsdpc_tensor_release in two steps: frees the tensor if this was the last reference and returns
 * the node to release, if any. */
fsdpc_node *fsdpc_tensor_drop(fsdpc_tensor *t);
fsdpc_storage *fsdpc_storage_acquire(fsdpc_storage *storage);
/* Acquires a storage to which the caller has no reference; returns false if the last reference is
 * gone and its release is in progress. The caller must prevent the release from finishing. */
bool fsdpc_storage_try_acquire(fsdpc_storage *storage);
void fsdpc_storage_release(fsdpc_storage *storage);

size_t fsdpc_tensor_bytes(const fsdpc_tensor *t);
fsdpc_status fsdpc_tensor_check(const fsdpc_tensor *t); /* fails if deferred or its guard does */
/* Checks that the tensor may be written in place: its memory is valid and not read-only. */
fsdpc_status fsdpc_tensor_check_writable(const fsdpc_tensor *t);
/* Performs the same check before a write, and increments the version. */
fsdpc_status fsdpc_tensor_check_write(fsdpc_tensor *t);
/* Returns whether the caller holds the only reference to the tensor, and the tensor the only one to
 * its storage. */
bool fsdpc_tensor_is_exclusive(const fsdpc_tensor *t);
/* Returns the number of usable tensors that share its memory, excluding those kept only by
 * nodes. */
int fsdpc_tensor_sharers(const fsdpc_tensor *t);
/* Returns whether the tensor is a leaf that still has a hook. */
bool fsdpc_tensor_has_hooks(const fsdpc_tensor *t);
/* Creates a leaf over the same memory, without a node, gradient or hooks. */
fsdpc_status fsdpc_tensor_detach(const fsdpc_tensor *t, fsdpc_tensor **out);

/* "(2, 3)" for error messages; `text` is returned. */
enum { FSDPC_SHAPE_TEXT = 160 };
const char *fsdpc_shape_text(int ndim, const size_t *shape, char text[FSDPC_SHAPE_TEXT]);
bool fsdpc_shape_equal(const fsdpc_tensor *a, const fsdpc_tensor *b);

#endif
