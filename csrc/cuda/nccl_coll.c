/* Collectives over NCCL, from the launch to the event after the last kernel.
 *
 * A posted operation is in flight (fsdpc_nccl_op). Its agreement, the same operation without data,
 * is immediately posted to the control, where peers compare it like any other operation. An
 * operation is done only when the GPU has finished it and its agreement is complete. Values in host
 * memory are exchanged over the control.
 *
 * Launching. NCCL launches on one of its own threads and may still be connecting when the call
 * returns; until it reports success, the channel must not be used. A post waits for that; once
 * ranks are connected, the wait takes a few microseconds. Inside a capture, no other thread may
 * use the graph while NCCL adds to it. A rank launches its operations one by one in posting order,
 * across both channels and all groups. All ranks therefore pass operations to NCCL in the same
 * order. Otherwise, two ranks of a mesh that issued their row and column operations in different
 * orders would wait for each other on the GPU. Launched operations of different channels still
 * overlap on the GPU.
 *
 * Ordered. Once an operation is on its stream, another stream can wait for the event recorded after
 * it, and the caller's work is idle. The operation stays in flight until the host sees that it is
 * done; every wait checks this. nccl_ahead.c limits how far the host may run ahead of the device.
 *
 * Captured. While the device captures, operations are also put on their streams, and become part
 * of a graph. The host may not test events then, so a captured operation ends when it is ordered.
 * A captured operation posts no agreement, so that one rank can abandon a capture. A graph is
 * launched in its turn as a single operation, and is then in flight like any other.
 *
 * Sums are computed in place in the buffer by ncclSum, in NCCL's order and in the operation's
 * dtype. The engine's part follows on the same stream. It reuses the kernel that sums over ranks,
 * here with a single rank. The kernel scales this rank's slices in fp32, rounds them through the
 * reduce dtype, and writes or adds them to the shard. The summation order therefore differs from
 * comm_shm's pairwise tree. If a tree is required, and for float values, our own kernels compute
 * the sums (nccl_join.c).
 *
 * While a rank waits, it advances the operations of all its groups, because peers may be waiting
 * for them.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "comm/coll_math.h"
#include "cuda/error.h"
#include "cuda/queue.h"
#include "cuda/device_cuda.h"
#include "cuda/graph.h"
#include "cuda/nccl_internal.h"

bool fsdpc_nccl_is_capturing(const fsdpc_comm_nccl *self)
{
    return self->base.device->capturing && !self->base.apart;
}

/* ---- Operations in flight ---- */

static cudaStream_t raw_stream(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    fsdpc_stream *main = fsdpc_device_main(self->base.device);
    return fsdpc_cuda_queue_of(op->stream ? op->stream : main)->raw;
}

fsdpc_status fsdpc_nccl_op_take(fsdpc_comm_nccl *self, fsdpc_nccl_op **out)
{
    fsdpc_nccl_op *op = self->spare;
    if (op) {
        self->spare = op->next;
        *out = op;
        return FSDPC_OK;
    }
    op = calloc(1, sizeof *op);
    if (!op)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an operation");
    cudaError_t error = cudaEventCreateWithFlags(&op->done, cudaEventDisableTiming);
    if (error != cudaSuccess) {
        free(op);
        return fsdpc_cuda_check(error, "create an event");
    }
    *out = op;
    return FSDPC_OK;
}

void fsdpc_nccl_op_give(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    fsdpc_nccl_join_close(self, op);
    op->work = NULL;
    op->agreement.comm = NULL; /* the control has dropped it */
    op->next = self->spare;
    self->spare = op;
}

void fsdpc_nccl_work_end(fsdpc_work *work, fsdpc_status status)
{
    work->impl = NULL;
    work->status = status;
    atomic_store_explicit(&work->state, 0, memory_order_relaxed);
}

bool fsdpc_nccl_is_launched(const fsdpc_nccl_op *op)
{
    return op->progress != FSDPC_NCCL_QUEUED && op->progress != FSDPC_NCCL_LAUNCHING;
}

static fsdpc_nccl_turns *turns_of(fsdpc_comm_nccl *self)
{
    return self->base.apart ? &self->turns : &self->world->turns;
}

void fsdpc_nccl_op_add(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    if (op->on_gpu)
        op->turn = turns_of(self)->posted++;
    fsdpc_nccl_op **last = &self->in_flight;
    while (*last)
        last = &(*last)->next;
    *last = op;
}

static void advance_behind(const fsdpc_comm_nccl *group, uint64_t turn)
{
    for (fsdpc_nccl_op *op = group->in_flight; op; op = op->next)
        op->turn -= op->turn > turn;
}

/* Removes an operation from the launch order; later operations move up. */
static void turn_forget(fsdpc_comm_nccl *self, const fsdpc_nccl_op *op)
{
    turns_of(self)->posted--;
    advance_behind(self, op->turn);
    const fsdpc_comm_nccl *group = self->base.apart ? NULL : self->world->groups;
    for (; group; group = group->next_group)
        if (group != self && !group->base.apart)
            advance_behind(group, op->turn);
}

