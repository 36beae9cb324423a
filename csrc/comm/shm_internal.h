/* Internals of the shm communicator: the structs that its files share.
 *
 *     shm_internal.h  only structs
 *     shm_peers.c     failures, and passing memory when ranks create an object together
 *     shm_coll.c      collectives
 *     shm_param_buffer.c      parameter buffers and epochs
 *     shm_buffer.c    reduce buffers
 *     comm_shm.c      creation and end, split, waiting
 *
 * Each file calls only files above it in this list.
 */
#ifndef FSDPC_COMM_SHM_INTERNAL_H
#define FSDPC_COMM_SHM_INTERNAL_H

#include "comm/comm.h"
#include "comm/shm_control.h"
#include "comm/shm_world.h"

/* One rank's control words in a parameter buffer, stored after the data. */
typedef struct fsdpc_shm_param_buffer_words {
    _Atomic uint64_t arrived, copied_in; /* epochs */
    struct {
        _Atomic uint64_t bits_kind, unit, steps;
    } note[2]; /* by parity of the epoch */
} __attribute__((aligned(128))) fsdpc_shm_param_buffer_words;

typedef struct fsdpc_shm_param_buffer {
    fsdpc_param_buffer base;
    uint64_t id;
    fsdpc_tier *tier; /* the tier whose folder contains the file; NULL: in memory */
    fsdpc_shm_segment *segment;
    fsdpc_shm_param_buffer_words *words;
    struct fsdpc_shm_param_buffer *next;
} fsdpc_shm_param_buffer;

/* Stored after a buffer's data: the number of reductions with the buffer's id whose inputs the
 * owner has read. */
typedef struct fsdpc_shm_buffer_words {
    _Atomic uint64_t read;
} fsdpc_shm_buffer_words;

typedef struct fsdpc_shm_buffer {
    fsdpc_buffer base;
    uint64_t id, posts;
    fsdpc_shm_segment **segments;         /* by group rank, including ours */
    const unsigned char **datas;          /* by group rank */
    const fsdpc_shm_buffer_words **words; /* by group rank */
    fsdpc_shm_buffer_words *mine;
} fsdpc_shm_buffer;

/* What the last unsuccessful poll was waiting for, so that messages can name late ranks. */
typedef struct fsdpc_shm_awaited {
    enum {
        FSDPC_SHM_AWAITS_NOBODY,
        FSDPC_SHM_AWAITS_POSTED,
        FSDPC_SHM_AWAITS_STEP,
        FSDPC_SHM_AWAITS_ARRIVED,
        FSDPC_SHM_AWAITS_PUBLISHED,
        FSDPC_SHM_AWAITS_READ,
        FSDPC_SHM_AWAITS_RANK, /* target: the late group rank */
    } kind;
    const void *object; /* the parameter buffer or reduce buffer */
    uint64_t target;    /* ranks below it are late */
} fsdpc_shm_awaited;

typedef struct fsdpc_shm_comm {
    fsdpc_comm base;
    fsdpc_shm_world *world;
    fsdpc_shm_segment *segment;
    fsdpc_shm_control *control;
    fsdpc_shm_slot *mine;
    /* The bell that wakes this rank. It is the first communicator's bell, so a rank waiting in one
     * group is woken for all its groups. */
    fsdpc_shm_segment *bell_segment;
    fsdpc_shm_control *bell;
    struct fsdpc_shm_comm *next_group; /* of world->groups */
    int *members;                      /* world rank by group rank */
    uint64_t id;                       /* same on all members, different between groups */
    uint64_t creations; /* number of parameter buffers, buffers and groups created so far */
    fsdpc_stream inline_stream;

    uint64_t posted, chain;
    fsdpc_work *pending; /* inline operations in flight, linked by `impl`, in posting order */
    fsdpc_shm_param_buffer *param_buffers;

    /* Staged collectives run one at a time, in posting order; `turn` is the current one. The fields
     * below it belong to the thread that has the turn: the driving thread or a stream's thread. */
    uint64_t turns_given;
    _Atomic uint64_t turn;
    uint64_t step;
    size_t staged_numel;
    bool staged;

    fsdpc_shm_awaited awaited;
    int64_t checked_ns;
} fsdpc_shm_comm;

/* Returns the rank number to use in messages. */
static inline int fsdpc_shm_name(const fsdpc_shm_comm *self, int rank)
{
    return self->world->names[self->members[rank]];
}

static inline fsdpc_shm_comm *fsdpc_shm_of(fsdpc_comm *comm)
{
    return (fsdpc_shm_comm *)comm;
}

#endif
