/* Nodes are created by fsdpc_tape_record and kept alive by their output tensors, by the edges of
 * later nodes, and by a running backward.
 *
 * Dropping the last reference to the loss frees the whole graph. Freeing it recursively would
 * require a stack as deep as the graph. Nodes whose count falls to zero are therefore put on a list
 * (linked through the nodes themselves) and freed one by one.
 */
#include "nn/node.h"

#include <stdlib.h>

fsdpc_node *fsdpc_node_acquire(fsdpc_node *node)
{
    if (node)
        atomic_fetch_add_explicit(&node->refs, 1, memory_order_relaxed);
    return node;
}

/* Releases one reference; when the count reaches zero, adds the node to the list. */
static void node_drop(fsdpc_node *node, fsdpc_node **doomed)
{
    if (!node || atomic_fetch_sub_explicit(&node->refs, 1, memory_order_acq_rel) != 1)
        return;
    node->next = *doomed;
    *doomed = node;
}

static void free_saved(fsdpc_node *node, fsdpc_node **doomed)
{
    if (node->set)
        fsdpc_saved_forget(node->set, node);
    node->set = NULL;
    for (int i = 0; i < FSDPC_NODE_MAX_SAVED; i++) {
        if (!node->saved[i])
            continue;
        node_drop(fsdpc_tensor_drop(node->saved[i]), doomed);
        node->saved[i] = NULL;
        node->freed = true;
    }
    if (!node->extra)
        return;
    if (node->ops->release)
        node->ops->release(node);
    else
        free(node->extra);
    node->extra = NULL;
    node->freed = true;
}

static void node_destroy(fsdpc_node *node, fsdpc_node **doomed)
{
    free_saved(node, doomed);
    for (int i = 0; i < node->n_inputs; i++) {
        node_drop(node->inputs[i].node, doomed);
        node_drop(fsdpc_tensor_drop(node->inputs[i].leaf), doomed);
    }
    if (node->inputs != node->inline_inputs)
        free(node->inputs);
    fsdpc_hooks_destroy(node->hooks);
    node_drop(fsdpc_tensor_drop(node->grad), doomed);
    free(node);
}

static void destroy_all(fsdpc_node *doomed)
{
    while (doomed) {
        fsdpc_node *node = doomed;
        doomed = node->next;
        node_destroy(node, &doomed);
    }
}

void fsdpc_node_release(fsdpc_node *node)
{
    fsdpc_node *doomed = NULL;
    node_drop(node, &doomed);
    destroy_all(doomed);
}

void fsdpc_node_free(fsdpc_node *node)
{
    fsdpc_node *doomed = NULL;
    free_saved(node, &doomed);
    destroy_all(doomed);
}

void fsdpc_node_save(fsdpc_node *node, int slot, fsdpc_tensor *t)
{
    node->saved[slot] = fsdpc_tensor_acquire(t);
    if (t && t->storage)
        node->saved_version[slot] = t->storage->version;
}

fsdpc_status fsdpc_node_save_output(fsdpc_node *node, int slot, const fsdpc_tensor *out)
{
    fsdpc_tensor *view;
    FSDPC_TRY(fsdpc_tensor_detach(out, &view));
    view->kept = true;
    atomic_fetch_add_explicit(&view->storage->kept, 1, memory_order_relaxed);
    node->saved[slot] = view;
    node->saved_version[slot] = view->storage->version;
    return FSDPC_OK;
}

fsdpc_status fsdpc_node_check(const fsdpc_node *node)
{
    if (node->freed)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "backward through '%s' a second time, after its saved tensors were "
                          "freed: pass retain_graph=True to the first backward",
                          node->ops->name);
    if (node->set)
        FSDPC_TRY(fsdpc_saved_need(node->set));
    for (int i = 0; i < FSDPC_NODE_MAX_SAVED; i++) {
        const fsdpc_tensor *t = node->saved[i];
        if (!t)
            continue;
        FSDPC_TRY(fsdpc_tensor_check(t));
        if (t->storage->version != node->saved_version[i]) {
            char text[FSDPC_SHAPE_TEXT];
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "a tensor of shape %s that '%s' needs for its backward was changed "
                              "in place since: change a clone(), or write x = x + y for x += y",
                              fsdpc_shape_text(t->ndim, t->shape, text), node->ops->name);
        }
    }
    return FSDPC_OK;
}