static void op_end(fsdpc_comm_nccl *self, fsdpc_nccl_op *op, fsdpc_status status)
{
    fsdpc_nccl_op **at = &self->in_flight;
    while (*at != op)
        at = &(*at)->next;
    *at = op->next;
    if (op->on_gpu && !fsdpc_nccl_is_launched(op))
        turn_forget(self, op);
    if (op->work)
        fsdpc_nccl_work_end(op->work, status);
    fsdpc_nccl_op_give(self, op);
}

void fsdpc_nccl_ops_drop(fsdpc_comm_nccl *self, fsdpc_status status)
{
    while (self->in_flight)
        op_end(self, self->in_flight, status);
}

void fsdpc_nccl_ops_free(fsdpc_comm_nccl *self)
{
    while (self->spare) {
        fsdpc_nccl_op *op = self->spare;
        self->spare = op->next;
        (void)cudaEventDestroy(op->done);
        free(op);
    }
}

/* Passes the operation to NCCL. */
static fsdpc_status launch(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    const fsdpc_coll *coll = &op->coll;
    if (op->captured && !fsdpc_nccl_is_capturing(self))
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "%s of '%s' was captured and would run outside of its graph",
                          fsdpc_coll_name(coll->kind), coll->what ? coll->what : "");
    if (coll->kind == FSDPC_COLL_REPLAY) {
        op->progress = FSDPC_NCCL_LAUNCHING;
        return fsdpc_graph_launch(coll->graph);
    }
    const fsdpc_nccl_call c = {
        .nccl = &self->world->nccl,
        .raw = self->channels[op->channel],
        .stream = raw_stream(self, coll),
        .op = coll,
        .contributions = op->contributions,
        .rank = self->base.rank,
        .size = self->base.size,
        .in_place = coll->kind == FSDPC_COLL_GATHER &&
                    (coll->param_buffer->pinned || fsdpc_nccl_registered_find(self, coll->recv))};
    if (c.in_place)
        FSDPC_TRY(fsdpc_nccl_place_own(&c));
    if (coll->kind == FSDPC_COLL_ALL_GATHER && coll->send == coll->recv && c.rank > 0) {
        size_t bytes = coll->numel * fsdpc_dtype_bytes(coll->dtype);
        FSDPC_CUDA_TRY(cudaMemcpyAsync((unsigned char *)coll->recv + (size_t)c.rank * bytes,
                                       coll->send, bytes, cudaMemcpyDefault, c.stream),
                       "copy memory");
    }
    if (op->contributions)
        FSDPC_TRY(fsdpc_nccl_join_begin(self, op, c.stream));
    fsdpc_nccl_result result = fsdpc_nccl_call_op(&c);
    op->progress = FSDPC_NCCL_LAUNCHING;
    return fsdpc_nccl_is_accepted(result) ? FSDPC_OK : fsdpc_nccl_check(c.nccl, result, "take it");
}

/* Enqueues our part on the stream, after NCCL's. */
static fsdpc_status follow(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    const fsdpc_coll *coll = &op->coll;
    fsdpc_stream *main = fsdpc_device_main(self->base.device);
    fsdpc_stream *stream = coll->stream ? coll->stream : main;
    if (op->contributions)
        FSDPC_TRY(fsdpc_nccl_join(self, op, stream));
    else if (fsdpc_coll_reduces(coll->kind))
        FSDPC_TRY(fsdpc_coll_reduce_slices(
            coll, self->base.rank, 1, (const unsigned char *const[]){coll->buffer->data}, stream));
    FSDPC_CUDA_TRY(cudaEventRecord(op->done, raw_stream(self, coll)), "record an event");
    op->progress = FSDPC_NCCL_RUNNING;
    return FSDPC_OK;
}

static fsdpc_status test_done(fsdpc_nccl_op *op)
{
    cudaError_t error = cudaEventQuery(op->done);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return FSDPC_IN_PROGRESS;
    }
    FSDPC_CUDA_TRY(error, "run it");
    op->progress = FSDPC_NCCL_DONE;
    return FSDPC_OK;
}

/* Ends a captured operation once it is on its stream; its events must not be queried. */
static fsdpc_status captured(const fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    if (!op->captured || (op->work && fsdpc_nccl_is_capturing(self)))
        return FSDPC_IN_PROGRESS;
    op->progress = FSDPC_NCCL_DONE;
    return FSDPC_OK;
}

/* Checks NCCL's state for an operation on the GPU; a graph uses the channels of all groups. */
static fsdpc_status running(const fsdpc_comm_nccl *self, const fsdpc_nccl_op *op)
{
    fsdpc_status status = FSDPC_OK;
    if (op->coll.kind != FSDPC_COLL_REPLAY)
        return fsdpc_nccl_channel_state(self, op->channel, "run it");
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (int channel = 0; channel < FSDPC_NCCL_CHANNELS && status >= 0; channel++)
            if (group->channels[channel] && !group->base.apart)
                status = fsdpc_nccl_channel_state(group, (fsdpc_nccl_channel)channel, "run it");
    return status;
}

/* Advances an operation as far as possible. `busy`: whether an earlier operation runs, per
 * channel. */
