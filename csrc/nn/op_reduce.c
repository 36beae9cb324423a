/* Sums, means, sums of squares, cumulative sums, softmax and logsumexp.
 *
 * Sums and means share one kernel with a scale; their backward broadcasts the gradient with zero
 * strides. Softmax saves its output, from which backward computes the gradient.
 */
#include "nn/op.h"

typedef struct sum_extra {
    double scale;
    bool reduced[FSDPC_MAX_DIMS];
} sum_extra;

static fsdpc_status spread(fsdpc_tape *tape, const fsdpc_edge *edge, const sum_extra *extra,
                           const fsdpc_tensor *dy, fsdpc_tensor *dx)
{
    fsdpc_copy_args args = {.ndim = dx->ndim,
                            .dst_dtype = dx->dtype,
                            .src_dtype = dy->dtype,
                            .dst = dx->data,
                            .src = dy->data};
    size_t stride = 1;
    for (int i = dx->ndim - 1; i >= 0; i--) {
        args.shape[i] = dx->shape[i];
        args.stride_src[i] = extra->reduced[i] ? 0 : stride;
        stride *= extra->reduced[i] ? 1 : dx->shape[i];
    }
    fsdpc_op_strides(dx->ndim, dx->shape, args.stride_dst);
    FSDPC_TRY(fsdpc_op_kernels(tape)->copy(&args, tape->stream));
    return fsdpc_edge_give(tape, edge, dx);
}

static fsdpc_status sum_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_edge *edge = &node->inputs[0];
    const sum_extra *extra = node->extra;
    fsdpc_tensor *scaled = fsdpc_tensor_acquire(dy), *dx;
    fsdpc_status st = FSDPC_OK;
    if (extra->scale != 1) {
        fsdpc_tensor_release(scaled);
        FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, dy->shape, &scaled));
        st = fsdpc_op_kernels(tape)->unary(&(fsdpc_unary_args){.kind = FSDPC_UNARY_MUL_SCALAR,
                                                               .dtype = dy->dtype,
                                                               .numel = dy->numel,
                                                               .scalar = extra->scale,
                                                               .x = dy->data,
                                                               .out = scaled->data},
                                           tape->stream);
    }
    if (st == FSDPC_OK)
        st = fsdpc_tensor_create(tape->device, dy->dtype, fsdpc_edge_ndim(edge),
                                 fsdpc_edge_shape(edge), &dx);
    if (st == FSDPC_OK) {
        st = spread(tape, edge, extra, scaled, dx);
        fsdpc_tensor_release(dx);
    }
    fsdpc_tensor_release(scaled);
    return st;
}

static const fsdpc_node_ops sum_ops = {.name = "sum", .backward = sum_backward};
static const fsdpc_node_ops mean_ops = {.name = "mean", .backward = sum_backward};

static fsdpc_status sum_record(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_sum_args *args,
                               const fsdpc_node_ops *ops, fsdpc_tensor *y)
{
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_op_record(tape, ops, 1, &x, y, sizeof(sum_extra), &node));
    sum_extra *extra = node->extra;
    extra->scale = args->scale;
    for (int i = 0; i < FSDPC_MAX_DIMS; i++)
        extra->reduced[i] = args->reduced[i];
    return FSDPC_OK;
}

/* Creates y with the remaining dimensions, and fills in the arguments of the sum that computes
 * it. */
static fsdpc_status sum_begin(fsdpc_tape *tape, const fsdpc_tensor *x, fsdpc_dtype out_dtype,
                              const bool *reduced, bool keepdim, fsdpc_sum_args *args,
                              fsdpc_tensor **y_out)
{
    size_t shape[FSDPC_MAX_DIMS], count = 1;
    int ndim = 0;
    *args = (fsdpc_sum_args){.dtype = x->dtype, .out_dtype = out_dtype, .ndim = x->ndim};
    for (int i = 0; i < x->ndim; i++) {
        args->shape[i] = x->shape[i];
        args->reduced[i] = reduced[i];
        if (reduced[i])
            count *= x->shape[i];
        if (!reduced[i] || keepdim)
            shape[ndim++] = reduced[i] ? 1 : x->shape[i];
    }
    FSDPC_TRY(fsdpc_tensor_create(tape->device, out_dtype, ndim, shape, y_out));
    args->scale = 1.0 / (double)count; /* the mean of no elements is 0 * inf, NaN as in PyTorch */
    args->x = x->data;
    args->out = (*y_out)->data;
    return FSDPC_OK;
}

