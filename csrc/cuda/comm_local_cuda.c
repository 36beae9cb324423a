/* Operations of several ranks on one GPU, carried by their control over host memory.
 *
 * At the post, what this rank gives is copied out, in the order of the main stream and after the
 * operation's own; then the control's operation is posted.  When that is done its outcome is copied
 * to where it belongs, and the work is done.  All copies are waited for: whoever sees work done
 * finds its results on every stream.  Only this rank waits for what is copied back, so nothing is
 * carried on but by the control, which does that in all groups of a rank.
 *
 *     gather          own slices -> control's wire, agree, all slices -> full
 *     reductions      buffer -> control's buffer, sum there into staging -> shard
 *     values          staging, both ways; host memory goes over the control as it is
 *
 * The control's wire is written at the first gather of a unit after a publication.  That is within
 * the protocol: a peer copies its fulls before it arrives in the next epoch, and what a wire holds
 * changes only between an arrival of all and a publication.  Gathers of the same contents do not
 * write again, as peers may be reading.
 *
 * Epochs, agreement, deaths and failure are the control's (control.h).
 */
#include "cuda/comm_local_cuda.h"

#include <stdlib.h>

#include "base/size.h"
#include "cuda/control.h"
#include "cuda/device_cuda.h"

static const fsdpc_comm_ops local_ops;

/* A posted operation; kept and used again. */
typedef struct flight {
    struct flight *next; /* of all that were made */
    bool taken;
    bool staged;         /* values: both ways through `host` */
    fsdpc_work carried;  /* on the control */
    unsigned char *host; /* staging */
    size_t host_bytes;
} flight;

typedef struct local_comm {
    fsdpc_comm base;
    fsdpc_comm *control; /* owned */
    fsdpc_device *host;  /* the control's */
    fsdpc_stream main;   /* the GPU's main stream */
    flight *flights;
} local_comm;

/* What of the control's wire has been written since the last publication. */
typedef struct written {
    size_t offset;
    const fsdpc_slice *slices;
    uint64_t contents;
} written;

typedef struct local_wire {
    fsdpc_controlled_wire of; /* first */
    uint64_t contents;        /* publications so far */
    written *written;
    size_t n_written;
} local_wire;

typedef struct local_buffer {
    fsdpc_buffer base;
    fsdpc_buffer *control;
} local_buffer;

static local_comm *local_of(fsdpc_comm *comm)
{
    return (local_comm *)comm;
}

static fsdpc_comm *control_of(fsdpc_comm *comm)
{
    return fsdpc_control_of(comm, local_of(comm)->control);
}

static fsdpc_status settle(local_comm *self, fsdpc_status status)
{
    return fsdpc_control_settle(&self->base, self->control, status);
}

/* ---- Life ---- */

static fsdpc_status comm_new(const fsdpc_comm_config *config, local_comm **out)
{
    local_comm *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator");
    fsdpc_comm_init(&self->base, &local_ops, config);
    self->control = config->control;
    self->host = config->control->device;
    self->main = (fsdpc_stream){.device = config->device, .name = "local_cuda"};
    self->base.world_rank = self->base.log.rank = config->control->world_rank;
    *out = self;
    return FSDPC_OK;
}

static void local_destroy(fsdpc_comm *comm)
{
    local_comm *self = local_of(comm);
    fsdpc_comm_destroy(self->control); /* first: it may know of what our flights hold */
    while (self->flights) {
        flight *it = self->flights;
        self->flights = it->next;
        fsdpc_device_free(self->host, it->host);
        free(it);
    }
    free(self);
}

static fsdpc_status local_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    local_comm *self = local_of(comm), *part = NULL;
    fsdpc_comm_config config;
    FSDPC_TRY(fsdpc_control_split(comm, self->control, color, key, &config));
    fsdpc_status status = config.control ? comm_new(&config, &part) : FSDPC_OK;
    status = settle(self, fsdpc_comm_agree(self->control, status, "split"));
    if (status != FSDPC_OK) {
        if (part)
            local_destroy(&part->base);
        else
            fsdpc_comm_destroy(config.control);
        return status;
    }
    *out = part ? &part->base : NULL;
    return FSDPC_OK;
}

static void local_abort(fsdpc_comm *comm, const char *reason)
{
    fsdpc_comm_abort_local(comm, reason);
    fsdpc_comm_abort(local_of(comm)->control, comm->poison);
}

static void local_leave(fsdpc_comm *comm)
{
    fsdpc_comm_leave(local_of(comm)->control);
}

