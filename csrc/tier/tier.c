/* The file, and its extents.
 *
 * Each extent occupies a range at the end of the file, which it reserves at once, so that a full
 * disk is detected before any computation. A destroyed extent releases its blocks and leaves a
 * hole; offsets are never reused, because a file offers more than enough of them.
 *
 * An extent occupies one contiguous address range: anonymous memory, followed by a shared mapping
 * of its part of the file. The kernel keeps the two access paths coherent: a direct read finds data
 * written through the mapping, and a direct write drops pages that it makes stale.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/size.h"
#include "tier/tier_internal.h"

/* ---- The file ---- */

/* Type numbers, as in statfs(2), of file systems that are not on a local disk. */
static const struct {
    long magic;
    const char *name;
    bool memory;
} no_disks[] = {
    {0x01021994, "tmpfs", true},
    {(long)0x858458f6, "ramfs", true},
    {(long)0x958458f6, "hugetlbfs", true},
    {0x6969, "NFS", false},
    {0x517b, "SMB", false},
    {(long)0xff534d42, "CIFS", false},
    {(long)0xfe534d42, "SMB2", false},
    {0x00c36400, "Ceph", false},
    {0x0bd00bd0, "Lustre", false},
    {0x47504653, "GPFS", false},
    {0x19830326, "BeeGFS", false},
    {0x01021997, "9p", false},
};

static fsdpc_status check_folder(const char *folder)
{
    struct statfs info;
    if (statfs(folder, &info) != 0)
        return fsdpc_fail_errno("cannot offload to the folder '%s'", folder);
    for (size_t i = 0; i < sizeof no_disks / sizeof *no_disks; i++) {
        if ((uint32_t)info.f_type != (uint32_t)no_disks[i].magic)
            continue;
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "offload to '%s': its file system is %s, whose files lie %s; name a "
                          "folder on a disk of this host",
                          folder, no_disks[i].name,
                          no_disks[i].memory ? "in memory" : "on another host");
    }
    return FSDPC_OK;
}

static void close_tier(fsdpc_tier *tier)
{
    if (tier->stop && tier->pid == getpid())
        tier->stop(tier);
    if (tier->fd >= 0)
        close(tier->fd);
    pthread_cond_destroy(&tier->work);
    pthread_cond_destroy(&tier->done);
    pthread_mutex_destroy(&tier->lock);
    free(tier->entries);
    free(tier);
}

fsdpc_status fsdpc_tier_open(const fsdpc_tier_config *config, fsdpc_tier **out)
{
    if (config->chunk % FSDPC_TIER_PAGE)
        return fsdpc_fail(FSDPC_ERR_VALUE, "chunks of %zu elements: a multiple of %d",
                          config->chunk, (int)FSDPC_TIER_PAGE);
    FSDPC_TRY(check_folder(config->folder));
    fsdpc_tier *tier = calloc(1, sizeof *tier);
    if (!tier)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a tier");
    tier->refs = 1;
    tier->mem = config->mem;
    tier->fs = config->fs;
    tier->rank = config->rank;
    tier->chunk = config->chunk ? config->chunk : FSDPC_TIER_CHUNK;
    tier->pid = getpid();
    tier->fd = -1;
    snprintf(tier->folder, sizeof tier->folder, "%s", config->folder);
    snprintf(tier->path, sizeof tier->path, "%.400s/(offloaded, rank %d)", config->folder,
             config->rank);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&tier->lock, NULL);
    pthread_cond_init(&tier->work, NULL);
    pthread_cond_init(&tier->done, &clock);
    pthread_condattr_destroy(&clock);
    fsdpc_status status =
        fsdpc_fs_temporary(&tier->fs, config->folder, &tier->fd, &tier->stats.direct);
    if (status != FSDPC_OK)
        close_tier(tier);
    else
        *out = tier;
    return status;
}