/* Sums integers as I64; for BOOL, this counts the true elements. */
static fsdpc_status sum_integers(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced,
                                 bool keepdim, fsdpc_tensor **out)
{
    fsdpc_tensor *wide, *y = NULL;
    fsdpc_sum_args args;
    FSDPC_TRY(fsdpc_op_cast(tape, x, FSDPC_I64, &wide));
    fsdpc_status st = sum_begin(tape, wide, FSDPC_I64, reduced, keepdim, &args, &y);
    args.scale = 1;
    if (st == FSDPC_OK)
        st = fsdpc_op_kernels(tape)->sum(&args, tape->stream);
    fsdpc_tensor_release(wide);
    return fsdpc_op_return(st, y, out);
}

/* Computes the mean of integers as F32. */
static fsdpc_status mean_integers(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced,
                                  bool keepdim, fsdpc_tensor **out)
{
    fsdpc_tensor *wide, *mean = NULL;
    FSDPC_TRY(fsdpc_op_cast(tape, x, FSDPC_F64, &wide));
    fsdpc_status st = fsdpc_op_sum(tape, wide, reduced, keepdim, true, &mean);
    if (st == FSDPC_OK)
        st = fsdpc_op_cast(tape, mean, FSDPC_F32, out);
    fsdpc_tensor_release(wide);
    fsdpc_tensor_release(mean);
    return st;
}

fsdpc_status fsdpc_op_sum(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced, bool keepdim,
                          bool mean, fsdpc_tensor **out)
{
    if (!fsdpc_dtype_is_float(x->dtype))
        return (mean ? mean_integers : sum_integers)(tape, x, reduced, keepdim, out);
    FSDPC_TRY(fsdpc_op_check_float(mean ? "mean" : "sum", "the tensor", x));
    fsdpc_sum_args args;
    fsdpc_tensor *y;
    FSDPC_TRY(sum_begin(tape, x, x->dtype, reduced, keepdim, &args, &y));
    if (!mean)
        args.scale = 1;
    fsdpc_status st = fsdpc_op_kernels(tape)->sum(&args, tape->stream);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x))
        st = sum_record(tape, x, &args, mean ? &mean_ops : &sum_ops, y);
    return fsdpc_op_return(st, y, out);
}

/* ---- sums of squares ---- */

/* Computes the gradient 2 x dy, rounded once to x's dtype. */
static fsdpc_status squares_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const sum_extra *extra = node->extra;
    fsdpc_tensor *x = node->saved[0], *wide, *kept = NULL, *doubled = NULL, *g = NULL;
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++)
        shape[i] = extra->reduced[i] ? 1 : x->shape[i];
    FSDPC_TRY(fsdpc_op_cast(tape, x, dy->dtype, &wide));
    fsdpc_status st = fsdpc_tensor_view(dy, x->ndim, shape, dy->data, &kept);
    if (st == FSDPC_OK) /* few elements, and exact */
        st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_ADD, kept, kept, &doubled);
    if (st == FSDPC_OK)
        st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_MUL, wide, doubled, &g);
    fsdpc_tensor *dx = NULL;
    if (st == FSDPC_OK)
        st = fsdpc_op_cast(tape, g, x->dtype, &dx);
    fsdpc_tensor_release(wide);
    fsdpc_tensor_release(kept);
    fsdpc_tensor_release(doubled);
    fsdpc_tensor_release(g);
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, st);
}

