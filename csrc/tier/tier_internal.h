/* Internal definitions that tier.c and pass.c share. */
#ifndef FSDPC_TIER_TIER_INTERNAL_H
#define FSDPC_TIER_TIER_INTERNAL_H

#include "tier/tier.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { FSDPC_TIER_PAGE = 4096, FSDPC_TIER_THREADS = 2 };

typedef enum fsdpc_chunk_state {
    FSDPC_TIER_ZEROS,   /* never written */
    FSDPC_TIER_WRITTEN, /* written by a pass: the checksum is known */
    FSDPC_TIER_LOOKED,  /* the same, and checked since */
    FSDPC_TIER_UNKNOWN, /* written through memory */
} fsdpc_chunk_state;

struct fsdpc_tier_chunk {
    uint32_t crc;
    fsdpc_chunk_state known;
};

typedef enum fsdpc_buffer_state {
    FSDPC_BUFFER_FREE,
    FSDPC_BUFFER_READING,
    FSDPC_BUFFER_READY,
    FSDPC_BUFFER_USED,
    FSDPC_BUFFER_CHANGED, /* to be written */
    FSDPC_BUFFER_WRITING,
} fsdpc_buffer_state;

typedef struct fsdpc_tier_buffer {
    unsigned char *data;
    fsdpc_extent *extent;
    size_t chunk, entry;
    fsdpc_buffer_state state;
} fsdpc_tier_buffer;

typedef struct fsdpc_tier_entry {
    fsdpc_extent *extent;
    size_t chunk, row; /* row: the first entry of its row */
} fsdpc_tier_entry;

struct fsdpc_tier {
    _Atomic int refs;
    fsdpc_mem *mem;
    fsdpc_fs fs;
    int fd, rank;
    size_t chunk;
    pid_t pid;                    /* the creator's: a forked child must not touch the file */
    char folder[4096], path[512]; /* path: for messages, as the file has no name */
    uint64_t end_bytes;

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t work, done;
    pthread_t threads[FSDPC_TIER_THREADS];
    int n_threads;
    bool ending;
    void (*stop)(fsdpc_tier *tier); /* stops the threads, drops unwritten data; NULL: no pass yet */
    fsdpc_tier_stats stats;
    fsdpc_status status; /* the tier's failure, and its text */
    char reason[640];
    unsigned char *ring;
    size_t buffer_bytes;
    fsdpc_tier_buffer buffers[FSDPC_TIER_BUFFERS];
    fsdpc_tier_entry *entries;
    size_t n_entries, entries_room;
    size_t next_read, row; /* the next entry to read; the row in use */
    bool started;
    uint64_t passes;
    fsdpc_pass_hook *hook; /* the open pass's hook; NULL: none open, or it ends by itself */
};

/* Return a chunk's size in elements and in bytes; the last chunk may be smaller than the others.
 * The size in bytes is rounded up, because files are read and written in whole pages. */
size_t fsdpc_chunk_numel(const fsdpc_extent *extent, size_t chunk);
size_t fsdpc_chunk_bytes(const fsdpc_extent *extent, size_t chunk);

/* Returns the file offset of a chunk. */
uint64_t fsdpc_chunk_offset(const fsdpc_extent *extent, size_t chunk);
uint32_t fsdpc_chunk_crc(const fsdpc_extent *extent, size_t chunk, const void *data);

/* An extent's name, for messages. */
typedef struct fsdpc_extent_name {
    char text[192];
} fsdpc_extent_name;

fsdpc_extent_name fsdpc_extent_name_of(const fsdpc_extent *extent);

/* Reads a chunk and verifies its checksum; any thread that owns the chunk may call it. */
fsdpc_status fsdpc_chunk_read(fsdpc_extent *extent, size_t chunk, void *to);

/* Report the tier's failure on the calling thread. Callers of the first must hold the lock. */
static inline fsdpc_status fsdpc_tier_failure(const fsdpc_tier *tier)
{
    return tier->status == FSDPC_OK ? FSDPC_OK : fsdpc_fail(tier->status, "%s", tier->reason);
}
fsdpc_status fsdpc_tier_health(fsdpc_tier *tier);

#endif
