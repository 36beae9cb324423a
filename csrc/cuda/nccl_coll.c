/* Collectives over NCCL: from the launch to the event behind the last kernel.
 *
 * A posted operation becomes a flight.  Its agreement goes to the control at once: the same
 * operation, moving nothing, so that peers compare it as they would any other; and it is done only
 * when both the GPU and the agreement are.  Values in host memory go over the control altogether.
 *
 * Launching.  NCCL does not block: it launches on a thread of its own, may still be connecting when
 * the call returns, and until it says that it is done nothing may follow on that lane.  A post
 * waits for that.  Once ranks have connected it takes some microseconds, and inside a capture
 * nobody else may touch the graph while NCCL adds to it.  Flights of a rank are launched one after
 * the other in order of posting, over both lanes and all groups, so that all ranks hand NCCL their
 * operations in one order: two ranks of a mesh whose row and column took another turn on each would
 * wait for each other on the GPU.  Launched is not run: lanes overlap there.
 *
 * Ordered.  Once an operation is on its stream, the event behind it can make another stream wait,
 * and the caller's work is idle.  The flight goes on by itself until the host sees that it has
 * landed, which it looks for whenever it waits for anything; how far the host may be ahead of the
 * device is nccl_ahead.c's.
 *
 * Captured.  While the device captures, operations are put on their streams likewise, and become
 * part of a graph.  The host may not ask for events then, so a captured flight goes on until it is
 * ordered, and that is its end; it posts no agreement, so that a capture can be given up by one
 * rank.  A graph is launched as an operation of its own, in its turn, and flies as any other.
 *
 * Sums are ncclSum, in NCCL's order and the operation's dtype, in place in the buffer.  What
 * follows is the engine's and runs behind it on the same stream: the own slices are scaled in fp32,
 * rounded through the reduce dtype and written or added to the shard by the kernel that sums ranks
 * elsewhere, here with one rank.  So the sum is not the pairwise tree of comm_shm.  Sums that must
 * be, and values that are floats, are joined as elsewhere, by kernels of our own (nccl_join.c).
 *
 * Ranks that wait carry on the flights of all their groups, as peers may wait for those.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "comm/coll_math.h"
#include "cuda/cuda_error.h"
#include "cuda/cuda_queue.h"
#include "cuda/device_cuda.h"
#include "cuda/graph.h"
#include "cuda/nccl_internal.h"

bool fsdpc_nccl_is_capturing(const fsdpc_comm_nccl *self)
{
    return self->base.device->capturing && !self->base.apart;
}

/* ---- Flights ---- */

static cudaStream_t raw_stream(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    fsdpc_stream *main = fsdpc_device_main(self->base.device);
    return fsdpc_cuda_queue_of(op->stream ? op->stream : main)->raw;
}

fsdpc_status fsdpc_nccl_flight_take(fsdpc_comm_nccl *self, fsdpc_nccl_flight **out)
{
    fsdpc_nccl_flight *flight = self->spare;
    if (flight) {
        self->spare = flight->next;
        *out = flight;
        return FSDPC_OK;
    }
    flight = calloc(1, sizeof *flight);
    if (!flight)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an operation");
    cudaError_t error = cudaEventCreateWithFlags(&flight->landed, cudaEventDisableTiming);
    if (error != cudaSuccess) {
        free(flight);
        return fsdpc_cuda_check(error, "create an event");
    }
    *out = flight;
    return FSDPC_OK;
}

void fsdpc_nccl_flight_give(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    fsdpc_nccl_join_close(self, flight);
    flight->work = NULL;
    flight->agreement.comm = NULL; /* the control has forgotten it */
    flight->next = self->spare;
    self->spare = flight;
}

void fsdpc_nccl_work_end(fsdpc_work *work, fsdpc_status status)
{
    work->impl = NULL;
    work->status = status;
    atomic_store_explicit(&work->state, 0, memory_order_relaxed);
}

bool fsdpc_nccl_is_launched(const fsdpc_nccl_flight *flight)
{
    return flight->stage != FSDPC_NCCL_QUEUED && flight->stage != FSDPC_NCCL_LAUNCHING;
}

static fsdpc_nccl_turns *turns_of(fsdpc_comm_nccl *self)
{
    return self->base.apart ? &self->turns : &self->world->turns;
}

void fsdpc_nccl_flight_add(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    if (flight->on_gpu)
        flight->turn = turns_of(self)->posted++;
    fsdpc_nccl_flight **last = &self->flights;
    while (*last)
        last = &(*last)->next;
    *last = flight;
}

static void advance_behind(const fsdpc_comm_nccl *group, uint64_t turn)
{
    for (fsdpc_nccl_flight *flight = group->flights; flight; flight = flight->next)
        flight->turn -= flight->turn > turn;
}

/* Its turn never comes: those behind it move up. */
static void turn_forget(fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight)
{
    turns_of(self)->posted--;
    advance_behind(self, flight->turn);
    const fsdpc_comm_nccl *group = self->base.apart ? NULL : self->world->groups;
    for (; group; group = group->next_group)
        if (group != self && !group->base.apart)
            advance_behind(group, flight->turn);
}

