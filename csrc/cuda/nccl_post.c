/* Post, test and order: the caller's side of an operation, whose flight is nccl_coll.c's.
 *
 * A post waits until the operation has been launched, and before it until the host is not too far
 * ahead of the GPU.  Its agreement goes to the control; test and order carry everything on.
 */
#include "cuda/cuda_error.h"
#include "cuda/cuda_queue.h"
#include "cuda/device_cuda.h"
#include "cuda/graph.h"
#include "cuda/nccl_internal.h"

/* ---- Whose memory ---- */

static fsdpc_status refused(const fsdpc_coll *op, const char *why)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "%s of '%s': %s", fsdpc_coll_name(op->kind),
                      op->what ? op->what : "", why);
}

/* Whether the GPU has a part in it. */
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
        *out = op->wire->moved;
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

static fsdpc_nccl_lane lane_of(const fsdpc_coll *op)
{
    bool reduces = fsdpc_coll_reduces(op->kind) || op->kind == FSDPC_COLL_ALL_REDUCE;
    return reduces ? FSDPC_NCCL_REDUCES : FSDPC_NCCL_GATHERS;
}

static fsdpc_status agreement_post(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight, bool for_gpu)
{
    fsdpc_coll op = flight->op;
    if (flight->captured)
        return FSDPC_OK;
    op.agree_only = op.agree_only || for_gpu || op.kind == FSDPC_COLL_GATHER;
    op.stream = NULL;
    return fsdpc_nccl_settle(self, fsdpc_comm_post(fsdpc_control_of(&self->base, self->control),
                                                   &op, &flight->agreement));
}

/* What a work that is not in flight came to. */
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

/* A failure is reported by test, which finds it in the work. */
static fsdpc_status poll_launch(void *arg)
{
    const fsdpc_work *work = arg;
    (void)fsdpc_nccl_carry_on(fsdpc_nccl_of(work->comm));
    if (!is_in_flight(work))
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_comm_health(work->comm));
    return fsdpc_nccl_is_launched(work->impl) ? FSDPC_OK : FSDPC_IN_PROGRESS;
}

/* Of a post.  An interrupted one goes on by itself, as one that was ordered does. */
static fsdpc_status wait_for_launch(fsdpc_work *work)
{
    fsdpc_status status = fsdpc_comm_wait_for(work->comm, poll_launch, work,
                                              fsdpc_coll_name(work->op.kind), work->op.what);
    if (status == FSDPC_OK || !is_in_flight(work))
        return status;
    ((fsdpc_nccl_flight *)work->impl)->work = NULL;
    fsdpc_nccl_work_end(work, status);
    return status;
}

static fsdpc_status poll_unused(void *arg)
{
    fsdpc_comm_nccl *self = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (const fsdpc_nccl_flight *flight = self->flights; flight; flight = flight->next)
        if (flight->contributions == self->inbox.at)
            return FSDPC_IN_PROGRESS;
    return FSDPC_OK;
}

/* Before a larger inbox, peers and the GPU are done with the one there is. */
static fsdpc_status contributions_open(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    if (fsdpc_nccl_inbox_is_short(self, &flight->op)) {
        if (self->inbox.at) {
            bool outer = self->watching;
            self->watching = true;
            fsdpc_status status = fsdpc_comm_wait_for(&self->base, poll_unused, self,
                                                      "a larger inbox", flight->op.what);
            self->watching = outer;
            FSDPC_TRY(status);
        }
        FSDPC_TRY(fsdpc_nccl_launched(self));
    }
    return fsdpc_nccl_join_open(self, flight);
}

fsdpc_status fsdpc_nccl_post(fsdpc_work *work)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(work->comm);
    bool for_gpu = false;
    FSDPC_TRY(is_for_gpu(&work->op, &for_gpu));
    fsdpc_nccl_lane lane = lane_of(&work->op);
    if (fsdpc_nccl_is_capturing(self) && !(for_gpu && self->lanes[lane]))
        return refused(&work->op, "ranks wait for each other in it, which a captured step cannot: "
                                  "do it before the step, or after");
    if (!fsdpc_nccl_is_capturing(self))
        FSDPC_TRY(fsdpc_nccl_stay_near(self));
    if (for_gpu && !self->lanes[lane]) {
        FSDPC_TRY(fsdpc_nccl_launched(self));
        FSDPC_TRY(fsdpc_nccl_lane_open(self, lane));
    }
    fsdpc_nccl_flight *flight = NULL;
    FSDPC_TRY(fsdpc_nccl_flight_take(self, &flight));
    flight->op = work->op;
    flight->work = work;
    flight->next = NULL;
    flight->lane = lane;
    flight->on_gpu = for_gpu;
    flight->captured = fsdpc_nccl_is_capturing(self);
    flight->posted_ns = fsdpc_clock_ns();
    flight->stage = for_gpu ? FSDPC_NCCL_QUEUED : FSDPC_NCCL_LANDED;
    fsdpc_status status =
        for_gpu && fsdpc_nccl_is_joined(&flight->op) ? contributions_open(self, flight) : FSDPC_OK;
    if (status == FSDPC_OK)
        status = agreement_post(self, flight, for_gpu);
    if (status != FSDPC_OK) {
        fsdpc_nccl_flight_give(self, flight);
        return status;
    }
    fsdpc_nccl_flight_add(self, flight);
    work->impl = flight;
    atomic_store_explicit(&work->state, 1, memory_order_relaxed);
    return wait_for_launch(work);
}

/* Carries all on; IN_PROGRESS while this one is in flight. */
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
    fsdpc_nccl_flight *flight = work->impl;
    if (status == FSDPC_IN_PROGRESS && flight->captured) { /* the host would wait for ever */
        status = fsdpc_cuda_capture_check_wait(work->comm->device);
        flight->work = NULL;
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
    fsdpc_nccl_flight *flight = work->impl;
    if (flight->stage == FSDPC_NCCL_RUNNING)
        FSDPC_CUDA_TRY(cudaStreamWaitEvent(fsdpc_cuda_queue_of(stream)->raw, flight->landed, 0),
                       "wait for an event");
    else if (!fsdpc_nccl_is_launched(flight) || !flight->on_gpu)
        return FSDPC_IN_PROGRESS; /* values of the host are there when all have agreed */
    fsdpc_nccl_work_end(work, FSDPC_OK);
    flight->work = NULL;
    return FSDPC_OK;
}
