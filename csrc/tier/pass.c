/* The ring of buffers, which threads fill before the user needs them and write back afterwards.
 *
 *     FREE -> READING -> READY -> USED -> CHANGED -> WRITING -> FREE
 *
 * The list of entries defines the order, row by row. Whenever a buffer is free, threads read the
 * next entry, because the user waits for reads first; otherwise, they write back changed buffers. A
 * row that the user skips is dropped.
 *
 * For any number of columns, the ring has space for a row in use, one row ahead and chunks that are
 * yet to be written. The user and the reading threads therefore cannot deadlock.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/size.h"
#include "base/thread.h"
#include "tier/tier_internal.h"

enum { DEADLINE_S = 600 };

_Static_assert(FSDPC_TIER_BUFFERS > 2 * FSDPC_TIER_COLUMNS, "a row in use, one ahead, and more");

/* ---- The failure ---- */

static void note_failure(fsdpc_tier *tier, fsdpc_status status, const char *doing,
                         const fsdpc_extent *extent)
{
    if (tier->status != FSDPC_OK)
        return;
    tier->status = status;
    snprintf(tier->reason, sizeof tier->reason, "rank %d, %s %s: %.360s", tier->rank, doing,
             fsdpc_extent_name_of(extent).text, fsdpc_last_error());
}

/* ---- The threads ---- */

static fsdpc_tier_buffer *in_state(fsdpc_tier *tier, fsdpc_buffer_state state)
{
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++)
        if (tier->buffers[i].state == state)
            return &tier->buffers[i];
    return NULL;
}

/* Returns the next buffer to read into, with its entry assigned, or NULL if there is nothing to
 * read now. */
static fsdpc_tier_buffer *next_to_read(fsdpc_tier *tier)
{
    if (!tier->started) /* until then the user may still change the list */
        return NULL;
    while (tier->next_read < tier->n_entries && tier->entries[tier->next_read].row < tier->row)
        tier->next_read++; /* already passed */
    if (tier->next_read == tier->n_entries)
        return NULL;
    fsdpc_tier_buffer *buffer = in_state(tier, FSDPC_BUFFER_FREE);
    if (!buffer)
        return NULL;
    const fsdpc_tier_entry *entry = &tier->entries[tier->next_read];
    buffer->extent = entry->extent;
    buffer->chunk = entry->chunk;
    buffer->entry = tier->next_read++;
    buffer->state = FSDPC_BUFFER_READING;
    return buffer;
}

static void read_buffer(fsdpc_tier *tier, fsdpc_tier_buffer *buffer)
{
    bool zeros = buffer->extent->chunks[buffer->chunk].known == FSDPC_TIER_ZEROS;
    pthread_mutex_unlock(&tier->lock);
    fsdpc_status status = fsdpc_chunk_read(buffer->extent, buffer->chunk, buffer->data);
    pthread_mutex_lock(&tier->lock);
    if (status != FSDPC_OK)
        note_failure(tier, status, "reading", buffer->extent);
    if (!zeros)
        tier->stats.read_bytes += fsdpc_chunk_bytes(buffer->extent, buffer->chunk);
    buffer->state = buffer->entry < tier->row ? FSDPC_BUFFER_FREE : FSDPC_BUFFER_READY;
}

static void write_buffer(fsdpc_tier *tier, fsdpc_tier_buffer *buffer)
{
    fsdpc_extent *extent = buffer->extent;
    size_t bytes = fsdpc_chunk_bytes(extent, buffer->chunk);
    buffer->state = FSDPC_BUFFER_WRITING;
    pthread_mutex_unlock(&tier->lock);
    uint32_t crc = fsdpc_chunk_crc(extent, buffer->chunk, buffer->data);
    fsdpc_status status = fsdpc_fs_pwrite(&tier->fs, tier->fd, tier->path, buffer->data, bytes,
                                          fsdpc_chunk_offset(extent, buffer->chunk));
    pthread_mutex_lock(&tier->lock);
    if (status != FSDPC_OK)
        note_failure(tier, status, "writing", extent);
    extent->chunks[buffer->chunk] = (fsdpc_tier_chunk){crc, FSDPC_TIER_WRITTEN};
    tier->stats.written_bytes += bytes;
    buffer->state = FSDPC_BUFFER_FREE;
}

static void *tier_main(void *arg)
{
    fsdpc_tier *tier = arg;
    pthread_mutex_lock(&tier->lock);
    while (!tier->ending) {
        fsdpc_tier_buffer *buffer = tier->status == FSDPC_OK ? next_to_read(tier) : NULL;
        if (buffer)
            read_buffer(tier, buffer);
        else if (tier->status == FSDPC_OK && (buffer = in_state(tier, FSDPC_BUFFER_CHANGED)))
            write_buffer(tier, buffer);
        else {
            pthread_cond_wait(&tier->work, &tier->lock);
            continue;
        }
        pthread_cond_broadcast(&tier->done);
        pthread_cond_signal(&tier->work); /* another thread may be waiting for this buffer */
    }
    pthread_mutex_unlock(&tier->lock);
    return NULL;
}

