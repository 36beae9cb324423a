/* The unit's struct, shared by the files of csrc/engine and their C tests. */
#ifndef FSDPC_ENGINE_UNIT_INTERNAL_H
#define FSDPC_ENGINE_UNIT_INTERNAL_H

#include <assert.h>
#include <stdatomic.h>

#include "engine/unit.h"

/* The stage of a reduction, which owns `buffer` once it is posted. */
typedef enum fsdpc_reduction {
    FSDPC_REDUCTION_NONE,
    FSDPC_REDUCTION_SHARD,     /* over the shard group, or over replicas if that is one rank */
    FSDPC_REDUCTION_REPLICATE, /* the partial, over the replicas */
} fsdpc_reduction;

/* What a codec leaves out; see codec_error.h. */
typedef struct fsdpc_coded_error {
    fsdpc_exact_sum left_out, meant; /* squares of this rank since the last report */
    fsdpc_coded_report report;
    bool said; /* the log has said that it is exact */
} fsdpc_coded_error;

/* The state of a parameter's gradient; ranks agree on the highest value. */
typedef enum fsdpc_grad_state {
    FSDPC_GRAD_NONE,
    FSDPC_GRAD_OLD, /* the frontend has seen it */
    FSDPC_GRAD_NEW, /* a contribution came after that */
} fsdpc_grad_state;

enum { FSDPC_MICRO_LEVELS = 32 }; /* 2^32 contributions */

/* Sums of 2^height contributions each, highest first; see micro.c. */
typedef struct fsdpc_micro_sums {
    int heights[FSDPC_MICRO_LEVELS], n;
} fsdpc_micro_sums;

/* An optimizer step that continues after the call returns, stepping each unit when it is next
 * needed (optim_step.c). Until the step ends, masters and states of its units may be out of
 * date. */
typedef struct fsdpc_pending fsdpc_pending;
struct fsdpc_pending {
    fsdpc_pass_hook pass; /* steps the remaining units, and writes everything back */
    fsdpc_status (*advance)(fsdpc_pending *pending, const fsdpc_unit *unit); /* steps units up to
                                                                              * this one */
};

typedef struct fsdpc_unit_group {
    const fsdpc_group *plan;
    fsdpc_dtype param_dtype, reduce_dtype, grad_dtype;
    size_t param_buffer_offset; /* bytes into the root's parameter buffer */
    size_t reduce_offset;       /* bytes into a reduce buffer of this unit */
    size_t grad_offset;         /* bytes into a partial, or into a level of micro-step sums */
    fsdpc_slice whole;          /* the shard as one slice, for reducing partials */
    fsdpc_coll_sum *sums;       /* sums that the posted reduction leaves, if it leaves several
                           * (micro.c) */
    unsigned char *master, *grad;
    bool spread; /* `master` has the layout of the unsharded parameters (unit.c) */
    bool
        in_param_buffer; /* `master` maps the parameter buffer: only pages that differ are copies */
    fsdpc_extent *master_extent, *grad_extent; /* extents that contain them; NULL: device memory */
    unsigned char *unsharded;                  /* the memory that modules read; see unsharded.h */
    unsigned char *target; /* where a gather writes it: the same memory, at the address that
                               * communicators use; NULL if a gather moves nothing */
    void *own_block;       /* in no-alias mode, the block that contains the unsharded parameters */
    unsigned char
        *own_slices; /* this rank's slices, if they are not in the parameter buffer; else NULL */
    fsdpc_codec_error errors[FSDPC_STAGES]; /* what its reductions leave out: codec_error.h */
    fsdpc_work gather, reduce;
} fsdpc_unit_group;

/* Steps units as soon as their gradients are reduced (optim_backward.c), and lends them the memory
 * of their gradient shards until then. */
typedef struct fsdpc_backward_steps fsdpc_backward_steps;
struct fsdpc_backward_steps {
    /* Called before a unit's first gradient of a backward; finds errors that all ranks make. */
    fsdpc_status (*open)(fsdpc_backward_steps *self, fsdpc_unit *unit);
    /* Lends memory before a reduction writes it. *busy_out: a unit whose reduction must be finished
     * first, because it has the memory; NULL: done. */
    fsdpc_status (*lend)(fsdpc_backward_steps *self, fsdpc_unit *unit, fsdpc_unit **busy_out);
    /* Steps a unit whose gradients are reduced, and takes the memory back. */
    fsdpc_status (*step)(fsdpc_backward_steps *self, fsdpc_unit *unit);
    /* Returns its units to steps after backward. */
    fsdpc_status (*leave)(fsdpc_backward_steps *self);
};

typedef struct fsdpc_low_rank fsdpc_low_rank; /* low_rank.h */

