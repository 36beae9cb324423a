/* Sealed memfds, and unnamed files.
 *
 * A memfd has no name in any file system, and disappears with its last descriptor and mapping, no
 * matter how the processes end. Seals forbid resizing, so that no peer can cause a SIGBUS in
 * another's mapping.
 *
 * Reserving memory first checks how much is free, because an fallocate of more than the machine has
 * would trigger the out-of-memory killer before it fails. The check is an estimate (other processes
 * allocate too); fallocate's own error covers what it misses.
 */
#include "comm/shm_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/size.h"
#include "comm/fork_guard.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U /* Linux 6.3; older kernels answer EINVAL */
#endif

enum { PAGE = 4096, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

size_t fsdpc_shm_page_round(size_t bytes)
{
    return bytes > SIZE_MAX - PAGE ? bytes : fsdpc_round_up(bytes ? bytes : 1, PAGE);
}

static bool number_in_file(const char *path, const char *label, uint64_t *out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) {
        size_t skip = strlen(label);
        char *end;
        if (strncmp(line, label, skip) == 0) {
            *out = strtoull(line + skip, &end, 10);
            found = end != line + skip;
        }
    }
    fclose(file);
    return found;
}

/* Returns how many bytes can be reserved now: the machine's free memory, or this control group's if
 * that is lower. A control group counts cached files as used, although they can be reclaimed. */
static uint64_t free_bytes(void)
{
    uint64_t available, swap = 0, limit, used, active = 0, inactive = 0;
    if (!number_in_file("/proc/meminfo", "MemAvailable:", &available))
        return UINT64_MAX;
    number_in_file("/proc/meminfo", "SwapFree:", &swap);
    uint64_t bytes = (available + swap) * 1024;
    if (number_in_file("/sys/fs/cgroup/memory.max", "", &limit) &&
        number_in_file("/sys/fs/cgroup/memory.current", "", &used)) {
        number_in_file("/sys/fs/cgroup/memory.stat", "active_file ", &active);
        number_in_file("/sys/fs/cgroup/memory.stat", "inactive_file ", &inactive);
        uint64_t left = limit + active + inactive;
        left = left > used ? left - used : 0;
        bytes = left < bytes ? left : bytes;
    }
    return bytes;
}

static fsdpc_status no_room(const char *name, size_t bytes)
{
    return fsdpc_fail(FSDPC_ERR_NOMEM,
                      "%zu bytes (%.1f MiB) of shared memory for '%s' could not be had, about %.1f "
                      "MiB are free; end other work, or take a smaller model or dtype",
                      bytes, (double)bytes / 0x1p20, name, (double)free_bytes() / 0x1p20);
}

static fsdpc_status open_sealed(const char *name, size_t bytes, int *fd_out)
{
    enum { LOOK = 16 << 20 }; /* checking costs more than reserving a small segment */
    if (bytes > (size_t)INT64_MAX || (bytes > LOOK && bytes > free_bytes()))
        return no_room(name, bytes);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return fsdpc_fail_errno("shared memory '%s' could not be created", name);
    int error;
    do
        error = fallocate(fd, 0, 0, (off_t)bytes) ? errno : 0;
    while (error == EINTR);
    if (error) {
        close(fd);
        if (error == ENOSPC || error == ENOMEM || error == EFBIG)
            return no_room(name, bytes);
        errno = error;
        return fsdpc_fail_errno("%zu bytes of shared memory for '%s'", bytes, name);
    }
    if (fcntl(fd, F_ADD_SEALS, SEALS)) {
        fsdpc_status status = fsdpc_fail_errno("sealing the shared memory '%s'", name);
        close(fd);
        return status;
    }
    *fd_out = fd;
    return FSDPC_OK;
}

