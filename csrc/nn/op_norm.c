/* Layer normalisation and RMS normalisation share one node kind; a flag tells the kernel which to
 * compute.
 *
 * Forward saves the input and two floats per row, the mean and the reciprocal of the standard
 * deviation. The kernel writes gradients directly to their targets. Adding to a residual's
 * gradient, which bypasses the norm, therefore needs no separate pass. The kernel uses a single
 * dtype for the weight and bias gradients. If the targets' dtypes differ or are unsupported, it
 * writes fp32 temporaries; the temporary for x's gradient has x's dtype.
 */
#include "nn/op.h"

#include "ops/flat_ops.h"

typedef struct norm_extra {
    bool layer;
    double eps;
} norm_extra;

enum { SAVED_X, SAVED_WEIGHT, SAVED_MEAN, SAVED_RSTD };

static const char *norm_name(bool layer)
{
    return layer ? "layer_norm" : "rms_norm";
}

static fsdpc_norm_args norm_args(const norm_extra *extra, const fsdpc_tensor *x,
                                 const fsdpc_tensor *weight, const fsdpc_tensor *mean,
                                 const fsdpc_tensor *rstd)
{
    size_t cols = x->shape[x->ndim - 1];
    return (fsdpc_norm_args){.layer = extra->layer,
                             .dtype = x->dtype,
                             .rows = rstd->numel,
                             .cols = cols,
                             .eps = extra->eps,
                             .x = x->data,
                             .weight = weight ? weight->data : NULL,
                             .mean = mean ? mean->data : NULL,
                             .rstd = rstd->data};
}

/* A gradient's destination: its target, or a temporary tensor. */
typedef struct side {
    const fsdpc_edge *edge; /* NULL: not wanted */
    fsdpc_grad_target target;
    fsdpc_tensor *temporary;
} side;

static fsdpc_status side_open(fsdpc_tape *tape, const fsdpc_edge *edge, side *out)
{
    *out = (side){0};
    if (!fsdpc_edge_wanted(edge))
        return FSDPC_OK;
    out->edge = edge;
    return fsdpc_op_target(tape, edge, &out->target);
}

static fsdpc_status side_divert(fsdpc_tape *tape, side *s, fsdpc_dtype dtype, int ndim)
{
    if (!s->edge)
        return FSDPC_OK;
    return fsdpc_tensor_create(tape->device, dtype, ndim, fsdpc_edge_shape(s->edge), &s->temporary);
}

/* Copies the temporary, if any, to the target. */
static fsdpc_status side_close(fsdpc_tape *tape, side *s)
{
    if (!s->temporary)
        return FSDPC_OK;
    return fsdpc_target_write(tape, &s->target, s->temporary->data, s->temporary->dtype,
                              s->temporary->numel);
}

static bool side_direct(const side *s, fsdpc_dtype dtype)
{
    return !s->edge || s->target.dtype == dtype;
}

static fsdpc_status norm_point_input(fsdpc_tape *tape, fsdpc_norm_args *args, int ndim, side *input)
{
    if (!side_direct(input, args->dtype))
        FSDPC_TRY(side_divert(tape, input, args->dtype, ndim));
    args->dx = input->temporary ? input->temporary->data : input->target.data;
    args->dx_accumulate = !input->temporary && input->target.accumulate;
    return FSDPC_OK;
}

static fsdpc_status norm_run_backward(fsdpc_tape *tape, fsdpc_norm_args *args, side *weight,
                                      side *bias)
{
    fsdpc_dtype dtype = weight->edge ? weight->target.dtype : bias->target.dtype;
    args->dgrad_dtype = dtype;
    bool direct = side_direct(weight, dtype) && side_direct(bias, dtype) &&
                  (dtype == FSDPC_F32 || dtype == args->dtype);
    if (!direct) {
        FSDPC_TRY(side_divert(tape, weight, FSDPC_F32, 1));
        FSDPC_TRY(side_divert(tape, bias, FSDPC_F32, 1));
        args->dgrad_dtype = FSDPC_F32;
    }
    if (weight->edge) {
        args->dweight = direct ? weight->target.data : weight->temporary->data;
        args->dweight_accumulate = direct && weight->target.accumulate;
    }
    if (bias->edge) {
        args->dbias = direct ? bias->target.data : bias->temporary->data;
        args->dbias_accumulate = direct && bias->target.accumulate;
    }
    FSDPC_TRY(fsdpc_op_kernels(tape)->norm_backward(args, tape->stream));
    FSDPC_TRY(side_close(tape, weight));
    return side_close(tape, bias);
}

