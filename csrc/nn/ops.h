/* Operations on tensors, each with its backward.
 *
 * Every function checks its inputs (valid memory, dtypes, shapes) and runs one of the device's
 * kernels. If an input requires grad and recording is on, the function creates a node. *out is a
 * new reference, written only on success. Elementwise operations promote floats as PyTorch does and
 * broadcast as NumPy does; matrix products and normalisations require equal dtypes. Errors name the
 * operation and show both shapes or dtypes.
 *
 * The views, which share memory, are the results of reshape, detach, a contiguous slice, a cast to
 * the same dtype, and a no-op dropout. All other results are in new memory.
 */
#ifndef FSDPC_NN_OPS_H_
#define FSDPC_NN_OPS_H_

#include "nn/scalar.h"
#include "nn/tape.h"

/* ---- elementwise: op_elementwise.c ---- */

fsdpc_status fsdpc_op_unary(fsdpc_tape *tape, fsdpc_unary kind, double scalar, fsdpc_tensor *x,
                            fsdpc_tensor **out);
fsdpc_status fsdpc_op_binary(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *a, fsdpc_tensor *b,
                             fsdpc_tensor **out);
/* Returns the common dtype of a and b, by PyTorch's rules. */
fsdpc_dtype fsdpc_op_result_type(const fsdpc_tensor *a, const fsdpc_tensor *b);
/* x kind s, or s kind x if `reversed`: op_scalar.c. If s is integral, an integer tensor keeps its
 * dtype: comparisons are exact, and arithmetic fails if the dtype cannot hold s. */
fsdpc_status fsdpc_op_binary_scalar(fsdpc_tape *tape, fsdpc_binary kind, fsdpc_tensor *x,
                                    fsdpc_scalar s, bool reversed, fsdpc_tensor **out);
fsdpc_status fsdpc_op_cast(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_dtype dtype,
                           fsdpc_tensor **out);
fsdpc_status fsdpc_op_swiglu(fsdpc_tape *tape, fsdpc_tensor *gate, fsdpc_tensor *up,
                             fsdpc_tensor **out);
/* Uses the tape's next random stream. */
fsdpc_status fsdpc_op_dropout(fsdpc_tape *tape, fsdpc_tensor *x, double p, bool training,
                              fsdpc_tensor **out);

/* ---- shapes: op_shape.c ---- */

/* One extent may be -1, in which case it is inferred. */
fsdpc_status fsdpc_op_reshape(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, const int64_t *shape,
                              fsdpc_tensor **out);
fsdpc_status fsdpc_op_permute(fsdpc_tape *tape, fsdpc_tensor *x, const int *dims,
                              fsdpc_tensor **out);
fsdpc_status fsdpc_op_transpose(fsdpc_tape *tape, fsdpc_tensor *x, int dim0, int dim1,
                                fsdpc_tensor **out);
fsdpc_status fsdpc_op_expand(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, const size_t *shape,
                             fsdpc_tensor **out);
fsdpc_status fsdpc_op_concat(fsdpc_tape *tape, int n, fsdpc_tensor *const *xs, int dim,
                             fsdpc_tensor **out);
/* Reverse the dimensions whose flag is set; shift one dimension cyclically: op_flip.c */
fsdpc_status fsdpc_op_flip(fsdpc_tape *tape, fsdpc_tensor *x, const bool *dims, fsdpc_tensor **out);
fsdpc_status fsdpc_op_roll(fsdpc_tape *tape, fsdpc_tensor *x, int64_t shift, int dim,
                           fsdpc_tensor **out);
fsdpc_status fsdpc_op_clone(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor **out);

/* Elements start, start + step, ... of each dimension; `drop` removes a dimension of size one. */
typedef struct fsdpc_range {
    size_t start, count, step;
    bool drop;
} fsdpc_range;
fsdpc_status fsdpc_op_slice(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_range *slices,
                            fsdpc_tensor **out);

/* ---- writes in place: op_write.c ---- */

/* A box within a dense tensor's memory, relative to its first element. */
typedef struct fsdpc_box {
    size_t offset; /* position of the box's first element */
    int ndim;
    size_t shape[FSDPC_MAX_DIMS];
    size_t strides[FSDPC_MAX_DIMS];
} fsdpc_box;
/* Returns whether the value overlaps the memory range that the box spans. */
bool fsdpc_box_overlaps(const fsdpc_tensor *x, const fsdpc_box *box, const fsdpc_tensor *value);
/* x[box] = value, broadcast (extra leading extents of 1 are allowed) and converted; the value may
 * be part of x. Increments the version. `out` may be given if x has floats. If x or the value
 * requires grad, the write is recorded: *out, which replaces x, is a tensor over x's memory with
 * the write's node. Otherwise *out is unchanged. */
fsdpc_status fsdpc_op_write(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_box *box,
                            fsdpc_tensor *value, fsdpc_tensor **out);

/* ---- reductions: op_reduce.c ---- */

/* Sums over the dimensions whose flag is set; there is one flag per dimension. */
fsdpc_status fsdpc_op_sum(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced, bool keepdim,
                          bool mean, fsdpc_tensor **out);
