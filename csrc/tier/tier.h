/* Arrays that lie in a file, and a way through them in order.
 *
 * A rank whose states are larger than its memory keeps them on a disk.  A tier is one file of this
 * rank's, without a name, so that nothing is left of it however the process ends.  An extent is an
 * array of elements, all zeros at first, reached in two ways:
 *
 *     memory   by any code, at a fixed address: a mapping of the file, whose pages the kernel
 *              brings and takes away
 *     a pass   by code that walks through extents in order: a ring of buffers holds what was read
 *              ahead of its use, past the page cache, and what is to be written behind it
 *
 * The first `kept` elements of an extent are ordinary memory, in both.
 *
 * Rows.  Extents of as many elements, say the states of one optimizer, are walked through together:
 * a row is one chunk of each.  Chunks count from the first element that is not kept.
 *
 * Checksums.  The CRC-32C of each chunk that a pass wrote stays in memory, and is compared when a
 * pass reads the chunk, or fsdpc_extent_check does.  Bytes that changed on the disk are an error
 * that names file, array and chunk.  So code that writes through `memory` announces it beforehand;
 * data written so has no checksum until a pass has written it, or the writer seals it.
 *
 * Errors.  The first read or write that fails is the tier's failure, and all later calls return it.
 *
 * Threads.  A tier is used by one thread; those that read and write for a pass are its own.
 */
#ifndef FSDPC_TIER_TIER_H
#define FSDPC_TIER_TIER_H

#include "base/fs.h"
#include "base/mem.h"

typedef struct fsdpc_tier fsdpc_tier;

enum {
    FSDPC_TIER_CHUNK = 512 * 1024, /* elements of a chunk, by default */
    FSDPC_TIER_BUFFERS = 12,       /* of a ring: a row in use, rows ahead, chunks behind */
    FSDPC_TIER_COLUMNS = 5,        /* of a row, at most */
};

typedef struct fsdpc_tier_config {
    const char *folder; /* on a disk of this host */
    fsdpc_mem *mem;     /* borrowed; counts what is kept, and the ring */
    fsdpc_fs fs;        /* its hook is called by threads of the tier too */
    int rank;           /* for messages */
    size_t chunk;       /* elements, a multiple of 4096; 0: FSDPC_TIER_CHUNK */
} fsdpc_tier_config;

/* An error where the file would lie in memory or on another host, or cannot be made. */
fsdpc_status fsdpc_tier_open(const fsdpc_tier_config *config, fsdpc_tier **out);
fsdpc_tier *fsdpc_tier_acquire(fsdpc_tier *tier);
void fsdpc_tier_release(fsdpc_tier *tier);           /* extents hold it too; NULL is fine */
const char *fsdpc_tier_path(const fsdpc_tier *tier); /* for messages */

/* Another file in the same folder, of whole pages, for memory that ranks share; the caller's. */
fsdpc_status fsdpc_tier_make_file(fsdpc_tier *tier, size_t bytes, int *fd_out);
void fsdpc_tier_count_file(fsdpc_tier *tier, int64_t bytes); /* made elsewhere, or gone */

typedef struct fsdpc_tier_stats {
    uint64_t file_bytes; /* reserved on the disk now */
    uint64_t read_bytes, written_bytes;
    bool direct; /* past the page cache */
} fsdpc_tier_stats;

fsdpc_tier_stats fsdpc_tier_stats_of(fsdpc_tier *tier);

/* ---- Extents ---- */

typedef struct fsdpc_tier_chunk fsdpc_tier_chunk;

typedef struct fsdpc_extent {
    fsdpc_tier *tier;
    unsigned char *memory;
    size_t numel, element, kept; /* elements, bytes of one, elements in memory */
    bool read_only;              /* the user's: a pass reads it, and others write it */
    /* tier.c and pass.c: */
    fsdpc_mem_kind kind;
    const char *what;
    char *const *unit;
    uint64_t offset; /* in the file, of the first element that is not kept */
    size_t n_chunks, mapped_bytes, file_bytes;
    fsdpc_tier_chunk *chunks;
    size_t first_entry, stride; /* in the pass: of chunk 0; of a row */
    uint64_t pass;              /* that it is in */
} fsdpc_extent;

/* How many elements stay in memory, where this part of them (0 to 1) is to be on the disk. */
size_t fsdpc_tier_kept(size_t numel, double on_disk);
/* Bytes of the file, and of the ring, for an array; the ring is as large as the largest asks for. */
size_t fsdpc_tier_file_bytes(size_t numel, size_t element, double on_disk);
size_t fsdpc_tier_ring_bytes(size_t numel, size_t element, double on_disk);

/* Its kept memory is counted as `kind`.  Messages say what it is, and of which unit: both outlive
 * it, and the unit's name may change outside of passes; NULL: of none.  An error if the disk has no
 * room.
 */
fsdpc_status fsdpc_extent_create(fsdpc_tier *tier, const char *what, char *const *unit,
                                 fsdpc_mem_kind kind, size_t numel, size_t element, double on_disk,
                                 fsdpc_extent **out);
void fsdpc_extent_destroy(fsdpc_extent *extent); /* NULL is fine */

/* Outside of a pass, before these elements are read through `memory`: chunks that were not compared
 * since they were written are. */
fsdpc_status fsdpc_extent_check(fsdpc_extent *extent, size_t first, size_t numel);
/* The same, before they are written through it: the next pass takes what it finds. */
fsdpc_status fsdpc_extent_written(fsdpc_extent *extent, size_t first, size_t numel);
/* The same for all elements, which are compared with nothing. */
void fsdpc_extent_forget(fsdpc_extent *extent);
/* After they were written through it, all of them: what is there now has a checksum again. */
void fsdpc_extent_seal(fsdpc_extent *extent);

/* ---- A pass ---- */

/* A pass may stay open while other things are done.  The next one to begin first ends it by `end`,
 * which calls fsdpc_pass_end. */
typedef struct fsdpc_pass_hook fsdpc_pass_hook;
struct fsdpc_pass_hook {
    fsdpc_status (*end)(fsdpc_pass_hook *hook);
};

fsdpc_status fsdpc_pass_begin(fsdpc_tier *tier, fsdpc_pass_hook *hook); /* NULL: it ends before */
/* The next rows: all of these extents, of as many elements, each in one pass once. */
fsdpc_status fsdpc_pass_add(fsdpc_tier *tier, fsdpc_extent *const *extents, int n);
/* Added extents are read ahead from here on. */
fsdpc_status fsdpc_pass_start(fsdpc_tier *tier);
/* Where element `at` lies, and how many from there on lie together; for writing, until this is
 * called for another row or the pass ends.  Rows come in order, and may be left out. */
fsdpc_status fsdpc_pass_at(fsdpc_extent *extent, size_t at, void **out, size_t *numel_out);
/* Before an array is used through `memory` in a pass that stays open: what is left of it there, and
 * of rows before, is not wanted. */
fsdpc_status fsdpc_pass_leave(fsdpc_extent *extent);
/* What pass_at has given is in the file.  Fails if anything of the pass has failed. */
fsdpc_status fsdpc_pass_end(fsdpc_tier *tier);
/* An error in a forked child: threads and file are the parent's. */
fsdpc_status fsdpc_tier_check_process(fsdpc_tier *tier);

#endif
