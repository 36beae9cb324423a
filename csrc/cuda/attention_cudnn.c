/* cuDNN attention: plans, cached by shape, and their workspace.
 *
 * Building a plan is slow, so each plan is built at the first attention call with its shape. Plans
 * are kept until the device is destroyed, because running kernels and graphs use them. Unsupported
 * shapes are also remembered; our own kernel handles them. Some calls never reach cuDNN: those with
 * 32- or 64-bit dtypes, rows that are not 16-byte aligned, heads of more than DIM elements, or
 * scales that are not positive. The same holds for shapes in which some queries see no keys: cuDNN
 * rejects them, whereas our kernel stores an lse of minus infinity.
 *
 * Workspace comes from the pool; it is acquired for each call and freed as soon as the kernels are
 * enqueued. On Hopper, the deterministic backward needs a workspace that grows with Tq x Tk. With
 * CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment, the backward pass is slower but its
 * workspace grows only with Tq (cuDNN 9.25 or newer). Plans whose workspace exceeds both
 * WORKSPACE_BYTES and a few times the queries' size are not used. The any-order backward pass needs
 * four times the queries' size, for a wide dq and for each query head's dk and dv.
 */
#include "cuda/attention_cudnn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "cuda/queue.h"
#include "cuda/cudnn_plan.h"

enum { SLOTS = 512, WORKSPACE_BYTES = 1 << 30, WORKSPACE_QUERIES = 6, ROW_BYTES = 16, DIM = 256 };

typedef struct attention {
    bool used;
    fsdpc_cudnn_shape shape;
    fsdpc_cudnn_plan *plan; /* NULL: cuDNN does not support the shape */
    size_t workspace_bytes;
} attention;

struct fsdpc_cuda_attentions {
    fsdpc_cudnn *cudnn; /* NULL: not available */
    size_t count, done;
    attention attentions[SLOTS];
};

static bool open_library(size_t *version_out, char *why, size_t bytes)
{
    if (&fsdpc_cudnn_table)
        return fsdpc_cudnn_table.open(version_out, why, bytes);
    snprintf(why, bytes, "the plugin was built without cudnn_frontend.h, cudnn.h and nvrtc.h");
    return false;
}

void fsdpc_cuda_attentions_describe(char *text, size_t bytes)
{
    size_t version;
    char why[FSDPC_CUDNN_WHY_BYTES];
    if (open_library(&version, why, sizeof why))
        snprintf(text, bytes, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100,
                 version % 100);
    else
        snprintf(text, bytes, "our kernels (no cuDNN: %s)", why);
}

static fsdpc_status not_in_capture(const fsdpc_device *device)
{
    if (!device->capturing)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "a captured step asks cuDNN for attention of a shape that no step before it "
                      "did: run a step or two of these shapes before capturing one");
}

static fsdpc_status attentions_of(fsdpc_device *base, fsdpc_cuda_attentions **out)
{
    fsdpc_cuda_device *device = (fsdpc_cuda_device *)base;
    if (!device->attentions) {
        FSDPC_TRY(not_in_capture(base));
        fsdpc_cuda_attentions *all = calloc(1, sizeof *all);
        if (!all)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for cuDNN's plans");
        size_t version;
        char why[FSDPC_CUDNN_WHY_BYTES];
        fsdpc_cudnn *cudnn;
        if (open_library(&version, why, sizeof why) &&
            fsdpc_cudnn_table.create(&cudnn, why, sizeof why))
            all->cudnn = cudnn;
        device->attentions = all;
    }
    *out = device->attentions;
    return FSDPC_OK;
}

void fsdpc_cuda_attentions_destroy(fsdpc_cuda_attentions *all)
{
    if (!all)
        return;
    for (size_t i = 0; i < SLOTS; i++)
        if (all->attentions[i].plan)
            fsdpc_cudnn_table.plan_destroy(all->attentions[i].plan);
    if (all->cudnn)
        fsdpc_cudnn_table.destroy(all->cudnn);
    free(all);
}

size_t fsdpc_cuda_attentions_done(const fsdpc_cuda_attentions *all)
{
    return all ? all->done : 0;
}

/* -- which plan -------------------------------------------------------------------------------- */

static bool begins_well(const void *pointer)
{
    return (uintptr_t)pointer % ROW_BYTES == 0;
}

static bool steps_well(const size_t stride[3])
{
    const size_t numel = ROW_BYTES / 2; /* for a 16-bit dtype */
    return stride[0] % numel == 0 && stride[1] % numel == 0 && stride[2] % numel == 0;
}

