/* A rank's view of the ranks on its host: it identifies them, detects whether they are alive, and
 * passes memory to them. A communicator and all communicators split from it share one world.
 *
 * Ranks here are world ranks. There are two kinds of ranks: processes connected by sockets, and
 * threads of one process (for sanitizers) connected by mailboxes.
 */
#ifndef FSDPC_COMM_SHM_WORLD_H
#define FSDPC_COMM_SHM_WORLD_H

#include <pthread.h>

#include "comm/comm.h"
#include "comm/shm_segment.h"

enum { FSDPC_SHM_PHASE_WORDS = 4, FSDPC_SHM_UNIT_WORDS = 12, FSDPC_SHM_WAIT_WORDS = 12 };

/* One rank's entry in the life page. */
typedef struct fsdpc_shm_life {
    pthread_mutex_t held; /* robust; the creating thread of the rank locks it for its lifetime */
    _Atomic int32_t pid;  /* 0 until `held` is locked */
    _Atomic bool left;    /* orderly shutdown: not dead, no matter what happens to the process
                           * later */
    _Atomic uint64_t
        phase[FSDPC_SHM_PHASE_WORDS]; /* the rank's current position; written by it, read for
                                       * messages */
    _Atomic uint64_t unit[FSDPC_SHM_UNIT_WORDS];
    _Atomic uint64_t wait[FSDPC_SHM_WAIT_WORDS]; /* the call that it sleeps in; "" if it is awake */
} __attribute__((aligned(128))) fsdpc_shm_life;

/* The mailbox in which a thread leaves a segment for other ranks of a group. */
typedef struct fsdpc_shm_mail {
    _Atomic uint64_t tag; /* release by the giver after all other fields, acquire by takers */
    fsdpc_shm_segment *segment;
    int status;
    _Atomic int taken; /* release by takers when done, acquire by the giver before the next */
} fsdpc_shm_mail;

typedef struct fsdpc_shm_world {
    _Atomic int refs;
    bool threads;
    int rank, size;
    int *names; /* the numbers that messages use for the ranks */
    uint32_t fork_count;
    pthread_t locker; /* the thread that has locked our `held` */
    fsdpc_shm_segment *life_segment;
    fsdpc_shm_life *life;
    int *sockets, *pidfds;         /* processes; by rank, -1: none */
    _Atomic bool *orphan;          /* its creating thread has ended: check the process itself */
    fsdpc_shm_mail *mail;          /* threads; in the life segment, after the lives */
    struct fsdpc_shm_comm *groups; /* this rank's groups; for the driving thread */
} fsdpc_shm_world;

/* Collective: connects the ranks and shares the life page among them. */
fsdpc_status fsdpc_shm_world_create(const fsdpc_comm_config *config, fsdpc_shm_world **out);
fsdpc_status fsdpc_shm_world_create_threads(int size, fsdpc_shm_world **outs);
fsdpc_shm_world *fsdpc_shm_world_retain(fsdpc_shm_world *world);
void fsdpc_shm_world_release(fsdpc_shm_world *world);

/* Sets the numbers that messages use for the ranks. */
void fsdpc_shm_world_set_names(fsdpc_shm_world *world, const fsdpc_comm_config *config);

/* Ends this rank's participation; after that, the end of its process does not count as a death. */
void fsdpc_shm_world_leave(fsdpc_shm_world *world);
bool fsdpc_shm_world_dead(fsdpc_shm_world *world, int rank);
bool fsdpc_shm_world_stopped(const fsdpc_shm_world *world, int rank); /* e.g. by a signal or a
                                                                       * debugger */
/* Describes how a dead rank's process ended, such as " of signal 9 (Killed)", or writes "" if the
 * kernel no longer knows. */
void fsdpc_shm_world_ending(const fsdpc_shm_world *world, int rank, char *out, size_t bytes);
int32_t fsdpc_shm_world_pid(const fsdpc_shm_world *world, int rank);
void fsdpc_shm_world_locate(fsdpc_shm_world *world, const char *phase, const char *unit);
/* Sets the name of the call in which this rank is sleeping, or "" when it wakes. */
void fsdpc_shm_world_waits(fsdpc_shm_world *world, const char *what);
/* "in forward of 'layers.3'", "in user code, waiting in barrier of 'end'", or "" */
void fsdpc_shm_world_where(const fsdpc_shm_world *world, int rank, char *text, size_t bytes);

/* A communicator that can only wait, by sleeping on the sockets. It is used before a group
 * exists. */
typedef struct fsdpc_shm_early {
    fsdpc_comm comm;
    fsdpc_shm_world *world;
} fsdpc_shm_early;
void fsdpc_shm_early_init(fsdpc_shm_early *early, fsdpc_shm_world *world,
                          const fsdpc_comm_config *config);

/* Sends a segment to the ranks in `to`, or the error `status` if there is none. Takers
 * specify the giver and the same tag; `given` waits until all have taken the segment. `comm` does
 * the waiting. */
fsdpc_status fsdpc_shm_world_give(fsdpc_shm_world *world, fsdpc_comm *comm, const int *to, int n_to,
                                  uint64_t tag, fsdpc_shm_segment *segment, fsdpc_status status);
fsdpc_status fsdpc_shm_world_given(fsdpc_shm_world *world, fsdpc_comm *comm, int n_to);
/* *out is NULL, with status OK, if the giver had none. */
fsdpc_status fsdpc_shm_world_take(fsdpc_shm_world *world, fsdpc_comm *comm, int from, uint64_t tag,
                                  size_t bytes, fsdpc_shm_segment **out);

/* Stores and loads text in atomic words that may be read while they are being written: 8 characters
 * per word, zero-terminated. */
void fsdpc_shm_text_store(_Atomic uint64_t *words, size_t n_words, const char *text);
void fsdpc_shm_text_load(const _Atomic uint64_t *words, size_t n_words, char *text, size_t bytes);

#endif
