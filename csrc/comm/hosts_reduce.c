/* Reductions across several hosts.
 *
 *     REDUCE_SCATTER  the host sums every rank's slices, wide, and exchanges these sums with the
 *                     other hosts; each rank adds the hosts' sums in host order
 *     REDUCE_ALL      the host sums all slices; each rank exchanges its part of the sums with the
 *                     other hosts and adds theirs, and the host's ranks gather the results
 *
 * Sums. A host's ranks are consecutive. If a host has a power-of-two number of ranks, a pairwise
 * tree over the hosts' sums is bit-identical to a single tree over all ranks. To keep results
 * identical, sums are sent in fp32 or fp64 and are scaled and rounded only once, at the end.
 *
 * Hops. Among H hosts, sending a whole part of a REDUCE_ALL to each peer takes H - 1 times its
 * bytes. With more than two hosts, exact sums therefore take two hops: each host adds a share of the
 * part, then sends it to the others. Both hops together take 2 (H - 1) / H. Codes take one hop.
 *
 * Codecs. A host's exact sums are encoded once, as they leave. Their receivers add what they decode
 * in fp32, so no sum is ever encoded twice. In a REDUCE_ALL, all hosts must get the same result: each
 * host adds its own sums as the others decode them. A NaN or an infinity stays one in every codec.
 * What a message leaves out may be kept, and added to the next message to the same host.
 *
 * Copies. If a host has one rank, the sums are what its buffer holds. If they are wide and in one
 * slice, they are sent from there; otherwise they are first copied into `here`.
 */
#include "comm/hosts_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/coll_math.h"
#include "ops/flat_ops.h"

static fsdpc_dtype wide(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
}

/* Returns the number of elements in a host's sums for one rank. */
static size_t sums_numel(const fsdpc_coll *coll)
{
    size_t numel = 0;
    for (size_t i = 0; i < coll->n_slices; i++)
        numel += coll->slices[i].numel;
    return numel;
}

/* Builds the reduction within this host: it sums the slices that this local rank owns on every host
 * and stores the sums consecutively in `here`. */
static fsdpc_status slices_of_host(const fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    bool all = coll->kind == FSDPC_COLL_REDUCE_ALL;
    size_t n = 0, at = 0, room = coll->n_slices * (size_t)(all ? 1 : self->n_hosts) + 1;
    fsdpc_slice *slices = realloc(op->slices, room * sizeof *slices);
    if (!slices)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu slices", room);
    op->slices = slices;
    for (int h = 0; h < (all ? 1 : self->n_hosts); h++) {
        for (size_t i = 0; i < coll->n_slices; i++) {
            fsdpc_slice slice = coll->slices[i];
            slice.unsharded_offset += (size_t)(h * self->local_size) * slice.numel;
            slice.shard_offset = at;
            at += slice.numel;
            slices[n++] = slice;
        }
    }
    op->n_slices = n;
    return FSDPC_OK;
}

/* Returns sums as a codec's rows: every rank of a host has the same, so blocks may cross rows. */
static fsdpc_codec_rows rows_of_sums(fsdpc_dtype dtype, size_t numel)
{
    return (fsdpc_codec_rows){.dtype = wide(dtype), .row = numel, .numel = numel};
}

/* Returns the size of a message with `numel` sums, if a codec is used. */
static size_t code_bytes(fsdpc_codec codec, fsdpc_dtype dtype, size_t numel)
{
    fsdpc_codec_rows rows = rows_of_sums(dtype, numel);
    return codec == FSDPC_CODEC_EXACT ? 0 : fsdpc_codec_bytes(codec, &rows);
}

static bool is_in_buffer(fsdpc_dtype dtype, size_t n_slices, int local_size)
{
    return local_size == 1 && n_slices == 1 && dtype == wide(dtype);
}

/* Returns this host's sums for the local rank's peer on host `h`, or all of a REDUCE_ALL. */
static unsigned char *sums_for(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op, int h)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t element = fsdpc_dtype_bytes(wide(coll->dtype));
    size_t at = coll->kind == FSDPC_COLL_REDUCE_ALL ? 0 : (size_t)h * sums_numel(coll);
    if (!is_in_buffer(coll->dtype, coll->n_slices, self->local_size))
        return op->here.data + at * element;
    return coll->buffer->data + coll->offset + (coll->slices->unsharded_offset + at) * element;
}

