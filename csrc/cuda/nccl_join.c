/* Reduces contributions with our own kernels when NCCL only collects them.
 *
 * NCCL chooses its own summation order, and its minimum and maximum do not propagate NaN. If a
 * fixed order is required, this rank receives the contributions and joins them after NCCL's part on
 * the same stream. The kernels and the resulting bits are the same as for ranks that share memory
 * (comm/coll_math.h).
 *
 * Float values, usually few, are gathered from all ranks into memory that is freed when the
 * operation is done. For integers, the order does not matter, so NCCL sums them.
 *
 * Sums in tree order (deterministic mode) use an exchange. Every rank sends each peer that peer's
 * slices, directly from its own buffer. It receives its own slices from every peer in staging
 * memory, laid out like the shard. As long as a group has buffers, it keeps one staging buffer,
 * large enough for its largest reduction. Reductions use it one at a time; an event orders
 * reductions on different streams. For replicas, every rank receives every contribution in full.
 * This takes more traffic and memory than NCCL's own sum: (ranks - 1) times the buffer's size.
 *
 * Memory comes from the pool, which hands it out in main-stream order (pool.h). Values on another
 * stream are ordered after the main stream's work at the time of the post; the host waits for
 * staging memory, as for a buffer. Memory is freed when the host has seen that the operation is
 * done, or when the buffers are destroyed.
 */
#include "comm/coll_math.h"
#include "cuda/error.h"
#include "cuda/queue.h"
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

static fsdpc_status values_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    const fsdpc_coll *coll = &op->coll;
    size_t bytes = coll->numel * fsdpc_dtype_bytes(coll->dtype) * (size_t)self->base.size;
    fsdpc_status status =
        fsdpc_device_alloc(self->base.device, FSDPC_MEM_OTHER, bytes, &op->contributions);
    if (status != FSDPC_OK) /* the peers would wait for us */
        return fsdpc_comm_poison(&self->base, status);
    if (!coll->stream || !coll->stream->async)
        return FSDPC_OK;
    FSDPC_CUDA_TRY(cudaEventRecord(op->done, main_of(self)), "record an event");
    FSDPC_CUDA_TRY(cudaStreamWaitEvent(fsdpc_cuda_queue_of(coll->stream)->raw, op->done, 0),
                   "wait for an event");
    return FSDPC_OK;
}

static fsdpc_status values_join(const fsdpc_comm_nccl *self, const fsdpc_nccl_op *op,
                                fsdpc_stream *stream)
{
    const fsdpc_coll *coll = &op->coll;
    int size = self->base.size;
    const unsigned char *gathered = op->contributions;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    if (coll->op != FSDPC_RED_SUM)
        return fsdpc_cuda_extremum(coll->op == FSDPC_RED_MAX, coll->dtype, gathered, size,
                                   coll->numel, coll->recv, stream);
    for (int p = 0; p < size; p++)
        srcs[p] = gathered + (size_t)p * coll->numel * fsdpc_dtype_bytes(coll->dtype);
    return fsdpc_coll_combine(coll->op, coll->dtype, srcs, size, coll->numel, coll->recv, stream);
}

/* ---- Sums ---- */

void fsdpc_nccl_staging_free(fsdpc_comm_nccl *self)
{
    fsdpc_nccl_staging *staging = &self->staging;
    fsdpc_device_free(self->base.device, staging->at);
    if (staging->read)
        (void)cudaEventDestroy(staging->read);
    *staging = (fsdpc_nccl_staging){0};
}

/* Staging memory grows only in early steps, at the same reduction on all ranks. Either every rank
 * gets the memory or none does. */
static fsdpc_status staging_grow(fsdpc_comm_nccl *self, size_t bytes)
{
    fsdpc_nccl_staging *staging = &self->staging;
    if (staging->at)
        fsdpc_nccl_staging_free(self);
    if (!staging->read)
        FSDPC_CUDA_TRY(cudaEventCreateWithFlags(&staging->read, cudaEventDisableTiming),
                       "create an event");
    FSDPC_TRY(fsdpc_control_memory(&self->base, "more staging memory", FSDPC_MEM_REDUCE, bytes,
                                   &staging->at));
    staging->bytes = bytes;
    return FSDPC_OK;
}

/* Returns 0 for a single rank, for which there is only one order. */
static size_t sums_bytes(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    return (size_t)(self->base.size - 1) * fsdpc_nccl_staging_stride(op);
}

static fsdpc_status sums_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    size_t bytes = sums_bytes(self, &op->coll);
    if (bytes == 0)
        return FSDPC_OK;
    if (bytes > self->staging.bytes)
        FSDPC_TRY(staging_grow(self, bytes));
    op->contributions = self->staging.at;
    return FSDPC_OK;
}

static fsdpc_status sums_join(fsdpc_comm_nccl *self, const fsdpc_nccl_op *op, fsdpc_stream *stream)
{
    const fsdpc_coll *coll = &op->coll;
    fsdpc_nccl_staging *staging = &self->staging;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    const unsigned char *own = coll->buffer->data + coll->offset;
    int rank = self->base.rank, size = self->base.size;
    size_t element = fsdpc_dtype_bytes(coll->dtype), stride = fsdpc_nccl_staging_stride(coll);
    for (size_t i = 0; i < coll->n_slices; i++) {
        const fsdpc_slice *slice = &coll->slices[i];
        size_t first = fsdpc_coll_first(coll, slice, rank);
        if (slice->numel == 0)
            continue;
        for (int p = 0; p < size; p++)
            srcs[p] = p == rank ? own + first * element
                                : fsdpc_nccl_staging_at(op->contributions, stride, rank, p) +
                                      slice->shard_offset * element;
        FSDPC_TRY(fsdpc_coll_reduce_part(coll, slice, srcs, size, stream));
    }
    staging->last = fsdpc_cuda_queue_of(stream)->raw;
    FSDPC_CUDA_TRY(cudaEventRecord(staging->read, staging->last), "record an event");
    return FSDPC_OK;
}

/* ---- Values and sums ---- */

bool fsdpc_nccl_staging_is_short(const fsdpc_comm_nccl *self, const fsdpc_coll *op)
{
    return op->tree && self->base.size <= FSDPC_COLL_MAX_RANKS &&
           sums_bytes(self, op) > self->staging.bytes;
}

fsdpc_status fsdpc_nccl_join_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    const fsdpc_coll *coll = &op->coll;
    if (self->base.size > FSDPC_COLL_MAX_RANKS)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "%s of '%s': floats of %d ranks; at most %d are summed in a fixed order",
                          fsdpc_coll_name(coll->kind), coll->what ? coll->what : "",
                          self->base.size, (int)FSDPC_COLL_MAX_RANKS);
    return coll->tree ? sums_open(self, op) : values_open(self, op);
}

void fsdpc_nccl_join_close(fsdpc_comm_nccl *self, fsdpc_nccl_op *op)
{
    if (!op->coll.tree)
        fsdpc_device_free(self->base.device, op->contributions);
    op->contributions = NULL;
}

fsdpc_status fsdpc_nccl_join_begin(const fsdpc_comm_nccl *self, const fsdpc_nccl_op *op,
                                   cudaStream_t stream)
{
    const fsdpc_nccl_staging *staging = &self->staging;
    if (op->coll.tree && staging->last && staging->last != stream)
        FSDPC_CUDA_TRY(cudaStreamWaitEvent(stream, staging->read, 0), "wait for an event");
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_join(fsdpc_comm_nccl *self, const fsdpc_nccl_op *op, fsdpc_stream *stream)
{
    return op->coll.tree ? sums_join(self, op, stream) : values_join(self, op, stream);
}
