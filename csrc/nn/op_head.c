/* The cross entropy of a linear layer's result, whose logits never all exist.
 *
 * Note [chunked loss]. The logits of a long batch over a large vocabulary are the largest tensor
 * in a training step, and their gradient is equally large. Here a chunk of rows is processed at a
 * time: its logits, then its loss, then the logits' gradient in place. The gradient of the weight
 * may only reach its target in backward, so the kept data depends on the number of chunks:
 *
 *     one chunk   the chunk itself, now the gradient of the logits; backward computes dx and dW
 *                 from it, dW directly into the target
 *     several     dx (as big as x) and dW in fp32, summed chunk by chunk in forward. Backward
 *                 scales both in place, and a leaf without another gradient adopts them. If the
 *                 leaf's sink lends the place of its gradient (in a unit's reduce buffer), dW
 *                 is there from the start, and backward only scales it
 *
 * The stored gradients are those of the SUM over rows, so they are not scaled down before they are
 * rounded to bf16. Backward multiplies them by the incoming gradient and divides by the number of
 * rows that are not ignored, which stays in device memory as all sums do.
 *
 * If each row has its own loss, forward does not know the rows' incoming gradients. It then keeps
 * only the sums of exponentials, and backward computes the logits again: a third more arithmetic.
 *
 * Each chunk costs another pass over all of dW. On a CPU, chunks have 24 MiB but at least 64 rows.
 * For 2,048 tokens, 256 elements and 32,000 classes a step with 196 rows at a time took 0.64 s, and
 * with 524 rows 0.59 s (Zen 4). GPUs have more arithmetic per byte: in a LLaMA 1B step on an H200,
 * dW for 32,000 tokens takes 3.6 ms with eight chunks and 5.1 ms with sixteen. They use at most
 * eight.
 */
#include "nn/op.h"

#include "base/size.h"
#include "ops/flat_ops.h"

enum { FUSED_X, FUSED_WEIGHT, FUSED_DLOGITS, FUSED_DX, FUSED_DW, FUSED_SUM };
enum { ROWS_X, ROWS_WEIGHT, ROWS_TARGETS, ROWS_LSE };

typedef struct head_extra {
    fsdpc_loss_options options;
    size_t chunk_rows;
} head_extra;

/* A pass over all rows, in forward or, for rows with losses of their own, in backward. */
typedef struct head {
    fsdpc_tape *tape;
    const fsdpc_tensor *x, *weight, *targets;
    fsdpc_loss_options options;
    size_t rows, in, out, chunk_rows;
    bool want_dx, want_dw;
    const fsdpc_tensor *y, *sum;     /* the loss, and its sum and count so far */
    const fsdpc_tensor *dy;          /* gradients of the rows' losses; NULL: those of their sum */
    fsdpc_tensor *lse;               /* of all rows, or of a chunk's */
    fsdpc_tensor *dlogits, *dx, *dw; /* NULL: not kept */
    bool dw_started;
} head;

/* Returns the row's address. */
static void *at_row(const fsdpc_tensor *t, size_t row, size_t numel)
{
    return (char *)t->data + row * numel * fsdpc_dtype_bytes(t->dtype);
}

static fsdpc_status chunk_products(head *h, const fsdpc_tensor *dlogits, size_t first, size_t rows)
{
    const fsdpc_nn_ops *kernels = fsdpc_op_kernels(h->tape);
    fsdpc_gemm_args args = {.dtype = h->x->dtype, .a = dlogits->data, .lda = h->out};
    if (h->dx) {
        fsdpc_gemm_args dx = args;
        dx.m = rows;
        dx.n = dx.ldb = dx.ldc = h->in;
        dx.k = h->out;
        dx.b = h->weight->data;
        dx.c = at_row(h->dx, first, h->in);
        dx.c_dtype = h->x->dtype;
        FSDPC_TRY(kernels->gemm(&dx, h->tape->stream));
    }
    if (!h->dw)
        return FSDPC_OK;
    args.m = h->out;
    args.n = args.ldb = args.ldc = h->in;
    args.k = rows;
    args.trans_a = true;
    args.b = at_row(h->x, first, h->in);
    args.c = h->dw->data;
    args.c_dtype = h->dw->dtype;
    args.accumulate = h->dw_started;
    h->dw_started = true;
    return kernels->gemm(&args, h->tape->stream);
}

