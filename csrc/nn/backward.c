/* Runs the tape backwards.
 *
 * A frame represents one call of backward: a heap of the nodes that have a gradient, highest number
 * first. A node's consumers have higher numbers than the node, so its gradient is complete when the
 * node is popped. Frames nest (a recomputation runs one inside another); nodes are pushed to the
 * innermost frame.
 *
 * Leaves with hooks need to know when their last contribution has arrived. If any leaf has ever
 * had a hook, a frame first walks the graph and counts the edges to every such leaf. After a node
 * has run, its edges are subtracted from the count. All frames share one count, so a hook does not
 * fire in a recomputation while the enclosing backward still uses the leaf. When the outermost
 * frame ends, it flushes the leaves with uses that never received a gradient.
 *
 * If a frame fails, gradients in its heap are dropped; leaves keep the gradients that they already
 * have.
 */
#include "nn/tape.h"

#include <stdlib.h>

#include "nn/frame.h"
#include "ops/flat_ops.h"

typedef struct fsdpc_tape_end {
    fsdpc_status (*fn)(void *arg, fsdpc_status status);
    void *arg;
} fsdpc_tape_end;

/* ---- hooks ---- */

/* Runs all hooks in a list; if a hook returns a replacement, stores it in *gradient_io, which owns
 * a reference. */
static fsdpc_status run_hooks(fsdpc_hook *first, fsdpc_tensor **gradient_io)
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

fsdpc_status fsdpc_tape_add_hook(fsdpc_tape *tape, fsdpc_tensor *t, fsdpc_hook_fn fn, void *arg,
                                 void (*release)(void *arg), fsdpc_hook **out)
{
    if (!t->requires_grad)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a hook needs a tensor that requires grad: set requires_grad first");
    if (t->node)
        return fsdpc_hook_append(&t->node->hooks, fn, arg, release, out);
    if (!t->hooks)
        t->hooks = calloc(1, sizeof *t->hooks);
    if (!t->hooks)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a hook");
    FSDPC_TRY(fsdpc_hook_append(&t->hooks->first, fn, arg, release, out));
    tape->leaf_hooks = true;
    return FSDPC_OK;
}

static fsdpc_status count_leaf(fsdpc_frame *frame, fsdpc_tensor *leaf)
{
    leaf->hooks->uses++;
    if (leaf->hooks->listed)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_frame_grow(&frame->hooked, frame->n_hooked, &frame->hooked_capacity,
                               sizeof *frame->hooked));
    frame->hooked[frame->n_hooked++] = fsdpc_tensor_acquire(leaf);
    leaf->hooks->listed = true;
    return FSDPC_OK;
}

/* Walks the graph below the roots and counts the edges to leaves with hooks. */
static fsdpc_status count_uses(fsdpc_tape *tape, int n, fsdpc_tensor *const *roots)
{
    fsdpc_status st = FSDPC_OK;
    fsdpc_node **stack = NULL;
    size_t top = 0, capacity = 0;
    uint64_t mark = ++tape->next_mark;
    for (int i = 0; i < n; i++) {
        if (roots[i]->node && roots[i]->node->mark != mark) {
            FSDPC_TRY_GOTO(st, fsdpc_frame_grow(&stack, top, &capacity, sizeof *stack), free_stack);
            roots[i]->node->mark = mark;
            stack[top++] = roots[i]->node;
        }
    }
    while (top) {
        fsdpc_node *node = stack[--top];
        for (int i = 0; i < node->n_inputs; i++) {
            const fsdpc_edge *edge = &node->inputs[i];
            if (edge->leaf && fsdpc_tensor_has_hooks(edge->leaf))
                FSDPC_TRY_GOTO(st, count_leaf(tape->frame, edge->leaf), free_stack);
            if (!edge->node || edge->node->mark == mark)
                continue;
            FSDPC_TRY_GOTO(st, fsdpc_frame_grow(&stack, top, &capacity, sizeof *stack), free_stack);
            edge->node->mark = mark;
            stack[top++] = edge->node;
        }
    }
free_stack:
    free(stack);
    return st;
}

