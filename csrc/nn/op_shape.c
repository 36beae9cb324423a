/* Shape operations: reshape shares memory, and operations that move elements are strided copies.
 *
 * The copy kernel iterates over a box, with one source stride and one destination stride per
 * dimension. A permutation permutes strides, an expansion sets them to zero, and a slice offsets
 * the pointer. A copy's backward is the copy with source and destination swapped. A slice's
 * gradient is added to its box of the input's gradient, so splitting a tensor into n parts zeroes
 * one gradient, not n.
 */
#include "nn/op.h"

#include <string.h>

static fsdpc_status copy_box(fsdpc_tape *tape, fsdpc_dtype dtype, int ndim, const size_t *shape,
                             void *dst, fsdpc_dtype dst_dtype, const size_t *stride_dst,
                             const void *src, const size_t *stride_src, bool accumulate)
{
    fsdpc_copy_args args = {.ndim = ndim,
                            .dst_dtype = dst_dtype,
                            .src_dtype = dtype,
                            .dst = dst,
                            .src = src,
                            .accumulate = accumulate};
    for (int i = 0; i < ndim; i++) {
        args.shape[i] = shape[i];
        args.stride_dst[i] = stride_dst[i];
        args.stride_src[i] = stride_src[i];
    }
    return fsdpc_op_kernels(tape)->copy(&args, tape->stream);
}

/* ---- reshape ---- */

static fsdpc_status reshape_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_edge *edge = &node->inputs[0];
    fsdpc_tensor *dx;
    FSDPC_TRY(fsdpc_tensor_view(dy, fsdpc_edge_ndim(edge), fsdpc_edge_shape(edge), dy->data, &dx));
    return fsdpc_op_give_owned(tape, edge, dx, FSDPC_OK);
}

static const fsdpc_node_ops reshape_ops = {.name = "reshape", .backward = reshape_backward};

static fsdpc_status infer_shape(const fsdpc_tensor *x, int ndim, const int64_t *asked,
                                size_t *shape_out)
{
    char from[FSDPC_SHAPE_TEXT], to[FSDPC_SHAPE_TEXT];
    if (ndim > FSDPC_MAX_DIMS)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "reshape: %d dimensions, at most %d", ndim,
                          FSDPC_MAX_DIMS);
    int open = -1;
    size_t numel = 1;
    for (int i = 0; i < ndim; i++) {
        if (asked[i] == -1 && open < 0) {
            open = i;
            shape_out[i] = 1;
            continue;
        }
        if (asked[i] < 0)
            return fsdpc_fail(FSDPC_ERR_SHAPE, "reshape: extent %lld; one extent may be -1",
                              (long long)asked[i]);
        shape_out[i] = (size_t)asked[i];
        if (__builtin_mul_overflow(numel, shape_out[i], &numel))
            numel = SIZE_MAX;
    }
    if (open >= 0 && numel && x->numel % numel == 0) {
        shape_out[open] = x->numel / numel;
        numel = x->numel;
    }
    if (numel == x->numel && !(open >= 0 && numel == 0 && x->numel == 0 && shape_out[open] == 1))
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_SHAPE, "reshape: a tensor of shape %s cannot have shape %s%s",
                      fsdpc_shape_text(x->ndim, x->shape, from),
                      fsdpc_shape_text(ndim, shape_out, to), open >= 0 ? " (with -1 as 1)" : "");
}

static fsdpc_status view_as(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, const size_t *shape,
                            fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_view(x, ndim, shape, x->data, &y));
    fsdpc_node *node;
    fsdpc_status st = FSDPC_OK;
    if (fsdpc_tape_wants(tape, 1, &x))
        st = fsdpc_tape_record(tape, &reshape_ops, 1, &x, y, &node);
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_reshape(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, const int64_t *shape,
                              fsdpc_tensor **out)
{
    size_t inferred[FSDPC_MAX_DIMS];
    FSDPC_TRY(fsdpc_tensor_check(x));
    FSDPC_TRY(infer_shape(x, ndim, shape, inferred));
    return view_as(tape, x, ndim, inferred, out);
}

/* ---- permute ---- */

typedef struct permute_extra {
    int dims[FSDPC_MAX_DIMS];
} permute_extra;

