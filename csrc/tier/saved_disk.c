/* The disk of a store of saved tensors: threads that move chunks of a set to and from a file.
 *
 * Two threads take chunks in order, first of sets that are being read, since a backward waits for
 * those. A chunk goes through a buffer of the thread's own, because the file bypasses the page
 * cache and so needs memory, offsets and sizes of whole pages, which tensors do not have. The
 * buffers are all the memory that the disk uses.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "base/thread.h"
#include "tier/saved_internal.h"

enum { THREADS = FSDPC_TIER_THREADS };

typedef struct saved_disk {
    fsdpc_saved_mover mover; /* first */
    fsdpc_tier *tier;        /* the folder, the hook, the statistics */
    fsdpc_mem *mem;
    int fd;
    int64_t file_bytes;
    unsigned char *buffers;

    pthread_mutex_t lock; /* guards all below, and the io of sets */
    pthread_cond_t work, done;
    pthread_t threads[THREADS];
    int n_threads, n_named; /* n_named: threads that have taken a buffer */
    bool ending;
    fsdpc_saved_set *first; /* of the transfers, in order of their start */
    fsdpc_status status;
    char reason[640];
} saved_disk;

static saved_disk *disk_of(fsdpc_saved_mover *mover)
{
    return (saved_disk *)mover;
}

typedef struct chunk {
    fsdpc_saved_set *set;
    fsdpc_saved_array *array;
    size_t at, bytes;
} chunk;

size_t fsdpc_saved_staging_bytes(void)
{
    return (size_t)THREADS * FSDPC_SAVED_CHUNK;
}

/* ---- The threads ---- */

static bool finished(const fsdpc_saved_set *set)
{
    return set->io.array == set->n && set->io.running == 0;
}

/* Takes the next chunk of a transfer in this direction. */
static bool next_chunk(saved_disk *disk, bool reads, chunk *out)
{
    fsdpc_saved_set *set = disk->first;
    while (set && (set->io.reads != reads || set->io.array == set->n))
        set = set->io.next;
    if (!set)
        return false;
    fsdpc_saved_io *io = &set->io;
    fsdpc_saved_array *array = &set->arrays[io->array];
    *out = (chunk){set, array, io->at, fsdpc_min_size(array->bytes - io->at, FSDPC_SAVED_CHUNK)};
    io->at += out->bytes;
    io->running++;
    if (io->at == array->bytes) {
        io->array++;
        io->at = 0;
    }
    return true;
}

static fsdpc_status write_chunk(saved_disk *disk, const chunk *c, unsigned char *buffer)
{
    size_t whole = fsdpc_round_up(c->bytes, FSDPC_TIER_PAGE);
    memcpy(buffer, c->array->memory + c->at, c->bytes);
    memset(buffer + c->bytes, 0, whole - c->bytes);
    c->array->crcs[c->at / FSDPC_SAVED_CHUNK] = fsdpc_crc32c(0, buffer, c->bytes);
    return fsdpc_fs_pwrite(&disk->tier->fs, disk->fd, disk->tier->path, buffer, whole,
                           c->set->offset + c->array->offset + c->at);
}

static fsdpc_status read_chunk(saved_disk *disk, const chunk *c, unsigned char *buffer)
{
    size_t whole = fsdpc_round_up(c->bytes, FSDPC_TIER_PAGE);
    FSDPC_TRY(fsdpc_fs_pread(&disk->tier->fs, disk->fd, disk->tier->path, buffer, whole,
                             c->set->offset + c->array->offset + c->at));
    uint32_t crc = fsdpc_crc32c(0, buffer, c->bytes);
    uint32_t was = c->array->crcs[c->at / FSDPC_SAVED_CHUNK];
    if (crc != was)
        return fsdpc_fail(FSDPC_ERR_OS,
                          "byte %zu of array %zu, in '%s', is not what was written there: CRC-32C "
                          "%08x, it was %08x; the disk is damaged, or something wrote to it",
                          c->at, (size_t)(c->array - c->set->arrays), disk->tier->path, crc, was);
    memcpy(c->array->memory + c->at, buffer, c->bytes);
    return FSDPC_OK;
}

static void move_chunk(saved_disk *disk, const chunk *c, unsigned char *buffer)
{
    bool reads = c->set->io.reads;
    pthread_mutex_unlock(&disk->lock);
    fsdpc_status status = (reads ? read_chunk : write_chunk)(disk, c, buffer);
    fsdpc_tier_count_moved(disk->tier, reads, fsdpc_round_up(c->bytes, FSDPC_TIER_PAGE));
    pthread_mutex_lock(&disk->lock);
    if (status != FSDPC_OK && disk->status == FSDPC_OK) {
        disk->status = status;
        snprintf(disk->reason, sizeof disk->reason,
                 "rank %d, %s saved tensors of unit '%s': %.400s", disk->tier->rank,
                 reads ? "reading" : "writing", c->set->unit, fsdpc_last_error());
    }
    c->set->io.running--;
    pthread_cond_broadcast(&disk->done);
}