/* Sums squares in the same way; for 16-bit floats, the result is F32. */
fsdpc_status fsdpc_op_sum_squares(fsdpc_tape *tape, fsdpc_tensor *x, const bool *reduced,
                                  bool keepdim, fsdpc_tensor **out);
/* Computes a cumulative sum along a dimension of floats, I32 or I64. */
fsdpc_status fsdpc_op_cumsum(fsdpc_tape *tape, fsdpc_tensor *x, int dim, fsdpc_tensor **out);
/* Computes the logarithm of the sum of exponentials along a dimension. */
fsdpc_status fsdpc_op_logsumexp(fsdpc_tape *tape, fsdpc_tensor *x, int dim, bool keepdim,
                                fsdpc_tensor **out);
/* Works along any dimension; dimensions other than the last cost two copies. */
fsdpc_status fsdpc_op_softmax(fsdpc_tape *tape, fsdpc_tensor *x, int dim, bool log,
                              fsdpc_tensor **out);

/* ---- products: op_matmul.c, op_linear.c, op_quantized.c ---- */

/* 1-D, 2-D and batched as in NumPy. */
fsdpc_status fsdpc_op_matmul(fsdpc_tape *tape, fsdpc_tensor *a, fsdpc_tensor *b,
                             fsdpc_tensor **out);
/* x (..., in), weight (out, in) or with `in_out` (in, out), bias (out) or NULL -> (..., out) */
fsdpc_status fsdpc_op_linear(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                             fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out);
/* tanh gelu of linear's result */
fsdpc_status fsdpc_op_linear_gelu(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                  fsdpc_tensor *bias, bool in_out, fsdpc_tensor **out);

/* linear() with a weight of `scheme` (ops/weight_code.h): codes (out, bytes) of x's columns, U8, which
 * get no gradient */
fsdpc_status fsdpc_op_quantized_linear(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *codes,
                                       const char *scheme, fsdpc_tensor *bias, fsdpc_tensor **out);
/* F32 values (rows, columns) -> codes, and codes -> values of `dtype`; no gradients */
fsdpc_status fsdpc_op_quantize(fsdpc_tape *tape, fsdpc_tensor *values, const char *scheme,
                               fsdpc_tensor **out);
fsdpc_status fsdpc_op_dequantize(fsdpc_tape *tape, fsdpc_tensor *codes, const char *scheme,
                                 size_t columns, fsdpc_dtype dtype, fsdpc_tensor **out);

/* ---- windows of images: op_conv.c, op_pool.c ---- */

typedef struct fsdpc_conv_options { /* for height and width */
    size_t stride[2], dilation[2];
    size_t padding[2][2]; /* zeros before and after */
    size_t groups;
} fsdpc_conv_options;
/* x (N, C, H, W), weight (out, C / groups, kH, kW), bias (out) or NULL -> (N, out, oH, oW).
 * Supported only on the CPU and the null device. */
fsdpc_status fsdpc_op_conv2d(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                             fsdpc_tensor *bias, const fsdpc_conv_options *options,
                             fsdpc_tensor **out);

typedef struct fsdpc_pool_options { /* for height and width */
    bool max;                       /* otherwise the mean, including padding zeros */
    size_t kernel[2], stride[2], padding[2];
} fsdpc_pool_options;
/* x (N, C, H, W) -> (N, C, oH, oW); only for the CPU and the null device */
fsdpc_status fsdpc_op_pool2d(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_pool_options *options,
                             fsdpc_tensor **out);

/* ---- layers: op_norm.c, op_moments.c, op_attention.c, op_embedding.c ---- */

/* Normalises over the last dimension; weight and bias (cols) may be NULL. */
fsdpc_status fsdpc_op_norm(fsdpc_tape *tape, bool layer, fsdpc_tensor *x, fsdpc_tensor *weight,
                           fsdpc_tensor *bias, double eps, fsdpc_tensor **out);
/* Returns the means of x's `rows` rows, then their sums of squared distances from the mean, as (2,
 * rows) of F32 (F64 for F64), without gradients. If dy is given, returns the sums of dy, then of dy
 * * (x - shift). dy, shift may be NULL. */
fsdpc_status fsdpc_op_row_moments(fsdpc_tape *tape, fsdpc_tensor *x, size_t rows, fsdpc_tensor *dy,
                                  fsdpc_tensor *shift, fsdpc_tensor **out);
typedef struct fsdpc_row_values { /* in the dtype of moments; all but a may be NULL */
    fsdpc_tensor *a, *shift, *b, *c;
} fsdpc_row_values;
/* (x - shift) * a + y * b + c, without gradients; y may be NULL */
fsdpc_status fsdpc_op_row_affine(fsdpc_tape *tape, fsdpc_tensor *x, size_t rows,
                                 const fsdpc_row_values *values, fsdpc_tensor *y,
                                 fsdpc_tensor **out);
/* x (B, T, H, D); cos and sin (at least T, D/2), no gradient */
fsdpc_status fsdpc_op_rotary(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *cosines,
                             fsdpc_tensor *sines, fsdpc_tensor **out);

