/* A communicator: the ranks of a group, the memory they share, and what they do together.
 *
 * These implementations fill in the table: `self` (a world of one, the template), `null` (records
 * its calls), `shm` (the ranks of one host, over shared memory), `hosts` (several), and those of
 * plugins. `null` pretends that every peer has just done the same.  Callers use the inline wrappers
 * below the table.
 *
 * Wire and epochs.  A wire is memory that holds the fulls of a root's units.  Every rank reads all
 * of it through `read` and writes only its own slices, through `write`, between arriving in an
 * epoch and publishing.  An epoch is: arrive (with a note) and wait for all arrivals.  If any note
 * said CHANGED, then write the own slices, publish, and wait for all publications before anything
 * is read.  The next arrival comes after the end of all gathers: until then a transport may read
 * the own slices and write the others.  docs/design/communication.md says why no simpler order is
 * safe.
 *
 * Transports whose ranks share no memory give wires without any, `moved`, which say where fulls
 * would lie.  A gather there sends this rank's slices, as they lie in its shard, from memory of
 * fsdpc_wire_own.  It receives the full in the caller's memory.
 *
 * Buffers.  A buffer is private memory of the rank that its peers can read during a reduction.
 * Cycle: fill -> post a reduction on it -> work done -> buffer_idle (all peers have read it) ->
 * fill again.  One filling may be posted in several operations, for instance one of each dtype; all
 * but the first say `same_filling`.
 *
 * Collectives are posted, tested, waited for.  fsdpc_work is the caller's storage: nothing is
 * allocated by a post.  Every rank of the group posts the same operations in the same order.  Each
 * leaves a fingerprint that peers check.  A difference is an error on every rank that names both
 * ranks' unit and operation, before any wrong number is used.
 *
 * On a remote device an operation runs in the order of its stream and is ordered with nothing else.
 * Before a post, the caller waits by events for the work that uses the memory to be read and
 * overwritten.  It need not be waited for: fsdpc_comm_order makes another stream wait, and the host
 * goes on, a bounded number of operations ahead of the device.  A later failure is an error of the
 * next call that waits for anything, a sync of the device among them (fsdpc_device.watch).
 *
 * While the device captures (device.h), operations posted for it are captured too, not compared:
 * `captured` is a hash of them, to be compared when the capture ends.  Nothing is waited for there,
 * so values of the host are refused.  A graph with operations in it is launched by posting a
 * REPLAY.
 *
 * Failure.  Every wait has a deadline, asks the interrupt callback at least every 100 ms and
 * watches the peers.  After a failure the communicator is poisoned: every later call fails and says
 * why.  Three outcomes do not poison: an interrupt (it ends the wait, not the operation), CHANGED
 * together with HELD, and a failed allocation (all ranks get the error).  After an interrupt, wait
 * again or abort.
 *
 * Ownership: wires and buffers are destroyed before their communicator; destroy never blocks.
 *
 * Threads: one thread drives a communicator, and all that were split off it but those set apart.
 * Reductions run on the stream of the operation: in test/wait on an inline stream, by themselves on
 * an asynchronous one.
 */
#ifndef FSDPC_COMM_COMM_H
#define FSDPC_COMM_COMM_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "base/trace.h"
#include "base/wait.h"
#include "device/device.h"
#include "tier/tier.h"

typedef struct fsdpc_comm fsdpc_comm;
typedef struct fsdpc_wire fsdpc_wire;
typedef struct fsdpc_buffer fsdpc_buffer;
typedef struct fsdpc_work fsdpc_work;

/* One band of a flat group, or one whole parameter, in elements of the operation's dtype. */
typedef struct fsdpc_slice {
    size_t full_offset;  /* where it begins in the full */
    size_t numel;        /* elements of ONE rank's slice; of the parameter if whole */
    size_t shard_offset; /* where this rank's slice begins in its shard */
    int owner; /* -1: cut evenly, rank r's at full_offset + r * numel; else whole, that rank's */
} fsdpc_slice;

