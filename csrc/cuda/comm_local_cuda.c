/* Operations of several ranks on one GPU, by a control over host memory: what both ways share.
 *
 * A posted operation becomes a flight.  Its way does its part, the control's operation is posted,
 * and when that is done the way brings the outcome where it belongs, and the work is done.  All
 * that runs on the GPU is waited for: whoever sees work done finds its results on every stream.
 * Nothing is carried on but by the control, which does that in all groups of a rank.
 *
 * Values on the GPU pass through host memory both ways, as they are few (norms, losses, tensors
 * that somebody asks for whole); those in host memory go over the control as they are.
 *
 * The way is chosen once, by trying: memory is made, handed over, mapped and given back.  If that
 * does not work out on one rank, or one was told to stage, all stage.  Groups that are split off
 * go the same way.
 *
 * Epochs, agreement, deaths and failure are the control's (control.h).
 */
#include "cuda/comm_local_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/size.h"
#include "cuda/device_cuda.h"
#include "cuda/local_cuda.h"
#include "cuda/shared_memory.h"

static fsdpc_comm *control_of(fsdpc_comm *comm)
{
    return fsdpc_control_of(comm, fsdpc_local_of(comm)->control);
}

/* ---- Life ---- */

static fsdpc_status comm_new(const fsdpc_comm_config *config, const fsdpc_comm_ops *ops,
                             const char *about, fsdpc_local_comm **out)
{
    fsdpc_local_comm *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator");
    fsdpc_comm_init(&self->base, ops, config);
    self->control = config->control;
    self->host = config->control->device;
    self->base.world_rank = self->base.log.rank = config->control->world_rank;
    snprintf(self->base.about, sizeof self->base.about, "%s", about);
    *out = self;
    return FSDPC_OK;
}

void fsdpc_local_destroy(fsdpc_comm *comm)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    fsdpc_comm_destroy(self->control); /* first: it may know of what our flights hold */
    while (self->flights) {
        fsdpc_local_flight *it = self->flights;
        self->flights = it->next;
        fsdpc_device_free(self->host, it->host);
        free(it);
    }
    free(self);
}

fsdpc_status fsdpc_local_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm), *part = NULL;
    fsdpc_comm_config config;
    FSDPC_TRY(fsdpc_control_split(comm, self->control, color, key, &config));
    fsdpc_status status =
        config.control ? comm_new(&config, comm->ops, comm->about, &part) : FSDPC_OK;
    status = fsdpc_local_settle(self, fsdpc_comm_agree(self->control, status, "split"));
    if (status != FSDPC_OK) {
        if (part)
            fsdpc_local_destroy(&part->base);
        else
            fsdpc_comm_destroy(config.control);
        return status;
    }
    *out = part ? &part->base : NULL;
    return FSDPC_OK;
}

void fsdpc_local_abort(fsdpc_comm *comm, const char *reason)
{
    fsdpc_comm_abort_local(comm, reason);
    fsdpc_comm_abort(fsdpc_local_of(comm)->control, comm->poison);
}

void fsdpc_local_leave(fsdpc_comm *comm)
{
    fsdpc_comm_leave(fsdpc_local_of(comm)->control);
}

/* ---- Parts of a way ---- */

fsdpc_status fsdpc_local_wire_open(fsdpc_comm *comm, size_t bytes, size_t control_bytes,
                                   fsdpc_controlled_wire *wire_out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    void *data = NULL;
    bool moved = comm->size > 1;
    fsdpc_wire *control;
    FSDPC_TRY(moved ? fsdpc_control_sizes(comm, self->control, "wire_create", bytes)
                    : fsdpc_control_memory(comm, self->control, "wire_create", FSDPC_MEM_WIRE,
                                           bytes, &data));
    fsdpc_status status =
        fsdpc_local_settle(self, fsdpc_wire_create(self->control, control_bytes, &control));
    if (status != FSDPC_OK) {
        fsdpc_device_free(comm->device, data);
        return status;
    }
    wire_out->control = control;
    wire_out->base =
        (fsdpc_wire){.comm = comm, .bytes = bytes, .moved = moved, .read = data, .write = data};
    return FSDPC_OK;
}

void fsdpc_local_wire_close(fsdpc_controlled_wire *wire)
{
    fsdpc_wire_destroy(wire->control);
    fsdpc_device_free(wire->base.comm->device, wire->base.write);
}

