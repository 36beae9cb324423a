/* A communicator: the ranks of a group, the memory they share, and their collectives.
 *
 * The table is implemented by `self` (a world of one, the template), `null` (records its calls),
 * `shm` (one host, over shared memory), `hosts` (several hosts), and plugins. `null` pretends that
 * every peer has just done the same. Callers use the inline wrappers below the table.
 *
 * Parameter buffer and epochs. A parameter buffer is memory that holds the unsharded parameters of
 * a root's units. Every rank reads the whole buffer through `read` and writes only its own slices,
 * through `write`, between arriving in an epoch and reporting its copy-in. An epoch has two parts:
 * arriving with a note, and waiting for all arrivals. If any note is CHANGED, each rank writes its
 * slices, reports its copy-in, and waits for every rank's report before it reads. A rank must not
 * arrive again before all gathers have ended, because until then a communicator may read this
 * rank's slices and write the others. docs/design/communication.md explains why no simpler order is
 * safe.
 *
 * Communicators whose ranks share no memory create `offsets_only` parameter buffers, which have no
 * memory and only define the offsets of unsharded parameters. A gather on such a buffer sends this
 * rank's slices from fsdpc_param_buffer_own's memory, laid out like the shard, and receives the
 * unsharded parameters in the caller's memory.
 *
 * Buffers. A buffer is private memory of one rank that its peers can read during a reduction.
 * Its cycle is: fill -> post a reduction on it -> work done -> buffer_idle (all peers have read it)
 * -> fill again. The contents of a buffer may be posted in several operations, for instance one per
 * dtype; all but the first must set `same_filling`.
 *
 * Collectives are posted, tested and waited for. fsdpc_work is the caller's storage: a post
 * allocates no memory. Every rank of the group posts the same operations in the same order. Each
 * operation has a fingerprint, which the peers check. A mismatch raises an error on every rank
 * before any wrong value is used; the error names both ranks' units and operations.
 *
 * On a remote device an operation runs in its stream's order, independently of all other work.
 * Before a post, the caller must use events to order the stream after other work on the memory that
 * the operation reads or overwrites. The host need not wait for the operation: fsdpc_comm_order
 * makes another stream wait, while the host runs ahead of the device by a bounded number of
 * operations. A later failure is reported by the next call that waits for anything, including a
 * sync of the device (fsdpc_device.watch).
 *
 * While the device captures (device.h), operations posted on it are captured too and are not
 * compared. Instead, the ranks compare hashes of them (`captured`) when the capture ends. A capture
 * cannot wait, so operations on host values are rejected. To launch a graph that contains
 * operations, post a REPLAY.
 *
 * Failure. Every wait has a deadline, calls the interrupt callback at least every 100 ms, and
 * detects lost peers. After a failure the communicator is poisoned: every later call fails with the
 * reason. Three outcomes do not poison it: an interrupt (which ends the wait, not the operation),
 * CHANGED together with HELD, and a failed allocation (reported to all ranks). After an interrupt,
 * the caller waits again or aborts.
 *
 * Ownership: parameter buffers and reduce buffers are destroyed before their communicator; destroy
 * never blocks.
 *
 * Threads: one thread drives a communicator and all communicators split from it, except those that
 * were set apart. Reductions run on the operation's stream: during test or wait if the stream is
 * inline, independently if it is asynchronous.
 */
#ifndef FSDPC_COMM_COMM_H
#define FSDPC_COMM_COMM_H

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "base/trace.h"
#include "base/wait.h"
#include "comm/nap.h"
#include "device/device.h"
#include "ops/codec.h"
#include "tier/tier.h"

typedef struct fsdpc_comm fsdpc_comm;
typedef struct fsdpc_param_buffer fsdpc_param_buffer;
typedef struct fsdpc_buffer fsdpc_buffer;
typedef struct fsdpc_work fsdpc_work;

/* One band of a flat group, cut evenly, in elements of the operation's dtype: rank r's slice is at
 * unsharded_offset + r * numel. */
