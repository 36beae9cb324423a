/* Declarations shared by the NCCL communicator's files, which are listed in call order: each file
 * calls only files listed before it.
 *
 *     nccl_call.c       an operation in NCCL's calls, and its memory
 *     nccl_registry.c   memory that is registered with NCCL
 *     nccl_abort.c      ending NCCL's communicators at once
 *     nccl_channel.c    making NCCL's communicators together, watching and closing them
 *     nccl_join.c       sums and extrema that are not NCCL's
 *     nccl_coll.c       operations in flight: launching, following, ending them
 *     nccl_ahead.c      how far the host may run ahead of them
 *     nccl_post.c the table's post, test and order
 *     nccl_register.c   registering memory with NCCL before gathers write to it
 *     comm_nccl.c       lifetime, split, parameter buffers and reduce buffers, waiting, failure
 *
 * The only call in the other direction uses the communicator's table: a failure aborts all groups
 * (comm_nccl.c).
 */
#ifndef FSDPC_CUDA_NCCL_INTERNAL_H
#define FSDPC_CUDA_NCCL_INTERNAL_H

#include <unistd.h>

#include "cuda/control.h"
#include "cuda/nccl_load.h"

/* A group's channels, which are its NCCL communicators. Each channel runs one operation at a time,
 * so gathers and reductions have separate channels. (NCCL's own "channels" are parts of one
 * communicator.) NULL until first needed: groups that only exchange host values use no GPU
 * resources. */
typedef enum fsdpc_nccl_channel {
    FSDPC_NCCL_GATHERS,
    FSDPC_NCCL_REDUCES,
    FSDPC_NCCL_CHANNELS,
} fsdpc_nccl_channel;

typedef enum fsdpc_nccl_progress {
    FSDPC_NCCL_DONE,      /* the GPU has no (more) work for it */
    FSDPC_NCCL_QUEUED,    /* waiting for its turn */
    FSDPC_NCCL_LAUNCHING, /* NCCL has not put it on the stream yet */
    FSDPC_NCCL_RUNNING,   /* on the stream, with an event after it */
} fsdpc_nccl_progress;

/* A posted operation; its storage is reused. */
typedef struct fsdpc_nccl_op {
    struct fsdpc_nccl_op *next;
    fsdpc_coll coll;
    fsdpc_work *work;     /* the caller's, whose impl points here; NULL: it was ordered */
    fsdpc_work agreement; /* on the control: confirms equal posts; carries host values */
    fsdpc_nccl_progress progress;
    fsdpc_nccl_channel channel;
    uint64_t turn;     /* on_gpu: its position among all posts of the thread */
    int64_t posted_ns; /* time of the post */
    bool on_gpu;
    bool captured; /* it runs whenever a graph does; peers compare the capture later */
    cudaEvent_t done;
    void *contributions; /* the others' or all ranks', if our kernels join them; otherwise NULL */
} fsdpc_nccl_op;

/* The group's staging memory for its peers' parts of sums (nccl_join.c). */
typedef struct fsdpc_nccl_staging {
    void *at;
    size_t bytes;
    cudaStream_t last; /* the last stream to access it, until `read`; NULL: not used yet */
    cudaEvent_t read;
} fsdpc_nccl_staging;

/* The order in which one thread passes operations to NCCL: its posting order, across all groups. */
typedef struct fsdpc_nccl_turns {
    uint64_t posted, launched;
} fsdpc_nccl_turns;

/* State shared by a communicator and all communicators split from it. */
typedef struct fsdpc_nccl_world {
    _Atomic int refs;
    int pid; /* process that created it */
    fsdpc_nccl nccl;
    struct fsdpc_comm_nccl *groups;
    fsdpc_nccl_turns turns; /* for groups that are not set apart */
} fsdpc_nccl_world;

/* How the memory that gathers write to is registered with NCCL. */
typedef enum fsdpc_nccl_registers {
    FSDPC_NCCL_NOTHING,
    FSDPC_NCCL_BUFFERS, /* by each rank separately */
    FSDPC_NCCL_WINDOWS, /* by all ranks together */
} fsdpc_nccl_registers;

typedef struct fsdpc_nccl_registered fsdpc_nccl_registered;

