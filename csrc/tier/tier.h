/* Arrays in a file, and passes that walk through them in order.
 *
 * A rank whose states are larger than its memory keeps them on a disk.  A tier is one unnamed file
 * of this rank, so that no trace of it is left however the process ends.  An extent is an array of
 * elements, initially zero, with two ways of access:
 *
 *     memory   for any code, at a fixed address: a mapping of the file, whose pages the kernel
 *              brings and takes away
 *     a pass   for code that walks through extents in order: a ring of buffers holds data read
 *              ahead of its use, past the page cache, and data still to be written behind it
 *
 * Both ways find the first `kept` elements of an extent in ordinary memory.
 *
 * Rows.  A pass walks through extents of equal length together, say the states of one optimizer: a
 * row is one chunk of each.  Chunks count from the first element that is not kept.
 *
 * Checksums.  The CRC-32C of each chunk that a pass wrote stays in memory.  Reading the chunk in a
 * pass compares it, and so does fsdpc_extent_check.  Bytes that changed on the disk are an error
 * that names file, array and chunk.  Code that writes through `memory` must therefore announce it
 * first.  Such data has no checksum until a pass writes it or the writer seals it.
 *
 * Errors.  The first read or write that fails is the tier's failure, and all later calls return it.
 *
 * Threads.  One thread uses a tier; the tier has its own threads that read and write for a pass.
 */
#ifndef FSDPC_TIER_TIER_H
#define FSDPC_TIER_TIER_H

#include "base/fs.h"
#include "base/mem.h"

typedef struct fsdpc_tier fsdpc_tier;

enum {
    FSDPC_TIER_CHUNK = 512 * 1024, /* elements per chunk, by default */
    FSDPC_TIER_BUFFERS = 12,       /* per ring: a row in use, rows ahead, chunks behind */
    FSDPC_TIER_COLUMNS = 5,        /* per row, at most */
};

typedef struct fsdpc_tier_config {
    const char *folder; /* on a disk of this host */
    fsdpc_mem *mem;     /* borrowed; counts kept memory and the ring */
    fsdpc_fs fs;        /* the tier's threads call its hook too */
    int rank;           /* for messages */
    size_t chunk;       /* elements, a multiple of 4096; 0: FSDPC_TIER_CHUNK */
} fsdpc_tier_config;

/* An error if the file would be in memory or on another host, or cannot be created. */
fsdpc_status fsdpc_tier_open(const fsdpc_tier_config *config, fsdpc_tier **out);
fsdpc_tier *fsdpc_tier_acquire(fsdpc_tier *tier);
void fsdpc_tier_release(fsdpc_tier *tier);           /* extents hold a reference too; NULL is
                                                      * fine */
const char *fsdpc_tier_path(const fsdpc_tier *tier); /* for messages */

/* Creates another file in the same folder, of whole pages, for memory that ranks share; the caller
 * owns it. */
fsdpc_status fsdpc_tier_make_file(fsdpc_tier *tier, size_t bytes, int *fd_out);
void fsdpc_tier_count_file(fsdpc_tier *tier, int64_t bytes); /* created elsewhere, or gone */

typedef struct fsdpc_tier_stats {
    uint64_t file_bytes; /* reserved on the disk now */
    uint64_t read_bytes, written_bytes;
    bool direct; /* bypasses the page cache */
} fsdpc_tier_stats;

fsdpc_tier_stats fsdpc_tier_stats_of(fsdpc_tier *tier);

/* ---- Extents ---- */

typedef struct fsdpc_tier_chunk fsdpc_tier_chunk;

typedef struct fsdpc_extent {
    fsdpc_tier *tier;
    unsigned char *memory;
    size_t numel, element, kept; /* elements, bytes per element, elements in memory */
    bool read_only;              /* the user's: a pass only reads it, and other code writes it */
    /* tier.c and pass.c: */
    fsdpc_mem_kind kind;
    const char *what;
    char *const *unit;
    uint64_t offset; /* file offset of the first element that is not kept */
    size_t n_chunks, mapped_bytes, file_bytes;
    fsdpc_tier_chunk *chunks;
    size_t first_entry, stride; /* in the pass: of chunk 0; of a row */
    uint64_t pass;              /* the pass that it is in */
} fsdpc_extent;

/* How many elements stay in memory if this part of them (0 to 1) is to be on the disk. */
size_t fsdpc_tier_kept(size_t numel, double on_disk);
/* Bytes of the file and of the ring for an array; the ring is as large as its largest array
 * needs. */
size_t fsdpc_tier_file_bytes(size_t numel, size_t element, double on_disk);
size_t fsdpc_tier_ring_bytes(size_t numel, size_t element, double on_disk);

/* Its kept memory is counted as `kind`.  Messages use `what` and the unit's name: both outlive the
 * extent, and the name may change outside of passes.  NULL: no unit.  An error if the disk is full.
 */
fsdpc_status fsdpc_extent_create(fsdpc_tier *tier, const char *what, char *const *unit,
                                 fsdpc_mem_kind kind, size_t numel, size_t element, double on_disk,
                                 fsdpc_extent **out);
void fsdpc_extent_destroy(fsdpc_extent *extent); /* NULL is fine */

/* Call outside of a pass, before reading these elements through `memory`: compares the chunks that
 * were not compared since they were written. */
fsdpc_status fsdpc_extent_check(fsdpc_extent *extent, size_t first, size_t numel);
/* The same before writing them through `memory`: the next pass accepts what it finds. */
fsdpc_status fsdpc_extent_written(fsdpc_extent *extent, size_t first, size_t numel);
/* The same for all elements, without comparing any. */
void fsdpc_extent_forget(fsdpc_extent *extent);
/* After all elements were written through `memory`: gives the current contents checksums again. */
void fsdpc_extent_seal(fsdpc_extent *extent);

/* ---- A pass ---- */

/* A pass may stay open while other code runs.  The next pass to begin first ends it with `end`,
 * which calls fsdpc_pass_end. */
typedef struct fsdpc_pass_hook fsdpc_pass_hook;
struct fsdpc_pass_hook {
    fsdpc_status (*end)(fsdpc_pass_hook *hook);
};

fsdpc_status fsdpc_pass_begin(fsdpc_tier *tier, fsdpc_pass_hook *hook); /* NULL: the caller ends it
                                                                         * before any other */
/* Adds the next rows: all of these extents, of equal length, each at most once per pass. */
fsdpc_status fsdpc_pass_add(fsdpc_tier *tier, fsdpc_extent *const *extents, int n);
/* Starts reading the added extents ahead. */
fsdpc_status fsdpc_pass_start(fsdpc_tier *tier);
/* Gives the address of element `at`, and how many elements are contiguous from there, for writing.
 * Valid until a call for another row, or the end of the pass.  Rows come in order; some may be left
 * out. */
fsdpc_status fsdpc_pass_at(fsdpc_extent *extent, size_t at, void **out, size_t *numel_out);
/* Before using an array through `memory` while the pass stays open: drops the rest of the array,
 * and of earlier rows, from the pass. */
fsdpc_status fsdpc_pass_leave(fsdpc_extent *extent);
/* Writes everything that pass_at gave to the file.  Fails if anything in the pass has failed. */
fsdpc_status fsdpc_pass_end(fsdpc_tier *tier);
/* An error in a forked child: threads and file belong to the parent. */
fsdpc_status fsdpc_tier_check_process(fsdpc_tier *tier);

#endif
