/* Gathers between hosts: the rows of a rank go to the same local rank on every other host, once after
 * each change.
 *
 * If the transport supports runs, rows move directly from parameter buffer to parameter buffer.
 * That is safe as soon as the operation is posted. By the time a rank continues from an epoch, all
 * reads of the parameter buffer in earlier epochs have finished. A rank completes its gathers
 * before it arrives in the next epoch. Its own rows are therefore not written while the transport
 * reads them. Only the matching local rank writes the rows of a rank on another host, and no rank
 * of this host reads them before the local ranks have synchronised.
 *
 * Rows with a codec are encoded when the operation is posted, and decoded into the parameter buffer
 * when all messages have come. Their memory in transit ends with the operation.
 */
#include "comm/hosts_internal.h"

#include <stdlib.h>
#include <string.h>

#include "comm/coll_math.h"

/* Finds the rows in the parameter buffer that belong to this local rank on a host. */
static void rows_of(const fsdpc_hosts_comm *self, const fsdpc_coll *coll, int host,
                    fsdpc_transport_run *rows)
{
    size_t element = fsdpc_dtype_bytes(coll->dtype);
    for (size_t i = 0; i < coll->n_slices; i++) {
        size_t first =
            fsdpc_coll_first(coll, &coll->slices[i], host * self->local_size + self->local_rank);
        rows[i].data = coll->param_buffer->write + coll->offset + first * element;
        rows[i].bytes = coll->slices[i].numel * element;
    }
}

static fsdpc_codec_rows coded_rows(const fsdpc_coll *coll, size_t slice)
{
    return (fsdpc_codec_rows){
        .dtype = coll->dtype, .row = coll->slices[slice].row, .numel = coll->slices[slice].numel};
}

/* Returns whether rows move inside messages, not directly between parameter buffers. */
static bool uses_messages(const fsdpc_hosts_comm *self, const fsdpc_coll *coll)
{
    return coll->codec != FSDPC_CODEC_EXACT || !self->transport->takes_runs;
}

/* Encodes this rank's rows into one message, and receives a message from each peer. */
static fsdpc_status cross_messages(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    fsdpc_mem_kind kind = coll->codec == FSDPC_CODEC_EXACT ? FSDPC_MEM_OTHER : FSDPC_MEM_STAGING;
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    size_t n = coll->n_slices, at = 0, peers = (size_t)(self->n_hosts - 1);
    size_t bytes = fsdpc_coll_gather_bytes(coll->codec, coll->dtype, coll->slices, n);
    FSDPC_TRY(fsdpc_hosts_staging_for(self, kind, &op->here, bytes));
    FSDPC_TRY(fsdpc_hosts_staging_for(self, kind, &op->there, peers * bytes));
    for (size_t i = 0; i < n; i++) {
        fsdpc_codec_rows coded = coded_rows(coll, i);
        FSDPC_TRY(fsdpc_codec_encode(coll->codec, &coded,
                                     op->rows[(size_t)self->this_host * n + i].data,
                                     op->here.data + at, NULL, &stream));
        at += fsdpc_codec_bytes(coll->codec, &coded);
    }
    at = 0;
    for (int h = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_hosts_exchange(self, op, h, 1, op->there.data + at, op->here.data, bytes));
        at += bytes;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_cross_rows(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t n = coll->n_slices;
    fsdpc_transport_run *rows = realloc(op->rows, (n * (size_t)self->n_hosts + 1) * sizeof *rows);
    if (!rows)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu slices", n);
    op->rows = rows;
    for (int h = 0; h < self->n_hosts; h++)
        rows_of(self, coll, h, rows + (size_t)h * n);
    if (uses_messages(self, coll))
        return cross_messages(self, op);
    const uint32_t tag = fsdpc_hosts_tag(self, op->sequence, 1);
    for (int h = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_transport_post_runs(self->transport, false, self->peers[h], tag,
                                            rows + (size_t)h * n, n, &op->ops[op->n_ops++]));
        FSDPC_TRY(fsdpc_transport_post_runs(self->transport, true, self->peers[h], tag,
                                            rows + (size_t)self->this_host * n, n,
                                            &op->ops[op->n_ops++]));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_place_rows(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    const unsigned char *from = op->there.data;
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    size_t n = coll->n_slices;
    for (size_t i = 0; uses_messages(self, coll) && i < n * (size_t)self->n_hosts; i++) {
        fsdpc_codec_rows coded = coded_rows(coll, i % n);
        if (i / n == (size_t)self->this_host)
            continue;
        FSDPC_TRY(fsdpc_codec_decode(coll->codec, &coded, from, op->rows[i].data, &stream));
        from += fsdpc_codec_bytes(coll->codec, &coded);
    }
    return FSDPC_OK;
}

/* Finds the record of the rows received for the gather at `offset`. Gathers repeat in order, so the
 * search begins after the last hit. */
static fsdpc_status rows_at(fsdpc_hosts_param_buffer *param_buffer, size_t offset,
                            fsdpc_hosts_rows **out)
{
    for (size_t n = 0; n < param_buffer->n_rows; n++) {
        size_t i = (param_buffer->next_rows + n) % param_buffer->n_rows;
        if (param_buffer->rows[i].offset != offset)
            continue;
        param_buffer->next_rows = i + 1;
        *out = &param_buffer->rows[i];
        return FSDPC_OK;
    }
    fsdpc_hosts_rows *rows = realloc(param_buffer->rows, (param_buffer->n_rows + 1) * sizeof *rows);
    if (!rows)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for another gather of a parameter buffer");
    param_buffer->rows = rows;
    rows[param_buffer->n_rows] = (fsdpc_hosts_rows){.offset = offset};
    *out = &rows[param_buffer->n_rows++];
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_needs_rows(const fsdpc_coll *coll, bool *needs_out)
{
    fsdpc_hosts_param_buffer *param_buffer = (fsdpc_hosts_param_buffer *)coll->param_buffer;
    fsdpc_hosts_rows *rows = NULL;
    FSDPC_TRY(rows_at(param_buffer, coll->offset, &rows));
    *needs_out = rows->generation != param_buffer->generation;
    rows->generation = param_buffer->generation;
    return FSDPC_OK;
}