/* x = cap * tanh(x / cap), in place */
static fsdpc_status cap_logits(const head *h, const fsdpc_tensor *logits, size_t rows)
{
    double cap = h->options.softcap;
    const fsdpc_unary kinds[] = {FSDPC_UNARY_MUL_SCALAR, FSDPC_UNARY_TANH, FSDPC_UNARY_MUL_SCALAR};
    const double scalars[] = {1 / cap, 0, cap};
    for (int i = 0; cap > 0 && i < 3; i++)
        FSDPC_TRY(fsdpc_op_kernels(h->tape)->unary(&(fsdpc_unary_args){.kind = kinds[i],
                                                                       .dtype = logits->dtype,
                                                                       .numel = rows * h->out,
                                                                       .scalar = scalars[i],
                                                                       .x = logits->data,
                                                                       .out = logits->data},
                                                   h->tape->stream));
    return FSDPC_OK;
}

static fsdpc_status chunk_logits(const head *h, const fsdpc_tensor *logits, size_t first,
                                 size_t rows)
{
    fsdpc_gemm_args product = {.m = rows,
                               .n = h->out,
                               .k = h->in,
                               .dtype = h->x->dtype,
                               .c_dtype = h->x->dtype,
                               .a = at_row(h->x, first, h->in),
                               .lda = h->in,
                               .b = h->weight->data,
                               .ldb = h->in,
                               .trans_b = true,
                               .c = logits->data,
                               .ldc = h->out};
    FSDPC_TRY(fsdpc_op_kernels(h->tape)->gemm(&product, h->tape->stream));
    return cap_logits(h, logits, rows);
}

/* Processes rows first .. first + rows; `logits` and `means` (if not NULL) have space for them. */
static fsdpc_status chunk(head *h, fsdpc_tensor *logits, const fsdpc_tensor *means, size_t first,
                          size_t rows)
{
    FSDPC_TRY(chunk_logits(h, logits, first, rows));
    fsdpc_cross_entropy_args args = fsdpc_loss_args(logits, h->targets, h->lse, &h->options);
    args.rows = rows;
    args.targets = at_row(h->targets, first, 1);
    bool separate = h->options.reduction == FSDPC_LOSS_NONE;
    if (separate)
        args.lse = at_row(h->lse, first, 1);
    if (!h->dy) {
        args.means = means ? means->data : NULL;
        if (separate)
            args.losses = at_row(h->y, first, 1);
        else
            args.loss = h->y->data;
        args.sum = h->sum->data;
        args.accumulate = first > 0;
        FSDPC_TRY(fsdpc_op_kernels(h->tape)->cross_entropy(&args, h->tape->stream));
    }
    if ((!h->want_dx && !h->want_dw) || (separate && !h->dy))
        return FSDPC_OK;
    args.dlosses = h->dy ? at_row(h->dy, first, 1) : NULL;
    args.softcap = (float)h->options.softcap;
    args.dlogits = logits->data;
    FSDPC_TRY(fsdpc_op_kernels(h->tape)->cross_entropy_backward(&args, h->tape->stream));
    return h->dlogits ? FSDPC_OK : chunk_products(h, logits, first, rows);
}

/* Gets memory for the weight's gradient, which the leaf's sink may lend. */
static fsdpc_status create_dw(head *h)
{
    const fsdpc_tensor *w = h->weight;
    const fsdpc_grad_sink *sink = &w->sink;
    fsdpc_dtype wide = h->x->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    bool borrows = sink->lend && !w->node && !h->tape->backward_depth && !fsdpc_tensor_has_hooks(w);
    if (borrows)
        FSDPC_TRY(sink->lend(sink->arg, wide, 2, w->shape, &h->dw));
    return h->dw ? FSDPC_OK : fsdpc_tensor_create(h->tape->device, wide, 2, w->shape, &h->dw);
}

