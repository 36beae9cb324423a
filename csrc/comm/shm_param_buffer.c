/* Parameter buffers and epochs.
 *
 * The group has one memfd or file, which contains the data, followed by a cache line of control
 * words for each rank. Every rank maps it twice, read-only for the modules and writable for its own
 * slices and words. Threads share one mapping.
 *
 * In the epoch protocol (docs/design/communication.md; model-checked over every interleaving of 2-3
 * ranks), a rank writes its note into the half selected by the epoch's parity and raises `arrived`.
 * When all ranks have arrived, they see the same notes and make the same decision. A note is
 * overwritten two epochs later. Its writer gets that far only after all ranks have arrived in the
 * intervening epoch, and have therefore read the note. The exception is a rank that abandoned an
 * epoch (because of an exception in user code) and continued without its peers. A rank still
 * waiting in the old epoch sees that the other is two epochs ahead, or ahead without having copied
 * in, and reports it.
 */
#include "comm/shm_param_buffer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/shm_coll.h"
#include "comm/shm_peers.h"

/* ---- Create and destroy ---- */

static fsdpc_status param_buffer_bytes(const fsdpc_shm_comm *self, size_t bytes, size_t *data_out,
                                       size_t *all_out)
{
    *data_out = fsdpc_shm_page_round(bytes);
    return fsdpc_add_size(*data_out, (size_t)self->base.size * sizeof(fsdpc_shm_param_buffer_words),
                          all_out);
}

/* Creates one file for all ranks, or a memfd if `tier` is NULL. */
static fsdpc_status create_segment(const fsdpc_shm_comm *self, fsdpc_tier *tier, size_t bytes,
                                   fsdpc_shm_segment **out)
{
    if (!tier)
        return fsdpc_shm_segment_create("fsdpc parameter buffer", bytes, !self->world->threads,
                                        out);
    if (self->world->threads)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "params on a disk between threads");
    int fd;
    FSDPC_TRY(fsdpc_tier_make_file(tier, fsdpc_shm_page_round(bytes), &fd));
    return fsdpc_shm_segment_adopt(fd, bytes, out);
}

static fsdpc_status share(fsdpc_shm_comm *self, fsdpc_shm_param_buffer *param_buffer, uint64_t tag)
{
    size_t data_bytes = 0, all_bytes = 0;
    FSDPC_TRY(param_buffer_bytes(self, param_buffer->base.bytes, &data_bytes, &all_bytes));
    fsdpc_status status = FSDPC_OK;
    if (self->base.rank == 0)
        status = create_segment(self, param_buffer->tier, all_bytes, &param_buffer->segment);
    status = fsdpc_shm_share_first(self, tag, all_bytes, status, &param_buffer->segment);
    if (status != FSDPC_OK || !param_buffer->segment)
        return status; /* the agreement reports rank 0's failure */
    status = fsdpc_shm_segment_map(param_buffer->segment, true);
    FSDPC_KEEP_FIRST(status, fsdpc_shm_segment_map(param_buffer->segment, false));
    if (status != FSDPC_OK)
        return status;
    if (param_buffer->segment->fd >= 0 && !param_buffer->segment->file)
        param_buffer->base.memfd = param_buffer->segment->fd;
    else
        fsdpc_shm_segment_close_fd(param_buffer->segment);
    param_buffer->base.read = param_buffer->segment->readable;
    param_buffer->base.write = param_buffer->segment->writable;
    param_buffer->words =
        (fsdpc_shm_param_buffer_words *)(void *)(param_buffer->segment->writable + data_bytes);
    return FSDPC_OK;
}

/* Counts the buffer's bytes, as memory or as a file. */
static void count(const fsdpc_shm_param_buffer *param_buffer, int64_t bytes)
{
    const fsdpc_comm *comm = param_buffer->base.comm;
    if (comm->rank == 0 && param_buffer->tier)
        fsdpc_tier_count_file(param_buffer->tier, bytes);
    else if (comm->rank == 0)
        fsdpc_mem_count(comm->device->mem, FSDPC_MEM_UNSHARDED, bytes);
}

fsdpc_status fsdpc_shm_param_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                           fsdpc_param_buffer **out)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    uint64_t tag = 0;
    FSDPC_TRY(fsdpc_shm_creation_begin(self, "param_buffer_create", bytes, &tag));
    fsdpc_shm_param_buffer *param_buffer = calloc(1, sizeof *param_buffer);
    if (!param_buffer)
        return fsdpc_fail_errno("no memory for a parameter buffer");
    param_buffer->base = (fsdpc_param_buffer){.comm = comm, .bytes = bytes};
    param_buffer->id = self->creations;
    param_buffer->tier = tier;
    fsdpc_status status =
        fsdpc_comm_agree(comm, share(self, param_buffer, tag), "param_buffer_create");
    if (status != FSDPC_OK) {
        fsdpc_shm_segment_release(param_buffer->segment);
        free(param_buffer);
        return status;
    }
    if (tier)
        fsdpc_tier_acquire(tier);
    count(param_buffer, (int64_t)bytes);
    param_buffer->next = self->param_buffers;
    self->param_buffers = param_buffer;
    *out = &param_buffer->base;
    return FSDPC_OK;
}

