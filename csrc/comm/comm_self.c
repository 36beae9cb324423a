/* A communicator for a world of one rank, and the template for new communicators.
 *
 * Parameter buffers and reduce buffers are in private memory, and every epoch is complete as soon
 * as it begins. With one rank, a collective is a copy or a sum of one term. The sum still uses the
 * reduce kernel, because scaling and rounding must be the same at every world size.
 *
 * A post does all the work itself, except for reductions on asynchronous streams, which finish
 * later on their stream. The driving thread reads the result from work->status after it sees
 * work->state, which the stream's thread releases after all its writes and test acquires.
 *
 * On a remote device, everything is enqueued on the main stream before any use of the result,
 * because a sum of one term has nothing to overlap with.
 */
#include <stdio.h>
#include <stdlib.h>

#include "comm/coll_math.h"

static const fsdpc_comm_ops self_ops;

typedef struct self_param_buffer {
    fsdpc_param_buffer base;
    fsdpc_extent *extent; /* contains the memory; NULL: device memory */
    fsdpc_epoch_note note;
} self_param_buffer;

static void self_destroy(fsdpc_comm *comm)
{
    free(comm);
}

static fsdpc_status self_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    (void)key;
    FSDPC_TRY(fsdpc_comm_health(comm));
    if (color < 0) {
        *out = NULL;
        return FSDPC_OK;
    }
    fsdpc_comm *part = malloc(sizeof *part);
    if (!part)
        return fsdpc_fail_errno("no memory for a communicator");
    *part = *comm;
    part->waited_ns = 0;
    *out = part;
    return FSDPC_OK;
}

static fsdpc_status self_param_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                             fsdpc_param_buffer **out)
{
    FSDPC_TRY(fsdpc_comm_health(comm));
    void *data = NULL;
    self_param_buffer *param_buffer = calloc(1, sizeof *param_buffer);
    if (!param_buffer)
        return fsdpc_fail_errno("no memory for a parameter buffer");
    fsdpc_status status =
        tier ? fsdpc_extent_create(tier, "the params", NULL, FSDPC_MEM_UNSHARDED, bytes, 1, 1,
                                   &param_buffer->extent)
             : fsdpc_device_alloc_zeroed(comm->device, FSDPC_MEM_UNSHARDED, bytes, &data);
    if (status != FSDPC_OK) {
        free(param_buffer);
        return status;
    }
    if (tier)
        data = param_buffer->extent->memory;
    param_buffer->base =
        (fsdpc_param_buffer){.comm = comm, .bytes = bytes, .read = data, .write = data};
    *out = &param_buffer->base;
    return FSDPC_OK;
}

static void self_param_buffer_destroy(fsdpc_param_buffer *param_buffer)
{
    fsdpc_extent *extent = ((self_param_buffer *)param_buffer)->extent;
    if (extent)
        fsdpc_extent_destroy(extent);
    else
        fsdpc_device_free(param_buffer->comm->device, param_buffer->write);
    free(param_buffer);
}

static fsdpc_status self_epoch_arrive(fsdpc_param_buffer *param_buffer,
                                      const fsdpc_epoch_note *mine)
{
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    ((self_param_buffer *)param_buffer)->note = *mine;
    param_buffer->epoch++;
    return FSDPC_OK;
}

static fsdpc_status self_epoch_test(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out)
{
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    const fsdpc_epoch_note *note = &((self_param_buffer *)param_buffer)->note;
    if ((note->bits & FSDPC_EPOCH_CHANGED) && (note->bits & FSDPC_EPOCH_HELD))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "rank 0 changed its weights while it holds a unit by unshard(); call "
                          "reshard() on the unit before the next forward");
    *all_out = *note;
    return FSDPC_OK;
}

static fsdpc_status self_copied_in(fsdpc_param_buffer *param_buffer)
{
    return fsdpc_comm_health(param_buffer->comm);
}

static fsdpc_status self_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    void *data;
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(fsdpc_device_alloc(comm->device, FSDPC_MEM_REDUCE, bytes, &data));
    fsdpc_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) {
        fsdpc_device_free(comm->device, data);
        return fsdpc_fail_errno("no memory for a buffer");
    }
    *buffer = (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = data};
    *out = buffer;
    return FSDPC_OK;
}

static void self_buffer_destroy(fsdpc_buffer *buffer)
{
    fsdpc_device_free(buffer->comm->device, buffer->data);
    free(buffer);
}