static bool suits(const fsdpc_attention_args *a, bool backward)
{
    bool narrow = a->dtype == FSDPC_BF16 || a->dtype == FSDPC_F16;
    bool some = a->batch && a->tokens_q && a->tokens_k && a->heads && a->dim;
    if (!narrow || !some || (a->causal && a->tokens_q > a->tokens_k) || !(a->scale > 0))
        return false;
    return a->dim <= DIM && a->dim % (ROW_BYTES / 2) == 0 && steps_well(a->stride_q) &&
           steps_well(a->stride_k) && steps_well(a->stride_v) && steps_well(a->stride_out) &&
           begins_well(a->q) && begins_well(a->k) && begins_well(a->v) && begins_well(a->out) &&
           begins_well(a->lse) &&
           (!backward || (begins_well(a->dout) && begins_well(a->dq) && begins_well(a->dk) &&
                          begins_well(a->dv)));
}

static fsdpc_cudnn_shape shape_of(const fsdpc_attention_args *a, bool backward, bool any_order)
{
    fsdpc_cudnn_shape shape = {.batch = a->batch,
                               .tokens_q = a->tokens_q,
                               .tokens_k = a->tokens_k,
                               .heads = a->heads,
                               .kv_heads = a->kv_heads,
                               .dim = a->dim,
                               .dtype = (uint32_t)a->dtype,
                               .causal = a->causal,
                               .backward = backward,
                               .any_order = backward && any_order};
    memcpy(&shape.scale_bits, &a->scale, sizeof shape.scale_bits);
    memcpy(shape.stride_q, a->stride_q, sizeof shape.stride_q);
    memcpy(shape.stride_k, a->stride_k, sizeof shape.stride_k);
    memcpy(shape.stride_v, a->stride_v, sizeof shape.stride_v);
    memcpy(shape.stride_out, a->stride_out, sizeof shape.stride_out);
    return shape;
}

static size_t most_workspace(const fsdpc_cudnn_shape *shape)
{
    size_t queries = shape->batch * shape->tokens_q * shape->heads * shape->dim;
    size_t bytes = queries * fsdpc_dtype_bytes((fsdpc_dtype)shape->dtype);
    return fsdpc_max_size(WORKSPACE_BYTES, WORKSPACE_QUERIES * bytes);
}

static void attention_init(fsdpc_cuda_attentions *all, const fsdpc_cudnn_shape *shape,
                           attention *it)
{
    char why[FSDPC_CUDNN_WHY_BYTES];
    *it = (attention){.used = true, .shape = *shape};
    if (!fsdpc_cudnn_table.plan_create(all->cudnn, shape, &it->plan, &it->workspace_bytes, why,
                                       sizeof why))
        return;
    if (it->workspace_bytes > most_workspace(shape)) {
        fsdpc_cudnn_table.plan_destroy(it->plan);
        it->plan = NULL;
    }
}

/* Sets *out to NULL if too many plans exist, because no plan may be freed. */
static fsdpc_status attention_of(fsdpc_cuda_attentions *all, const fsdpc_cudnn_shape *shape,
                                 const fsdpc_device *device, attention **out)
{
    *out = NULL;
    size_t at = fsdpc_crc32c(0, shape, sizeof *shape) % SLOTS;
    while (all->attentions[at].used &&
           memcmp(&all->attentions[at].shape, shape, sizeof *shape) != 0)
        at = (at + 1) % SLOTS;
    attention *it = &all->attentions[at];
    if (!it->used) {
        if (all->count == SLOTS / 2)
            return FSDPC_OK;
        FSDPC_TRY(not_in_capture(device));
        attention_init(all, shape, it);
        all->count++;
    }
    *out = it;
    return FSDPC_OK;
}

fsdpc_status fsdpc_cuda_attention_cudnn(const fsdpc_attention_args *args, bool backward,
                                        fsdpc_stream *stream, bool *done_out)
{
    *done_out = false;
    const fsdpc_cuda_device *device = (const fsdpc_cuda_device *)stream->device;
    if (!device->cudnn || !suits(args, backward))
        return FSDPC_OK;
    fsdpc_cuda_attentions *all = NULL;
    FSDPC_TRY(attentions_of(stream->device, &all));
    if (!all->cudnn)
        return FSDPC_OK;
    bool any_order = device->cudnn == 2 && !device->head.ordered;
    fsdpc_cudnn_shape shape = shape_of(args, backward, any_order);
    attention *it = NULL;
    FSDPC_TRY(attention_of(all, &shape, stream->device, &it));
    if (!it || !it->plan)
        return FSDPC_OK;
    void *workspace;
    FSDPC_TRY(fsdpc_device_alloc(stream->device, FSDPC_MEM_OTHER, it->workspace_bytes, &workspace));
    char why[FSDPC_CUDNN_WHY_BYTES];
    bool ran =
        fsdpc_cudnn_table.plan_run(all->cudnn, it->plan, args, workspace, stream, why, sizeof why);
    fsdpc_device_free(stream->device, workspace);
    if (!ran)
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "cuDNN failed on attention%s of %zu queries, %zu keys and %zu heads of "
                          "%zu: %s; do without: FSDPC_CUDNN=0",
                          backward ? "'s backward" : "", args->tokens_q, args->tokens_k,
                          args->heads, args->dim, why);
    all->done++;
    *done_out = true;
    return FSDPC_OK;
}