struct fsdpc_unit {
    /* Identity. Written by unit.c; root.c writes id, root and offsets. */
    int id; /* order within the root; -1 before there is one */
    char *name;
    fsdpc_layout *layout;
    fsdpc_unit_group *groups; /* layout->n_groups */
    int n_trained;            /* how many of them have gradients: the first ones */
    fsdpc_mesh mesh;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_root *root; /* NULL before the first forward */
    fsdpc_offload offload;
    fsdpc_codec gather_codec; /* see unsharded.h */
    size_t reduce_bytes, param_buffer_bytes, grad_bytes;

    /* Settings. Written by unit.c. */
    fsdpc_unit_settings settings;
    bool no_alias;
    bool *trainable;       /* per parameter, compared by ranks; `grads` tells which have a
                            * gradient */
    bool *agreed;          /* its value at the last comparison; written by agree.c */
    fsdpc_unit **ahead[2]; /* gathered ahead of forward [0] and backward [1]; NULL: as recorded */
    int n_ahead[2];

    /* Memory. Written by unsharded_slots.c if gathers move bytes, or by unit.c if a frontend
     * provides the memory. */
    int slot;                              /* -1: it shares with no unit */
    fsdpc_window *window;                  /* the memory that it shares, or shared */
    unsigned char *room;                   /* the unit's own memory */
    fsdpc_frontend_memory frontend_memory; /* take is NULL: none */

    /* What codecs leave out. Written by codec_error.c. */
    fsdpc_coded_error coded[FSDPC_CODED_COUNT];
    fsdpc_codec_error gather_error;

    /* Gather. Written by gather.c, unsharded.c and sched.c; code that changes masters sets `dirty`
     * and `foreign`.
     */
    fsdpc_unit_state state;
    fsdpc_event *released;  /* order.c; NULL unless its root overlaps streams */
    int held;               /* unshard() calls without their reshard() */
    bool dirty;             /* masters are known to differ from the parameter buffer */
    bool foreign;           /* masters may differ: a caller has a writable local shard */
    uint32_t copied_in_crc; /* unsharded_file.c: checksum of this rank's own slices */

    /* A pending step. Written by optim_step.c; epoch.c and gather.c write `copy_in_later`. */
    fsdpc_pending *pending; /* NULL: none */
    bool puts_off;          /* the step that is about to begin will be pending on this rank */
    const void *swapped;    /* the optimizer whose averages the masters are now; NULL: none */
    bool copy_in_later;     /* until the next gather: slices may be copied in after the step's
                             * epoch */
    _Atomic int exports;    /* tensors on its gradients and states, which keep its steps from being
                             * deferred */

    /* Calls. Written by sched.c and call.c. */
    bool stays;       /* more of its modules will run in this forward */
    bool in_backward; /* between pre_backward and post_backward */
    int running;      /* nesting depth of its forwards */
    int runs;         /* modules that ran in the forward of epoch `run_epoch` */
    uint64_t run_epoch;
    uint64_t seen_generation; /* generation of the weights in the last forward outside backward */
    uint64_t seen_from;       /* when that generation was first seen, on the frontend's clock */

    /* Reduce. Written by fill.c and reduce.c; grads.c writes `forget`. */
    bool *filled; /* per parameter: the open reduce buffer holds a contribution */
    int n_filled;
    bool keeps; /* the open buffer holds sums of whole backwards that did not synchronise */
    fsdpc_buffer *buffer;     /* being filled; NULL: none is open */
    bool stays_open;          /* throughout backward, so it fills no pooled buffer */
    fsdpc_buffer *own_buffer; /* if the unit stays open, or found no free pooled buffer; NULL: not
                               * created */
    fsdpc_buffer shard;       /* the gradient shard as a buffer: fill.h */
    fsdpc_buffer *partial;    /* the posted reduction's, or contains postponed sums */
    fsdpc_buffer *own_partial;
    fsdpc_reduction reduction;
    bool partial_live;        /* the partial contains sums whose all-reduce was postponed */
    bool postpone;            /* the posted reduction ends in the partial */
    bool hidden;              /* the sum being reduced stays invisible (no_sync) */
    bool forget;              /* gradients were zeroed meanwhile: the sum is discarded */
    bool fresh;               /* this backward has reduced, and had no earlier gradient to add to */
    fsdpc_low_rank *low_rank; /* written by low_rank.c; NULL: sums over replicas are exact */
    fsdpc_work low_rank_work;
    float *low_rank_state;                /* errors, Q, P and a row; may precede the root */
    fsdpc_low_rank_sizes low_rank_sizes;  /* of this memory */
    uint64_t low_rank_sums;               /* sums over replicas that were begun */
    fsdpc_backward_steps *backward_steps; /* written by optim_backward.c; NULL: none */
    uint64_t stepped_in; /* the model's backward in which `backward_steps` last stepped it */