static fsdpc_status new_segment(int fd, size_t bytes, fsdpc_shm_segment **out)
{
    fsdpc_shm_segment *segment = calloc(1, sizeof *segment);
    if (!segment)
        return fsdpc_fail_errno("no memory for a segment");
    atomic_init(&segment->refs, 1);
    segment->fd = fd;
    segment->bytes = bytes;
    fsdpc_fork_guard(fd);
    *out = segment;
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_segment_create(const char *name, size_t bytes, bool shared,
                                      fsdpc_shm_segment **out)
{
    bytes = fsdpc_shm_page_round(bytes);
    int fd = -1;
    if (shared)
        FSDPC_TRY(open_sealed(name, bytes, &fd));
    else if (bytes > free_bytes())
        return no_room(name, bytes);
    fsdpc_shm_segment *segment = NULL;
    fsdpc_status status = new_segment(fd, bytes, &segment);
    if (status != FSDPC_OK) {
        if (fd >= 0)
            close(fd);
        return status;
    }
    if (!shared)
        FSDPC_TRY_GOTO(status, fsdpc_shm_segment_map(segment, true), release);
    *out = segment;
    return FSDPC_OK;

release:
    fsdpc_shm_segment_release(segment);
    return status;
}

fsdpc_status fsdpc_shm_segment_adopt(int fd, size_t bytes, fsdpc_shm_segment **out)
{
    bytes = fsdpc_shm_page_round(bytes);
    struct statx about;
    int seals = fcntl(fd, F_GET_SEALS);
    bool file = seals < 0; /* a file cannot be sealed, but it has no name, so others cannot find
                            * it */
    bool fine = statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &about) == 0 &&
                about.stx_size == bytes &&
                (file ? S_ISREG(about.stx_mode) && about.stx_nlink == 0 : (seals & SEALS) == SEALS);
    fsdpc_status status = fine ? new_segment(fd, bytes, out)
                               : fsdpc_fail(FSDPC_ERR_PEER,
                                            "a peer passed memory that is not sealed or not %zu "
                                            "bytes long; do all ranks run the same version?",
                                            bytes);
    if (status == FSDPC_OK)
        (*out)->file = file;
    if (status != FSDPC_OK)
        close(fd);
    return status;
}

fsdpc_status fsdpc_shm_segment_map(fsdpc_shm_segment *segment, bool writable)
{
    if (writable ? segment->writable != NULL : segment->readable != NULL)
        return FSDPC_OK;
    bool plain = segment->fd < 0;
    int flags =
        (segment->file ? 0 : MAP_POPULATE) | (plain ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    void *at = mmap(NULL, segment->bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, flags,
                    segment->fd, 0);
    if (at == MAP_FAILED)
        return fsdpc_fail_errno("mapping %zu bytes of shared memory", segment->bytes);
    madvise(at, segment->bytes, MADV_DONTDUMP);
    if (writable)
        segment->writable = at;
    if (!writable || plain)
        segment->readable = at;
    return FSDPC_OK;
}

void fsdpc_shm_segment_close_fd(fsdpc_shm_segment *segment)
{
    if (segment->fd < 0)
        return; /* plain memory: threads share this struct and must not write to it */
    fsdpc_fork_close(segment->fd);
    segment->fd = -1;
}

fsdpc_shm_segment *fsdpc_shm_segment_retain(fsdpc_shm_segment *segment)
{
    atomic_fetch_add_explicit(&segment->refs, 1, memory_order_relaxed);
    return segment;
}

void fsdpc_shm_segment_release(fsdpc_shm_segment *segment)
{
    /* acq_rel: the last holder sees all of the others' accesses to the memory. */
    if (!segment || atomic_fetch_sub_explicit(&segment->refs, 1, memory_order_acq_rel) != 1)
        return;
    fsdpc_shm_segment_close_fd(segment);
    if (segment->readable && segment->readable != segment->writable)
        munmap((void *)(uintptr_t)segment->readable, segment->bytes);
    if (segment->writable)
        munmap(segment->writable, segment->bytes);
    free(segment);
}
