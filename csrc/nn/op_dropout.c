/* Dropout (Srivastava et al. 2014), scaled during training.
 *
 * The mask is not stored: it is a function of (seed, stream, element), so backward recomputes it.
 * Each call uses the tape's next random stream, so a recomputation that restores the stream draws
 * the same masks. In a captured step, kernels read from device memory the offset between the
 * replay's random streams and the capture's.
 */
#include "nn/op.h"

typedef struct dropout_extra {
    double p;
    uint64_t seed, stream;
} dropout_extra;

static fsdpc_status run_kernel(fsdpc_tape *tape, const dropout_extra *extra, const fsdpc_tensor *x,
                               fsdpc_tensor **out)
{
    fsdpc_tensor *y;
    FSDPC_TRY(fsdpc_tensor_create(tape->device, x->dtype, x->ndim, x->shape, &y));
    fsdpc_dropout_args args = {.dtype = x->dtype,
                               .numel = x->numel,
                               .p = extra->p,
                               .seed = extra->seed,
                               .stream = extra->stream,
                               .x = x->data,
                               .out = y->data,
                               .key = tape->device->capturing ? tape->dropout_key : NULL};
    return fsdpc_op_return(fsdpc_op_kernels(tape)->dropout(&args, tape->stream), y, out);
}

/* Allocates the key before any capture, because a captured step may only use memory that an earlier
 * step has allocated. */
static fsdpc_status make_key(fsdpc_tape *tape)
{
    void *memory;
    if (tape->dropout_key || !tape->device->ops->capture_begin)
        return FSDPC_OK;
    if (tape->device->capturing)
        return fsdpc_fail(FSDPC_ERR_STATE, "dropout inside a captured step, and in no step before "
                                           "it: run a step with dropout before capturing one");
    FSDPC_TRY(
        fsdpc_device_alloc(tape->device, FSDPC_MEM_OTHER, sizeof *tape->dropout_key, &memory));
    tape->dropout_key = memory;
    return FSDPC_OK;
}

static fsdpc_status dropout_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    fsdpc_tensor *dx;
    FSDPC_TRY(run_kernel(tape, node->extra, dy, &dx));
    return fsdpc_op_give_owned(tape, &node->inputs[0], dx, FSDPC_OK);
}

static const fsdpc_node_ops dropout_ops = {.name = "dropout", .backward = dropout_backward};

fsdpc_status fsdpc_op_dropout(fsdpc_tape *tape, fsdpc_tensor *x, double p, bool training,
                              fsdpc_tensor **out)
{
    FSDPC_TRY(fsdpc_op_check_float("dropout", "x", x));
    if (!(p >= 0 && p <= 1))
        return fsdpc_fail(FSDPC_ERR_VALUE, "dropout: p = %g, must be in [0, 1]", p);
    if (!training || p == 0) {
        *out = fsdpc_tensor_acquire(x);
        return FSDPC_OK;
    }
    FSDPC_TRY(make_key(tape));
    dropout_extra extra = {p, tape->seed, tape->next_stream++};
    fsdpc_tensor *y = NULL;
    fsdpc_status st = run_kernel(tape, &extra, x, &y);
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &x)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, &dropout_ops, 1, &x, y, sizeof extra, &node);
        if (st == FSDPC_OK)
            *(dropout_extra *)node->extra = extra;
    }
    return fsdpc_op_return(st, y, out);
}