static const fsdpc_node_ops squares_ops = {.name = "sum_squares", .backward = squares_backward};

fsdpc_status fsdpc_op_sum_squares(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced,
                                  bool keepdim, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("sum_squares", "the tensor", x));
    fsdpc_sum_args args;
    fsdpc_tensor *y;
    fsdpc_dtype wide = x->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    FSDPC_TRY(sum_begin(tape, x, wide, reduced, keepdim, &args, &y));
    args.scale = 1;
    args.squares = true;
    fsdpc_status st = fsdpc_op_kernels(tape)->sum(&args, tape->stream);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        st = sum_record(tape, x, &args, &squares_ops, y);
        if (st == FSDPC_OK)
            fsdpc_node_save(y->node, 0, x);
    }
    return fsdpc_op_return(st, y, out);
}

/* ---- cumulative sums ---- */

typedef struct cumsum_extra {
    int dim;
} cumsum_extra;

static fsdpc_status cumsum_compute(fsdpc_tape *tape, const fsdpc_tensor *x, int dim, bool reverse,
                                   fsdpc_tensor **out)
{
    fsdpc_cumsum_args args = {.dtype = x->dtype,
                              .outer = 1,
                              .extent = x->ndim ? x->shape[dim] : 1,
                              .inner = 1,
                              .reverse = reverse};
    for (int i = 0; i < x->ndim; i++) {
        args.outer *= i < dim ? x->shape[i] : 1;
        args.inner *= i > dim ? x->shape[i] : 1;
    }
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    args.x = x->data;
    args.out = y->data;
    return fsdpc_op_return(fsdpc_op_kernels(tape)->cumsum(&args, tape->stream), y, out);
}

static fsdpc_status cumsum_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(cumsum_compute(tape, dy, ((const cumsum_extra *)node->extra)->dim, true, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops cumsum_ops = {.name = "cumsum", .backward = cumsum_backward};

fsdpc_status fsdpc_op_cumsum(fsdpc_tape *tape, fsdpc_tensor *x, int dim, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    FSDPC_TRY(fsdpc_op_dim("cumsum", dim, x->ndim, &dim));
    fsdpc_tensor *y;
    FSDPC_TRY(cumsum_compute(tape, x, dim, false, &y));
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &cumsum_ops, 1, &x, y, sizeof(cumsum_extra), &node);
        if (st == FSDPC_OK)
            ((cumsum_extra *)node->extra)->dim = dim;
    }
    return fsdpc_op_return(st, y, out);
}

/* ---- softmax ---- */

static fsdpc_softmax_args softmax_args(const fsdpc_tensor *t, bool log)
{
    size_t cols = t->ndim ? t->shape[t->ndim - 1] : 1;
    return (fsdpc_softmax_args){
        .dtype = t->dtype, .rows = cols ? t->numel / cols : 0, .cols = cols, .log = log};
}

static fsdpc_status softmax_run_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy,
                                         bool log)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, dy->shape, &dx));
    fsdpc_softmax_args args = softmax_args(dy, log);
    args.y = node->saved[0]->data;
    args.dy = dy->data;
    args.out = dx->data;
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx,
                               fsdpc_op_kernels(tape)->softmax_backward(&args, tape->stream));
}

static fsdpc_status softmax_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    return softmax_run_backward(tape, node, dy, false);
}

static fsdpc_status log_softmax_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    return softmax_run_backward(tape, node, dy, true);
}

static const fsdpc_node_ops softmax_ops = {.name = "softmax", .backward = softmax_backward};
static const fsdpc_node_ops log_softmax_ops = {.name = "log_softmax",
                                               .backward = log_softmax_backward};