/* y[i_dims...] = x: copies from the permuted strides of x (or to them, for the inverse). */
static fsdpc_status permute_copy(fsdpc_tape *tape, const fsdpc_tensor *x, const int *dims,
                                 bool inverse, fsdpc_tensor **out)
{
    size_t strides[FSDPC_MAX_DIMS], picked[FSDPC_MAX_DIMS], shape[FSDPC_MAX_DIMS];
    size_t dense[FSDPC_MAX_DIMS];
    fsdpc_tensor *y;
    fsdpc_status st;
    if (!inverse) {
        fsdpc_op_strides(x->ndim, x->shape, strides);
        for (int i = 0; i < x->ndim; i++) {
            shape[i] = x->shape[dims[i]];
            picked[i] = strides[dims[i]];
        }
        FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, shape, &y));
        fsdpc_op_strides(y->ndim, y->shape, dense);
        st = copy_box(tape, x->dtype, x->ndim, shape, y->data, y->dtype, dense, x->data, picked,
                      false);
    } else {
        for (int i = 0; i < x->ndim; i++)
            shape[dims[i]] = x->shape[i];
        FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, shape, &y));
        fsdpc_op_strides(y->ndim, y->shape, strides);
        fsdpc_op_strides(x->ndim, x->shape, dense);
        for (int i = 0; i < x->ndim; i++)
            picked[i] = strides[dims[i]];
        st = copy_box(tape, x->dtype, x->ndim, x->shape, y->data, y->dtype, picked, x->data, dense,
                      false);
    }
    return fsdpc_op_return(st, y, out);
}

static fsdpc_status permute_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(permute_copy(tape, dy, ((const permute_extra *)node->extra)->dims, true, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops permute_ops = {.name = "permute", .backward = permute_backward};

fsdpc_status fsdpc_op_permute(fsdpc_tape *tape, fsdpc_tensor *x, const int *dims,
                              fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    permute_extra kept;
    bool seen[FSDPC_MAX_DIMS] = {false}, same = true;
    for (int i = 0; i < x->ndim; i++) {
        FSDPC_TRY(fsdpc_op_dim("permute", dims[i], x->ndim, &kept.dims[i]));
        if (seen[kept.dims[i]])
            return fsdpc_fail(FSDPC_ERR_VALUE, "permute: dimension %d is named twice", dims[i]);
        seen[kept.dims[i]] = true;
        same &= kept.dims[i] == i;
    }
    if (same)
        return view_as(tape, x, x->ndim, x->shape, out);
    fsdpc_tensor *y = NULL;
    fsdpc_status st = permute_copy(tape, x, kept.dims, false, &y);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &permute_ops, 1, &x, y, sizeof kept, &node);
        if (st == FSDPC_OK)
            *(permute_extra *)node->extra = kept;
    }
    return fsdpc_op_return(st, y, out);
}

fsdpc_status fsdpc_op_transpose(fsdpc_tape *tape, fsdpc_tensor *x, int dim0, int dim1,
                                fsdpc_tensor **out)
{
    int dims[FSDPC_MAX_DIMS];
    FSDPC_TRY(fsdpc_op_dim("transpose", dim0, x->ndim, &dim0));
    FSDPC_TRY(fsdpc_op_dim("transpose", dim1, x->ndim, &dim1));
    for (int i = 0; i < x->ndim; i++)
        dims[i] = i == dim0 ? dim1 : i == dim1 ? dim0 : i;
    return fsdpc_op_permute(tape, x, dims, out);
}

/* ---- expand ---- */

static fsdpc_status expand_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    return fsdpc_op_give_summed(tape, &node->inputs[0], dy, 1);
}

static const fsdpc_node_ops expand_ops = {.name = "expand", .backward = expand_backward};

fsdpc_status fsdpc_op_expand(fsdpc_tape *tape, fsdpc_tensor *x, int ndim, const size_t *shape,
                             fsdpc_tensor **out)
{
    size_t strides[FSDPC_MAX_DIMS], stride_src[FSDPC_MAX_DIMS], dense[FSDPC_MAX_DIMS];
    FSDPC_TRY(fsdpc_tensor_check(x));
    int lead = ndim - x->ndim;
    bool fits = lead >= 0 && ndim <= FSDPC_MAX_DIMS;
    fsdpc_op_strides(x->ndim, x->shape, strides);
    for (int i = 0; fits && i < ndim; i++) {
        stride_src[i] = i < lead || x->shape[i - lead] == 1 ? 0 : strides[i - lead];
        fits = i < lead || x->shape[i - lead] == 1 || x->shape[i - lead] == shape[i];
    }
    if (!fits) {
        char from[FSDPC_SHAPE_TEXT], to[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "expand: a tensor of shape %s does not broadcast to %s; extents must be "
                          "equal or 1, counted from the last",
                          fsdpc_shape_text(x->ndim, x->shape, from),
                          fsdpc_shape_text(ndim, shape, to));
    }
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, ndim, shape, &y));
    fsdpc_op_strides(ndim, shape, dense);
    fsdpc_status st =
        copy_box(tape, x->dtype, ndim, shape, y->data, y->dtype, dense, x->data, stride_src, false);
    fsdpc_node *node;
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x))
        st = fsdpc_tape_record(tape, &expand_ops, 1, &x, y, &node);
    return fsdpc_op_return(st, y, out);
}

