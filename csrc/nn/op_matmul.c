/* Matrix products.
 *
 * Each product is a single GEMM call. Operands that are broadcast over a batch, which is rare, are
 * first copied by expand, whose backward sums their gradients.
 */
#include "nn/op.h"
#include "nn/products.h"

enum { SAVED_A, SAVED_B };

/* ---- matmul of a batch, or of rows with one matrix ---- */

typedef struct product_extra {
    size_t m, n, k, batch;
} product_extra;

static fsdpc_gemm_args product_args(const product_extra *e, fsdpc_dtype dtype)
{
    return (fsdpc_gemm_args){.m = e->m,
                             .n = e->n,
                             .k = e->k,
                             .dtype = dtype,
                             .c_dtype = dtype,
                             .lda = e->k,
                             .ldb = e->n,
                             .ldc = e->n,
                             .batch = e->batch,
                             .stride_a = e->m * e->k,
                             .stride_b = e->k * e->n,
                             .stride_c = e->m * e->n};
}

/* da = dy b^T,  db = a^T dy */
static fsdpc_status product_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const product_extra *e = node->extra;
    if (fsdpc_edge_wanted(&node->inputs[0])) {
        fsdpc_gemm_args args = product_args(e, dy->dtype);
        args.n = e->k;
        args.k = e->n;
        args.a = dy->data;
        args.lda = e->n;
        args.stride_a = e->m * e->n;
        args.b = node->saved[SAVED_B]->data;
        args.trans_b = true;
        args.stride_c = e->m * e->k;
        FSDPC_TRY(fsdpc_op_gemm_into(tape, &node->inputs[0], &args));
    }
    if (!fsdpc_edge_wanted(&node->inputs[1]))
        return FSDPC_OK;
    fsdpc_gemm_args args = product_args(e, dy->dtype);
    args.m = e->k;
    args.k = e->m;
    args.a = node->saved[SAVED_A]->data;
    args.trans_a = true;
    args.b = dy->data;
    args.stride_b = e->m * e->n;
    args.stride_c = e->k * e->n;
    return fsdpc_op_gemm_into(tape, &node->inputs[1], &args);
}

static const fsdpc_node_ops product_ops = {.name = "matmul", .backward = product_backward};

static fsdpc_status product(fsdpc_tape *tape, fsdpc_tensor *a, fsdpc_tensor *b, fsdpc_tensor **out)
{
    product_extra e = {.m = a->shape[a->ndim - 2],
                       .n = b->shape[b->ndim - 1],
                       .k = a->shape[a->ndim - 1],
                       .batch = 1};
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < a->ndim - 2; i++)
        e.batch *= a->shape[i];
    for (int i = 0; i < a->ndim; i++)
        shape[i] = a->shape[i];
    shape[a->ndim - 1] = e.n;
    if (b->ndim == 2) {
        e.m *= e.batch;
        e.batch = 1;
    } else if (e.batch == 0) { /* the kernel treats 0 as 1: make the matrices empty instead */
        e.m = e.k = 0;
    }
    fsdpc_tensor *y;
    bool known;
    FSDPC_TRY(fsdpc_products_result(tape, a->dtype, a->ndim, shape, &y, &known));
    fsdpc_gemm_args args = product_args(&e, a->dtype);
    args.a = a->data;
    args.b = b->data;
    args.c = y->data;
    fsdpc_status st = known ? FSDPC_OK : fsdpc_op_kernels(tape)->gemm(&args, tape->stream);
    if (st == FSDPC_OK)
        st = fsdpc_products_keep(tape, y);
    fsdpc_tensor *inputs[] = {a, b};
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 2, inputs)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &product_ops, 2, inputs, y, sizeof e, &node);
        if (st == FSDPC_OK) {
            *(product_extra *)node->extra = e;
            if (fsdpc_edge_wanted(&node->inputs[1]))
                fsdpc_node_save(node, SAVED_A, a);
            if (fsdpc_edge_wanted(&node->inputs[0]))
                fsdpc_node_save(node, SAVED_B, b);
        }
    }
    return fsdpc_op_return(st, y, out);
}

/* ---- shapes: 1-D operands and broadcast batches become the forms above ---- */