fsdpc_tier *fsdpc_tier_acquire(fsdpc_tier *tier)
{
    atomic_fetch_add_explicit(&tier->refs, 1, memory_order_relaxed);
    return tier;
}

const char *fsdpc_tier_path(const fsdpc_tier *tier)
{
    return tier->path;
}

void fsdpc_tier_release(fsdpc_tier *tier)
{
    /* acq_rel: the last holder sees all of the others' writes. */
    if (tier && atomic_fetch_sub_explicit(&tier->refs, 1, memory_order_acq_rel) == 1)
        close_tier(tier);
}

fsdpc_tier_stats fsdpc_tier_stats_of(fsdpc_tier *tier)
{
    pthread_mutex_lock(&tier->lock);
    fsdpc_tier_stats stats = tier->stats;
    pthread_mutex_unlock(&tier->lock);
    return stats;
}

void fsdpc_tier_count_file(fsdpc_tier *tier, int64_t bytes)
{
    pthread_mutex_lock(&tier->lock);
    tier->stats.file_bytes += (uint64_t)bytes;
    pthread_mutex_unlock(&tier->lock);
}

void fsdpc_tier_count_moved(fsdpc_tier *tier, bool read, uint64_t bytes)
{
    pthread_mutex_lock(&tier->lock);
    *(read ? &tier->stats.read_bytes : &tier->stats.written_bytes) += bytes;
    pthread_mutex_unlock(&tier->lock);
}

fsdpc_status fsdpc_tier_make_file(fsdpc_tier *tier, size_t bytes, int *fd_out)
{
    bool direct;
    FSDPC_TRY(fsdpc_fs_temporary(&tier->fs, tier->folder, fd_out, &direct));
    fsdpc_status status = fsdpc_fs_reserve(&tier->fs, *fd_out, tier->path, 0, bytes);
    if (status != FSDPC_OK)
        close(*fd_out);
    return status;
}

/* ---- Sizes ---- */

size_t fsdpc_tier_kept(size_t numel, double on_disk)
{
    /* This gives whole pages for every element size. */
    size_t kept = (size_t)((double)numel * (1 - on_disk)) / FSDPC_TIER_PAGE * FSDPC_TIER_PAGE;
    return on_disk <= 0 ? numel : fsdpc_min_size(kept, numel);
}

size_t fsdpc_tier_file_bytes(size_t numel, size_t element, double on_disk)
{
    return fsdpc_round_up((numel - fsdpc_tier_kept(numel, on_disk)) * element, FSDPC_TIER_PAGE);
}

size_t fsdpc_tier_ring_bytes(size_t numel, size_t element, double on_disk)
{
    size_t chunk = fsdpc_min_size(numel - fsdpc_tier_kept(numel, on_disk), FSDPC_TIER_CHUNK);
    return FSDPC_TIER_BUFFERS * fsdpc_round_up(chunk * element, FSDPC_TIER_PAGE);
}

size_t fsdpc_chunk_numel(const fsdpc_extent *extent, size_t chunk)
{
    size_t first = extent->kept + chunk * extent->tier->chunk;
    return fsdpc_min_size(extent->numel - first, extent->tier->chunk);
}

size_t fsdpc_chunk_bytes(const fsdpc_extent *extent, size_t chunk)
{
    return fsdpc_round_up(fsdpc_chunk_numel(extent, chunk) * extent->element, FSDPC_TIER_PAGE);
}

uint64_t fsdpc_chunk_offset(const fsdpc_extent *extent, size_t chunk)
{
    return extent->offset + chunk * (uint64_t)extent->tier->chunk * extent->element;
}

uint32_t fsdpc_chunk_crc(const fsdpc_extent *extent, size_t chunk, const void *data)
{
    return fsdpc_crc32c(0, data, fsdpc_chunk_numel(extent, chunk) * extent->element);
}

/* ---- Extents ---- */

