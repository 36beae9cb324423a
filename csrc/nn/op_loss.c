/* Cross entropy, of logits or of log-probabilities.
 *
 * The kernels divide by the number of rows that are not ignored, which stays in device memory as
 * sums and incoming gradients do, so the host never waits for a kernel here. The gradient reuses
 * the memory of the logits if nothing else reads them.
 */
#include "nn/op.h"

#include "base/size.h"
#include "ops/flat_ops.h"

fsdpc_status fsdpc_loss_check(const char *op, const char *what, const fsdpc_tensor *x,
                              const fsdpc_tensor *targets, const fsdpc_loss_options *options)
{
    FSDPC_TRY(fsdpc_op_check_float(op, what, x));
    FSDPC_TRY(fsdpc_op_check_ids(op, "targets", targets));
    bool fits = x->ndim >= 1 && targets->ndim == x->ndim - 1;
    for (int i = 0; fits && i < targets->ndim; i++)
        fits = targets->shape[i] == x->shape[i];
    if (!fits)
        return fsdpc_op_fail_shapes(op, what, x, "targets", targets,
                                    "targets must have all dimensions but the last");
    if (!(options->smoothing >= 0 && options->smoothing < 1))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: label_smoothing is %g, not in [0, 1)", op,
                          options->smoothing);
    if (!(options->z_loss >= 0 && options->z_loss < INFINITY))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: z_loss is %g, not a finite number from 0", op,
                          options->z_loss);
    if (!(options->softcap >= 0 && options->softcap < INFINITY))
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s: softcap is %g, not a finite number from 0", op,
                          options->softcap);
    return FSDPC_OK;
}

fsdpc_status fsdpc_loss_sum_create(fsdpc_tape *tape, fsdpc_tensor **out)
{
    const size_t words = sizeof(fsdpc_loss_sum) / sizeof(int64_t);
    return fsdpc_tensor_create(tape->device, FSDPC_I64, 1, &words, out);
}

fsdpc_status fsdpc_loss_result(const fsdpc_tape *tape, const fsdpc_tensor *targets,
                               const fsdpc_loss_options *options, fsdpc_tensor **out)
{
    bool rows = options->reduction == FSDPC_LOSS_NONE;
    return fsdpc_tensor_create(tape->device, FSDPC_F32, rows ? targets->ndim : 0, targets->shape,
                               out);
}

enum { SAVED_LOGITS, SAVED_TARGETS, SAVED_LSE, SAVED_SUM };

fsdpc_cross_entropy_args fsdpc_loss_args(const fsdpc_tensor *logits, const fsdpc_tensor *targets,
                                         const fsdpc_tensor *lse, const fsdpc_loss_options *options)
{
    return (fsdpc_cross_entropy_args){.dtype = logits->dtype,
                                      .id_dtype = targets->dtype,
                                      .rows = targets->numel,
                                      .cols = logits->shape[logits->ndim - 1],
                                      .logits = logits->data,
                                      .targets = targets->data,
                                      .ignore_index = options->ignore_index,
                                      .smoothing = (float)options->smoothing,
                                      .z_loss = (float)options->z_loss,
                                      .sums = options->reduction == FSDPC_LOSS_SUM,
                                      .lse = lse ? lse->data : NULL};
}

static fsdpc_status cross_entropy_backward(fsdpc_tape *tape, fsdpc_node *node, fsdpc_tensor *dy)
{
    const fsdpc_loss_options *options = node->extra;
    fsdpc_tensor *logits = node->saved[SAVED_LOGITS], *dx;
    /* The gradient reuses the logits' own memory if they will not be read again. */
    if (!tape->retain_graph && fsdpc_tensor_is_exclusive(logits))
        dx = fsdpc_tensor_acquire(logits);
    else
        FSDPC_TRY(
            fsdpc_tensor_create(tape->device, logits->dtype, logits->ndim, logits->shape, &dx));
    fsdpc_cross_entropy_args args =
        fsdpc_loss_args(logits, node->saved[SAVED_TARGETS], node->saved[SAVED_LSE], options);
    args.sum = node->saved[SAVED_SUM]->data;
    if (options->reduction == FSDPC_LOSS_NONE)
        args.dlosses = dy->data;
    else
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
                                    const fsdpc_loss_options *options, bool logs,
                                    fsdpc_tensor **out)
{
    const fsdpc_node_ops *ops = &cross_entropy_ops[logs];
    FSDPC_TRY(fsdpc_loss_check(ops->name, logs ? "log_p" : "logits", logits, targets, options));
    fsdpc_tensor *y, *lse = NULL, *sum = NULL, *means = NULL;
    FSDPC_TRY(fsdpc_loss_result(tape, targets, options, &y));
    fsdpc_status st = fsdpc_loss_sum_create(tape, &sum);
    if (st == FSDPC_OK && !logs)
        st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &targets->numel, &lse);
    if (st == FSDPC_OK && options->smoothing > 0)
        st = fsdpc_tensor_create(tape->device, FSDPC_F32, 1, &targets->numel, &means);
    if (st == FSDPC_OK) {
        fsdpc_cross_entropy_args args = fsdpc_loss_args(logits, targets, lse, options);
        args.means = means ? means->data : NULL;
        if (options->reduction == FSDPC_LOSS_NONE)
            args.losses = y->data;
        else
            args.loss = y->data;
        args.sum = sum->data;
        st = fsdpc_op_kernels(tape)->cross_entropy(&args, tape->stream);
    }
    if (st == FSDPC_OK && fsdpc_tape_wants(tape, 1, &logits)) {
        fsdpc_node *node;
        st = fsdpc_op_record(tape, ops, 1, &logits, y, sizeof *options, &node);
        if (st == FSDPC_OK) {
            *(fsdpc_loss_options *)node->extra = *options;
            fsdpc_node_save(node, SAVED_LOGITS, logits);
            fsdpc_node_save(node, SAVED_TARGETS, targets);
            fsdpc_node_save(node, SAVED_LSE, lse);
            fsdpc_node_save(node, SAVED_SUM, sum);
        }
    }
    fsdpc_tensor_release(lse);
    fsdpc_tensor_release(means);
    fsdpc_tensor_release(sum);
    return fsdpc_op_return(st, y, out);
}
