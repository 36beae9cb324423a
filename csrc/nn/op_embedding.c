/* Selects table rows by id, and sums rows by id; each operation is the other's gradient. A table's
 * gradient is written directly to its target. The kernel sums rows in the order in which their ids
 * occur, so the result is the same in every run. Rows of any dtype can be selected, but only floats
 * can be summed.
 */
#include "nn/op.h"

enum { SAVED_IDS };

static fsdpc_status add_rows(fsdpc_tape *tape, fsdpc_node *node, const fsdpc_tensor *dy)
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

/* Copies dy, zeroing the rows whose id is `padding`. */
static fsdpc_status without_padding(fsdpc_tape *tape, fsdpc_tensor *ids, int64_t padding,
                                    const fsdpc_tensor *dy, fsdpc_tensor **out)
{
    fsdpc_tensor *others, *column;
    size_t shape[FSDPC_MAX_DIMS] = {0};
    for (int i = 0; i < ids->ndim; i++)
        shape[i] = ids->shape[i];
    shape[ids->ndim] = 1;
    FSDPC_TRY(fsdpc_op_binary_scalar(tape, FSDPC_BINARY_NE, ids, fsdpc_scalar_whole(padding), false,
                                     &others));
    fsdpc_status st = fsdpc_tensor_view(others, ids->ndim + 1, shape, others->data, &column);
    fsdpc_tensor_release(others);
    FSDPC_TRY(st);
    st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_KEEP, dy, column, out);
    fsdpc_tensor_release(column);
    return st;
}

static fsdpc_status embedding_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const int64_t *padding = node->extra;
    fsdpc_tensor *kept;
    if (*padding < 0)
        return add_rows(tape, node, dy);
    FSDPC_TRY(without_padding(tape, node->saved[SAVED_IDS], *padding, dy, &kept));
    fsdpc_status st = add_rows(tape, node, kept);
    fsdpc_tensor_release(kept);
    return st;
}

static const fsdpc_node_ops embedding_ops = {.name = "embedding", .backward = embedding_backward};

/* y (ids->shape, dim) = rows of the table; no node. */
static fsdpc_status pick_rows(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *weight,
                              fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_ids("embedding", "ids", ids));
    FSDPC_TRY(fsdpc_tensor_check(weight));
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
    return fsdpc_op_return(fsdpc_op_kernels(tape)->embedding(&args, tape->stream), y, out);
}

static fsdpc_status record(fsdpc_tape *tape, const fsdpc_node_ops *ops, fsdpc_tensor *x,
                           fsdpc_tensor *ids, int64_t padding, fsdpc_tensor *y)
{
    fsdpc_node *node;
    if (!fsdpc_tape_wants(tape, 1, &x))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_record(tape, ops, 1, &x, y, sizeof padding, &node));
    *(int64_t *)node->extra = padding;
    fsdpc_node_save(node, SAVED_IDS, ids);
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_embedding(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *weight,
                                int64_t padding, fsdpc_tensor **out)
{
    fsdpc_tensor *y = NULL;
    FSDPC_TRY(pick_rows(tape, ids, weight, &y));
    return fsdpc_op_return(record(tape, &embedding_ops, weight, ids, padding, y), y, out);
}

static fsdpc_status scatter_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx = NULL;
    FSDPC_TRY(pick_rows(tape, node->saved[SAVED_IDS], dy, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops scatter_ops = {.name = "scatter_rows", .backward = scatter_backward};

fsdpc_status fsdpc_op_scatter_rows(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *x,
                                   size_t rows, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_ids("scatter_rows", "ids", ids));
    FSDPC_TRY(fsdpc_op_check_float("scatter_rows", "the tensor", x));
    bool fits = x->ndim == ids->ndim + 1;
    for (int i = 0; fits && i < ids->ndim; i++)
        fits = x->shape[i] == ids->shape[i];
    if (!fits)
        return fsdpc_op_fail_shapes("scatter_rows", "ids", ids, "the tensor", x,
                                    "it must have the shape of ids and one dimension more");
    fsdpc_tensor *y;
    size_t shape[] = {rows, x->shape[ids->ndim]};
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, 2, shape, &y));
    fsdpc_embedding_args args = {.dtype = x->dtype,
                                 .id_dtype = ids->dtype,
                                 .count = ids->numel,
                                 .rows = rows,
                                 .dim = shape[1],
                                 .ids = ids->data,
                                 .dout = x->data,
                                 .dtable = y->data,
                                 .dtable_dtype = x->dtype};
    fsdpc_status st = fsdpc_op_kernels(tape)->embedding_backward(&args, tape->stream);
    return fsdpc_op_return(st == FSDPC_OK ? record(tape, &scatter_ops, x, ids, -1, y) : st, y, out);
}

/* ---- places ---- */

#define PLACE_ROW(type)                                                                            \
    do {                                                                                           \
        const type *row = (const type *)index->data + i;                                           \
        for (size_t j = 0; j < n; j++) {                                                           \
            wrong |= (uint64_t)row[j] >= shape[dim];                                               \
            places[i + j] = (int64_t)((uint64_t)row[j] * strides[dim] + first + j * step);         \
        }                                                                                          \
    } while (0)

/* Computes the positions, in a tensor of this shape, of the elements that the index selects along
 * dim; returns false if an index is out of range. */
static bool place_all(const fsdpc_tensor *index, const size_t *shape, int dim, int64_t *places)
{
    size_t strides[FSDPC_MAX_DIMS], at[FSDPC_MAX_DIMS] = {0};
    int last = index->ndim - 1;
    bool wrong = false;
    fsdpc_op_strides(index->ndim, shape, strides);
    size_t n = index->shape[last];
    size_t step = dim == last ? 0 : 1;
    for (size_t i = 0; i < index->numel; i += n) {
        size_t first = 0;
        for (int d = 0; d < last; d++)
            first += d == dim ? 0 : at[d] * strides[d];
        if (index->dtype == FSDPC_I32)
            PLACE_ROW(int32_t);
        else
            PLACE_ROW(int64_t);
        for (int d = last - 1; d >= 0 && ++at[d] == index->shape[d]; d--)
            at[d] = 0;
    }
    return !wrong;
}

fsdpc_status fsdpc_op_element_places(fsdpc_tape *tape, const fsdpc_tensor *index, int ndim,
                                     const size_t *shape, int dim, fsdpc_tensor **out)
{
    const char *op = "element_places";
    *out = NULL;
    FSDPC_TRY(fsdpc_op_check_ids(op, "index", index));
    if (tape->device->remote || ndim != index->ndim || dim < 0 || dim >= ndim)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "%s: an index of %d dimensions, a shape of %d, dimension %d, on the host",
                          op, index->ndim, ndim, dim);
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_I64, ndim, index->shape, out));
    if (place_all(index, shape, dim, (*out)->data))
        return FSDPC_OK;
    fsdpc_tensor_release(*out);
    *out = NULL;
    return FSDPC_OK;
}
