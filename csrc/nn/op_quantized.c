/* Linear layers over quantised weights (ops/weight_code.h).
 *
 * No copy of the weight is made. Forward computes y = x W' in blocks of y's columns, which are rows
 * of W; backward computes dx = dy W in blocks of dx's columns, which are columns of W. Each block is
 * dequantised into one buffer and multiplied from there. No sum is divided between blocks, so
 * results do not depend on the size of the buffer. The weight gets no gradient.
 *
 * A product of few rows (decoding, or a short batch) reads each dequantised element only a few
 * times, so dequantisation then dominates.
 */
#include "nn/op.h"

#include "ops/weight_code.h"

#include <stdlib.h>

enum { SAVED_CODES };

/* Elements of the buffer. A product on a CPU packs x once per block, so blocks are large. */
enum { BLOCK_NUMEL = 1 << 20, REMOTE_BLOCK_NUMEL = 1 << 24 };
enum { BLOCK_STEP = 128 }; /* a multiple of all blocks of schemes, and of the tiles of products */

typedef struct quantized_extra {
    fsdpc_weight_row row;
    size_t cols; /* of the weight */
} quantized_extra;

/* The blocks of a weight along one dimension, and the buffer for one of them. */
typedef struct blocks {
    fsdpc_dequantize_args args;
    size_t extent, step; /* along the dimension: elements, and elements of a block */
    fsdpc_tensor *buffer;
} blocks;

/* Allocates the buffer for blocks of `extent` rows or columns with `across` elements each. */
static fsdpc_status blocks_make(fsdpc_tape *tape, const quantized_extra *weight,
                                const fsdpc_tensor *codes, fsdpc_dtype dtype, size_t extent,
                                size_t across, blocks *out)
{
    size_t most = tape->device->remote ? REMOTE_BLOCK_NUMEL : BLOCK_NUMEL;
    size_t step = most / fsdpc_max_size(across, 1) / BLOCK_STEP * BLOCK_STEP;
    step = fsdpc_min_size(fsdpc_max_size(step, BLOCK_STEP), extent);
    size_t shape[] = {step, across};
    *out = (blocks){.args = {.row = weight->row, .codes = codes->data, .dtype = dtype},
                    .extent = extent,
                    .step = step};
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, 2, shape, &out->buffer));
    out->args.out = out->buffer->data;
    return FSDPC_OK;
}

static void *offset(void *data, size_t elements, fsdpc_dtype dtype)
{
    return (char *)data + elements * fsdpc_dtype_bytes(dtype);
}

/* ---- backward ---- */

/* Computes or adds dx (rows, cols) of `dtype` in blocks of columns. */
static fsdpc_status input_gradient(fsdpc_tape *tape, const quantized_extra *weight,
                                   const fsdpc_tensor *codes, const fsdpc_tensor *dy,
                                   const fsdpc_grad_target *target)
{
    const fsdpc_nn_ops *kernels = fsdpc_op_kernels(tape);
    size_t out = codes->shape[0];
    blocks b;
    FSDPC_TRY(blocks_make(tape, weight, codes, dy->dtype, weight->cols, out, &b));
    fsdpc_status st = FSDPC_OK;
    b.args.rows = out;
    for (size_t at = 0; at < b.extent && st == FSDPC_OK; at += b.step) {
        b.args.first = at;
        b.args.n = fsdpc_min_size(b.step, b.extent - at);
        const fsdpc_gemm_args dx = {.m = fsdpc_op_rows(dy),
                                    .n = b.args.n,
                                    .k = out,
                                    .dtype = dy->dtype,
                                    .c_dtype = target->dtype,
                                    .a = dy->data,
                                    .lda = out,
                                    .b = b.args.out,
                                    .ldb = b.args.n,
                                    .c = offset(target->data, at, target->dtype),
                                    .ldc = weight->cols,
                                    .accumulate = target->accumulate};
        st = kernels->dequantize(&b.args, tape->stream);
        st = st == FSDPC_OK ? kernels->gemm(&dx, tape->stream) : st;
    }
    fsdpc_tensor_release(b.buffer);
    return st;
}

