/* Convolutions: matrix products of weights or gradients with image patches.
 *
 * Patches are not stored: the product kernel generates each block of them just before packing it
 * (ops/gemm_patches.h). With K = channels x kernel per group and P = patches per image,
 *
 *     y  (out, P)       = weight (out, K) . patches of x (K, P) + bias
 *     dweight (out, K) += dy (out, P) . patches of x, transposed; image by image, in fp32
 *     dx (channels, ..) = weight, channels first . patches of dy
 *
 * Only every stride / gcd(stride, dilation)-th kernel element contributes to element r + stride u
 * of dx. dx therefore consists of stride x stride phases r, each an image whose patches in dy are
 * one apart and reversed. With a stride of one, dx is the only phase.
 */
#include "nn/op.h"

#include <string.h>

#include "base/size.h"

enum { SAVED_X, SAVED_WEIGHT };

static fsdpc_patches windows_of(const fsdpc_conv_options *o, const fsdpc_tensor *x,
                                const fsdpc_tensor *w, const size_t places[2])
{
    fsdpc_patches it = {.channels = w->shape[1]};
    for (int d = 0; d < 2; d++) {
        it.image[d] = x->shape[2 + d];
        it.kernel[d] = w->shape[2 + d];
        it.places[d] = places[d];
        it.step[d] = (ptrdiff_t)o->stride[d];
        it.spread[d] = (ptrdiff_t)o->dilation[d];
        it.origin[d] = -(ptrdiff_t)o->padding[d][0];
    }
    return it;
}

static const char *at(const fsdpc_tensor *t, size_t element)
{
    return (const char *)t->data + element * fsdpc_dtype_bytes(t->dtype);
}

/* Runs one product per group; from group to group, the operands advance by `a`, `b` and `c`, and
 * the bias by m elements. */
static fsdpc_status multiply_groups(fsdpc_tape *tape, fsdpc_gemm_args args, size_t groups, size_t a,
                                    size_t b, size_t c)
{
    size_t element = fsdpc_dtype_bytes(args.dtype), c_element = fsdpc_dtype_bytes(args.c_dtype);
    for (size_t g = 0; g < groups; g++) {
        FSDPC_TRY(fsdpc_op_kernels(tape)->gemm(&args, tape->stream));
        args.a = (const char *)args.a + a * element;
        args.b = (const char *)args.b + b * element;
        args.c = (char *)args.c + c * c_element;
        if (args.bias)
            args.bias = (const char *)args.bias + args.m * element;
    }
    return FSDPC_OK;
}

/* ---- backward ---- */

/* One dimension of a phase of dx: elements r, r + stride, ... */
typedef struct phase {
    size_t first, step, taps; /* kernel elements that contribute */
    size_t count;             /* number of elements */
    ptrdiff_t origin, spread; /* of their patches in dy */
} phase;

static phase phase_of(size_t r, size_t stride, size_t dilation, size_t before, size_t kernel,
                      size_t extent)
{
    phase p = {.count = r < extent ? fsdpc_ceil_div(extent - r, stride) : 0};
    ptrdiff_t s = (ptrdiff_t)stride, place = (ptrdiff_t)(r + before);
    while (p.first < kernel && (place - (ptrdiff_t)(p.first * dilation)) % s != 0)
        p.first++;
    if (p.first == kernel)
        return p;
    p.step = 1;
    while (p.step * dilation % stride != 0)
        p.step++;
    p.taps = fsdpc_ceil_div(kernel - p.first, p.step);
    p.origin = (place - (ptrdiff_t)(p.first * dilation)) / s;
    p.spread = -(ptrdiff_t)(p.step * dilation / stride);
    return p;
}

/* Copies the phase's kernel elements into the shape (groups, channels per group, out per group,
 * taps, taps). */
static fsdpc_status turn_weight(fsdpc_tape *tape, const fsdpc_tensor *w, size_t groups,
                                const phase p[2], void *to)
{
    size_t out = w->shape[0] / groups, kernel = w->shape[2] * w->shape[3];
    fsdpc_copy_args args = {
        .ndim = 5,
        .shape = {groups, w->shape[1], out, p[0].taps, p[1].taps},
        .stride_src = {out * w->shape[1] * kernel, kernel, w->shape[1] * kernel,
                       p[0].step * w->shape[3], p[1].step},
        .dst_dtype = w->dtype,
        .src_dtype = w->dtype,
        .dst = to,
        .src = at(w, p[0].first * w->shape[3] + p[1].first),
    };
    fsdpc_op_strides(args.ndim, args.shape, args.stride_dst);
    return fsdpc_op_kernels(tape)->copy(&args, tape->stream);
}