typedef struct fsdpc_comm_nccl {
    fsdpc_comm base;
    fsdpc_nccl_world *world;
    struct fsdpc_comm_nccl *next_group;
    fsdpc_nccl_comm channels[FSDPC_NCCL_CHANNELS];
    bool beginning;           /* a channel is being created */
    bool host_waits;          /* the host waits for the device */
    fsdpc_nccl_turns turns;   /* its own, if set apart */
    fsdpc_nccl_op *in_flight; /* in posting order */
    fsdpc_nccl_op *spare;
    int buffers;                    /* created and not yet destroyed */
    fsdpc_nccl_staging staging;     /* while buffers exist */
    fsdpc_nccl_registers registers; /* determined when the gather channel is created */
    fsdpc_nccl_registered *registered;
    int64_t missed_ns;      /* when a missing peer was first noticed; 0: never */
    bool fails_to_register; /* registration failed on all ranks: no more attempts */
} fsdpc_comm_nccl;

/* Returns whether this is a forked child, which must call neither CUDA nor NCCL. */
static inline bool fsdpc_nccl_is_forked(const fsdpc_comm_nccl *self)
{
    return self->world->pid != getpid();
}

static inline fsdpc_comm_nccl *fsdpc_nccl_of(fsdpc_comm *comm)
{
    return (fsdpc_comm_nccl *)comm;
}

/* ---- nccl_call.c ---- */

/* An NCCL call: this rank's operation on a channel and a stream. */
typedef struct fsdpc_nccl_call {
    const fsdpc_nccl *nccl;
    fsdpc_nccl_comm raw;
    cudaStream_t stream;
    const fsdpc_coll *op;
    void *contributions; /* of fsdpc_nccl_op */
    int rank, size;
    bool in_place; /* GATHER: this rank's slices are among the unsharded parameters */
} fsdpc_nccl_call;

