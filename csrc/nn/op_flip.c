/* Reorders elements along dimensions: flip reverses them, and roll shifts them.
 *
 * Flip is one strided copy with negative strides that starts at the end of the source; roll copies
 * two pieces, one after the other. The gradient of each is its inverse, another flip or roll.
 */
#include "nn/op.h"

typedef struct flip_extra {
    bool dims[FSDPC_MAX_DIMS];
} flip_extra;

static fsdpc_status flip_copy(fsdpc_tape *tape, const fsdpc_tensor *x, const bool *dims,
                              fsdpc_tensor **out)
{
    fsdpc_copy_args args = {.ndim = x->ndim, .dst_dtype = x->dtype, .src_dtype = x->dtype};
    fsdpc_op_strides(x->ndim, x->shape, args.stride_dst);
    for (int i = 0; i < x->ndim; i++) {
        args.shape[i] = x->shape[i];
        args.stride_src[i] = dims[i] ? 0 - args.stride_dst[i] : args.stride_dst[i];
        if (dims[i] && x->numel)
            args.src_first += (x->shape[i] - 1) * args.stride_dst[i];
    }
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    args.dst = y->data;
    args.src = x->data;
    return fsdpc_op_return(fsdpc_op_kernels(tape)->copy(&args, tape->stream), y, out);
}

static fsdpc_status flip_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(flip_copy(tape, dy, ((const flip_extra *)node->extra)->dims, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops flip_ops = {.name = "flip", .backward = flip_backward};

fsdpc_status fsdpc_op_flip(fsdpc_tape *tape, fsdpc_tensor *x, const bool *dims, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    fsdpc_tensor *y;
    FSDPC_TRY(flip_copy(tape, x, dims, &y));
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &flip_ops, 1, &x, y, sizeof(flip_extra), &node);
        for (int i = 0; st == FSDPC_OK && i < x->ndim; i++)
            ((flip_extra *)node->extra)->dims[i] = dims[i];
    }
    return fsdpc_op_return(st, y, out);
}

typedef struct roll_extra {
    size_t cut; /* the first piece's length; this piece moves to the end */
    int dim;
} roll_extra;

/* Copies `count` indices of dim, starting at `from`, to indices starting at `to`. */
static fsdpc_status roll_piece(fsdpc_tape *tape, const fsdpc_tensor *x, int dim, size_t from,
                               size_t to, size_t count, const fsdpc_tensor *y)
{
    fsdpc_copy_args args = {.ndim = x->ndim, .dst_dtype = x->dtype, .src_dtype = x->dtype};
    fsdpc_op_strides(x->ndim, x->shape, args.stride_dst);
    for (int i = 0; i < x->ndim; i++) {
        args.shape[i] = i == dim ? count : x->shape[i];
        args.stride_src[i] = args.stride_dst[i];
    }
    size_t bytes = fsdpc_dtype_bytes(x->dtype) * args.stride_dst[dim];
    args.dst = (char *)y->data + (x->numel ? to * bytes : 0);
    args.src = (const char *)x->data + (x->numel ? from * bytes : 0);
    return fsdpc_op_kernels(tape)->copy(&args, tape->stream);
}

static fsdpc_status roll_copy(fsdpc_tape *tape, const fsdpc_tensor *x, const roll_extra *how,
                              fsdpc_tensor **out)
{
    size_t rest = x->shape[how->dim] - how->cut;
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_status st = roll_piece(tape, x, how->dim, how->cut, 0, rest, y);
    if (st == FSDPC_OK)
        st = roll_piece(tape, x, how->dim, 0, rest, how->cut, y);
    return fsdpc_op_return(st, y, out);
}

static fsdpc_status roll_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    roll_extra back = *(const roll_extra *)node->extra;
    back.cut = dy->shape[back.dim] - back.cut;
    fsdpc_tensor *dx;
    FSDPC_TRY(roll_copy(tape, dy, &back, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops roll_ops = {.name = "roll", .backward = roll_backward};

fsdpc_status fsdpc_op_roll(fsdpc_tape *tape, fsdpc_tensor *x, int64_t shift, int dim,
                           fsdpc_tensor **out)
{
    roll_extra how = {0};
    FSDPC_TRY(fsdpc_tensor_check(x));
    FSDPC_TRY(fsdpc_op_dim("roll", dim, x->ndim, &how.dim));
    if (x->ndim == 0)
        return fsdpc_fail(FSDPC_ERR_INDEX, "roll: a tensor without dimensions has no places");
    int64_t extent = (int64_t)x->shape[how.dim], places = extent ? shift % extent : 0;
    how.cut = (size_t)(places > 0 ? extent - places : -places);
    fsdpc_tensor *y;
    FSDPC_TRY(roll_copy(tape, x, &how, &y));
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &roll_ops, 1, &x, y, sizeof how, &node);
        if (st == FSDPC_OK)
            *(roll_extra *)node->extra = how;
    }
    return fsdpc_op_return(st, y, out);
}