/* What peers read is counted by the control's. */
fsdpc_status fsdpc_local_buffer_idle(fsdpc_buffer *base)
{
    fsdpc_buffer *control = ((fsdpc_local_buffer *)base)->control;
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    return fsdpc_local_settle(fsdpc_local_of(base->comm), control->comm->ops->buffer_idle(control));
}

fsdpc_status fsdpc_local_copy(fsdpc_local_comm *self, void *to, const void *from, size_t bytes)
{
    return fsdpc_device_copy(self->base.device, to, from, bytes,
                             fsdpc_device_main(self->base.device));
}

fsdpc_status fsdpc_local_copied(fsdpc_local_comm *self)
{
    return fsdpc_stream_sync(fsdpc_device_main(self->base.device));
}

fsdpc_status fsdpc_local_room(fsdpc_local_comm *self, fsdpc_local_flight *it, size_t bytes)
{
    if (bytes <= it->host_bytes)
        return FSDPC_OK;
    fsdpc_device_free(self->host, it->host);
    it->host = NULL;
    it->host_bytes = 0;
    void *made;
    FSDPC_TRY(fsdpc_device_alloc(self->host, FSDPC_MEM_OTHER, bytes, &made));
    it->host = made;
    it->host_bytes = bytes;
    return FSDPC_OK;
}

/* ---- Values ---- */

static size_t received_bytes(const fsdpc_local_comm *self, const fsdpc_coll *op)
{
    size_t times = op->kind == FSDPC_COLL_ALL_GATHER ? (size_t)self->base.size : 1;
    return op->numel * fsdpc_dtype_bytes(op->dtype) * times;
}

static fsdpc_status values_out(fsdpc_local_comm *self, fsdpc_local_flight *it, fsdpc_coll *op)
{
    bool receives, sends = false, broadcast = op->kind == FSDPC_COLL_BROADCAST;
    if (op->numel == 0)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_cuda_is_device_memory(op->recv, &receives));
    if (!broadcast)
        FSDPC_TRY(fsdpc_cuda_is_device_memory(op->send, &sends));
    it->staged = sends || receives;
    if (!it->staged)
        return FSDPC_OK;
    size_t sent = op->numel * fsdpc_dtype_bytes(op->dtype), received = received_bytes(self, op);
    FSDPC_TRY(
        fsdpc_local_room(self, it, sent + received)); /* what is received before what is sent */
    unsigned char *send = broadcast ? it->host : it->host + received;
    if (!broadcast || op->root == self->base.rank)
        FSDPC_TRY(fsdpc_local_copy(self, send, broadcast ? op->recv : op->send, sent));
    op->send = send;
    op->recv = it->host;
    return fsdpc_local_copied(self);
}

static fsdpc_status values_back(fsdpc_local_comm *self, const fsdpc_local_flight *it,
                                const fsdpc_coll *op)
{
    if (!it->staged)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_local_copy(self, op->recv, it->host, received_bytes(self, op)));
    return fsdpc_local_copied(self);
}

/* ---- Post and test ---- */

static bool moves(const fsdpc_coll *op)
{
    return fsdpc_coll_reduces(op->kind) || (op->kind == FSDPC_COLL_GATHER && op->wire->moved);
}

static bool has_values(const fsdpc_coll *op)
{
    return op->kind == FSDPC_COLL_ALL_REDUCE || op->kind == FSDPC_COLL_ALL_GATHER ||
           op->kind == FSDPC_COLL_BROADCAST;
}

/* *op becomes what the control is to do. */
static fsdpc_status go_out(fsdpc_local_comm *self, fsdpc_local_flight *it, fsdpc_local_move_fn out,
                           fsdpc_coll *op)
{
    if (op->stream && op->stream->async) /* what it waits for comes before what we do */
        FSDPC_TRY(fsdpc_stream_sync(op->stream));
    op->stream = NULL;
    it->staged = false;
    if (op->agree_only)
        return FSDPC_OK;
    if (moves(op))
        return out(self, it, op);
    if (op->kind == FSDPC_COLL_GATHER)
        op->agree_only = true;
    return has_values(op) ? values_out(self, it, op) : FSDPC_OK;
}