/* X(name, text) */
#define FSDPC_COLL_TABLE(X)                                                                        \
    X(GATHER, "gather")                 /* slices of a wire become readable as one full */         \
    X(REDUCE_SCATTER, "reduce_scatter") /* buffers of all ranks -> this rank's slices */           \
    X(REDUCE_ALL, "all_reduce")         /* the same -> all slices, on every rank: replicas */      \
    X(ALL_REDUCE, "all_reduce")         /* recv = op over ranks of send */                         \
    X(ALL_GATHER, "all_gather")         /* recv (size x numel) = every rank's send (numel) */      \
    X(BROADCAST, "broadcast")           /* recv of root -> recv of all */                          \
    X(BARRIER, "barrier")                                                                          \
    X(REPLAY, "replay") /* a graph of the device, with the operations that were captured in it */

typedef enum fsdpc_coll_kind {
#define X(name, text) FSDPC_COLL_##name,
    FSDPC_COLL_TABLE(X)
#undef X
} fsdpc_coll_kind;

/* Whether an operation reads the peers' buffers. */
static inline bool fsdpc_coll_reduces(fsdpc_coll_kind kind)
{
    return kind == FSDPC_COLL_REDUCE_SCATTER || kind == FSDPC_COLL_REDUCE_ALL;
}

typedef enum fsdpc_red { FSDPC_RED_SUM, FSDPC_RED_MAX, FSDPC_RED_MIN } fsdpc_red;

/* One of the sums that a reduction leaves, in the order in which they are made. */
typedef struct fsdpc_coll_sum {
    int n_ranks;      /* over the contributions of the next n_ranks ranks, scaled and rounded, */
    const void *from; /* or, if that is 0, what another sum has left here, as it is */
    void *shard;      /* the destination, whose slices are at their shard_offset */
    bool accumulate;  /* add to the destination instead of overwriting it */
} fsdpc_coll_sum;

enum { FSDPC_COLL_MAX_SUMS = 96 }; /* of one operation */

typedef struct fsdpc_coll {
    fsdpc_coll_kind kind;
    int unit;         /* trace and fingerprint; -1: none */
    const char *what; /* for messages, e.g. the unit's name; borrowed until the work is done */
    fsdpc_dtype dtype;
    uint64_t epoch;
    fsdpc_stream *stream; /* NULL: inline; on a remote device the main stream */
    /* Moves nothing: it is compared with the peers' and done when all have posted it.  For a
     * transport that moves the bytes itself and lets another one watch over it. */
    bool agree_only;

    /* GATHER, REDUCE_SCATTER and REDUCE_ALL (whose slices are all taken, at their full_offset) */
    const fsdpc_slice *slices; /* borrowed until the work is done */
    size_t n_slices;
    fsdpc_wire *wire;     /* GATHER */
    fsdpc_buffer *buffer; /* REDUCE_*: source; one dtype, full at byte `offset` */
    size_t offset;        /* bytes into the wire or buffer where the full begins */
    bool late;            /* GATHER: ranks may have written their slices just before they posted, so
                             it is done when all have; the same on all ranks */
    uint32_t trains;      /* hash of what the caller trains, or 0; only compared */
    bool same_filling;    /* REDUCE_*: the buffer was posted already since it was filled */
    void *shard;          /* REDUCE_*: where the slices go, at their shard_offset */
    fsdpc_dtype shard_dtype;
    double scale;               /* applied once to the sum, in fp32 unless dtype is F64 */
    fsdpc_dtype round_dtype;    /* through which the scaled sum is rounded; see fsdpc_reduce_args */
    bool accumulate;            /* add to the shard instead of overwriting it */
    const fsdpc_coll_sum *sums; /* n_sums of them replace `shard` and `accumulate`, and together
                                   cover all ranks; borrowed until the work is done; NULL: one sum
                                   over all ranks.  Only if the transport `splits_sums` */
    int n_sums;
    bool tree; /* REDUCE_*: ranks are summed as the pairwise tree, wide, also by a transport that is
                  quicker in another order */

    fsdpc_graph *graph; /* REPLAY; numel says which, to the peers */

    /* ALL_REDUCE, ALL_GATHER, BROADCAST; F32, F64, BF16, F16, I32, I64, U8, BOOL */
    /* send and recv: also GATHER of a wire that is moved, as the shard and the full are laid out */
    fsdpc_red op; /* floats are summed as the pairwise tree of fsdpc_flat_reduce */
    const void *send;
    void *recv; /* may be send */
    size_t numel;
    int root;
} fsdpc_coll;