/* ---- Wires and buffers ---- */

static fsdpc_status local_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out)
{
    local_comm *self = local_of(comm);
    local_wire *wire = calloc(1, sizeof *wire);
    if (!wire)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a wire");
    void *data = NULL;
    fsdpc_status status = FSDPC_OK;
    bool moved = comm->size > 1;
    if (!moved)
        FSDPC_TRY_GOTO(
            status,
            fsdpc_control_memory(comm, self->control, "wire_create", FSDPC_MEM_WIRE, bytes, &data),
            free_wire);
    FSDPC_TRY_GOTO(status, settle(self, fsdpc_wire_create(self->control, bytes, &wire->of.control)),
                   free_data);
    wire->of.base =
        (fsdpc_wire){.comm = comm, .bytes = bytes, .moved = moved, .read = data, .write = data};
    *out = &wire->of.base;
    return FSDPC_OK;

free_data:
    fsdpc_device_free(comm->device, data);
free_wire:
    free(wire);
    return status;
}

static void local_wire_destroy(fsdpc_wire *base)
{
    local_wire *wire = (local_wire *)base;
    fsdpc_wire_destroy(wire->of.control);
    fsdpc_device_free(base->comm->device, base->write);
    free(wire->written);
    free(wire);
}

static fsdpc_status local_epoch_publish(fsdpc_wire *base)
{
    ((local_wire *)base)->contents++;
    return fsdpc_controlled_publish(base);
}

static fsdpc_status local_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    local_comm *self = local_of(comm);
    local_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a buffer");
    void *data = NULL;
    fsdpc_status status;
    FSDPC_TRY_GOTO(
        status,
        fsdpc_control_memory(comm, self->control, "buffer_create", FSDPC_MEM_REDUCE, bytes, &data),
        free_buffer);
    FSDPC_TRY_GOTO(status,
                   settle(self, fsdpc_buffer_create(self->control, bytes, &buffer->control)),
                   free_data);
    buffer->base = (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = data};
    *out = &buffer->base;
    return FSDPC_OK;

free_data:
    fsdpc_device_free(comm->device, data);
free_buffer:
    free(buffer);
    return status;
}

static void local_buffer_destroy(fsdpc_buffer *base)
{
    fsdpc_buffer_destroy(((local_buffer *)base)->control);
    fsdpc_device_free(base->comm->device, base->data);
    free(base);
}

/* What peers read is the control's; ours was copied at the post. */
static fsdpc_status local_buffer_idle(fsdpc_buffer *base)
{
    fsdpc_buffer *control = ((local_buffer *)base)->control;
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    return settle(local_of(base->comm), control->comm->ops->buffer_idle(control));
}

/* ---- Copies ---- */

static fsdpc_status copy(local_comm *self, void *to, const void *from, size_t bytes)
{
    return fsdpc_device_copy(self->base.device, to, from, bytes, &self->main);
}

static fsdpc_status copied(local_comm *self)
{
    return fsdpc_stream_sync(&self->main);
}

static fsdpc_status room(local_comm *self, flight *it, size_t bytes)
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

/* Where a rank's part of a slice begins in the full, and how much there is of it: all, if the slice
 * is whole on that rank (or on all); none, if on another. */
static size_t part_of(const fsdpc_coll *op, const fsdpc_slice *slice, int rank, size_t *first_out)
{
    bool even = op->kind != FSDPC_COLL_REDUCE_ALL && slice->owner < 0;
    bool elsewhere = op->kind != FSDPC_COLL_REDUCE_ALL && slice->owner >= 0 && slice->owner != rank;
    *first_out = slice->full_offset + (even ? (size_t)rank * slice->numel : 0);
    return elsewhere ? 0 : slice->numel;
}

/* The rank's slices, at their places in the full. */
static fsdpc_status copy_slices(local_comm *self, const fsdpc_coll *op, int rank, unsigned char *to,
                                const unsigned char *from)
{
    size_t element = fsdpc_dtype_bytes(op->dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = part_of(op, &op->slices[i], rank, &first);
        FSDPC_TRY(copy(self, to + first * element, from + first * element, numel * element));
    }
    return FSDPC_OK;
}

/* ---- Gathers ---- */

