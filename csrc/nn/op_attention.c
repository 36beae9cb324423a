/* Attention, and the rotary embedding that is applied to its queries and keys.
 *
 * The kernel accepts separate strides for batch, token and head, so both PyTorch's layout (B, H, T,
 * D) and (B, T, H, D) work without copies. The latter is the layout of a projection's output and
 * needs no transposes. Backward needs the inputs, the output, and one float per query and head (two
 * with a mask).
 *
 * If several documents share a row, each gets its own kernel call over its part of the same memory.
 * No mask is needed, and nothing is computed across documents. The floats kept for backward are
 * stored document by document and use no more memory than for whole rows.
 */
#include "nn/op.h"
#include "nn/products.h"

#include <math.h>
#include <stdlib.h>

#include "base/size.h"

enum { SAVED_Q, SAVED_K, SAVED_V, SAVED_OUT, SAVED_LSE, SAVED_MASK };

/* A node's saved state; without documents, each query attends over its whole row. */
typedef struct attention_kept {
    fsdpc_attention_options options;
    size_t documents;
    size_t lengths[]; /* (documents): tokens per document, row by row */
} attention_kept;

/* Returns the index of the token dimension in a layout's shape. */
static int token_dim(const fsdpc_attention_options *options)
{
    return options->tokens_first ? 1 : 2;
}

static void set_strides(const fsdpc_attention_options *options, const fsdpc_tensor *t,
                        size_t stride[3])
{
    size_t d = t->shape[3], dense[FSDPC_MAX_DIMS];
    fsdpc_op_strides(4, t->shape, dense);
    stride[0] = dense[0];
    stride[1] = options->tokens_first ? dense[1] : d;
    stride[2] = options->tokens_first ? d : dense[1];
}

static fsdpc_attention_args attention_args(const fsdpc_attention_options *options,
                                           const fsdpc_tensor *q, const fsdpc_tensor *k,
                                           const fsdpc_tensor *v, const fsdpc_tensor *y,
                                           const fsdpc_tensor *lse, const fsdpc_tensor *mask)
{
    int t = token_dim(options), h = 3 - t;
    fsdpc_attention_args args = {.dtype = q->dtype,
                                 .batch = q->shape[0],
                                 .tokens_q = q->shape[t],
                                 .tokens_k = k->shape[t],
                                 .heads = q->shape[h],
                                 .kv_heads = k->shape[h],
                                 .dim = q->shape[3],
                                 .scale = options->scale,
                                 .causal = options->causal,
                                 .window = options->window,
                                 .q = q->data,
                                 .k = k->data,
                                 .v = v->data,
                                 .out = y->data,
                                 .lse = lse->data};
    set_strides(options, q, args.stride_q);
    set_strides(options, k, args.stride_k);
    set_strides(options, v, args.stride_v);
    set_strides(options, y, args.stride_out);
    if (mask) {
        args.mask = mask->data;
        args.mask_dtype = mask->dtype;
        size_t stride = 1;
        for (int i = mask->ndim, at = 3; i-- > 0; at--) {
            args.stride_mask[at] = mask->shape[i] == 1 ? 0 : stride;
            stride *= mask->shape[i];
        }
    }
    return args;
}

/* Returns `base` advanced to a row and token. */
static void *moved(const fsdpc_attention_args *x, const void *base, const size_t stride[3],
                   size_t row, size_t token)
{
    size_t elements = row * stride[0] + token * stride[1];
    return base ? (char *)base + elements * fsdpc_dtype_bytes(x->dtype) : NULL;
}

/* Selects `rows` x `tokens`, beginning at token `first`, an index over all rows. */
static fsdpc_attention_args part_of(const fsdpc_attention_args *x, size_t first, size_t rows,
                                    size_t tokens)
{
    fsdpc_attention_args part = *x;
    size_t row = first / x->tokens_q, token = first % x->tokens_q;
    part.batch = rows;
    part.tokens_q = part.tokens_k = tokens;
    part.q = moved(x, x->q, x->stride_q, row, token);
    part.k = moved(x, x->k, x->stride_k, row, token);
    part.v = moved(x, x->v, x->stride_v, row, token);
    part.out = moved(x, x->out, x->stride_out, row, token);
    part.lse = x->lse + first * x->heads;
    part.dout = moved(x, x->dout, x->stride_out, row, token);
    part.dq = moved(x, x->dq, x->stride_q, row, token);
    part.dk = moved(x, x->dk, x->stride_k, row, token);
    part.dv = moved(x, x->dv, x->stride_v, row, token);
    return part;
}

