/* Shared declarations of the multi-host communicator.
 *
 *     comm_hosts.c     life, split, the table
 *     hosts_param_buffer.c     parameter buffers, epochs, buffers
 *     hosts_op.c       an operation from post to end
 *     hosts_reduce.c   reductions
 *     hosts_gather.c   gathers
 *     hosts_values.c   all-reduce, all-gather, broadcast and barrier of values
 *     hosts_cross.c    headers and data that one operation sends between hosts
 *
 * No file uses the files listed above it.
 */
#ifndef FSDPC_COMM_HOSTS_INTERNAL_H
#define FSDPC_COMM_HOSTS_INTERNAL_H

#include "comm/comm.h"
#include "comm/transport.h"
#include "comm/host_watch.h"

typedef struct fsdpc_hosts_comm fsdpc_hosts_comm;

/* State shared by a group and every group split from it. */
typedef struct fsdpc_hosts_world {
    int refs; /* number of groups */
    fsdpc_transport *transport;
    fsdpc_hosts_comm *groups;
    uint32_t groups_made, fork_count;
    /* The watch on this host's first rank, over the first group's host communicator, or NULL if
     * there is none. */
    fsdpc_host_watch *watch;
} fsdpc_hosts_world;

/* A rank's description of an operation, which it sends to its peer before the data. */
typedef struct fsdpc_hosts_header {
    uint64_t sequence, bytes, epoch;
    uint32_t kind, dtype, trains, flags;
    int32_t unit, root;
    char what[64];
} fsdpc_hosts_header;

enum { FSDPC_HOSTS_PARTS = 4 }; /* messages per operation and peer, each with its own tag */

/* Memory for an operation's data in transit, kept for the next operation unless a codec is used. It
 * counts as REDUCE for reductions, as STAGING for codes, and as OTHER otherwise. */
typedef struct fsdpc_hosts_staging {
    unsigned char *data;
    size_t bytes;
} fsdpc_hosts_staging;

/* Number of bytes that a reduction needs in each staging buffer. */
typedef struct fsdpc_hosts_staging_bytes {
    size_t here, there, all, codes;
} fsdpc_hosts_staging_bytes;

typedef struct fsdpc_hosts_op {
    struct fsdpc_hosts_op *next;  /* in flight, in posting order; or spare */
    struct fsdpc_hosts_op **home; /* the spare list that it returns to */
    uint64_t made;                /* creation order, in which spare operations are reused */
    fsdpc_work *work;
    uint64_t sequence;
    int phase;       /* each kind of operation has its own phases */
    bool crosses;    /* data goes to other hosts */
    bool needs_turn; /* posts on `later`, in posting order */
    bool compared;
    fsdpc_work host, later;
    fsdpc_hosts_header mine, *theirs; /* from each host */
    fsdpc_transport_op *ops;          /* headers, then data: FSDPC_HOSTS_PARTS per direction and
                                       * host */
    int n_ops;
    fsdpc_slice *slices;
    size_t n_slices;
    fsdpc_transport_run
        *rows;         /* for a gather: the rows in the parameter buffer, of each host and slice */
    size_t done_numel; /* for values: elements of earlier rounds */
    fsdpc_hosts_staging here, there, all, codes;
} fsdpc_hosts_op;

struct fsdpc_hosts_comm {
    fsdpc_comm base;
    fsdpc_comm *host;  /* the ranks of this host, which compare every operation */
    fsdpc_comm *later; /* the same ranks; for second phases of operations, in posting order */
    fsdpc_hosts_world *world;
    fsdpc_transport *transport; /* the world's */
    int n_hosts, local_size;    /* ranks per host */
    int this_host, local_rank;
    int *peers; /* the transport rank of this local rank on each host */
    uint32_t group;
    uint64_t posted;
    fsdpc_hosts_op *pending, *spare;
    fsdpc_status broke; /* a failure while another wait advanced this group; reported once, then
                         * OK */
    struct fsdpc_hosts_comm *next_group; /* of world->groups */
};

/* Rows received from other hosts for the gather at this offset in the parameter buffer. */
typedef struct fsdpc_hosts_rows {
    size_t offset;
    uint64_t generation; /* the generation that was received */
} fsdpc_hosts_rows;

typedef struct fsdpc_hosts_note {
    fsdpc_epoch_note note;
    uint64_t epoch;
} fsdpc_hosts_note;

typedef struct fsdpc_hosts_param_buffer {
    fsdpc_param_buffer base;
    fsdpc_param_buffer *host;
    uint64_t sequence; /* number of the epoch */
    bool sent;         /* this host's note was sent */
    fsdpc_epoch_note note;
    fsdpc_hosts_note *notes; /* from each host */
    fsdpc_transport_op *ops;
    uint64_t generation; /* number of epochs with changes */
    fsdpc_hosts_rows *rows;
    size_t n_rows, next_rows;
} fsdpc_hosts_param_buffer;

typedef struct fsdpc_hosts_buffer {
    fsdpc_buffer base;
    fsdpc_buffer *host;
    fsdpc_hosts_op *spare; /* for its reductions, with their memory */
} fsdpc_hosts_buffer;

static inline fsdpc_hosts_comm *fsdpc_hosts_of(fsdpc_comm *comm)
{
    return (fsdpc_hosts_comm *)comm;
}

/* Returns the stream of a rank's own arithmetic: inline, or the threads of the device. */
static inline fsdpc_stream fsdpc_hosts_stream(const fsdpc_hosts_comm *self)
{
    return (fsdpc_stream){.device = self->base.device, .name = "hosts"};
}

