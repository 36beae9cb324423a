/* Helpers shared by the operations: see nn/op.h.
 *
 * If a kernel cannot write a target's dtype (a bf16 reduce buffer under fp32 compute), the gradient
 * is computed in an fp32 temporary. The gradient is rounded once, when it is added to the target.
 */
#include "nn/op.h"

#include <stdlib.h>

#include "base/size.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_op_check_float(const char *op, const char *what, const fsdpc_tensor *t)
{
    if (!fsdpc_dtype_is_float(t->dtype))
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: %s must have a float dtype, not %s; use to()", op,
                          what, fsdpc_dtype_name(t->dtype));
    return fsdpc_tensor_check(t);
}

fsdpc_status fsdpc_op_check_ids(const char *op, const char *what, const fsdpc_tensor *t)
{
    if (t->dtype != FSDPC_I32 && t->dtype != FSDPC_I64)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: %s must be int32 or int64, not %s; use to()", op,
                          what, fsdpc_dtype_name(t->dtype));
    return fsdpc_tensor_check(t);
}

fsdpc_status fsdpc_op_check_same_dtype(const char *op, const char *what_a, const fsdpc_tensor *a,
                                       const char *what_b, const fsdpc_tensor *b)
{
    if (a->dtype == b->dtype)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: %s is %s and %s is %s; cast one with to()", op, what_a,
                      fsdpc_dtype_name(a->dtype), what_b, fsdpc_dtype_name(b->dtype));
}

fsdpc_status fsdpc_op_fail_shapes(const char *op, const char *what_a, const fsdpc_tensor *a,
                                  const char *what_b, const fsdpc_tensor *b, const char *rule)
{
    char ta[FSDPC_SHAPE_TEXT], tb[FSDPC_SHAPE_TEXT];
    return fsdpc_fail(FSDPC_ERR_SHAPE, "%s: %s has shape %s and %s has shape %s; %s", op, what_a,
                      fsdpc_shape_text(a->ndim, a->shape, ta), what_b,
                      fsdpc_shape_text(b->ndim, b->shape, tb), rule);
}

fsdpc_status fsdpc_op_dim(const char *op, int dim, int ndim, int *out)
{
    int count = ndim ? ndim : 1;
    if (dim < -count || dim >= count)
        return fsdpc_fail(FSDPC_ERR_INDEX, "%s: dimension %d of a tensor with %d dimensions", op,
                          dim, ndim);
    *out = dim < 0 ? dim + count : dim;
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_record(fsdpc_tape *tape, const fsdpc_node_ops *ops, int n,
                             fsdpc_tensor *const *inputs, fsdpc_tensor *out, size_t extra_bytes,
                             fsdpc_node **node_out)
{
    fsdpc_node *node = NULL;
    FSDPC_TRY(fsdpc_tape_record(tape, ops, n, inputs, out, &node));
    if (extra_bytes && !(node->extra = calloc(1, extra_bytes)))
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a node of the tape");
    *node_out = node;
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_places(const char *op, size_t extent, size_t kernel, size_t stride,
                             const size_t padding[2], size_t dilation, size_t *out)
{
    size_t padded, reach = 0;
    if (!kernel || !stride || !dilation)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "%s: a kernel of %zu, stride %zu, dilation %zu; all must be "
                          "positive",
                          op, kernel, stride, dilation);
    FSDPC_TRY(fsdpc_add_size(padding[0], padding[1], &padded));
    FSDPC_TRY(fsdpc_add_size(padded, extent, &padded));
    FSDPC_TRY(fsdpc_mul_size(kernel - 1, dilation, &reach));
    if (padded <= reach)
        return fsdpc_fail(
            FSDPC_ERR_SHAPE,
            "%s: no window of %zu, dilation %zu, fits %zu elements and %zu of padding", op, kernel,
            dilation, extent, padding[0] + padding[1]);
    *out = (padded - reach - 1) / stride + 1;
    return FSDPC_OK;
}

void fsdpc_op_strides(int ndim, const size_t *shape, size_t *strides_out)
{
    size_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides_out[i] = stride;
        stride *= shape[i];
    }
}

fsdpc_dtype fsdpc_edge_dtype(const fsdpc_edge *edge)
{
    return edge->node ? edge->node->dtype : edge->leaf->dtype;
}

int fsdpc_edge_ndim(const fsdpc_edge *edge)
{
    return edge->node ? edge->node->ndim : edge->leaf->ndim;
}

const size_t *fsdpc_edge_shape(const fsdpc_edge *edge)
{
    return edge->node ? edge->node->shape : edge->leaf->shape;
}

fsdpc_status fsdpc_op_target(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_grad_target *out)
{
    return fsdpc_edge_target(tape, edge, fsdpc_edge_dtype(edge), fsdpc_edge_ndim(edge),
                             fsdpc_edge_shape(edge), out);
}

fsdpc_status fsdpc_op_gemm_into(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_gemm_args *args)
{
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    args->ldc = args->n;
    if (target.dtype == args->dtype || target.dtype == FSDPC_F32) {
        args->c = target.data;
        args->c_dtype = target.dtype;
        args->accumulate = target.accumulate;
        return fsdpc_op_kernels(tape)->gemm(args, tape->stream);
    }
    fsdpc_tensor *t;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, fsdpc_edge_ndim(edge),
                                  fsdpc_edge_shape(edge), &t));
    args->c = t->data;
    args->c_dtype = FSDPC_F32;
    args->accumulate = false;
    fsdpc_status st = fsdpc_op_kernels(tape)->gemm(args, tape->stream);
    if (st == FSDPC_OK)
        st = fsdpc_target_write(tape, &target, t->data, t->dtype, t->numel);
    fsdpc_tensor_release(t);
    return st;
}

fsdpc_status fsdpc_op_give_owned(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *g,
                                 fsdpc_status st)
{
    if (st == FSDPC_OK)
        st = fsdpc_edge_give(tape, edge, g);
    fsdpc_tensor_release(g);
    return st;
}

static fsdpc_status give_scaled(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *g,
                                double scale)
{
    if (scale == 1)
        return fsdpc_edge_give(tape, edge, g);
    fsdpc_tensor *scaled;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, g->dtype, g->ndim, g->shape, &scaled));
    fsdpc_status st =
        fsdpc_op_kernels(tape)->unary(&(fsdpc_unary_args){.kind = FSDPC_UNARY_MUL_SCALAR,
                                                          .dtype = g->dtype,
                                                          .numel = g->numel,
                                                          .scalar = scale,
                                                          .x = g->data,
                                                          .out = scaled->data},
                                      tape->stream);
    return fsdpc_op_give_owned(tape, edge, scaled, st);
}

fsdpc_status fsdpc_op_give_summed(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *g,
                                  double scale)
{
    int ndim = fsdpc_edge_ndim(edge), lead = g->ndim - ndim;
    const size_t *shape = fsdpc_edge_shape(edge);
    fsdpc_sum_args args = {.dtype = g->dtype, .ndim = g->ndim, .scale = scale, .x = g->data};
    bool any = false;
    for (int i = 0; i < g->ndim; i++) {
        args.shape[i] = g->shape[i];
        args.reduced[i] = i < lead || shape[i - lead] != g->shape[i];
        any |= args.reduced[i];
    }
    if (!any)
        return give_scaled(tape, edge, g, scale);
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    args.out = target.data;
    args.out_dtype = target.dtype;
    args.accumulate = target.accumulate;
    return fsdpc_op_kernels(tape)->sum(&args, tape->stream);
}