static fsdpc_status start_threads(fsdpc_tier *tier)
{
    while (tier->n_threads < FSDPC_TIER_THREADS) {
        FSDPC_TRY(
            fsdpc_thread_start("fsdpc-tier", tier_main, tier, &tier->threads[tier->n_threads]));
        tier->n_threads++;
    }
    return FSDPC_OK;
}

static void free_ring(fsdpc_tier *tier)
{
    size_t bytes = FSDPC_TIER_BUFFERS * tier->buffer_bytes;
    if (tier->ring) {
        munmap(tier->ring, bytes);
        fsdpc_mem_count(tier->mem, FSDPC_MEM_STAGING, -(int64_t)bytes);
    }
    tier->ring = NULL;
    tier->buffer_bytes = 0;
}

static void stop(fsdpc_tier *tier)
{
    pthread_mutex_lock(&tier->lock);
    tier->ending = true;
    pthread_cond_broadcast(&tier->work);
    pthread_mutex_unlock(&tier->lock);
    for (int i = 0; i < tier->n_threads; i++)
        pthread_join(tier->threads[i], NULL);
    free_ring(tier);
}

/* ---- Waiting; requires the lock ---- */

static fsdpc_status await(fsdpc_tier *tier, const struct timespec *until)
{
    if (pthread_cond_timedwait(&tier->done, &tier->lock, until) != 0)
        return fsdpc_fail(FSDPC_ERR_TIMEOUT, "the disk of '%s' has not answered for %d s",
                          tier->path, (int)DEADLINE_S);
    return FSDPC_OK;
}

static struct timespec deadline(void)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += DEADLINE_S;
    return until;
}

static bool busy(fsdpc_tier *tier)
{
    return in_state(tier, FSDPC_BUFFER_WRITING) || in_state(tier, FSDPC_BUFFER_READING) ||
           (tier->status == FSDPC_OK && in_state(tier, FSDPC_BUFFER_CHANGED));
}

static fsdpc_status settle(fsdpc_tier *tier)
{
    const struct timespec until = deadline();
    while (busy(tier))
        FSDPC_TRY(await(tier, &until));
    return fsdpc_tier_failure(tier);
}

/* ---- A pass ---- */

fsdpc_status fsdpc_tier_check_process(fsdpc_tier *tier)
{
    if (tier->pid == getpid())
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "a forked child reads what its parent's optimizer is stepping, in '%s': read "
                      "it in the parent, before the fork",
                      tier->path);
}

fsdpc_status fsdpc_pass_begin(fsdpc_tier *tier, fsdpc_pass_hook *hook)
{
    if (tier->hook)
        FSDPC_TRY(tier->hook->end(tier->hook));
    tier->hook = hook;
    tier->n_entries = tier->next_read = tier->row = 0;
    tier->passes++;
    return fsdpc_tier_health(tier);
}

fsdpc_status fsdpc_pass_add(fsdpc_tier *tier, fsdpc_extent *const *extents, int n)
{
    size_t rows = extents[0]->n_chunks, more = tier->n_entries + rows * (size_t)n;
    if (n > FSDPC_TIER_COLUMNS)
        return fsdpc_fail(FSDPC_ERR_INTERNAL, "a row of %d chunks; at most %d", n,
                          (int)FSDPC_TIER_COLUMNS);
    if (more > tier->entries_room) {
        fsdpc_tier_entry *grown = realloc(tier->entries, 2 * more * sizeof *grown);
        if (!grown)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a pass over %zu chunks", more);
        tier->entries = grown;
        tier->entries_room = 2 * more;
    }
    for (int c = 0; c < n; c++) {
        if (extents[c]->numel != extents[0]->numel || extents[c]->kept != extents[0]->kept)
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "%s and %s are walked through together",
                              extents[0]->what, extents[c]->what);
        extents[c]->first_entry = tier->n_entries + (size_t)c;
        extents[c]->stride = (size_t)n;
        extents[c]->pass = tier->passes;
    }
    for (size_t row = 0; row < rows; row++) {
        size_t first = tier->n_entries;
        for (int c = 0; c < n; c++)
            tier->entries[tier->n_entries++] = (fsdpc_tier_entry){extents[c], row, first};
    }
    return FSDPC_OK;
}

static fsdpc_status make_ring(fsdpc_tier *tier)
{
    size_t bytes = 0;
    for (size_t i = 0; i < tier->n_entries; i++)
        bytes = fsdpc_max_size(bytes, fsdpc_chunk_bytes(tier->entries[i].extent, 0));
    if (bytes <= tier->buffer_bytes)
        return FSDPC_OK;
    free_ring(tier);
    size_t all = FSDPC_TIER_BUFFERS * bytes;
    void *ring = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring == MAP_FAILED)
        return fsdpc_fail_errno("no memory for a ring of %zu bytes", all);
    fsdpc_mem_count(tier->mem, FSDPC_MEM_STAGING, (int64_t)all);
    tier->ring = ring;
    tier->buffer_bytes = bytes;
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++)
        tier->buffers[i].data = tier->ring + (size_t)i * bytes;
    return FSDPC_OK;
}

