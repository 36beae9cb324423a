/* Embedding: rows of a table picked by ids.  The gradient of the table is written straight to its
 * target; the kernel sums rows in the order of ids, so the result is the same on every run.
 */
#include "nn/op.h"

enum { SAVED_IDS };

static fsdpc_status embedding_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_edge *edge = &node->inputs[0];
    const fsdpc_tensor *ids = node->saved[SAVED_IDS];
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    fsdpc_embedding_args args = {.dtype = dy->dtype,
                                 .id_dtype = ids->dtype,
                                 .count = ids->numel,
                                 .rows = fsdpc_edge_shape(edge)[0],
                                 .dim = fsdpc_edge_shape(edge)[1],
                                 .ids = ids->data,
                                 .dout = dy->data,
                                 .dtable = target.data,
                                 .dtable_dtype = target.dtype,
                                 .accumulate = target.accumulate};
    return fsdpc_op_kernels(tape)->embedding_backward(&args, tape->stream);
}

static const fsdpc_node_ops embedding_ops = {.name = "embedding", .backward = embedding_backward};

fsdpc_status fsdpc_op_embedding(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *weight,
                                fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_ids("embedding", "ids", ids));
    FSDPC_TRY(fsdpc_op_check_float("embedding", "weight", weight));
    if (weight->ndim != 2 || ids->ndim + 1 > FSDPC_MAX_DIMS)
        return fsdpc_op_fail_shapes("embedding", "ids", ids, "weight", weight,
                                    "weight must be (rows, dim)");
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < ids->ndim; i++)
        shape[i] = ids->shape[i];
    shape[ids->ndim] = weight->shape[1];
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, weight->dtype, ids->ndim + 1, shape, &y));
    fsdpc_embedding_args args = {.dtype = weight->dtype,
                                 .id_dtype = ids->dtype,
                                 .count = ids->numel,
                                 .rows = weight->shape[0],
                                 .dim = weight->shape[1],
                                 .ids = ids->data,
                                 .table = weight->data,
                                 .out = y->data};
    fsdpc_status st = fsdpc_op_kernels(tape)->embedding(&args, tape->stream);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &weight)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &embedding_ops, 1, &weight, y, 0, &node);
        if (st == FSDPC_OK)
            fsdpc_node_save(node, SAVED_IDS, ids);
    }
    return fsdpc_op_return(st, y, out);
}
