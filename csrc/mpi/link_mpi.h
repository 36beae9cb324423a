/* A link over MPI: what its two halves share.
 *
 * link_mpi.c is called by the thread that posts and tests.  mpi_thread.c is a thread of the link,
 * the only one that calls MPI.  Operations go over by `queue`, outcomes come back by their `state`,
 * and the life of the link by `wanted` (theirs to write) and `phase` (the thread's).
 */
#ifndef FSDPC_MPI_LINK_MPI_H
#define FSDPC_MPI_LINK_MPI_H

#include <mpi.h>
#include <pthread.h>
#include <sys/types.h>

#include "comm/link.h"

enum fsdpc_mpi_phase {
    FSDPC_MPI_STARTING,
    FSDPC_MPI_RUNNING,
    FSDPC_MPI_STOPPED, /* calls MPI no more, and `reason` says why */
    FSDPC_MPI_ENDING,  /* agrees with its peers on the end */
    FSDPC_MPI_LAST,    /* is in MPI_Finalize */
    FSDPC_MPI_ENDED,
};

enum fsdpc_mpi_wanted { FSDPC_MPI_RUN, FSDPC_MPI_ABORT, FSDPC_MPI_END };

/* What one request of MPI is about. */
typedef struct fsdpc_mpi_piece {
    fsdpc_link_op *op; /* NULL: the receive of news */
    int bytes;
} fsdpc_mpi_piece;

typedef struct fsdpc_mpi_link {
    fsdpc_link base;
    pid_t pid; /* children of a fork have no thread */
    pthread_t thread;
    pthread_mutex_t waking; /* whose `wake` it is */

    /* Posting thread to ours.  Release and acquire on each make what was written before seen. */
    _Atomic(fsdpc_link_op *) queue; /* the newest first */
    _Atomic uint32_t asleep;        /* 1 while ours sleeps on it; who sets it to 0 wakes it */
    _Atomic uint32_t wanted;
    _Atomic bool leaving; /* posts no more */
    char asked[256];      /* ABORT: the reason */
    _Atomic bool failing; /* taken by who writes the link's poison */

    /* Ours to the posting thread. */
    _Atomic uint32_t phase;
    fsdpc_status status; /* of what ended STARTING */
    char reason[256];

    /* Ours alone. */
    bool ours;              /* we started MPI, so we end it */
    bool left;              /* the peers were told so */
    bool ended;             /* an operation, since anybody was woken */
    bool *met;              /* peers that something was posted for */
    bool *gone;             /* peers whose farewell has come */
    MPI_Comm comm, news;    /* messages; reasons of aborts, and the end */
    char heard[256];        /* where a peer's reason arrives */
    fsdpc_link_op *backlog; /* operations with pieces to post, the oldest first */
    size_t n, capacity;     /* of the following; the first is the receive of news */
    MPI_Request *requests;
    fsdpc_mpi_piece *pieces;
    int *indices;
    MPI_Status *statuses;
} fsdpc_mpi_link;

/* Collective over MPI's processes, which must be `size`: waits for all of them. */
fsdpc_status fsdpc_link_mpi_create(int rank, int size, fsdpc_link **out);

/* The link has failed; the first reason stays. */
void fsdpc_mpi_fail(fsdpc_mpi_link *link, const char *reason);
/* Whoever is to be woken, if anybody. */
void fsdpc_mpi_wake(fsdpc_mpi_link *link);

/* The first line of what MPI says of itself: "Open MPI v4.1.4, package: ...". */
void fsdpc_mpi_version(char *text, size_t bytes);

/* The thread: starts MPI, carries operations while `wanted` is RUN, and ends. */
void *fsdpc_mpi_thread(void *link);

#endif