static fsdpc_status flush_leaf(fsdpc_tape *tape, fsdpc_tensor *leaf)
{
    fsdpc_tensor *gradient = leaf->hooks->pending;
    leaf->hooks->pending = NULL;
    if (!gradient)
        return FSDPC_OK;
    fsdpc_status st = run_hooks(leaf->hooks->first, &gradient);
    if (st == FSDPC_OK)
        st = fsdpc_leaf_give(tape, leaf, gradient);
    fsdpc_tensor_release(gradient);
    return st;
}

static fsdpc_status settle_leaves(fsdpc_tape *tape, const fsdpc_node *node)
{
    for (int i = 0; i < node->n_inputs; i++) {
        fsdpc_tensor *leaf = node->inputs[i].leaf;
        if (leaf && leaf->hooks && leaf->hooks->uses && --leaf->hooks->uses == 0)
            FSDPC_TRY(flush_leaf(tape, leaf));
    }
    return FSDPC_OK;
}

/* Ends a frame; only the outermost frame flushes the remaining leaves. */
static fsdpc_status finish_leaves(fsdpc_tape *tape, fsdpc_frame *frame, fsdpc_status st)
{
    for (size_t i = 0; i < frame->n_hooked; i++) {
        fsdpc_tensor *leaf = frame->hooked[i];
        leaf->hooks->listed = false;
        if (frame->outer && leaf->hooks->uses && st == FSDPC_OK &&
            count_leaf(frame->outer, leaf) == FSDPC_OK) {
            leaf->hooks->uses--; /* already counted */
        } else {
            leaf->hooks->uses = 0;
            if (st == FSDPC_OK)
                st = flush_leaf(tape, leaf);
            fsdpc_tensor_release(leaf->hooks->pending);
            leaf->hooks->pending = NULL;
        }
        fsdpc_tensor_release(leaf);
    }
    free(frame->hooked);
    return st;
}

/* ---- running ---- */

static fsdpc_status run_node(fsdpc_tape *tape, fsdpc_node *node)
{
    fsdpc_tensor *gradient = node->grad;
    node->grad = NULL;
    fsdpc_status st = fsdpc_node_check(node);
    if (st == FSDPC_OK && node->hooks)
        st = run_hooks(node->hooks, &gradient);
    if (st == FSDPC_OK)
        st = node->ops->backward(tape, node, gradient);
    fsdpc_tensor_release(gradient);
    if (st == FSDPC_OK && tape->leaf_hooks)
        st = settle_leaves(tape, node);
    if (st == FSDPC_OK && !tape->retain_graph)
        fsdpc_node_free(node);
    return st;
}

static fsdpc_status one_like(fsdpc_tape *tape, const fsdpc_tensor *root, fsdpc_tensor **out)
{
    if (root->numel != 1) {
        char text[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "backward begins at a scalar unless it is given a gradient, and this "
                          "tensor has shape %s: sum it, or pass gradient=",
                          fsdpc_shape_text(root->ndim, root->shape, text));
    }
    fsdpc_tensor *one;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, root->dtype, root->ndim, root->shape, &one));
    fsdpc_status st = fsdpc_flat_init(
        &(fsdpc_init_args){
            .dst = one->data, .dtype = one->dtype, .numel = 1, .kind = FSDPC_INIT_CONSTANT, .a = 1},
        tape->stream);
    if (st != FSDPC_OK) {
        fsdpc_tensor_release(one);
        return st;
    }
    *out = one;
    return FSDPC_OK;
}

static fsdpc_status start_root(fsdpc_tape *tape, fsdpc_tensor *root, fsdpc_tensor *given)
{
    fsdpc_tensor *gradient = NULL;
    if (!given) {
        FSDPC_TRY(one_like(tape, root, &gradient));
    } else {
        if (!fsdpc_shape_equal(given, root) || given->dtype != root->dtype) {
            char a[FSDPC_SHAPE_TEXT], b[FSDPC_SHAPE_TEXT];
            return fsdpc_fail(
                FSDPC_ERR_SHAPE,
                "backward: a gradient of shape %s of %s was given for a tensor of "
                "shape %s of %s; they must be the same",
                fsdpc_shape_text(given->ndim, given->shape, a), fsdpc_dtype_name(given->dtype),
                fsdpc_shape_text(root->ndim, root->shape, b), fsdpc_dtype_name(root->dtype));
        }
        FSDPC_TRY(fsdpc_tensor_check(given));
        gradient = fsdpc_tensor_acquire(given);
    }
    fsdpc_edge edge = {.node = root->node, .leaf = root->node ? NULL : root};
    fsdpc_status st = FSDPC_OK;
    if (edge.leaf && fsdpc_tensor_has_hooks(root))
        st = count_leaf(tape->frame, root);
    if (st == FSDPC_OK)
        st = fsdpc_edge_give(tape, &edge, gradient);
    fsdpc_tensor_release(gradient);
    return st;
}

