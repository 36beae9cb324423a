/* A transport: moves bytes between ranks of different hosts.
 *
 * Ranks on the same host share memory (comm/shm_*.c). Between hosts, a transport carries messages.
 * A transport knows nothing about parameter buffers, epochs or reductions, which comm_hosts.c
 * builds on top of it. Implementations:
 *
 *     transport_relay      the program's threads carry the messages, e.g. over a process group of
 *                     torch (python/fsdpc/torch/_transport.py); in tests, ranks are threads
 *     transport_mpi        a plugin, over MPI (csrc/mpi)
 *     transport_null       carries nothing; one rank simulates a world of any size
 *
 * Messages. A message has a peer and a tag, and both sides specify its size. Messages between the
 * same two ranks with the same tag arrive in the order in which they were sent; other messages may
 * overtake each other. A receive may be posted before or after its send. If a message and its
 * receive differ in size, the receive fails, and nothing is written past the end of its memory. A
 * message may be empty. If a transport supports runs, either side's memory may consist of several
 * runs.
 *
 * Operations. fsdpc_transport_op is the caller's storage, zeroed before its first use; a post's
 * allocations do not grow with its bytes. An operation's storage and memory belong to the transport
 * until test reports that the operation is done. When a send is done, its memory may be written
 * again, but the peer may not have received the message yet.
 *
 * Threads. Any thread may post, and each thread tests its own posts, because groups that are set
 * apart have their own thread. A transport may have its own thread, which calls `wake` when an
 * operation is done, so that sleeping threads check again. Transports without a thread move bytes
 * only inside `progress`, which every poll calls, and only one thread may use them.
 *
 * Failure. After this rank aborts, or a peer reports an abort, every operation fails with
 * FSDPC_ERR_PEER and the reason. The transport then no longer touches the operations' memory.
 * Destroying never waits for peers.
 */
#ifndef FSDPC_COMM_TRANSPORT_H
#define FSDPC_COMM_TRANSPORT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

typedef struct fsdpc_transport fsdpc_transport;

enum { FSDPC_TRANSPORT_FAREWELL = 128 };

typedef struct fsdpc_transport_run {
    unsigned char *data;
    size_t bytes;
} fsdpc_transport_run;

typedef struct fsdpc_transport_op {
    fsdpc_transport *transport; /* NULL: idle storage */
    bool sends;
    int peer;
    uint32_t tag;
    unsigned char *data;
    size_t bytes;
    const fsdpc_transport_run
        *runs; /* replaces data; must stay valid as long as the transport owns the memory */
    size_t n_runs;
    /* For the implementation: */
    _Atomic int state; /* 0 when done */
    fsdpc_status status;
    struct fsdpc_transport_op *next;
    size_t moved;
    uint64_t request;
} fsdpc_transport_op;

typedef struct fsdpc_transport_ops {
    const char *name;
    void (*destroy)(fsdpc_transport *transport);
    fsdpc_status (*post)(
        fsdpc_transport_op *op); /* a send or a receive, according to its members */
    fsdpc_status (*test)(fsdpc_transport_op *op); /* FSDPC_IN_PROGRESS, or the result */
    void (*progress)(fsdpc_transport *transport); /* NULL: it has its own thread */
    void (*abort)(fsdpc_transport *transport,
                  const char *reason); /* informs the peers, if it can */
    /* Ends this rank's sending. Earlier messages still arrive, and a receive fails if no message
     * can arrive for it. If `leave` is NULL, peers wait until their deadline. */
    void (*leave)(fsdpc_transport *transport);
    /* Sets the function that is called, on any thread, when an operation is done; NULL removes it.
     * After the call returns, the previous function is no longer called. The entry is NULL for
     * transports without a thread. */
    void (*set_wake)(fsdpc_transport *transport, void (*wake)(void *arg), void *arg);
    /* Describes the transport's library and its path to the peers, in one line. */
    void (*describe)(const fsdpc_transport *transport, char *text, size_t bytes);
} fsdpc_transport_ops;

struct fsdpc_transport {
    const fsdpc_transport_ops *ops;
    int rank, size;
    bool takes_runs;
    uint32_t tags;                               /* tags are below this; at least 1 << 15 */
    _Atomic uint64_t sent_bytes, received_bytes; /* for posted messages; relaxed: only counters */
    void (*wake)(void *arg);                     /* set by the implementation in set_wake */
    void *wake_arg;
    double timeout_s;    /* deadline of the transport's own waits, as in the communicator */
    fsdpc_log log;       /* the same */
    _Atomic bool failed; /* release after writing poison; acquire before reading it */
    char poison[256];    /* the reason; written once */
    /* Each rank's last position, which ranks that still wait for it can report after it has left. A
     * rank writes its own entry before it leaves; the array is NULL if the transport does not
     * transmit positions. */
    char (*farewells)[FSDPC_TRANSPORT_FAREWELL];
};

/* ---- Wrappers ---- */

fsdpc_status fsdpc_transport_health(const fsdpc_transport *transport);
fsdpc_status fsdpc_transport_send(fsdpc_transport *transport, int peer, uint32_t tag,
                                  const void *data, size_t bytes, fsdpc_transport_op *op);
fsdpc_status fsdpc_transport_receive(fsdpc_transport *transport, int peer, uint32_t tag, void *data,
                                     size_t bytes, fsdpc_transport_op *op);
/* Posts a send or receive of memory that consists of runs; a transport without support for runs
 * accepts only one run.
 */
fsdpc_status fsdpc_transport_post_runs(fsdpc_transport *transport, bool sends, int peer,
                                       uint32_t tag, const fsdpc_transport_run *runs, size_t n_runs,
                                       fsdpc_transport_op *op);
fsdpc_status fsdpc_transport_test(fsdpc_transport_op *op); /* idle storage is done */
/* Formats a rank's abort reason for its peers, prefixed with that rank unless the reason already
 * names one. */
void fsdpc_transport_name_reason(int rank, const char *why, size_t length, char *text,
                                 size_t bytes);
/* Sets the error for a receive from a rank that has left. */
fsdpc_status fsdpc_transport_left(const fsdpc_transport_op *op);

static inline void fsdpc_transport_abort(fsdpc_transport *transport, const char *reason)
{
    transport->ops->abort(transport, reason);
}

static inline void fsdpc_transport_leave(fsdpc_transport *transport)
{
    if (transport->ops->leave)
        transport->ops->leave(transport);
}

static inline void fsdpc_transport_destroy(fsdpc_transport *transport)
{
    if (transport)
        transport->ops->destroy(transport);
}

#endif