/* Allocates what keeps the gradients: one chunk's own memory, or dx and dw. */
static fsdpc_status keep_gradients(head *h, fsdpc_tensor *logits)
{
    fsdpc_device *device = h->tape->device;
    if (!h->dy && (h->options.reduction == FSDPC_LOSS_NONE || !(h->want_dx || h->want_dw)))
        return FSDPC_OK;
    if (!h->dy && h->chunk_rows >= h->rows) {
        h->dlogits = fsdpc_tensor_acquire(logits);
        return FSDPC_OK;
    }
    if (h->want_dx)
        FSDPC_TRY(fsdpc_tensor_create(device, h->x->dtype, h->x->ndim, h->x->shape, &h->dx));
    return h->want_dw ? create_dw(h) : FSDPC_OK;
}

static fsdpc_status all_chunks(head *h)
{
    fsdpc_tensor *logits, *means = NULL;
    FSDPC_TRY(fsdpc_tensor_create(h->tape->device, h->x->dtype, 2,
                                  (size_t[]){h->chunk_rows, h->out}, &logits));
    fsdpc_status st = keep_gradients(h, logits);
    if (st == FSDPC_OK && h->options.smoothing > 0 && !h->dy)
        st = fsdpc_tensor_create(h->tape->device, FSDPC_F32, 1, &h->chunk_rows, &means);
    size_t first = 0;
    do { /* with zero rows, the loss is NaN */
        if (st == FSDPC_OK)
            st = chunk(h, logits, means, first, fsdpc_min_size(h->chunk_rows, h->rows - first));
        first += h->chunk_rows;
    } while (st == FSDPC_OK && first < h->rows);
    fsdpc_tensor_release(means);
    fsdpc_tensor_release(logits);
    return st;
}

/* ---- backward ---- */

/* Returns a gradient that forward kept, multiplied by that of the loss: in place, unless backward
 * may run again. */
static fsdpc_status scaled(fsdpc_tape *tape, fsdpc_node *node, int slot, const fsdpc_tensor *dloss,
                           fsdpc_tensor **out)
{
    fsdpc_tensor *kept = node->saved[slot], *y;
    const fsdpc_tensor *sum = node->saved[FUSED_SUM];
    if (tape->retain_graph) {
        FSDPC_TRY(fsdpc_tensor_create(tape->device, kept->dtype, kept->ndim, kept->shape, &y));
    } else {
        y = kept;
        node->saved[slot] = NULL;
        node->freed = true;
    }
    fsdpc_loss_gradient_args args = {.dtype = kept->dtype,
                                     .numel = kept->numel,
                                     .sum = sum->data,
                                     .dloss = dloss->data,
                                     .x = kept->data,
                                     .out = y->data};
    return fsdpc_op_return(fsdpc_op_kernels(tape)->loss_gradient(&args, tape->stream), y, out);
}

/* Computes the products of a single-chunk batch from the logits' gradient that forward kept. */
static fsdpc_status backward_products(fsdpc_tape *tape, fsdpc_node *node, const fsdpc_tensor *dloss)
{
    const fsdpc_tensor *x = node->saved[FUSED_X], *w = node->saved[FUSED_WEIGHT];
    fsdpc_tensor *dlogits;
    FSDPC_TRY(scaled(tape, node, FUSED_DLOGITS, dloss, &dlogits));
    size_t rows = dlogits->shape[0], out = dlogits->shape[1], in = w->shape[1];
    fsdpc_gemm_args args = {.dtype = x->dtype, .a = dlogits->data, .lda = out, .n = in, .ldb = in};
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_edge_wanted(&node->inputs[1])) {
        fsdpc_gemm_args dw = args;
        dw.m = out;
        dw.k = rows;
        dw.trans_a = true;
        dw.b = x->data;
        st = fsdpc_op_gemm_into(tape, &node->inputs[1], &dw);
    }
    if (st == FSDPC_OK && fsdpc_edge_wanted(&node->inputs[0])) {
        args.m = rows;
        args.k = out;
        args.b = w->data;
        st = fsdpc_op_gemm_into(tape, &node->inputs[0], &args);
    }
    fsdpc_tensor_release(dlogits);
    return st;
}