typedef struct fsdpc_attention_options {
    bool causal;
    bool default_scale; /* 1 / sqrt(D) */
    double scale;
    bool tokens_first; /* (B, T, H, D) instead of (B, H, T, D) */
    size_t window;     /* keys that a query sees, including its own; 0: all; requires causal */
} fsdpc_attention_options;
/* mask may be NULL, bool, or floats, which are added and get no gradient. The mask has up to four
 * dimensions, which are broadcast to (B, H, Tq, Tk) in either layout. */
fsdpc_status fsdpc_op_attention(fsdpc_tape *tape, fsdpc_tensor *q, fsdpc_tensor *k, fsdpc_tensor *v,
                                fsdpc_tensor *mask, const fsdpc_attention_options *options,
                                fsdpc_tensor **out);
/* Does the same for rows that hold several documents, which do not attend to each other. q, k and v
 * have the same number of tokens; `lengths` contains the number of tokens per document, row by row,
 * and no document crosses a row's end. */
fsdpc_status fsdpc_op_varlen_attention(fsdpc_tape *tape, fsdpc_tensor *q, fsdpc_tensor *k,
                                       fsdpc_tensor *v, const fsdpc_attention_options *options,
                                       size_t documents, const size_t *lengths, fsdpc_tensor **out);
/* ids of any shape, weight (rows, dim) -> (..., dim); row `padding` of weight, unless it is -1,
 * gets no gradient */
fsdpc_status fsdpc_op_embedding(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *weight,
                                int64_t padding, fsdpc_tensor **out);
/* Computes, on the host, the positions (I64) in a tensor of this shape of the elements that an
 * index selects along dim. *out is NULL if an index is out of range. */
fsdpc_status fsdpc_op_element_places(fsdpc_tape *tape, const fsdpc_tensor *index, int ndim,
                                     const size_t *shape, int dim, fsdpc_tensor **out);
/* ids (...), x (..., dim) -> (rows, dim): row r is the sum of the x whose id is r, or zeros. */
fsdpc_status fsdpc_op_scatter_rows(fsdpc_tape *tape, fsdpc_tensor *ids, fsdpc_tensor *x,
                                   size_t rows, fsdpc_tensor **out);

/* ---- losses: op_loss.c, op_head.c. The result is an F32 scalar, or one F32 per target. ---- */

typedef enum fsdpc_loss_reduction {
    FSDPC_LOSS_MEAN,
    FSDPC_LOSS_SUM,
    FSDPC_LOSS_NONE /* the losses of all targets, 0 for those that are ignored */
} fsdpc_loss_reduction;
typedef struct fsdpc_loss_options {
    int64_t ignore_index;
    fsdpc_loss_reduction reduction;
    double smoothing; /* part of the target that is spread over all classes, in [0, 1) */
    double z_loss;    /* factor of the squared logarithm of the softmax's denominator */
    double softcap; /* logits become softcap * tanh(logits / softcap); 0: not. Only for the head */
} fsdpc_loss_options;
/* logits (..., classes), targets (...); with `logs`, logits are log-probabilities, and smoothing
 * and z_loss are 0. */
fsdpc_status fsdpc_op_cross_entropy(fsdpc_tape *tape, fsdpc_tensor *logits, fsdpc_tensor *targets,
                                    const fsdpc_loss_options *options, bool logs,
                                    fsdpc_tensor **out);
/* cross_entropy(linear(x, weight), targets) in chunks of rows; chunk_rows 0: an automatic size. */
fsdpc_status fsdpc_op_linear_cross_entropy(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                                           fsdpc_tensor *targets, const fsdpc_loss_options *options,
                                           size_t chunk_rows, fsdpc_tensor **out);

/* ---- operations defined by the caller: op_custom.c ---- */

typedef struct fsdpc_custom_ops {
    const char *name;
    /* dys[i] is NULL for an output without a gradient. dxs_out[i] (NULL on entry) may be set to a
     * tensor of the input's shape and dtype, which the caller then owns; it is used only if
     * wanted[i]. */
    fsdpc_status (*backward)(void *arg, int n_out, fsdpc_tensor *const *dys, int n_in,
                             const bool *wanted, fsdpc_tensor **dxs_out);
    void (*release)(void *arg);
} fsdpc_custom_ops;

/* Connects the outputs, which must have no node and no other users, to the inputs. The node saves
 * up to FSDPC_NODE_MAX_SAVED tensors, which backward may read until `release`; NULL: none. If no
 * gradients flow, it calls release(arg) at once, unless `saved` is given. On failure, the caller
 * keeps ownership of arg. */
typedef struct fsdpc_saved_list {
    int n;
    fsdpc_tensor *t[FSDPC_NODE_MAX_SAVED];
} fsdpc_saved_list;
fsdpc_status fsdpc_op_custom(fsdpc_tape *tape, const fsdpc_custom_ops *ops, void *arg,
                             const fsdpc_saved_list *saved, int n_in, fsdpc_tensor *const *inputs,
                             int n_out, fsdpc_tensor *const *outputs);

#endif