static void flight_end(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight, fsdpc_status status)
{
    fsdpc_nccl_flight **at = &self->flights;
    while (*at != flight)
        at = &(*at)->next;
    *at = flight->next;
    if (flight->on_gpu && !fsdpc_nccl_is_launched(flight))
        turn_forget(self, flight);
    if (flight->work)
        fsdpc_nccl_work_end(flight->work, status);
    fsdpc_nccl_flight_give(self, flight);
}

void fsdpc_nccl_flights_drop(fsdpc_comm_nccl *self, fsdpc_status status)
{
    while (self->flights)
        flight_end(self, self->flights, status);
}

void fsdpc_nccl_flights_free(fsdpc_comm_nccl *self)
{
    while (self->spare) {
        fsdpc_nccl_flight *flight = self->spare;
        self->spare = flight->next;
        (void)cudaEventDestroy(flight->landed);
        free(flight);
    }
}

/* Hands the operation to NCCL. */
static fsdpc_status launch(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    const fsdpc_coll *op = &flight->op;
    if (flight->captured && !fsdpc_nccl_is_capturing(self))
        return fsdpc_fail(FSDPC_ERR_INTERNAL,
                          "%s of '%s' was captured and would run outside of its graph",
                          fsdpc_coll_name(op->kind), op->what ? op->what : "");
    if (op->kind == FSDPC_COLL_REPLAY) {
        flight->stage = FSDPC_NCCL_LAUNCHING;
        return fsdpc_graph_launch(op->graph);
    }
    const fsdpc_nccl_call c = {.nccl = &self->world->nccl,
                               .raw = self->lanes[flight->lane],
                               .stream = raw_stream(self, op),
                               .op = op,
                               .contributions = flight->contributions,
                               .rank = self->base.rank,
                               .size = self->base.size,
                               .in_place = op->kind == FSDPC_COLL_GATHER &&
                                           fsdpc_nccl_registered_find(self, op->recv)};
    if (c.in_place)
        FSDPC_TRY(fsdpc_nccl_place_own(&c));
    if (op->kind == FSDPC_COLL_ALL_GATHER && op->send == op->recv && c.rank > 0) {
        size_t bytes = op->numel * fsdpc_dtype_bytes(op->dtype);
        FSDPC_CUDA_TRY(cudaMemcpyAsync((unsigned char *)op->recv + (size_t)c.rank * bytes, op->send,
                                       bytes, cudaMemcpyDefault, c.stream),
                       "copy memory");
    }
    if (flight->contributions)
        FSDPC_TRY(fsdpc_nccl_join_begin(self, flight, c.stream));
    fsdpc_nccl_result result = fsdpc_nccl_call_op(&c);
    flight->stage = FSDPC_NCCL_LAUNCHING;
    return fsdpc_nccl_is_accepted(result) ? FSDPC_OK : fsdpc_nccl_check(c.nccl, result, "take it");
}

/* NCCL's part is on the stream; ours goes behind it. */
static fsdpc_status follow(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    const fsdpc_coll *op = &flight->op;
    fsdpc_stream *main = fsdpc_device_main(self->base.device);
    fsdpc_stream *stream = op->stream ? op->stream : main;
    if (flight->contributions)
        FSDPC_TRY(fsdpc_nccl_join(self, flight, stream));
    else if (fsdpc_coll_reduces(op->kind))
        FSDPC_TRY(fsdpc_coll_reduce_slices(
            op, self->base.rank, 1, (const unsigned char *const[]){op->buffer->data}, stream));
    FSDPC_CUDA_TRY(cudaEventRecord(flight->landed, raw_stream(self, op)), "record an event");
    flight->stage = FSDPC_NCCL_RUNNING;
    return FSDPC_OK;
}

static fsdpc_status landed(fsdpc_nccl_flight *flight)
{
    cudaError_t error = cudaEventQuery(flight->landed);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return FSDPC_IN_PROGRESS;
    }
    FSDPC_CUDA_TRY(error, "run it");
    flight->stage = FSDPC_NCCL_LANDED;
    return FSDPC_OK;
}

/* On its stream, where nothing may be asked. */
static fsdpc_status captured(const fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    if (!flight->captured || (flight->work && fsdpc_nccl_is_capturing(self)))
        return FSDPC_IN_PROGRESS;
    flight->stage = FSDPC_NCCL_LANDED;
    return FSDPC_OK;
}

/* A graph runs on the lanes of all groups. */
static fsdpc_status running(const fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight)
{
    fsdpc_status status = FSDPC_OK;
    if (flight->op.kind != FSDPC_COLL_REPLAY)
        return fsdpc_nccl_lane_state(self, flight->lane, "run it");
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (int lane = 0; lane < FSDPC_NCCL_LANES && status >= 0; lane++)
            if (group->lanes[lane] && !group->base.apart)
                status = fsdpc_nccl_lane_state(group, (fsdpc_nccl_lane)lane, "run it");
    return status;
}