typedef struct fsdpc_slice {
    size_t unsharded_offset; /* its offset among the unsharded parameters */
    size_t numel;            /* elements in ONE rank's slice */
    size_t shard_offset;     /* offset of this rank's slice in its shard */
    size_t row;              /* of a codec (ops/codec.h); divides numel */
} fsdpc_slice;

#define FSDPC_COLL_TABLE(X)                                                                        \
    X(GATHER, "gather") /* makes slices of a parameter buffer readable end to end */               \
    X(REDUCE_SCATTER, "reduce_scatter") /* buffers of all ranks -> this rank's slices */           \
    X(REDUCE_ALL, "all_reduce")         /* the same -> all slices on every rank (replicas) */      \
    X(ALL_REDUCE, "all_reduce")         /* recv = op over ranks of send */                         \
    X(ALL_GATHER, "all_gather")         /* recv (size x numel) = every rank's send (numel) */      \
    X(BROADCAST, "broadcast")           /* recv of root -> recv of all */                          \
    X(EXCHANGE, "exchange")             /* parts of every rank's send -> recv */                   \
    X(BARRIER, "barrier")                                                                          \
    X(REPLAY, "replay") /* launches a device graph, with the operations captured in it */

typedef enum fsdpc_coll_kind {
#define X(name, text) FSDPC_COLL_##name,
    FSDPC_COLL_TABLE(X)
#undef X
} fsdpc_coll_kind;

/* Returns whether an operation reads the peers' buffers. */
static inline bool fsdpc_coll_reduces(fsdpc_coll_kind kind)
{
    return kind == FSDPC_COLL_REDUCE_SCATTER || kind == FSDPC_COLL_REDUCE_ALL;
}

/* X(name, text); PRODUCT accepts F32, F64 and integers, the last three integers and BOOL. */
#define FSDPC_RED_TABLE(X)                                                                         \
    X(SUM, "sum")                                                                                  \
    X(MAX, "max")                                                                                  \
    X(MIN, "min")                                                                                  \
    X(PRODUCT, "product")                                                                          \
    X(AND, "and")                                                                                  \
    X(OR, "or")                                                                                    \
    X(XOR, "xor")

typedef enum fsdpc_red {
#define X(name, text) FSDPC_RED_##name,
    FSDPC_RED_TABLE(X)
#undef X
        FSDPC_RED_COUNT
} fsdpc_red;

/* The elements of a peer's `send` that this rank receives in an EXCHANGE. */
typedef struct fsdpc_coll_extent {
    size_t from, numel; /* in the peer's `send` */
    size_t to;          /* in this rank's `recv` */
} fsdpc_coll_extent;

/* One in the ordered list of sums that a reduction computes. */
typedef struct fsdpc_coll_sum {
    int n_ranks;      /* sums the next n_ranks ranks' contributions, scaled and rounded, */
    const void *from; /* or, if n_ranks is 0, copies the result of another sum from here */
    void *shard;      /* the destination, whose slices are at their shard_offset */
    bool accumulate;  /* add to the destination instead of overwriting it */
} fsdpc_coll_sum;

enum { FSDPC_COLL_MAX_SUMS = 96 }; /* per operation */

