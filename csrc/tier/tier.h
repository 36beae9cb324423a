/* Arrays in a file, and passes that visit them in order.
 *
 * A rank whose states are larger than its memory keeps them on a disk. A tier is one unnamed file
 * per rank, so it leaves no trace, however the process ends. An extent is an array of elements,
 * initially zero, that can be accessed in two ways:
 *
 *     memory   for any code, at a fixed address: a mapping of the file, whose pages the kernel
 *              brings and takes away
 *     a pass   for code that walks through extents in order: a ring of buffers holds data read
 *              ahead of its use, past the page cache, and data still to be written behind it
 *
 * In both cases, the first `kept` elements of an extent are in ordinary memory.
 *
 * Rows. A pass visits extents of equal length together, such as one optimizer's states; a row is
 * one chunk of each. Chunks are counted from the first element that is not kept.
 *
 * Checksums. The CRC-32C of each chunk written by a pass stays in memory. A pass verifies this
 * checksum when it reads the chunk, as does fsdpc_extent_check. If bytes have changed on the disk,
 * the error names the file, the array and the chunk. Code that writes through `memory` must
 * therefore announce the write first. The data then has no checksum until a pass writes it or the
 * caller seals the extent.
 *
 * Errors. The first read or write that fails puts the tier into a failed state, and all later calls
 * return that error.
 *
 * Threads. Only one thread may use a tier, but the tier has its own threads that read and write for
 * a pass.
 */
#ifndef FSDPC_TIER_TIER_H
#define FSDPC_TIER_TIER_H

#include "base/fs.h"
#include "base/mem.h"

typedef struct fsdpc_tier fsdpc_tier;

enum {
    FSDPC_TIER_CHUNK = 512 * 1024, /* elements per chunk, by default */
    FSDPC_TIER_BUFFERS = 12,       /* per ring: a row in use, rows ahead, chunks behind */
    FSDPC_TIER_COLUMNS = 5,        /* maximum per row */
};

typedef struct fsdpc_tier_config {
    const char *folder; /* on a disk of this host */
    fsdpc_mem *mem;     /* borrowed; counts kept memory and the ring */
    fsdpc_fs fs;        /* the tier's threads call its hook too */
    int rank;           /* for messages */
    size_t chunk;       /* elements, a multiple of 4096; 0: FSDPC_TIER_CHUNK */
} fsdpc_tier_config;

/* Fails if the file cannot be created, or would be in memory or on another host. */
fsdpc_status fsdpc_tier_open(const fsdpc_tier_config *config, fsdpc_tier **out);
fsdpc_tier *fsdpc_tier_acquire(fsdpc_tier *tier);
void fsdpc_tier_release(fsdpc_tier *tier);           /* extents hold a reference too; NULL is
                                                      * fine */
const char *fsdpc_tier_path(const fsdpc_tier *tier); /* for messages */

/* Creates another file of whole pages in the same folder, for memory that ranks share; the caller
 * owns it. */
fsdpc_status fsdpc_tier_make_file(fsdpc_tier *tier, size_t bytes, int *fd_out);
void fsdpc_tier_count_file(fsdpc_tier *tier, int64_t bytes); /* created elsewhere, or gone */
void fsdpc_tier_count_moved(fsdpc_tier *tier, bool read, uint64_t bytes); /* in such a file */

typedef struct fsdpc_tier_stats {
    uint64_t file_bytes; /* reserved on the disk now */
    uint64_t read_bytes, written_bytes;
    bool direct; /* reads and writes bypass the page cache */
} fsdpc_tier_stats;

fsdpc_tier_stats fsdpc_tier_stats_of(fsdpc_tier *tier);

/* ---- Extents ---- */

typedef struct fsdpc_tier_chunk fsdpc_tier_chunk;

