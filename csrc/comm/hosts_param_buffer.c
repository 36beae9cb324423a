/* Parameter buffers, epochs and reduce buffers across several hosts.
 *
 * A host has one copy of the weights: its ranks share the parameter buffer, and gathers bring other
 * hosts' rows into it. Ranks therefore copy in, read and arrive in epochs as on a single host.
 *
 * In each epoch, peers exchange one message in each direction. When all ranks of the host have
 * arrived, each local rank sends the host's note to the same local rank on the other hosts, and
 * receives theirs. A rank that continues from an epoch therefore knows that every rank of the world
 * has arrived. The copy-in is local to the host: rows leave the host only in gathers, which are
 * posted later.
 */
#include "comm/hosts_internal.h"

#include <stdio.h>
#include <stdlib.h>

static void param_buffer_free(fsdpc_hosts_param_buffer *param_buffer)
{
    if (!param_buffer)
        return;
    fsdpc_param_buffer_destroy(param_buffer->host);
    free(param_buffer->notes);
    free(param_buffer->ops);
    free(param_buffer->rows);
    free(param_buffer);
}

fsdpc_status fsdpc_hosts_param_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                             fsdpc_param_buffer **out)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    FSDPC_TRY(fsdpc_comm_health(comm));
    fsdpc_hosts_param_buffer *param_buffer = calloc(1, sizeof *param_buffer);
    size_t n = (size_t)self->n_hosts;
    fsdpc_status status = FSDPC_OK;
    if (param_buffer) {
        param_buffer->notes = calloc(n, sizeof *param_buffer->notes);
        param_buffer->ops = calloc(2 * n, sizeof *param_buffer->ops);
    }
    if (!param_buffer || !param_buffer->notes || !param_buffer->ops)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a parameter buffer");
    if (status == FSDPC_OK)
        status = fsdpc_param_buffer_create_in(self->host, bytes, tier, &param_buffer->host);
    status = fsdpc_comm_agree(comm, status, "param_buffer_create");
    if (status != FSDPC_OK) {
        param_buffer_free(param_buffer);
        return status;
    }
    param_buffer->base = (fsdpc_param_buffer){.comm = comm,
                                              .bytes = bytes,
                                              .memfd = param_buffer->host->memfd,
                                              .read = param_buffer->host->read,
                                              .write = param_buffer->host->write};
    *out = &param_buffer->base;
    return FSDPC_OK;
}

void fsdpc_hosts_param_buffer_destroy(fsdpc_param_buffer *param_buffer)
{
    param_buffer_free((fsdpc_hosts_param_buffer *)param_buffer);
}

/* Reports a failure of the host's communicator to the other hosts too, and returns `status`. */
static fsdpc_status of_host(fsdpc_hosts_comm *self, fsdpc_status status)
{
    return status < 0 && self->host->poison[0] ? fsdpc_comm_poison(&self->base, status) : status;
}

/* ---- Epochs ---- */

fsdpc_status fsdpc_hosts_epoch_arrive(fsdpc_param_buffer *base, const fsdpc_epoch_note *mine)
{
    fsdpc_hosts_param_buffer *param_buffer = (fsdpc_hosts_param_buffer *)base;
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    param_buffer->host->kind_text = base->kind_text;
    FSDPC_TRY(of_host(self, fsdpc_param_buffer_arrive(param_buffer->host, mine)));
    base->epoch = param_buffer->host->epoch;
    param_buffer->sequence = self->posted++;
    param_buffer->note = *mine;
    param_buffer->sent = false;
    return FSDPC_OK;
}

static fsdpc_status exchange(fsdpc_hosts_comm *self, fsdpc_hosts_param_buffer *param_buffer)
{
    fsdpc_hosts_note *mine = &param_buffer->notes[self->this_host];
    *mine = (fsdpc_hosts_note){.note = param_buffer->note, .epoch = param_buffer->base.epoch};
    for (int h = 0; h < self->n_hosts; h++) {
        uint32_t tag = fsdpc_hosts_tag(self, param_buffer->sequence, 0);
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_transport_receive(self->transport, self->peers[h], tag,
                                          &param_buffer->notes[h], sizeof *mine,
                                          &param_buffer->ops[2 * h]));
        FSDPC_TRY(fsdpc_transport_send(self->transport, self->peers[h], tag, mine, sizeof *mine,
                                       &param_buffer->ops[2 * h + 1]));
    }
    param_buffer->sent = true;
    return FSDPC_OK;
}

static void note_text(const fsdpc_hosts_param_buffer *param_buffer, int host,
                      const fsdpc_hosts_note *note, char *text, size_t bytes)
{
    const fsdpc_hosts_comm *self = fsdpc_hosts_of(param_buffer->base.comm);
    char kind[64];
    snprintf(kind, sizeof kind, "something of kind %u", note->note.kind);
    snprintf(text, bytes, "rank %d begins epoch %llu by %s, unit %d, after %llu steps",
             self->peers[host], (unsigned long long)note->epoch,
             param_buffer->base.kind_text ? param_buffer->base.kind_text(note->note.kind) : kind,
             note->note.unit, (unsigned long long)note->note.steps);
}

