/* A link: bytes between ranks of different hosts.
 *
 * Ranks of a host share memory (comm/shm_*.c).  Between hosts a link moves messages, and knows
 * nothing of wires, epochs or reductions: comm_hosts.c makes those out of it.  Implementations:
 *
 *     link_relay      messages are carried by threads of the program: those of a process group of
 *                     torch's (python/fsdpc/torch/_link.py); in tests, ranks are threads
 *     link_mpi        a plugin, over MPI (csrc/mpi)
 *     link_null       nothing is carried; one rank plays a world of any size
 *
 * Messages.  A message has a peer and a tag, and both sides name its bytes.  Messages of one pair
 * and one tag arrive in the order in which they were sent; others may pass each other.  A receive
 * may be posted before or after its send.  A message of another size than its receive is an error
 * on the receiving side, and never written beyond the memory given.  0 bytes are a message.
 * Where a link takes runs, the memory of either side may lie in several.
 *
 * Operations.  fsdpc_link_op is the caller's storage, zeroed before its first use; a post allocates
 * nothing that grows with bytes.  Storage and memory belong to the link until test says that the
 * operation is done.  A done send says that its memory may be written again, not that the peer has
 * received it.
 *
 * Threads.  Any thread posts, and tests what it has posted: groups that are set apart have one of
 * their own.  A link may have a thread too; it calls `wake` when one is done, so that whoever
 * sleeps looks again.  Links without one move bytes inside `progress` alone, which every poll calls,
 * and are one thread's.
 *
 * Failure.  After an abort, by this rank or by news of a peer, every operation fails with
 * FSDPC_ERR_PEER and the reason.  The link then no longer touches memory of operations.  Destroying
 * never waits for peers.
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
        *runs; /* instead of data; the caller's as long as the memory is the link's */
    size_t n_runs;
    /* The implementation's: */
    _Atomic int state; /* 0 when done */
    fsdpc_status status;
    struct fsdpc_link_op *next;
    size_t moved;
    uint64_t request;
} fsdpc_link_op;

typedef struct fsdpc_link_ops {
    const char *name;
    void (*destroy)(fsdpc_link *link);
    fsdpc_status (*post)(fsdpc_link_op *op); /* a send or a receive, as its members say */
    fsdpc_status (*test)(fsdpc_link_op *op); /* FSDPC_IN_PROGRESS, or how it ended */
    void (*progress)(fsdpc_link *link);      /* NULL: it has a thread of its own */
    void (*abort)(fsdpc_link *link, const char *reason); /* tells the peers, as far as it can */
    /* This rank sends no more.  What it sent arrives; a receive from it that nothing will answer
     * fails.  NULL: peers wait until their deadline. */
    void (*leave)(fsdpc_link *link);
    /* Who is woken, by any thread, when an operation is done; NULL: nobody.  Whoever was before is
     * not called any more when it returns.  NULL for links without a thread. */
    void (*set_wake)(fsdpc_link *link, void (*wake)(void *arg), void *arg);
    /* What the link stands on and by which way it reaches peers, one line. */
    void (*describe)(const fsdpc_link *link, char *text, size_t bytes);
} fsdpc_link_ops;

struct fsdpc_link {
    const fsdpc_link_ops *ops;
    int rank, size;
    bool takes_runs;
    uint32_t tags;                               /* tags are below this; at least 1 << 15 */
    _Atomic uint64_t sent_bytes, received_bytes; /* of messages posted; relaxed: counts alone */
    void (*wake)(void *arg);                     /* the implementation's, by set_wake */
    void *wake_arg;
    double timeout_s;    /* deadline of what it waits for itself; the communicator's */
    fsdpc_log log;       /* the same */
    _Atomic bool failed; /* release after poison, acquire by whoever reads it */
    char poison[256];    /* why; written once */
    /* By rank: where it was last, for those that wait for it once it has left.  A rank writes its
     * own before it leaves; NULL: the link carries none. */
    char (*farewells)[FSDPC_LINK_FAREWELL];
};

/* ---- Wrappers ---- */

fsdpc_status fsdpc_link_health(const fsdpc_link *link);
fsdpc_status fsdpc_link_send(fsdpc_link *link, int peer, uint32_t tag, const void *data,
                             size_t bytes, fsdpc_link_op *op);
fsdpc_status fsdpc_link_receive(fsdpc_link *link, int peer, uint32_t tag, void *data, size_t bytes,
                                fsdpc_link_op *op);
/* A send or a receive of memory in runs; a link that takes none takes one. */
fsdpc_status fsdpc_link_post_runs(fsdpc_link *link, bool sends, int peer, uint32_t tag,
                                  const fsdpc_link_run *runs, size_t n_runs, fsdpc_link_op *op);
fsdpc_status fsdpc_link_test(fsdpc_link_op *op); /* idle storage is done */
/* The reason of a rank's abort as its peers read it: with that rank in front, unless it names one. */
void fsdpc_link_name_reason(int rank, const char *why, size_t length, char *text, size_t bytes);
/* What a receive from a rank that has left fails with. */
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