static fsdpc_status norm_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    side input, weight, bias;
    FSDPC_TRY(side_open(tape, &node->inputs[0], &input));
    FSDPC_TRY(side_open(tape, &node->inputs[1], &weight));
    FSDPC_TRY(side_open(tape, &node->inputs[2], &bias));
    fsdpc_norm_args args = norm_args(node->extra, node->saved[SAVED_X], node->saved[SAVED_WEIGHT],
                                     node->saved[SAVED_MEAN], node->saved[SAVED_RSTD]);
    args.dy = dy->data;
    fsdpc_status st = norm_point_input(tape, &args, dy->ndim, &input);
    if (st == FSDPC_OK)
        st = norm_run_backward(tape, &args, &weight, &bias);
    if (st == FSDPC_OK)
        st = side_close(tape, &input);
    fsdpc_tensor_release(input.temporary);
    fsdpc_tensor_release(weight.temporary);
    fsdpc_tensor_release(bias.temporary);
    return st;
}

static const fsdpc_node_ops norm_ops[] = {
    {.name = "rms_norm", .backward = norm_backward},
    {.name = "layer_norm", .backward = norm_backward},
};

static fsdpc_status check_side(const char *op, const char *what, const fsdpc_tensor *x,
                               const fsdpc_tensor *t)
{
    if (!t)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_check_float(op, what, t));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, what, t));
    if (t->ndim != 1 || t->shape[0] != x->shape[x->ndim - 1])
        return fsdpc_op_fail_shapes(op, "x", x, what, t,
                                    "it must have one dimension, the last of x");
    return FSDPC_OK;
}

static fsdpc_status norm_record(fsdpc_tape *tape, const norm_extra *extra, fsdpc_tensor **inputs,
                                fsdpc_tensor *mean, fsdpc_tensor *rstd, fsdpc_tensor *y)
{
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_op_record(tape, &norm_ops[extra->layer], 3, inputs, y, sizeof *extra, &node));
    *(norm_extra *)node->extra = *extra;
    fsdpc_node_save(node, SAVED_X, inputs[0]);
    fsdpc_node_save(node, SAVED_WEIGHT, inputs[1]);
    fsdpc_node_save(node, SAVED_MEAN, mean);
    fsdpc_node_save(node, SAVED_RSTD, rstd);
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_norm(fsdpc_tape *tape, bool layer, fsdpc_tensor *x, fsdpc_tensor *weight,
                           fsdpc_tensor *bias, double eps, fsdpc_tensor **out)
{
    const char *op = norm_name(layer);
    norm_extra extra = {layer, eps};
    FSDPC_TRY(fsdpc_op_check_float(op, "x", x));
    if (x->ndim < 1)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "%s: x has no dimension to normalise over", op);
    FSDPC_TRY(check_side(op, "weight", x, weight));
    FSDPC_TRY(check_side(op, "bias", x, bias));
    size_t rows = fsdpc_op_rows(x);
    fsdpc_tensor *y, *mean = NULL, *rstd = NULL;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_status st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &rows, &rstd);
    if (st == FSDPC_OK && layer)
        st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &rows, &mean);
    if (st == FSDPC_OK) {
        fsdpc_norm_args args = norm_args(&extra, x, weight, mean, rstd);
        args.bias = bias ? bias->data : NULL;
        args.y = y->data;
        st = fsdpc_op_kernels(tape)->norm(&args, tape->stream);
    }
    fsdpc_tensor *inputs[] = {x, weight, bias};
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 3, inputs))
        st = norm_record(tape, &extra, inputs, mean, rstd, y);
    fsdpc_tensor_release(mean);
    fsdpc_tensor_release(rstd);
    return fsdpc_op_return(st, y, out);
}