typedef struct fsdpc_coll {
    fsdpc_coll_kind kind;
    int unit;         /* for trace and fingerprint; -1: none */
    const char *what; /* for messages, e.g. the unit's name; borrowed until the work is done */
    fsdpc_dtype dtype;
    uint64_t epoch;
    fsdpc_stream *stream; /* NULL: inline; on a remote device the main stream */
    /* Moves no data: the operation is compared with the peers' and completes when every rank has
     * posted it. Used by a communicator that moves the bytes itself and leaves the check to another
     * communicator. */
    bool agree_only;

    /* GATHER, REDUCE_SCATTER and REDUCE_ALL (which takes all slices, at their unsharded_offset) */
    const fsdpc_slice *slices; /* borrowed until the work is done */
    size_t n_slices;
    fsdpc_param_buffer *param_buffer; /* GATHER */
    fsdpc_buffer *buffer; /* REDUCE_*: source; one dtype, unsharded gradients at byte `offset` */
    size_t offset;        /* bytes before the unsharded parameters in either buffer */
    fsdpc_codec codec; /* between hosts: of a GATHER's slices, which it has rounded, or of sums */
    const fsdpc_codec_error *error; /* REDUCE_*: of this rank's messages in turn; borrowed */
    bool after_copy_in; /* GATHER: ends when all ranks have posted, since they write until then */
    uint32_t trains;    /* hash of the caller's trainable parameters, or 0; only compared */
    bool same_filling;  /* REDUCE_*: the buffer has already been posted since it was filled */
    void *shard;        /* REDUCE_*: where the slices go, at their shard_offset */
    fsdpc_dtype shard_dtype;
    double scale;               /* applied once to the sum, in fp32 unless dtype is F64 */
    fsdpc_dtype round_dtype;    /* dtype through which the scaled sum is rounded; see
                                 * fsdpc_reduce_args */
    bool accumulate;            /* add to the shard instead of overwriting it */
    const fsdpc_coll_sum *sums; /* n_sums sums, which replace `shard` and `accumulate` and together
                                 * cover all ranks; borrowed until the work is done; NULL: one sum
                                 * over all ranks. Only if the communicator `splits_sums` */
    int n_sums;
    bool tree; /* REDUCE_*: sums ranks as the pairwise tree, wide, even if others are faster */

    fsdpc_graph *graph; /* REPLAY; numel identifies it to the peers */

    /* ALL_REDUCE, ALL_GATHER, BROADCAST; F32, F64, BF16, F16, I32, I64, U8, BOOL */
    /* send and recv: also for GATHER on an offsets-only parameter buffer, laid out like the shard
     * and the unsharded parameters */
    fsdpc_red op; /* floats are summed as the pairwise tree of fsdpc_flat_reduce */
    const void *send;
    void *recv; /* may be send, except in an EXCHANGE */
    size_t numel;
    int root;
    bool partial; /* ALL_REDUCE: recv gets only part_numel elements, from part_first on */
    size_t part_first, part_numel;
    fsdpc_coll_extent *extents; /* EXCHANGE: by peer; borrowed until the work is done */
    size_t most_sent;           /* EXCHANGE: the largest numel of any rank */
    /* EXCHANGE: NULL, or (size, 2, size): what each rank sends to and expects from each. Begins with
     * this rank's row; sets extents. If two ranks differ, nothing moves: the caller compares. */
    uint64_t *counts;
} fsdpc_coll;

struct fsdpc_work {
    fsdpc_coll op;
    fsdpc_comm *comm;    /* NULL: idle storage */
    uint64_t sequence;   /* number of this operation in its group */
    _Atomic int state;   /* implementation's; 0 when done or idle */
    fsdpc_status status; /* result of an asynchronous part that has finished */
    uint64_t turn;       /* implementation's */
    void *impl;
};

enum fsdpc_epoch_bits {
    FSDPC_EPOCH_CHANGED = 1,  /* this rank's masters differ from its parameter buffer slices */
    FSDPC_EPOCH_HELD = 2,     /* a unit is held by unshard() */
    FSDPC_EPOCH_RESET = 4,    /* the last step was interrupted, so its unit order is invalid */
    FSDPC_EPOCH_GRAD = 8,     /* a forward with gradients */
    FSDPC_EPOCH_STEP = 16,    /* begun by an optimizer */
    FSDPC_EPOCH_REFUSED = 32, /* this rank cannot take part, so no rank continues */
    FSDPC_EPOCH_COPY_IN_LATER =
        64,                 /* slices are copied in before their next gather, not in this epoch */
    FSDPC_EPOCH_DROP = 128, /* its backward failed: unreduced gradients are dropped */
};

typedef struct fsdpc_epoch_note {
    uint32_t bits;
    uint32_t kind;  /* the epoch's cause, a caller's code; must agree between ranks */
    int32_t unit;   /* called unit; must agree */
    uint64_t steps; /* optimizer steps taken so far; must agree */
} fsdpc_epoch_note;