void fsdpc_shm_param_buffer_destroy(fsdpc_param_buffer *base)
{
    fsdpc_shm_param_buffer *param_buffer = (fsdpc_shm_param_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    fsdpc_shm_param_buffer **transport = &self->param_buffers;
    while (*transport && *transport != param_buffer)
        transport = &(*transport)->next;
    if (*transport)
        *transport = param_buffer->next;
    count(param_buffer, -(int64_t)base->bytes);
    fsdpc_shm_segment_release(param_buffer->segment);
    fsdpc_tier_release(param_buffer->tier);
    free(param_buffer);
}

/* ---- Epochs ---- */

static fsdpc_status still_waiting(fsdpc_shm_comm *self)
{
    fsdpc_shm_awaited awaited = self->awaited; /* operations that advance meanwhile may wait for
                                                * other ranks */
    FSDPC_TRY(fsdpc_shm_progress(self));
    self->awaited = awaited;
    return FSDPC_IN_PROGRESS;
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static fsdpc_epoch_note note_of(const fsdpc_shm_param_buffer_words *words, uint64_t epoch)
{
    uint64_t bits_kind =
        atomic_load_explicit(&words->note[epoch & 1].bits_kind, memory_order_relaxed);
    return (fsdpc_epoch_note){
        .bits = (uint32_t)bits_kind,
        .kind = (uint32_t)(bits_kind >> 32),
        .unit = (int32_t)atomic_load_explicit(&words->note[epoch & 1].unit, memory_order_relaxed),
        .steps = atomic_load_explicit(&words->note[epoch & 1].steps, memory_order_acquire),
    };
}

fsdpc_status fsdpc_shm_epoch_arrive(fsdpc_param_buffer *base, const fsdpc_epoch_note *mine)
{
    fsdpc_shm_param_buffer *param_buffer = (fsdpc_shm_param_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    FSDPC_TRY(fsdpc_shm_health(self));
    uint64_t epoch = ++base->epoch;
    fsdpc_shm_param_buffer_words *words = &param_buffer->words[self->base.rank];
    atomic_store_explicit(&words->note[epoch & 1].bits_kind,
                          mine->bits | (uint64_t)mine->kind << 32, memory_order_relaxed);
    atomic_store_explicit(&words->note[epoch & 1].unit, (uint64_t)(uint32_t)mine->unit,
                          memory_order_relaxed);
    atomic_store_explicit(&words->note[epoch & 1].steps, mine->steps, memory_order_relaxed);
    /* release: comes after the note and all our reads of unsharded parameters; acquire in
     * epoch_test, after which peers overwrite what we read. */
    atomic_store_explicit(&words->arrived, epoch, memory_order_release);
    fsdpc_shm_wake(self->bell);
    return FSDPC_OK;
}

static fsdpc_status abandoned(fsdpc_shm_comm *self, int rank, uint64_t epoch, uint64_t theirs)
{
    fsdpc_fail(
        FSDPC_ERR_PEER,
        "rank %d abandoned epoch %llu, which rank %d waits in, and is in epoch %llu; after an "
        "exception every rank must reset before it goes on",
        fsdpc_shm_name(self, rank), (unsigned long long)epoch, self->base.world_rank,
        (unsigned long long)theirs);
    return fsdpc_shm_fail(self, FSDPC_ERR_PEER);
}

/* Detects a rank that has not arrived here but has begun an epoch of another parameter buffer that
 * we have not begun. The two ranks would wait for each other. (Checks again that it has not arrived
 * here first.) */
static fsdpc_status crossed_check(const fsdpc_shm_param_buffer *param_buffer, int rank,
                                  uint64_t epoch)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(param_buffer->base.comm);
    const fsdpc_shm_param_buffer *other = fsdpc_shm_param_buffer_ahead(self, rank);
    if (!other || other == param_buffer || load(&param_buffer->words[rank].arrived) >= epoch)
        return FSDPC_OK;
    char theirs[192], ours[192];
    fsdpc_shm_world_where(self->world, self->members[rank], theirs, sizeof theirs);
    fsdpc_shm_world_where(self->world, self->world->rank, ours, sizeof ours);
    fsdpc_fail(FSDPC_ERR_MISMATCH,
               "ranks disagree on the order of models: rank %d begins an epoch %s, rank %d one of "
               "another model %s; every rank must call its models in the same order",
               self->base.world_rank, ours, fsdpc_shm_name(self, rank), theirs);
    return fsdpc_shm_fail(self, FSDPC_ERR_MISMATCH);
}

static void note_text(const fsdpc_shm_param_buffer *param_buffer, int rank,
                      const fsdpc_epoch_note *note, char *text, size_t bytes)
{
    const fsdpc_shm_comm *self = fsdpc_shm_of(param_buffer->base.comm);
    char where[192], kind[64];
    fsdpc_shm_world_where(self->world, self->members[rank], where, sizeof where);
    snprintf(kind, sizeof kind, "something of kind %u", note->kind);
    snprintf(text, bytes, "rank %d begins one by %s, unit %d, after %llu steps%s%s%s",
             fsdpc_shm_name(self, rank),
             param_buffer->base.kind_text ? param_buffer->base.kind_text(note->kind) : kind,
             note->unit, (unsigned long long)note->steps, where[0] ? " (" : "", where,
             where[0] ? ")" : "");
}

static fsdpc_status notes_differ(const fsdpc_shm_param_buffer *param_buffer, uint64_t epoch,
                                 int rank, const fsdpc_epoch_note *a, const fsdpc_epoch_note *b)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(param_buffer->base.comm);
    char first[384], second[384];
    note_text(param_buffer, 0, a, first, sizeof first);
    note_text(param_buffer, rank, b, second, sizeof second);
    fsdpc_fail(FSDPC_ERR_MISMATCH,
               "ranks disagree in epoch %llu: %s, %s; every rank must call the same units and take "
               "the same optimizer steps",
               (unsigned long long)epoch, first, second);
    return fsdpc_shm_fail(self, FSDPC_ERR_MISMATCH);
}

static fsdpc_status held_and_changed(int holder, int changer)
{
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "rank %d changed its weights while rank %d holds a unit by unshard(); call "
                      "reshard() on the unit before the next forward",
                      changer, holder);
}