static inline bool fsdpc_nccl_is_accepted(fsdpc_nccl_result result)
{
    return result == FSDPC_NCCL_SUCCESS || result == FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result fsdpc_nccl_call_op(const fsdpc_nccl_call *c);

/* For an in-place gather, copies this rank's slices to their places among the unsharded parameters.
 */
fsdpc_status fsdpc_nccl_place_own(const fsdpc_nccl_call *c);
/* For contributions to a reduction, these return the number of elements that each peer sends (also
 * the stride between peers), and where those from `peer` to `rank` start. Slices have the same
 * offsets as in the shard. */
size_t fsdpc_nccl_staging_stride(const fsdpc_coll *op);
unsigned char *fsdpc_nccl_staging_at(void *contributions, size_t stride, int rank, int peer);

/* ---- nccl_registry.c ---- */

struct fsdpc_nccl_registered {
    fsdpc_nccl_registered *next;
    unsigned char *memory;
    size_t bytes;
    fsdpc_nccl_window window; /* otherwise: */
    void *handle;
};

/* Collective. Sets `registers` when the gather channel is created. */
fsdpc_status fsdpc_nccl_learn(fsdpc_comm_nccl *self);
/* Returns the entry that contains `memory`, or NULL if it is not registered. */
fsdpc_nccl_registered *fsdpc_nccl_registered_find(const fsdpc_comm_nccl *self, const void *memory);
/* Removes and frees the entry. `tell`: also deregisters it with NCCL. */
void fsdpc_nccl_registered_drop(fsdpc_comm_nccl *self, fsdpc_nccl_registered *known, bool tell);
/* Drops all registrations, which ended with the gather channel. */
void fsdpc_nccl_forget(fsdpc_comm_nccl *self);

/* ---- nccl_abort.c ---- */

/* Immediately aborts the work on one channel, on both, or on the channels of all groups that end
 * with this one. If this takes more than a few seconds, the device is lost. */
void fsdpc_nccl_channel_abort(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel);
void fsdpc_nccl_channels_abort(fsdpc_comm_nccl *self);
void fsdpc_nccl_groups_abort(fsdpc_comm_nccl *self);
/* Iterates over the groups that a failure of `self` ends, including `self`. Returns the group after
 * `last` (the first if `last` is NULL), or NULL at the end. */
fsdpc_comm_nccl *fsdpc_nccl_ending(const fsdpc_comm_nccl *self, const fsdpc_comm_nccl *last);

/* ---- nccl_channel.c ---- */

/* Collective: creates the channel if it does not exist. */
fsdpc_status fsdpc_nccl_channel_open(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel);
/* Returns FSDPC_IN_PROGRESS while NCCL works on the last call, or an error if the channel has
 * failed since it was created. */
fsdpc_status fsdpc_nccl_channel_state(const fsdpc_comm_nccl *self, fsdpc_nccl_channel channel,
                                      const char *what);
/* Closes the channels in order if the peers do so within a few seconds, and aborts them
 * otherwise. */
void fsdpc_nccl_channels_close(fsdpc_comm_nccl *self);

/* ---- nccl_join.c ---- */

/* Returns whether NCCL only collects contributions and our kernels join them. */
bool fsdpc_nccl_is_joined(const fsdpc_coll *coll);
/* Returns whether the staging memory is too small for `coll`. Before join_open enlarges the memory,
 * the memory must be unused and all posts must have been launched. */
bool fsdpc_nccl_staging_is_short(const fsdpc_comm_nccl *self, const fsdpc_coll *coll);
/* Called at the post. Allocates memory for the contributions, which is freed after they have been
 * read. */
fsdpc_status fsdpc_nccl_join_open(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
void fsdpc_nccl_join_close(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
/* Called before NCCL's part is put on `stream`. */
fsdpc_status fsdpc_nccl_join_begin(const fsdpc_comm_nccl *self, const fsdpc_nccl_op *op,
                                   cudaStream_t stream);
/* Joins them after NCCL's part. */
fsdpc_status fsdpc_nccl_join(fsdpc_comm_nccl *self, const fsdpc_nccl_op *op, fsdpc_stream *stream);
void fsdpc_nccl_staging_free(fsdpc_comm_nccl *self);

/* ---- nccl_coll.c ---- */

/* Returns storage for an operation; storage is free while it is not in the `in_flight` list. */
fsdpc_status fsdpc_nccl_op_take(fsdpc_comm_nccl *self, fsdpc_nccl_op **out);
void fsdpc_nccl_op_give(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
/* Appends the operation to the list and gives it its turn in the launch order. */
void fsdpc_nccl_op_add(fsdpc_comm_nccl *self, fsdpc_nccl_op *op);
bool fsdpc_nccl_is_launched(const fsdpc_nccl_op *op);
bool fsdpc_nccl_is_capturing(const fsdpc_comm_nccl *self);
/* Makes the caller's work idle, regardless of what its operation does next. */
void fsdpc_nccl_work_end(fsdpc_work *work, fsdpc_status status);
/* Advances this rank's operations in flight in all groups, as every wait of this communicator
 * does. */
fsdpc_status fsdpc_nccl_carry_on(fsdpc_comm_nccl *self);
/* Waits until NCCL has put all posts on their streams. Must be called before a wait in the control,
 * which does not advance operations, because peers may be waiting for one that we have not
 * launched. */
fsdpc_status fsdpc_nccl_launched(fsdpc_comm_nccl *self);
/* Waits a few seconds at most for ordered operations to finish. */
void fsdpc_nccl_ops_finish(fsdpc_comm_nccl *self);
/* Ends operations in flight with `status`; they are not accessed again. */
void fsdpc_nccl_ops_drop(fsdpc_comm_nccl *self, fsdpc_status status);
void fsdpc_nccl_ops_free(fsdpc_comm_nccl *self);

/* ---- nccl_ahead.c ---- */

/* Before a post, waits until the host is not too far ahead of the GPU and checks whether old
 * operations can still end. */
fsdpc_status fsdpc_nccl_stay_near(fsdpc_comm_nccl *self);

/* ---- nccl_post.c ---- */

fsdpc_status fsdpc_nccl_post(fsdpc_work *work);
fsdpc_status fsdpc_nccl_test(fsdpc_work *work);
fsdpc_status fsdpc_nccl_order(fsdpc_work *work, fsdpc_stream *stream);

/* ---- nccl_register.c ---- */

fsdpc_status fsdpc_nccl_param_buffer_attach(fsdpc_param_buffer *param_buffer, void *memory,
                                            size_t bytes);
void fsdpc_nccl_param_buffer_detach(fsdpc_param_buffer *param_buffer, void *memory);

#endif
