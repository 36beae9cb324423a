/* Hooks: functions that see, and may replace, a gradient.
 *
 * A hook on a non-leaf tensor runs when the tensor's gradient is complete, before the gradient is
 * passed on. A hook on a leaf runs once per backward, on the sum of that backward's contributions,
 * before the sum is added to `grad` or passed to the sink. Backward therefore first counts the
 * leaf's uses, then accumulates its gradient in `pending`.
 *
 * A hook is reference counted: the tensor (or node) and the removal handle each hold a reference.
 */
#ifndef FSDPC_NN_HOOK_H
#define FSDPC_NN_HOOK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct fsdpc_tensor fsdpc_tensor;

/* *replacement_io is NULL; the hook may set it to a replacement for the gradient, which the caller
 * then owns. */
typedef fsdpc_status (*fsdpc_hook_fn)(void *arg, fsdpc_tensor *gradient,
                                      fsdpc_tensor **replacement_io);

typedef struct fsdpc_hook {
    _Atomic int refs;
    fsdpc_hook_fn fn; /* NULL once removed */
    void *arg;
    void (*release)(void *arg);
    struct fsdpc_hook *next;
} fsdpc_hook;

typedef struct fsdpc_leaf_hooks {
    fsdpc_hook *first;
    fsdpc_tensor *pending; /* accumulated so far in the running backward */
    size_t uses;           /* edges from running backwards that have not contributed yet */
    bool listed;           /* in the running backward's list of leaves to flush */
} fsdpc_leaf_hooks;

/* Appends a hook to a list. On failure, the caller keeps ownership of `arg`. */
fsdpc_status fsdpc_hook_append(fsdpc_hook **list, fsdpc_hook_fn fn, void *arg,
                               void (*release)(void *arg), fsdpc_hook **out);
void fsdpc_hook_remove(fsdpc_hook *hook);  /* it will not run again; may be called twice */
void fsdpc_hook_release(fsdpc_hook *hook); /* releases a handle's reference; may be NULL */
void fsdpc_hooks_destroy(fsdpc_hook *first);

#endif
