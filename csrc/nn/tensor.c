/* A tensor consists of two small structs, each with a reference count: the tensor itself and its
 * storage.
 *
 * A tensor's memory comes from the device (category ACTIVATION) and is freed, on any thread, with
 * the last tensor that shares its storage. Reference counts are atomic, and the `release` function
 * of foreign memory takes any lock that the owner needs. Shapes are small arrays inside the struct,
 * so creating a view costs only one malloc.
 *
 * Releasing a tensor may release the node that created it, which releases other tensors and nodes.
 * The node's `release_node` uses a list for this (nn/node.c), so that a long chain does not
 * overflow the stack.
 */
#include "nn/tensor.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ref.h"
#include "base/size.h"

static fsdpc_status shape_numel(int ndim, const size_t *shape, size_t *out)
{
    if (ndim < 0 || ndim > FSDPC_MAX_DIMS)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "a tensor has 0 to %d dimensions, not %d",
                          FSDPC_MAX_DIMS, ndim);
    size_t numel = 1;
    for (int i = 0; i < ndim; i++)
        FSDPC_TRY(fsdpc_mul_size(numel, shape[i], &numel));
    *out = numel;
    return FSDPC_OK;
}

/* Creates a tensor without storage. */
static fsdpc_status tensor_new(fsdpc_dtype dtype, int ndim, const size_t *shape, fsdpc_tensor **out)
{
    size_t numel = 0, bytes;
    FSDPC_TRY(shape_numel(ndim, shape, &numel));
    FSDPC_TRY(fsdpc_mul_size(numel, fsdpc_dtype_bytes(dtype), &bytes));
    fsdpc_tensor *t = calloc(1, sizeof *t);
    if (!t)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a tensor's header");
    atomic_init(&t->refs, 1);
    t->dtype = dtype;
    t->ndim = ndim;
    t->numel = numel;
    for (int i = 0; i < ndim; i++)
        t->shape[i] = shape[i];
    *out = t;
    return FSDPC_OK;
}

static fsdpc_status storage_new(fsdpc_device *device, void *data, size_t bytes,
                                void (*release)(fsdpc_storage *), void *owner, fsdpc_storage **out)
{
    fsdpc_storage *storage = malloc(sizeof *storage);
    if (!storage)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a tensor's header");
    *storage = (fsdpc_storage){
        .data = data, .bytes = bytes, .device = device, .release = release, .owner = owner};
    atomic_init(&storage->refs, 1);
    atomic_init(&storage->kept, 0);
    *out = storage;
    return FSDPC_OK;
}

static void release_device_memory(fsdpc_storage *storage)
{
    fsdpc_device_free(storage->device, storage->data);
}

fsdpc_status fsdpc_tensor_create(fsdpc_device *device, fsdpc_dtype dtype, int ndim,
                                 const size_t *shape, fsdpc_tensor **out)
{
    fsdpc_tensor *t;
    void *data;
    FSDPC_TRY(tensor_new(dtype, ndim, shape, &t));
    fsdpc_status st;
    size_t bytes = fsdpc_tensor_bytes(t);
    FSDPC_TRY_GOTO(st, fsdpc_device_alloc(device, FSDPC_MEM_ACTIVATION, bytes, &data), free_tensor);
    FSDPC_TRY_GOTO(st, storage_new(device, data, bytes, release_device_memory, NULL, &t->storage),
                   free_data);
    t->data = data;
    *out = t;
    return FSDPC_OK;
free_data:
    fsdpc_device_free(device, data);
free_tensor:
    free(t);
    return st;
}

fsdpc_status fsdpc_tensor_create_deferred(fsdpc_dtype dtype, int ndim, const size_t *shape,
                                          fsdpc_tensor **out)
{
    return tensor_new(dtype, ndim, shape, out);
}

fsdpc_status fsdpc_tensor_wrap(fsdpc_device *device, fsdpc_dtype dtype, int ndim,
                               const size_t *shape, void *data, void (*release)(fsdpc_storage *),
                               void *owner, fsdpc_tensor **out)
{
    fsdpc_tensor *t;
    FSDPC_TRY(tensor_new(dtype, ndim, shape, &t));
    fsdpc_status st = storage_new(device, data, fsdpc_tensor_bytes(t), release, owner, &t->storage);
    if (st != FSDPC_OK) {
        free(t);
        return st;
    }
    t->data = data;
    *out = t;
    return FSDPC_OK;
}

fsdpc_status fsdpc_tensor_view(const fsdpc_tensor *t, int ndim, const size_t *shape, void *data,
                               fsdpc_tensor **out)
{
    fsdpc_tensor *view;
    FSDPC_TRY(tensor_new(t->dtype, ndim, shape, &view));
    assert(!t->storage ||
           (char *)data + fsdpc_tensor_bytes(view) <= (char *)t->storage->data + t->storage->bytes);
    view->data = data;
    view->storage = t->storage ? fsdpc_storage_acquire(t->storage) : NULL;
    view->guard = t->guard;
    *out = view;
    return FSDPC_OK;
}

fsdpc_status fsdpc_tensor_detach(const fsdpc_tensor *t, fsdpc_tensor **out)
{
    return fsdpc_tensor_view(t, t->ndim, t->shape, t->data, out);
}