typedef fsdpc_status (*attention_fn)(const fsdpc_attention_args *args, fsdpc_stream *stream);

/* Runs the kernel on whole rows or on individual documents; consecutive single-document rows share
 * one call. */
static fsdpc_status run(fsdpc_tape *tape, const attention_kept *kept, attention_fn kernel,
                        const fsdpc_attention_args *x)
{
    if (kept->documents == 0)
        return kernel(x, tape->stream);
    size_t first = 0;
    for (size_t i = 0; i < kept->documents;) {
        size_t tokens = kept->lengths[i++], rows = 1;
        for (; tokens == x->tokens_q && i < kept->documents && kept->lengths[i] == tokens; i++)
            rows++;
        fsdpc_attention_args part = part_of(x, first, rows, tokens);
        FSDPC_TRY(kernel(&part, tape->stream));
        first += rows * tokens;
    }
    return FSDPC_OK;
}

static fsdpc_status attention_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const attention_kept *kept = node->extra;
    fsdpc_tensor *d[3] = {NULL, NULL, NULL};
    fsdpc_status st = FSDPC_OK;
    for (int i = 0; i < 3 && st == FSDPC_OK; i++)
        st = fsdpc_tensor_create(tape->device, dy->dtype, 4, node->saved[i]->shape, &d[i]);
    if (st == FSDPC_OK) {
        fsdpc_attention_args args = attention_args(
            &kept->options, node->saved[SAVED_Q], node->saved[SAVED_K], node->saved[SAVED_V],
            node->saved[SAVED_OUT], node->saved[SAVED_LSE], node->saved[SAVED_MASK]);
        args.dout = dy->data;
        args.dq = d[0]->data;
        args.dk = d[1]->data;
        args.dv = d[2]->data;
        st = run(tape, kept, fsdpc_op_kernels(tape)->attention_backward, &args);
    }
    for (int i = 0; i < 3; i++) {
        if (st == FSDPC_OK && fsdpc_edge_wanted(&node->inputs[i]))
            st = fsdpc_edge_give(tape, &node->inputs[i], d[i]);
        fsdpc_tensor_release(d[i]);
    }
    return st;
}

static const fsdpc_node_ops attention_ops = {.name = "scaled_dot_product_attention",
                                             .backward = attention_backward};

static fsdpc_status attention_check(const fsdpc_attention_options *options, const fsdpc_tensor *q,
                                    const fsdpc_tensor *k, const fsdpc_tensor *v)
{
    const char *op = "scaled_dot_product_attention";
    int t = token_dim(options), h = 3 - t;
    FSDPC_TRY(fsdpc_op_check_float(op, "q", q));
    FSDPC_TRY(fsdpc_op_check_float(op, "k", k));
    FSDPC_TRY(fsdpc_op_check_float(op, "v", v));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "q", q, "k", k));
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "q", q, "v", v));
    if (!fsdpc_shape_equal(k, v))
        return fsdpc_op_fail_shapes(op, "k", k, "v", v, "they must be equal");
    if (q->ndim != 4 || k->ndim != 4 || q->shape[0] != k->shape[0] || q->shape[3] != k->shape[3])
        return fsdpc_op_fail_shapes(op, "q", q, "k", k,
                                    options->tokens_first ? "they must be (B, T, heads, D)"
                                                          : "they must be (B, heads, T, D)");
    if (k->shape[h] ? q->shape[h] % k->shape[h] != 0 : q->shape[h] != 0)
        return fsdpc_op_fail_shapes(op, "q", q, "k", k,
                                    "heads of q must be a multiple of heads of k");
    if (options->causal && q->shape[t] > k->shape[t])
        return fsdpc_op_fail_shapes(op, "q", q, "k", k,
                                    "causal attention needs at least as many keys as queries");
    return FSDPC_OK;
}