typedef struct fsdpc_comm_ops {
    const char *name;

    /* Life */
    void (*destroy)(fsdpc_comm *comm);
    fsdpc_status (*split)(fsdpc_comm *comm, int color, int key, fsdpc_comm **out); /* collective */
    /* Poisons and, within seconds, tells the peers, who see `status` only if PEER or MISMATCH. */
    void (*abort)(fsdpc_comm *comm, fsdpc_status status, const char *reason);
    /* Tells the peers that this rank no longer takes part; memory stays until destroy.
     * Optional. */
    void (*leave)(fsdpc_comm *comm);
    /* Sets apart the communicators that this one uses. NULL means that the communicator uses only
     * its `control`. */
    void (*set_apart)(fsdpc_comm *comm);

    /* Parameter buffer and epochs */
    /* Collective. Implementations define one of these two functions: the second if they also
     * support parameter buffers in files. */
    fsdpc_status (*param_buffer_create)(fsdpc_comm *comm, size_t bytes, fsdpc_param_buffer **out);
    fsdpc_status (*param_buffer_create_in)(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                           fsdpc_param_buffer **out);
    void (*param_buffer_destroy)(fsdpc_param_buffer *param_buffer);
    /* See fsdpc_param_buffer_own. Optional: the device's memory. */
    fsdpc_status (*param_buffer_own)(fsdpc_param_buffer *param_buffer, size_t bytes,
                                     unsigned char **out); /* collective */
    fsdpc_status (*epoch_arrive)(fsdpc_param_buffer *param_buffer, const fsdpc_epoch_note *mine);
    fsdpc_status (*epoch_test)(fsdpc_param_buffer *param_buffer,
                               fsdpc_epoch_note *all_out); /* bits are or-ed */
    fsdpc_status (*epoch_copied_in)(fsdpc_param_buffer *param_buffer);
    fsdpc_status (*epoch_copy_in_test)(fsdpc_param_buffer *param_buffer);
    /* See fsdpc_param_buffer_attach. Optional, both or none. */
    fsdpc_status (*param_buffer_attach)(fsdpc_param_buffer *param_buffer, void *memory,
                                        size_t bytes); /* collective */
    void (*param_buffer_detach)(fsdpc_param_buffer *param_buffer, void *memory);

    /* Buffers */
    fsdpc_status (*buffer_create)(fsdpc_comm *comm, size_t bytes,
                                  fsdpc_buffer **out); /* collective */
    void (*buffer_destroy)(fsdpc_buffer *buffer);
    fsdpc_status (*buffer_idle)(fsdpc_buffer *buffer); /* FSDPC_IN_PROGRESS while a peer reads it */
    bool any_buffer;  /* the caller may also create a buffer itself, over any device memory */
    bool splits_sums; /* a REDUCE_* with `tree` set may leave sums over some of its ranks */

    /* Collectives */
    fsdpc_status (*post)(fsdpc_work *work); /* work->op is set */
    fsdpc_status (*test)(fsdpc_work *work);
    /* See fsdpc_comm_order; returns FSDPC_IN_PROGRESS until the operation is on its own stream.
     * Optional: the default waits for the operation. */
    fsdpc_status (*order)(fsdpc_work *work, fsdpc_stream *stream);

    /* Sleeps until something may have changed, for at most max_ns, and detects dead peers. `nap`
     * belongs to the wait. The first call may return at once so that the caller polls again; max_ns
     * 0 ends the wait. Optional: the default yields the processor. */
    fsdpc_status (*idle)(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns);
    /* Wakes this rank's threads that sleep in idle; any thread may call it. Optional: no thread
     * sleeps there. */
    void (*wake)(fsdpc_comm *comm);
    /* Lists the late ranks and their positions, for messages. Optional: by default, "". */
    void (*describe)(fsdpc_comm *comm, char *text, size_t bytes);
    /* Sets this rank's position, which peers report in messages when they wait for this rank.
     * Optional. */
    void (*locate)(fsdpc_comm *comm, const char *phase, const char *unit);
    /* Returns the position as text, such as "in forward of 'layers.3'", or "" if there is none.
     * Optional. */
    void (*where)(const fsdpc_comm *comm, char *text, size_t bytes);
    /* Sets the name of the call in which this rank is about to sleep, or "" when it continues;
     * peers report this too. Optional. */
    void (*waits)(fsdpc_comm *comm, const char *what);
    /* Checks the peers, on any thread: reports how ranks failed or died, if any did, and sets
     * `note` to the stopped ranks, or "". `tell` makes all ranks fail. Optional, both or none. */
    fsdpc_status (*look)(fsdpc_comm *comm, char *note, size_t bytes);
    void (*tell)(fsdpc_comm *comm, fsdpc_status status, const char *text);
    /* Returns a descriptor, owned by the communicator, that becomes readable when the rank's
     * process ends, or -1 if there is none. Optional. */
    int (*end_fd)(fsdpc_comm *comm, int rank);
} fsdpc_comm_ops;

