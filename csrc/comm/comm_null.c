/* A simulated communicator: one process acts as any rank of a world of any size, and its peers
 * appear to do exactly what it does.
 *
 * It exists to run schedules in one process, in tests and simulations. It records its calls in
 * order: "post" when an operation is posted, and "done" when its owner first observes its
 * completion. Waits return at once. With `lazy`, an operation is done only after a wait, so the
 * records and the engine's trace show where the program needs its result. All peers appear to have
 * the same values. Gathers do not touch the parameter buffer. A sum over n ranks is n times this
 * rank's contribution, computed by the configured device's kernels (which do nothing on
 * device_null).
 *
 * Parameter buffers and reduce buffers use the device's memory and are counted as in shm: only rank
 * 0 counts parameter buffers.
 */
#include "comm/comm_null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/coll_math.h"

static const fsdpc_comm_ops null_ops, ordering_ops;

typedef struct null_comm {
    fsdpc_comm base;
    fsdpc_comm_record *records;
    size_t n_records, capacity;
    bool lazy, waits; /* waits: a wait has begun since an operation was last done */
} null_comm;

typedef struct null_param_buffer {
    fsdpc_param_buffer base;
    fsdpc_epoch_note note;
} null_param_buffer;

/* Running out of memory for a record is an error, since a test would otherwise check an incomplete
 * list. */
static fsdpc_status record(fsdpc_comm *comm, const char *what, const fsdpc_coll *op, uint64_t epoch,
                           size_t bytes)
{
    null_comm *self = (null_comm *)comm;
    if (self->n_records == self->capacity) {
        size_t capacity = self->capacity ? 2 * self->capacity : 64;
        void *more = realloc(self->records, capacity * sizeof *self->records);
        if (!more)
            return fsdpc_fail_errno("no memory for the null communicator's records");
        self->records = more;
        self->capacity = capacity;
    }
    self->records[self->n_records++] = (fsdpc_comm_record){
        .what = what,
        .kind = op ? op->kind : FSDPC_COLL_BARRIER,
        .unit = op ? op->unit : -1,
        .epoch = epoch,
        .bytes = bytes,
    };
    return FSDPC_OK;
}

size_t fsdpc_comm_null_records(const fsdpc_comm *comm, const fsdpc_comm_record **out)
{
    const null_comm *self = (const null_comm *)comm;
    *out = self->records;
    return self->n_records;
}

/* ---- Life ---- */

static void null_destroy(fsdpc_comm *comm)
{
    free(((null_comm *)comm)->records);
    free(comm);
}

static void null_abort(fsdpc_comm *comm, fsdpc_status status, const char *reason)
{
    fsdpc_comm_abort_local(comm, status, reason);
    record(comm, "abort", NULL, 0, 0);
}

static fsdpc_status null_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    (void)key;
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(record(comm, "split", NULL, 0, 0));
    if (color < 0) {
        *out = NULL;
        return FSDPC_OK;
    }
    null_comm *part = calloc(1, sizeof *part);
    if (!part)
        return fsdpc_fail_errno("no memory for a communicator");
    part->base = *comm;
    part->base.waited_ns = 0;
    part->lazy = ((null_comm *)comm)->lazy;
    *out = &part->base;
    return FSDPC_OK;
}

/* ---- Parameter buffer, epochs, buffers ---- */

static fsdpc_status null_param_buffer_create(fsdpc_comm *comm, size_t bytes,
                                             fsdpc_param_buffer **out)
{
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(record(comm, "parameter buffer", NULL, 0, bytes));
    void *data = NULL;
    fsdpc_mem_kind kind = comm->rank == 0 ? FSDPC_MEM_UNSHARDED : FSDPC_MEM_OTHER;
    FSDPC_TRY(fsdpc_device_alloc_zeroed(comm->device, kind, bytes, &data));
    null_param_buffer *param_buffer = calloc(1, sizeof *param_buffer);
    if (!param_buffer) {
        fsdpc_device_free(comm->device, data);
        return fsdpc_fail_errno("no memory for a parameter buffer");
    }
    param_buffer->base =
        (fsdpc_param_buffer){.comm = comm, .bytes = bytes, .read = data, .write = data};
    *out = &param_buffer->base;
    return FSDPC_OK;
}

static void null_param_buffer_destroy(fsdpc_param_buffer *param_buffer)
{
    fsdpc_device_free(param_buffer->comm->device, param_buffer->write);
    free(param_buffer);
}

static fsdpc_status null_epoch_arrive(fsdpc_param_buffer *param_buffer,
                                      const fsdpc_epoch_note *mine)
{
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    ((null_param_buffer *)param_buffer)->note = *mine;
    param_buffer->epoch++;
    return record(param_buffer->comm, "arrive", &(fsdpc_coll){.unit = mine->unit},
                  param_buffer->epoch, 0);
}

static fsdpc_status null_epoch_test(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out)
{
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    const fsdpc_epoch_note *note = &((null_param_buffer *)param_buffer)->note;
    if ((note->bits & FSDPC_EPOCH_CHANGED) && (note->bits & FSDPC_EPOCH_HELD))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "rank %d changed its weights while it holds a unit by unshard(); call "
                          "reshard() on the unit before the next forward",
                          param_buffer->comm->rank);
    *all_out = *note;
    return FSDPC_OK;
}

