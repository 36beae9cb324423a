/* Helpers shared by the files op_*.c: checks with uniform messages, and gradients written directly
 * to their targets. */
#ifndef FSDPC_NN_OP_H
#define FSDPC_NN_OP_H

#include "nn/node.h"
#include "nn/ops.h"

static inline const fsdpc_nn_ops *fsdpc_op_kernels(const fsdpc_tape *tape)
{
    return tape->device->nn;
}

/* Returns the product of all dimensions except the last. */
static inline size_t fsdpc_op_rows(const fsdpc_tensor *t)
{
    size_t rows = 1;
    for (int i = 0; i < t->ndim - 1; i++)
        rows *= t->shape[i];
    return rows;
}

/* Checks that the memory is valid and the dtype is a float. */
fsdpc_status fsdpc_op_check_float(const char *op, const char *what, const fsdpc_tensor *t);
/* Checks that the memory is valid and the dtype is int32 or int64. */
fsdpc_status fsdpc_op_check_ids(const char *op, const char *what, const fsdpc_tensor *t);
fsdpc_status fsdpc_op_check_same_dtype(const char *op, const char *what_a, const fsdpc_tensor *a,
                                       const char *what_b, const fsdpc_tensor *b);
/* Returns the error for two mismatched shapes; `rule` describes which shapes are required. */
fsdpc_status fsdpc_op_fail_shapes(const char *op, const char *what_a, const fsdpc_tensor *a,
                                  const char *what_b, const fsdpc_tensor *b, const char *rule);
/* Maps a dimension, which may be negative, to [0, ndim). */
fsdpc_status fsdpc_op_dim(const char *op, int dim, int ndim, int *out);

/* Calls fsdpc_tape_record and, if `extra_bytes` is not 0, stores that much zeroed memory in
 * node->extra. If it fails, releasing `out` undoes everything. */
fsdpc_status fsdpc_op_record(fsdpc_tape *tape, const fsdpc_node_ops *ops, int n,
                             fsdpc_tensor *const *inputs, fsdpc_tensor *out, size_t extra_bytes,
                             fsdpc_node **node_out);

/* Computes `a kind b` into new memory, without recording a node; both have the same dtype. */
fsdpc_status fsdpc_op_binary_compute(fsdpc_tape *tape, fsdpc_binary kind, const fsdpc_tensor *a,
                                     const fsdpc_tensor *b, fsdpc_tensor **out);
/* Applies the operation to x and the scalar, which is converted to `dtype`; if `reversed`, the
 * scalar is the first operand. */
fsdpc_status fsdpc_op_with_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                  fsdpc_scalar s, fsdpc_dtype dtype, bool reversed,
                                  fsdpc_tensor **out);
/* Like fsdpc_op_with_scalar, but for an integer tensor and an integer. */
fsdpc_status fsdpc_op_integer_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                     fsdpc_scalar s, bool reversed, fsdpc_tensor **out);
/* Connects y = kind(x), which was computed elsewhere, to x through the same node that
 * fsdpc_op_unary would create.
 */
fsdpc_status fsdpc_op_unary_record(fsdpc_tape *tape, fsdpc_unary kind, double scalar,
                                   fsdpc_tensor *x, fsdpc_tensor *y);
/* Returns the input of a tanh GELU node, or NULL for any other node. */
const fsdpc_tensor *fsdpc_op_gelu_input(const fsdpc_node *node);

/* Counts the positions along one image dimension at which a window of `kernel` elements, `dilation`
 * apart, fits. */
fsdpc_status fsdpc_op_places(const char *op, size_t extent, size_t kernel, size_t stride,
                             const size_t padding[2], size_t dilation, size_t *out);

/* Computes the strides of a dense tensor. */
void fsdpc_op_strides(int ndim, const size_t *shape, size_t *strides_out);

/* Returns the dtype of an edge's input, which must require a gradient. */
fsdpc_dtype fsdpc_edge_dtype(const fsdpc_edge *edge);
int fsdpc_edge_ndim(const fsdpc_edge *edge);
const size_t *fsdpc_edge_shape(const fsdpc_edge *edge);

/* Returns the input's gradient target, with its shape and dtype filled in. */
fsdpc_status fsdpc_op_target(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_grad_target *out);

/* Computes the product described by args (with c, c_dtype, ldc and accumulate unset) directly into
 * the input's gradient. */
fsdpc_status fsdpc_op_gemm_into(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_gemm_args *args);

/* Checks the operands and options of a loss. */
fsdpc_status fsdpc_loss_check(const char *op, const char *what, const fsdpc_tensor *x,
                              const fsdpc_tensor *targets, const fsdpc_loss_options *options);
/* Allocates an fsdpc_loss_sum, which only kernels access. */
fsdpc_status fsdpc_loss_sum_create(fsdpc_tape *tape, fsdpc_tensor **out);
/* Allocates a loss's result: a scalar, or one value per target. */
fsdpc_status fsdpc_loss_result(const fsdpc_tape *tape, const fsdpc_tensor *targets,
                               const fsdpc_loss_options *options, fsdpc_tensor **out);
/* Returns the kernels' arguments for all rows of logits, without results and gradients. */
fsdpc_cross_entropy_args fsdpc_loss_args(const fsdpc_tensor *logits, const fsdpc_tensor *targets,
                                         const fsdpc_tensor *lse,
                                         const fsdpc_loss_options *options);

/* Adds the sum of dy's rows to the gradient of a bias. */
fsdpc_status fsdpc_op_give_bias(fsdpc_tape *tape, const fsdpc_edge *edge, const fsdpc_tensor *dy);

/* Accumulates g into the input's gradient, summed over broadcast dimensions and scaled. */
fsdpc_status fsdpc_op_give_summed(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *g,
                                  double scale);

/* Passes a tensor to the edge unless `st` is an error, and releases it in either case; returns the
 * first error. */
fsdpc_status fsdpc_op_give_owned(fsdpc_tape *tape, const fsdpc_edge *edge, fsdpc_tensor *g,
                                 fsdpc_status st);

/* Ends a forward: sets *out to y on success, or releases y on failure. */
static inline fsdpc_status fsdpc_op_return(fsdpc_status st, fsdpc_tensor *y, fsdpc_tensor **out)
{
    if (st == FSDPC_OK)
        *out = y;
    else
        fsdpc_tensor_release(y);
    return st;
}

#endif