struct fsdpc_work {
    fsdpc_coll op;
    fsdpc_comm *comm;    /* NULL: idle storage */
    uint64_t sequence;   /* of this operation in its group */
    _Atomic int state;   /* implementation's; 0 when done or idle */
    fsdpc_status status; /* of a finished asynchronous part */
    uint64_t turn;       /* implementation's */
    void *impl;
};

enum fsdpc_epoch_bits {
    FSDPC_EPOCH_CHANGED = 1,  /* this rank's masters differ from its slices of the wire */
    FSDPC_EPOCH_HELD = 2,     /* a unit is held by unshard() */
    FSDPC_EPOCH_RESET = 4,    /* the last step was interrupted: its order of units counts no more */
    FSDPC_EPOCH_GRAD = 8,     /* a forward with gradients */
    FSDPC_EPOCH_STEP = 16,    /* begun by an optimizer */
    FSDPC_EPOCH_REFUSED = 32, /* this rank cannot do what all were called for, so nobody does */
    FSDPC_EPOCH_LATE = 64,    /* it publishes slices before their next gather, not in this epoch */
    FSDPC_EPOCH_DROP = 128,   /* its backward failed: gradients that are not reduced are dropped */
};

typedef struct fsdpc_epoch_note {
    uint32_t bits;
    uint32_t kind;  /* what began it, caller's code; must agree between ranks */
    int32_t unit;   /* called unit; must agree */
    uint64_t steps; /* optimizer steps taken so far; must agree */
} fsdpc_epoch_note;