static fsdpc_status gpu_step(fsdpc_comm_nccl *self, fsdpc_nccl_op *op, bool *busy)
{
    fsdpc_nccl_turns *turns = turns_of(self);
    if (op->progress == FSDPC_NCCL_QUEUED && op->turn == turns->launched)
        FSDPC_TRY(launch(self, op));
    if (op->progress == FSDPC_NCCL_LAUNCHING) {
        fsdpc_status status = fsdpc_nccl_channel_state(self, op->channel, "launch it");
        if (status == FSDPC_OK)
            status = follow(self, op);
        if (status < 0)
            return status;
        turns->launched += fsdpc_nccl_is_launched(op);
    }
    if (op->progress == FSDPC_NCCL_RUNNING && (op->captured || fsdpc_nccl_is_capturing(self)))
        return captured(self, op);
    if (op->progress == FSDPC_NCCL_RUNNING && !busy[op->channel]) {
        /* The channel may be busy with a later operation, which is irrelevant here. */
        fsdpc_status status = running(self, op);
        if (status >= 0)
            status = test_done(op);
        busy[op->channel] = status == FSDPC_IN_PROGRESS;
        return status;
    }
    return op->progress == FSDPC_NCCL_DONE ? FSDPC_OK : FSDPC_IN_PROGRESS;
}

/* When NCCL reports that a peer is gone, the control may know which one and why, perhaps a little
 * later. Returns FSDPC_OK if the control does not know. */
static fsdpc_status name_death(fsdpc_comm_nccl *self)
{
    enum { LOOKS = 80, LOOK_NS = 10000000 }; /* longer than a tick of the watch between hosts */
    fsdpc_comm *control = self->base.control;
    fsdpc_status status = FSDPC_OK;
    fsdpc_nap nap = {0};
    for (int look = 0; control->ops->idle && look < LOOKS && status == FSDPC_OK; look++)
        status = control->ops->idle(control, &nap, LOOK_NS);
    if (control->ops->idle)
        control->ops->idle(control, &nap, 0);
    return status;
}

static fsdpc_status op_failed(fsdpc_comm_nccl *self, fsdpc_nccl_op *op, fsdpc_status status,
                              bool on_gpu)
{
    const fsdpc_coll *coll = &op->coll;
    char text[512];
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    fsdpc_status named = on_gpu && status == FSDPC_ERR_PEER ? name_death(self) : FSDPC_OK;
    if (named != FSDPC_OK) {
        status = named;
        snprintf(text, sizeof text, "%s", fsdpc_last_error());
    } else if (on_gpu) {
        int n =
            snprintf(text, sizeof text, "rank %d in %s of '%s' (unit %d): ", self->base.world_rank,
                     fsdpc_coll_name(coll->kind), coll->what ? coll->what : "", coll->unit);
        if (n > 0 && (size_t)n < sizeof text)
            snprintf(text + n, sizeof text - (size_t)n, "%s", fsdpc_last_error());
    }
    fsdpc_fail(status, "%s", text);
    fsdpc_work *work = op->work;
    fsdpc_comm_poison(&self->base, status); /* this drops the operation */
    if (work)
        work->status = status;
    return status;
}

static fsdpc_status carry_on_group(fsdpc_comm_nccl *self)
{
    bool busy[FSDPC_NCCL_CHANNELS] = {false};
    fsdpc_nccl_op *next;
    for (fsdpc_nccl_op *op = self->in_flight; op; op = next) {
        next = op->next;
        fsdpc_status gpu = gpu_step(self, op, busy);
        if (gpu < 0)
            return op_failed(self, op, gpu, true);
        fsdpc_status agreed = fsdpc_comm_test(&op->agreement);
        if (agreed < 0)
            return op_failed(self, op, agreed, false);
        if (gpu == FSDPC_OK && agreed == FSDPC_OK)
            op_end(self, op, FSDPC_OK);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_carry_on(fsdpc_comm_nccl *self)
{
    fsdpc_comm_nccl *group = self->base.apart ? NULL : self->world->groups;
    for (; group; group = group->next_group)
        if (group != self && group->in_flight && !group->base.apart)
            FSDPC_TRY(carry_on_group(group));
    return carry_on_group(self);
}

static fsdpc_status poll_launched(void *arg)
{
    fsdpc_comm_nccl *self = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (const fsdpc_nccl_op *op = group->in_flight;
             op && group->base.apart == self->base.apart; op = op->next)
            if (!fsdpc_nccl_is_launched(op))
                return FSDPC_IN_PROGRESS;
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_launched(fsdpc_comm_nccl *self)
{
    return fsdpc_comm_wait_for(&self->base, poll_launched, self, "launching what was posted", NULL);
}

void fsdpc_nccl_ops_finish(fsdpc_comm_nccl *self)
{
    const int64_t patience_ns = 5000000000;
    int64_t until = fsdpc_clock_ns() + patience_ns;
    for (const fsdpc_nccl_op *op = self->in_flight; op; op = op->next)
        if (op->work)
            return; /* its owner gave up: it may never complete */
    while (self->in_flight && carry_on_group(self) == FSDPC_OK && fsdpc_clock_ns() < until)
        sched_yield();
}
