/* GPUs over NCCL: a communicator whose bytes go from device to device, and whose words go over
 * another communicator, the control, that the ranks have already.
 *
 *     comm_nccl.c   life, split, wires and buffers, waiting, failure
 *     nccl_lane.c   NCCL's own communicators: making them together, watching and ending them
 *     nccl_coll.c   collectives
 *
 * The control carries what is small and lives on the host: epochs and their notes, agreement on
 * what is posted, the identities that NCCL begins with, values in host memory, who died and who is
 * late.
 */
#ifndef FSDPC_CUDA_COMM_NCCL_H
#define FSDPC_CUDA_COMM_NCCL_H

#include "cuda/control.h"
#include "cuda/nccl_load.h"

/* Collective over config->control, which may be any communicator of the same ranks over host
 * memory: it is taken over on success and stays the caller's otherwise.  config->device is a GPU,
 * one for each rank.  FSDPC_ERR_UNSUPPORTED on all ranks if one has no NCCL. */
fsdpc_status fsdpc_comm_nccl_create(const fsdpc_comm_config *config, fsdpc_comm **out);

/* A communicator of NCCL's serves one operation at a time, so gathers and reductions have one each.
 * NULL until something first needs it: groups that exchange host values alone take nothing of the
 * GPU. */
typedef enum fsdpc_nccl_lane {
    FSDPC_NCCL_GATHERS,
    FSDPC_NCCL_REDUCES,
    FSDPC_NCCL_LANES,
} fsdpc_nccl_lane;

typedef enum fsdpc_nccl_stage {
    FSDPC_NCCL_LANDED,    /* nothing (more) for the GPU to do */
    FSDPC_NCCL_QUEUED,    /* until its turn */
    FSDPC_NCCL_LAUNCHING, /* NCCL has it and has not put it on the stream yet */
    FSDPC_NCCL_RUNNING,   /* on the stream, with the event behind it */
} fsdpc_nccl_stage;

/* A posted operation; kept and used again. */
typedef struct fsdpc_nccl_flight {
    struct fsdpc_nccl_flight *next;
    fsdpc_coll op;
    fsdpc_work *work;     /* the caller's, whose impl points here; NULL: it was ordered */
    fsdpc_work agreement; /* on the control: that all posted the same, or, for host memory, all */
    fsdpc_nccl_stage stage;
    fsdpc_nccl_lane lane;
    uint64_t turn; /* on_gpu: its place among all that the thread posted */
    bool on_gpu;
    cudaEvent_t landed;
} fsdpc_nccl_flight;

/* The order in which one thread hands operations to NCCL: that of its posts, over all groups. */
typedef struct fsdpc_nccl_turns {
    uint64_t posted, launched;
} fsdpc_nccl_turns;

/* What a communicator and all that were split from it share. */
typedef struct fsdpc_nccl_world {
    _Atomic int refs;
    int pid; /* in a forked child nothing of CUDA may be touched */
    fsdpc_nccl nccl;
    struct fsdpc_comm_nccl *groups;
    fsdpc_nccl_turns turns; /* of groups that are not apart */
} fsdpc_nccl_world;

typedef struct fsdpc_comm_nccl {
    fsdpc_comm base;
    fsdpc_comm *control; /* owned */
    fsdpc_nccl_world *world;
    struct fsdpc_comm_nccl *next_group;
    fsdpc_nccl_comm lanes[FSDPC_NCCL_LANES];
    bool beginning;             /* a lane is being made */
    bool watching;              /* the host waits for the device */
    fsdpc_nccl_turns turns;     /* set apart: its own */
    fsdpc_nccl_flight *flights; /* in order of posting */
    fsdpc_nccl_flight *spare;
} fsdpc_comm_nccl;

static inline fsdpc_comm_nccl *fsdpc_nccl_of(fsdpc_comm *comm)
{
    return (fsdpc_comm_nccl *)comm;
}

/* `status` of a call on the control; what closed that closes this one too. */
static inline fsdpc_status fsdpc_nccl_settle(fsdpc_comm_nccl *self, fsdpc_status status)
{
    return fsdpc_control_settle(&self->base, self->control, status);
}

/* ---- nccl_lane.c ---- */

/* Collective: makes the lane if it is not there. */
fsdpc_status fsdpc_nccl_lane_open(fsdpc_comm_nccl *self, fsdpc_nccl_lane lane);
/* FSDPC_IN_PROGRESS while NCCL works on the last call; an error, if anything went wrong since the
 * lane was made. */
fsdpc_status fsdpc_nccl_lane_state(const fsdpc_comm_nccl *self, fsdpc_nccl_lane lane,
                                   const char *what);
/* Whatever runs on the lanes ends, at once and unfinished. */
void fsdpc_nccl_lanes_abort(fsdpc_comm_nccl *self);
/* In order, if peers let us within seconds. */
void fsdpc_nccl_lanes_close(fsdpc_comm_nccl *self);

/* ---- nccl_coll.c ---- */

fsdpc_status fsdpc_nccl_post(fsdpc_work *work);
fsdpc_status fsdpc_nccl_test(fsdpc_work *work);
fsdpc_status fsdpc_nccl_order(fsdpc_work *work, fsdpc_stream *stream);
/* Carries on what is in flight in any group of this rank, as every wait of this communicator does.
 */
fsdpc_status fsdpc_nccl_carry_on(fsdpc_comm_nccl *self);
/* Waits until NCCL has put all that was posted on its streams: before a wait in the control, which
 * carries nothing on, for peers that may wait for what we have not launched. */
fsdpc_status fsdpc_nccl_launched(fsdpc_comm_nccl *self);
/* Waits, for seconds at most, until what was ordered has landed. */
void fsdpc_nccl_flights_land(fsdpc_comm_nccl *self);
/* Operations in flight end with `status` and are not touched again. */
void fsdpc_nccl_flights_drop(fsdpc_comm_nccl *self, fsdpc_status status);
void fsdpc_nccl_flights_free(fsdpc_comm_nccl *self);

#endif