typedef struct fsdpc_comm_ops {
    const char *name;

    /* Life */
    void (*destroy)(fsdpc_comm *comm);
    fsdpc_status (*split)(fsdpc_comm *comm, int color, int key, fsdpc_comm **out); /* collective */
    void (*abort)(fsdpc_comm *comm,
                  const char *reason); /* poison, tell the peers; takes seconds at most */
    /* Tells the peers that this rank takes part no more; memory stays until destroy.  Optional. */
    void (*leave)(fsdpc_comm *comm);
    /* Sets apart the communicators that this one stands on.  Optional: there is no other than its
     * control. */
    void (*set_apart)(fsdpc_comm *comm);

    /* Wire and epochs */
    /* One of the two, collective; the second is for who can have wires in files too. */
    fsdpc_status (*wire_create)(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out);
    fsdpc_status (*wire_create_in)(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                   fsdpc_wire **out);
    void (*wire_destroy)(fsdpc_wire *wire);
    /* See fsdpc_wire_own.  Optional: the device's memory. */
    fsdpc_status (*wire_own)(fsdpc_wire *wire, size_t bytes, unsigned char **out); /* collective */
    fsdpc_status (*epoch_arrive)(fsdpc_wire *wire, const fsdpc_epoch_note *mine);
    fsdpc_status (*epoch_test)(fsdpc_wire *wire, fsdpc_epoch_note *all_out); /* bits are or-ed */
    fsdpc_status (*epoch_publish)(fsdpc_wire *wire);
    fsdpc_status (*epoch_published)(fsdpc_wire *wire);
    /* See fsdpc_wire_attach.  Optional, both or none. */
    fsdpc_status (*wire_attach)(fsdpc_wire *wire, void *memory, size_t bytes); /* collective */
    void (*wire_detach)(fsdpc_wire *wire, void *memory);

    /* Buffers */
    fsdpc_status (*buffer_create)(fsdpc_comm *comm, size_t bytes,
                                  fsdpc_buffer **out); /* collective */
    void (*buffer_destroy)(fsdpc_buffer *buffer);
    fsdpc_status (*buffer_idle)(fsdpc_buffer *buffer); /* FSDPC_IN_PROGRESS while a peer reads it */
    bool any_buffer;  /* a buffer may also be made by the caller, over any memory of the device */
    bool splits_sums; /* a REDUCE_* with `tree` set may leave sums over some of its ranks */

    /* Collectives */
    fsdpc_status (*post)(fsdpc_work *work); /* work->op is set */
    fsdpc_status (*test)(fsdpc_work *work);
    /* See fsdpc_comm_order; FSDPC_IN_PROGRESS while the operation is not on its own stream yet.
     * Optional: it is waited for. */
    fsdpc_status (*order)(fsdpc_work *work, fsdpc_stream *stream);

    /* Waiting: sleep until something may have changed, at most max_ns; notice dead peers.  May
     * return at once the first time, to be polled again; max_ns 0 says that the wait is over.
     * Optional: the default yields the processor. */
    fsdpc_status (*idle)(fsdpc_comm *comm, int64_t max_ns);
    /* Wakes the threads of this rank that sleep in idle; any thread.  Optional: nobody sleeps. */
    void (*wake)(fsdpc_comm *comm);
    /* Who is late and where they are, for messages.  Optional: "". */
    void (*describe)(fsdpc_comm *comm, char *text, size_t bytes);
    /* Where this rank is, shown to peers that wait for it.  Optional. */
    void (*locate)(fsdpc_comm *comm, const char *phase, const char *unit);
    /* The same as text, "in forward of 'layers.3'", or "".  Optional. */
    void (*where)(const fsdpc_comm *comm, char *text, size_t bytes);
    /* What this rank begins to sleep in, "" when it goes on; shown too.  Optional. */
    void (*waits)(fsdpc_comm *comm, const char *what);
    /* For a watch of the ranks, on any thread: how they failed or died, if any has, and in `note`
     * who is stopped, or "".  The other slot makes all of them fail.  Optional, both or none. */
    fsdpc_status (*look)(fsdpc_comm *comm, char *note, size_t bytes);
    void (*tell)(fsdpc_comm *comm, fsdpc_status status, const char *text);
    /* A descriptor, the communicator's, that is readable once a rank's process has ended; -1: there
     * is none.  Optional. */
    int (*end_fd)(fsdpc_comm *comm, int rank);
} fsdpc_comm_ops;

struct fsdpc_comm {
    const fsdpc_comm_ops *ops;
    fsdpc_comm *control;  /* owned: another one of the same ranks, which leaves, sets apart and
                             waits where `ops` has nothing for it; NULL: there is none */
    fsdpc_device *device; /* borrowed: whose kernels sum */
    fsdpc_trace *trace;   /* borrowed, may be NULL */
    int rank, size;
    int host_size;  /* ranks of each host, which follow each other */
    int world_rank; /* in messages: rank in the communicator that was split first */
    double timeout_s, notice_s;
    bool spin;                /* waits may spin before they sleep */
    bool apart;               /* see fsdpc_comm_set_apart */
    void (*carry)(void *arg); /* carries on what a communicator above this one has in flight; every
                                 wait calls it; NULL: there is none */
    void *carry_arg;
    fsdpc_interrupt interrupt;
    void (*notice)(void *arg, const char *text); /* "rank 1 waits for rank 0 ..."; may be NULL */
    void *notice_arg;
    fsdpc_log log;     /* notes: creations, epochs that change, long waits; debug: all */
    int64_t waited_ns; /* time spent in waits since create */
    uint32_t captured; /* hash of the posts in captures; a comparison sets it to 0 */
    char poison[512];  /* "" while healthy */
};

