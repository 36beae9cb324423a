/* In-place writes to a tensor.
 *
 * A write changes memory, but a node belongs to a tensor. The written memory therefore gets a new
 * tensor, whose node connects the previous contents and the value. Tensors saved for a backward
 * keep the old node, so the graph stays acyclic; the storage's version tells their nodes that the
 * memory has changed.
 *
 * Backward splits the gradient: the value receives the part inside the box, and the previous
 * contents receive the remainder, with zeros in the box.
 */
#include "nn/op.h"

enum { BEFORE, VALUE };

/* Sets up the copy between a box of a dense tensor and values that broadcast to it; returns false
 * if the value's shape is incompatible. */
static bool broadcast(const fsdpc_box *box, const fsdpc_tensor *value, fsdpc_copy_args *args)
{
    size_t stride = 1;
    args->ndim = box->ndim;
    for (int i = box->ndim - 1; i >= 0; i--) {
        int at = i - (box->ndim - value->ndim);
        size_t extent = at >= 0 ? value->shape[at] : 1;
        if (extent != 1 && extent != box->shape[i])
            return false;
        args->shape[i] = box->shape[i];
        args->stride_dst[i] = box->strides[i];
        args->stride_src[i] = extent == 1 ? 0 : stride;
        stride *= extent;
    }
    return value->ndim <= box->ndim;
}

/* Copies the gradient inside the box and passes the copy to the value. */
static fsdpc_status give_value(fsdpc_tape *tape, fsdpc_node *node, const fsdpc_tensor *dy)
{
    const fsdpc_box *box = node->extra;
    fsdpc_tensor *part;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, box->ndim, box->shape, &part));
    fsdpc_copy_args args = {.ndim = box->ndim,
                            .dst_dtype = dy->dtype,
                            .src_dtype = dy->dtype,
                            .dst = part->data,
                            .src = (char *)dy->data + box->offset * fsdpc_dtype_bytes(dy->dtype)};
    for (int i = 0; i < box->ndim; i++) {
        args.shape[i] = box->shape[i];
        args.stride_src[i] = box->strides[i];
    }
    fsdpc_op_strides(box->ndim, box->shape, args.stride_dst);
    fsdpc_status st = fsdpc_op_kernels(tape)->copy(&args, tape->stream);
    if (st == FSDPC_OK)
        st = fsdpc_op_give_summed(tape, &node->inputs[VALUE], part, 1);
    fsdpc_tensor_release(part);
    return st;
}

/* Passes the gradient, zeroed inside the box, to the previous contents. Reuses the gradient's
 * memory if nothing else reads it, so that each write in a loop over rows costs only one row. */
static fsdpc_status give_before(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *rest, *zero;
    fsdpc_copy_args args = {.dst_dtype = dy->dtype, .src_dtype = dy->dtype};
    const fsdpc_box *box = node->extra;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, 0, NULL, &zero));
    fsdpc_status st =
        fsdpc_device_fill(tape->device, zero->data, 0, fsdpc_tensor_bytes(zero), tape->stream);
    if (st == FSDPC_OK && fsdpc_tensor_is_exclusive(dy))
        rest = fsdpc_tensor_acquire(dy);
    else if (st == FSDPC_OK)
        st = fsdpc_op_clone(tape, dy, &rest);
    if (st == FSDPC_OK) {
        (void)broadcast(box, zero, &args); /* a number fits every box */
        args.dst = (char *)rest->data + box->offset * fsdpc_dtype_bytes(dy->dtype);
        args.src = zero->data;
        st = fsdpc_op_give_owned(tape, &node->inputs[BEFORE], rest,
                                 fsdpc_op_kernels(tape)->copy(&args, tape->stream));
    }
    fsdpc_tensor_release(zero);
    return st;
}

static fsdpc_status write_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    if (fsdpc_edge_wanted(&node->inputs[VALUE]))
        FSDPC_TRY(give_value(tape, node, dy));
    return fsdpc_edge_wanted(&node->inputs[BEFORE]) ? give_before(tape, node, dy) : FSDPC_OK;
}

static const fsdpc_node_ops write_ops = {.name = "write", .backward = write_backward};