fsdpc_status fsdpc_pass_start(fsdpc_tier *tier)
{
    if (tier->n_entries == 0)
        return FSDPC_OK;
    tier->stop = stop;
    FSDPC_TRY(make_ring(tier));
    FSDPC_TRY(start_threads(tier));
    pthread_mutex_lock(&tier->lock);
    tier->started = true;
    pthread_cond_broadcast(&tier->work);
    pthread_mutex_unlock(&tier->lock);
    return FSDPC_OK;
}

/* Marks the rows before this one as finished. */
static void pass_rows(fsdpc_tier *tier, size_t row)
{
    tier->row = row;
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++) {
        fsdpc_tier_buffer *buffer = &tier->buffers[i];
        if (buffer->entry >= row)
            continue;
        if (buffer->state == FSDPC_BUFFER_USED && !buffer->extent->read_only)
            buffer->state = FSDPC_BUFFER_CHANGED;
        else if (buffer->state == FSDPC_BUFFER_READY || buffer->state == FSDPC_BUFFER_USED)
            buffer->state = FSDPC_BUFFER_FREE;
    }
    pthread_cond_broadcast(&tier->work);
}

static fsdpc_tier_buffer *holds(fsdpc_tier *tier, size_t entry)
{
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++) {
        fsdpc_tier_buffer *buffer = &tier->buffers[i];
        if (buffer->entry == entry &&
            (buffer->state == FSDPC_BUFFER_READY || buffer->state == FSDPC_BUFFER_USED))
            return buffer;
    }
    return NULL;
}

static fsdpc_status take(fsdpc_tier *tier, size_t entry, fsdpc_tier_buffer **out)
{
    const struct timespec until = deadline();
    size_t row = tier->entries[entry].row;
    if (row > tier->row)
        pass_rows(tier, row);
    while (!(*out = holds(tier, entry))) {
        FSDPC_TRY(fsdpc_tier_failure(tier));
        FSDPC_TRY(await(tier, &until));
    }
    FSDPC_TRY(fsdpc_tier_failure(tier));
    (*out)->state = FSDPC_BUFFER_USED;
    return FSDPC_OK;
}

fsdpc_status fsdpc_pass_at(fsdpc_extent *extent, size_t at, void **out, size_t *numel_out)
{
    fsdpc_tier *tier = extent->tier;
    if (at < extent->kept) {
        *out = extent->memory + at * extent->element;
        *numel_out = extent->kept - at;
        return FSDPC_OK;
    }
    size_t chunk = (at - extent->kept) / tier->chunk;
    size_t within = (at - extent->kept) % tier->chunk;
    size_t entry = extent->first_entry + chunk * extent->stride;
    fsdpc_tier_buffer *buffer = NULL;
    pthread_mutex_lock(&tier->lock);
    fsdpc_status status =
        extent->pass == tier->passes && tier->started && tier->entries[entry].row >= tier->row
            ? take(tier, entry, &buffer)
            : fsdpc_fail(FSDPC_ERR_INTERNAL, "element %zu of %s is not ahead in this pass", at,
                         extent->what);
    pthread_mutex_unlock(&tier->lock);
    FSDPC_TRY(status);
    *out = buffer->data + within * extent->element;
    *numel_out = fsdpc_chunk_numel(extent, chunk) - within;
    return FSDPC_OK;
}

static bool is_read(const fsdpc_tier *tier, const fsdpc_extent *extent)
{
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++)
        if (tier->buffers[i].state == FSDPC_BUFFER_READING && tier->buffers[i].extent == extent)
            return true;
    return false;
}

fsdpc_status fsdpc_pass_leave(fsdpc_extent *extent)
{
    fsdpc_tier *tier = extent->tier;
    const struct timespec until = deadline();
    fsdpc_status status = FSDPC_OK;
    pthread_mutex_lock(&tier->lock);
    if (extent->pass == tier->passes && tier->started && extent->n_chunks > 0) {
        size_t last = extent->first_entry + (extent->n_chunks - 1) * extent->stride;
        size_t next = tier->entries[last].row + extent->stride;
        if (next > tier->row)
            pass_rows(tier, next);
    }
    while (status == FSDPC_OK && is_read(tier, extent))
        status = await(tier, &until);
    pthread_mutex_unlock(&tier->lock);
    return status;
}

fsdpc_status fsdpc_pass_end(fsdpc_tier *tier)
{
    pthread_mutex_lock(&tier->lock);
    pass_rows(tier, tier->n_entries);
    tier->started = false;
    tier->hook = NULL;
    fsdpc_status status = settle(tier);
    for (int i = 0; i < FSDPC_TIER_BUFFERS; i++)
        tier->buffers[i].state = FSDPC_BUFFER_FREE; /* after a failure some are not free */
    pthread_mutex_unlock(&tier->lock);
    return status;
}