static bool takes_two_hops(fsdpc_coll_kind kind, fsdpc_codec codec, int n_hosts)
{
    return kind == FSDPC_COLL_REDUCE_ALL && codec == FSDPC_CODEC_EXACT && n_hosts > 2;
}

/* Returns the memory that a rank needs to reduce `numel` elements. */
fsdpc_hosts_staging_bytes fsdpc_hosts_staging_bytes_for(fsdpc_coll_kind kind, fsdpc_dtype dtype,
                                                        fsdpc_codec codec, size_t numel,
                                                        size_t n_slices, int n_hosts,
                                                        int local_size)
{
    size_t element = fsdpc_dtype_bytes(wide(dtype)), hosts = (size_t)n_hosts;
    size_t share = numel / (hosts * (size_t)local_size);
    bool copies = !is_in_buffer(dtype, n_slices, local_size);
    if (kind == FSDPC_COLL_REDUCE_SCATTER)
        return (fsdpc_hosts_staging_bytes){.here = copies ? share * hosts * element : 0,
                                           .there = share * (hosts - 1) * element,
                                           .codes =
                                               code_bytes(codec, dtype, share) * 2 * (hosts - 1)};
    size_t part = fsdpc_ceil_div(numel, (size_t)local_size), there = part * hosts;
    if (takes_two_hops(kind, codec, n_hosts))
        there = part + fsdpc_ceil_div(part, hosts) * (hosts - 1);
    return (fsdpc_hosts_staging_bytes){.here = copies ? numel * element : 0,
                                       .there = there * element,
                                       .all =
                                           local_size > 1 ? part * element * (size_t)local_size : 0,
                                       .codes = code_bytes(codec, dtype, part) * hosts};
}

size_t fsdpc_comm_hosts_residual_numel(fsdpc_coll_kind kind, size_t numel, int n_hosts,
                                       int local_size)
{
    if (n_hosts == 1)
        return 0;
    return kind == FSDPC_COLL_REDUCE_SCATTER ? numel * (size_t)(n_hosts - 1)
                                             : fsdpc_ceil_div(numel, (size_t)local_size);
}

/* Allocates enough memory for any reduction of the buffer in this dtype, so that the size depends
 * only on the buffer. */
static fsdpc_status take_staging(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t numel = coll->buffer->bytes / fsdpc_dtype_bytes(coll->dtype);
    fsdpc_hosts_staging_bytes need =
        fsdpc_hosts_staging_bytes_for(coll->kind, coll->dtype, coll->codec, numel, coll->n_slices,
                                      self->n_hosts, self->local_size);
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_REDUCE, &op->here, need.here));
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_REDUCE, &op->there, need.there));
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_REDUCE, &op->all, need.all));
    return fsdpc_hosts_staging_for(self, FSDPC_MEM_REDUCE, &op->codes, need.codes);
}

fsdpc_status fsdpc_hosts_post_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    fsdpc_dtype dtype = wide(coll->dtype);
    FSDPC_TRY(slices_of_host(self, op));
    FSDPC_TRY(take_staging(self, op));
    fsdpc_coll sums = *coll;
    sums.agree_only = is_in_buffer(coll->dtype, coll->n_slices, self->local_size);
    sums.stream = NULL;
    sums.codec = FSDPC_CODEC_EXACT;
    sums.slices = op->slices;
    sums.n_slices = op->n_slices;
    sums.buffer = ((fsdpc_hosts_buffer *)coll->buffer)->host;
    sums.shard = op->here.data;
    sums.shard_dtype = sums.round_dtype = dtype;
    sums.scale = 1;
    sums.accumulate = false;
    return fsdpc_comm_post(self->host, &sums, &op->host);
}

/* Returns the memory of a message of `numel` encoded sums: the first are received, by peer, and the
 * others are to be sent. */
static unsigned char *message_at(const fsdpc_hosts_op *op, size_t i, size_t numel)
{
    return op->codes.data + i * code_bytes(op->work->op.codec, op->work->op.dtype, numel);
}

