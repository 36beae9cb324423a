/* A rank's place among the ranks of its host: who they are, whether they live, how memory is handed
 * to them.  A communicator and all that were split from it share one world.
 *
 * Ranks here are world ranks.  Two kinds: processes, joined by sockets, and threads of one process
 * (for sanitizers), joined by mailboxes.
 */
#ifndef FSDPC_COMM_SHM_WORLD_H
#define FSDPC_COMM_SHM_WORLD_H

#include <pthread.h>

#include "comm/comm.h"
#include "comm/shm_segment.h"

enum { FSDPC_SHM_PHASE_WORDS = 4, FSDPC_SHM_UNIT_WORDS = 12, FSDPC_SHM_WAIT_WORDS = 12 };

/* One rank's entry in the life page. */
typedef struct fsdpc_shm_life {
    pthread_mutex_t held; /* robust; its rank's creating thread holds it for life */
    _Atomic int32_t pid;  /* 0 until `held` is */
    _Atomic bool left;    /* shut down in order: not dead, whatever became of it since */
    _Atomic uint64_t
        phase[FSDPC_SHM_PHASE_WORDS]; /* where it is; written by it, read in messages */
    _Atomic uint64_t unit[FSDPC_SHM_UNIT_WORDS];
    _Atomic uint64_t wait[FSDPC_SHM_WAIT_WORDS]; /* what it sleeps in; "" while it does not */
} __attribute__((aligned(128))) fsdpc_shm_life;

/* Where a thread leaves a segment for the others of a group. */
typedef struct fsdpc_shm_mail {
    _Atomic uint64_t tag; /* release by the giver after the rest, acquire by takers */
    fsdpc_shm_segment *segment;
    int status;
    _Atomic int taken; /* release by takers when done, acquire by the giver before the next */
} fsdpc_shm_mail;

typedef struct fsdpc_shm_world {
    _Atomic int refs;
    bool threads;
    int rank, size;
    int first_rank; /* what rank 0 is called in messages */
    uint32_t fork_count;
    pthread_t locker; /* the thread that holds our `held` */
    fsdpc_shm_segment *life_segment;
    fsdpc_shm_life *life;
    int *sockets, *pidfds;         /* processes; by rank, -1 where there is none */
    _Atomic bool *orphan;          /* its creating thread is gone: ask the process itself */
    fsdpc_shm_mail *mail;          /* threads; in the life segment, behind the lives */
    struct fsdpc_shm_comm *groups; /* of this rank; the driving thread's */
} fsdpc_shm_world;

/* Collective: meets, shares the life page. */
fsdpc_status fsdpc_shm_world_create(const fsdpc_comm_config *config, fsdpc_shm_world **out);
fsdpc_status fsdpc_shm_world_create_threads(int size, fsdpc_shm_world **outs);
fsdpc_shm_world *fsdpc_shm_world_retain(fsdpc_shm_world *world);
void fsdpc_shm_world_release(fsdpc_shm_world *world);

/* This rank takes part no more: what becomes of its process is no death. */
void fsdpc_shm_world_leave(fsdpc_shm_world *world);
bool fsdpc_shm_world_dead(fsdpc_shm_world *world, int rank);
bool fsdpc_shm_world_stopped(const fsdpc_shm_world *world, int rank); /* by a signal, a debugger */
/* How a dead rank's process ended, " of signal 9 (Killed)", if the kernel still says; or "". */
void fsdpc_shm_world_ending(const fsdpc_shm_world *world, int rank, char *out, size_t bytes);
int32_t fsdpc_shm_world_pid(const fsdpc_shm_world *world, int rank);
void fsdpc_shm_world_locate(fsdpc_shm_world *world, const char *phase, const char *unit);
/* What this rank sleeps in; "": it goes on. */
void fsdpc_shm_world_waits(fsdpc_shm_world *world, const char *what);
/* "in forward of 'layers.3'", "in user code, waiting in barrier of 'end'", or "" */
void fsdpc_shm_world_where(const fsdpc_shm_world *world, int rank, char *text, size_t bytes);

/* A communicator good for nothing but waiting, while there is no group yet: sleeps on the sockets.
 */
typedef struct fsdpc_shm_early {
    fsdpc_comm comm;
    fsdpc_shm_world *world;
} fsdpc_shm_early;
void fsdpc_shm_early_init(fsdpc_shm_early *early, fsdpc_shm_world *world,
                          const fsdpc_comm_config *config);

/* Gives a segment (or the news that there is none: `status`) to some ranks.  Takers name the giver
 * and the same tag; `given` waits until all have taken.  `comm` does the waiting. */
fsdpc_status fsdpc_shm_world_give(fsdpc_shm_world *world, fsdpc_comm *comm, const int *to, int n_to,
                                  uint64_t tag, fsdpc_shm_segment *segment, fsdpc_status status);
fsdpc_status fsdpc_shm_world_given(fsdpc_shm_world *world, fsdpc_comm *comm, int n_to);
/* *out is NULL, and the result OK, if the giver had none. */
fsdpc_status fsdpc_shm_world_take(fsdpc_shm_world *world, fsdpc_comm *comm, int from, uint64_t tag,
                                  size_t bytes, fsdpc_shm_segment **out);

/* Text in words that may be read while they are written: 8 characters each, 0 ends. */
void fsdpc_shm_text_store(_Atomic uint64_t *words, size_t n_words, const char *text);
void fsdpc_shm_text_load(const _Atomic uint64_t *words, size_t n_words, char *text, size_t bytes);

#endif