fsdpc_extent_name fsdpc_extent_name_of(const fsdpc_extent *extent)
{
    fsdpc_extent_name name;
    if (extent->unit)
        snprintf(name.text, sizeof name.text, "%s of unit '%s'", extent->what, *extent->unit);
    else
        snprintf(name.text, sizeof name.text, "%s", extent->what);
    return name;
}

static size_t kept_bytes(const fsdpc_extent *extent)
{
    return extent->kept * extent->element;
}

static fsdpc_status map_extent(fsdpc_extent *extent)
{
    fsdpc_tier *tier = extent->tier;
    size_t on_disk = extent->file_bytes;
    extent->mapped_bytes = fsdpc_round_up(kept_bytes(extent) + on_disk, FSDPC_TIER_PAGE);
    extent->offset = tier->end_bytes;
    if (on_disk > 0)
        FSDPC_TRY(fsdpc_fs_reserve(&tier->fs, tier->fd, tier->path, extent->offset, on_disk));
    tier->end_bytes += on_disk;
    fsdpc_tier_count_file(tier, (int64_t)on_disk);
    void *memory = mmap(NULL, fsdpc_max_size(extent->mapped_bytes, FSDPC_TIER_PAGE),
                        PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return fsdpc_fail_errno("no addresses for %zu bytes of %s", extent->mapped_bytes,
                                fsdpc_extent_name_of(extent).text);
    extent->memory = memory;
    if (on_disk > 0 && mmap(extent->memory + kept_bytes(extent), on_disk, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_FIXED, tier->fd, (off_t)extent->offset) == MAP_FAILED)
        return fsdpc_fail_errno("cannot map %zu bytes of %s in '%s'", on_disk,
                                fsdpc_extent_name_of(extent).text, tier->path);
    return FSDPC_OK;
}

fsdpc_status fsdpc_extent_create(fsdpc_tier *tier, const char *what, char *const *unit,
                                 fsdpc_mem_kind kind, size_t numel, size_t element, double on_disk,
                                 fsdpc_extent **out)
{
    fsdpc_extent *extent = calloc(1, sizeof *extent);
    if (!extent)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %s", what);
    extent->tier = fsdpc_tier_acquire(tier);
    extent->kind = kind;
    extent->numel = numel;
    extent->element = element;
    extent->kept = fsdpc_tier_kept(numel, on_disk);
    extent->n_chunks = (numel - extent->kept + extent->tier->chunk - 1) / extent->tier->chunk;
    extent->file_bytes = fsdpc_tier_file_bytes(numel, element, on_disk);
    extent->what = what;
    extent->unit = unit;
    extent->chunks = calloc(extent->n_chunks + 1, sizeof *extent->chunks);
    fsdpc_status status =
        extent->chunks ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for %s", what);
    if (status == FSDPC_OK)
        status = map_extent(extent);
    if (status != FSDPC_OK) {
        extent->kept = 0; /* kept memory was not counted yet */
        fsdpc_extent_destroy(extent);
        return status;
    }
    fsdpc_mem_count(tier->mem, kind, (int64_t)kept_bytes(extent));
    *out = extent;
    return FSDPC_OK;
}

void fsdpc_extent_destroy(fsdpc_extent *extent)
{
    if (!extent)
        return;
    fsdpc_tier *tier = extent->tier;
    if (extent->memory) {
        munmap(extent->memory, fsdpc_max_size(extent->mapped_bytes, FSDPC_TIER_PAGE));
        fsdpc_mem_count(tier->mem, extent->kind, -(int64_t)kept_bytes(extent));
        if (tier->pid == getpid())
            fsdpc_fs_punch(tier->fd, extent->offset, extent->file_bytes);
        fsdpc_tier_count_file(tier, -(int64_t)extent->file_bytes);
    }
    free(extent->chunks);
    free(extent);
    fsdpc_tier_release(tier);
}

fsdpc_status fsdpc_chunk_read(fsdpc_extent *extent, size_t chunk, void *to)
{
    fsdpc_tier_chunk *own = &extent->chunks[chunk];
    fsdpc_tier *tier = extent->tier;
    size_t bytes = fsdpc_chunk_bytes(extent, chunk);
    if (own->known == FSDPC_TIER_ZEROS) {
        memset(to, 0, bytes);
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_fs_pread(&tier->fs, tier->fd, tier->path, to, bytes,
                             fsdpc_chunk_offset(extent, chunk)));
    if (own->known == FSDPC_TIER_UNKNOWN)
        return FSDPC_OK;
    uint32_t crc = fsdpc_chunk_crc(extent, chunk, to);
    if (crc != own->crc)
        return fsdpc_fail(FSDPC_ERR_OS,
                          "chunk %zu of %s, in '%s', is not what was written there: CRC-32C %08x, "
                          "it was %08x; the disk is damaged, or something wrote to it",
                          chunk, fsdpc_extent_name_of(extent).text, tier->path, crc, own->crc);
    own->known = FSDPC_TIER_LOOKED;
    return FSDPC_OK;
}

fsdpc_status fsdpc_tier_health(fsdpc_tier *tier)
{
    pthread_mutex_lock(&tier->lock);
    fsdpc_status status = fsdpc_tier_failure(tier);
    pthread_mutex_unlock(&tier->lock);
    return status;
}

/* Finds the range of chunks that contain these elements: [*chunk_out, the return value). */
static size_t chunks_of(const fsdpc_extent *extent, size_t first, size_t numel, size_t *chunk_out)
{
    size_t end = first + numel;
    if (numel == 0 || end <= extent->kept)
        return *chunk_out = 0;
    *chunk_out = (fsdpc_max_size(first, extent->kept) - extent->kept) / extent->tier->chunk;
    return (end - extent->kept + extent->tier->chunk - 1) / extent->tier->chunk;
}

fsdpc_status fsdpc_extent_check(fsdpc_extent *extent, size_t first, size_t numel)
{
    FSDPC_TRY(fsdpc_tier_health(extent->tier));
    void *scratch = NULL;
    fsdpc_status status = FSDPC_OK;
    size_t chunk, end = chunks_of(extent, first, numel, &chunk);
    for (; status == FSDPC_OK && chunk < end; chunk++) {
        if (extent->chunks[chunk].known != FSDPC_TIER_WRITTEN)
            continue;
        if (!scratch && posix_memalign(&scratch, FSDPC_TIER_PAGE, fsdpc_chunk_bytes(extent, chunk)))
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to check %s",
                              fsdpc_extent_name_of(extent).text);
        status = fsdpc_chunk_read(extent, chunk, scratch);
    }
    free(scratch);
    return status;
}

fsdpc_status fsdpc_extent_written(fsdpc_extent *extent, size_t first, size_t numel)
{
    FSDPC_TRY(fsdpc_extent_check(extent, first, numel)); /* other elements of a chunk keep their
                                                          * values */
    size_t chunk, end = chunks_of(extent, first, numel, &chunk);
    for (; chunk < end; chunk++)
        extent->chunks[chunk].known = FSDPC_TIER_UNKNOWN;
    return FSDPC_OK;
}

void fsdpc_extent_forget(fsdpc_extent *extent)
{
    for (size_t chunk = 0; chunk < extent->n_chunks; chunk++)
        extent->chunks[chunk].known = FSDPC_TIER_UNKNOWN;
}

void fsdpc_extent_seal(fsdpc_extent *extent)
{
    for (size_t chunk = 0; chunk < extent->n_chunks; chunk++) {
        size_t first = extent->kept + chunk * extent->tier->chunk;
        uint32_t crc = fsdpc_chunk_crc(extent, chunk, extent->memory + first * extent->element);
        extent->chunks[chunk] = (fsdpc_tier_chunk){crc, FSDPC_TIER_WRITTEN};
    }
}
