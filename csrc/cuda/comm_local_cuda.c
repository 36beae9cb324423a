/* Operations of several ranks on one GPU, carried by their control over host memory.
 *
 * A post copies this rank's contribution out and posts the control's operation.  When that is done,
 * the outcome is copied to its place, and the work is done.  The host waits for everything on the
 * GPU, so results of finished work are visible on every stream.  This transport is for correctness,
 * not for speed.
 *
 * Values on the GPU pass through host memory both ways, as they are few (norms, losses, whole
 * tensors that a user reads).  Values in host memory go over the control as they are.
 *
 * Epochs, agreement, deaths and failure are the control's (control.h).
 */
#include "cuda/comm_local_cuda.h"

#include <stdlib.h>

#include "base/size.h"
#include "cuda/device_cuda.h"
#include "cuda/local_cuda.h"

/* ---- Life ---- */

static const fsdpc_comm_ops local_ops;

static fsdpc_status comm_new(const fsdpc_control_config *config, fsdpc_local_comm **out)
{
    fsdpc_local_comm *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator");
    fsdpc_comm_init(&self->base, &local_ops, &config->comm);
    self->base.control = config->control;
    self->host = config->control->device;
    self->base.world_rank = self->base.log.rank = config->control->world_rank;
    *out = self;
    return FSDPC_OK;
}

static void local_destroy(fsdpc_comm *comm)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    fsdpc_comm_destroy(self->base.control); /* first: it may know of what our operations hold */
    while (self->made) {
        fsdpc_local_op *it = self->made;
        self->made = it->next;
        fsdpc_device_free(self->host, it->host);
        free(it);
    }
    free(self);
}

static fsdpc_status local_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm), *part = NULL;
    fsdpc_control_config config;
    FSDPC_TRY(fsdpc_control_split(comm, color, key, &config));
    fsdpc_status status = config.control ? comm_new(&config, &part) : FSDPC_OK;
    status =
        fsdpc_control_settle(&self->base, fsdpc_comm_agree(self->base.control, status, "split"));
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
    fsdpc_comm_abort(comm->control, comm->poison);
}

/* ---- Copies ---- */

fsdpc_status fsdpc_local_copy(fsdpc_local_comm *self, void *to, const void *from, size_t bytes)
{
    return fsdpc_device_copy(self->base.device, to, from, bytes,
                             fsdpc_device_main(self->base.device));
}

fsdpc_status fsdpc_local_copied(fsdpc_local_comm *self)
{
    return fsdpc_stream_sync(fsdpc_device_main(self->base.device));
}

fsdpc_status fsdpc_local_room(fsdpc_local_comm *self, fsdpc_local_op *it, size_t bytes)
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

static fsdpc_status values_out(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
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

static fsdpc_status values_back(fsdpc_local_comm *self, const fsdpc_local_op *it,
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
static fsdpc_status go_out(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    if (op->stream && op->stream->async) /* what it waits for comes before what we do */
        FSDPC_TRY(fsdpc_stream_sync(op->stream));
    op->stream = NULL;
    it->staged = false;
    if (op->agree_only)
        return FSDPC_OK;
    if (moves(op))
        return fsdpc_local_out(self, it, op);
    if (op->kind == FSDPC_COLL_GATHER)
        op->agree_only = true;
    return has_values(op) ? values_out(self, it, op) : FSDPC_OK;
}

static fsdpc_status come_back(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    if (op->agree_only)
        return FSDPC_OK;
    if (moves(op))
        return fsdpc_local_back(self, it, op);
    return has_values(op) ? values_back(self, it, op) : FSDPC_OK;
}

static fsdpc_status op_take(fsdpc_local_comm *self, fsdpc_local_op **out)
{
    fsdpc_local_op *it = self->made;
    while (it && it->taken)
        it = it->next;
    if (!it) {
        it = calloc(1, sizeof *it);
        if (!it)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an operation");
        it->next = self->made;
        self->made = it;
    }
    it->taken = true;
    *out = it;
    return FSDPC_OK;
}

static fsdpc_status local_post(fsdpc_work *work)
{
    fsdpc_local_comm *self = fsdpc_local_of(work->comm);
    fsdpc_local_op *it = NULL;
    FSDPC_TRY(op_take(self, &it));
    fsdpc_coll op = work->op;
    fsdpc_status status = go_out(self, it, &op);
    if (status == FSDPC_OK)
        status = fsdpc_control_settle(&self->base,
                                      fsdpc_comm_post(work->comm->control, &op, &it->carried));
    if (status == FSDPC_OK)
        work->impl = it;
    else
        it->taken = false;
    return status;
}

static fsdpc_status local_test(fsdpc_work *work)
{
    fsdpc_local_comm *self = fsdpc_local_of(work->comm);
    fsdpc_local_op *it = work->impl;
    fsdpc_status status = fsdpc_control_settle(&self->base, fsdpc_comm_test(&it->carried));
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

static const fsdpc_comm_ops local_ops = {
    .name = "local_cuda",
    .destroy = local_destroy,
    .split = local_split,
    .abort = local_abort,
    .wire_create = fsdpc_local_wire_create,
    .wire_destroy = fsdpc_local_wire_destroy,
    .epoch_arrive = fsdpc_controlled_arrive,
    .epoch_test = fsdpc_controlled_test,
    .epoch_publish = fsdpc_local_publish,
    .epoch_published = fsdpc_controlled_published,
    .buffer_create = fsdpc_local_buffer_create,
    .buffer_destroy = fsdpc_local_buffer_destroy,
    .buffer_idle = fsdpc_local_buffer_idle,
    .splits_sums = true,
    .post = local_post,
    .test = local_test,
};

fsdpc_status fsdpc_comm_local_cuda_create(const fsdpc_control_config *config, fsdpc_comm **out)
{
    FSDPC_TRY(fsdpc_control_check(config, "local_cuda"));
    fsdpc_local_comm *self = NULL;
    fsdpc_status status = comm_new(config, &self);
    status = fsdpc_comm_agree(config->control, status, "the beginning of local_cuda");
    if (status == FSDPC_OK)
        *out = &self->base;
    else
        free(self);
    return status;
}