static fsdpc_status quantized_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    if (fsdpc_edge_wanted(&node->inputs[1]))
        FSDPC_TRY(fsdpc_op_give_bias(tape, &node->inputs[1], dy));
    const fsdpc_edge *edge = &node->inputs[0];
    if (!fsdpc_edge_wanted(edge))
        return FSDPC_OK;
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    if (target.dtype == dy->dtype || target.dtype == FSDPC_F32)
        return input_gradient(tape, node->extra, node->saved[SAVED_CODES], dy, &target);
    fsdpc_tensor *dx;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, fsdpc_edge_ndim(edge),
                                  fsdpc_edge_shape(edge), &dx));
    const fsdpc_grad_target own = {.data = dx->data, .dtype = dx->dtype};
    fsdpc_status st = input_gradient(tape, node->extra, node->saved[SAVED_CODES], dy, &own);
    if (st == FSDPC_OK)
        st = fsdpc_target_write(tape, &target, dx->data, dx->dtype, dx->numel);
    fsdpc_tensor_release(dx);
    return st;
}

static const fsdpc_node_ops quantized_ops = {.name = "quantized_linear",
                                             .backward = quantized_backward};

/* ---- forward ---- */

/* Checks that `codes` is a matrix whose rows have `cols` elements by the scheme. */
static fsdpc_status codes_check(const char *op, const fsdpc_tensor *codes,
                                fsdpc_weight_scheme scheme, const fsdpc_weight_row *row,
                                size_t cols)
{
    FSDPC_TRY(fsdpc_tensor_check(codes));
    if (codes->dtype != FSDPC_U8)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "%s: codes must be uint8, got %s", op,
                          fsdpc_dtype_name(codes->dtype));
    if (codes->ndim != 2 || codes->shape[1] != row->bytes)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "%s: codes must have the shape (rows, %zu), as %zu columns in %s take "
                          "that many bytes; they have %d dimensions, the last of %zu",
                          op, row->bytes, cols, fsdpc_weight_name(scheme), codes->ndim,
                          codes->ndim ? codes->shape[codes->ndim - 1] : 0);
    return FSDPC_OK;
}

static fsdpc_status quantized_check(fsdpc_tensor *x, fsdpc_tensor *codes, const char *scheme,
                                    fsdpc_tensor *bias, quantized_extra *out)
{
    const char *op = "quantized_linear";
    fsdpc_weight_scheme which;
    FSDPC_TRY(fsdpc_weight_find(scheme, &which));
    FSDPC_TRY(fsdpc_op_check_float(op, "x", x));
    if (x->ndim < 1)
        return fsdpc_fail(FSDPC_ERR_SHAPE, "%s: x must be (..., in), got a number", op);
    out->cols = x->shape[x->ndim - 1];
    out->row = fsdpc_weight_row_of(which, out->cols);
    FSDPC_TRY(codes_check(op, codes, which, &out->row, out->cols));
    if (!bias)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_check_same_dtype(op, "x", x, "bias", bias));
    if (bias->ndim != 1 || bias->shape[0] != codes->shape[0])
        return fsdpc_op_fail_shapes(op, "bias", bias, "codes", codes,
                                    "bias must be (out) and codes (out, bytes)");
    return FSDPC_OK;
}

/* Computes y in blocks of columns. */
static fsdpc_status multiply(fsdpc_tape *tape, const quantized_extra *weight, const fsdpc_tensor *x,
                             const fsdpc_tensor *codes, const fsdpc_tensor *bias,
                             const fsdpc_tensor *y)
{
    const fsdpc_nn_ops *kernels = fsdpc_op_kernels(tape);
    size_t out = codes->shape[0];
    blocks b;
    FSDPC_TRY(blocks_make(tape, weight, codes, x->dtype, out, weight->cols, &b));
    fsdpc_status st = FSDPC_OK;
    b.args.n = weight->cols;
    for (size_t at = 0; at < out && st == FSDPC_OK; at += b.step) {
        b.args.codes = (const uint8_t *)codes->data + at * weight->row.bytes;
        b.args.rows = fsdpc_min_size(b.step, out - at);
        const fsdpc_gemm_args part = {.m = fsdpc_op_rows(y),
                                      .n = b.args.rows,
                                      .k = weight->cols,
                                      .dtype = x->dtype,
                                      .c_dtype = x->dtype,
                                      .a = x->data,
                                      .lda = weight->cols,
                                      .b = b.args.out,
                                      .ldb = weight->cols,
                                      .trans_b = true,
                                      .c = offset(y->data, at, y->dtype),
                                      .ldc = out,
                                      .bias = bias ? offset(bias->data, at, bias->dtype) : NULL};
        st = kernels->dequantize(&b.args, tape->stream);
        st = st == FSDPC_OK ? kernels->gemm(&part, tape->stream) : st;
    }
    fsdpc_tensor_release(b.buffer);
    return st;
}