struct fsdpc_wire {
    fsdpc_comm *comm;
    size_t bytes;
    bool moved; /* it has no memory: gathers move bytes, and both pointers are NULL */
    int memfd;  /* whose first bytes are its memory, as long as it lives; 0: it lies elsewhere */
    const unsigned char *read;
    unsigned char *write;
    bool pinned;        /* moved: what fsdpc_wire_own gives is memory of the host; said before it */
    unsigned char *own; /* moved: this rank's slices, once fsdpc_wire_own was called */
    uint64_t epoch;     /* the last one this rank arrived in; 0: none yet */
    /* The meaning of a note's kind, for messages; NULL: its number is shown. */
    const char *(*kind_text)(uint32_t kind);
};

struct fsdpc_buffer {
    fsdpc_comm *comm;
    size_t bytes;
    unsigned char *data;
};

typedef struct fsdpc_comm_config {
    int rank, size;
    fsdpc_device *device;
    fsdpc_trace *trace;
    double timeout_s, notice_s;
    fsdpc_interrupt interrupt;
    void (*notice)(void *arg, const char *text);
    void *notice_arg;
    fsdpc_log log;  /* all zero: silent */
    int first_rank; /* shm: what its rank 0 is called in messages, where it is part of a world */
    const char *address; /* shm: names the run (uid and restart count are added); <= 80 bytes */
    const char *secret;  /* shm: ranks prove that they know it; NULL: none */
    int socket_fd; /* shm: a listening socket of this rank (rendezvous.h), taken over, or <= 0 */
    int news_fd;   /* shm: where a launcher writes which ranks have ended (rendezvous.h), or <= 0 */
    bool spin;     /* shm: more cores than ranks or as many, so waits may spin first */
    bool late;     /* null: an operation is done when somebody waits for it, not before */
    bool orders;   /* null: streams are ordered behind operations, as on GPUs */
} fsdpc_comm_config;

fsdpc_status fsdpc_comm_self_create(const fsdpc_comm_config *config, fsdpc_comm **out);
fsdpc_status fsdpc_comm_shm_create(const fsdpc_comm_config *config,
                                   fsdpc_comm **out); /* collective */
/* size communicators for ranks that are threads of this process and share one mapping. */
fsdpc_status fsdpc_comm_shm_create_threads(const fsdpc_comm_config *configs, int size,
                                           fsdpc_comm **outs);

/* Any rank of any size, in one process.  A split gives a group of the same rank and size, as every
 * peer is taken to have given the same colour.  Of more than 256 ranks nothing is summed. */
fsdpc_status fsdpc_comm_null_create(const fsdpc_comm_config *config, fsdpc_comm **out);

/* What the null communicator was asked, in order; borrowed until the next call on it.  (The trace
 * is the engine's to write.) */
typedef struct fsdpc_comm_record {
    const char *what; /* "post", "done", "arrive", "publish", "wire", "buffer", "split", "abort" */
    fsdpc_coll_kind kind; /* of a post or done */
    int unit;             /* -1: none */
    uint64_t epoch;
    size_t bytes;
} fsdpc_comm_record;
size_t fsdpc_comm_null_records(const fsdpc_comm *comm, const fsdpc_comm_record **out);

/* ---- comm.c: what every implementation shares ---- */

/* Sets up the common head from a config. */
void fsdpc_comm_init(fsdpc_comm *comm, const fsdpc_comm_ops *ops, const fsdpc_comm_config *config);
/* The config of a part that is split off `comm`. */
fsdpc_comm_config fsdpc_comm_config_like(const fsdpc_comm *comm, int rank, int size);

/* Polls until it is not IN_PROGRESS: deadline, interrupt, notice and peers are looked after. `what`
 * (static text, which the trace may keep) names the operation and `unit` (may be NULL) the unit in
 * messages. */
fsdpc_status fsdpc_comm_wait_for(fsdpc_comm *comm, fsdpc_status (*poll)(void *arg), void *arg,
                                 const char *what, const char *unit);

fsdpc_status fsdpc_comm_post(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_work *work);
fsdpc_status fsdpc_comm_test(fsdpc_work *work);                      /* idle work is done */
fsdpc_status fsdpc_comm_wait(fsdpc_work *work);                      /* idle work is done */
fsdpc_status fsdpc_comm_run(fsdpc_comm *comm, const fsdpc_coll *op); /* post and wait */