typedef struct fsdpc_extent {
    fsdpc_tier *tier;
    unsigned char *memory;
    size_t numel, element, kept; /* elements, bytes per element, elements in memory */
    bool read_only;              /* owned by the user: a pass only reads it, and other code writes
                                  * it */
    /* tier.c and pass.c: */
    fsdpc_mem_kind kind;
    const char *what;
    char *const *unit;
    uint64_t offset; /* file offset of the first element that is not kept */
    size_t n_chunks, mapped_bytes, file_bytes;
    fsdpc_tier_chunk *chunks;
    size_t first_entry, stride; /* in the pass: entry of chunk 0; entries per row */
    uint64_t pass;              /* the pass that it is in */
} fsdpc_extent;

/* Returns how many elements stay in memory if the given fraction (0 to 1) is to be on disk. */
size_t fsdpc_tier_kept(size_t numel, double on_disk);
/* Return the number of bytes that an array needs in the file and in the ring; the largest array
 * determines the ring's size. */
size_t fsdpc_tier_file_bytes(size_t numel, size_t element, double on_disk);
size_t fsdpc_tier_ring_bytes(size_t numel, size_t element, double on_disk);

/* Counts kept memory as `kind`. Messages use `what` and the unit's name; both must outlive the
 * extent, and the name may change outside passes. NULL: no unit. Fails if the disk is full.
 */
fsdpc_status fsdpc_extent_create(fsdpc_tier *tier, const char *what, char *const *unit,
                                 fsdpc_mem_kind kind, size_t numel, size_t element, double on_disk,
                                 fsdpc_extent **out);
void fsdpc_extent_destroy(fsdpc_extent *extent); /* NULL is fine */

/* Checks the chunks that have not been checked since they were written; call it outside a pass,
 * before reading these elements through `memory`. */
fsdpc_status fsdpc_extent_check(fsdpc_extent *extent, size_t first, size_t numel);
/* Performs the same checks before these elements are written through `memory`; the next pass
 * accepts the new contents. */
fsdpc_status fsdpc_extent_written(fsdpc_extent *extent, size_t first, size_t numel);
/* Announces a write of all elements, without checking any. */
void fsdpc_extent_forget(fsdpc_extent *extent);
/* Computes checksums of the current contents; call it after writing all elements through
 * `memory`. */
void fsdpc_extent_seal(fsdpc_extent *extent);

/* ---- A pass ---- */

/* A pass may stay open while other code runs. The next pass first calls `end`, which ends the open
 * pass with fsdpc_pass_end. */
typedef struct fsdpc_pass_hook fsdpc_pass_hook;
struct fsdpc_pass_hook {
    fsdpc_status (*end)(fsdpc_pass_hook *hook);
};

fsdpc_status fsdpc_pass_begin(fsdpc_tier *tier, fsdpc_pass_hook *hook); /* NULL: the caller ends the
                                                                         * pass before another
                                                                         * begins */
/* Appends the rows of these extents, which must have equal length; each extent is added at most
 * once per pass. */
fsdpc_status fsdpc_pass_add(fsdpc_tier *tier, fsdpc_extent *const *extents, int n);
/* Starts reading the added extents ahead of their use. */
fsdpc_status fsdpc_pass_start(fsdpc_tier *tier);
/* Gives write access to element `at`: returns its address and the number of contiguous elements
 * from there. The address is valid until the caller requests another row or the pass ends. Rows
 * must be accessed in order, but some may be skipped. */
fsdpc_status fsdpc_pass_at(fsdpc_extent *extent, size_t at, void **out, size_t *numel_out);
/* Drops the remainder of the array, and of earlier rows, from the pass; call it before using the
 * array through `memory` while the pass stays open. */
fsdpc_status fsdpc_pass_leave(fsdpc_extent *extent);
/* Writes the remaining changed chunks back to the file and ends the pass. Fails if anything in the
 * pass failed. */
fsdpc_status fsdpc_pass_end(fsdpc_tier *tier);
/* Fails in a forked child, because the threads and the file belong to the parent. */
fsdpc_status fsdpc_tier_check_process(fsdpc_tier *tier);

#endif