/* Two buffers, each large enough for the largest phase. */
typedef struct phase_memory {
    fsdpc_tensor *weight, *image; /* image: NULL if dx is the only phase */
} phase_memory;

static fsdpc_status run_phase(fsdpc_tape *tape, const fsdpc_conv_options *o, const fsdpc_tensor *w,
                              const fsdpc_tensor *dy, const phase_memory *memory, const size_t r[2],
                              fsdpc_tensor *dx)
{
    size_t groups = o->groups, out = dy->shape[1] / groups;
    size_t plane = dy->shape[2] * dy->shape[3];
    phase p[2];
    fsdpc_patches patches = {.channels = out};
    for (int d = 0; d < 2; d++) {
        p[d] = phase_of(r[d], o->stride[d], o->dilation[d], o->padding[d][0], w->shape[2 + d],
                        dx->shape[2 + d]);
        patches.image[d] = dy->shape[2 + d];
        patches.kernel[d] = p[d].taps;
        patches.places[d] = p[d].count;
        patches.step[d] = 1;
        patches.spread[d] = p[d].spread;
        patches.origin[d] = p[d].origin;
    }
    FSDPC_TRY(turn_weight(tape, w, groups, p, memory->weight->data));
    fsdpc_tensor *image = memory->image ? memory->image : dx;
    fsdpc_gemm_args args = {.m = w->shape[1],
                            .n = fsdpc_patches_cols(&patches),
                            .k = fsdpc_patches_rows(&patches),
                            .dtype = dy->dtype,
                            .c_dtype = dy->dtype,
                            .a = memory->weight->data,
                            .b = dy->data,
                            .c = image->data,
                            .batch = dy->shape[0],
                            .stride_b = dy->shape[1] * plane,
                            .patches = &patches};
    args.lda = args.k;
    args.ldc = args.n;
    args.stride_c = dx->shape[1] * args.n;
    FSDPC_TRY(multiply_groups(tape, args, groups, args.m * args.k, out * plane, args.m * args.n));
    if (!memory->image)
        return FSDPC_OK;
    size_t width = dx->shape[3];
    fsdpc_copy_args copy = {
        .ndim = 3,
        .shape = {dx->shape[0] * dx->shape[1], p[0].count, p[1].count},
        .stride_dst = {dx->shape[2] * width, o->stride[0] * width, o->stride[1]},
        .dst_dtype = dx->dtype,
        .src_dtype = dx->dtype,
        .dst = (char *)dx->data + (r[0] * width + r[1]) * fsdpc_dtype_bytes(dx->dtype),
        .src = image->data,
    };
    fsdpc_op_strides(copy.ndim, copy.shape, copy.stride_src);
    return fsdpc_op_kernels(tape)->copy(&copy, tape->stream);
}

static fsdpc_status run_phases(fsdpc_tape *tape, const fsdpc_conv_options *o, const fsdpc_tensor *w,
                               const fsdpc_tensor *dy, phase_memory *memory, fsdpc_tensor *dx)
{
    FSDPC_TRY(fsdpc_tensor_create(tape->device, w->dtype, w->ndim, w->shape, &memory->weight));
    if (o->stride[0] > 1 || o->stride[1] > 1) {
        size_t shape[] = {dx->shape[0], dx->shape[1], fsdpc_ceil_div(dx->shape[2], o->stride[0]),
                          fsdpc_ceil_div(dx->shape[3], o->stride[1])};
        FSDPC_TRY(fsdpc_tensor_create(tape->device, dx->dtype, 4, shape, &memory->image));
    }
    size_t r[2];
    for (r[0] = 0; r[0] < fsdpc_min_size(o->stride[0], dx->shape[2]); r[0]++)
        for (r[1] = 0; r[1] < fsdpc_min_size(o->stride[1], dx->shape[3]); r[1]++)
            FSDPC_TRY(run_phase(tape, o, w, dy, memory, r, dx));
    return FSDPC_OK;
}