struct fsdpc_comm {
    const fsdpc_comm_ops *ops;
    fsdpc_comm *control;  /* owned: another communicator of the same ranks, which handles leave,
                           * set_apart and waits if `ops` does not; NULL: none */
    fsdpc_device *device; /* borrowed: its kernels sum */
    fsdpc_trace *trace;   /* borrowed, may be NULL */
    int rank, size;
    int host_size;  /* consecutive ranks on each host */
    int world_rank; /* for messages: rank in the communicator that was split first */
    double timeout_s, notice_s;
    const char *timeout_name; /* what sets timeout_s, for messages; NULL: FSDPC_TIMEOUT_S */
    bool spin;                /* waits may spin before they sleep */
    pthread_mutex_t *lock;    /* held by the caller; `idle` releases it while it sleeps; may be
                               * NULL */
    bool apart;               /* see fsdpc_comm_set_apart */
    void (*carry)(void *arg); /* advances operations in flight on a communicator above this one;
                               * every wait calls it; NULL: none */
    void *carry_arg;
    fsdpc_interrupt interrupt;
    void (*notice)(void *arg, const char *text); /* "rank 1 waits for rank 0 ..."; may be NULL */
    void *notice_arg;
    fsdpc_log log;     /* level note: creations, epochs with changes, long waits; debug:
                        * everything */
    int64_t waited_ns; /* time spent in waits since create */
    uint32_t captured; /* hash of posts in captures; a comparison resets it to 0 */
    char poison[512];  /* "" while healthy */
};

struct fsdpc_param_buffer {
    fsdpc_comm *comm;
    size_t bytes;
    bool offsets_only; /* it has no memory: gathers move bytes, and both pointers are NULL */
    int memfd; /* contains its memory, from the first byte, for its lifetime; 0: other memory */
    const unsigned char *read;
    unsigned char *write;
    bool pinned; /* offsets_only: fsdpc_param_buffer_own returns host memory; set before the call */
    unsigned char *own; /* offsets_only: this rank's slices, after fsdpc_param_buffer_own */
    uint64_t epoch;     /* the last one in which this rank arrived; 0: none yet */
    /* Returns a description of a note's kind for messages; if NULL, messages show its number. */
    const char *(*kind_text)(uint32_t kind);
};

struct fsdpc_buffer {
    fsdpc_comm *comm;
    size_t bytes;
    unsigned char *data;
    const unsigned char *const *peers; /* every rank's `data`; NULL: cannot be read */
};

typedef struct fsdpc_comm_config {
    int rank, size;
    fsdpc_device *device;
    fsdpc_trace *trace;
    double timeout_s, notice_s;
    fsdpc_interrupt interrupt;
    void (*notice)(void *arg, const char *text);
    void *notice_arg;
    fsdpc_log log;       /* all zero: silent */
    int first_rank;      /* shm: the number that messages use for its rank 0 */
    const int *ranks;    /* shm: those of all its ranks; NULL: consecutive from first_rank on */
    const char *address; /* shm: names the run (uid and restart count are added); <= 80 bytes */
    const char *secret;  /* shm: ranks prove that they know it; NULL: none */
    int socket_fd; /* shm: this rank's listening socket (rendezvous.h), to be taken over, or <= 0 */
    int news_fd;   /* shm: file in which a launcher reports ended ranks (rendezvous.h), or <= 0 */
    bool spin;     /* shm: at least as many cores as ranks, so waits may spin first */
    bool lazy;     /* null: an operation is done only once the caller waits for it */
    bool orders;   /* null: streams are ordered after operations, as on GPUs */
} fsdpc_comm_config;

