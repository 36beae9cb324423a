/* What our own kernels make of contributions that NCCL only brings together.
 *
 * NCCL sums in an order of its own, and its extrema lose NaN.  Where the order is promised the
 * contributions are brought to this rank, and joined behind NCCL's part on the same stream, by the
 * kernels and with the bits that ranks have which share memory (comm/coll_math.h).
 *
 * Values that are floats, a few as a rule, are gathered from all ranks into memory that lasts as
 * long as their flight.  Integers have no order, and are left to NCCL.
 *
 * Sums in tree order (deterministic mode) are an exchange: every rank sends each peer that one's
 * slices, straight from its buffer, and receives its own of all others, as a shard lies, in the
 * inbox.  A group has one inbox, as large as its largest reduction needs, while it has buffers;
 * reductions use it one after the other, those on different streams by an event.  Of replicas
 * everybody receives everything, which moves and holds more than NCCL's own sum would: ranks - 1
 * times the buffer.
 *
 * Memory is the pool's, which hands it out in the order of the main stream (cuda_pool.h).  Values
 * on another stream are put behind what the main stream holds when they are posted; an inbox is
 * waited for, as a buffer is.  Memory goes back when the host has seen that the operation landed,
 * or when buffers go.
 */
#include "comm/coll_math.h"
#include "cuda/cuda_error.h"
#include "cuda/cuda_queue.h"
#include "cuda/kernels.h"
#include "cuda/nccl_internal.h"

static cudaStream_t main_of(const fsdpc_comm_nccl *self)
{
    fsdpc_stream *main = fsdpc_device_main(self->base.device);
    return fsdpc_cuda_queue_of(main)->raw;
}

bool fsdpc_nccl_is_joined(const fsdpc_coll *op)
{
    return op->tree || (op->kind == FSDPC_COLL_ALL_REDUCE && fsdpc_dtype_is_float(op->dtype));
}

/* ---- Values ---- */

static fsdpc_status values_open(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    const fsdpc_coll *op = &flight->op;
    size_t bytes = op->numel * fsdpc_dtype_bytes(op->dtype) * (size_t)self->base.size;
    fsdpc_status status =
        fsdpc_device_alloc(self->base.device, FSDPC_MEM_OTHER, bytes, &flight->contributions);
    if (status != FSDPC_OK) /* the peers would wait for us */
        return fsdpc_comm_poison(&self->base, status);
    if (!op->stream || !op->stream->async)
        return FSDPC_OK;
    FSDPC_CUDA_TRY(cudaEventRecord(flight->landed, main_of(self)), "record an event");
    FSDPC_CUDA_TRY(cudaStreamWaitEvent(fsdpc_cuda_queue_of(op->stream)->raw, flight->landed, 0),
                   "wait for an event");
    return FSDPC_OK;
}

static fsdpc_status values_join(const fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight,
                                fsdpc_stream *stream)
{
    const fsdpc_coll *op = &flight->op;
    int size = self->base.size;
    const unsigned char *gathered = flight->contributions;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    if (op->op != FSDPC_RED_SUM)
        return fsdpc_cuda_extremum(op->op == FSDPC_RED_MAX, op->dtype, gathered, size, op->numel,
                                   op->recv, stream);
    for (int p = 0; p < size; p++)
        srcs[p] = gathered + (size_t)p * op->numel * fsdpc_dtype_bytes(op->dtype);
    return fsdpc_coll_combine(op->op, op->dtype, srcs, size, op->numel, op->recv, stream);
}

/* ---- Sums ---- */

void fsdpc_nccl_inbox_free(fsdpc_comm_nccl *self)
{
    fsdpc_nccl_inbox *inbox = &self->inbox;
    fsdpc_device_free(self->base.device, inbox->at);
    if (inbox->read)
        (void)cudaEventDestroy(inbox->read);
    *inbox = (fsdpc_nccl_inbox){0};
}

