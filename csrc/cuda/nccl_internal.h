/* What the files of the NCCL communicator share, in the order of a chain: a file calls what stands
 * before it alone.
 *
 *     nccl_call.c       an operation in NCCL's calls, and where its memory lies
 *     nccl_registry.c   which memory NCCL knows
 *     nccl_abort.c      ending NCCL's communicators at once
 *     nccl_channel.c    making NCCL's communicators together, watching and closing them
 *     nccl_join.c       sums and extrema that are not NCCL's
 *     nccl_coll.c       operations in flight: launching, following, ending them
 *     nccl_ahead.c      how far the host may be ahead of them
 *     nccl_post.c       post, test and order of the table
 *     nccl_register.c   making memory known to NCCL before it gathers into it
 *     comm_nccl.c       life, split, wires and buffers, waiting, failure
 *
 * The one way back is through the communicator's table: a failure aborts all groups (comm_nccl.c).
 */
#ifndef FSDPC_CUDA_NCCL_INTERNAL_H
#define FSDPC_CUDA_NCCL_INTERNAL_H

#include <unistd.h>

#include "cuda/control.h"
#include "cuda/nccl_load.h"

/* Which of a group's NCCL communicators: one serves one operation at a time, so gathers and
 * reductions have one each.  (What NCCL itself calls channels are parts of one.)
 * NULL until something first needs it: groups that exchange host values alone take nothing of the
 * GPU. */
typedef enum fsdpc_nccl_channel {
    FSDPC_NCCL_GATHERS,
    FSDPC_NCCL_REDUCES,
    FSDPC_NCCL_CHANNELS,
} fsdpc_nccl_channel;

typedef enum fsdpc_nccl_stage {
    FSDPC_NCCL_DONE,      /* nothing (more) for the GPU to do */
    FSDPC_NCCL_QUEUED,    /* until its turn */
    FSDPC_NCCL_LAUNCHING, /* NCCL has it and has not put it on the stream yet */
    FSDPC_NCCL_RUNNING,   /* on the stream, with the event behind it */
} fsdpc_nccl_stage;

/* A posted operation; kept and used again. */
typedef struct fsdpc_nccl_op {
    struct fsdpc_nccl_op *next;
    fsdpc_coll coll;
    fsdpc_work *work;     /* the caller's, whose impl points here; NULL: it was ordered */
    fsdpc_work agreement; /* on the control: that all posted the same, or, for host memory, all */
    fsdpc_nccl_stage stage;
    fsdpc_nccl_channel channel;
    uint64_t turn;     /* on_gpu: its place among all that the thread posted */
    int64_t posted_ns; /* when */
    bool on_gpu;
    bool captured; /* it runs whenever a graph does; peers compare what was captured later */
    cudaEvent_t done;
    void *contributions; /* of the others or of all, if it is joined here; else NULL */
} fsdpc_nccl_op;

/* Memory of the group in which peers' parts of sums are received (nccl_join.c). */
typedef struct fsdpc_nccl_staging {
    void *at;
    size_t bytes;
    cudaStream_t last; /* that wrote and read there, until `read`; NULL: none did yet */
    cudaEvent_t read;
} fsdpc_nccl_staging;

/* The order in which one thread hands operations to NCCL: that of its posts, over all groups. */
typedef struct fsdpc_nccl_turns {
    uint64_t posted, launched;
} fsdpc_nccl_turns;

/* Shared by a communicator and all that were split from it. */
typedef struct fsdpc_nccl_world {
    _Atomic int refs;
    int pid; /* that it was made in */
    fsdpc_nccl nccl;
    struct fsdpc_comm_nccl *groups;
    fsdpc_nccl_turns turns; /* of groups that are not apart */
} fsdpc_nccl_world;

/* How NCCL is told of memory that gathers write. */
typedef enum fsdpc_nccl_registers {
    FSDPC_NCCL_NOTHING,
    FSDPC_NCCL_BUFFERS, /* by each rank for itself */
    FSDPC_NCCL_WINDOWS, /* by all ranks together */
} fsdpc_nccl_registers;

typedef struct fsdpc_nccl_registered fsdpc_nccl_registered;