/* Whether work may be ordered without waiting for it. */
static inline bool fsdpc_comm_orders(const fsdpc_comm *comm)
{
    return comm->ops->order != NULL;
}

/* Later work on `stream` runs after the operation, whose work is idle on return.  Its slices are no
 * longer read; its name is, until the device has run it.  Waits where the transport cannot order
 * streams. */
fsdpc_status fsdpc_comm_order_streams(fsdpc_work *work, fsdpc_stream *stream); /* if it can */
static inline fsdpc_status fsdpc_comm_order(fsdpc_work *work, fsdpc_stream *stream)
{
    return work->comm && fsdpc_comm_orders(work->comm) ? fsdpc_comm_order_streams(work, stream)
                                                       : fsdpc_comm_wait(work);
}

/* Posts it and orders `stream` behind it, whose memory it uses. */
fsdpc_status fsdpc_comm_run_ahead(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_stream *stream);

/* Collective: FSDPC_OK if `status` is so on every rank, else on every rank the error of the lowest
 * that failed.  `what` was tried. */
fsdpc_status fsdpc_comm_agree(fsdpc_comm *comm, fsdpc_status status, const char *what);

/* Collective.  In memory, or, with a tier, in a file of its folder, which is on the host, of rank
 * 0.  Kernel and disk then decide how much of it is in memory. */
fsdpc_status fsdpc_wire_create_in(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                  fsdpc_wire **out);

static inline fsdpc_status fsdpc_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out)
{
    return fsdpc_wire_create_in(comm, bytes, NULL, out);
}

/* Memory for what this rank publishes in a moved wire, zeroed, counted as WIRE or PINNED; the wire's,
 * with which it goes.  Collective, once. */
fsdpc_status fsdpc_wire_own(fsdpc_wire *wire, size_t bytes, unsigned char **out);
/* Puts pages of a wire with a memfd beneath `address`, in the place of as many pages of this
 * process.  They read as the wire's, also after it is destroyed.  A page that this process writes
 * there is its copy from then on; fsdpc_wire_drop_copies gives copies up. */
fsdpc_status fsdpc_wire_map_private(const fsdpc_wire *wire, size_t offset, size_t bytes,
                                    void *address);
void fsdpc_wire_drop_copies(void *address, size_t bytes);
fsdpc_status fsdpc_buffer_create(fsdpc_comm *comm, size_t bytes,
                                 fsdpc_buffer **out); /* collective */
fsdpc_status fsdpc_wire_epoch_wait(fsdpc_wire *wire, const char *unit, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_wire_published_wait(fsdpc_wire *wire, const char *unit);
fsdpc_status fsdpc_buffer_idle_wait(fsdpc_buffer *buffer, const char *unit);

/* Hands a communicator that was split off to a separate thread.  Waits of the other threads do not
 * advance it, nor its waits theirs, and it does not use that other thread's callbacks and trace.
 * On all its ranks, before its first operation, by the thread that split it off. */
static inline void fsdpc_comm_set_apart(fsdpc_comm *comm)
{
    comm->apart = true;
    comm->interrupt = (fsdpc_interrupt){0};
    comm->notice = NULL;
    comm->log.level = FSDPC_LOG_SILENT;
    comm->trace = NULL;
    if (comm->ops->set_apart)
        comm->ops->set_apart(comm);
    else if (comm->control)
        fsdpc_comm_set_apart(comm->control);
}

const char *fsdpc_coll_name(fsdpc_coll_kind kind);

/* Bytes an operation is about: the whole full of a gather or reduction, numel elements otherwise.
 */
size_t fsdpc_coll_bytes(const fsdpc_coll *op, int size);

/* For implementations: aborts with this thread's last error, keeps it, returns `status`. */
fsdpc_status fsdpc_comm_poison(fsdpc_comm *comm, fsdpc_status status);
/* FSDPC_ERR_POISONED with the reason if the communicator is poisoned, else FSDPC_OK. */
fsdpc_status fsdpc_comm_health(const fsdpc_comm *comm);
/* The default of `abort`: keeps the first reason. */
void fsdpc_comm_abort_local(fsdpc_comm *comm, const char *reason);

static inline void fsdpc_comm_destroy(fsdpc_comm *comm)
{
    if (comm)
        comm->ops->destroy(comm);
}

static inline fsdpc_status fsdpc_comm_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    return comm->ops->split(comm, color, key, out);
}