fsdpc_status fsdpc_shm_epoch_test(fsdpc_param_buffer *base, fsdpc_epoch_note *all_out)
{
    fsdpc_shm_param_buffer *param_buffer = (fsdpc_shm_param_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    uint64_t epoch = base->epoch;
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (int p = 0; p < self->base.size; p++) {
        if (load(&param_buffer->words[p].arrived) < epoch) {
            FSDPC_TRY(crossed_check(param_buffer, p, epoch));
            self->awaited = (fsdpc_shm_awaited){
                .kind = FSDPC_SHM_AWAITS_ARRIVED, .object = param_buffer, .target = epoch};
            return still_waiting(self);
        }
    }
    fsdpc_epoch_note first = note_of(&param_buffer->words[0], epoch);
    uint32_t bits = 0;
    int holder = -1, changer = -1, other = -1;
    fsdpc_epoch_note different = {0};
    for (int p = 0; p < self->base.size; p++) {
        fsdpc_epoch_note note = note_of(&param_buffer->words[p], epoch);
        uint64_t arrived = load(&param_buffer->words[p].arrived);
        if (arrived > epoch + 1)
            return abandoned(self, p, epoch, arrived); /* rank p has overwritten its note */
        bits |= note.bits;
        holder = holder < 0 && (note.bits & FSDPC_EPOCH_HELD) ? p : holder;
        changer = changer < 0 && (note.bits & FSDPC_EPOCH_CHANGED) ? p : changer;
        if (other < 0 &&
            (note.kind != first.kind || note.unit != first.unit || note.steps != first.steps)) {
            other = p;
            different = note;
        }
    }
    if (other >= 0)
        return notes_differ(param_buffer, epoch, other, &first, &different);
    if (holder >= 0 && changer >= 0)
        return held_and_changed(fsdpc_shm_name(self, holder), fsdpc_shm_name(self, changer));
    first.bits = bits;
    *all_out = first;
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_epoch_copied_in(fsdpc_param_buffer *base)
{
    fsdpc_shm_param_buffer *param_buffer = (fsdpc_shm_param_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    FSDPC_TRY(fsdpc_shm_health(self));
    /* release: comes after writing our slices; acquire in epoch_copy_in_test. */
    atomic_store_explicit(&param_buffer->words[self->base.rank].copied_in, base->epoch,
                          memory_order_release);
    fsdpc_shm_wake(self->bell);
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_epoch_copy_in_test(fsdpc_param_buffer *base)
{
    fsdpc_shm_param_buffer *param_buffer = (fsdpc_shm_param_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    uint64_t epoch = base->epoch;
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (int p = 0; p < self->base.size; p++) {
        if (load(&param_buffer->words[p].copied_in) >= epoch)
            continue;
        uint64_t arrived = load(&param_buffer->words[p].arrived);
        if (arrived > epoch && load(&param_buffer->words[p].copied_in) < epoch)
            return abandoned(self, p, epoch, arrived);
        self->awaited = (fsdpc_shm_awaited){
            .kind = FSDPC_SHM_AWAITS_PUBLISHED, .object = param_buffer, .target = epoch};
        return still_waiting(self);
    }
    return FSDPC_OK;
}
