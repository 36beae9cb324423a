/* Wires, epochs and buffers over several hosts.
 *
 * A host has one copy of the weights: its ranks share the wire, and gathers bring other hosts' rows
 * into it.  Ranks thus publish, read and arrive as on one host.
 *
 * An epoch is one message in each direction.  When all ranks of the host have arrived, each lane
 * sends the host's note to the same lane on the other hosts, and receives theirs.  A rank that
 * continues from an epoch therefore knows that every rank of the world has arrived.  Publishing is
 * local to the host: rows leave it in gathers, which are posted later.
 */
#include "comm/hosts_internal.h"

#include <stdio.h>
#include <stdlib.h>

static void wire_free(fsdpc_hosts_wire *wire)
{
    if (!wire)
        return;
    fsdpc_wire_destroy(wire->host);
    free(wire->notes);
    free(wire->ops);
    free(wire->rows);
    free(wire);
}

fsdpc_status fsdpc_hosts_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                     fsdpc_wire **out)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    FSDPC_TRY(fsdpc_comm_health(comm));
    fsdpc_hosts_wire *wire = calloc(1, sizeof *wire);
    size_t n = (size_t)self->n_hosts;
    fsdpc_status status = FSDPC_OK;
    if (wire) {
        wire->notes = calloc(n, sizeof *wire->notes);
        wire->ops = calloc(2 * n, sizeof *wire->ops);
    }
    if (!wire || !wire->notes || !wire->ops)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a wire");
    if (status == FSDPC_OK)
        status = fsdpc_wire_create_in(self->host, bytes, tier, &wire->host);
    status = fsdpc_comm_agree(comm, status, "wire_create");
    if (status != FSDPC_OK) {
        wire_free(wire);
        return status;
    }
    wire->base = (fsdpc_wire){.comm = comm,
                              .bytes = bytes,
                              .memfd = wire->host->memfd,
                              .read = wire->host->read,
                              .write = wire->host->write};
    *out = &wire->base;
    return FSDPC_OK;
}

void fsdpc_hosts_wire_destroy(fsdpc_wire *wire)
{
    wire_free((fsdpc_hosts_wire *)wire);
}

/* Also reports a failure of the host's communicator to the other hosts. */
static fsdpc_status of_host(fsdpc_hosts_comm *self, fsdpc_status status)
{
    return status < 0 && self->host->poison[0] ? fsdpc_comm_poison(&self->base, status) : status;
}

/* ---- Epochs ---- */

fsdpc_status fsdpc_hosts_epoch_arrive(fsdpc_wire *base, const fsdpc_epoch_note *mine)
{
    fsdpc_hosts_wire *wire = (fsdpc_hosts_wire *)base;
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    wire->host->kind_text = base->kind_text;
    FSDPC_TRY(of_host(self, fsdpc_wire_arrive(wire->host, mine)));
    base->epoch = wire->host->epoch;
    wire->sequence = self->posted++;
    wire->note = *mine;
    wire->sent = false;
    return FSDPC_OK;
}

static fsdpc_status exchange(fsdpc_hosts_comm *self, fsdpc_hosts_wire *wire)
{
    fsdpc_hosts_note *mine = &wire->notes[self->this_host];
    *mine = (fsdpc_hosts_note){.note = wire->note, .epoch = wire->base.epoch};
    for (int h = 0; h < self->n_hosts; h++) {
        uint32_t tag = fsdpc_hosts_tag(self, wire->sequence, 0);
        if (h == self->this_host)
            continue;
        FSDPC_TRY(fsdpc_link_receive(self->link, self->peers[h], tag, &wire->notes[h], sizeof *mine,
                                     &wire->ops[2 * h]));
        FSDPC_TRY(fsdpc_link_send(self->link, self->peers[h], tag, mine, sizeof *mine,
                                  &wire->ops[2 * h + 1]));
    }
    wire->sent = true;
    return FSDPC_OK;
}

static void note_text(const fsdpc_hosts_wire *wire, int host, const fsdpc_hosts_note *note,
                      char *text, size_t bytes)
{
    const fsdpc_hosts_comm *self = fsdpc_hosts_of(wire->base.comm);
    char kind[64];
    snprintf(kind, sizeof kind, "something of kind %u", note->note.kind);
    snprintf(text, bytes, "rank %d begins epoch %llu by %s, unit %d, after %llu steps",
             self->peers[host], (unsigned long long)note->epoch,
             wire->base.kind_text ? wire->base.kind_text(note->note.kind) : kind, note->note.unit,
             (unsigned long long)note->note.steps);
}

static fsdpc_status join(const fsdpc_hosts_wire *wire, fsdpc_epoch_note *all_out)
{
    const fsdpc_hosts_comm *self = fsdpc_hosts_of(wire->base.comm);
    const fsdpc_hosts_note *first = &wire->notes[0];
    fsdpc_epoch_note all = first->note;
    int holder = -1, changer = -1;
    for (int h = 0; h < self->n_hosts; h++) {
        const fsdpc_hosts_note *note = &wire->notes[h];
        if (note->epoch != first->epoch || note->note.kind != first->note.kind ||
            note->note.unit != first->note.unit || note->note.steps != first->note.steps) {
            char a[192], b[192];
            note_text(wire, 0, first, a, sizeof a);
            note_text(wire, h, note, b, sizeof b);
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

fsdpc_status fsdpc_hosts_epoch_test(fsdpc_wire *base, fsdpc_epoch_note *all_out)
{
    fsdpc_hosts_wire *wire = (fsdpc_hosts_wire *)base;
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    FSDPC_TRY(fsdpc_hosts_progress(self));
    if (!wire->sent) {
        fsdpc_status status = wire->host->comm->ops->epoch_test(wire->host, &wire->note);
        if (status == FSDPC_ERR_STATE) /* held and changed on this host: all hosts must be told */
            wire->note.bits |= FSDPC_EPOCH_HELD | FSDPC_EPOCH_CHANGED;
        else
            FSDPC_TRY(of_host(self, status));
        FSDPC_TRY(exchange(self, wire));
    }
    for (int i = 0; i < 2 * self->n_hosts; i++) {
        fsdpc_status status = fsdpc_link_test(&wire->ops[i]);
        if (status < 0)
            return fsdpc_comm_poison(base->comm, status);
        FSDPC_TRY(status);
    }
    fsdpc_status status = join(wire, all_out);
    if (status == FSDPC_ERR_MISMATCH)
        return fsdpc_comm_poison(base->comm, status);
    FSDPC_TRY(status);
    if (all_out->bits & FSDPC_EPOCH_CHANGED)
        wire->generation++;
    return FSDPC_OK;
}

fsdpc_status fsdpc_hosts_epoch_publish(fsdpc_wire *base)
{
    return of_host(fsdpc_hosts_of(base->comm),
                   fsdpc_wire_publish(((fsdpc_hosts_wire *)base)->host));
}

fsdpc_status fsdpc_hosts_epoch_published(fsdpc_wire *base)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(base->comm);
    fsdpc_wire *host = ((fsdpc_hosts_wire *)base)->host;
    FSDPC_TRY(fsdpc_hosts_progress(self));
    return of_host(self, host->comm->ops->epoch_published(host));
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