static fsdpc_status give_x(fsdpc_tape *tape, const fsdpc_edge *edge, const fsdpc_conv_options *o,
                           const fsdpc_tensor *w, const fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    phase_memory memory = {NULL, NULL};
    FSDPC_TRY(fsdpc_tensor_create(tape->device, dy->dtype, 4, fsdpc_edge_shape(edge), &dx));
    fsdpc_status st = dx->numel ? run_phases(tape, o, w, dy, &memory, dx) : FSDPC_OK;
    fsdpc_tensor_release(memory.weight);
    fsdpc_tensor_release(memory.image);
    return fsdpc_op_give_owned(tape, edge, dx, st);
}

/* c, F32 or F64, (+)= the gradient */
static fsdpc_status weight_into(fsdpc_tape *tape, const fsdpc_conv_options *o,
                                const fsdpc_tensor *x, const size_t *shape, const fsdpc_tensor *dy,
                                fsdpc_gemm_args args)
{
    size_t part = dy->shape[1] / o->groups;
    const fsdpc_tensor weight = {.shape = {shape[0], shape[1], shape[2], shape[3]}};
    fsdpc_patches patches = windows_of(o, x, &weight, dy->shape + 2);
    args.m = part;
    args.n = args.ldc = fsdpc_patches_rows(&patches);
    args.k = args.lda = fsdpc_patches_cols(&patches);
    args.dtype = dy->dtype;
    args.a = dy->data;
    args.b = x->data;
    args.trans_b = true;
    args.patches = &patches;
    args.stride_a = dy->shape[1] * args.k;
    args.stride_b = x->shape[1] * x->shape[2] * x->shape[3];
    size_t a = part * args.k, b = shape[1] * x->shape[2] * x->shape[3], c = args.m * args.n;
    if (!args.accumulate) { /* from the first image, or from zeros */
        fsdpc_gemm_args first = args;
        if (!x->shape[0]) {
            patches.places[0] = 0;
            first.k = 0;
        }
        FSDPC_TRY(multiply_groups(tape, first, o->groups, a, b, c));
        args.a = at(dy, args.stride_a);
        args.b = at(x, args.stride_b);
    }
    args.batch = x->shape[0] - (!args.accumulate && x->shape[0]);
    args.accumulate = true;
    return args.batch ? multiply_groups(tape, args, o->groups, a, b, c) : FSDPC_OK;
}

static fsdpc_status give_weight(fsdpc_tape *tape, const fsdpc_edge *edge,
                                const fsdpc_conv_options *o, const fsdpc_tensor *x,
                                const fsdpc_tensor *dy)
{
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    const size_t *shape = fsdpc_edge_shape(edge);
    fsdpc_gemm_args args = {.c = target.data, .c_dtype = target.dtype};
    args.accumulate = target.accumulate;
    if (target.dtype == FSDPC_F32 || (target.dtype == FSDPC_F64 && dy->dtype == FSDPC_F64))
        return weight_into(tape, o, x, shape, dy, args);
    fsdpc_tensor *sum;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, FSDPC_F32, 4, shape, &sum));
    args = (fsdpc_gemm_args){.c = sum->data, .c_dtype = FSDPC_F32};
    fsdpc_status st = weight_into(tape, o, x, shape, dy, args);
    if (st == FSDPC_OK)
        st = fsdpc_target_write(tape, &target, sum->data, sum->dtype, sum->numel);
    fsdpc_tensor_release(sum);
    return st;
}

static fsdpc_status give_bias(fsdpc_tape *tape, const fsdpc_edge *edge, const fsdpc_tensor *dy)
{
    fsdpc_grad_target target;
    FSDPC_TRY(fsdpc_op_target(tape, edge, &target));
    fsdpc_sum_args args = {.dtype = dy->dtype,
                           .out_dtype = target.dtype,
                           .ndim = 4,
                           .reduced = {true, false, true, true},
                           .scale = 1,
                           .x = dy->data,
                           .out = target.data,
                           .accumulate = target.accumulate};
    memcpy(args.shape, dy->shape, 4 * sizeof *args.shape);
    return fsdpc_op_kernels(tape)->sum(&args, tape->stream);
}