/* Passes a finished gradient on, and releases it. */
static fsdpc_status give(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *gradient)
{
    if (gradient->dtype == fsdpc_edge_dtype(edge))
        return fsdpc_op_give_owned(tape, edge, gradient, FSDPC_OK);
    fsdpc_grad_target target;
    fsdpc_status st = fsdpc_op_target(tape, edge, &target);
    if (st == FSDPC_OK)
        st = fsdpc_target_write(tape, &target, gradient->data, gradient->dtype, gradient->numel);
    fsdpc_tensor_release(gradient);
    return st;
}

/* Settles a loan; *given_out: the leaf has the gradient. */
static fsdpc_status settle(const fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *kept,
                           bool *given_out)
{
    const fsdpc_tensor *leaf = edge->leaf;
    *given_out = false;
    if (!kept->storage->settle)
        return FSDPC_OK;
    bool direct = leaf && leaf->requires_grad && leaf->sink.lend && !fsdpc_tensor_has_hooks(leaf) &&
                  !tape->retain_graph;
    FSDPC_TRY(kept->storage->settle(kept->storage, direct, given_out));
    kept->data = kept->storage->data;
    return FSDPC_OK;
}

static fsdpc_status give_kept(fsdpc_tape *tape, fsdpc_node *node, int input, int slot,
                              const fsdpc_tensor *dloss)
{
    const fsdpc_edge *edge = &node->inputs[input];
    fsdpc_tensor *gradient;
    bool given;
    if (!node->saved[slot] || !fsdpc_edge_wanted(edge))
        return FSDPC_OK;
    FSDPC_TRY(settle(tape, edge, node->saved[slot], &given));
    FSDPC_TRY(scaled(tape, node, slot, dloss, &gradient));
    if (!given)
        return give(tape, edge, gradient);
    fsdpc_tensor_release(gradient);
    return FSDPC_OK;
}

static fsdpc_status fused_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    if (node->saved[FUSED_DLOGITS])
        return backward_products(tape, node, dy);
    FSDPC_TRY(give_kept(tape, node, 1, FUSED_DW, dy));
    return give_kept(tape, node, 0, FUSED_DX, dy);
}

static head head_of(fsdpc_tape *tape, const fsdpc_tensor *x, const fsdpc_tensor *weight,
                    const fsdpc_tensor *targets, const head_extra *extra)
{
    return (head){.tape = tape,
                  .x = x,
                  .weight = weight,
                  .targets = targets,
                  .options = extra->options,
                  .rows = targets->numel,
                  .in = weight->shape[1],
                  .out = weight->shape[0],
                  .chunk_rows = extra->chunk_rows};
}

/* Computes the logits again, for the gradients of rows whose losses are separate. */
static fsdpc_status rows_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    head h = head_of(tape, node->saved[ROWS_X], node->saved[ROWS_WEIGHT], node->saved[ROWS_TARGETS],
                     node->extra);
    h.dy = dy;
    h.lse = node->saved[ROWS_LSE];
    h.want_dx = fsdpc_edge_wanted(&node->inputs[0]);
    h.want_dw = fsdpc_edge_wanted(&node->inputs[1]);
    fsdpc_status st = all_chunks(&h);
    if (st == FSDPC_OK && h.dw) {
        st = give(tape, &node->inputs[1], h.dw);
        h.dw = NULL;
    }
    if (st == FSDPC_OK && h.dx) {
        st = give(tape, &node->inputs[0], h.dx);
        h.dx = NULL;
    }
    fsdpc_tensor_release(h.dw);
    fsdpc_tensor_release(h.dx);
    return st;
}

static const fsdpc_node_ops fused_ops = {.name = "linear_cross_entropy",
                                         .backward = fused_backward};
static const fsdpc_node_ops rows_ops = {.name = "linear_cross_entropy", .backward = rows_backward};

/* ---- forward ---- */