/* ---- hosts_cross.c ---- */

/* Returns the number of header messages at the start of every operation. */
static inline int fsdpc_hosts_headers(const fsdpc_hosts_comm *self)
{
    return 2 * (self->n_hosts - 1);
}

/* Posts all header messages to and from the other hosts at once. */
fsdpc_status fsdpc_hosts_begin(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* Sends (or receives) the message for one part (1 to FSDPC_HOSTS_PARTS - 1) to (or from) the same
 * local rank on another host. */
fsdpc_status fsdpc_hosts_send(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                              const void *data, size_t bytes);
fsdpc_status fsdpc_hosts_receive(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                                 void *data, size_t bytes);
/* Posts both messages with a host, of equal length, for this part. */
fsdpc_status fsdpc_hosts_exchange(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, int host, int part,
                                  void *to, const void *from, size_t bytes);
/* Returns FSDPC_IN_PROGRESS until everything has been sent and received; fails if headers
 * differ. */
fsdpc_status fsdpc_hosts_crossed(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* Returns the tag for one part of the operation or epoch with this sequence number. */
uint32_t fsdpc_hosts_tag(const fsdpc_hosts_comm *self, uint64_t sequence, int part);
/* Ensures that the staging memory holds at least `bytes` bytes. */
fsdpc_status fsdpc_hosts_staging_for(fsdpc_hosts_comm *self, fsdpc_mem_kind kind,
                                     fsdpc_hosts_staging *staging, size_t bytes);
void fsdpc_hosts_staging_free(fsdpc_hosts_comm *self, fsdpc_hosts_staging *staging);
/* Takes the first spare operation or creates one; fsdpc_hosts_op_return puts it back. */
fsdpc_status fsdpc_hosts_op_take(fsdpc_hosts_comm *self, fsdpc_hosts_op **home,
                                 fsdpc_hosts_op **out);
void fsdpc_hosts_op_return(fsdpc_hosts_op *op);
void fsdpc_hosts_op_free(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
void fsdpc_hosts_ops_free(fsdpc_hosts_comm *self, fsdpc_hosts_op **home); /* all spare ones */

/* ---- hosts_values.c: one step of an operation on values, which has its turn ---- */

fsdpc_status fsdpc_hosts_values_step(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);

/* ---- hosts_gather.c ---- */

/* Checks whether other hosts' rows have changed since they were last received; all ranks get the
 * same result. */
fsdpc_status fsdpc_hosts_needs_rows(const fsdpc_coll *coll, bool *needs_out);
/* Sends this rank's rows and receives its peers' rows, in place if the transport supports runs and
 * there is no codec. */
fsdpc_status fsdpc_hosts_cross_rows(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* Call when all have come: copies or decodes received rows into the unsharded parameters unless
 * they are already there. */
fsdpc_status fsdpc_hosts_place_rows(const fsdpc_hosts_comm *self, const fsdpc_hosts_op *op);

/* ---- hosts_reduce.c: the phases of a reduction ---- */

fsdpc_hosts_staging_bytes fsdpc_hosts_staging_bytes_for(fsdpc_coll_kind kind, fsdpc_dtype dtype,
                                                        fsdpc_codec codec, size_t numel,
                                                        size_t n_slices, int n_hosts,
                                                        int local_size);
/* Posts the sum over the host's ranks. */
fsdpc_status fsdpc_hosts_post_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* Sends this host's sums; when they have crossed, sends what a second hop needs, if there is one. */
fsdpc_status fsdpc_hosts_cross_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
fsdpc_status fsdpc_hosts_spread_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* For a REDUCE_ALL, in its turn: gathers the parts of all ranks of the host. */
fsdpc_status fsdpc_hosts_share_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);
/* Adds, scales and rounds into the shard. */
fsdpc_status fsdpc_hosts_finish_sums(fsdpc_hosts_comm *self, fsdpc_hosts_op *op);

/* ---- hosts_op.c ---- */

static inline bool fsdpc_hosts_is_coded(const fsdpc_coll *coll)
{
    return coll->codec != FSDPC_CODEC_EXACT;
}

fsdpc_status fsdpc_hosts_post(fsdpc_work *work);
fsdpc_status fsdpc_hosts_test(fsdpc_work *work);
/* Advances this rank's operations in flight in all groups except those set apart. A failure is
 * reported in the group where it occurred. */
void fsdpc_hosts_carry_on(void *world);
/* Does the same, or advances only this group if it is set apart, and returns this group's
 * result. */
fsdpc_status fsdpc_hosts_progress(fsdpc_hosts_comm *self);

/* Drops the operations in flight after the communicator has failed. */
void fsdpc_hosts_drop(fsdpc_hosts_comm *self);

/* ---- hosts_param_buffer.c ---- */

fsdpc_status fsdpc_hosts_param_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_tier *tier,
                                             fsdpc_param_buffer **out);
void fsdpc_hosts_param_buffer_destroy(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_hosts_epoch_arrive(fsdpc_param_buffer *param_buffer,
                                      const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_hosts_epoch_test(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_hosts_epoch_copied_in(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_hosts_epoch_copy_in_test(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_hosts_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out);
void fsdpc_hosts_buffer_destroy(fsdpc_buffer *buffer);
fsdpc_status fsdpc_hosts_buffer_idle(fsdpc_buffer *buffer);

#endif