static fsdpc_status conv_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_conv_options *o = node->extra;
    if (fsdpc_edge_wanted(&node->inputs[1]))
        FSDPC_TRY(give_weight(tape, &node->inputs[1], o, node->saved[SAVED_X], dy));
    if (fsdpc_edge_wanted(&node->inputs[2]))
        FSDPC_TRY(give_bias(tape, &node->inputs[2], dy));
    if (!fsdpc_edge_wanted(&node->inputs[0]))
        return FSDPC_OK;
    return give_x(tape, &node->inputs[0], o, node->saved[SAVED_WEIGHT], dy);
}

static const fsdpc_node_ops conv_ops = {.name = "conv2d", .backward = conv_backward};

/* ---- forward ---- */

static fsdpc_status conv_check(const fsdpc_conv_options *o, fsdpc_tensor *x, fsdpc_tensor *w,
                               fsdpc_tensor *bias)
{
    FSDPC_TRY(fsdpc_op_check_float("conv2d", "x", x));
    FSDPC_TRY(fsdpc_op_check_float("conv2d", "weight", w));
    FSDPC_TRY(fsdpc_op_check_same_dtype("conv2d", "x", x, "weight", w));
    if (x->ndim != 4 || w->ndim != 4)
        return fsdpc_op_fail_shapes("conv2d", "x", x, "weight", w, "both need 4 dimensions");
    if (!o->groups || w->shape[0] % o->groups || w->shape[1] * o->groups != x->shape[1])
        return fsdpc_op_fail_shapes("conv2d", "x", x, "weight", w,
                                    "channels must be weight's, times groups, and so must outputs");
    if (!bias)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_op_check_float("conv2d", "bias", bias));
    FSDPC_TRY(fsdpc_op_check_same_dtype("conv2d", "x", x, "bias", bias));
    if (bias->ndim != 1 || bias->shape[0] != w->shape[0])
        return fsdpc_op_fail_shapes("conv2d", "bias", bias, "weight", w,
                                    "bias must be (out) and weight (out, channels, ...)");
    return FSDPC_OK;
}

fsdpc_status fsdpc_op_conv2d(fsdpc_tape *tape, fsdpc_tensor *x, fsdpc_tensor *weight,
                             fsdpc_tensor *bias, const fsdpc_conv_options *o, fsdpc_tensor **out)
{
    FSDPC_TRY(conv_check(o, x, weight, bias));
    size_t shape[4] = {x->shape[0], weight->shape[0]};
    for (int d = 0; d < 2; d++)
        FSDPC_TRY(fsdpc_op_places("conv2d", x->shape[2 + d], weight->shape[2 + d], o->stride[d],
                                  o->padding[d], o->dilation[d], &shape[2 + d]));
    fsdpc_tensor *inputs[] = {x, weight, bias}, *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, 4, shape, &y));
    fsdpc_patches patches = windows_of(o, x, weight, shape + 2);
    size_t plane = x->shape[2] * x->shape[3];
    fsdpc_gemm_args args = {.m = shape[1] / o->groups,
                            .n = fsdpc_patches_cols(&patches),
                            .k = fsdpc_patches_rows(&patches),
                            .dtype = x->dtype,
                            .c_dtype = x->dtype,
                            .a = weight->data,
                            .b = x->data,
                            .c = y->data,
                            .bias = bias ? bias->data : NULL,
                            .batch = x->shape[0],
                            .stride_b = x->shape[1] * plane,
                            .patches = &patches};
    args.lda = args.k;
    args.ldc = args.n;
    args.stride_c = shape[1] * args.n;
    fsdpc_status st = FSDPC_OK;
    if (y->numel)
        st = multiply_groups(tape, args, o->groups, args.m * args.k, weight->shape[1] * plane,
                             args.m * args.n);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 3, inputs)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &conv_ops, 3, inputs, y, sizeof *o, &node);
        if (st == FSDPC_OK) {
            *(fsdpc_conv_options *)node->extra = *o;
            if (fsdpc_edge_wanted(&node->inputs[1]))
                fsdpc_node_save(node, SAVED_X, x);
            if (fsdpc_edge_wanted(&node->inputs[0]))
                fsdpc_node_save(node, SAVED_WEIGHT, weight);
        }
    }
    return fsdpc_op_return(st, y, out);
}
