/* Row moments and row-wise affine maps, without gradients.
 *
 * Python builds group and batch norm from these (functional/normalization.py). A batch norm may
 * need to sum small tensors over ranks, which no operation here can do. The norms are therefore
 * custom nodes that call these functions for the passes over the large tensors.
 *
 * A tensor of any shape is treated as `rows` rows. Row values are fp32, or float64 for float64
 * tensors. If there are fewer values than rows, the values repeat.
 */
#include "nn/op.h"

static fsdpc_status check_rows(const char *op, const fsdpc_tensor *x, size_t rows, size_t *cols_out)
{
    FSDPC_TRY(fsdpc_op_check_float(op, "x", x));
    if (rows ? x->numel % rows : x->numel)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "%s: %zu rows of %zu elements; they divide them", op,
                          rows, x->numel);
    *cols_out = rows ? x->numel / rows : 0;
    return FSDPC_OK;
}

/* Checks that another tensor has x's dtype and number of elements; accepts NULL. */
static fsdpc_status check_beside(const char *op, const fsdpc_tensor *x, const fsdpc_tensor *y)
{
    if (!y)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "the other tensor", y));
    if (y->numel != x->numel)
        return fsdpc_op_fail_shapes(op, "x", x, "the other tensor", y, "give as many elements");
    return fsdpc_tensor_check(y);
}

static fsdpc_dtype dtype_of_rows(const fsdpc_tensor *x)
{
    return x->dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
}

/* Checks row values, or NULL. All tensors of row values must have the same length, `values_io`,
 * which is 0 before the first check. */
static fsdpc_status check_values(const char *op, const fsdpc_tensor *x, size_t rows,
                                 const fsdpc_tensor *t, size_t *values_io)
{
    if (!t)
        return FSDPC_OK;
    if (t->dtype != dtype_of_rows(x))
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: values of rows must be %s, not %s", op,
                          fsdpc_dtype_name(dtype_of_rows(x)), fsdpc_dtype_name(t->dtype));
    if ((*values_io && t->numel != *values_io) || (t->numel ? rows % t->numel : rows))
        return fsdpc_fail(FSDPC_ERR_SHAPE, "%s: %zu values for %zu rows", op, t->numel, rows);
    *values_io = t->numel;
    return fsdpc_tensor_check(t);
}

fsdpc_status fsdpc_op_row_moments(fsdpc_tape *tape, fsdpc_tensor *x, size_t rows, fsdpc_tensor *dy,
                                  fsdpc_tensor *shift, fsdpc_tensor **out)
{
    const char *op = "row_moments";
    fsdpc_row_moments_args args = {.dtype = x->dtype, .rows = rows};
    FSDPC_TRY(check_rows(op, x, rows, &args.cols));
    FSDPC_TRY(check_beside(op, x, dy));
    FSDPC_TRY(check_values(op, x, rows, shift, &args.values));
    const size_t shape[] = {2, rows};
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype_of_rows(x), 2, shape, &y));
    args.x = x->data;
    args.dy = dy ? dy->data : NULL;
    args.shift = shift ? shift->data : NULL;
    args.out = y->data;
    return fsdpc_op_return(fsdpc_op_kernels(tape)->row_moments(&args, tape->stream), y, out);
}

fsdpc_status fsdpc_op_row_affine(fsdpc_tape *tape, fsdpc_tensor *x, size_t rows,
                                 const fsdpc_row_values *v, fsdpc_tensor *y, fsdpc_tensor **out)
{
    const char *op = "row_affine";
    fsdpc_row_affine_args args = {.dtype = x->dtype, .rows = rows};
    const fsdpc_tensor *values[] = {v->a, v->shift, v->b, v->c};
    FSDPC_TRY(check_rows(op, x, rows, &args.cols));
    FSDPC_TRY(check_beside(op, x, y));
    for (int i = 0; i < 4; i++)
        FSDPC_TRY(check_values(op, x, rows, values[i], &args.values));
    fsdpc_tensor *made;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &made));
    args.x = x->data;
    args.y = y ? y->data : NULL;
    args.shift = v->shift ? v->shift->data : NULL;
    args.a = v->a->data;
    args.b = v->b ? v->b->data : NULL;
    args.c = v->c ? v->c->data : NULL;
    args.out = made->data;
    return fsdpc_op_return(fsdpc_op_kernels(tape)->row_affine(&args, tape->stream), made, out);
}
