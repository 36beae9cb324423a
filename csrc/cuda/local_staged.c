/* Gathers and reductions of ranks on one GPU, carried by their control over host memory.
 *
 * At the post, what this rank gives is copied out, in the order of the main stream and after the
 * operation's own; then the control's operation is posted.  When that is done its outcome is copied
 * to where it belongs.
 *
 *     gather          own slices -> control's wire, agree, all slices -> full
 *     reductions      buffer -> control's buffer, sum there into staging -> shard
 *
 * The control's wire is written at the first gather of a unit after a publication.  That is within
 * the protocol: a peer copies its fulls before it arrives in the next epoch, and a wire changes
 * only between an arrival of all and a publication.  Gathers of the same contents do not write
 * again, as peers may be reading.
 */
#include <stdlib.h>

#include "base/size.h"
#include "comm/coll_math.h"
#include "cuda/local_cuda.h"

/* What of the control's wire has been written since the last publication. */
typedef struct written {
    size_t offset;
    const fsdpc_slice *slices;
    uint64_t contents;
} written;

typedef struct staged_wire {
    fsdpc_controlled_wire of; /* first */
    uint64_t contents;        /* publications so far */
    written *written;
    size_t n_written;
} staged_wire;

/* ---- Wires and buffers ---- */

/* The head of a wire, which has memory in a world of one alone. */
static fsdpc_status wire_open(fsdpc_comm *comm, size_t bytes, fsdpc_controlled_wire *wire_out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    void *data = NULL;
    bool moved = comm->size > 1;
    fsdpc_wire *control;
    FSDPC_TRY(moved ? fsdpc_control_sizes(comm, "wire_create", bytes)
                    : fsdpc_control_memory(comm, "wire_create", FSDPC_MEM_WIRE, bytes, &data));
    fsdpc_status status =
        fsdpc_control_settle(&self->base, fsdpc_wire_create(self->base.control, bytes, &control));
    if (status != FSDPC_OK) {
        fsdpc_device_free(comm->device, data);
        return status;
    }
    wire_out->control = control;
    wire_out->base =
        (fsdpc_wire){.comm = comm, .bytes = bytes, .moved = moved, .read = data, .write = data};
    return FSDPC_OK;
}

fsdpc_status fsdpc_local_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out)
{
    staged_wire *wire = calloc(1, sizeof *wire);
    if (!wire)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a wire");
    fsdpc_status status = wire_open(comm, bytes, &wire->of);
    if (status != FSDPC_OK)
        free(wire);
    else
        *out = &wire->of.base;
    return status;
}

void fsdpc_local_wire_destroy(fsdpc_wire *base)
{
    staged_wire *wire = (staged_wire *)base;
    fsdpc_wire_destroy(wire->of.control);
    fsdpc_device_free(base->comm->device, base->write);
    free(wire->written);
    free(wire);
}

fsdpc_status fsdpc_local_publish(fsdpc_wire *base)
{
    ((staged_wire *)base)->contents++;
    return fsdpc_controlled_publish(base);
}

