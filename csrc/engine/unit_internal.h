/* The struct of a unit, for the files of csrc/engine and the C tests of them. */
#ifndef FSDPC_ENGINE_UNIT_INTERNAL_H
#define FSDPC_ENGINE_UNIT_INTERNAL_H

#include <assert.h>
#include <stdatomic.h>

#include "engine/unit.h"

/* Where a reduction is; a posted one has left `buffer`. */
typedef enum fsdpc_reduction {
    FSDPC_REDUCTION_NONE,
    FSDPC_REDUCTION_SHARD,     /* over the shard group, or over replicas if that is one rank */
    FSDPC_REDUCTION_REPLICATE, /* of the partial, over the replicas */
} fsdpc_reduction;

/* Of a parameter; ranks agree on the highest. */
typedef enum fsdpc_grad_state {
    FSDPC_GRAD_NONE,
    FSDPC_GRAD_OLD, /* a front door has seen it */
    FSDPC_GRAD_NEW, /* a contribution came since */
} fsdpc_grad_state;

enum { FSDPC_MICRO_LEVELS = 32 }; /* 2^32 contributions */

/* Sums of 2^height contributions each, highest first; see micro.c. */
typedef struct fsdpc_micro_sums {
    int heights[FSDPC_MICRO_LEVELS], n;
} fsdpc_micro_sums;

/* An optimizer's step that goes on after its call: its units are stepped when somebody needs them
 * (optim_step.c).  Until it has ended, masters and states of its units may be old. */
typedef struct fsdpc_pending fsdpc_pending;
struct fsdpc_pending {
    fsdpc_pass_hook pass; /* steps the rest, and writes all to its place */
    fsdpc_status (*advance)(fsdpc_pending *pending, const fsdpc_unit *unit); /* up to this one */
};

typedef struct fsdpc_unit_group {
    const fsdpc_group *plan;
    fsdpc_dtype wire_dtype, reduce_dtype, grad_dtype;
    size_t wire_offset;   /* bytes into the root's wire */
    size_t reduce_offset; /* bytes into a reduce buffer of this unit */
    size_t grad_offset;   /* bytes into a partial, or into a level of micro-step sums */
    fsdpc_slice whole;    /* of the shard, as a reduction of partials takes it */
    fsdpc_coll_sum *sums; /* that the posted reduction leaves, where it leaves several (micro.c) */
    unsigned char *master, *grad;
    bool spread;  /* masters lie in `master` as they do in the full (unit.c) */
    bool in_wire; /* and read as the wire: what differs from it are copies of pages */
    fsdpc_extent *master_extent, *grad_extent; /* that they are the memory of; NULL: the device's */
    unsigned char *full;                       /* what modules read; see full.h */
    unsigned char *target;    /* where a gather writes it: the same memory, by the address that
                                 transports are given; NULL where a gather moves nothing */
    void *own_block;          /* the block that holds it in no-alias mode */
    unsigned char *published; /* this rank's slices, where the wire does not hold them; else NULL */
    fsdpc_work gather, reduce;
} fsdpc_unit_group;

struct fsdpc_unit {
    /* What it is.  Written by unit.c; id, root and offsets by root.c. */
    int id; /* order within the root; -1 before */
    char *name;
    fsdpc_layout *layout;
    fsdpc_unit_group *groups; /* layout->n_groups */
    int n_trained;            /* how many of them, the first ones, have gradients */
    fsdpc_mesh mesh;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_root *root; /* NULL before the first forward */
    fsdpc_offload offload;
    size_t reduce_bytes, wire_bytes, grad_bytes;

    /* Settings.  Written by unit.c. */
    fsdpc_unit_settings settings;
    bool no_alias;
    bool *trainable;       /* per parameter: ranks compare it; what has a gradient is in `grads` */
    bool *agreed;          /* what it was when they did; written by agree.c */
    fsdpc_unit **ahead[2]; /* gathered ahead of forward [0] and backward [1]; NULL: as recorded */
    int n_ahead[2];

    /* Memory where gathers move bytes, written by full_moved.c; and where fulls are lent, by unit.c.
     */
    int slot;                  /* -1: it shares with nobody */
    fsdpc_window *window;      /* what shares, or did */
    unsigned char *room;       /* of its own */
    fsdpc_full_room full_room; /* take NULL: none */

    /* Gather.  Written by gather.c, full.c and sched.c; changes of masters by whoever makes them.
     */
    fsdpc_unit_state state;
    fsdpc_event *released;  /* order.c; NULL unless its root overlaps */
    int held;               /* unshard() calls not yet given back */
    bool dirty;             /* masters are known to differ from the wire */
    bool foreign;           /* masters may differ: somebody holds a writable piece */
    uint32_t published_crc; /* full_file.c: of what this rank published */

    /* A step that goes on.  Written by optim_step.c; `late` by epoch.c and gather.c. */
    fsdpc_pending *pending; /* NULL: none */
    bool puts_off;          /* the step that is about to begin will go on behind it, on this rank */
    bool late;              /* slices may come after the epoch of the step, until the next gather */
    _Atomic int lent; /* tensors on its gradients and states: it does not wait to be stepped */

    /* Calls.  Written by sched.c and call.c. */
    bool stays;       /* more modules of it are to run in this forward */
    bool in_backward; /* between pre_backward and post_backward */
    int running;      /* forwards of it, one inside the other */
    int runs;         /* of its modules, in the forward of epoch `run_epoch` */
    uint64_t run_epoch;
    uint64_t seen_generation; /* of the weights, by the last forward outside backward */
    uint64_t seen_from;       /* on the front door's clock, when it was first seen */

