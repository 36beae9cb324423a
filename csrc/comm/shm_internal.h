/* Inside of the shm communicator: the structs that its files share.
 *
 *     shm_internal.h  structs alone
 *     shm_peers.c     failure, and handing memory over when ranks create something together
 *     shm_coll.c      collectives
 *     shm_wire.c      wires and epochs
 *     shm_buffer.c    reduce buffers
 *     comm_shm.c      life, split, waiting
 *
 * Each file calls those above it in this list.
 */
#ifndef FSDPC_COMM_SHM_INTERNAL_H
#define FSDPC_COMM_SHM_INTERNAL_H

#include "comm/comm.h"
#include "comm/shm_control.h"
#include "comm/shm_world.h"

/* One rank's words of a wire, behind its data. */
typedef struct fsdpc_shm_wire_words {
    _Atomic uint64_t arrived, published; /* epochs */
    struct {
        _Atomic uint64_t bits_kind, unit, steps;
    } note[2]; /* by parity of the epoch */
} __attribute__((aligned(128))) fsdpc_shm_wire_words;

typedef struct fsdpc_shm_wire {
    fsdpc_wire base;
    uint64_t id;
    fsdpc_tier *tier; /* in whose folder the file is; NULL: memory */
    fsdpc_shm_segment *segment;
    fsdpc_shm_wire_words *words;
    struct fsdpc_shm_wire *next;
} fsdpc_shm_wire;

/* Behind a buffer's data, written by its rank: reductions of this buffer (of the same id, on all
 * ranks) whose inputs this rank has read. */
typedef struct fsdpc_shm_buffer_words {
    _Atomic uint64_t read;
} fsdpc_shm_buffer_words;

typedef struct fsdpc_shm_buffer {
    fsdpc_buffer base;
    uint64_t id, posts;
    fsdpc_shm_segment **segments;         /* by group rank, ours too */
    const unsigned char **datas;          /* by group rank */
    const fsdpc_shm_buffer_words **words; /* by group rank */
    fsdpc_shm_buffer_words *mine;
} fsdpc_shm_buffer;

/* What the last unsuccessful poll missed, so that messages can name who is late. */
typedef struct fsdpc_shm_late {
    enum {
        FSDPC_SHM_LATE_NOBODY,
        FSDPC_SHM_LATE_POSTED,
        FSDPC_SHM_LATE_STEP,
        FSDPC_SHM_LATE_ARRIVED,
        FSDPC_SHM_LATE_PUBLISHED,
        FSDPC_SHM_LATE_READ,
        FSDPC_SHM_LATE_RANK, /* target: that group rank */
    } kind;
    const void *object; /* the wire or buffer */
    uint64_t target;    /* who is below it is late */
} fsdpc_shm_late;

typedef struct fsdpc_shm_comm {
    fsdpc_comm base;
    fsdpc_shm_world *world;
    fsdpc_shm_segment *segment;
    fsdpc_shm_control *control;
    fsdpc_shm_slot *mine;
    /* Whose bell wakes this rank: that of the first communicator, so that a rank that waits in one
     * group hears of all of its groups. */
    fsdpc_shm_segment *bell_segment;
    fsdpc_shm_control *bell;
    struct fsdpc_shm_comm *next_group; /* of world->groups */
    int *members;                      /* world rank by group rank */
    uint64_t id;                       /* same on all members, differs between groups */
    uint64_t creations;                /* wires, buffers and groups made so far */
    fsdpc_stream inline_stream;

    uint64_t posted, chain;
    fsdpc_work *pending; /* inline operations in flight, linked by `impl`, in order of posting */
    fsdpc_shm_wire *wires;

    /* Collectives that stage run one at a time, in order of posting; `turn` says whose turn it is.
     * Everything below it belongs to the thread that has the turn: the driving one, or a
     * stream's. */
    uint64_t turns_given;
    _Atomic uint64_t turn;
    uint64_t step;
    size_t staged_numel;
    bool staged;

    fsdpc_shm_nap nap;
    fsdpc_shm_late late;
    int64_t checked_ns;
} fsdpc_shm_comm;

/* A rank's name in messages. */
static inline int fsdpc_shm_name(const fsdpc_shm_comm *self, int rank)
{
    return self->world->first_rank + self->members[rank];
}

static inline fsdpc_shm_comm *fsdpc_shm_of(fsdpc_comm *comm)
{
    return (fsdpc_shm_comm *)comm;
}

#endif