static fsdpc_status mask_check(const fsdpc_attention_options *options, const fsdpc_tensor *q,
                               const fsdpc_tensor *k, const fsdpc_tensor *mask)
{
    int t = token_dim(options), h = 3 - t;
    size_t shape[] = {q->shape[0], q->shape[h], q->shape[t], k->shape[t]};
    bool fits = mask->ndim <= 4;
    for (int i = mask->ndim, at = 3; fits && i-- > 0; at--)
        fits = mask->shape[i] == shape[at] || mask->shape[i] == 1;
    return fits ? FSDPC_OK
                : fsdpc_op_fail_shapes("scaled_dot_product_attention", "mask", mask, "q", q,
                                       "a mask must broadcast to (B, heads, Tq, Tk)");
}

/* Takes over `kept`. */
static fsdpc_status attend(fsdpc_tape *tape, fsdpc_tensor *q, fsdpc_tensor *k, fsdpc_tensor *v,
                           fsdpc_tensor *mask, attention_kept *kept, fsdpc_tensor **out)
{
    fsdpc_attention_options *options = &kept->options;
    if (options->default_scale)
        options->scale = q->shape[3] ? 1 / sqrt((double)q->shape[3]) : 1;
    int t = token_dim(options), h = 3 - t;
    size_t lse_shape[] = {mask ? 2 : 1, q->shape[0], q->shape[h], q->shape[t]};
    fsdpc_tensor *y = NULL, *lse = NULL;
    bool known;
    fsdpc_status st = fsdpc_products_result(tape, q->dtype, 4, q->shape, &y, &known);
    if (st == FSDPC_OK)
        st = fsdpc_products_result(tape, FSDPC_F32, 4, lse_shape, &lse, &known);
    if (st == FSDPC_OK && !known) {
        fsdpc_attention_args args = attention_args(options, q, k, v, y, lse, mask);
        st = run(tape, kept, fsdpc_op_kernels(tape)->attention, &args);
    }
    if (st == FSDPC_OK)
        st = fsdpc_products_keep(tape, y);
    if (st == FSDPC_OK)
        st = fsdpc_products_keep(tape, lse);
    fsdpc_tensor *inputs[] = {q, k, v};
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 3, inputs)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &attention_ops, 3, inputs, y, 0, &node);
        if (st == FSDPC_OK) {
            node->extra = kept;
            kept = NULL;
            for (int i = 0; i < 3; i++)
                fsdpc_node_save(node, i, inputs[i]);
            fsdpc_node_save(node, SAVED_LSE, lse);
            if (mask)
                fsdpc_node_save(node, SAVED_MASK, mask);
            st = fsdpc_node_save_output(node, SAVED_OUT, y);
        }
    }
    free(kept);
    fsdpc_tensor_release(lse);
    return fsdpc_op_return(st, y, out);
}