/* Returns what the `i`th message to be sent leaves out. */
static fsdpc_codec_error error_of(const fsdpc_coll *coll, size_t i, size_t numel)
{
    fsdpc_codec_error error = *coll->error;
    if (error.residual)
        error.residual += i * numel;
    return error;
}

/* Encodes sums into the `i`th message that is to be sent, and returns its address. */
static fsdpc_status encode_sums(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op, size_t i,
                                size_t numel, const unsigned char *from, unsigned char **out)
{
    const fsdpc_coll *coll = &op->work->op;
    fsdpc_codec_rows rows = rows_of_sums(coll->dtype, numel);
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    *out = message_at(op, (size_t)self->n_hosts - 1 + i, numel);
    if (!coll->error)
        return fsdpc_codec_encode(coll->codec, &rows, from, *out, NULL, &stream);
    fsdpc_codec_error error = error_of(coll, i, numel);
    return fsdpc_codec_encode(coll->codec, &rows, from, *out, &error, &stream);
}

/* Adds what earlier messages have left out to sums that are sent exactly, as the `i`th message. */
static fsdpc_status add_left_out(const fsdpc_hosts_comm *self, const fsdpc_coll *coll, size_t i,
                                 size_t numel, unsigned char *sums)
{
    if (!coll->error || !coll->error->residual || wide(coll->dtype) != FSDPC_F32)
        return FSDPC_OK;
    float *residual = error_of(coll, i, numel).residual;
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    FSDPC_TRY(fsdpc_flat_accumulate(sums, FSDPC_F32, residual, FSDPC_F32, numel, &stream));
    return fsdpc_device_fill(stream.device, residual, 0, numel * sizeof *residual, &stream);
}

static fsdpc_status decode_sums(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op,
                                const unsigned char *message, size_t numel, unsigned char *to)
{
    const fsdpc_coll *coll = &op->work->op;
    fsdpc_codec_rows rows = rows_of_sums(coll->dtype, numel);
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    return fsdpc_codec_decode(coll->codec, &rows, message, to, &stream);
}

/* Decodes the message that came from the `i`th of the other hosts; exact sums are in place. */
static fsdpc_status decode_theirs(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op, size_t i,
                                  size_t numel, unsigned char *to)
{
    if (!fsdpc_hosts_is_coded(&op->work->op))
        return FSDPC_OK;
    return decode_sums(self, op, message_at(op, i, numel), numel, to);
}

/* Returns the size of a message with `numel` sums. */
static size_t message_bytes(const fsdpc_coll *coll, size_t numel)
{
    return fsdpc_hosts_is_coded(coll) ? code_bytes(coll->codec, coll->dtype, numel)
                                      : numel * fsdpc_dtype_bytes(wide(coll->dtype));
}

static fsdpc_status cross_slices(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t numel = sums_numel(coll), bytes = numel * fsdpc_dtype_bytes(wide(coll->dtype));
    for (int h = 0, peer = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        size_t i = (size_t)peer++;
        unsigned char *to = op->there.data + i * bytes, *from = sums_for(self, op, h);
        if (fsdpc_hosts_is_coded(coll)) {
            FSDPC_TRY(encode_sums(self, op, i, numel, from, &from));
            to = message_at(op, i, numel);
        } else {
            FSDPC_TRY(add_left_out(self, coll, i, numel, from));
        }
        FSDPC_TRY(fsdpc_hosts_exchange(self, op, h, 1, to, from, message_bytes(coll, numel)));
    }
    return FSDPC_OK;
}

/* This rank's part of a REDUCE_ALL's sums. Sums are divided evenly; the last parts may be short or
 * empty. */
typedef struct lane_part {
    size_t first, numel;
    size_t bytes; /* size of a full-length part */
} lane_part;

static lane_part part_of(const fsdpc_hosts_comm *self, const fsdpc_coll *coll)
{
    size_t numel = sums_numel(coll), most = fsdpc_ceil_div(numel, (size_t)self->local_size);
    size_t first = fsdpc_min_size(numel, (size_t)self->local_rank * most);
    return (lane_part){.first = first,
                       .numel = fsdpc_min_size(most, numel - first),
                       .bytes = most * fsdpc_dtype_bytes(wide(coll->dtype))};
}

