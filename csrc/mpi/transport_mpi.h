/* A transport over MPI: the declarations that its two halves share.
 *
 * The posting thread calls the functions in transport_mpi.c, which post and test operations.
 * mpi_thread.c is the transport's thread, the only one that calls MPI. Operations are passed to the
 * thread through `queue`, and results are returned in their `state`. `wanted` (written by the
 * posting thread) and `phase` (written by the transport's thread) control the lifetime of the
 * transport.
 */
#ifndef FSDPC_MPI_TRANSPORT_MPI_H
#define FSDPC_MPI_TRANSPORT_MPI_H

#include <mpi.h>
#include <pthread.h>
#include <sys/types.h>

#include "comm/transport.h"

enum fsdpc_mpi_phase {
    FSDPC_MPI_STARTING,
    FSDPC_MPI_RUNNING,
    FSDPC_MPI_STOPPED, /* makes no more MPI calls; `reason` says why */
    FSDPC_MPI_ENDING,  /* agrees with its peers on the end */
    FSDPC_MPI_LAST,    /* in MPI_Finalize */
    FSDPC_MPI_ENDED,
};

enum fsdpc_mpi_wanted { FSDPC_MPI_RUN, FSDPC_MPI_ABORT, FSDPC_MPI_END };

/* The operation to which an MPI request belongs. */
typedef struct fsdpc_mpi_segment {
    fsdpc_transport_op *op; /* NULL: the receive for news */
    int bytes;
} fsdpc_mpi_segment;

typedef struct fsdpc_mpi_transport {
    fsdpc_transport base;
    pid_t pid; /* forked children do not have the thread */
    pthread_t thread;
    pthread_mutex_t waking; /* guards the choice of `wake` */

    /* Passed from the posting thread to the transport's thread. Each is accessed with acquire and
     * release ordering, which makes earlier writes visible. */
    _Atomic(fsdpc_transport_op *) queue; /* newest first */
    _Atomic uint32_t asleep; /* 1 while our thread sleeps on it; the thread that sets it to 0
                                     * wakes ours */
    _Atomic uint32_t wanted;
    _Atomic bool leaving; /* no more posts will come */
    char asked[256];      /* for ABORT: the reason */
    _Atomic bool failing; /* taken by the thread that writes the transport's poison */

    /* Passed from the transport's thread to the posting thread. */
    _Atomic uint32_t phase;
    fsdpc_status status; /* the result of STARTING */
    char reason[256];

    /* Only for our thread. */
    bool ours;                   /* we started MPI, so we end it */
    bool left;                   /* the peers have been told that we left */
    bool ended;                  /* an operation has ended since the last wake */
    bool *met;                   /* peers that an operation was posted for */
    bool *gone;                  /* peers whose farewell has arrived */
    MPI_Comm comm, news;         /* for messages; for abort reasons and the end */
    char heard[256];             /* buffer for a peer's abort reason */
    fsdpc_transport_op *backlog; /* operations with segments left to post, oldest first */
    size_t n, capacity;          /* of the following arrays; entry 0 is the receive for news */
    MPI_Request *requests;
    fsdpc_mpi_segment *segments;
    int *indices;
    MPI_Status *statuses;
} fsdpc_mpi_transport;

/* Collective over all MPI processes; there must be exactly `size` of them, and the call waits for
 * all. */
fsdpc_status fsdpc_transport_mpi_create(int rank, int size, fsdpc_transport **out);

/* Marks the transport as failed, keeping the first reason. */
void fsdpc_mpi_fail(fsdpc_mpi_transport *transport, const char *reason);
/* Calls `wake`, if set. */
void fsdpc_mpi_wake(fsdpc_mpi_transport *transport);

/* Gets the first line of the MPI library's version, such as "Open MPI v4.1.4, package: ...". */
void fsdpc_mpi_version(char *text, size_t bytes);

/* The thread's function: starts MPI, carries out operations while `wanted` is RUN, then shuts MPI
 * down. */
void *fsdpc_mpi_thread(void *transport);

#endif