/* ---- slice ---- */

static fsdpc_status slice_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_box *extra = node->extra; /* in the input */
    const fsdpc_edge *edge = &node->inputs[0];
    size_t dense[FSDPC_MAX_DIMS], numel = 1;
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    size_t bytes = fsdpc_dtype_bytes(target.dtype);
    for (int i = 0; i < fsdpc_edge_ndim(edge); i++)
        numel *= fsdpc_edge_shape(edge)[i];
    if (!target.accumulate)
        FSDPC_TRY(fsdpc_device_fill(tape->device, target.data, 0, numel * bytes, tape->stream));
    fsdpc_op_strides(extra->ndim, extra->shape, dense);
    return copy_box(tape, dy->dtype, extra->ndim, extra->shape,
                    (char *)target.data + extra->offset * bytes, target.dtype, extra->strides,
                    dy->data, dense, target.accumulate);
}

static const fsdpc_node_ops slice_ops = {.name = "slice", .backward = slice_backward};

/* Returns whether the slice is contiguous: every dimension before the sliced one has a count of 1,
 * and every later one is complete. */
static bool is_contiguous(const fsdpc_tensor *x, const fsdpc_range *slices)
{
    int d = 0;
    while (d < x->ndim && slices[d].count == 1)
        d++;
    if (d < x->ndim && slices[d].step != 1)
        return false;
    for (d++; d < x->ndim; d++)
        if (slices[d].count != x->shape[d] || slices[d].step != 1)
            return false;
    return true;
}

fsdpc_status fsdpc_op_slice(fsdpc_tape *tape, fsdpc_tensor *x, const fsdpc_range *slices,
                            fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    fsdpc_box box = {.ndim = x->ndim};
    size_t shape[FSDPC_MAX_DIMS], dense[FSDPC_MAX_DIMS], strides[FSDPC_MAX_DIMS], numel = 1;
    int ndim = 0;
    fsdpc_op_strides(x->ndim, x->shape, strides);
    for (int i = 0; i < x->ndim; i++) {
        box.shape[i] = slices[i].count;
        box.strides[i] = strides[i] * slices[i].step;
        box.offset += slices[i].count ? strides[i] * slices[i].start : 0;
        numel *= slices[i].count;
        if (!slices[i].drop)
            shape[ndim++] = slices[i].count;
    }
    if (!numel)
        box.offset = 0;
    char *first = (char *)x->data + box.offset * fsdpc_dtype_bytes(x->dtype);
    fsdpc_tensor *y;
    fsdpc_status st = FSDPC_OK;
    if (is_contiguous(x, slices)) {
        FSDPC_TRY(fsdpc_tensor_view(x, ndim, shape, first, &y));
    } else {
        FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, ndim, shape, &y));
        fsdpc_op_strides(box.ndim, box.shape, dense);
        st = copy_box(tape, x->dtype, box.ndim, box.shape, y->data, y->dtype, dense, first,
                      box.strides, false);
    }
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &slice_ops, 1, &x, y, sizeof box, &node);
        if (st == FSDPC_OK)
            *(fsdpc_box *)node->extra = box;
    }
    return fsdpc_op_return(st, y, out);
}

/* ---- concat ---- */

typedef struct concat_extra {
    int dim;
    size_t extents[]; /* extents of dim, for all inputs */
} concat_extra;

/* Copies `part` to or from its position in `whole`, which starts at index `before` of dim. */
static fsdpc_status concat_copy(fsdpc_tape *tape, fsdpc_tensor *whole, fsdpc_tensor *part, int dim,
                                size_t before, bool to_whole)
{
    size_t outer[FSDPC_MAX_DIMS], inner[FSDPC_MAX_DIMS];
    fsdpc_op_strides(whole->ndim, whole->shape, outer);
    fsdpc_op_strides(part->ndim, part->shape, inner);
    char *place = (char *)whole->data +
                  (part->numel ? before * outer[dim] : 0) * fsdpc_dtype_bytes(whole->dtype);
    return copy_box(tape, whole->dtype, part->ndim, part->shape, to_whole ? place : part->data,
                    whole->dtype, to_whole ? outer : inner, to_whole ? part->data : place,
                    to_whole ? inner : outer, false);
}