/* ---- Two hops: `there` holds the sums of all shares, then what the other hosts send of this host's
 * share. ---- */

static bool is_in_two_hops(const fsdpc_hosts_comm *self, const fsdpc_coll *coll)
{
    return takes_two_hops(coll->kind, coll->codec, self->n_hosts);
}

/* Returns the share of a part that a host adds; the last ones may be short or empty. */
static lane_part share_of(const fsdpc_hosts_comm *self, const fsdpc_coll *coll, int host)
{
    size_t numel = part_of(self, coll).numel, most = fsdpc_ceil_div(numel, (size_t)self->n_hosts);
    size_t first = fsdpc_min_size(numel, (size_t)host * most);
    return (lane_part){.first = first,
                       .numel = fsdpc_min_size(most, numel - first),
                       .bytes = most * fsdpc_dtype_bytes(wide(coll->dtype))};
}

/* Returns where the `i`th of the other hosts sends its sums of this host's share. */
static unsigned char *share_from(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op, size_t i)
{
    const fsdpc_coll *coll = &op->work->op;
    return op->there.data + part_of(self, coll).bytes +
           i * share_of(self, coll, self->this_host).bytes;
}

static fsdpc_status cross_shares(fsdpc_hosts_comm *self, fsdpc_hosts_op *op,
                                 const unsigned char *own)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t element = fsdpc_dtype_bytes(wide(coll->dtype));
    size_t mine = share_of(self, coll, self->this_host).numel;
    for (int h = 0, peer = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        lane_part theirs = share_of(self, coll, h);
        unsigned char *to = share_from(self, op, (size_t)peer++);
        FSDPC_TRY(fsdpc_hosts_receive(self, op, h, 1, to, mine * element));
        FSDPC_TRY(
            fsdpc_hosts_send(self, op, h, 1, own + theirs.first * element, theirs.numel * element));
    }
    return FSDPC_OK;
}

/* Adds `numel` elements of the hosts' sums, unscaled. */
static fsdpc_status add_wide(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op,
                             const void *const *srcs, size_t numel, unsigned char *out)
{
    fsdpc_stream stream = fsdpc_hosts_stream(self);
    return fsdpc_coll_combine(FSDPC_RED_SUM, wide(op->work->op.dtype), srcs, self->n_hosts, numel,
                              out, &stream);
}

/* Returns this rank's part of this host's own sums. */
static unsigned char *own_part(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    return sums_for(self, op, 0) + part_of(self, coll).first * fsdpc_dtype_bytes(wide(coll->dtype));
}

/* The second hop: adds this host's share, sends it to the other hosts, and receives theirs. */
static fsdpc_status spread_shares(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t element = fsdpc_dtype_bytes(wide(coll->dtype)), came = 0;
    lane_part mine = share_of(self, coll, self->this_host);
    unsigned char *sum = op->there.data + mine.first * element;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    for (int h = 0; h < self->n_hosts; h++)
        srcs[h] = h == self->this_host ? own_part(self, op) + mine.first * element
                                       : share_from(self, op, came++);
    FSDPC_TRY(add_wide(self, op, srcs, mine.numel, sum));
    for (int h = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        lane_part theirs = share_of(self, coll, h);
        FSDPC_TRY(fsdpc_hosts_receive(self, op, h, 2, op->there.data + theirs.first * element,
                                      theirs.numel * element));
        FSDPC_TRY(fsdpc_hosts_send(self, op, h, 2, sum, mine.numel * element));
    }
    return FSDPC_OK;
}

/* ---- One hop ---- */

static fsdpc_status cross_parts(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    lane_part part = part_of(self, coll);
    unsigned char *own = own_part(self, op), *from = own;
    if (fsdpc_hosts_is_coded(coll)) { /* every host adds what all hosts get from this one */
        FSDPC_TRY(encode_sums(self, op, 0, part.numel, own, &from));
        FSDPC_TRY(decode_sums(self, op, from, part.numel, own));
    } else {
        FSDPC_TRY(add_left_out(self, coll, 0, part.numel, own));
    }
    if (is_in_two_hops(self, coll))
        return cross_shares(self, op, own);
    for (int h = 0, peer = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        size_t i = (size_t)peer++;
        unsigned char *to = fsdpc_hosts_is_coded(coll) ? message_at(op, i, part.numel)
                                                       : op->there.data + (size_t)h * part.bytes;
        FSDPC_TRY(fsdpc_hosts_exchange(self, op, h, 1, to, from, message_bytes(coll, part.numel)));
    }
    return FSDPC_OK;
}

