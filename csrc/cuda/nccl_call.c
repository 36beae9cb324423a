/* Issues an operation as one group of NCCL calls: one call for each slice, or a single call for
 * values.
 *
 * Gathers write the unsharded parameters; reductions are in place.
 */
#include "base/size.h"
#include "comm/coll_math.h"
#include "cuda/error.h"
#include "cuda/nccl_internal.h"

static const fsdpc_nccl_type types[FSDPC_DTYPE_COUNT] = {
    [FSDPC_F32] = FSDPC_NCCL_FLOAT32,   [FSDPC_F64] = FSDPC_NCCL_FLOAT64,
    [FSDPC_BF16] = FSDPC_NCCL_BFLOAT16, [FSDPC_F16] = FSDPC_NCCL_FLOAT16,
    [FSDPC_I32] = FSDPC_NCCL_INT32,     [FSDPC_I64] = FSDPC_NCCL_INT64,
    [FSDPC_U8] = FSDPC_NCCL_UINT8,      [FSDPC_BOOL] = FSDPC_NCCL_UINT8,
};

static fsdpc_nccl_red red_of(const fsdpc_coll *op)
{
    if (op->op == FSDPC_RED_MIN)
        return FSDPC_NCCL_MIN;
    bool any = op->op == FSDPC_RED_SUM && op->dtype == FSDPC_BOOL;
    return op->op == FSDPC_RED_MAX || any ? FSDPC_NCCL_MAX : FSDPC_NCCL_SUM;
}

/* Issues the call for one band of a gather, or of an in-place reduction. */
static fsdpc_nccl_result call_slice(const fsdpc_nccl_call *c, const fsdpc_slice *slice)
{
    const fsdpc_coll *op = c->op;
    fsdpc_nccl_type type = types[op->dtype];
    bool gathers = op->kind == FSDPC_COLL_GATHER;
    size_t element = fsdpc_dtype_bytes(op->dtype), numel = slice->numel;
    unsigned char *memory = gathers ? op->recv : op->buffer->data + op->offset;
    unsigned char *unsharded = memory + slice->unsharded_offset * element;
    unsigned char *own = unsharded + (size_t)c->rank * numel * element;
    const unsigned char *sent = op->send;
    if (gathers)
        sent = c->in_place ? own : sent + slice->shard_offset * element;
    if (op->kind == FSDPC_COLL_REDUCE_ALL)
        return c->nccl->ncclAllReduce(unsharded, unsharded, numel, type, FSDPC_NCCL_SUM, c->raw,
                                      c->stream);
    return gathers ? c->nccl->ncclAllGather(sent, unsharded, numel, type, c->raw, c->stream)
                   : c->nccl->ncclReduceScatter(unsharded, own, numel, type, FSDPC_NCCL_SUM, c->raw,
                                                c->stream);
}

size_t fsdpc_nccl_staging_stride(const fsdpc_coll *op)
{
    size_t numel = 0;
    for (size_t i = 0; i < op->n_slices; i++)
        numel = fsdpc_max_size(numel, op->slices[i].shard_offset + op->slices[i].numel);
    return fsdpc_coll_contribution_bytes(numel, op->dtype);
}

unsigned char *fsdpc_nccl_staging_at(void *contributions, size_t stride, int rank, int peer)
{
    int place = peer < rank ? peer : peer - 1;
    return (unsigned char *)contributions + (size_t)place * stride;
}

/* Sends each peer its part of the slice, and receives this rank's part from each. */
static fsdpc_nccl_result exchange_slice(const fsdpc_nccl_call *c, const fsdpc_slice *slice,
                                        size_t stride)
{
    const fsdpc_coll *op = c->op;
    fsdpc_nccl_type type = types[op->dtype];
    const unsigned char *unsharded = op->buffer->data + op->offset;
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    size_t element = fsdpc_dtype_bytes(op->dtype), numel = slice->numel;
    for (int p = 0; p < c->size && fsdpc_nccl_is_accepted(result); p++) {
        if (p == c->rank)
            continue;
        result = c->nccl->ncclSend(unsharded + fsdpc_coll_first(op, slice, p) * element, numel,
                                   type, p, c->raw, c->stream);
        if (fsdpc_nccl_is_accepted(result))
            result = c->nccl->ncclRecv(fsdpc_nccl_staging_at(c->contributions, stride, c->rank, p) +
                                           slice->shard_offset * element,
                                       numel, type, p, c->raw, c->stream);
    }
    return result;
}

static fsdpc_nccl_result call_values(const fsdpc_nccl_call *c)
{
    const fsdpc_coll *op = c->op;
    fsdpc_nccl_type type = types[op->dtype];
    const void *send = op->send;
    if (op->kind == FSDPC_COLL_BROADCAST)
        return c->nccl->ncclBroadcast(op->recv, op->recv, op->numel, type, op->root, c->raw,
                                      c->stream);
    if (c->contributions)
        return c->nccl->ncclAllGather(send, c->contributions, op->numel, type, c->raw, c->stream);
    if (op->kind == FSDPC_COLL_ALL_REDUCE)
        return c->nccl->ncclAllReduce(send, op->recv, op->numel, type, red_of(op), c->raw,
                                      c->stream);
    if (send == op->recv) /* moved by launch() */
        send =
            (unsigned char *)op->recv + (size_t)c->rank * op->numel * fsdpc_dtype_bytes(op->dtype);
    return c->nccl->ncclAllGather(send, op->recv, op->numel, type, c->raw, c->stream);
}

fsdpc_nccl_result fsdpc_nccl_call_op(const fsdpc_nccl_call *c)
{
    const fsdpc_coll *op = c->op;
    fsdpc_nccl_result first = c->nccl->ncclGroupStart();
    if (!fsdpc_nccl_is_accepted(first))
        return first;
    if (op->kind == FSDPC_COLL_GATHER || fsdpc_coll_reduces(op->kind)) {
        size_t stride = c->contributions ? fsdpc_nccl_staging_stride(op) : 0;
        for (size_t i = 0; i < op->n_slices && fsdpc_nccl_is_accepted(first); i++)
            if (op->slices[i].numel > 0)
                first = c->contributions ? exchange_slice(c, &op->slices[i], stride)
                                         : call_slice(c, &op->slices[i]);
    } else {
        first = call_values(c);
    }
    fsdpc_nccl_result last = c->nccl->ncclGroupEnd(); /* even after an error: the group is open */
    return fsdpc_nccl_is_accepted(first) ? last : first;
}

fsdpc_status fsdpc_nccl_place_own(const fsdpc_nccl_call *c)
{
    const fsdpc_coll *op = c->op;
    size_t element = fsdpc_dtype_bytes(op->dtype);
    for (size_t i = 0; i < op->n_slices; i++) {
        const fsdpc_slice *slice = &op->slices[i];
        if (slice->numel == 0)
            continue;
        FSDPC_CUDA_TRY(
            cudaMemcpyAsync((unsigned char *)op->recv +
                                fsdpc_coll_first(op, slice, c->rank) * element,
                            (const unsigned char *)op->send + slice->shard_offset * element,
                            slice->numel * element, cudaMemcpyDefault, c->stream),
            "copy memory");
    }
    return FSDPC_OK;
}
