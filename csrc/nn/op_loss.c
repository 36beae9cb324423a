/* Cross entropy, either plain or fused with the product that computes its logits.
 *
 * Note [chunked loss]. The logits of a long batch over a large vocabulary are the largest tensor
 * in a training step, and their gradient is equally large. The fused form processes a chunk of rows
 * at a time: it computes the chunk's logits, then the loss, then the logits' gradient in place. The
 * gradient of the weight may only reach its sink in backward, so the kept data depends on the
 * number of chunks:
 *
 *     one chunk   (the usual case: chunks hold 64 MiB or more) the chunk itself, now the gradient
 *                 of the logits; backward computes dx and dW from it, dW directly into the target
 *     several     dx (as big as x) and a private dW in fp32, summed chunk by chunk in forward and
 *                 added to the target in backward
 *
 * Each chunk costs another pass over all of dW, so a batch is split into at most eight chunks. In a
 * LLaMA 1B step on an H200, dW for 32,000 tokens takes 3.6 ms with eight chunks; with sixteen, it
 * took 5.1 ms.
 *
 * Recomputing the logits instead would add a third to the head's arithmetic, whereas a private dW
 * costs one more pass over a buffer of the weight's size.
 *
 * The stored gradients are those of the SUM over rows (softmax - onehot), so they are not scaled
 * down before they are rounded to bf16. Backward multiplies them by the incoming gradient and
 * divides by the number of rows that are not ignored. Sums, counts and incoming gradients stay in
 * device memory, so the host never waits for a kernel here.
 */
#include "nn/op.h"

#include "base/size.h"
#include "ops/flat_ops.h"

enum { CHUNK_BYTES = 64 << 20, CHUNK_MIN_ROWS = 256, CHUNKS_MAX = 8 };

static fsdpc_status loss_check(const char *op, const char *what, const fsdpc_tensor *x,
                               const fsdpc_tensor *targets)
{
    FSDPC_TRY(fsdpc_op_check_float(op, what, x));
    FSDPC_TRY(fsdpc_op_check_ids(op, "targets", targets));
    bool fits = x->ndim >= 1 && targets->ndim == x->ndim - 1;
    for (int i = 0; fits && i < targets->ndim; i++)
        fits = targets->shape[i] == x->shape[i];
    if (!fits)
        return fsdpc_op_fail_shapes(op, what, x, "targets", targets,
                                    "targets must have all dimensions but the last");
    return FSDPC_OK;
}

/* Allocates an fsdpc_loss_sum, which only kernels access. */
static fsdpc_status sum_create(fsdpc_tape *tape, fsdpc_tensor **out)
{
    const size_t words = sizeof(fsdpc_loss_sum) / sizeof(int64_t);
    return fsdpc_tensor_create(tape->device, FSDPC_I64, 1, &words, out);
}

/* out = x as a gradient of the mean loss, whose own gradient is `dloss`. */
static fsdpc_status loss_gradient(fsdpc_tape *tape, const fsdpc_tensor *sum,
                                  const fsdpc_tensor *dloss, const fsdpc_tensor *x,
                                  const fsdpc_tensor *out)
{
    return fsdpc_op_kernels(tape)->loss_gradient(&(fsdpc_loss_gradient_args){.dtype = x->dtype,
                                                                             .numel = x->numel,
                                                                             .sum = sum->data,
                                                                             .dloss = dloss->data,
                                                                             .x = x->data,
                                                                             .out = out->data},
                                                 tape->stream);
}

/* ---- cross entropy ---- */

typedef struct cross_entropy_extra {
    int64_t ignore_index;
} cross_entropy_extra;

enum { SAVED_LOGITS, SAVED_TARGETS, SAVED_LSE, SAVED_SUM };

static fsdpc_cross_entropy_args loss_args(const fsdpc_tensor *logits, const fsdpc_tensor *targets,
                                          const fsdpc_tensor *lse, int64_t ignore_index)
{
    return (fsdpc_cross_entropy_args){.dtype = logits->dtype,
                                      .id_dtype = targets->dtype,
                                      .rows = targets->numel,
                                      .cols = logits->shape[logits->ndim - 1],
                                      .logits = logits->data,
                                      .targets = targets->data,
                                      .ignore_index = ignore_index,
                                      .lse = lse ? lse->data : NULL};
}

