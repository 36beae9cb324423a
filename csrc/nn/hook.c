/* Hooks form singly linked lists in registration order, in which they run.
 *
 * A removed hook stays in its list, without a function, until the list is freed.  Removal therefore
 * needs no pointer from the handle to the tensor, and a hook may remove itself while it runs.
 */
#include "nn/hook.h"

#include <stdlib.h>

void fsdpc_hook_release(fsdpc_hook *hook)
{
    if (!hook || atomic_fetch_sub_explicit(&hook->refs, 1, memory_order_acq_rel) != 1)
        return;
    fsdpc_hook_remove(hook);
    free(hook);
}

void fsdpc_hook_remove(fsdpc_hook *hook)
{
    if (!hook->fn)
        return;
    hook->fn = NULL;
    if (hook->release)
        hook->release(hook->arg);
}

void fsdpc_hooks_destroy(fsdpc_hook *first)
{
    while (first) {
        fsdpc_hook *next = first->next;
        fsdpc_hook_release(first);
        first = next;
    }
}

void fsdpc_leaf_hooks_destroy(fsdpc_leaf_hooks *hooks)
{
    if (!hooks)
        return;
    fsdpc_hooks_destroy(hooks->first);
    fsdpc_tensor_release(hooks->pending);
    free(hooks);
}

bool fsdpc_leaf_has_hooks(const fsdpc_tensor *leaf)
{
    if (leaf->hooks)
        for (const fsdpc_hook *hook = leaf->hooks->first; hook; hook = hook->next)
            if (hook->fn)
                return true;
    return false;
}

fsdpc_status fsdpc_hook_add(fsdpc_tape *tape, fsdpc_tensor *t, fsdpc_hook_fn fn, void *arg,
                            void (*release)(void *arg), fsdpc_hook **out)
{
    if (!t->requires_grad)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a hook needs a tensor that requires grad: set requires_grad first");
    fsdpc_hook *hook = malloc(sizeof *hook);
    if (!t->node && !t->hooks)
        t->hooks = calloc(1, sizeof *t->hooks);
    if (!hook || (!t->node && !t->hooks)) {
        free(hook);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a hook");
    }
    *hook = (fsdpc_hook){.fn = fn, .arg = arg, .release = release};
    atomic_init(&hook->refs, 2);
    fsdpc_hook **end = t->node ? &t->node->hooks : &t->hooks->first;
    while (*end)
        end = &(*end)->next;
    *end = hook;
    if (!t->node)
        tape->leaf_hooks = true;
    *out = hook;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hooks_run(fsdpc_hook *first, fsdpc_tensor **gradient_io)
{
    for (fsdpc_hook *hook = first; hook; hook = hook->next) {
        if (!hook->fn)
            continue;
        fsdpc_tensor *replacement = NULL;
        FSDPC_TRY(hook->fn(hook->arg, *gradient_io, &replacement));
        if (!replacement)
            continue;
        if (!fsdpc_shape_equal(replacement, *gradient_io) ||
            replacement->dtype != (*gradient_io)->dtype) {
            char was[FSDPC_SHAPE_TEXT], is[FSDPC_SHAPE_TEXT];
            fsdpc_status st =
                fsdpc_fail(FSDPC_ERR_SHAPE,
                           "a gradient hook returned shape %s of %s for a gradient of shape %s of "
                           "%s; return the same shape and dtype, or None",
                           fsdpc_shape_text(replacement->ndim, replacement->shape, is),
                           fsdpc_dtype_name(replacement->dtype),
                           fsdpc_shape_text((*gradient_io)->ndim, (*gradient_io)->shape, was),
                           fsdpc_dtype_name((*gradient_io)->dtype));
            fsdpc_tensor_release(replacement);
            return st;
        }
        fsdpc_tensor_release(*gradient_io);
        *gradient_io = replacement;
    }
    return FSDPC_OK;
}
