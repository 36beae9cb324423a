/* Collectives on values across several hosts: all-reduce, all-gather, broadcast and barrier.
 *
 * They work in rounds, so memory use stays small for any number of ranks. In each round of an
 * all-gather, a rank sends its elements to its peer on every host. The ranks of each host then
 * all-gather the elements they received, which gives each all of them:
 *
 *     rank (h, l)   sends x(h, l) to (h', l)      has x(0, l), x(1, l), ...
 *     host h        all-gathers these             has x(0, 0), x(1, 0), ..., x(0, 1), ...
 *
 * An all-reduce combines them in rank order, as on one host, and therefore gives the same bits. In
 * each round of a broadcast, the root broadcasts its elements on its host, and each local rank
 * sends a part to the other hosts.
 */
#include "comm/hosts_internal.h"

#include <string.h>

#include "base/size.h"
#include "comm/coll_math.h"

enum { ROUND_BYTES = 4 << 20 };

enum { BEGIN, ROUND, CROSSING, SHOWING }; /* phases */

/* Returns the number of elements that each rank contributes to this round. */
static size_t round_numel(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t ranks = coll->kind == FSDPC_COLL_BROADCAST ? 1 : (size_t)self->base.size;
    size_t most = ROUND_BYTES / (ranks * fsdpc_dtype_bytes(coll->dtype)) + 1;
    return fsdpc_min_size(most, coll->numel - op->done_numel);
}

static fsdpc_status show(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, fsdpc_coll_kind kind,
                         void *send, void *recv, size_t bytes)
{
    return fsdpc_comm_post(self->later,
                           &(fsdpc_coll){.kind = kind,
                                         .unit = op->work->op.unit,
                                         .what = op->work->op.what,
                                         .dtype = FSDPC_U8,
                                         .send = send,
                                         .recv = recv,
                                         .numel = bytes,
                                         .root = op->work->op.root % self->local_size},
                           &op->later);
}

/* Finds the part of a broadcast round that a local rank sends; the last parts may be short or
 * empty. */
static size_t part_of(const fsdpc_hosts_comm *self, size_t bytes, int local_rank, size_t *at_out)
{
    size_t part = (bytes + (size_t)self->local_size - 1) / (size_t)self->local_size;
    *at_out = fsdpc_min_size(bytes, (size_t)local_rank * part);
    return fsdpc_min_size(part, bytes - *at_out);
}

/* ---- All-gather and all-reduce ---- */

static fsdpc_status cross_own(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t element = fsdpc_dtype_bytes(coll->dtype), bytes = round_numel(self, op) * element;
    const unsigned char *own = (const unsigned char *)coll->send + op->done_numel * element;
    size_t column = bytes * (size_t)self->n_hosts;
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_OTHER, &op->here, column));
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_OTHER, &op->all,
                                      column * (size_t)self->local_size));
    memcpy(op->here.data + (size_t)self->this_host * bytes, own, bytes);
    for (int h = 0; h < self->n_hosts; h++) {
        unsigned char *to = op->here.data + (size_t)h * bytes;
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_hosts_receive(self, op, h, 1, to, bytes));
        FSDPC_TRY(fsdpc_hosts_send(self, op, h, 1, op->here.data + (size_t)self->this_host * bytes,
                                   bytes));
    }
    return FSDPC_OK;
}

static fsdpc_status use_all(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t element = fsdpc_dtype_bytes(coll->dtype), numel = round_numel(self, op);
    unsigned char *recv = (unsigned char *)coll->recv + op->done_numel * element;
    const void *srcs[FSDPC_COLL_MAX_RANKS];
    fsdpc_stream stream = {.device = self->base.device, .name = "hosts"};
    size_t local_size = (size_t)self->local_size, hosts = (size_t)self->n_hosts;
    for (size_t r = 0; r < local_size * hosts; r++) {
        size_t at = r % local_size * hosts + r / local_size;
        srcs[r] = op->all.data + at * numel * element;
        if (coll->kind == FSDPC_COLL_ALL_GATHER)
            memcpy(recv + r * coll->numel * element, srcs[r], numel * element);
    }
    if (coll->kind == FSDPC_COLL_ALL_GATHER)
        return FSDPC_OK;
    return fsdpc_coll_combine(coll->op, coll->dtype, srcs, self->base.size, numel, recv, &stream);
}

