/* Reduce buffers: each rank's own memfd, mapped read-only by its peers.
 *
 * On a separate page after the data, the rank counts the reductions with this buffer's id whose
 * inputs it has read. Every rank has a buffer with the same id, so each keeps its count in its own
 * buffer, and peers need no write access to each other's memory. A peer's mapping outlives the
 * owner's, so ranks may destroy their buffers at any time.
 */
#include "comm/shm_buffer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/shm_coll.h"
#include "comm/shm_peers.h"

static fsdpc_status buffer_new(fsdpc_shm_comm *self, size_t bytes, fsdpc_shm_buffer **out)
{
    size_t n = (size_t)self->base.size;
    fsdpc_shm_buffer *buffer = calloc(1, sizeof *buffer);
    void **pointers = calloc(3 * n, sizeof *pointers);
    if (!buffer || !pointers) {
        free(buffer);
        free(pointers);
        return fsdpc_fail_errno("no memory for a buffer");
    }
    buffer->base = (fsdpc_buffer){.comm = &self->base, .bytes = bytes};
    buffer->segments = (fsdpc_shm_segment **)pointers;
    buffer->datas = (const unsigned char **)(pointers + n);
    buffer->base.peers = buffer->datas;
    buffer->words = (const fsdpc_shm_buffer_words **)(pointers + 2 * n);
    *out = buffer;
    return FSDPC_OK;
}

static void buffer_free(fsdpc_shm_buffer *buffer)
{
    for (int p = 0; p < buffer->base.comm->size; p++)
        fsdpc_shm_segment_release(buffer->segments[p]);
    free(buffer->segments);
    free(buffer);
}

static fsdpc_status attach(fsdpc_shm_buffer *buffer, int rank, fsdpc_shm_segment *segment)
{
    bool own = rank == buffer->base.comm->rank;
    buffer->segments[rank] = segment;
    FSDPC_TRY(fsdpc_shm_segment_map(segment, own));
    size_t data_bytes = fsdpc_shm_page_round(buffer->base.bytes);
    if (own) {
        buffer->base.data = segment->writable;
        buffer->mine = (fsdpc_shm_buffer_words *)(void *)(segment->writable + data_bytes);
    }
    buffer->datas[rank] = own ? segment->writable : segment->readable;
    buffer->words[rank] =
        (const fsdpc_shm_buffer_words *)(const void *)(buffer->datas[rank] + data_bytes);
    return FSDPC_OK;
}

static fsdpc_status exchange(fsdpc_shm_comm *self, fsdpc_shm_buffer *buffer, uint64_t tag)
{
    size_t bytes = 0;
    fsdpc_shm_segment *segment = NULL;
    fsdpc_status status = fsdpc_add_size(fsdpc_shm_page_round(buffer->base.bytes), 4096, &bytes);
    if (status == FSDPC_OK)
        status =
            fsdpc_shm_segment_create("fsdpc reduce buffer", bytes, !self->world->threads, &segment);
    if (status == FSDPC_OK)
        status = attach(buffer, self->base.rank, segment);
    FSDPC_TRY(fsdpc_shm_give_all(self, tag, segment, status));
    for (int p = 0; p < self->base.size; p++) {
        if (p == self->base.rank)
            continue;
        fsdpc_shm_segment *theirs = NULL;
        FSDPC_TRY(fsdpc_shm_take_from(self, p, tag, bytes, &theirs));
        if (!theirs)
            continue; /* the agreement reports its failure */
        FSDPC_KEEP_FIRST(status, attach(buffer, p, theirs));
        fsdpc_shm_segment_close_fd(theirs);
    }
    FSDPC_KEEP_FIRST(status, fsdpc_shm_given_all(self));
    if (segment)
        fsdpc_shm_segment_close_fd(segment);
    return status;
}

fsdpc_status fsdpc_shm_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    uint64_t tag = 0;
    FSDPC_TRY(fsdpc_shm_creation_begin(self, "buffer_create", bytes, &tag));
    fsdpc_shm_buffer *buffer = NULL;
    FSDPC_TRY(buffer_new(self, bytes, &buffer));
    buffer->id = self->creations;
    fsdpc_status status = fsdpc_comm_agree(comm, exchange(self, buffer, tag), "buffer_create");
    if (status != FSDPC_OK) {
        buffer_free(buffer);
        return status;
    }
    fsdpc_mem_count(comm->device->mem, FSDPC_MEM_REDUCE, (int64_t)bytes);
    *out = &buffer->base;
    return FSDPC_OK;
}

void fsdpc_shm_buffer_destroy(fsdpc_buffer *base)
{
    fsdpc_shm_buffer *buffer = (fsdpc_shm_buffer *)base;
    fsdpc_mem_count(base->comm->device->mem, FSDPC_MEM_REDUCE, -(int64_t)base->bytes);
    buffer_free(buffer);
}

fsdpc_status fsdpc_shm_buffer_idle(fsdpc_buffer *base)
{
    fsdpc_shm_buffer *buffer = (fsdpc_shm_buffer *)base;
    fsdpc_shm_comm *self = fsdpc_shm_of(base->comm);
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    for (int p = 0; p < self->base.size; p++) {
        /* acquire: pairs with the release in reduce_step; our next writes come after the peers'
         * reads. */
        if (atomic_load_explicit(&buffer->words[p]->read, memory_order_acquire) < buffer->posts) {
            FSDPC_TRY(fsdpc_shm_progress(self)); /* the peer may need our part to finish */
            self->awaited = (fsdpc_shm_awaited){
                .kind = FSDPC_SHM_AWAITS_READ, .object = buffer, .target = buffer->posts};
            return FSDPC_IN_PROGRESS;
        }
    }
    return FSDPC_OK;
}
