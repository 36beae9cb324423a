/* Implements post, test and order, the caller's side of an operation; nccl_coll.c does everything
 * else.
 *
 * A post first waits until the host is not too far ahead of the GPU, and then until the operation
 * has been launched. Its agreement is posted to the control; test and order advance all
 * operations.
 */
#include "cuda/error.h"
#include "cuda/queue.h"
#include "cuda/device_cuda.h"
#include "cuda/wait.h"
#include "cuda/nccl_internal.h"

/* ---- Whose memory it is ---- */

static fsdpc_status refused(const fsdpc_coll *op, const char *why)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "%s of '%s': %s", fsdpc_coll_name(op->kind),
                      op->what ? op->what : "", why);
}

/* Determines whether the operation involves the GPU. */
static fsdpc_status is_for_gpu(const fsdpc_coll *op, bool *out)
{
    if (op->agree_only || op->kind == FSDPC_COLL_BARRIER) {
        *out = false;
        return FSDPC_OK;
    }
    if (op->kind == FSDPC_COLL_REPLAY) {
        *out = true;
        return FSDPC_OK;
    }
    if (op->kind == FSDPC_COLL_GATHER) {
        *out = op->param_buffer->offsets_only;
        return FSDPC_OK;
    }
    if (fsdpc_coll_reduces(op->kind)) {
        *out = true;
        return FSDPC_OK;
    }
    bool receives, sends;
    if (op->numel == 0) {
        *out = false;
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_is_device_memory(op->recv, &receives));
    sends = receives;
    if (op->kind != FSDPC_COLL_BROADCAST)
        FSDPC_TRY(fsdpc_cuda_is_device_memory(op->send, &sends));
    if (sends != receives)
        return refused(op, "it sends from host memory and receives on the GPU, or the reverse; "
                           "keep both on one side");
    *out = receives;
    return FSDPC_OK;
}

/* ---- Post and test ---- */

static fsdpc_nccl_channel channel_of(const fsdpc_coll *op)
{
    bool reduces = fsdpc_coll_reduces(op->kind) || op->kind == FSDPC_COLL_ALL_REDUCE;
    return reduces ? FSDPC_NCCL_REDUCES : FSDPC_NCCL_GATHERS;
}

static fsdpc_status agreement_post(fsdpc_comm_nccl *self, fsdpc_nccl_op *op, bool for_gpu)
{
    fsdpc_coll coll = op->coll;
    if (op->captured)
        return FSDPC_OK;
    coll.agree_only = coll.agree_only || for_gpu || coll.kind == FSDPC_COLL_GATHER;
    coll.stream = NULL;
    return fsdpc_control_settle(&self->base,
                                fsdpc_comm_post(self->base.control, &coll, &op->agreement));
}

/* Returns the result of work that is not in flight. */
static fsdpc_status outcome(const fsdpc_work *work)
{
    if (work->status == FSDPC_OK)
        return FSDPC_OK;
    return fsdpc_fail(work->status, "%s", work->comm->poison);
}

static bool is_in_flight(const fsdpc_work *work)
{
    return atomic_load_explicit(&work->state, memory_order_relaxed);
}

/* Polls the launch. A failure is stored in the work, and test reports it later. */
static fsdpc_status poll_launch(void *arg)
{
    const fsdpc_work *work = arg;
    (void)fsdpc_nccl_carry_on(fsdpc_nccl_of(work->comm));
    if (!is_in_flight(work))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_comm_health(work->comm));
    return fsdpc_nccl_is_launched(work->impl) ? FSDPC_OK : FSDPC_IN_PROGRESS;
}

/* Waits until a post has been launched. If the wait is interrupted, the operation continues on its
 * own, like an ordered one. */
static fsdpc_status wait_for_launch(fsdpc_work *work)
{
    fsdpc_status status = fsdpc_comm_wait_for(work->comm, poll_launch, work,
                                              fsdpc_coll_name(work->op.kind), work->op.what);
    if (status == FSDPC_OK || !is_in_flight(work))
        return status;
    ((fsdpc_nccl_op *)work->impl)->work = NULL;
    fsdpc_nccl_work_end(work, status);
    return status;
}

static fsdpc_status poll_unused(void *arg)
{
    fsdpc_comm_nccl *self = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (const fsdpc_nccl_op *op = self->in_flight; op; op = op->next)
        if (op->contributions == self->staging.at)
            return FSDPC_IN_PROGRESS;
    return FSDPC_OK;
}

