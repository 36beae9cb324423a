/* Operations whose backward the caller supplies, such as recomputation and Python functions.
 *
 * A node has one output, but an operation here may have several. A hidden node therefore holds the
 * edges to the inputs, and each output gets a node whose only edge leads to the hidden node. Each
 * output's node stores its gradient in a shared array and passes an empty gradient to the hidden
 * node. The hidden node is created first, so its backward runs after those of all output nodes.
 */
#include "nn/op.h"

#include <stdlib.h>

typedef struct custom_extra {
    const fsdpc_custom_ops *ops;
    void *arg;
    int n_out;
    fsdpc_tensor *dys[]; /* n_out, owned */
} custom_extra;

typedef struct output_extra {
    int index;
} output_extra;

static fsdpc_status output_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_node *hidden = node->inputs[0].node;
    FSDPC_TRY(fsdpc_node_check(hidden));
    custom_extra *extra = hidden->extra;
    int index = ((const output_extra *)node->extra)->index;
    fsdpc_tensor_release(extra->dys[index]);
    extra->dys[index] = fsdpc_tensor_acquire(dy);
    size_t none = 0;
    fsdpc_tensor *empty;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &none, &empty));
    return fsdpc_op_give_owned(tape, &node->inputs[0], empty, FSDPC_OK);
}

static const fsdpc_node_ops output_ops = {.name = "custom", .backward = output_backward};

static fsdpc_status give_all(fsdpc_tape *tape, fsdpc_node *node, const char *name,
                             fsdpc_tensor **dxs)
{
    for (int i = 0; i < node->n_inputs; i++) {
        const fsdpc_edge *edge = &node->inputs[i];
        if (!dxs[i] || !fsdpc_edge_wanted(edge))
            continue;
        bool same = dxs[i]->ndim == fsdpc_edge_ndim(edge);
        for (int d = 0; same && d < dxs[i]->ndim; d++)
            same = dxs[i]->shape[d] == fsdpc_edge_shape(edge)[d];
        if (!same || dxs[i]->dtype != fsdpc_edge_dtype(edge)) {
            char is[FSDPC_SHAPE_TEXT], want[FSDPC_SHAPE_TEXT];
            return fsdpc_fail(
                FSDPC_ERR_SHAPE,
                "%s: the gradient of input %d has shape %s of %s, the input has shape %s of %s",
                name, i, fsdpc_shape_text(dxs[i]->ndim, dxs[i]->shape, is),
                fsdpc_dtype_name(dxs[i]->dtype),
                fsdpc_shape_text(fsdpc_edge_ndim(edge), fsdpc_edge_shape(edge), want),
                fsdpc_dtype_name(fsdpc_edge_dtype(edge)));
        }
        FSDPC_TRY(fsdpc_tensor_check(dxs[i]));
        FSDPC_TRY(fsdpc_edge_give(tape, edge, dxs[i]));
    }
    return FSDPC_OK;
}

static void drop_dys(custom_extra *extra)
{
    for (int i = 0; i < extra->n_out; i++) {
        fsdpc_tensor_release(extra->dys[i]);
        extra->dys[i] = NULL;
    }
}

static fsdpc_status hidden_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    (void)dy;
    custom_extra *extra = node->extra;
    size_t n = (size_t)node->n_inputs;
    fsdpc_tensor **dxs = calloc(n + 1, sizeof *dxs);
    bool *wanted = calloc(n + 1, sizeof *wanted);
    fsdpc_status st;
    if (!dxs || !wanted) {
        st = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the gradients of %zu inputs", n);
        goto free_lists;
    }
    for (size_t i = 0; i < n; i++)
        wanted[i] = fsdpc_edge_wanted(&node->inputs[i]);
    st = extra->ops->backward(extra->arg, extra->n_out, extra->dys, node->n_inputs, wanted, dxs);
    if (st == FSDPC_OK)
        st = give_all(tape, node, extra->ops->name, dxs);
    for (size_t i = 0; i < n; i++)
        fsdpc_tensor_release(dxs[i]);
free_lists:
    drop_dys(extra);
    free(dxs);
    free(wanted);
    return st;
}

static void hidden_release(fsdpc_node *node)
{
    custom_extra *extra = node->extra;
    drop_dys(extra);
    if (extra->ops && extra->ops->release)
        extra->ops->release(extra->arg);
    free(extra);
}

static const fsdpc_node_ops hidden_ops = {
    .name = "custom",
    .backward = hidden_backward,
    .release = hidden_release,
};

/* Creates a temporary tensor that represents the hidden node while the edges to it are created. */
static fsdpc_status make_hidden(fsdpc_tape *tape, int n_in, fsdpc_tensor *const *inputs, int n_out,
                                fsdpc_tensor **out)
{
    size_t none = 0;
    fsdpc_tensor *t;
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_tensor_create_deferred(FSDPC_F32, 1, &none, &t));
    fsdpc_status st =
        fsdpc_op_record(tape, &hidden_ops, n_in, inputs, t,
                        sizeof(custom_extra) + (size_t)n_out * sizeof(fsdpc_tensor *), &node);
    if (st == FSDPC_OK)
        ((custom_extra *)node->extra)->n_out = n_out;
    return fsdpc_op_return(st, t, out);
}

fsdpc_status fsdpc_op_custom(fsdpc_tape *tape, const fsdpc_custom_ops *ops, void *arg,
                             const fsdpc_saved_list *saved, int n_in, fsdpc_tensor *const *inputs,
                             int n_out, fsdpc_tensor *const *outputs)
{
    if (!(saved && tape->grad_enabled) && !fsdpc_tape_wants(tape, n_in, inputs)) {
        if (ops->release)
            ops->release(arg);
        return FSDPC_OK;
    }
    for (int i = 0; i < n_out; i++)
        if (outputs[i]->node || outputs[i]->requires_grad)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "%s: output %d is on the tape already; compute outputs inside "
                              "no_grad",
                              ops->name, i);
    fsdpc_tensor *hidden;
    FSDPC_TRY(make_hidden(tape, n_in, inputs, n_out, &hidden));
    fsdpc_status st = FSDPC_OK;
    for (int i = 0; i < n_out && st == FSDPC_OK; i++) {
        if (!fsdpc_dtype_is_float(outputs[i]->dtype))
            continue;
        fsdpc_node *node;
        st =
            fsdpc_op_record(tape, &output_ops, 1, &hidden, outputs[i], sizeof(output_extra), &node);
        if (st == FSDPC_OK)
            ((output_extra *)node->extra)->index = i;
    }
    if (st == FSDPC_OK) {
        custom_extra *extra = hidden->node->extra;
        extra->ops = ops;
        extra->arg = arg;
        for (int i = 0; saved && i < saved->n; i++)
            fsdpc_node_save(hidden->node, i, saved->t[i]);
    }
    fsdpc_tensor_release(hidden);
    return st;
}