fsdpc_status fsdpc_local_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    fsdpc_local_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a buffer");
    void *data = NULL;
    fsdpc_status status;
    FSDPC_TRY_GOTO(status,
                   fsdpc_control_memory(comm, "buffer_create", FSDPC_MEM_REDUCE, bytes, &data),
                   free_buffer);
    FSDPC_TRY_GOTO(status,
                   fsdpc_control_settle(&self->base, fsdpc_buffer_create(self->base.control, bytes,
                                                                         &buffer->control)),
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

void fsdpc_local_buffer_destroy(fsdpc_buffer *base)
{
    fsdpc_buffer_destroy(((fsdpc_local_buffer *)base)->control);
    fsdpc_device_free(base->comm->device, base->data);
    free(base);
}

/* The control's buffer counts the readers. */
fsdpc_status fsdpc_local_buffer_idle(fsdpc_buffer *base)
{
    fsdpc_buffer *control = ((fsdpc_local_buffer *)base)->control;
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    return fsdpc_control_settle(base->comm, control->comm->ops->buffer_idle(control));
}

/* ---- Gathers ---- */

/* The rank's slices, at their places in the full. */
static fsdpc_status copy_slices(fsdpc_local_comm *self, const fsdpc_coll *op, int rank,
                                unsigned char *to, const unsigned char *from)
{
    size_t element = fsdpc_dtype_bytes(op->dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = fsdpc_coll_part(op, &op->slices[i], rank, &first);
        FSDPC_TRY(
            fsdpc_local_copy(self, to + first * element, from + first * element, numel * element));
    }
    return FSDPC_OK;
}

/* Whether these slices of the control's wire are what was published last; else they will be. */
static fsdpc_status is_written(staged_wire *wire, const fsdpc_coll *op, bool *out)
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

static fsdpc_status gather_out(fsdpc_local_comm *self, const fsdpc_coll *op)
{
    staged_wire *wire = (staged_wire *)op->wire;
    bool done = false;
    FSDPC_TRY(is_written(wire, op, &done));
    if (done)
        return FSDPC_OK;
    size_t element = fsdpc_dtype_bytes(op->dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = fsdpc_coll_part(op, &op->slices[i], self->base.rank, &first);
        FSDPC_TRY(
            fsdpc_local_copy(self, wire->of.control->write + op->offset + first * element,
                             (const unsigned char *)op->send + op->slices[i].shard_offset * element,
                             numel * element));
    }
    return fsdpc_local_copied(self);
}

static fsdpc_status gather_back(fsdpc_local_comm *self, const fsdpc_coll *op)
{
    const staged_wire *wire = (const staged_wire *)op->wire;
    for (int p = 0; p < self->base.size; p++)
        FSDPC_TRY(copy_slices(self, op, p, op->recv, wire->of.control->read + op->offset));
    return fsdpc_local_copied(self);
}

/* ---- Reductions ---- */

static fsdpc_status copy_shard(fsdpc_local_comm *self, const fsdpc_coll *op, unsigned char *to,
                               const unsigned char *from)
{
    size_t element = fsdpc_dtype_bytes(op->shard_dtype), first;
    for (size_t i = 0; i < op->n_slices; i++) {
        size_t numel = fsdpc_coll_part(op, &op->slices[i], self->base.rank, &first);
        size_t at = op->slices[i].shard_offset * element;
        FSDPC_TRY(fsdpc_local_copy(self, to + at, from + at, numel * element));
    }
    return FSDPC_OK;
}

typedef struct destination {
    void *shard;
    bool read; /* what it holds is added to */
} destination;

/* The destinations of an operation, each once, and which one each sum has; how many. */
static int destinations_of(const fsdpc_coll *op, destination *out, int *which_out)
{
    const fsdpc_coll_sum whole = {.shard = op->shard, .accumulate = op->accumulate};
    const fsdpc_coll_sum *sums = op->sums ? op->sums : &whole;
    int n = 0, n_sums = op->sums ? op->n_sums : 1;
    for (int i = 0; i < n_sums; i++) {
        int k = 0;
        while (k < n && out[k].shard != sums[i].shard)
            k++;
        if (k == n)
            out[n++] = (destination){sums[i].shard, sums[i].accumulate};
        which_out[i] = k;
    }
    return n;
}

/* Between two copies of a shard in staging. */
static size_t shard_stride(const fsdpc_coll *op)
{
    size_t numel = 0;
    for (size_t i = 0; i < op->n_slices; i++)
        numel = fsdpc_max_size(numel, op->slices[i].shard_offset + op->slices[i].numel);
    return numel * fsdpc_dtype_bytes(op->shard_dtype);
}

/* Sums go to the staging of their destinations, which are copied there if they are added to. */
static fsdpc_status stage_sums(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    destination found[FSDPC_COLL_MAX_SUMS];
    int which[FSDPC_COLL_MAX_SUMS], n = destinations_of(op, found, which);
    size_t stride = shard_stride(op);
    FSDPC_TRY(fsdpc_local_room(self, it, (size_t)n * stride));
    for (int k = 0; k < n; k++)
        if (found[k].read)
            FSDPC_TRY(copy_shard(self, op, it->host + (size_t)k * stride, found[k].shard));
    op->shard = it->host;
    for (int i = 0; op->sums && i < op->n_sums; i++) {
        it->sums[i] = op->sums[i];
        it->sums[i].shard = it->host + (size_t)which[i] * stride;
        for (int k = 0; op->sums[i].from && k < n; k++)
            if (found[k].shard == op->sums[i].from)
                it->sums[i].from = it->host + (size_t)k * stride;
    }
    if (op->sums)
        op->sums = it->sums;
    return FSDPC_OK;
}

static fsdpc_status reduction_out(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    fsdpc_local_buffer *buffer = (fsdpc_local_buffer *)op->buffer;
    bool evenly = op->kind == FSDPC_COLL_REDUCE_SCATTER;
    size_t element = fsdpc_dtype_bytes(op->dtype);
    for (size_t i = 0; i < op->n_slices; i++) {
        const fsdpc_slice *slice = &op->slices[i];
        size_t times = evenly && slice->owner < 0 ? (size_t)self->base.size : 1;
        size_t at = op->offset + slice->full_offset * element;
        FSDPC_TRY(fsdpc_local_copy(self, buffer->control->data + at, buffer->base.data + at,
                                   slice->numel * times * element));
    }
    FSDPC_TRY(stage_sums(self, it, op));
    op->buffer = buffer->control;
    return fsdpc_local_copied(self);
}

static fsdpc_status reduction_back(fsdpc_local_comm *self, const fsdpc_local_op *it,
                                   const fsdpc_coll *op)
{
    destination found[FSDPC_COLL_MAX_SUMS];
    int which[FSDPC_COLL_MAX_SUMS], n = destinations_of(op, found, which);
    size_t stride = shard_stride(op);
    for (int k = 0; k < n; k++)
        FSDPC_TRY(copy_shard(self, op, found[k].shard, it->host + (size_t)k * stride));
    return fsdpc_local_copied(self);
}

/* ---- Both ---- */

fsdpc_status fsdpc_local_out(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    if (op->kind != FSDPC_COLL_GATHER)
        return reduction_out(self, it, op);
    op->agree_only = true;
    return gather_out(self, op);
}

fsdpc_status fsdpc_local_back(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op)
{
    return op->kind == FSDPC_COLL_GATHER ? gather_back(self, op) : reduction_back(self, it, op);
}