static fsdpc_status cross_entropy_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const cross_entropy_extra *extra = node->extra;
    fsdpc_tensor *logits = node->saved[SAVED_LOGITS], *dx;
    /* The gradient reuses the logits' own memory if they will not be read again. */
    if (!tape->retain_graph && fsdpc_tensor_is_exclusive(logits))
        dx = fsdpc_tensor_acquire(logits);
    else
        FSDPC_TRY(
            fsdpc_tensor_create(tape->device, logits->dtype, logits->ndim, logits->shape, &dx));
    fsdpc_cross_entropy_args args =
        loss_args(logits, node->saved[SAVED_TARGETS], node->saved[SAVED_LSE], extra->ignore_index);
    args.sum = node->saved[SAVED_SUM]->data;
    args.dloss = dy->data;
    args.dlogits = dx->data;
    fsdpc_status st = fsdpc_op_kernels(tape)->cross_entropy_backward(&args, tape->stream);
    if (dx == logits) {
        /* Drop the node's reference to the logits, so that their memory belongs exclusively to the
         * gradient. */
        node->saved[SAVED_LOGITS] = NULL;
        node->freed = true;
        fsdpc_tensor *view = NULL;
        if (st == FSDPC_OK)
            st = fsdpc_tensor_detach(dx, &view);
        fsdpc_tensor_release(logits);
        fsdpc_tensor_release(dx);
        if (st != FSDPC_OK)
            return st;
        dx = view;
    }
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, st);
}

static const fsdpc_node_ops cross_entropy_ops[] = {
    {.name = "cross_entropy", .backward = cross_entropy_backward},
    {.name = "nll_loss", .backward = cross_entropy_backward},
};

fsdpc_status fsdpc_op_cross_entropy(fsdpc_tape *tape, fsdpc_tensor *logits, fsdpc_tensor *targets,
                                    int64_t ignore_index, bool logs, fsdpc_tensor **out)
{
    const fsdpc_node_ops *ops = &cross_entropy_ops[logs];
    FSDPC_TRY(loss_check(ops->name, logs ? "log_p" : "logits", logits, targets));
    fsdpc_tensor *y, *lse = NULL, *sum = NULL;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, 0, NULL, &y));
    fsdpc_status st = sum_create(tape, &sum);
    if (st == FSDPC_OK && !logs)
        st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &targets->numel, &lse);
    if (st == FSDPC_OK) {
        fsdpc_cross_entropy_args args = loss_args(logits, targets, lse, ignore_index);
        args.loss = y->data;
        args.sum = sum->data;
        st = fsdpc_op_kernels(tape)->cross_entropy(&args, tape->stream);
    }
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &logits)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, ops, 1, &logits, y, sizeof(cross_entropy_extra), &node);
        if (st == FSDPC_OK) {
            *(cross_entropy_extra *)node->extra = (cross_entropy_extra){ignore_index};
            fsdpc_node_save(node, SAVED_LOGITS, logits);
            fsdpc_node_save(node, SAVED_TARGETS, targets);
            fsdpc_node_save(node, SAVED_LSE, lse);
            fsdpc_node_save(node, SAVED_SUM, sum);
        }
    }
    fsdpc_tensor_release(lse);
    fsdpc_tensor_release(sum);
    return fsdpc_op_return(st, y, out);
}

/* ---- fused: see Note [chunked loss] ---- */

enum { FUSED_X, FUSED_WEIGHT, FUSED_DLOGITS, FUSED_DX, FUSED_DW, FUSED_SUM };

/* A forward in progress. */
typedef struct fused {
    fsdpc_tape *tape;
    fsdpc_tensor *x, *weight, *targets;
    int64_t ignore_index;
    size_t rows, in, out, chunk_rows;
    bool want_dx, want_dw;
    fsdpc_tensor *y, *sum;           /* the loss, and its sum and count so far */
    fsdpc_tensor *dlogits, *dx, *dw; /* gradients of the row sum; NULL: not kept */
    bool dw_started;
} fused;

static fsdpc_status chunk_products(fused *f, const fsdpc_tensor *dlogits, size_t first, size_t rows)
{
    size_t bytes = fsdpc_dtype_bytes(f->x->dtype);
    const fsdpc_nn_ops *kernels = fsdpc_op_kernels(f->tape);
    fsdpc_gemm_args args = {.dtype = f->x->dtype, .a = dlogits->data, .lda = f->out};
    if (f->dx) {
        fsdpc_gemm_args dx = args;
        dx.m = rows;
        dx.n = dx.ldb = dx.ldc = f->in;
        dx.k = f->out;
        dx.b = f->weight->data;
        dx.c = (char *)f->dx->data + first * f->in * bytes;
        dx.c_dtype = f->x->dtype;
        FSDPC_TRY(kernels->gemm(&dx, f->tape->stream));
    }
    if (!f->dw)
        return FSDPC_OK;
    args.m = f->out;
    args.n = args.ldb = args.ldc = f->in;
    args.k = rows;
    args.trans_a = true;
    args.b = (const char *)f->x->data + first * f->in * bytes;
    args.c = f->dw->data;
    args.c_dtype = f->dw->dtype;
    args.accumulate = f->dw_started;
    f->dw_started = true;
    return kernels->gemm(&args, f->tape->stream);
}