fsdpc_status fsdpc_comm_self_create(const fsdpc_comm_config *config, fsdpc_comm **out);
fsdpc_status fsdpc_comm_shm_create(const fsdpc_comm_config *config,
                                   fsdpc_comm **out); /* collective */
/* Creates `size` communicators for ranks that are threads of this process and share one mapping. */
fsdpc_status fsdpc_comm_shm_create_threads(const fsdpc_comm_config *configs, int size,
                                           fsdpc_comm **outs);

/* ---- comm.c: shared by all implementations ---- */

/* Initialises the common members from a config. */
void fsdpc_comm_init(fsdpc_comm *comm, const fsdpc_comm_ops *ops, const fsdpc_comm_config *config);
/* Returns the config of a group that is split from `comm`. */
fsdpc_comm_config fsdpc_comm_config_like(const fsdpc_comm *comm, int rank, int size);

/* Polls until the result is not IN_PROGRESS, handling the deadline, interrupts, notices and lost
 * peers. Messages contain the operation's name `what` (static text, which the trace may keep) and
 * the unit's name `unit` (may be NULL). */
fsdpc_status fsdpc_comm_wait_for(fsdpc_comm *comm, fsdpc_status (*poll)(void *arg), void *arg,
                                 const char *what, const char *unit);

fsdpc_status fsdpc_comm_post(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_work *work);
fsdpc_status fsdpc_comm_test(fsdpc_work *work);                      /* idle work is done */
fsdpc_status fsdpc_comm_wait(fsdpc_work *work);                      /* idle work is done */
fsdpc_status fsdpc_comm_run(fsdpc_comm *comm, const fsdpc_coll *op); /* post and wait */

/* Returns whether streams can be ordered after operations without making the host wait. */
static inline bool fsdpc_comm_orders(const fsdpc_comm *comm)
{
    return comm->ops->order != NULL;
}

/* Makes later work on `stream` run after the operation, whose storage is idle on return. The
 * operation's slices are no longer read after the call, but its name is read until the device has
 * run it. Waits for the operation if the communicator cannot order streams. */
fsdpc_status fsdpc_comm_order_streams(fsdpc_work *work, fsdpc_stream *stream); /* if it can */
static inline fsdpc_status fsdpc_comm_order(fsdpc_work *work, fsdpc_stream *stream)
{
    return work->comm && fsdpc_comm_orders(work->comm) ? fsdpc_comm_order_streams(work, stream)
                                                       : fsdpc_comm_wait(work);
}

/* Posts the operation and orders `stream`, which uses the same memory, after it. */
fsdpc_status fsdpc_comm_run_ahead(fsdpc_comm *comm, const fsdpc_coll *op, fsdpc_stream *stream);

/* Collective: returns FSDPC_OK if `status` is OK on every rank; otherwise, every rank gets the
 * error of the lowest rank that failed. `what` names the attempt. */
fsdpc_status fsdpc_comm_agree(fsdpc_comm *comm, fsdpc_status status, const char *what);

/* Collective. Creates a parameter buffer in memory or, with a tier, in a file in rank 0's tier
 * folder on this host. For a file, the kernel decides how much of it is kept in memory. */
fsdpc_status fsdpc_param_buffer_create_in(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                          fsdpc_param_buffer **out);

static inline fsdpc_status fsdpc_param_buffer_create(fsdpc_comm *comm, size_t bytes,
                                                     fsdpc_param_buffer **out)
{
    return fsdpc_param_buffer_create_in(comm, bytes, NULL, out);
}

/* Allocates zeroed memory, counted as UNSHARDED or PINNED, for this rank's slices of an
 * offsets-only parameter buffer. The parameter buffer owns it. Collective; call once. */
fsdpc_status fsdpc_param_buffer_own(fsdpc_param_buffer *param_buffer, size_t bytes,
                                    unsigned char **out);
/* Maps pages of a memfd-backed parameter buffer at `address`, replacing this process's pages there.
 * The mapped pages keep the parameter buffer's contents even after it is destroyed. If this process
 * writes to a page, the page becomes a private copy; fsdpc_param_buffer_drop_copies drops such
 * copies. */
