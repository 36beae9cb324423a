/* What the files of the shm communicator share: its structs and the functions behind its table.
 *
 *     comm_shm.c    life, split, waiting, failure
 *     shm_wire.c    wires and epochs
 *     shm_buffer.c  reduce buffers
 *     shm_coll.c    collectives
 */
#ifndef FSDPC_COMM_COMM_SHM_H
#define FSDPC_COMM_COMM_SHM_H

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
     * Everything below it belongs to whoever has the turn: the driving thread, or a stream's. */
    uint64_t turns_given;
    _Atomic uint64_t turn;
    uint64_t step;
    size_t staged_numel;
    bool staged;

    fsdpc_shm_nap nap;
    fsdpc_shm_late late;
    int64_t checked_ns;
} fsdpc_shm_comm;

static inline fsdpc_shm_comm *fsdpc_shm_of(fsdpc_comm *comm)
{
    return (fsdpc_shm_comm *)comm;
}

/* ---- comm_shm.c ---- */

/* Poisoned, here or by a peer?  Whatever begins something asks first; a poll asks only once it has
 * found that it must go on waiting, so that what all have done their part of still completes. */
fsdpc_status fsdpc_shm_health(fsdpc_shm_comm *self);
/* Tells the peers this thread's last error, from any thread; returns `status`. */
fsdpc_status fsdpc_shm_tell(fsdpc_shm_comm *self, fsdpc_status status);
/* The same on the driving thread, whose own communicator is closed by it, and those that share the
 * world with it. */
fsdpc_status fsdpc_shm_fail(fsdpc_shm_comm *self, fsdpc_status status);
/* FSDPC_ERR_PEER if a member died or left. */
fsdpc_status fsdpc_shm_peers_check(fsdpc_shm_comm *self);
/* All ranks are about to create the same thing; gives the tag to hand its memory over with. */
fsdpc_status fsdpc_shm_creation_begin(fsdpc_shm_comm *self, const char *what, size_t bytes,
                                      uint64_t *tag_out);
/* Group-rank forms of the world's calls. */
fsdpc_status fsdpc_shm_give_all(fsdpc_shm_comm *self, uint64_t tag, fsdpc_shm_segment *segment,
                                fsdpc_status status);
fsdpc_status fsdpc_shm_given_all(fsdpc_shm_comm *self);
fsdpc_status fsdpc_shm_take_from(fsdpc_shm_comm *self, int from, uint64_t tag, size_t bytes,
                                 fsdpc_shm_segment **out);

/* ---- shm_wire.c ---- */

fsdpc_status fsdpc_shm_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out);
void fsdpc_shm_wire_destroy(fsdpc_wire *wire);
fsdpc_status fsdpc_shm_epoch_arrive(fsdpc_wire *wire, const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_shm_epoch_test(fsdpc_wire *wire, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_shm_epoch_publish(fsdpc_wire *wire);
fsdpc_status fsdpc_shm_epoch_published(fsdpc_wire *wire);
/* A wire on which `rank` is in a later epoch than we are, or NULL. */
const fsdpc_shm_wire *fsdpc_shm_wire_ahead(const fsdpc_shm_comm *self, int rank);

/* ---- shm_buffer.c ---- */

fsdpc_status fsdpc_shm_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out);
void fsdpc_shm_buffer_destroy(fsdpc_buffer *buffer);
fsdpc_status fsdpc_shm_buffer_idle(fsdpc_buffer *buffer);

/* ---- shm_coll.c ---- */

fsdpc_status fsdpc_shm_post(fsdpc_work *work);
fsdpc_status fsdpc_shm_test(fsdpc_work *work);
/* Carries on whatever inline operations can go on, of any group of this rank (peers may wait for
 * them while we wait for something else), then health. */
fsdpc_status fsdpc_shm_progress(fsdpc_shm_comm *self);
/* After a failure: works in flight end with `status` and are not touched again. */
void fsdpc_shm_pending_drop(fsdpc_shm_comm *self, fsdpc_status status);

#endif