/* Computes the loss of rows first .. first + rows; `logits` and `lse` have space for them. */
static fsdpc_status chunk(fused *f, fsdpc_tensor *logits, const fsdpc_tensor *lse, size_t first,
                          size_t rows)
{
    size_t bytes = fsdpc_dtype_bytes(f->x->dtype);
    fsdpc_gemm_args product = {.m = rows,
                               .n = f->out,
                               .k = f->in,
                               .dtype = f->x->dtype,
                               .c_dtype = f->x->dtype,
                               .a = (const char *)f->x->data + first * f->in * bytes,
                               .lda = f->in,
                               .b = f->weight->data,
                               .ldb = f->in,
                               .trans_b = true,
                               .c = logits->data,
                               .ldc = f->out};
    FSDPC_TRY(fsdpc_op_kernels(f->tape)->gemm(&product, f->tape->stream));
    fsdpc_cross_entropy_args args = loss_args(logits, f->targets, lse, f->ignore_index);
    args.rows = rows;
    args.targets = (const char *)f->targets->data + first * fsdpc_dtype_bytes(f->targets->dtype);
    args.loss = f->y->data;
    args.sum = f->sum->data;
    args.accumulate = first > 0;
    FSDPC_TRY(fsdpc_op_kernels(f->tape)->cross_entropy(&args, f->tape->stream));
    if (!f->want_dx && !f->want_dw)
        return FSDPC_OK;
    args.dlogits = logits->data;
    FSDPC_TRY(fsdpc_op_kernels(f->tape)->cross_entropy_backward(&args, f->tape->stream));
    return f->dlogits ? FSDPC_OK : chunk_products(f, logits, first, rows);
}

static fsdpc_status all_chunks(fused *f)
{
    fsdpc_tensor *logits, *lse = NULL;
    size_t shape[] = {f->chunk_rows, f->out};
    FSDPC_TRY(fsdpc_tensor_create(f->tape->device, f->x->dtype, 2, shape, &logits));
    fsdpc_status st = fsdpc_tensor_create(f->tape->device, FSDPC_F32, 1, &f->chunk_rows, &lse);
    if (f->chunk_rows >= f->rows && (f->want_dx || f->want_dw)) {
        f->dlogits = fsdpc_tensor_acquire(logits);
    } else {
        if (st == FSDPC_OK && f->want_dx)
            st = fsdpc_tensor_create(f->tape->device, f->x->dtype, f->x->ndim, f->x->shape, &f->dx);
        if (st == FSDPC_OK && f->want_dw)
            st = fsdpc_tensor_create(f->tape->device,
                                     f->x->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32, 2,
                                     f->weight->shape, &f->dw);
    }
    size_t first = 0;
    do { /* with zero rows, the loss is NaN */
        if (st == FSDPC_OK)
            st = chunk(f, logits, lse, first, fsdpc_min_size(f->chunk_rows, f->rows - first));
        first += f->chunk_rows;
    } while (st == FSDPC_OK && first < f->rows);
    fsdpc_tensor_release(lse);
    fsdpc_tensor_release(logits);
    return st;
}

