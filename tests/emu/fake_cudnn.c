/* The table of cuDNN's plans, computed by our own kernels: cuDNN as attention_cudnn.c sees it.
 *
 * A plan insists on the shape that it was made for and on all of its workspace, which it fills.
 * Heads of more than 128 elements are not supported; backward of 64 in a fixed order wants more
 * workspace than one would give; plans of a scale of 0.75 fail when they run, and those of 0.625
 * where they may add up in any order.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/queue.h"
#include "cuda/cudnn_plan.h"
#include "cuda/kernels.h"

struct fsdpc_cudnn {
    int plans;
};

struct fsdpc_cudnn_plan {
    fsdpc_cudnn *cudnn;
    fsdpc_cudnn_shape shape;
    size_t workspace_bytes;
};

static bool fake_open(size_t *version_out, char *why, size_t bytes)
{
    (void)why;
    (void)bytes;
    *version_out = 90000;
    return true;
}

static bool fake_create(fsdpc_cudnn **out, char *why, size_t bytes)
{
    (void)why;
    (void)bytes;
    *out = calloc(1, sizeof **out);
    return *out;
}

static void fake_destroy(fsdpc_cudnn *cudnn)
{
    if (cudnn->plans != 0)
        abort(); /* a plan outlives cuDNN */
    free(cudnn);
}

static bool fake_plan_create(fsdpc_cudnn *cudnn, const fsdpc_cudnn_shape *shape,
                             fsdpc_cudnn_plan **out, size_t *workspace_bytes_out, char *why,
                             size_t bytes)
{
    if (shape->dim > 128) {
        snprintf(why, bytes, "a head of %zu elements", shape->dim);
        return false;
    }
    fsdpc_cudnn_plan *plan = malloc(sizeof *plan);
    *plan = (fsdpc_cudnn_plan){cudnn, *shape, 1000};
    if (shape->backward && shape->dim == 64 && !shape->any_order)
        plan->workspace_bytes = (size_t)4 << 30;
    cudnn->plans++;
    *workspace_bytes_out = plan->workspace_bytes;
    *out = plan;
    return true;
}

static void fake_plan_destroy(fsdpc_cudnn_plan *plan)
{
    plan->cudnn->plans--;
    free(plan);
}

static bool same_shape(const fsdpc_cudnn_shape *s, const fsdpc_attention_args *a)
{
    return s->batch == a->batch && s->tokens_q == a->tokens_q && s->tokens_k == a->tokens_k &&
           s->heads == a->heads && s->kv_heads == a->kv_heads && s->dim == a->dim &&
           s->dtype == (uint32_t)a->dtype && s->causal == a->causal &&
           memcmp(&s->scale_bits, &a->scale, sizeof a->scale) == 0 &&
           memcmp(s->stride_q, a->stride_q, sizeof s->stride_q) == 0 &&
           memcmp(s->stride_k, a->stride_k, sizeof s->stride_k) == 0 &&
           memcmp(s->stride_v, a->stride_v, sizeof s->stride_v) == 0 &&
           memcmp(s->stride_out, a->stride_out, sizeof s->stride_out) == 0;
}

static bool fake_plan_run(fsdpc_cudnn *cudnn, fsdpc_cudnn_plan *plan,
                          const fsdpc_attention_args *args, void *workspace, fsdpc_stream *stream,
                          char *why, size_t bytes)
{
    fsdpc_status status = FSDPC_ERR_SHAPE;
    bool fails = args->scale == 0.75 || (args->scale == 0.625 && plan->shape.any_order);
    if (cudnn == plan->cudnn && same_shape(&plan->shape, args) && !fails)
        status = fsdpc_device_fill(stream->device, workspace, 0xff, plan->workspace_bytes, stream);
    if (status == FSDPC_OK)
        status = plan->shape.backward ? fsdpc_cuda_attention_backward(args, stream)
                                      : fsdpc_cuda_attention(args, stream);
    snprintf(why, bytes, "status %d", (int)status);
    return status == FSDPC_OK;
}

const fsdpc_cudnn_ops fsdpc_cudnn_table = {
    .open = fake_open,
    .create = fake_create,
    .destroy = fake_destroy,
    .plan_create = fake_plan_create,
    .plan_destroy = fake_plan_destroy,
    .plan_run = fake_plan_run,
};