/* As far as it goes.  `flying`: of each lane, whether a flight before this one is, and so this. */
static fsdpc_status gpu_step(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight, bool *flying)
{
    fsdpc_nccl_turns *turns = turns_of(self);
    if (flight->stage == FSDPC_NCCL_QUEUED && flight->turn == turns->launched)
        FSDPC_TRY(launch(self, flight));
    if (flight->stage == FSDPC_NCCL_LAUNCHING) {
        fsdpc_status status = fsdpc_nccl_lane_state(self, flight->lane, "launch it");
        if (status == FSDPC_OK)
            status = follow(self, flight);
        if (status < 0)
            return status;
        turns->launched += fsdpc_nccl_is_launched(flight);
    }
    if (flight->stage == FSDPC_NCCL_RUNNING && (flight->captured || fsdpc_nccl_is_capturing(self)))
        return captured(self, flight);
    if (flight->stage == FSDPC_NCCL_RUNNING && !flying[flight->lane]) {
        /* The lane may be busy with a later flight, which is no news of this one. */
        fsdpc_status status = running(self, flight);
        if (status >= 0)
            status = landed(flight);
        flying[flight->lane] = status == FSDPC_IN_PROGRESS;
        return status;
    }
    return flight->stage == FSDPC_NCCL_LANDED ? FSDPC_OK : FSDPC_IN_PROGRESS;
}

/* NCCL knows that a peer is gone, the control which one and why; it may learn it a little later.
 * FSDPC_OK if it does not. */
static fsdpc_status name_death(fsdpc_comm_nccl *self)
{
    enum { LOOKS = 80, LOOK_NS = 10000000 }; /* beyond a tick of the watch between hosts */
    fsdpc_comm *control = self->control;
    fsdpc_status status = FSDPC_OK;
    for (int look = 0; control->ops->idle && look < LOOKS && status == FSDPC_OK; look++)
        status = control->ops->idle(control, LOOK_NS);
    if (control->ops->idle)
        control->ops->idle(control, 0);
    return status;
}

static fsdpc_status flight_failed(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight,
                                  fsdpc_status status, bool on_gpu)
{
    const fsdpc_coll *op = &flight->op;
    char text[512];
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    fsdpc_status named = on_gpu && status == FSDPC_ERR_PEER ? name_death(self) : FSDPC_OK;
    if (named != FSDPC_OK) {
        status = named;
        snprintf(text, sizeof text, "%s", fsdpc_last_error());
    } else if (on_gpu) {
        int n =
            snprintf(text, sizeof text, "rank %d in %s of '%s' (unit %d): ", self->base.world_rank,
                     fsdpc_coll_name(op->kind), op->what ? op->what : "", op->unit);
        if (n > 0 && (size_t)n < sizeof text)
            snprintf(text + n, sizeof text - (size_t)n, "%s", fsdpc_last_error());
    }
    fsdpc_fail(status, "%s", text);
    fsdpc_work *work = flight->work;
    fsdpc_comm_poison(&self->base, status); /* which drops the flight */
    if (work)
        work->status = status;
    return status;
}

static fsdpc_status carry_on_group(fsdpc_comm_nccl *self)
{
    bool flying[FSDPC_NCCL_LANES] = {false};
    fsdpc_nccl_flight *next;
    for (fsdpc_nccl_flight *flight = self->flights; flight; flight = next) {
        next = flight->next;
        fsdpc_status gpu = gpu_step(self, flight, flying);
        if (gpu < 0)
            return flight_failed(self, flight, gpu, true);
        fsdpc_status agreed = fsdpc_comm_test(&flight->agreement);
        if (agreed < 0)
            return flight_failed(self, flight, agreed, false);
        if (gpu == FSDPC_OK && agreed == FSDPC_OK)
            flight_end(self, flight, FSDPC_OK);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_carry_on(fsdpc_comm_nccl *self)
{
    fsdpc_comm_nccl *group = self->base.apart ? NULL : self->world->groups;
    for (; group; group = group->next_group)
        if (group != self && group->flights && !group->base.apart)
            FSDPC_TRY(carry_on_group(group));
    return carry_on_group(self);
}

static fsdpc_status poll_launched(void *arg)
{
    fsdpc_comm_nccl *self = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (const fsdpc_nccl_flight *flight = group->flights;
             flight && group->base.apart == self->base.apart; flight = flight->next)
            if (!fsdpc_nccl_is_launched(flight))
                return FSDPC_IN_PROGRESS;
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_launched(fsdpc_comm_nccl *self)
{
    return fsdpc_comm_wait_for(&self->base, poll_launched, self, "launching what was posted", NULL);
}

void fsdpc_nccl_flights_land(fsdpc_comm_nccl *self)
{
    const int64_t patience_ns = 5000000000;
    int64_t until = fsdpc_clock_ns() + patience_ns;
    for (const fsdpc_nccl_flight *flight = self->flights; flight; flight = flight->next)
        if (flight->work)
            return; /* its owner gave up: nobody knows whether it ever lands */
    while (self->flights && carry_on_group(self) == FSDPC_OK && fsdpc_clock_ns() < until)
        sched_yield();
}