/* Before the staging memory grows, peers and the GPU must have finished with the old memory. */
static fsdpc_status contributions_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    if (fsdpc_nccl_staging_is_short(self, &op->coll)) {
        if (self->staging.at) {
            bool outer = self->host_waits;
            self->host_waits = true;
            fsdpc_status status = fsdpc_comm_wait_for(&self->base, poll_unused, self,
                                                      "more staging memory", op->coll.what);
            self->host_waits = outer;
            FSDPC_TRY(status);
        }
        FSDPC_TRY(fsdpc_nccl_launched(self));
    }
    return fsdpc_nccl_join_open(self, op);
}

fsdpc_status fsdpc_nccl_post(fsdpc_work *work)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(work->comm);
    bool for_gpu = false;
    FSDPC_TRY(is_for_gpu(&work->op, &for_gpu));
    fsdpc_nccl_channel channel = channel_of(&work->op);
    if (fsdpc_nccl_is_capturing(self) && !(for_gpu && self->channels[channel]))
        return refused(&work->op, "ranks wait for each other in it, which a captured step cannot: "
                                  "do it before the step, or after");
    if (!fsdpc_nccl_is_capturing(self))
        FSDPC_TRY(fsdpc_nccl_stay_near(self));
    if (for_gpu && !self->channels[channel]) {
        FSDPC_TRY(fsdpc_nccl_launched(self));
        FSDPC_TRY(fsdpc_nccl_channel_open(self, channel));
    }
    fsdpc_nccl_op *op = NULL;
    FSDPC_TRY(fsdpc_nccl_op_take(self, &op));
    op->coll = work->op;
    op->work = work;
    op->next = NULL;
    op->channel = channel;
    op->on_gpu = for_gpu;
    op->captured = fsdpc_nccl_is_capturing(self);
    op->posted_ns = fsdpc_clock_ns();
    op->progress = for_gpu ? FSDPC_NCCL_QUEUED : FSDPC_NCCL_DONE;
    fsdpc_status status =
        for_gpu && fsdpc_nccl_is_joined(&op->coll) ? contributions_open(self, op) : FSDPC_OK;
    if (status == FSDPC_OK)
        status = agreement_post(self, op, for_gpu);
    if (status != FSDPC_OK) {
        fsdpc_nccl_op_give(self, op);
        return status;
    }
    fsdpc_nccl_op_add(self, op);
    work->impl = op;
    atomic_store_explicit(&work->state, 1, memory_order_relaxed);
    return wait_for_launch(work);
}

/* Advances all operations; returns IN_PROGRESS while this one is in flight. */
static fsdpc_status step(fsdpc_work *work)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(work->comm);
    if (!is_in_flight(work))
        return FSDPC_OK;
    fsdpc_status status = fsdpc_nccl_carry_on(self);
    if (!is_in_flight(work))
        return FSDPC_OK;
    FSDPC_TRY(status);
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    return FSDPC_IN_PROGRESS;
}

fsdpc_status fsdpc_nccl_test(fsdpc_work *work)
{
    fsdpc_status status = step(work);
    fsdpc_nccl_op *op = work->impl;
    if (status == FSDPC_IN_PROGRESS && op->captured) { /* the host would wait for ever */
        status = fsdpc_cuda_may_wait(work->comm->device);
        op->work = NULL;
        fsdpc_nccl_work_end(work, status);
        return status;
    }
    return status == FSDPC_OK ? outcome(work) : status;
}

fsdpc_status fsdpc_nccl_order(fsdpc_work *work, fsdpc_stream *stream)
{
    fsdpc_status status = step(work);
    if (status != FSDPC_IN_PROGRESS)
        return status == FSDPC_OK ? outcome(work) : status;
    fsdpc_nccl_op *op = work->impl;
    if (op->progress == FSDPC_NCCL_RUNNING)
        FSDPC_CUDA_TRY(cudaStreamWaitEvent(fsdpc_cuda_queue_of(stream)->raw, op->done, 0),
                       "wait for an event");
    else if (!fsdpc_nccl_is_launched(op) || !op->on_gpu)
        return FSDPC_IN_PROGRESS; /* host values are complete when all have agreed */
    fsdpc_nccl_work_end(work, FSDPC_OK);
    op->work = NULL;
    return FSDPC_OK;
}
