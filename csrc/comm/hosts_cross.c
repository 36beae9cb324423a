/* Exchanges the messages of one operation between hosts.
 *
 * Each rank exchanges messages only with its peers, the ranks with the same local rank on other
 * hosts. Every operation between hosts begins with a header in each direction, and headers are
 * compared before any received data is used. The host's communicator has already compared the
 * operation among the host's ranks, so each local rank represents its host.
 *
 * A tag combines the group, the operation's sequence number and the part, modulo the transport's
 * limit. Far fewer operations are in flight than there are distinct tags.
 *
 * Storage. The memory for a reduction's data in transit belongs to its buffer and is not used for
 * anything else. The amount of memory therefore depends on the buffers, not on the number of
 * operations in flight. Spare operations are reused in creation order, not in the order in which
 * they ended.
 */
#include "comm/hosts_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/coll_math.h"

enum { GROUPS = 32 };

uint32_t fsdpc_hosts_tag(const fsdpc_hosts_comm *self, uint64_t sequence, int part)
{
    uint32_t window = self->transport->tags / (GROUPS * FSDPC_HOSTS_PARTS);
    return ((self->group % GROUPS) * window + (uint32_t)(sequence % window)) * FSDPC_HOSTS_PARTS +
           (uint32_t)part;
}

/* ---- Storage ---- */

fsdpc_status fsdpc_hosts_op_take(fsdpc_hosts_comm *self, fsdpc_hosts_op **home,
                                 fsdpc_hosts_op **out)
{
    fsdpc_hosts_op *op = *home;
    if (op) {
        *home = op->next;
        *out = op;
        return FSDPC_OK;
    }
    op = calloc(1, sizeof *op);
    size_t n = (size_t)self->n_hosts;
    if (op) {
        op->theirs = calloc(n, sizeof *op->theirs);
        op->ops = calloc(2 * n * FSDPC_HOSTS_PARTS, sizeof *op->ops);
    }
    if (op && op->theirs && op->ops) {
        op->home = home;
        op->made = self->posted;
        *out = op;
        return FSDPC_OK;
    }
    fsdpc_hosts_op_free(self, op);
    return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an operation over %d hosts", self->n_hosts);
}

void fsdpc_hosts_op_return(fsdpc_hosts_op *op)
{
    fsdpc_hosts_op **at = op->home;
    while (*at && (*at)->made < op->made)
        at = &(*at)->next;
    op->next = *at;
    *at = op;
}

void fsdpc_hosts_staging_free(fsdpc_hosts_comm *self, fsdpc_hosts_staging *staging)
{
    fsdpc_device_free(self->base.device, staging->data);
    *staging = (fsdpc_hosts_staging){0};
}

void fsdpc_hosts_op_free(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    if (!op)
        return;
    fsdpc_hosts_staging_free(self, &op->here);
    fsdpc_hosts_staging_free(self, &op->there);
    fsdpc_hosts_staging_free(self, &op->all);
    fsdpc_hosts_staging_free(self, &op->codes);
    free(op->slices);
    free(op->rows);
    free(op->theirs);
    free(op->ops);
    free(op);
}

void fsdpc_hosts_ops_free(fsdpc_hosts_comm *self, fsdpc_hosts_op **home)
{
    for (fsdpc_hosts_op *op; (op = *home);) {
        *home = op->next;
        fsdpc_hosts_op_free(self, op);
    }
}

fsdpc_status fsdpc_hosts_staging_for(fsdpc_hosts_comm *self, fsdpc_mem_kind kind,
                                     fsdpc_hosts_staging *staging, size_t bytes)
{
    void *data;
    if (staging->bytes >= bytes)
        return FSDPC_OK;
    fsdpc_hosts_staging_free(self, staging);
    FSDPC_TRY(fsdpc_device_alloc(self->base.device, kind, bytes, &data));
    *staging = (fsdpc_hosts_staging){.data = data, .bytes = bytes};
    return FSDPC_OK;
}

/* ---- Messages ---- */

fsdpc_status fsdpc_hosts_send(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                              const void *data, size_t bytes)
{
    return fsdpc_transport_send(self->transport, self->peers[host],
                                fsdpc_hosts_tag(self, op->sequence, part), data, bytes,
                                &op->ops[op->n_ops++]);
}

fsdpc_status fsdpc_hosts_receive(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                                 void *data, size_t bytes)
{
    return fsdpc_transport_receive(self->transport, self->peers[host],
                                   fsdpc_hosts_tag(self, op->sequence, part), data, bytes,
                                   &op->ops[op->n_ops++]);
}

fsdpc_status fsdpc_hosts_exchange(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                                  void *to, const void *from, size_t bytes)
{
    FSDPC_TRY(fsdpc_hosts_receive(self, op, host, part, to, bytes));
    return fsdpc_hosts_send(self, op, host, part, from, bytes);
}

fsdpc_status fsdpc_hosts_begin(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    op->mine = (fsdpc_hosts_header){.sequence = op->sequence,
                                    .bytes = fsdpc_coll_bytes(coll, self->base.size),
                                    .epoch = coll->epoch,
                                    .kind = (uint32_t)coll->kind,
                                    .dtype = (uint32_t)coll->dtype,
                                    .trains = coll->trains,
                                    .flags = (uint32_t)coll->op | (uint32_t)coll->codec << 8,
                                    .unit = coll->unit,
                                    .root = coll->root};
    snprintf(op->mine.what, sizeof op->mine.what, "%s", coll->what ? coll->what : "");
    for (int h = 0; h < self->n_hosts; h++) {
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_hosts_exchange(self, op, h, 0, &op->theirs[h], &op->mine, sizeof op->mine));
    }
    return FSDPC_OK;
}

static void header_text(const fsdpc_hosts_header *header, int rank, char *text, size_t bytes)
{
    snprintf(text, bytes, "rank %d posts %s%s%.64s%s (unit %d, %llu bytes of %s, epoch %llu)", rank,
             fsdpc_coll_name((fsdpc_coll_kind)header->kind), header->what[0] ? " of '" : "",
             header->what, header->what[0] ? "'" : "", header->unit,
             (unsigned long long)header->bytes, fsdpc_dtype_name((fsdpc_dtype)header->dtype),
             (unsigned long long)header->epoch);
}

static fsdpc_status compare(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    for (int h = 0; h < self->n_hosts; h++) {
        if (h == self->this_host || memcmp(&op->mine, &op->theirs[h], sizeof op->mine) == 0)
            continue;
        char ours[192], theirs[192];
        header_text(&op->mine, self->base.world_rank, ours, sizeof ours);
        header_text(&op->theirs[h], self->peers[h], theirs, sizeof theirs);
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "ranks disagree in operation %llu: %s, %s; every rank must make the same "
                          "calls in the same order%s",
                          (unsigned long long)op->sequence, ours, theirs,
                          op->mine.trains != op->theirs[h].trains
                              ? ", and train the same parameters (requires_grad)"
                              : "");
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_crossed(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    int n_headers = fsdpc_hosts_headers(self);
    for (int i = 0; i < op->n_ops; i++) {
        if (i == n_headers && !op->compared) {
            FSDPC_TRY(compare(self, op));
            op->compared = true;
        }
        FSDPC_TRY(fsdpc_transport_test(&op->ops[i]));
    }
    if (!op->compared)
        FSDPC_TRY(compare(self, op));
    op->compared = true;
    return FSDPC_OK;
}
