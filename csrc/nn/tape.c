/* Records operations and accumulates the gradients that their backwards compute.
 *
 * The gradient of an intermediate tensor accumulates in its node. The first contribution is stored
 * without a copy and shared with its other holders. The second is added in place if the memory has
 * no other holder; otherwise, the sum is written to new memory. A leaf's first gradient is copied
 * unless its memory is exclusive, because the user may keep it.
 *
 * Operations that can write their gradient anywhere request a target (a reduce buffer, a leaf's
 * `grad` or the node's gradient) and learn whether to add to it. This saves a temporary and a pass
 * over memory for each of a model's weights.
 *
 * nn/backward.c implements execution order, leaf hooks and nesting.
 */
#include "nn/tape.h"

#include <assert.h>
#include <stdlib.h>

#include "nn/frame.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_tape_create(fsdpc_device *device, fsdpc_stream *stream, fsdpc_tape **out)
{
    fsdpc_tape *tape = calloc(1, sizeof *tape);
    if (!tape)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a tape");
    tape->device = device;
    tape->stream = stream;
    tape->grad_enabled = true;
    tape->recomputing = FSDPC_NOT_RECOMPUTING;
    *out = tape;
    return FSDPC_OK;
}

void fsdpc_tape_destroy(fsdpc_tape *tape)
{
    if (!tape)
        return;
    fsdpc_device_free(tape->device, tape->dropout_key);
    free(tape->ends);
    free(tape);
}

bool fsdpc_tape_wants(const fsdpc_tape *tape, int n, fsdpc_tensor *const *inputs)
{
    if (tape->grad_enabled)
        for (int i = 0; i < n; i++)
            if (inputs[i] && inputs[i]->requires_grad)
                return true;
    return false;
}

fsdpc_status fsdpc_tape_record(fsdpc_tape *tape, const fsdpc_node_ops *ops, int n,
                               fsdpc_tensor *const *inputs, fsdpc_tensor *out,
                               fsdpc_node **node_out)
{
    fsdpc_node *node = calloc(1, sizeof *node);
    if (!node)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a node of the tape");
    node->inputs = node->inline_inputs;
    if (n > FSDPC_NODE_MAX_INPUTS) {
        node->inputs = calloc((size_t)n, sizeof *node->inputs);
        if (!node->inputs) {
            free(node);
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a node of the tape");
        }
    }
    atomic_init(&node->refs, 1);
    node->ops = ops;
    node->number = atomic_fetch_add_explicit(&tape->next_number, 1, memory_order_relaxed);
    node->n_inputs = n;
    for (int i = 0; i < n; i++) {
        if (!inputs[i] || !inputs[i]->requires_grad)
            continue;
        if (inputs[i]->node)
            node->inputs[i].node = fsdpc_node_acquire(inputs[i]->node);
        else
            node->inputs[i].leaf = fsdpc_tensor_acquire(inputs[i]);
    }
    node->dtype = out->dtype;
    node->ndim = out->ndim;
    for (int i = 0; i < out->ndim; i++)
        node->shape[i] = out->shape[i];
    assert(!out->node && !out->requires_grad);
    out->node = node;
    out->release_node = fsdpc_node_release;
    out->requires_grad = true;
    *node_out = node;
    return FSDPC_OK;
}

/* ---- gradients ---- */

/* Returns whether a leaf needs a gradient; as in PyTorch, a leaf that was frozen after forward
 * needs one only for its hooks. */
static bool takes(const fsdpc_tensor *leaf)
{
    return leaf->requires_grad || fsdpc_tensor_has_hooks(leaf);
}

bool fsdpc_edge_wanted(const fsdpc_edge *edge)
{
    return edge->node || (edge->leaf && takes(edge->leaf));
}

static fsdpc_status clone_as(fsdpc_tape *tape, const fsdpc_tensor *t, fsdpc_dtype dtype,
                             fsdpc_tensor **out)
{
    fsdpc_tensor *copy;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, t->ndim, t->shape, &copy));
    fsdpc_status st = fsdpc_flat_cast(copy->data, dtype, t->data, t->dtype, t->numel, tape->stream);
    if (st != FSDPC_OK) {
        fsdpc_tensor_release(copy);
        return st;
    }
    *out = copy;
    return FSDPC_OK;
}

/* Ensures that no other tensor reads the memory of *slot, so that it can be added to in place. */
static fsdpc_status own_slot(fsdpc_tape *tape, fsdpc_tensor **slot)
{
    if (fsdpc_tensor_is_exclusive(*slot))
        return FSDPC_OK;
    fsdpc_tensor *copy;
    FSDPC_TRY(clone_as(tape, *slot, (*slot)->dtype, &copy));
    fsdpc_tensor_release(*slot);
    *slot = copy;
    return FSDPC_OK;
}

static fsdpc_status add_to(fsdpc_tape *tape, fsdpc_tensor *sum, const fsdpc_tensor *gradient)
{
    return fsdpc_flat_accumulate(sum->data, sum->dtype, gradient->data, gradient->dtype,
                                 gradient->numel, tape->stream);
}

static fsdpc_status give_slot(fsdpc_tape *tape, fsdpc_tensor **slot, fsdpc_tensor *gradient)
{
    if (!*slot) {
        *slot = fsdpc_tensor_acquire(gradient);
        return FSDPC_OK;
    }
    FSDPC_TRY(own_slot(tape, slot));
    return add_to(tape, *slot, gradient);
}