typedef struct fsdpc_comm_nccl {
    fsdpc_comm base;
    fsdpc_nccl_world *world;
    struct fsdpc_comm_nccl *next_group;
    fsdpc_nccl_comm channels[FSDPC_NCCL_CHANNELS];
    bool beginning;           /* a channel is being made */
    bool watching;            /* the host waits for the device */
    fsdpc_nccl_turns turns;   /* set apart: its own */
    fsdpc_nccl_op *in_flight; /* in order of posting */
    fsdpc_nccl_op *spare;
    int buffers;                    /* that were made and not destroyed */
    fsdpc_nccl_staging staging;     /* while there are any */
    fsdpc_nccl_registers registers; /* learnt when the channel of gathers is made */
    fsdpc_nccl_registered *registered;
    int64_t missed_ns;      /* when a peer was first seen to be gone; 0: none was */
    bool fails_to_register; /* it did, on all ranks: none is tried any more */
} fsdpc_comm_nccl;

/* In a forked child nothing of CUDA or NCCL may be called. */
static inline bool fsdpc_nccl_is_forked(const fsdpc_comm_nccl *self)
{
    return self->world->pid != getpid();
}

static inline fsdpc_comm_nccl *fsdpc_nccl_of(fsdpc_comm *comm)
{
    return (fsdpc_comm_nccl *)comm;
}

/* ---- nccl_call.c ---- */

/* A call of NCCL: an operation of this rank, on a channel and a stream. */
typedef struct fsdpc_nccl_call {
    const fsdpc_nccl *nccl;
    fsdpc_nccl_comm raw;
    cudaStream_t stream;
    const fsdpc_coll *op;
    void *contributions; /* of fsdpc_nccl_op */
    int rank, size;
    bool in_place; /* GATHER: own slices stand in the full */
} fsdpc_nccl_call;