/* Whether these slices of the control's wire are what was published last; else they will be. */
static fsdpc_status is_written(local_wire *wire, const fsdpc_coll *op, bool *out)
{
    written *it = wire->written, *end = it + wire->n_written;
    while (it < end && (it->offset != op->offset || it->slices != op->slices))
        it++;
    if (it == end) {
        written *more = realloc(wire->written, (wire->n_written + 1) * sizeof *more);
        if (!more)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note a gather");
        wire->written = more;
        it = more + wire->n_written++;
        *it = (written){op->offset, op->slices, UINT64_MAX};
    }
    *out = it->contents == wire->contents;
    it->contents = wire->contents;
    return FSDPC_OK;
}

static fsdpc_status gather_out(local_comm *self, const fsdpc_coll *op)
{
    local_wire *wire = (local_wire *)op->wire;
    bool done;
    FSDPC_TRY(is_written(wire, op, &done));
    if (done)
        return FSDPC_OK;
    size_t element = fsdpc_dtype_bytes(op->dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = part_of(op, &op->slices[i], self->base.rank, &first);
        FSDPC_TRY(copy(self, wire->of.control->write + op->offset + first * element,
                       (const unsigned char *)op->send + op->slices[i].shard_offset * element,
                       numel * element));
    }
    return copied(self);
}

static fsdpc_status gather_back(local_comm *self, const fsdpc_coll *op)
{
    const local_wire *wire = (const local_wire *)op->wire;
    for (int p = 0; p < self->base.size; p++)
        FSDPC_TRY(copy_slices(self, op, p, op->recv, wire->of.control->read + op->offset));
    return copied(self);
}

/* ---- Reductions ---- */

static fsdpc_status copy_shard(local_comm *self, const fsdpc_coll *op, unsigned char *to,
                               const unsigned char *from)
{
    size_t element = fsdpc_dtype_bytes(op->shard_dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = part_of(op, &op->slices[i], self->base.rank, &first);
        size_t at = op->slices[i].shard_offset * element;
        FSDPC_TRY(copy(self, to + at, from + at, numel * element));
    }
    return FSDPC_OK;
}

static fsdpc_status reduction_out(local_comm *self, flight *it, fsdpc_coll *op)
{
    local_buffer *buffer = (local_buffer *)op->buffer;
    size_t shard_numel = 0;
    for (size_t i = 0; i < op->n_slices; i++)
        shard_numel = fsdpc_max_size(shard_numel, op->slices[i].shard_offset + op->slices[i].numel);
    FSDPC_TRY(room(self, it, shard_numel * fsdpc_dtype_bytes(op->shard_dtype)));
    bool evenly = op->kind == FSDPC_COLL_REDUCE_SCATTER;
    size_t element = fsdpc_dtype_bytes(op->dtype);
    for (size_t i = 0; i < op->n_slices; i++) {
        const fsdpc_slice *slice = &op->slices[i];
        size_t times = evenly && slice->owner < 0 ? (size_t)self->base.size : 1;
        size_t at = op->offset + slice->full_offset * element;
        FSDPC_TRY(copy(self, buffer->control->data + at, buffer->base.data + at,
                       slice->numel * times * element));
    }
    if (op->accumulate)
        FSDPC_TRY(copy_shard(self, op, it->host, op->shard));
    op->buffer = buffer->control;
    op->shard = it->host;
    return copied(self);
}

static fsdpc_status reduction_back(local_comm *self, const flight *it, const fsdpc_coll *op)
{
    FSDPC_TRY(copy_shard(self, op, op->shard, it->host));
    return copied(self);
}

/* ---- Values ---- */

static size_t received_bytes(const local_comm *self, const fsdpc_coll *op)
{
    size_t times = op->kind == FSDPC_COLL_ALL_GATHER ? (size_t)self->base.size : 1;
    return op->numel * fsdpc_dtype_bytes(op->dtype) * times;
}

static fsdpc_status values_out(local_comm *self, flight *it, fsdpc_coll *op)
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
    FSDPC_TRY(room(self, it, sent + received)); /* what is received before what is sent */
    unsigned char *send = broadcast ? it->host : it->host + received;
    if (!broadcast || op->root == self->base.rank)
        FSDPC_TRY(copy(self, send, broadcast ? op->recv : op->send, sent));
    op->send = send;
    op->recv = it->host;
    return copied(self);
}

static fsdpc_status values_back(local_comm *self, const flight *it, const fsdpc_coll *op)
{
    if (!it->staged)
        return FSDPC_OK;
    FSDPC_TRY(copy(self, op->recv, it->host, received_bytes(self, op)));
    return copied(self);
}

/* ---- Post and test ---- */