static fsdpc_status come_back(fsdpc_local_comm *self, fsdpc_local_flight *it,
                              fsdpc_local_move_fn back, fsdpc_coll *op)
{
    if (op->agree_only)
        return FSDPC_OK;
    if (moves(op))
        return back(self, it, op);
    return has_values(op) ? values_back(self, it, op) : FSDPC_OK;
}

static fsdpc_status flight_take(fsdpc_local_comm *self, fsdpc_local_flight **out)
{
    fsdpc_local_flight *it = self->flights;
    while (it && it->taken)
        it = it->next;
    if (!it) {
        it = calloc(1, sizeof *it);
        if (!it)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an operation");
        it->next = self->flights;
        self->flights = it;
    }
    it->taken = true;
    *out = it;
    return FSDPC_OK;
}

fsdpc_status fsdpc_local_post(fsdpc_work *work, fsdpc_local_move_fn out)
{
    fsdpc_local_comm *self = fsdpc_local_of(work->comm);
    fsdpc_local_flight *it = NULL;
    FSDPC_TRY(flight_take(self, &it));
    fsdpc_coll op = work->op;
    fsdpc_status status = go_out(self, it, out, &op);
    if (status == FSDPC_OK)
        status =
            fsdpc_local_settle(self, fsdpc_comm_post(control_of(work->comm), &op, &it->carried));
    if (status == FSDPC_OK)
        work->impl = it;
    else
        it->taken = false;
    return status;
}

fsdpc_status fsdpc_local_test(fsdpc_work *work, fsdpc_local_move_fn back)
{
    fsdpc_local_comm *self = fsdpc_local_of(work->comm);
    fsdpc_local_flight *it = work->impl;
    fsdpc_status status = fsdpc_local_settle(self, fsdpc_comm_test(&it->carried));
    if (status == FSDPC_IN_PROGRESS)
        return status;
    if (status == FSDPC_OK) {
        status = come_back(self, it, back, &work->op);
        if (status != FSDPC_OK)
            fsdpc_comm_poison(&self->base, status);
    }
    it->taken = false;
    work->impl = NULL;
    return status;
}

/* ---- Waiting ---- */

fsdpc_status fsdpc_local_idle(fsdpc_comm *comm, int64_t max_ns)
{
    return fsdpc_control_idle(control_of(comm), max_ns);
}

void fsdpc_local_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    fsdpc_control_describe(fsdpc_local_of(comm)->control, text, bytes);
}

void fsdpc_local_locate(fsdpc_comm *comm, const char *phase, const char *unit)
{
    fsdpc_comm_locate(control_of(comm), phase, unit);
}

void fsdpc_local_waits(fsdpc_comm *comm, const char *what)
{
    fsdpc_control_waits(control_of(comm), what);
}

/* ---- The choice ---- */

/* FSDPC_ERR_UNSUPPORTED, with the reason, where ranks stage. */
static fsdpc_status try_to_share(const fsdpc_comm_config *config)
{
    fsdpc_cuda_shared *trial = NULL;
    fsdpc_status status = FSDPC_OK;
    if (config->staged)
        status = fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "FSDPC_STAGED is set");
    FSDPC_TRY(fsdpc_comm_agree(config->control, status, "the way of local_cuda"));
    FSDPC_TRY(fsdpc_cuda_shared_create(config->control, config->device, FSDPC_MEM_OTHER, 1,
                                       "the way of local_cuda", &trial));
    fsdpc_cuda_shared_destroy(trial);
    return FSDPC_OK;
}

fsdpc_status fsdpc_comm_local_cuda_create(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    FSDPC_TRY(fsdpc_control_check(config, "local_cuda"));
    char about[160] = "memory of the GPU that ranks share";
    const fsdpc_comm_ops *ops = &fsdpc_local_shared_ops;
    fsdpc_status status = try_to_share(config);
    if (status == FSDPC_ERR_UNSUPPORTED && !config->control->poison[0]) {
        snprintf(about, sizeof about, "by way of host memory: %s", fsdpc_last_error());
        ops = &fsdpc_local_staged_ops;
        status = FSDPC_OK;
    }
    FSDPC_TRY(status);
    fsdpc_local_comm *self = NULL;
    status = comm_new(config, ops, about, &self);
    status = fsdpc_comm_agree(config->control, status, "the beginning of local_cuda");
    if (status == FSDPC_OK)
        *out = &self->base;
    else
        free(self);
    return status;
}
