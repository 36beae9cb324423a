/* Pooling: the maximum or mean of each window of an image.
 *
 * Backward finds the maxima again. Max pooling therefore saves no indices, only its input, which
 * the preceding operation usually saves anyway.
 */
#include "nn/op.h"

static fsdpc_pool_args pool_args(const fsdpc_pool_options *o, fsdpc_dtype dtype, const size_t *x,
                                 const size_t *y)
{
    fsdpc_pool_args args = {.max = o->max, .dtype = dtype, .planes = x[0] * x[1]};
    for (int d = 0; d < 2; d++) {
        args.image[d] = x[2 + d];
        args.places[d] = y[2 + d];
        args.kernel[d] = o->kernel[d];
        args.stride[d] = o->stride[d];
        args.padding[d] = o->padding[d];
    }
    return args;
}

static fsdpc_status pool_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_edge *edge = &node->inputs[0];
    fsdpc_tensor *dx;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, 4, fsdpc_edge_shape(edge), &dx));
    fsdpc_pool_args args = pool_args(node->extra, dy->dtype, dx->shape, dy->shape);
    args.x = node->saved[0] ? node->saved[0]->data : NULL;
    args.dy = dy->data;
    args.dx = dx->data;
    fsdpc_status st = fsdpc_op_kernels(tape)->pool_backward(&args, tape->stream);
    return fsdpc_op_give_owned(tape, edge, dx, st);
}

static const fsdpc_node_ops pool_ops = {.name = "pool2d", .backward = pool_backward};

fsdpc_status fsdpc_op_pool2d(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_pool_options *o,
                             fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("pool2d", "x", x));
    if (x->ndim != 4)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "pool2d: x has %d dimensions, not 4", x->ndim);
    size_t shape[4] = {x->shape[0], x->shape[1]};
    for (int d = 0; d < 2; d++) {
        const size_t sides[] = {o->padding[d], o->padding[d]};
        FSDPC_TRY(fsdpc_op_places("pool2d", x->shape[2 + d], o->kernel[d], o->stride[d], sides, 1,
                                  &shape[2 + d]));
    }
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, 4, shape, &y));
    fsdpc_pool_args args = pool_args(o, x->dtype, x->shape, shape);
    args.x = x->data;
    args.y = y->data;
    fsdpc_status st = fsdpc_op_kernels(tape)->pool(&args, tape->stream);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &pool_ops, 1, &x, y, sizeof *o, &node);
        if (st == FSDPC_OK) {
            *(fsdpc_pool_options *)node->extra = *o;
            if (o->max)
                fsdpc_node_save(node, 0, x);
        }
    }
    return fsdpc_op_return(st, y, out);
}