/* In first steps alone, on all ranks at the same reduction; all have the memory or none. */
static fsdpc_status inbox_grow(fsdpc_comm_nccl *self, size_t bytes)
{
    fsdpc_nccl_inbox *inbox = &self->inbox;
    if (inbox->at)
        fsdpc_nccl_inbox_free(self);
    if (!inbox->read)
        FSDPC_CUDA_TRY(cudaEventCreateWithFlags(&inbox->read, cudaEventDisableTiming),
                       "create an event");
    FSDPC_TRY(fsdpc_control_memory(&self->base, self->control, "a larger inbox", FSDPC_MEM_REDUCE,
                                   bytes, &inbox->at));
    inbox->bytes = bytes;
    return FSDPC_OK;
}

/* None for one rank: there is only one order. */
static size_t sums_bytes(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    return (size_t)(self->base.size - 1) * fsdpc_nccl_inbox_stride(op);
}

static fsdpc_status sums_open(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    size_t bytes = sums_bytes(self, &flight->op);
    if (bytes == 0)
        return FSDPC_OK;
    if (bytes > self->inbox.bytes)
        FSDPC_TRY(inbox_grow(self, bytes));
    flight->contributions = self->inbox.at;
    return FSDPC_OK;
}

static fsdpc_status sums_join(fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight,
                              fsdpc_stream *stream)
{
    const fsdpc_coll *op = &flight->op;
    fsdpc_nccl_inbox *inbox = &self->inbox;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    const unsigned char *own = op->buffer->data + op->offset;
    int rank = self->base.rank, size = self->base.size;
    size_t first, element = fsdpc_dtype_bytes(op->dtype), stride = fsdpc_nccl_inbox_stride(op);
    for (size_t i = 0; i < op->n_slices; i++) {
        const fsdpc_slice *slice = &op->slices[i];
        if (fsdpc_coll_part(op, slice, rank, &first) == 0)
            continue;
        for (int p = 0; p < size; p++)
            srcs[p] = p == rank ? own + first * element
                                : fsdpc_nccl_inbox_at(flight->contributions, stride, rank, p) +
                                      slice->shard_offset * element;
        FSDPC_TRY(fsdpc_coll_reduce_part(op, slice, srcs, size, stream));
    }
    inbox->last = fsdpc_cuda_queue_of(stream)->raw;
    FSDPC_CUDA_TRY(cudaEventRecord(inbox->read, inbox->last), "record an event");
    return FSDPC_OK;
}

/* ---- Either ---- */

bool fsdpc_nccl_inbox_is_short(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    return op->tree && self->base.size <= FSDPC_COLL_MAX_RANKS &&
           sums_bytes(self, op) > self->inbox.bytes;
}

fsdpc_status fsdpc_nccl_join_open(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    const fsdpc_coll *op = &flight->op;
    if (self->base.size > FSDPC_COLL_MAX_RANKS)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "%s of '%s': floats of %d ranks; at most %d are summed in a fixed order",
                          fsdpc_coll_name(op->kind), op->what ? op->what : "", self->base.size,
                          (int)FSDPC_COLL_MAX_RANKS);
    return op->tree ? sums_open(self, flight) : values_open(self, flight);
}

void fsdpc_nccl_join_close(fsdpc_comm_nccl *self, fsdpc_nccl_flight *flight)
{
    if (!flight->op.tree)
        fsdpc_device_free(self->base.device, flight->contributions);
    flight->contributions = NULL;
}

fsdpc_status fsdpc_nccl_join_begin(const fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight,
                                   cudaStream_t stream)
{
    const fsdpc_nccl_inbox *inbox = &self->inbox;
    if (flight->op.tree && inbox->last && inbox->last != stream)
        FSDPC_CUDA_TRY(cudaStreamWaitEvent(stream, inbox->read, 0), "wait for an event");
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_join(fsdpc_comm_nccl *self, const fsdpc_nccl_flight *flight,
                             fsdpc_stream *stream)
{
    return flight->op.tree ? sums_join(self, flight, stream) : values_join(self, flight, stream);
}