static fsdpc_status softmax_rows(fsdpc_tape *tape, fsdpc_tensor *x, bool log, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float(log ? "log_softmax" : "softmax", "the tensor", x));
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_softmax_args args = softmax_args(x, log);
    args.x = x->data;
    args.out = y->data;
    fsdpc_status st = fsdpc_op_kernels(tape)->softmax(&args, tape->stream);
    fsdpc_node *node;
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        st = fsdpc_tape_record(tape, log ? &log_softmax_ops : &softmax_ops, 1, &x, y, &node);
        if (st == FSDPC_OK)
            st = fsdpc_node_save_output(node, 0, y);
    }
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_softmax(fsdpc_tape *tape, fsdpc_tensor *x, int dim, bool log,
                              fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_dim("softmax", dim, x->ndim, &dim));
    if (x->ndim == 0 || dim == x->ndim - 1)
        return softmax_rows(tape, x, log, out);
    fsdpc_tensor *moved, *y;
    FSDPC_TRY(fsdpc_op_transpose(tape, x, dim, -1, &moved));
    fsdpc_status st = softmax_rows(tape, moved, log, &y);
    fsdpc_tensor_release(moved);
    FSDPC_TRY(st);
    st = fsdpc_op_transpose(tape, y, dim, -1, out);
    fsdpc_tensor_release(y);
    return st;
}

/* ---- logarithms of sums of exponentials ---- */

/* dy * softmax(x) */
static fsdpc_status logsumexp_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *x = node->saved[0], *kept, *p = NULL, *dx = NULL;
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++)
        shape[i] = i == x->ndim - 1 ? 1 : x->shape[i];
    FSDPC_TRY(fsdpc_tensor_view(dy, x->ndim, shape, dy->data, &kept));
    fsdpc_status st = fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &p);
    if (st == FSDPC_OK) {
        fsdpc_softmax_args args = softmax_args(x, false);
        args.x = x->data;
        args.out = p->data;
        args.slopes = true;
        st = fsdpc_op_kernels(tape)->softmax(&args, tape->stream);
    }
    if (st == FSDPC_OK)
        st = fsdpc_op_binary_compute(tape, FSDPC_BINARY_MUL, p, kept, &dx);
    fsdpc_tensor_release(kept);
    fsdpc_tensor_release(p);
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, st);
}

static const fsdpc_node_ops logsumexp_ops = {.name = "logsumexp", .backward = logsumexp_backward};

/* Reduces the last dimension and removes it. */
static fsdpc_status logsumexp_rows(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    int ndim = x->ndim ? x->ndim - 1 : 0;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, ndim, x->shape, &y));
    fsdpc_softmax_args args = softmax_args(x, false);
    args.rows = y->numel;
    args.x = x->data;
    args.lse = y->data;
    fsdpc_status st = fsdpc_op_kernels(tape)->softmax(&args, tape->stream);
    fsdpc_node *node;
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        st = fsdpc_tape_record(tape, &logsumexp_ops, 1, &x, y, &node);
        if (st == FSDPC_OK)
            fsdpc_node_save(node, 0, x);
    }
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_logsumexp(fsdpc_tape *tape, fsdpc_tensor *x, int dim, bool keepdim,
                                fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("logsumexp", "the tensor", x));
    FSDPC_TRY(fsdpc_op_dim("logsumexp", dim, x->ndim, &dim));
    if (x->ndim == 0)
        return logsumexp_rows(tape, x, out);
    int order[FSDPC_MAX_DIMS];
    int64_t shape[FSDPC_MAX_DIMS];
    for (int i = 0, n = 0; i < x->ndim; i++) {
        shape[i] = i == dim ? 1 : (int64_t)x->shape[i];
        if (i != dim)
            order[n++] = i;
    }
    order[x->ndim - 1] = dim;
    fsdpc_tensor *moved = NULL, *y = NULL;
    FSDPC_TRY(fsdpc_op_permute(tape, x, order, &moved));
    fsdpc_status st = logsumexp_rows(tape, moved, keepdim ? &y : out);
    if (st == FSDPC_OK && keepdim)
        st = fsdpc_op_reshape(tape, y, x->ndim, shape, out);
    fsdpc_tensor_release(moved);
    fsdpc_tensor_release(y);
    return st;
}