fsdpc_status fsdpc_target_write(const fsdpc_tape *tape, const fsdpc_grad_target *target,
                                const void *data, fsdpc_dtype dtype, size_t numel)
{
    return (target->accumulate ? fsdpc_flat_accumulate : fsdpc_flat_cast)(
        target->data, target->dtype, data, dtype, numel, tape->stream);
}

static fsdpc_status give_sink(fsdpc_tape *tape, fsdpc_grad_sink *sink, fsdpc_tensor *gradient)
{
    fsdpc_grad_target target;
    FSDPC_TRY(sink->target(sink->arg, &target));
    return fsdpc_target_write(tape, &target, gradient->data, gradient->dtype, gradient->numel);
}

fsdpc_status fsdpc_leaf_give(fsdpc_tape *tape, fsdpc_tensor *leaf, fsdpc_tensor *gradient)
{
    if (!leaf->requires_grad)
        return FSDPC_OK;
    if (leaf->sink.target)
        return give_sink(tape, &leaf->sink, gradient);
    if (!leaf->grad) {
        if (!fsdpc_tensor_is_exclusive(gradient) || gradient->dtype != leaf->dtype)
            return clone_as(tape, gradient, leaf->dtype, &leaf->grad);
        leaf->grad = fsdpc_tensor_acquire(gradient);
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_tensor_check_write(leaf->grad));
    return add_to(tape, leaf->grad, gradient);
}

fsdpc_status fsdpc_edge_give(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *gradient)
{
    if (edge->leaf) {
        if (fsdpc_tensor_has_hooks(edge->leaf))
            return give_slot(tape, &edge->leaf->hooks->pending, gradient);
        return fsdpc_leaf_give(tape, edge->leaf, gradient);
    }
    assert(edge->node && edge->node->dtype == gradient->dtype);
    if (!edge->node->grad)
        FSDPC_TRY(fsdpc_frame_push(tape->frame, edge->node));
    return give_slot(tape, &edge->node->grad, gradient);
}

/* Returns the tensor in *slot as a target, creating it if it does not exist. */
static fsdpc_status slot_target(fsdpc_tape *tape, fsdpc_tensor **slot, bool exclusive,
                                fsdpc_dtype dtype, int ndim, const size_t *shape,
                                fsdpc_grad_target *out)
{
    bool accumulate = *slot != NULL;
    if (!accumulate)
        FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, ndim, shape, slot));
    else if (exclusive)
        FSDPC_TRY(own_slot(tape, slot));
    else
        FSDPC_TRY(fsdpc_tensor_check_write(*slot));
    *out = (fsdpc_grad_target){(*slot)->data, (*slot)->dtype, accumulate};
    return FSDPC_OK;
}

fsdpc_status fsdpc_edge_target(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_dtype dtype,
                               int ndim, const size_t *shape, fsdpc_grad_target *out)
{
    fsdpc_tensor *leaf = edge->leaf;
    if (!leaf) {
        if (!edge->node->grad)
            FSDPC_TRY(fsdpc_frame_push(tape->frame, edge->node));
        return slot_target(tape, &edge->node->grad, true, dtype, ndim, shape, out);
    }
    if (fsdpc_tensor_has_hooks(leaf))
        return slot_target(tape, &leaf->hooks->pending, true, dtype, ndim, shape, out);
    if (!leaf->requires_grad) {
        fsdpc_tensor_release(tape->unwanted);
        tape->unwanted = NULL;
        return slot_target(tape, &tape->unwanted, true, dtype, ndim, shape, out);
    }
    if (leaf->sink.target)
        return leaf->sink.target(leaf->sink.arg, out);
    return slot_target(tape, &leaf->grad, false, dtype, ndim, shape, out);
}

/* ---- boundaries ---- */

typedef struct boundary_extra {
    fsdpc_boundary_fn fn;
    void *arg;
    void (*release)(void *arg);
} boundary_extra;

static fsdpc_status boundary_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    boundary_extra *extra = node->extra;
    FSDPC_TRY(extra->fn(extra->arg));
    return fsdpc_edge_wanted(&node->inputs[0]) ? fsdpc_edge_give(tape, &node->inputs[0], dy)
                                               : FSDPC_OK;
}

static void boundary_release(fsdpc_node *node)
{
    boundary_extra *extra = node->extra;
    if (extra->release)
        extra->release(extra->arg);
    free(extra);
}

static const fsdpc_node_ops boundary_ops = {
    .name = "boundary",
    .backward = boundary_backward,
    .release = boundary_release,
};

fsdpc_status fsdpc_tape_boundary(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_boundary_fn fn, void *arg,
                                 void (*release)(void *arg), fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_detach(x, &y));
    if (!fsdpc_tape_wants(tape, 1, &x)) {
        if (release)
            release(arg);
        *out = y;
        return FSDPC_OK;
    }
    fsdpc_status st;
    fsdpc_node *node = NULL;
    boundary_extra *extra = malloc(sizeof *extra);
    if (!extra) {
        st = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a boundary");
        goto release_y;
    }
    FSDPC_TRY_GOTO(st, fsdpc_tape_record(tape, &boundary_ops, 1, &x, y, &node), free_extra);
    *extra = (boundary_extra){fn, arg, release};
    node->extra = extra;
    *out = y;
    return FSDPC_OK;
free_extra:
    free(extra);
release_y:
    fsdpc_tensor_release(y);
    return st;
}