static inline bool fsdpc_nccl_is_accepted(fsdpc_nccl_result result)
{
    return result == FSDPC_NCCL_SUCCESS || result == FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result fsdpc_nccl_call_op(const fsdpc_nccl_call *c);

/* A gather in place: copies the own slices to their places in the full. */
fsdpc_status fsdpc_nccl_place_own(const fsdpc_nccl_call *c);
/* Contributions to a reduction: the elements that one peer sends, which is the distance between two
 * peers', and where those of `peer` to `rank` begin.  A slice's are at its place in the shard. */
size_t fsdpc_nccl_staging_stride(const fsdpc_coll *op);
unsigned char *fsdpc_nccl_staging_at(void *contributions, size_t stride, int rank, int peer);

/* ---- nccl_registry.c ---- */

struct fsdpc_nccl_registered {
    fsdpc_nccl_registered *next;
    unsigned char *memory;
    size_t bytes;
    fsdpc_nccl_window window; /* else: */
    void *handle;
};

/* Collective, when the channel of gathers is made: sets `registers`. */
fsdpc_status fsdpc_nccl_learn(fsdpc_comm_nccl *self);
/* The entry that `memory` lies in; NULL: NCCL knows nothing of it. */
fsdpc_nccl_registered *fsdpc_nccl_registered_find(const fsdpc_comm_nccl *self, const void *memory);
/* Takes the entry out and frees it.  `tell`: NCCL too. */
void fsdpc_nccl_registered_drop(fsdpc_comm_nccl *self, fsdpc_nccl_registered *known, bool tell);
/* The channel of gathers is gone, and with it what NCCL was told. */
void fsdpc_nccl_forget(fsdpc_comm_nccl *self);

/* ---- nccl_abort.c ---- */

/* Ends everything that runs on the channel, on both, or on those of all groups that end with this
 * one, at once and unfinished.  It takes seconds at most, or the device is lost. */
void fsdpc_nccl_channel_abort(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel);
void fsdpc_nccl_channels_abort(fsdpc_comm_nccl *self);
void fsdpc_nccl_groups_abort(fsdpc_comm_nccl *self);
/* The groups that a failure of `self` ends, `self` among them: the one behind `last`, or the first;
 * NULL: there are no more. */
fsdpc_comm_nccl *fsdpc_nccl_ending(const fsdpc_comm_nccl *self, const fsdpc_comm_nccl *last);

/* ---- nccl_channel.c ---- */

/* Collective: makes the channel if it is not there. */
fsdpc_status fsdpc_nccl_channel_open(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel);
/* FSDPC_IN_PROGRESS while NCCL works on the last call; an error, if anything went wrong since the
 * channel was made. */
fsdpc_status fsdpc_nccl_channel_state(const fsdpc_comm_nccl *self, fsdpc_nccl_channel channel,
                                      const char *what);
/* In order, if peers let us within seconds. */
void fsdpc_nccl_channels_close(fsdpc_comm_nccl *self);

/* ---- nccl_join.c ---- */

/* Whether NCCL only brings contributions together, and kernels of ours join them. */
bool fsdpc_nccl_is_joined(const fsdpc_coll *coll);
/* Whether the staging memory is too small for it.  Before it grows, in join_open, nothing may use
 * it and all that was posted must be launched. */
bool fsdpc_nccl_staging_is_short(const fsdpc_comm_nccl *self, const fsdpc_coll *coll);
/* At the post: memory for the contributions; and when they were read. */
fsdpc_status fsdpc_nccl_join_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
void fsdpc_nccl_join_close(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
/* Before NCCL's part goes on `stream`. */
fsdpc_status fsdpc_nccl_join_begin(const fsdpc_comm_nccl *self, const fsdpc_nccl_op *op,
                                   cudaStream_t stream);
/* Joins them, behind NCCL's part. */
fsdpc_status fsdpc_nccl_join(fsdpc_comm_nccl *self, const fsdpc_nccl_op *op, fsdpc_stream *stream);
void fsdpc_nccl_staging_free(fsdpc_comm_nccl *self);

/* ---- nccl_coll.c ---- */

/* Storage of an operation; given back when it is not in the list `in_flight`. */
fsdpc_status fsdpc_nccl_op_take(fsdpc_comm_nccl *self, fsdpc_nccl_op **out);
void fsdpc_nccl_op_give(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
/* Puts it behind all others, in its turn. */
void fsdpc_nccl_op_add(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
bool fsdpc_nccl_is_launched(const fsdpc_nccl_op *op);
bool fsdpc_nccl_is_capturing(const fsdpc_comm_nccl *self);
/* The caller's work is idle, whatever its operation goes on to do. */
void fsdpc_nccl_work_end(fsdpc_work *work, fsdpc_status status);
/* Carries on what is in flight in any group of this rank, as every wait of this communicator does.
 */
fsdpc_status fsdpc_nccl_carry_on(fsdpc_comm_nccl *self);
/* Waits until NCCL has put all posts on its streams.  Call it before a wait in the control, which
 * advances nothing here, because peers may wait for an operation that we have not launched. */
fsdpc_status fsdpc_nccl_launched(fsdpc_comm_nccl *self);
/* Waits, for seconds at most, until what was ordered is done. */
void fsdpc_nccl_ops_finish(fsdpc_comm_nccl *self);
/* Operations in flight end with `status` and are not touched again. */
void fsdpc_nccl_ops_drop(fsdpc_comm_nccl *self, fsdpc_status status);
void fsdpc_nccl_ops_free(fsdpc_comm_nccl *self);

/* ---- nccl_ahead.c ---- */

/* Before a post: waits until the host is not too far ahead of the GPU, and looks whether what is
 * long in flight can still end. */
fsdpc_status fsdpc_nccl_stay_near(fsdpc_comm_nccl *self);

/* ---- nccl_post.c ---- */

fsdpc_status fsdpc_nccl_post(fsdpc_work *work);
fsdpc_status fsdpc_nccl_test(fsdpc_work *work);
fsdpc_status fsdpc_nccl_order(fsdpc_work *work, fsdpc_stream *stream);

/* ---- nccl_register.c ---- */

fsdpc_status fsdpc_nccl_wire_attach(fsdpc_wire *wire, void *memory, size_t bytes);
void fsdpc_nccl_wire_detach(fsdpc_wire *wire, void *memory);

#endif