fsdpc_status fsdpc_tensor_bind(fsdpc_tensor *t, fsdpc_dtype dtype, fsdpc_storage *storage,
                               void *data)
{
    if (t->node)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "only a leaf can be given other memory, this tensor was made by an "
                          "operation; use detach() first");
    fsdpc_storage *old = t->storage;
    t->dtype = dtype;
    t->storage = fsdpc_storage_acquire(storage);
    t->data = data;
    fsdpc_storage_release(old);
    return FSDPC_OK;
}

fsdpc_tensor *fsdpc_tensor_acquire(fsdpc_tensor *t)
{
    if (t)
        atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
    return t;
}

bool fsdpc_tensor_has_hooks(const fsdpc_tensor *t)
{
    if (t->hooks)
        for (const fsdpc_hook *hook = t->hooks->first; hook; hook = hook->next)
            if (hook->fn)
                return true;
    return false;
}

static void destroy_hooks(fsdpc_leaf_hooks *hooks)
{
    if (!hooks)
        return;
    fsdpc_hooks_destroy(hooks->first);
    fsdpc_tensor_release(hooks->pending);
    free(hooks);
}

fsdpc_node *fsdpc_tensor_drop(fsdpc_tensor *t)
{
    /* acq_rel: accesses by other holders happen before the tensor is freed here. */
    if (!t || atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) != 1)
        return NULL;
    fsdpc_node *node = t->node;
    fsdpc_tensor_release(t->grad); /* a gradient has no node, so recursion ends here */
    destroy_hooks(t->hooks);
    if (t->kept)
        atomic_fetch_sub_explicit(&t->storage->kept, 1, memory_order_relaxed);
    fsdpc_storage_release(t->storage);
    free(t);
    return node;
}

void fsdpc_tensor_release(fsdpc_tensor *t)
{
    void (*release_node)(fsdpc_node *) = t ? t->release_node : NULL;
    fsdpc_node *node = fsdpc_tensor_drop(t);
    if (node)
        release_node(node);
}

fsdpc_storage *fsdpc_storage_acquire(fsdpc_storage *storage)
{
    atomic_fetch_add_explicit(&storage->refs, 1, memory_order_relaxed);
    return storage;
}

bool fsdpc_storage_try_acquire(fsdpc_storage *storage)
{
    return fsdpc_ref_try_acquire(&storage->refs);
}

void fsdpc_storage_release(fsdpc_storage *storage)
{
    if (!storage || atomic_fetch_sub_explicit(&storage->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (storage->release)
        storage->release(storage);
    free(storage);
}

size_t fsdpc_tensor_bytes(const fsdpc_tensor *t)
{
    return t->numel * fsdpc_dtype_bytes(t->dtype);
}

fsdpc_status fsdpc_tensor_check(const fsdpc_tensor *t)
{
    if (!t->storage) {
        char text[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a deferred tensor of shape %s has no values yet: shard the model that "
                          "holds it, or call materialize_()",
                          fsdpc_shape_text(t->ndim, t->shape, text));
    }
    return t->guard.check ? t->guard.check(t->guard.arg) : FSDPC_OK;
}

fsdpc_status fsdpc_tensor_check_writable(const fsdpc_tensor *t)
{
    FSDPC_TRY(fsdpc_tensor_check(t));
    if (t->storage->readonly) {
        char text[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a tensor of shape %s stands on read-only memory and cannot be written: "
                          "clone() it first",
                          fsdpc_shape_text(t->ndim, t->shape, text));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_tensor_check_write(fsdpc_tensor *t)
{
    FSDPC_TRY(fsdpc_tensor_check_writable(t));
    t->storage->version++;
    return FSDPC_OK;
}

bool fsdpc_tensor_is_exclusive(const fsdpc_tensor *t)
{
    /* acquire: pairs with the releases above, so a former holder's reads are over */
    return atomic_load_explicit(&t->refs, memory_order_acquire) == 1 && t->storage &&
           atomic_load_explicit(&t->storage->refs, memory_order_acquire) == 1;
}

int fsdpc_tensor_sharers(const fsdpc_tensor *t)
{
    /* acquire: a former holder's writes are complete. A node freed on another thread removes itself
     * from `kept` before it drops its reference, so the difference never undercounts the
     * sharers. */
    int kept = atomic_load_explicit(&t->storage->kept, memory_order_acquire);
    return atomic_load_explicit(&t->storage->refs, memory_order_acquire) - kept;
}

const char *fsdpc_shape_text(int ndim, const size_t *shape, char text[FSDPC_SHAPE_TEXT])
{
    size_t used = 0;
    text[used++] = '(';
    for (int i = 0; i < ndim && used < FSDPC_SHAPE_TEXT - 24; i++)
        used += (size_t)snprintf(text + used, FSDPC_SHAPE_TEXT - used, "%s%zu", i ? ", " : "",
                                 shape[i]);
    snprintf(text + used, FSDPC_SHAPE_TEXT - used, ndim == 1 ? ",)" : ")");
    return text;
}

bool fsdpc_shape_equal(const fsdpc_tensor *a, const fsdpc_tensor *b)
{
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}