/* Computes the products of a single-chunk batch from the logits' gradient that forward kept. */
static fsdpc_status fused_backward_products(fsdpc_tape *tape, fsdpc_node *node,
                                            const fsdpc_tensor *dloss)
{
    fsdpc_tensor *dlogits = node->saved[FUSED_DLOGITS];
    const fsdpc_tensor *x = node->saved[FUSED_X], *w = node->saved[FUSED_WEIGHT];
    size_t rows = dlogits->shape[0], out = dlogits->shape[1], in = w->shape[1];
    fsdpc_tensor *scaled = fsdpc_tensor_acquire(dlogits);
    if (tape->retain_graph) {
        fsdpc_tensor_release(scaled);
        FSDPC_TRY(fsdpc_tensor_create(tape->device, dlogits->dtype, 2, dlogits->shape, &scaled));
    }
    fsdpc_status st = loss_gradient(tape, node->saved[FUSED_SUM], dloss, dlogits, scaled);
    fsdpc_gemm_args args = {.dtype = x->dtype, .a = scaled->data, .lda = out, .n = in, .ldb = in};
    if (st == FSDPC_OK && fsdpc_edge_wanted(&node->inputs[1])) {
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
    fsdpc_tensor_release(scaled);
    return st;
}

/* Scales a gradient computed in forward, so that it becomes that of the mean, and writes it to its
 * target. */
static fsdpc_status give_kept(fsdpc_tape *tape, const fsdpc_edge *edge, const fsdpc_tensor *kept,
                              const fsdpc_tensor *sum, const fsdpc_tensor *dloss)
{
    if (!kept || !fsdpc_edge_wanted(edge))
        return FSDPC_OK;
    fsdpc_tensor *scaled;
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, kept->dtype, kept->ndim, kept->shape, &scaled));
    fsdpc_status st = loss_gradient(tape, sum, dloss, kept, scaled);
    if (st == FSDPC_OK)
        st = fsdpc_op_target(tape, edge, &target);
    if (st == FSDPC_OK)
        st = fsdpc_target_write(tape, &target, scaled->data, scaled->dtype, scaled->numel);
    fsdpc_tensor_release(scaled);
    return st;
}

static fsdpc_status fused_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    if (node->saved[FUSED_DLOGITS])
        return fused_backward_products(tape, node, dy);
    const fsdpc_tensor *sum = node->saved[FUSED_SUM];
    FSDPC_TRY(give_kept(tape, &node->inputs[1], node->saved[FUSED_DW], sum, dy));
    return give_kept(tape, &node->inputs[0], node->saved[FUSED_DX], sum, dy);
}

static const fsdpc_node_ops fused_ops = {.name = "linear_cross_entropy",
                                         .backward = fused_backward};

static size_t choose_chunk(size_t rows, size_t out, size_t bytes, size_t asked)
{
    size_t chunk_rows = asked;
    if (!chunk_rows) {
        size_t least = fsdpc_max_size(CHUNK_MIN_ROWS, fsdpc_ceil_div(rows, CHUNKS_MAX));
        chunk_rows = fsdpc_max_size(least, CHUNK_BYTES / (fsdpc_max_size(out, 1) * bytes));
    }
    return fsdpc_min_size(chunk_rows, rows);
}

static fsdpc_status fused_record(const fused *f)
{
    fsdpc_tensor *inputs[] = {f->x, f->weight};
    fsdpc_node *node;
    FSDPC_TRY(fsdpc_op_record(f->tape, &fused_ops, 2, inputs, f->y, 0, &node));
    if (f->dlogits) {
        fsdpc_node_save(node, FUSED_X, f->x);
        fsdpc_node_save(node, FUSED_WEIGHT, f->weight);
    }
    fsdpc_node_save(node, FUSED_DLOGITS, f->dlogits);
    fsdpc_node_save(node, FUSED_DX, f->dx);
    fsdpc_node_save(node, FUSED_DW, f->dw);
    fsdpc_node_save(node, FUSED_SUM, f->sum);
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_linear_cross_entropy(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                           fsdpc_tensor *targets, int64_t ignore_index,
                                           size_t chunk_rows, fsdpc_tensor **out)
{
    const char *op = "linear_cross_entropy";
    FSDPC_TRY(loss_check(op, "x", x, targets));
    FSDPC_TRY(fsdpc_op_check_float(op, "weight", weight));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "weight", weight));
    if (weight->ndim != 2 || x->shape[x->ndim - 1] != weight->shape[1])
        return fsdpc_op_fail_shapes(op, "x", x, "weight", weight,
                                    "x must be (..., in) and weight (classes, in)");
    fused f = {.tape = tape,
               .x = x,
               .weight = weight,
               .targets = targets,
               .ignore_index = ignore_index,
               .rows = targets->numel,
               .in = weight->shape[1],
               .out = weight->shape[0],
               .want_dx = fsdpc_tape_wants(tape, 1, &x),
               .want_dw = fsdpc_tape_wants(tape, 1, &weight)};
    f.chunk_rows = choose_chunk(f.rows, f.out, fsdpc_dtype_bytes(x->dtype), chunk_rows);
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, 0, NULL, &f.y));
    fsdpc_status st = sum_create(tape, &f.sum);
    if (st == FSDPC_OK)
        st = all_chunks(&f);
    if (st == FSDPC_OK && (f.want_dx || f.want_dw))
        st = fused_record(&f);
    fsdpc_tensor_release(f.sum);
    fsdpc_tensor_release(f.dlogits);
    fsdpc_tensor_release(f.dx);
    fsdpc_tensor_release(f.dw);
    return fsdpc_op_return(st, f.y, out);
}