/* Creates another tensor over x's memory, with the write's node. */
static fsdpc_status record(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_box *box,
                           fsdpc_tensor *value, fsdpc_tensor **out)
{
    fsdpc_node *node;
    fsdpc_tensor *inputs[] = {[BEFORE] = x, [VALUE] = value}, *y;
    FSDPC_TRY(fsdpc_tensor_view(x, x->ndim, x->shape, x->data, &y));
    fsdpc_status st = fsdpc_op_record(tape, &write_ops, 2, inputs, y, sizeof *box, &node);
    if (st == FSDPC_OK)
        *(fsdpc_box *)node->extra = *box;
    return fsdpc_op_return(st, y, out);
}

/* Removes leading dimensions of size 1 that the value has in excess of the box, as NumPy does. */
static fsdpc_status fitted(fsdpc_tape *tape, const fsdpc_box *box, fsdpc_tensor *value,
                           fsdpc_tensor **out)
{
    int64_t shape[FSDPC_MAX_DIMS];
    int lead = 0;
    while (value->ndim - lead > box->ndim && value->shape[lead] == 1)
        lead++;
    if (!lead) {
        *out = fsdpc_tensor_acquire(value);
        return FSDPC_OK;
    }
    for (int i = lead; i < value->ndim; i++)
        shape[i - lead] = (int64_t)value->shape[i];
    return fsdpc_op_reshape(tape, value, value->ndim - lead, shape, out);
}

bool fsdpc_box_overlaps(const fsdpc_tensor *x, const fsdpc_box *box, const fsdpc_tensor *value)
{
    size_t element = fsdpc_dtype_bytes(x->dtype), last = box->offset;
    for (int i = 0; i < box->ndim; i++) {
        if (!box->shape[i])
            return false;
        last += (box->shape[i] - 1) * box->strides[i];
    }
    const char *first = (const char *)x->data + box->offset * element, *from = value->data;
    return value->storage == x->storage && from < (const char *)x->data + (last + 1) * element &&
           first < from + fsdpc_tensor_bytes(value);
}

/* Copies the value if it overlaps the memory that the write changes. */
static fsdpc_status apart(fsdpc_tape *tape, const fsdpc_tensor *x, const fsdpc_box *box,
                          fsdpc_tensor **value_io)
{
    fsdpc_tensor *copy;
    if (!fsdpc_box_overlaps(x, box, *value_io))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_clone(tape, *value_io, &copy));
    fsdpc_tensor_release(*value_io);
    *value_io = copy;
    return FSDPC_OK;
}

static fsdpc_status write_value(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_box *box,
                                fsdpc_tensor *value, fsdpc_tensor **out)
{
    fsdpc_copy_args args = {.dst_dtype = x->dtype, .src_dtype = value->dtype, .src = value->data};
    if (!broadcast(box, value, &args)) {
        char want[FSDPC_SHAPE_TEXT], is[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_SHAPE, "values of shape %s do not broadcast to shape %s",
                          fsdpc_shape_text(value->ndim, value->shape, is),
                          fsdpc_shape_text(box->ndim, box->shape, want));
    }
    FSDPC_TRY(fsdpc_tensor_check_write(x));
    args.dst = (char *)x->data + box->offset * fsdpc_dtype_bytes(x->dtype);
    FSDPC_TRY(fsdpc_op_kernels(tape)->copy(&args, tape->stream));
    fsdpc_tensor *inputs[] = {x, value};
    if (!out || !fsdpc_tape_wants(tape, 2, inputs))
        return FSDPC_OK;
    return record(tape, x, box, value, out);
}

fsdpc_status fsdpc_op_write(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_box *box,
                            fsdpc_tensor *value, fsdpc_tensor **out)
{
    fsdpc_tensor *fit, *cast;
    FSDPC_TRY(fsdpc_tensor_check(x));
    FSDPC_TRY(fsdpc_tensor_check(value));
    FSDPC_TRY(fitted(tape, box, value, &fit));
    fsdpc_status st = apart(tape, x, box, &fit);
    if (st == FSDPC_OK && out) { /* with a tape: the cast's backward converts the gradient back */
        st = fsdpc_op_cast(tape, fit, x->dtype, &cast);
        if (st == FSDPC_OK) {
            fsdpc_tensor_release(fit);
            fit = cast;
        }
    }
    if (st == FSDPC_OK)
        st = write_value(tape, x, box, fit, out);
    fsdpc_tensor_release(fit);
    return st;
}