static void *disk_main(void *arg)
{
    saved_disk *disk = arg;
    pthread_mutex_lock(&disk->lock);
    unsigned char *buffer = disk->buffers + (size_t)disk->n_named++ * FSDPC_SAVED_CHUNK;
    while (!disk->ending) {
        chunk c;
        if (disk->status == FSDPC_OK && (next_chunk(disk, true, &c) || next_chunk(disk, false, &c)))
            move_chunk(disk, &c, buffer);
        else
            pthread_cond_wait(&disk->work, &disk->lock);
    }
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

/* ---- Transfers ---- */

static fsdpc_status disk_grow(fsdpc_saved_mover *mover, uint64_t from, uint64_t to)
{
    saved_disk *disk = disk_of(mover);
    FSDPC_TRY(fsdpc_fs_reserve(&disk->tier->fs, disk->fd, disk->tier->path, from, to - from));
    disk->file_bytes = (int64_t)to;
    fsdpc_tier_count_file(disk->tier, (int64_t)(to - from));
    return FSDPC_OK;
}

static void forget(saved_disk *disk, fsdpc_saved_set *set)
{
    fsdpc_saved_set **at = &disk->first;
    while (*at && *at != set)
        at = &(*at)->io.next;
    if (*at)
        *at = set->io.next;
    set->io.active = false;
}

static fsdpc_status failure(const saved_disk *disk)
{
    return disk->status == FSDPC_OK ? FSDPC_OK : fsdpc_fail(disk->status, "%s", disk->reason);
}

static fsdpc_status disk_start(fsdpc_saved_mover *mover, fsdpc_saved_set *set, bool reads)
{
    saved_disk *disk = disk_of(mover);
    FSDPC_TRY(fsdpc_tier_check_process(disk->tier));
    pthread_mutex_lock(&disk->lock);
    set->io = (fsdpc_saved_io){.reads = reads, .active = true};
    fsdpc_saved_set **end = &disk->first;
    while (*end)
        end = &(*end)->io.next;
    *end = set;
    pthread_cond_broadcast(&disk->work);
    fsdpc_status status = failure(disk);
    pthread_mutex_unlock(&disk->lock);
    return status;
}

static fsdpc_status disk_wait(fsdpc_saved_mover *mover, fsdpc_saved_set *set)
{
    saved_disk *disk = disk_of(mover);
    FSDPC_TRY(fsdpc_tier_check_process(disk->tier));
    pthread_mutex_lock(&disk->lock);
    while (disk->status == FSDPC_OK && !finished(set))
        pthread_cond_wait(&disk->done, &disk->lock);
    fsdpc_status status = failure(disk);
    if (status == FSDPC_OK)
        forget(disk, set);
    pthread_mutex_unlock(&disk->lock);
    return status;
}

static void disk_cancel(fsdpc_saved_mover *mover, fsdpc_saved_set *set)
{
    saved_disk *disk = disk_of(mover);
    if (!set->io.active || disk->tier->pid != getpid())
        return;
    pthread_mutex_lock(&disk->lock);
    set->io.array = set->n; /* no thread takes another chunk */
    while (!finished(set))
        pthread_cond_wait(&disk->done, &disk->lock);
    forget(disk, set);
    pthread_mutex_unlock(&disk->lock);
}

/* ---- Opening and closing ---- */

static fsdpc_status start_threads(saved_disk *disk)
{
    size_t bytes = fsdpc_saved_staging_bytes();
    void *buffers;
    if (posix_memalign(&buffers, FSDPC_TIER_PAGE, bytes) != 0)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %zu bytes of buffers", bytes);
    fsdpc_mem_count(disk->mem, FSDPC_MEM_STAGING, (int64_t)bytes);
    disk->buffers = buffers;
    for (; disk->n_threads < THREADS; disk->n_threads++)
        FSDPC_TRY(
            fsdpc_thread_start("fsdpc-saved", disk_main, disk, &disk->threads[disk->n_threads]));
    return FSDPC_OK;
}

static void stop_threads(saved_disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    disk->ending = true;
    pthread_cond_broadcast(&disk->work);
    pthread_mutex_unlock(&disk->lock);
    for (int i = 0; i < disk->n_threads; i++)
        pthread_join(disk->threads[i], NULL);
    pthread_cond_destroy(&disk->work);
    pthread_cond_destroy(&disk->done);
    pthread_mutex_destroy(&disk->lock);
}

static void disk_destroy(fsdpc_saved_mover *mover)
{
    saved_disk *disk = disk_of(mover);
    if (disk->tier->pid == getpid()) /* to a forked child, the threads seem to wait for ever */
        stop_threads(disk);
    if (disk->buffers)
        fsdpc_mem_count(disk->mem, FSDPC_MEM_STAGING, -(int64_t)fsdpc_saved_staging_bytes());
    free(disk->buffers);
    if (disk->fd >= 0)
        close(disk->fd);
    fsdpc_tier_count_file(disk->tier, -disk->file_bytes);
    fsdpc_tier_release(disk->tier);
    free(disk);
}

fsdpc_status fsdpc_saved_disk_create(fsdpc_tier *tier, fsdpc_mem *mem, fsdpc_saved_mover **out)
{
    saved_disk *disk = calloc(1, sizeof *disk);
    if (!disk)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a store of saved tensors");
    disk->mover = (fsdpc_saved_mover){disk_grow, disk_start, disk_wait, disk_cancel, disk_destroy};
    disk->tier = fsdpc_tier_acquire(tier);
    disk->mem = mem;
    disk->fd = -1;
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->work, NULL);
    pthread_cond_init(&disk->done, NULL);
    fsdpc_status status = fsdpc_tier_make_file(tier, 0, &disk->fd);
    if (status == FSDPC_OK)
        status = start_threads(disk);
    if (status != FSDPC_OK)
        disk_destroy(&disk->mover);
    else
        *out = &disk->mover;
    return status;
}
