/* Internal definitions that saved.c and saved_disk.c share. */
#ifndef FSDPC_TIER_SAVED_INTERNAL_H
#define FSDPC_TIER_SAVED_INTERNAL_H

#include "tier/saved.h"
#include "tier/tier_internal.h"

typedef enum fsdpc_saved_state {
    FSDPC_SAVED_HERE,    /* in memory, and may still leave */
    FSDPC_SAVED_LEAVING, /* being written */
    FSDPC_SAVED_AWAY,
    FSDPC_SAVED_RETURNING, /* being read */
    FSDPC_SAVED_BACK,      /* in memory, and stays */
} fsdpc_saved_state;

typedef struct fsdpc_saved_array {
    unsigned char *memory;
    size_t bytes;
    uint64_t offset; /* in the set's part of the file */
    uint32_t *crcs;  /* of its chunks */
} fsdpc_saved_array;

/* The progress of a set's transfer; guarded by the disk's lock. */
typedef struct fsdpc_saved_io {
    bool reads, active;
    size_t array, at; /* the next chunk: an array, and a byte in it */
    int running;      /* chunks that threads are moving */
    fsdpc_saved_set *next;
} fsdpc_saved_io;

struct fsdpc_saved_set {
    _Atomic int refs;
    fsdpc_saved *saved;
    const fsdpc_saved_ops *ops;
    void *arg;
    char unit[96];
    fsdpc_saved_state state;
    fsdpc_saved_array *arrays;
    size_t n, room;
    uint64_t bytes, offset;         /* in the file */
    fsdpc_saved_set *older, *newer; /* among the sets with a part of the file */
    bool failed;                    /* out of memory while arrays were added */
    fsdpc_saved_io io;
};

typedef struct fsdpc_saved_disk fsdpc_saved_disk;

fsdpc_status fsdpc_saved_disk_open(fsdpc_tier *tier, fsdpc_mem *mem, fsdpc_saved_disk **out);
void fsdpc_saved_disk_close(fsdpc_saved_disk *disk);
/* Reserves blocks, so that a full disk is an error before anything is written. */
fsdpc_status fsdpc_saved_disk_grow(fsdpc_saved_disk *disk, uint64_t from, uint64_t to);
fsdpc_status fsdpc_saved_disk_start(fsdpc_saved_disk *disk, fsdpc_saved_set *set, bool reads);
fsdpc_status fsdpc_saved_disk_wait(fsdpc_saved_disk *disk, fsdpc_saved_set *set);
/* Returns once no thread uses the set's memory. */
void fsdpc_saved_disk_cancel(fsdpc_saved_disk *disk, fsdpc_saved_set *set);

enum { FSDPC_SAVED_CHUNK = 1 << 20 }; /* bytes */

#endif
