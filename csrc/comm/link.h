/* A link: moves bytes between ranks of different hosts.
 *
 * Ranks of a host share memory (comm/shm_*.c).  Between hosts a link moves messages.  A link knows
 * nothing of parameter buffers, epochs or reductions, which comm_hosts.c builds on it.  Implementations:
 *
 *     link_relay      the program's threads carry the messages, e.g. over a process group of
 *                     torch (python/fsdpc/torch/_link.py); in tests, ranks are threads
 *     link_mpi        a plugin, over MPI (csrc/mpi)
 *     link_null       carries nothing; one rank simulates a world of any size
 *
 * Messages.  A message has a peer and a tag, and both sides specify its size.  Messages with the
 * same pair and tag arrive in the order in which they were sent; others may overtake each other.  A
 * receive may be posted before or after its send.  If a message and its receive differ in size, the
 * receive fails, and nothing is written past its memory.  A message may be empty.  If a link
 * supports runs, either side's memory may consist of several runs.
 *
 * Operations.  fsdpc_link_op is the caller's storage, zeroed before its first use; a post's
 * allocations do not grow with its bytes.  Storage and memory belong to the link until test reports
 * that the operation is done.  When a send is done, its memory may be written again, but the peer
 * may not have received it yet.
 *
 * Threads.  Any thread may post, and each tests its own posts, because groups that are set apart
 * have their own thread.  A link may also have a thread; it calls `wake` when an operation is done,
 * so that sleeping threads check again.  Links without a thread move bytes only inside `progress`,
 * which every poll calls, and only one thread may use them.
 *
 * Failure.  After an abort, by this rank or reported by a peer, every operation fails with
 * FSDPC_ERR_PEER and the reason.  The link then no longer touches the operations' memory.
 * Destroying never waits for peers.
 */
#ifndef FSDPC_COMM_LINK_H
#define FSDPC_COMM_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

typedef struct fsdpc_link fsdpc_link;

enum { FSDPC_LINK_FAREWELL = 128 };

typedef struct fsdpc_link_run {
    unsigned char *data;
    size_t bytes;
} fsdpc_link_run;

typedef struct fsdpc_link_op {
    fsdpc_link *link; /* NULL: idle storage */
    bool sends;
    int peer;
    uint32_t tag;
    unsigned char *data;
    size_t bytes;
    const fsdpc_link_run
        *runs; /* replaces data; must stay valid as long as the link owns the memory */
    size_t n_runs;
    /* For the implementation: */
    _Atomic int state; /* 0 when done */
    fsdpc_status status;
    struct fsdpc_link_op *next;
    size_t moved;
    uint64_t request;
} fsdpc_link_op;

typedef struct fsdpc_link_ops {
    const char *name;
    void (*destroy)(fsdpc_link *link);
    fsdpc_status (*post)(fsdpc_link_op *op); /* a send or a receive, according to its members */
    fsdpc_status (*test)(fsdpc_link_op *op); /* FSDPC_IN_PROGRESS, or the result */
    void (*progress)(fsdpc_link *link);      /* NULL: it has its own thread */
    void (*abort)(fsdpc_link *link, const char *reason); /* informs the peers, if it can */
    /* Ends this rank's sending.  Earlier messages still arrive; receives that can get no message
     * fail.  NULL: peers wait until their deadline. */
    void (*leave)(fsdpc_link *link);
    /* Sets the function that any thread calls when an operation is done; NULL: none.  After the
     * call returns, the previous function is no longer called.  NULL for links without a thread. */
    void (*set_wake)(fsdpc_link *link, void (*wake)(void *arg), void *arg);
    /* Describes the link's library and its path to the peers, in one line. */
    void (*describe)(const fsdpc_link *link, char *text, size_t bytes);
} fsdpc_link_ops;

struct fsdpc_link {
    const fsdpc_link_ops *ops;
    int rank, size;
    bool takes_runs;
    uint32_t tags;                               /* tags are below this; at least 1 << 15 */
    _Atomic uint64_t sent_bytes, received_bytes; /* for posted messages; relaxed: only counters */
    void (*wake)(void *arg);                     /* set by the implementation in set_wake */
    void *wake_arg;
    double timeout_s;    /* deadline of the link's own waits, as in the communicator */
    fsdpc_log log;       /* the same */
    _Atomic bool failed; /* release after writing poison; acquire before reading it */
    char poison[256];    /* the reason; written once */
    /* Each rank's last position, for ranks that wait for it after it has left.  A rank writes its
     * own entry before it leaves; NULL: the link does not transmit it. */
    char (*farewells)[FSDPC_LINK_FAREWELL];
};

/* ---- Wrappers ---- */

fsdpc_status fsdpc_link_health(const fsdpc_link *link);
fsdpc_status fsdpc_link_send(fsdpc_link *link, int peer, uint32_t tag, const void *data,
                             size_t bytes, fsdpc_link_op *op);
fsdpc_status fsdpc_link_receive(fsdpc_link *link, int peer, uint32_t tag, void *data, size_t bytes,
                                fsdpc_link_op *op);
/* Posts a send or receive of memory in runs; a link without support for runs accepts only one. */
fsdpc_status fsdpc_link_post_runs(fsdpc_link *link, bool sends, int peer, uint32_t tag,
                                  const fsdpc_link_run *runs, size_t n_runs, fsdpc_link_op *op);
fsdpc_status fsdpc_link_test(fsdpc_link_op *op); /* idle storage is done */
/* Words a rank's abort reason for its peers: prefixed with that rank, unless it names a rank. */
void fsdpc_link_name_reason(int rank, const char *why, size_t length, char *text, size_t bytes);
/* Sets the error for a receive from a rank that has left. */
fsdpc_status fsdpc_link_left(const fsdpc_link_op *op);

static inline void fsdpc_link_abort(fsdpc_link *link, const char *reason)
{
    link->ops->abort(link, reason);
}

static inline void fsdpc_link_leave(fsdpc_link *link)
{
    if (link->ops->leave)
        link->ops->leave(link);
}

static inline void fsdpc_link_destroy(fsdpc_link *link)
{
    if (link)
        link->ops->destroy(link);
}

#endif