static size_t choose_chunk(const fsdpc_tape *tape, size_t rows, size_t out, size_t bytes,
                           size_t asked)
{
    size_t chunk_rows = asked, row_bytes = fsdpc_max_size(out, 1) * bytes;
    if (!chunk_rows && tape->few_chunks) {
        size_t least = fsdpc_max_size(256, fsdpc_ceil_div(rows, 8));
        chunk_rows = fsdpc_max_size(least, ((size_t)64 << 20) / row_bytes);
    } else if (!chunk_rows) {
        chunk_rows = fsdpc_max_size(64, ((size_t)24 << 20) / row_bytes);
    }
    return fsdpc_min_size(chunk_rows, rows);
}

static fsdpc_status head_record(const head *h, fsdpc_tensor *const inputs[2], fsdpc_tensor *targets,
                                fsdpc_tensor *y)
{
    fsdpc_node *node;
    bool separate = h->options.reduction == FSDPC_LOSS_NONE;
    FSDPC_TRY(fsdpc_op_record(h->tape, separate ? &rows_ops : &fused_ops, 2, inputs, y,
                              sizeof(head_extra), &node));
    *(head_extra *)node->extra = (head_extra){h->options, h->chunk_rows};
    if (separate) {
        fsdpc_node_save(node, ROWS_X, inputs[0]);
        fsdpc_node_save(node, ROWS_WEIGHT, inputs[1]);
        fsdpc_node_save(node, ROWS_TARGETS, targets);
        fsdpc_node_save(node, ROWS_LSE, h->lse);
        return FSDPC_OK;
    }
    if (h->dlogits) {
        fsdpc_node_save(node, FUSED_X, inputs[0]);
        fsdpc_node_save(node, FUSED_WEIGHT, inputs[1]);
    }
    fsdpc_node_save(node, FUSED_DLOGITS, h->dlogits);
    fsdpc_node_save(node, FUSED_DX, h->dx);
    fsdpc_node_save(node, FUSED_DW, h->dw);
    fsdpc_node_save(node, FUSED_SUM, (fsdpc_tensor *)h->sum);
    return FSDPC_OK;
}

static fsdpc_status head_check(const fsdpc_tensor *x, const fsdpc_tensor *weight,
                               const fsdpc_tensor *targets, const fsdpc_loss_options *options)
{
    const char *op = "linear_cross_entropy";
    FSDPC_TRY(fsdpc_loss_check(op, "x", x, targets, options));
    FSDPC_TRY(fsdpc_op_check_float(op, "weight", weight));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "weight", weight));
    if (weight->ndim != 2 || x->shape[x->ndim - 1] != weight->shape[1])
        return fsdpc_op_fail_shapes(op, "x", x, "weight", weight,
                                    "x must be (..., in) and weight (classes, in)");
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_linear_cross_entropy(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                           fsdpc_tensor *targets, const fsdpc_loss_options *options,
                                           size_t chunk_rows, fsdpc_tensor **out)
{
    FSDPC_TRY(head_check(x, weight, targets, options));
    chunk_rows = choose_chunk(tape, targets->numel, weight->shape[0], fsdpc_dtype_bytes(x->dtype),
                              chunk_rows);
    head h = head_of(tape, x, weight, targets, &(head_extra){*options, chunk_rows});
    h.want_dx = fsdpc_tape_wants(tape, 1, &x);
    h.want_dw = fsdpc_tape_wants(tape, 1, &weight);
    bool separate = options->reduction == FSDPC_LOSS_NONE;
    fsdpc_tensor *y, *sum = NULL;
    FSDPC_TRY(fsdpc_loss_result(tape, targets, options, &y));
    fsdpc_status st = fsdpc_loss_sum_create(tape, &sum);
    if (st == FSDPC_OK)
        st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, separate ? &h.rows : &h.chunk_rows,
                                 &h.lse);
    h.y = y;
    h.sum = sum;
    if (st == FSDPC_OK)
        st = all_chunks(&h);
    if (st == FSDPC_OK && (h.want_dx || h.want_dw))
        st = head_record(&h, (fsdpc_tensor *[]){x, weight}, targets, y);
    fsdpc_tensor_release(h.lse);
    fsdpc_tensor_release(sum);
    fsdpc_tensor_release(h.dlogits);
    fsdpc_tensor_release(h.dx);
    fsdpc_tensor_release(h.dw);
    return fsdpc_op_return(st, y, out);
}
