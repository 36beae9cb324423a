/* Hooks are kept in singly linked lists and run in the order in which they were registered.
 *
 * A removed hook loses its function but stays in its list until the list is freed. Removal
 * therefore needs no pointer from the handle to the tensor, and a hook may remove itself while it
 * runs.
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

fsdpc_status fsdpc_hook_append(fsdpc_hook **list, fsdpc_hook_fn fn, void *arg,
                               void (*release)(void *arg), fsdpc_hook **out)
{
    fsdpc_hook *hook = malloc(sizeof *hook);
    if (!hook)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a hook");
    *hook = (fsdpc_hook){.fn = fn, .arg = arg, .release = release};
    atomic_init(&hook->refs, 2);
    while (*list)
        list = &(*list)->next;
    *list = hook;
    *out = hook;
    return FSDPC_OK;
}