    /* Reduce.  Written by fill.c and reduce.c; `forget` by grads.c. */
    bool *filled; /* per parameter: the open reduce buffer holds a contribution */
    int n_filled;
    bool keeps; /* the open buffer holds the sums of whole backwards, which did not synchronise */
    fsdpc_buffer *buffer;     /* being filled; NULL: none open */
    bool stays_open;          /* through backward, so that it fills no pooled buffer */
    fsdpc_buffer *own_buffer; /* of units that stay open, or were too many; NULL: not created */
    fsdpc_buffer shard;       /* the gradient shard as a buffer: fill.h */
    fsdpc_buffer *partial;    /* of the posted reduction, or holding postponed sums */
    fsdpc_buffer *own_partial;
    fsdpc_reduction reduction;
    bool partial_live; /* the partial holds sums whose all-reduce was postponed */
    bool postpone;     /* the posted reduction ends in the partial */
    bool hidden;       /* the sum that is being reduced stays invisible (no_sync) */
    bool forget;       /* gradients were zeroed meanwhile: the sum is not wanted */
    bool fresh;        /* this backward has reduced, and there was nothing to add to */

    /* Accumulate.  Written by reduce.c, grads.c, micro.c and clip.c. */
    bool grad_live;
    bool grads_lent;                         /* the shards lie in memory of others, */
    bool grads_away;                         /* or nowhere, until they have some */
    uint8_t *grads;                          /* per parameter, the state of its reduced gradient:
                                                fsdpc_grad_state */
    unsigned char *sums[FSDPC_MICRO_LEVELS]; /* deterministic: see micro.h */
    fsdpc_micro_sums micro;
    int sum_to, n_sums; /* of the posted reduction: the level of its sum, or how many it leaves */
    bool sum_adds;      /* to what is there */
    bool folded;
    double fold_scale;       /* by which the fold multiplies; 1: reductions divide */
    int n_micro;             /* micro-steps since the gradient was zeroed */
    uint64_t micro_backward; /* the backward of the last one */
    double pending_scale;
    double *clip_factor; /* in a remote device's memory; NULL on others */
    bool clipped;        /* clip_factor is pending too */
};

static inline bool fsdpc_grad_exists(const fsdpc_unit *unit, int param)
{
    return unit->grad_live && unit->grads[param] != FSDPC_GRAD_NONE;
}

/* Tensors of others lie on its masters, gradients or states, so these may change at any time. */
static inline bool fsdpc_unit_is_shared(const fsdpc_unit *unit)
{
    return unit->foreign || atomic_load_explicit(&unit->lent, memory_order_relaxed) > 0;
}

/* Is a factor pending on its gradients? */
static inline bool fsdpc_unit_is_scaled(const fsdpc_unit *unit)
{
    return unit->pending_scale != 1 || unit->clipped;
}

/* The part of it in the device's memory; NULL: none. */
static inline const double *fsdpc_unit_scale_at(const fsdpc_unit *unit)
{
    return unit->clipped ? unit->clip_factor : NULL;
}

/* Does the end of its forward give the full up?  Not where modules of it are still to run, and not
 * where other ranks may run it. */
static inline bool fsdpc_unit_reshards(const fsdpc_unit *unit)
{
    return unit->settings.reshard_after_forward && !unit->stays && !unit->settings.rank_dependent;
}

/* Before its rows of the wire are read, or its gradient shards are used. */
static inline fsdpc_status fsdpc_unit_advance(fsdpc_unit *unit)
{
    return unit->pending ? unit->pending->advance(unit->pending, unit) : FSDPC_OK;
}

/* Before its masters are used, or states of its parameters. */
static inline fsdpc_status fsdpc_unit_end_step(const fsdpc_unit *unit)
{
    return unit->pending ? unit->pending->pass.end(&unit->pending->pass) : FSDPC_OK;
}

static inline int fsdpc_unit_rank(const fsdpc_unit *unit)
{
    return unit->mesh.shard->rank;
}

/* Lets spread masters read as the wire, which has room for the group; others stay as they are. */
fsdpc_status fsdpc_unit_join_wire(fsdpc_unit *unit, fsdpc_unit_group *group,
                                  const fsdpc_wire *wire);
void fsdpc_unit_leave_wire(fsdpc_unit *unit); /* which goes; what masters read stays */
/* Of frozen masters that were published: they equal the wire. */
void fsdpc_unit_drop_copies(fsdpc_unit *unit);

/* Where this rank's slice of a band has its master: its elements from `at` on, counted in the shard;
 * for the step itself, which may go on. */
static inline unsigned char *fsdpc_unit_stepped(const fsdpc_unit *unit,
                                                const fsdpc_unit_group *group,
                                                const fsdpc_slice *band, size_t at)
{
    size_t place = group->spread ? fsdpc_slice_full(band, fsdpc_unit_rank(unit), at) : at;
    return group->master + place * fsdpc_dtype_bytes(group->plan->dtype);
}

/* The same for all others; a lint holds that. */
static inline unsigned char *fsdpc_unit_masters(const fsdpc_unit *unit,
                                                const fsdpc_unit_group *group,
                                                const fsdpc_slice *band, size_t at)
{
    assert(!unit->pending);
    return fsdpc_unit_stepped(unit, group, band, at);
}

#endif