fsdpc_status fsdpc_param_buffer_map_private(const fsdpc_param_buffer *param_buffer, size_t offset,
                                            size_t bytes, void *address);
void fsdpc_param_buffer_drop_copies(void *address, size_t bytes);
fsdpc_status fsdpc_buffer_create(fsdpc_comm *comm, size_t bytes,
                                 fsdpc_buffer **out); /* collective */
fsdpc_status fsdpc_param_buffer_epoch_wait(fsdpc_param_buffer *param_buffer, const char *unit,
                                           fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_param_buffer_copy_in_wait(fsdpc_param_buffer *param_buffer, const char *unit);
fsdpc_status fsdpc_buffer_idle_wait(fsdpc_buffer *buffer, const char *unit);

/* Hands over a split-off communicator to a separate thread. Waits in other threads no longer
 * advance it, and its waits no longer advance their communicators. It also stops using its former
 * thread's callbacks and trace. All ranks of the communicator must call this before its first
 * operation, on the thread that split it off. */
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

/* Returns the number of bytes that an operation covers: all unsharded elements for a gather or
 * reduction, otherwise numel elements. */
size_t fsdpc_coll_bytes(const fsdpc_coll *op, int size);

/* For implementations: aborts with this thread's last error, keeps the error, and returns
 * `status`. */
fsdpc_status fsdpc_comm_poison(fsdpc_comm *comm, fsdpc_status status);
/* Returns FSDPC_ERR_POISONED with the reason if the communicator is poisoned, else FSDPC_OK. */
fsdpc_status fsdpc_comm_health(const fsdpc_comm *comm);
/* The default `abort`, which keeps only the first reason. */
void fsdpc_comm_abort_local(fsdpc_comm *comm, fsdpc_status status, const char *reason);

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
    comm->ops->abort(comm, FSDPC_ERR_POISONED, reason);
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

static inline fsdpc_status fsdpc_comm_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    if (comm->ops->idle)
        return comm->ops->idle(comm, nap, max_ns);
    if (comm->control)
        return fsdpc_comm_idle(comm->control, nap, max_ns);
    if (max_ns > 0)
        sched_yield();
    return FSDPC_OK;
}

static inline void fsdpc_param_buffer_destroy(fsdpc_param_buffer *param_buffer)
{
    if (!param_buffer)
        return;
    fsdpc_device *device = param_buffer->comm->device;
    unsigned char *own = param_buffer->comm->ops->param_buffer_own ? NULL : param_buffer->own;
    param_buffer->comm->ops->param_buffer_destroy(param_buffer);
    fsdpc_device_free(device, own);
}

static inline fsdpc_status fsdpc_param_buffer_arrive(fsdpc_param_buffer *param_buffer,
                                                     const fsdpc_epoch_note *mine)
{
    return param_buffer->comm->ops->epoch_arrive(param_buffer, mine);
}

static inline fsdpc_status fsdpc_param_buffer_copied_in(fsdpc_param_buffer *param_buffer)
{
    return param_buffer->comm->ops->epoch_copied_in(param_buffer);
}

/* Collective: later gathers write to this memory, which must be a whole window of the device
 * (device.h), so the communicator may prepare it in advance. Waits for operations posted earlier.
 * Each rank must detach the memory before freeing it. */
static inline fsdpc_status fsdpc_param_buffer_attach(fsdpc_param_buffer *param_buffer, void *memory,
                                                     size_t bytes)
{
    return param_buffer->comm->ops->param_buffer_attach
               ? param_buffer->comm->ops->param_buffer_attach(param_buffer, memory, bytes)
               : FSDPC_OK;
}

static inline void fsdpc_param_buffer_detach(fsdpc_param_buffer *param_buffer, void *memory)
{
    if (param_buffer->comm->ops->param_buffer_detach)
        param_buffer->comm->ops->param_buffer_detach(param_buffer, memory);
}

static inline void fsdpc_buffer_destroy(fsdpc_buffer *buffer)
{
    if (buffer)
        buffer->comm->ops->buffer_destroy(buffer);
}

#endif