static fsdpc_status join(const fsdpc_hosts_param_buffer *param_buffer, fsdpc_epoch_note *all_out)
{
    const fsdpc_hosts_comm *self = fsdpc_hosts_of(param_buffer->base.comm);
    const fsdpc_hosts_note *first = &param_buffer->notes[0];
    fsdpc_epoch_note all = first->note;
    int holder = -1, changer = -1;
    for (int h = 0; h < self->n_hosts; h++) {
        const fsdpc_hosts_note *note = &param_buffer->notes[h];
        if (note->epoch != first->epoch || note->note.kind != first->note.kind ||
            note->note.unit != first->note.unit || note->note.steps != first->note.steps) {
            char a[192], b[192];
            note_text(param_buffer, 0, first, a, sizeof a);
            note_text(param_buffer, h, note, b, sizeof b);
            return fsdpc_fail(
                FSDPC_ERR_MISMATCH,
                "ranks disagree: %s, %s; every rank must call the same units and take "
                "the same optimizer steps",
                a, b);
        }
        all.bits |= note->note.bits;
        holder = holder < 0 && (note->note.bits & FSDPC_EPOCH_HELD) ? h : holder;
        changer = changer < 0 && (note->note.bits & FSDPC_EPOCH_CHANGED) ? h : changer;
    }
    if (holder >= 0 && changer >= 0)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "host %d changed its weights while host %d holds a unit by unshard(); "
                          "call reshard() on the unit before the next forward",
                          changer, holder);
    *all_out = all;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_epoch_test(fsdpc_param_buffer *base, fsdpc_epoch_note *all_out)
{
    fsdpc_hosts_param_buffer *param_buffer = (fsdpc_hosts_param_buffer *)base;
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    FSDPC_TRY(fsdpc_hosts_progress(self));
    if (!param_buffer->sent) {
        fsdpc_status status =
            param_buffer->host->comm->ops->epoch_test(param_buffer->host, &param_buffer->note);
        if (status == FSDPC_ERR_STATE) /* held and changed on this host: all hosts must be told */
            param_buffer->note.bits |= FSDPC_EPOCH_HELD | FSDPC_EPOCH_CHANGED;
        else
            FSDPC_TRY(of_host(self, status));
        FSDPC_TRY(exchange(self, param_buffer));
    }
    for (int i = 0; i < 2 * self->n_hosts; i++) {
        fsdpc_status status = fsdpc_transport_test(&param_buffer->ops[i]);
        if (status < 0)
            return fsdpc_comm_poison(base->comm, status);
        FSDPC_TRY(status);
    }
    fsdpc_status status = join(param_buffer, all_out);
    if (status == FSDPC_ERR_MISMATCH)
        return fsdpc_comm_poison(base->comm, status);
    FSDPC_TRY(status);
    if (all_out->bits & FSDPC_EPOCH_CHANGED)
        param_buffer->generation++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_epoch_copied_in(fsdpc_param_buffer *base)
{
    return of_host(fsdpc_hosts_of(base->comm),
                   fsdpc_param_buffer_copied_in(((fsdpc_hosts_param_buffer *)base)->host));
}

fsdpc_status fsdpc_hosts_epoch_copy_in_test(fsdpc_param_buffer *base)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    fsdpc_param_buffer *host = ((fsdpc_hosts_param_buffer *)base)->host;
    FSDPC_TRY(fsdpc_hosts_progress(self));
    return of_host(self, host->comm->ops->epoch_copy_in_test(host));
}

/* ---- Buffers ---- */

fsdpc_status fsdpc_hosts_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    FSDPC_TRY(fsdpc_comm_health(comm));
    fsdpc_hosts_buffer *buffer = calloc(1, sizeof *buffer);
    fsdpc_status status =
        buffer ? fsdpc_buffer_create(self->host, bytes, &buffer->host)
               : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a reduce buffer's description");
    status = fsdpc_comm_agree(comm, status, "buffer_create");
    if (status != FSDPC_OK) {
        if (buffer)
            fsdpc_buffer_destroy(buffer->host);
        free(buffer);
        return status;
    }
    buffer->base = (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = buffer->host->data};
    *out = &buffer->base;
    return FSDPC_OK;
}

void fsdpc_hosts_buffer_destroy(fsdpc_buffer *base)
{
    fsdpc_hosts_ops_free(fsdpc_hosts_of(base->comm), &((fsdpc_hosts_buffer *)base)->spare);
    fsdpc_buffer_destroy(((fsdpc_hosts_buffer *)base)->host);
    free(base);
}

fsdpc_status fsdpc_hosts_buffer_idle(fsdpc_buffer *base)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    fsdpc_buffer *host = ((fsdpc_hosts_buffer *)base)->host;
    FSDPC_TRY(fsdpc_hosts_progress(self));
    return of_host(self, host->comm->ops->buffer_idle(host));
}