static fsdpc_status null_epoch_copied_in(fsdpc_param_buffer *param_buffer)
{
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    return record(param_buffer->comm, "copy_in", NULL, param_buffer->epoch, 0);
}

static fsdpc_status null_epoch_copy_in_test(fsdpc_param_buffer *param_buffer)
{
    return fsdpc_comm_health(param_buffer->comm);
}

static fsdpc_status null_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(record(comm, "buffer", NULL, 0, bytes));
    void *data = NULL;
    FSDPC_TRY(fsdpc_device_alloc_zeroed(comm->device, FSDPC_MEM_REDUCE, bytes, &data));
    fsdpc_buffer *buffer = malloc(sizeof *buffer);
    if (!buffer) {
        fsdpc_device_free(comm->device, data);
        return fsdpc_fail_errno("no memory for a buffer");
    }
    *buffer = (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = data};
    *out = buffer;
    return FSDPC_OK;
}

static void null_buffer_destroy(fsdpc_buffer *buffer)
{
    fsdpc_device_free(buffer->comm->device, buffer->data);
    free(buffer);
}

static fsdpc_status null_buffer_idle(fsdpc_buffer *buffer)
{
    return fsdpc_comm_health(buffer->comm);
}

/* ---- Collectives ---- */

static fsdpc_status perform(const fsdpc_coll *op, int rank, int size, fsdpc_stream *stream)
{
    if (op->agree_only)
        return FSDPC_OK;
    const void *same[FSDPC_COLL_MAX_RANKS];
    size_t bytes = op->numel * fsdpc_dtype_bytes(op->dtype);
    for (int p = 0; p < size && p < FSDPC_COLL_MAX_RANKS; p++)
        same[p] = fsdpc_coll_reduces(op->kind) ? (const void *)op->buffer->data : op->send;
    switch (op->kind) {
    case FSDPC_COLL_REDUCE_SCATTER:
    case FSDPC_COLL_REDUCE_ALL:
        if (size > FSDPC_COLL_MAX_RANKS)
            return FSDPC_OK;
        return fsdpc_coll_reduce_slices(op, rank, size, (const unsigned char *const *)same, stream);
    case FSDPC_COLL_ALL_REDUCE:
        if (size > FSDPC_COLL_MAX_RANKS) {
            memmove(op->recv, op->send, bytes);
            return FSDPC_OK;
        }
        return fsdpc_coll_combine(op->op, op->dtype, same, size, op->numel, op->recv, stream);
    case FSDPC_COLL_ALL_GATHER:
        for (int p = 0; bytes && p < size; p++)
            memmove((unsigned char *)op->recv + (size_t)p * bytes, op->send, bytes);
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

static fsdpc_status null_post(fsdpc_work *work)
{
    const fsdpc_coll *op = &work->op;
    fsdpc_comm *comm = work->comm;
    FSDPC_TRY(record(comm, "post", op, op->epoch, fsdpc_coll_bytes(op, comm->size)));
    fsdpc_stream here = {.device = comm->device, .name = "comm"};
    FSDPC_TRY(perform(op, comm->rank, comm->size, op->stream ? op->stream : &here));
    return FSDPC_OK;
}

static fsdpc_status null_test(fsdpc_work *work)
{
    null_comm *self = (null_comm *)work->comm;
    FSDPC_TRY(fsdpc_comm_health(work->comm));
    if (self->lazy && !self->waits)
        return FSDPC_IN_PROGRESS;
    self->waits = false;
    return record(work->comm, "done", &work->op, work->op.epoch,
                  fsdpc_coll_bytes(&work->op, work->comm->size));
}

static fsdpc_status null_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    (void)nap;
    ((null_comm *)comm)->waits = max_ns > 0;
    return fsdpc_comm_health(comm);
}

/* Lets the stream continue at once. */
static fsdpc_status null_order(fsdpc_work *work, fsdpc_stream *stream)
{
    (void)stream;
    ((null_comm *)work->comm)->waits = true;
    return null_test(work);
}

#define NULL_OPS                                                                                   \
    .name = "null", .destroy = null_destroy, .split = null_split, .abort = null_abort,             \
    .param_buffer_create = null_param_buffer_create,                                               \
    .param_buffer_destroy = null_param_buffer_destroy, .epoch_arrive = null_epoch_arrive,          \
    .epoch_test = null_epoch_test, .epoch_copied_in = null_epoch_copied_in,                        \
    .epoch_copy_in_test = null_epoch_copy_in_test, .buffer_create = null_buffer_create,            \
    .buffer_destroy = null_buffer_destroy, .buffer_idle = null_buffer_idle, .splits_sums = true,   \
    .post = null_post, .test = null_test, .idle = null_idle

static const fsdpc_comm_ops null_ops = {NULL_OPS};
static const fsdpc_comm_ops ordering_ops = {NULL_OPS, .order = null_order};

fsdpc_status fsdpc_comm_null_create(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    if (config->rank < 0 || config->rank >= config->size)
        return fsdpc_fail(FSDPC_ERR_VALUE, "rank %d of %d is not possible", config->rank,
                          config->size);
    if (!config->device)
        return fsdpc_fail(FSDPC_ERR_VALUE, "a communicator needs a device");
    null_comm *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail_errno("no memory for a communicator");
    fsdpc_comm_init(&self->base, config->orders ? &ordering_ops : &null_ops, config);
    self->lazy = config->lazy;
    *out = &self->base;
    return FSDPC_OK;
}