/* Performs the last step: adds the sums of `n_sums` hosts, then scales and rounds the result. */
static fsdpc_status add_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op,
                             const unsigned char *const *sums, int n_sums)
{
    fsdpc_coll last = op->work->op;
    fsdpc_stream inline_stream = fsdpc_hosts_stream(self);
    fsdpc_stream *stream = last.stream && !last.stream->async ? last.stream : &inline_stream;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    size_t element = fsdpc_dtype_bytes(wide(last.dtype)), at = 0;
    last.dtype = wide(last.dtype);
    for (size_t i = 0; i < last.n_slices; i++) {
        if (last.slices[i].numel == 0)
            continue;
        for (int s = 0; s < n_sums; s++)
            srcs[s] = sums[s] + at * element;
        FSDPC_TRY(fsdpc_coll_reduce_part(&last, &last.slices[i], srcs, n_sums, stream));
        at += last.slices[i].numel;
    }
    return FSDPC_OK;
}

static fsdpc_status finish_scatter(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    const unsigned char *sums[FSDPC_COLL_MAX_RANKS];
    size_t bytes = sums_numel(coll) * fsdpc_dtype_bytes(wide(coll->dtype));
    for (int h = 0, came = 0; h < self->n_hosts; h++) {
        sums[h] = sums_for(self, op, h);
        if (h == self->this_host)
            continue;
        unsigned char *theirs = op->there.data + (size_t)came * bytes;
        FSDPC_TRY(decode_theirs(self, op, (size_t)came++, sums_numel(coll), theirs));
        sums[h] = theirs;
    }
    return add_sums(self, op, sums, self->n_hosts);
}

/* Returns where a part's final sum is stored: after one hop, in the place reserved for this host,
 * which receives no message. */
static unsigned char *sum_of_part(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op)
{
    if (is_in_two_hops(self, &op->work->op))
        return op->there.data;
    return op->there.data + (size_t)self->this_host * part_of(self, &op->work->op).bytes;
}

static fsdpc_status add_parts(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    lane_part part = part_of(self, &op->work->op);
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    for (int h = 0, came = 0; h < self->n_hosts; h++) {
        srcs[h] = own_part(self, op);
        if (h == self->this_host)
            continue;
        unsigned char *theirs = op->there.data + (size_t)h * part.bytes;
        FSDPC_TRY(decode_theirs(self, op, (size_t)came++, part.numel, theirs));
        srcs[h] = theirs;
    }
    return add_wide(self, op, srcs, part.numel, sum_of_part(self, op));
}

fsdpc_status fsdpc_hosts_share_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    if (!is_in_two_hops(self, coll))
        FSDPC_TRY(add_parts(self, op));
    if (self->local_size == 1)
        return FSDPC_OK;
    return fsdpc_comm_post(self->later,
                           &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                         .unit = coll->unit,
                                         .what = coll->what,
                                         .dtype = FSDPC_U8,
                                         .send = sum_of_part(self, op),
                                         .recv = op->all.data,
                                         .numel = part_of(self, coll).bytes},
                           &op->later);
}

static fsdpc_status finish_all(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const unsigned char *sums = self->local_size == 1 ? sum_of_part(self, op) : op->all.data;
    return add_sums(self, op, &sums, 1);
}

/* ---- The phases ---- */

fsdpc_status fsdpc_hosts_cross_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    return op->work->op.kind == FSDPC_COLL_REDUCE_SCATTER ? cross_slices(self, op)
                                                          : cross_parts(self, op);
}

fsdpc_status fsdpc_hosts_spread_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    return is_in_two_hops(self, &op->work->op) ? spread_shares(self, op) : FSDPC_OK;
}

fsdpc_status fsdpc_hosts_finish_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    return op->work->op.kind == FSDPC_COLL_REDUCE_SCATTER ? finish_scatter(self, op)
                                                          : finish_all(self, op);
}