static fsdpc_status run_frame(fsdpc_tape *tape, int n, fsdpc_tensor *const *roots,
                              fsdpc_tensor *const *grads)
{
    fsdpc_frame *frame = tape->frame;
    if (tape->leaf_hooks)
        FSDPC_TRY(count_uses(tape, n, roots));
    for (int i = 0; i < n; i++)
        FSDPC_TRY(start_root(tape, roots[i], grads ? grads[i] : NULL));
    fsdpc_status st = FSDPC_OK;
    while (st == FSDPC_OK && frame->n) {
        fsdpc_node *node = fsdpc_frame_pop(frame);
        st = run_node(tape, node);
        fsdpc_node_release(node);
    }
    return st;
}

static fsdpc_status run_ends(fsdpc_tape *tape, fsdpc_status st)
{
    /* An end function may register another one, so the array may grow and move. */
    for (size_t i = 0; i < tape->n_ends; i++) {
        fsdpc_tape_end end = tape->ends[i];
        FSDPC_KEEP_FIRST(st, end.fn(end.arg, st));
    }
    tape->n_ends = 0;
    return st;
}

fsdpc_status fsdpc_tape_backward_many(fsdpc_tape *tape, int n, fsdpc_tensor *const *roots,
                                      fsdpc_tensor *const *grads, bool retain_graph)
{
    if (tape->backward_depth && !pthread_equal(tape->backward_thread, pthread_self()))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "another thread is running backward: one thread at a time may");
    for (int i = 0; i < n; i++)
        if (!roots[i]->requires_grad)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "backward from a tensor that does not require grad: nothing it was "
                              "computed from requires grad, or it was made inside no_grad");
    fsdpc_frame frame = {.outer = tape->frame};
    bool outer_retain = tape->retain_graph, outer_enabled = tape->grad_enabled;
    tape->backward_thread = pthread_self();
    tape->backward_depth++;
    tape->frame = &frame;
    tape->retain_graph = retain_graph;
    tape->grad_enabled = false;
    fsdpc_status st = run_frame(tape, n, roots, grads);
    while (frame.n) { /* after an error */
        fsdpc_node *node = fsdpc_frame_pop(&frame);
        fsdpc_tensor_release(node->grad);
        node->grad = NULL;
        fsdpc_node_release(node);
    }
    free(frame.heap);
    st = finish_leaves(tape, &frame, st);
    tape->frame = frame.outer;
    tape->retain_graph = outer_retain;
    tape->grad_enabled = outer_enabled;
    /* End functions run inside the backward that they end, so they may make calls that require a
     * running backward. */
    if (tape->backward_depth == 1) {
        st = run_ends(tape, st);
        fsdpc_tensor_release(tape->unwanted);
        tape->unwanted = NULL;
    }
    tape->backward_depth--;
    return st;
}

fsdpc_status fsdpc_tape_backward(fsdpc_tape *tape, fsdpc_tensor *root, fsdpc_tensor *grad,
                                 bool retain_graph)
{
    return fsdpc_tape_backward_many(tape, 1, &root, &grad, retain_graph);
}

fsdpc_status fsdpc_tape_at_end(fsdpc_tape *tape, fsdpc_status (*fn)(void *arg, fsdpc_status status),
                               void *arg)
{
    if (!tape->backward_depth)
        return fsdpc_fail(FSDPC_ERR_STATE, "no backward is running whose end could be waited for");
    for (size_t i = 0; i < tape->n_ends; i++)
        if (tape->ends[i].fn == fn && tape->ends[i].arg == arg)
            return FSDPC_OK;
    FSDPC_TRY(
        fsdpc_frame_grow(&tape->ends, tape->n_ends, &tape->ends_capacity, sizeof *tape->ends));
    tape->ends[tape->n_ends++] = (fsdpc_tape_end){fn, arg};
    return FSDPC_OK;
}