    /* Accumulate. Written by reduce.c, grads.c, micro.c and clip.c. */
    bool grad_live;
    bool grads_in_frontend;                  /* the shards are in the caller's memory, */
    bool grads_away;                         /* or have no memory while they are empty */
    uint8_t *grads;                          /* per parameter, the state of its reduced gradient:
                                              * fsdpc_grad_state */
    unsigned char *sums[FSDPC_MICRO_LEVELS]; /* deterministic: see micro.h */
    fsdpc_micro_sums micro;
    int sum_to, n_sums; /* the posted reduction's: the level of its sum, or how many sums it
                         * leaves */
    bool sum_adds;      /* adds to the existing sum */
    bool folded;
    double fold_scale;       /* multiplies the sums in the fold; 1: reductions divide */
    int n_micro;             /* micro-steps since the gradient was zeroed */
    uint64_t micro_backward; /* the backward of the last micro-step */
    double pending_scale;
    double *clip_factor; /* in a remote device's memory; NULL for other devices */
    bool clipped;        /* clip_factor is also pending */
};

static inline bool fsdpc_grad_exists(const fsdpc_unit *unit, int param)
{
    return unit->grad_live && unit->grads[param] != FSDPC_GRAD_NONE;
}

/* Returns whether other code has tensors that use the unit's masters, gradients or states, which
 * may therefore change at any time. */
static inline bool fsdpc_unit_is_shared(const fsdpc_unit *unit)
{
    return unit->foreign || atomic_load_explicit(&unit->exports, memory_order_relaxed) > 0;
}

/* Returns whether a factor is pending on the unit's gradients. */
static inline bool fsdpc_unit_is_scaled(const fsdpc_unit *unit)
{
    return unit->pending_scale != 1 || unit->clipped;
}

/* Returns the address of the clipping factor in device memory, or NULL if none is pending. */
static inline const double *fsdpc_unit_scale_at(const fsdpc_unit *unit)
{
    return unit->clipped ? unit->clip_factor : NULL;
}

/* Call before reading this rank's rows of the parameter buffer or using the unit's gradient
 * shards. */
static inline fsdpc_status fsdpc_unit_advance(fsdpc_unit *unit)
{
    return unit->pending ? unit->pending->advance(unit->pending, unit) : FSDPC_OK;
}

/* Call before using the unit's masters or its parameters' states. */
static inline fsdpc_status fsdpc_unit_end_step(const fsdpc_unit *unit)
{
    return unit->pending ? unit->pending->pass.end(&unit->pending->pass) : FSDPC_OK;
}

static inline int fsdpc_unit_rank(const fsdpc_unit *unit)
{
    return unit->mesh.shard->rank;
}

/* Creates a zeroed array as long as the group's shard in device memory, in host memory, or in a
 * file (in which case it has an extent). Error messages refer to `what`, which must outlive the
 * array. */
fsdpc_status fsdpc_unit_create_array(const fsdpc_unit *unit, const fsdpc_group *group,
                                     bool offloaded, fsdpc_mem_kind kind, const char *what,
                                     fsdpc_dtype dtype, fsdpc_extent **extent_out, void **out);
void fsdpc_unit_destroy_array(const fsdpc_unit *unit, fsdpc_extent *extent, void *memory);

/* Maps spread masters to the group's space in the parameter buffer; does nothing for other
 * masters. */
fsdpc_status fsdpc_unit_join_param_buffer(fsdpc_unit *unit, fsdpc_unit_group *group,
                                          const fsdpc_param_buffer *param_buffer);
void fsdpc_unit_leave_param_buffer(fsdpc_unit *unit); /* the parameter buffer is about to go;
                                                       * masters keep their contents */
/* Drops private copies of frozen masters that were copied in, since the parameter buffer contains
 * the same values. */
void fsdpc_unit_drop_copies(fsdpc_unit *unit);

/* Returns the master of this rank's slice of a band, starting at element `at` of the shard. Only
 * the step itself, which may be pending, may use this function. */
static inline unsigned char *fsdpc_unit_stepped(const fsdpc_unit *unit,
                                                const fsdpc_unit_group *group,
                                                const fsdpc_slice *band, size_t at)
{
    size_t place = group->spread ? fsdpc_slice_unsharded(band, fsdpc_unit_rank(unit), at) : at;
    return group->master + place * fsdpc_dtype_bytes(group->plan->dtype);
}

/* Like fsdpc_unit_stepped, but for all other code; a lint enforces this. */
static inline unsigned char *fsdpc_unit_masters(const fsdpc_unit *unit,
                                                const fsdpc_unit_group *group,
                                                const fsdpc_slice *band, size_t at)
{
    assert(!unit->pending);
    return fsdpc_unit_stepped(unit, group, band, at);
}

#endif