static fsdpc_status self_buffer_idle(fsdpc_buffer *buffer)
{
    return fsdpc_comm_health(buffer->comm);
}

/* Returns whether the sum of one term is already in place. */
static bool is_done(const fsdpc_coll *op)
{
    return op->buffer->data + op->offset == op->shard && op->dtype == op->shard_dtype &&
           op->dtype == op->round_dtype && op->scale == 1 && !op->accumulate;
}

static fsdpc_status perform(const fsdpc_coll *op, fsdpc_stream *stream)
{
    if (op->agree_only)
        return FSDPC_OK;
    switch (op->kind) {
    case FSDPC_COLL_REDUCE_SCATTER:
    case FSDPC_COLL_REDUCE_ALL:
        if (is_done(op))
            return FSDPC_OK;
        return fsdpc_coll_reduce_slices(op, 0, 1, (const unsigned char *const[]){op->buffer->data},
                                        stream);
    case FSDPC_COLL_ALL_REDUCE:
    case FSDPC_COLL_ALL_GATHER:
        if (op->numel && op->recv != op->send)
            return fsdpc_device_copy(stream->device, op->recv, op->send,
                                     op->numel * fsdpc_dtype_bytes(op->dtype), stream);
        return FSDPC_OK;
    case FSDPC_COLL_REPLAY:
        return fsdpc_graph_launch(op->graph);
    case FSDPC_COLL_GATHER:
    case FSDPC_COLL_BROADCAST:
    case FSDPC_COLL_EXCHANGE:
    case FSDPC_COLL_BARRIER:
        break;
    }
    return FSDPC_OK;
}

static fsdpc_status perform_on_stream(void *arg, fsdpc_stream *stream)
{
    fsdpc_work *work = arg;
    fsdpc_status status = perform(&work->op, stream);
    work->status = status;
    atomic_store_explicit(&work->state, 0, memory_order_release); /* pairs with the acquire in
                                                                   * test */
    return status;
}

static fsdpc_status self_post(fsdpc_work *work)
{
    const fsdpc_coll *op = &work->op;
    fsdpc_device *device = work->comm->device;
    if (op->stream && op->stream->async && !device->remote && op->kind != FSDPC_COLL_GATHER) {
        atomic_store_explicit(&work->state, 1, memory_order_relaxed);
        return fsdpc_stream_submit(op->stream, perform_on_stream, work);
    }
    fsdpc_stream here = {.device = device, .name = "comm"};
    return perform(op, op->stream && !device->remote ? op->stream : &here);
}

static fsdpc_status self_test(fsdpc_work *work)
{
    if (atomic_load_explicit(&work->state, memory_order_acquire))
        return FSDPC_IN_PROGRESS;
    if (work->status != FSDPC_OK)
        return fsdpc_fail(work->status, "%s of %s failed on its stream",
                          fsdpc_coll_name(work->op.kind), work->op.what ? work->op.what : "-");
    return FSDPC_OK;
}

static const fsdpc_comm_ops self_ops = {
    .name = "self",
    .destroy = self_destroy,
    .split = self_split,
    .abort = fsdpc_comm_abort_local,
    .param_buffer_create_in = self_param_buffer_create,
    .param_buffer_destroy = self_param_buffer_destroy,
    .epoch_arrive = self_epoch_arrive,
    .epoch_test = self_epoch_test,
    .epoch_copied_in = self_copied_in,
    .epoch_copy_in_test = self_copied_in,
    .buffer_create = self_buffer_create,
    .buffer_destroy = self_buffer_destroy,
    .buffer_idle = self_buffer_idle,
    .any_buffer = true,
    .splits_sums = true,
    .post = self_post,
    .test = self_test,
};

fsdpc_status fsdpc_comm_self_create(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    if (config->size != 1 || config->rank != 0)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "a communicator of one rank was asked for rank %d of %d; use shm for "
                          "several ranks",
                          config->rank, config->size);
    if (!config->device)
        return fsdpc_fail(FSDPC_ERR_VALUE, "a communicator needs a device");
    fsdpc_comm *comm = malloc(sizeof *comm);
    if (!comm)
        return fsdpc_fail_errno("no memory for a communicator");
    fsdpc_comm_init(comm, &self_ops, config);
    *out = comm;
    return FSDPC_OK;
}