/* Computes the common batch shape, or returns an error. */
static fsdpc_status batch_shape(const fsdpc_tensor *a, const fsdpc_tensor *b, int *ndim_out,
                                size_t *shape_out)
{
    int ndim = (a->ndim > b->ndim ? a->ndim : b->ndim) - 2;
    for (int i = 0; i < ndim; i++) {
        int ia = i - (ndim - (a->ndim - 2)), ib = i - (ndim - (b->ndim - 2));
        size_t na = ia >= 0 ? a->shape[ia] : 1, nb = ib >= 0 ? b->shape[ib] : 1;
        if (na != nb && na != 1 && nb != 1)
            return fsdpc_op_fail_shapes("matmul", "the first tensor", a, "the second", b,
                                        "the dimensions before the last two must broadcast");
        shape_out[i] = na == 1 ? nb : na;
    }
    *ndim_out = ndim;
    return FSDPC_OK;
}

/* Expands x's batch dimensions to `shape`, or returns x itself if they already match. */
static fsdpc_status expand_batch(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, size_t *shape,
                                 fsdpc_tensor **out)
{
    bool same = x->ndim == ndim + 2;
    for (int i = 0; same && i < ndim; i++)
        same = x->shape[i] == shape[i];
    if (same) {
        *out = fsdpc_tensor_acquire(x);
        return FSDPC_OK;
    }
    shape[ndim] = x->shape[x->ndim - 2];
    shape[ndim + 1] = x->shape[x->ndim - 1];
    return fsdpc_op_expand(tape, x, ndim + 2, shape, out);
}

static fsdpc_status batched(fsdpc_tape *tape, fsdpc_tensor *a, fsdpc_tensor *b, fsdpc_tensor **out)
{
    size_t shape[FSDPC_MAX_DIMS];
    int ndim = 0;
    fsdpc_tensor *ea, *eb;
    FSDPC_TRY(batch_shape(a, b, &ndim, shape));
    FSDPC_TRY(expand_batch(tape, a, ndim, shape, &ea));
    fsdpc_status st = expand_batch(tape, b, ndim, shape, &eb);
    if (st == FSDPC_OK) {
        st = product(tape, ea, eb, out);
        fsdpc_tensor_release(eb);
    }
    fsdpc_tensor_release(ea);
    return st;
}

/* Converts a vector to a matrix: a row if it is the left operand, a column if it is the right
 * one. */
static fsdpc_status as_matrix(fsdpc_tape *tape, fsdpc_tensor *x, bool left, fsdpc_tensor **out)
{
    if (x->ndim > 1) {
        *out = fsdpc_tensor_acquire(x);
        return FSDPC_OK;
    }
    int64_t n = (int64_t)x->numel, shape[2] = {left ? 1 : n, left ? n : 1};
    return fsdpc_op_reshape(tape, x, 2, shape, out);
}

static fsdpc_status drop_vector_dims(fsdpc_tape *tape, fsdpc_tensor *y, bool left, bool right,
                                     fsdpc_tensor **out)
{
    int64_t shape[FSDPC_MAX_DIMS];
    int ndim = 0;
    for (int i = 0; i < y->ndim; i++)
        if (!(left && i == y->ndim - 2) && !(right && i == y->ndim - 1))
            shape[ndim++] = (int64_t)y->shape[i];
    return fsdpc_op_reshape(tape, y, ndim, shape, out);
}

fsdpc_status fsdpc_op_matmul(fsdpc_tape *tape, fsdpc_tensor *a, fsdpc_tensor *b, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("matmul", "the first tensor", a));
    FSDPC_TRY(fsdpc_op_check_float("matmul", "the second tensor", b));
    FSDPC_TRY(fsdpc_op_check_same_dtype("matmul", "the first tensor", a, "the second", b));
    if (a->ndim < 1 || b->ndim < 1 ||
        a->shape[a->ndim - 1] != b->shape[b->ndim > 1 ? b->ndim - 2 : 0])
        return fsdpc_op_fail_shapes("matmul", "the first tensor", a, "the second", b,
                                    "they must be (..., m, k) and (..., k, n)");
    if (a->ndim > 1 && b->ndim > 1)
        return b->ndim == 2 ? product(tape, a, b, out) : batched(tape, a, b, out);
    fsdpc_tensor *ma, *mb, *y;
    FSDPC_TRY(as_matrix(tape, a, true, &ma));
    fsdpc_status st = as_matrix(tape, b, false, &mb);
    if (st == FSDPC_OK) {
        st = fsdpc_op_matmul(tape, ma, mb, &y);
        fsdpc_tensor_release(mb);
    }
    fsdpc_tensor_release(ma);
    if (st != FSDPC_OK)
        return st;
    st = drop_vector_dims(tape, y, a->ndim == 1, b->ndim == 1, out);
    fsdpc_tensor_release(y);
    return st;
}