static fsdpc_status keep(const fsdpc_attention_options *options, size_t documents,
                         const size_t *lengths, attention_kept **out)
{
    size_t bytes;
    FSDPC_TRY(fsdpc_mul_size(documents, sizeof *lengths, &bytes));
    FSDPC_TRY(fsdpc_add_size(bytes, sizeof **out, &bytes));
    attention_kept *kept = malloc(bytes);
    if (!kept)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the lengths of %zu documents", documents);
    kept->options = *options;
    kept->documents = documents;
    for (size_t i = 0; i < documents; i++)
        kept->lengths[i] = lengths[i];
    *out = kept;
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_attention(fsdpc_tape *tape, fsdpc_tensor *q, fsdpc_tensor *k, fsdpc_tensor *v,
                                fsdpc_tensor *mask, const fsdpc_attention_options *options,
                                fsdpc_tensor **out)
{
    attention_kept *kept = NULL;
    FSDPC_TRY(attention_check(options, q, k, v));
    if (mask)
        FSDPC_TRY(mask_check(options, q, k, mask));
    FSDPC_TRY(keep(options, 0, NULL, &kept));
    return attend(tape, q, k, v, mask, kept, out);
}

/* Checks that each row of `tokens` tokens consists of whole documents. */
static fsdpc_status lengths_check(size_t rows, size_t tokens, size_t documents,
                                  const size_t *lengths)
{
    size_t row = 0, inside = 0; /* tokens of the row used by previous documents */
    for (size_t i = 0; i < documents; i++) {
        if (row == rows || lengths[i] == 0 || lengths[i] > tokens - inside)
            return fsdpc_fail(FSDPC_ERR_SHAPE,
                              "varlen_attention: document %zu has %zu tokens, and %zu are left of "
                              "its row: the lengths of each row must be at least 1 and add up to "
                              "its %zu tokens",
                              i, lengths[i], row == rows ? 0 : tokens - inside, tokens);
        inside += lengths[i];
        if (inside == tokens) {
            row++;
            inside = 0;
        }
    }
    if (tokens && row < rows)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "varlen_attention: %zu documents end after %zu tokens of row %zu: the "
                          "lengths of all %zu rows must add up to %zu tokens each",
                          documents, inside, row, rows, tokens);
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_varlen_attention(fsdpc_tape *tape, fsdpc_tensor *q, fsdpc_tensor *k,
                                       fsdpc_tensor *v, const fsdpc_attention_options *options,
                                       size_t documents, const size_t *lengths, fsdpc_tensor **out)
{
    attention_kept *kept = NULL;
    int t = token_dim(options);
    FSDPC_TRY(attention_check(options, q, k, v));
    if (q->shape[t] != k->shape[t])
        return fsdpc_op_fail_shapes("varlen_attention", "q", q, "k", k,
                                    "documents need as many keys as queries");
    FSDPC_TRY(lengths_check(q->shape[0], q->shape[t], documents, lengths));
    if (tape->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "varlen_attention inside a captured step, whose replays would keep the "
                          "lengths of its documents: run this step without graph_step");
    FSDPC_TRY(keep(options, documents, lengths, &kept));
    return attend(tape, q, k, v, NULL, kept, out);
}

/* ---- rotary ---- */

enum { SAVED_COS, SAVED_SIN };

static fsdpc_status rotate(fsdpc_tape *tape, const fsdpc_tensor *x, const fsdpc_tensor *cosines,
                           const fsdpc_tensor *sines, bool inverse, fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, 4, x->shape, &y));
    fsdpc_rotary_args args = {.dtype = x->dtype,
                              .batch = x->shape[0],
                              .tokens = x->shape[1],
                              .heads = x->shape[2],
                              .dim = x->shape[3],
                              .cosines = cosines->data,
                              .sines = sines->data,
                              .inverse = inverse,
                              .x = x->data,
                              .y = y->data};
    return fsdpc_op_return(fsdpc_op_kernels(tape)->rotary(&args, tape->stream), y, out);
}

static fsdpc_status rotary_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(rotate(tape, dy, node->saved[SAVED_COS], node->saved[SAVED_SIN], true, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops rotary_ops = {.name = "rotary", .backward = rotary_backward};

static fsdpc_status rotary_f32(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *cosines,
                               fsdpc_tensor *sines, fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(rotate(tape, x, cosines, sines, false, &y));
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &rotary_ops, 1, &x, y, 0, &node);
        if (st == FSDPC_OK) {
            fsdpc_node_save(node, SAVED_COS, cosines);
            fsdpc_node_save(node, SAVED_SIN, sines);
        }
    }
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_rotary(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *cosines,
                             fsdpc_tensor *sines, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("rotary", "x", x));
    FSDPC_TRY(fsdpc_op_check_float("rotary", "cos", cosines));
    FSDPC_TRY(fsdpc_op_check_float("rotary", "sin", sines));
    if (x->ndim != 4 || x->shape[3] % 2)
        return fsdpc_op_fail_shapes("rotary", "x", x, "cos", cosines,
                                    "x must be (B, T, heads, D) with an even D");
    if (cosines->ndim != 2 || cosines->shape[0] < x->shape[1] ||
        cosines->shape[1] != x->shape[3] / 2)
        return fsdpc_op_fail_shapes("rotary", "x", x, "cos", cosines,
                                    "cos must be (T or more, D/2) for x (B, T, heads, D)");
    if (!fsdpc_shape_equal(cosines, sines))
        return fsdpc_op_fail_shapes("rotary", "cos", cosines, "sin", sines, "they must be equal");
    fsdpc_tensor *c, *s;
    FSDPC_TRY(fsdpc_op_cast(tape, cosines, FSDPC_F32, &c));
    fsdpc_status st = fsdpc_op_cast(tape, sines, FSDPC_F32, &s);
    if (st == FSDPC_OK) {
        st = rotary_f32(tape, x, c, s, out);
        fsdpc_tensor_release(s);
    }
    fsdpc_tensor_release(c);
    return st;
}