/* ---- Broadcast ---- */

static bool on_root_host(const fsdpc_hosts_comm *self, const fsdpc_coll *coll)
{
    return coll->root / self->local_size == self->this_host;
}

static unsigned char *round_of(const fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    return (unsigned char *)coll->recv + op->done_numel * fsdpc_dtype_bytes(coll->dtype);
}

static fsdpc_status cross_part(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t at, bytes = round_numel(self, op) * fsdpc_dtype_bytes(coll->dtype);
    size_t part = part_of(self, bytes, self->local_rank, &at),
           most = part_of(self, bytes, 0, &(size_t){0});
    if (on_root_host(self, coll)) {
        for (int h = 0; h < self->n_hosts; h++) {
            if (h != self->this_host)
                FSDPC_TRY(fsdpc_hosts_send(self, op, h, 1, round_of(op) + at, part));
        }
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_hosts_staging_for(self, FSDPC_MEM_OTHER, &op->here, most));
    FSDPC_TRY(
        fsdpc_hosts_staging_for(self, FSDPC_MEM_OTHER, &op->all, most * (size_t)self->local_size));
    return fsdpc_hosts_receive(self, op, coll->root / self->local_size, 1, op->here.data, part);
}

static void join_parts(fsdpc_hosts_comm *self, const fsdpc_hosts_op *op)
{
    size_t bytes = round_numel(self, op) * fsdpc_dtype_bytes(op->work->op.dtype), at;
    size_t most = part_of(self, bytes, 0, &at);
    for (int l = 0; l < self->local_size; l++) {
        size_t part = part_of(self, bytes, l, &at);
        memcpy(round_of(op) + at, op->all.data + (size_t)l * most, part);
    }
}

/* ---- Steps ---- */

static fsdpc_status begin_round(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t bytes = round_numel(self, op) * fsdpc_dtype_bytes(coll->dtype);
    if (coll->kind == FSDPC_COLL_BROADCAST && on_root_host(self, coll))
        return show(self, op, FSDPC_COLL_BROADCAST, NULL, round_of(op), bytes);
    return FSDPC_OK;
}

static fsdpc_status cross(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    if (op->compared) /* in a later round */
        op->n_ops = fsdpc_hosts_headers(self);
    return op->work->op.kind == FSDPC_COLL_BROADCAST ? cross_part(self, op) : cross_own(self, op);
}

static fsdpc_status show_all(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    size_t at, bytes = round_numel(self, op) * fsdpc_dtype_bytes(coll->dtype);
    if (coll->kind != FSDPC_COLL_BROADCAST)
        return show(self, op, FSDPC_COLL_ALL_GATHER, op->here.data, op->all.data,
                    bytes * (size_t)self->n_hosts);
    if (on_root_host(self, coll))
        return FSDPC_OK;
    return show(self, op, FSDPC_COLL_ALL_GATHER, op->here.data, op->all.data,
                part_of(self, bytes, 0, &at));
}

static fsdpc_status end_round(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    if (coll->kind != FSDPC_COLL_BROADCAST)
        FSDPC_TRY(use_all(self, op));
    else if (!on_root_host(self, coll))
        join_parts(self, op);
    op->done_numel += round_numel(self, op);
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_values_step(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    if (op->n_ops == 0) /* all ranks of the host have arrived here */
        FSDPC_TRY(fsdpc_hosts_begin(self, op));
    if (coll->kind == FSDPC_COLL_BARRIER || coll->numel == 0)
        return fsdpc_hosts_crossed(self, op);
    for (;;) {
        switch (op->phase) {
        case BEGIN:
            FSDPC_TRY(begin_round(self, op));
            op->phase = ROUND;
            break;
        case ROUND:
            FSDPC_TRY(fsdpc_comm_test(&op->later));
            FSDPC_TRY(cross(self, op));
            op->phase = CROSSING;
            break;
        case CROSSING:
            FSDPC_TRY(fsdpc_hosts_crossed(self, op));
            FSDPC_TRY(show_all(self, op));
            op->phase = SHOWING;
            break;
        default:
            FSDPC_TRY(fsdpc_comm_test(&op->later));
            FSDPC_TRY(end_round(self, op));
            if (op->done_numel == coll->numel)
                return FSDPC_OK;
            op->phase = BEGIN;
        }
    }
}