static inline void fsdpc_comm_leave(fsdpc_comm *comm)
{
    if (comm->ops->leave)
        comm->ops->leave(comm);
    else if (comm->control)
        fsdpc_comm_leave(comm->control);
}

static inline void fsdpc_comm_abort(fsdpc_comm *comm, const char *reason)
{
    comm->ops->abort(comm, reason);
}

static inline void fsdpc_comm_locate(fsdpc_comm *comm, const char *phase, const char *unit)
{
    if (comm->ops->locate)
        comm->ops->locate(comm, phase, unit);
    else if (comm->control)
        fsdpc_comm_locate(comm->control, phase, unit);
}

static inline void fsdpc_comm_waits(fsdpc_comm *comm, const char *what)
{
    if (comm->ops->waits)
        comm->ops->waits(comm, what);
    else if (comm->control)
        fsdpc_comm_waits(comm->control, what);
}

static inline fsdpc_status fsdpc_comm_look(fsdpc_comm *comm, char *note, size_t bytes)
{
    note[0] = 0;
    return comm->ops->look ? comm->ops->look(comm, note, bytes) : FSDPC_OK;
}

static inline void fsdpc_comm_tell(fsdpc_comm *comm, fsdpc_status status, const char *text)
{
    if (comm->ops->tell)
        comm->ops->tell(comm, status, text);
}

static inline int fsdpc_comm_end_fd(fsdpc_comm *comm, int rank)
{
    return comm->ops->end_fd ? comm->ops->end_fd(comm, rank) : -1;
}

static inline void fsdpc_comm_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    text[0] = 0;
    if (comm->ops->describe)
        comm->ops->describe(comm, text, bytes);
    else if (comm->control)
        fsdpc_comm_describe(comm->control, text, bytes);
}

static inline fsdpc_status fsdpc_comm_idle(fsdpc_comm *comm, int64_t max_ns)
{
    if (comm->ops->idle)
        return comm->ops->idle(comm, max_ns);
    if (comm->control)
        return fsdpc_comm_idle(comm->control, max_ns);
    if (max_ns > 0)
        sched_yield();
    return FSDPC_OK;
}

static inline void fsdpc_wire_destroy(fsdpc_wire *wire)
{
    if (!wire)
        return;
    fsdpc_device *device = wire->comm->device;
    unsigned char *own = wire->comm->ops->wire_own ? NULL : wire->own;
    wire->comm->ops->wire_destroy(wire);
    fsdpc_device_free(device, own);
}

static inline fsdpc_status fsdpc_wire_arrive(fsdpc_wire *wire, const fsdpc_epoch_note *mine)
{
    return wire->comm->ops->epoch_arrive(wire, mine);
}

static inline fsdpc_status fsdpc_wire_publish(fsdpc_wire *wire)
{
    return wire->comm->ops->epoch_publish(wire);
}

/* Collective: gathers to come write this memory, which is all of a window of the device
 * (device.h), so a transport may prepare it.  It waits for the operations posted before.  Each rank
 * detaches the memory before freeing it. */
static inline fsdpc_status fsdpc_wire_attach(fsdpc_wire *wire, void *memory, size_t bytes)
{
    return wire->comm->ops->wire_attach ? wire->comm->ops->wire_attach(wire, memory, bytes)
                                        : FSDPC_OK;
}

static inline void fsdpc_wire_detach(fsdpc_wire *wire, void *memory)
{
    if (wire->comm->ops->wire_detach)
        wire->comm->ops->wire_detach(wire, memory);
}

static inline void fsdpc_buffer_destroy(fsdpc_buffer *buffer)
{
    if (buffer)
        buffer->comm->ops->buffer_destroy(buffer);
}

#endif