fsdpc_status fsdpc_op_quantized_linear(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *codes,
                                       const char *scheme, fsdpc_tensor *bias, fsdpc_tensor **out)
{
    quantized_extra weight = {0};
    FSDPC_TRY(quantized_check(x, codes, scheme, bias, &weight));
    size_t shape[FSDPC_MAX_DIMS];
    for (int i = 0; i < x->ndim - 1; i++)
        shape[i] = x->shape[i];
    shape[x->ndim - 1] = codes->shape[0];
    fsdpc_tensor *inputs[] = {x, bias}, *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, shape, &y));
    fsdpc_status st = multiply(tape, &weight, x, codes, bias, y);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 2, inputs)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &quantized_ops, 2, inputs, y, sizeof weight, &node);
        if (st == FSDPC_OK) {
            *(quantized_extra *)node->extra = weight;
            fsdpc_node_save(node, SAVED_CODES, codes);
        }
    }
    return fsdpc_op_return(st, y, out);
}

/* ---- weights by themselves ---- */

/* Encodes on the host, on copies if the device is remote. */
static fsdpc_status encode(fsdpc_device *device, fsdpc_weight_scheme scheme,
                           const fsdpc_tensor *values, fsdpc_tensor *codes)
{
    size_t rows = values->shape[0], cols = values->shape[1];
    if (!device->remote)
        return fsdpc_weight_encode(scheme, rows, cols, values->data, codes->data);
    size_t bytes = values->numel * sizeof(float);
    float *from = malloc(fsdpc_max_size(bytes + codes->numel, 1));
    if (!from)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to quantise a weight");
    uint8_t *to = (uint8_t *)from + bytes;
    fsdpc_status st = fsdpc_device_copy(device, from, values->data, bytes, NULL);
    st = st == FSDPC_OK ? fsdpc_weight_encode(scheme, rows, cols, from, to) : st;
    st = st == FSDPC_OK ? fsdpc_device_copy(device, codes->data, to, codes->numel, NULL) : st;
    free(from);
    return st;
}

fsdpc_status fsdpc_op_quantize(fsdpc_tape *tape, fsdpc_tensor *values, const char *scheme,
                               fsdpc_tensor **out)
{
    fsdpc_weight_scheme which;
    FSDPC_TRY(fsdpc_weight_find(scheme, &which));
    FSDPC_TRY(fsdpc_tensor_check(values));
    if (values->ndim != 2 || values->dtype != FSDPC_F32)
        return fsdpc_fail(FSDPC_ERR_SHAPE,
                          "quantize: values must be a float32 matrix, got %d dimensions of %s",
                          values->ndim, fsdpc_dtype_name(values->dtype));
    fsdpc_weight_row row = fsdpc_weight_row_of(which, values->shape[1]);
    size_t shape[] = {values->shape[0], row.bytes};
    fsdpc_tensor *codes;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_U8, 2, shape, &codes));
    return fsdpc_op_return(encode(tape->device, which, values, codes), codes, out);
}

fsdpc_status fsdpc_op_dequantize(fsdpc_tape *tape, fsdpc_tensor *codes, const char *scheme,
                                 size_t columns, fsdpc_dtype dtype, fsdpc_tensor **out)
{
    fsdpc_weight_scheme which;
    FSDPC_TRY(fsdpc_weight_find(scheme, &which));
    fsdpc_weight_row row = fsdpc_weight_row_of(which, columns);
    FSDPC_TRY(codes_check("dequantize", codes, which, &row, columns));
    size_t shape[] = {codes->shape[0], columns};
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dtype, 2, shape, &y));
    const fsdpc_dequantize_args args = {.row = row,
                                        .rows = shape[0],
                                        .n = columns,
                                        .codes = codes->data,
                                        .dtype = dtype,
                                        .out = y->data};
    return fsdpc_op_return(fsdpc_op_kernels(tape)->dequantize(&args, tape->stream), y, out);
}
