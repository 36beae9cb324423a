/* Internal definitions that saved.c and the movers share. */
#ifndef FSDPC_TIER_SAVED_INTERNAL_H
#define FSDPC_TIER_SAVED_INTERNAL_H

#include "tier/saved.h"
#include "tier/tier_internal.h"

typedef enum fsdpc_saved_state {
    FSDPC_SAVED_HERE,    /* in memory, and may still leave */
    FSDPC_SAVED_LEAVING, /* being copied */
    FSDPC_SAVED_AWAY,
    FSDPC_SAVED_RETURNING, /* being copied back */
    FSDPC_SAVED_BACK,      /* in memory, and stays */
} fsdpc_saved_state;

typedef struct fsdpc_saved_array {
    unsigned char *memory;
    size_t bytes;
    uint64_t offset; /* in the set's part of the place */
    uint32_t *crcs;  /* of its chunks in a file */
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
    uint64_t bytes, offset;         /* in the place */
    fsdpc_saved_set *older, *newer; /* among the sets with a part of it */
    bool failed;                    /* out of memory while arrays were added */
    fsdpc_saved_io io;              /* of a disk */
    void *copied;                   /* of host memory: an event */
};

struct fsdpc_saved_mover {
    /* Makes the place larger; a full disk is an error here, before anything is written. */
    fsdpc_status (*grow)(fsdpc_saved_mover *mover, uint64_t from, uint64_t to);
    fsdpc_status (*start)(fsdpc_saved_mover *mover, fsdpc_saved_set *set, bool reads);
    fsdpc_status (*wait)(fsdpc_saved_mover *mover, fsdpc_saved_set *set);
    /* Afterwards nothing uses the set's memory; it may not have been moved at all. */
    void (*cancel)(fsdpc_saved_mover *mover, fsdpc_saved_set *set);
    void (*destroy)(fsdpc_saved_mover *mover);
};

enum { FSDPC_SAVED_CHUNK = 1 << 20 }; /* bytes */

#endif