static fsdpc_status concat_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const concat_extra *extra = node->extra;
    const size_t *extents = extra->extents;
    size_t before = 0, shape[FSDPC_MAX_DIMS];
    memcpy(shape, dy->shape, sizeof shape);
    for (int i = 0; i < node->n_inputs; before += extents[i], i++) {
        if (!fsdpc_edge_wanted(&node->inputs[i]))
            continue;
        fsdpc_tensor *dx;
        shape[extra->dim] = extents[i];
        FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, dy->ndim, shape, &dx));
        fsdpc_status st = concat_copy(tape, dy, dx, extra->dim, before, false);
        FSDPC_TRY(fsdpc_op_give_owned(tape, &node->inputs[i], dx, st));
    }
    return FSDPC_OK;
}

static const fsdpc_node_ops concat_ops = {.name = "concat", .backward = concat_backward};

static fsdpc_status concat_record(fsdpc_tape *tape, int n, fsdpc_tensor *const *xs, int dim,
                                  fsdpc_tensor *y)
{
    fsdpc_node *node;
    size_t bytes = sizeof(concat_extra) + (size_t)n * sizeof(size_t);
    FSDPC_TRY(fsdpc_op_record(tape, &concat_ops, n, xs, y, bytes, &node));
    concat_extra *extra = node->extra;
    extra->dim = dim;
    for (int i = 0; i < n; i++)
        extra->extents[i] = xs[i]->shape[dim];
    return FSDPC_OK;
}

static fsdpc_status concat_shape(int n, fsdpc_tensor *const *xs, int dim, size_t *shape_out)
{
    memcpy(shape_out, xs[0]->shape, FSDPC_MAX_DIMS * sizeof *shape_out);
    shape_out[dim] = 0;
    for (int i = 0; i < n; i++) {
        FSDPC_TRY(fsdpc_tensor_check(xs[i]));
        FSDPC_TRY(fsdpc_op_check_same_dtype("concat", "the first tensor", xs[0], "another", xs[i]));
        bool fits = xs[i]->ndim == xs[0]->ndim;
        for (int d = 0; fits && d < xs[0]->ndim; d++)
            fits = d == dim || xs[i]->shape[d] == xs[0]->shape[d];
        if (!fits)
            return fsdpc_op_fail_shapes("concat", "the first tensor", xs[0], "another", xs[i],
                                        "all extents but the joined one must be equal");
        shape_out[dim] += xs[i]->shape[dim];
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_concat(fsdpc_tape *tape, int n, fsdpc_tensor *const *xs, int dim,
                             fsdpc_tensor **out)
{
    size_t shape[FSDPC_MAX_DIMS], before = 0;
    if (n < 1)
        return fsdpc_fail(FSDPC_ERR_VALUE, "concat: no tensors were given");
    FSDPC_TRY(fsdpc_op_dim("concat", dim, xs[0]->ndim, &dim));
    if (xs[0]->ndim == 0)
        return fsdpc_fail(FSDPC_ERR_INDEX,
                          "concat: tensors without dimensions; stack() gives them one");
    FSDPC_TRY(concat_shape(n, xs, dim, shape));
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, xs[0]->dtype, xs[0]->ndim, shape, &y));
    fsdpc_status st = FSDPC_OK;
    for (int i = 0; i < n && st == FSDPC_OK; before += xs[i]->shape[dim], i++)
        st = concat_copy(tape, y, xs[i], dim, before, true);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, n, xs))
        st = concat_record(tape, n, xs, dim, y);
    return fsdpc_op_return(st, y, out);
}

/* ---- clone ---- */

static fsdpc_status clone_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    return fsdpc_edge_give(tape, &node->inputs[0], dy);
}

static const fsdpc_node_ops clone_ops = {.name = "clone", .backward = clone_backward};

fsdpc_status fsdpc_op_clone(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_tensor_check(x));
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_status st =
        fsdpc_device_copy(tape->device, y->data, x->data, fsdpc_tensor_bytes(x), tape->stream);
    fsdpc_node *node;
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x))
        st = fsdpc_tape_record(tape, &clone_ops, 1, &x, y, &node);
    return fsdpc_op_return(st, y, out);
}