/* Copies out what this rank gives; *op becomes what the control is to do. */
static fsdpc_status go_out(local_comm *self, flight *it, fsdpc_coll *op)
{
    if (op->stream && op->stream->async) /* what it waits for comes before our copies */
        FSDPC_TRY(fsdpc_stream_sync(op->stream));
    op->stream = NULL;
    it->staged = false;
    if (op->agree_only)
        return FSDPC_OK;
    switch (op->kind) {
    case FSDPC_COLL_GATHER:
        op->agree_only = true;
        return op->wire->moved ? gather_out(self, op) : FSDPC_OK;
    case FSDPC_COLL_REDUCE_SCATTER:
    case FSDPC_COLL_REDUCE_ALL:
        return reduction_out(self, it, op);
    case FSDPC_COLL_ALL_REDUCE:
    case FSDPC_COLL_ALL_GATHER:
    case FSDPC_COLL_BROADCAST:
        return values_out(self, it, op);
    case FSDPC_COLL_BARRIER:
        break;
    }
    return FSDPC_OK;
}

static fsdpc_status come_back(local_comm *self, const flight *it, const fsdpc_coll *op)
{
    if (op->agree_only || op->kind == FSDPC_COLL_BARRIER)
        return FSDPC_OK;
    if (op->kind == FSDPC_COLL_GATHER)
        return op->wire->moved ? gather_back(self, op) : FSDPC_OK;
    return fsdpc_coll_reduces(op->kind) ? reduction_back(self, it, op) : values_back(self, it, op);
}

static fsdpc_status flight_take(local_comm *self, flight **out)
{
    flight *it = self->flights;
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

static fsdpc_status local_post(fsdpc_work *work)
{
    local_comm *self = local_of(work->comm);
    flight *it;
    FSDPC_TRY(flight_take(self, &it));
    fsdpc_coll op = work->op;
    fsdpc_status status = go_out(self, it, &op);
    if (status == FSDPC_OK)
        status = settle(self, fsdpc_comm_post(control_of(work->comm), &op, &it->carried));
    if (status == FSDPC_OK)
        work->impl = it;
    else
        it->taken = false;
    return status;
}

static fsdpc_status local_test(fsdpc_work *work)
{
    local_comm *self = local_of(work->comm);
    flight *it = work->impl;
    fsdpc_status status = settle(self, fsdpc_comm_test(&it->carried));
    if (status == FSDPC_IN_PROGRESS)
        return status;
    if (status == FSDPC_OK) {
        status = come_back(self, it, &work->op);
        if (status != FSDPC_OK)
            fsdpc_comm_poison(&self->base, status);
    }
    it->taken = false;
    work->impl = NULL;
    return status;
}

/* ---- Waiting ---- */

static fsdpc_status local_idle(fsdpc_comm *comm, int64_t max_ns)
{
    return fsdpc_control_idle(control_of(comm), max_ns);
}

static void local_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    fsdpc_control_describe(local_of(comm)->control, text, bytes);
}

static void local_locate(fsdpc_comm *comm, const char *phase, const char *unit)
{
    fsdpc_comm_locate(control_of(comm), phase, unit);
}

static void local_waits(fsdpc_comm *comm, const char *what)
{
    fsdpc_control_waits(control_of(comm), what);
}

static const fsdpc_comm_ops local_ops = {
    .name = "local_cuda",
    .destroy = local_destroy,
    .split = local_split,
    .abort = local_abort,
    .leave = local_leave,
    .wire_create = local_wire_create,
    .wire_destroy = local_wire_destroy,
    .epoch_arrive = fsdpc_controlled_arrive,
    .epoch_test = fsdpc_controlled_test,
    .epoch_publish = local_epoch_publish,
    .epoch_published = fsdpc_controlled_published,
    .buffer_create = local_buffer_create,
    .buffer_destroy = local_buffer_destroy,
    .buffer_idle = local_buffer_idle,
    .post = local_post,
    .test = local_test,
    .idle = local_idle,
    .describe = local_describe,
    .locate = local_locate,
    .waits = local_waits,
};

fsdpc_status fsdpc_comm_local_cuda_create(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    FSDPC_TRY(fsdpc_control_check(config, "local_cuda"));
    local_comm *self = NULL;
    fsdpc_status status = comm_new(config, &self);
    status = fsdpc_comm_agree(config->control, status, "the beginning of local_cuda");
    if (status == FSDPC_OK)
        *out = &self->base;
    else
        free(self);
    return status;
}
