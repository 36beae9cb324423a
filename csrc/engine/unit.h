/* A unit: modules whose parameters are gathered, freed and reduced together.
 *
 * A unit owns its layout and this rank's private memory: masters (original dtype) and gradient
 * shards (fp32, or fp64 for fp64 parameters).  Its full lives in the wire of its root, which is
 * found at the first forward; until then a unit has masters only.
 *
 * Its gradients go into a reduce buffer and from there into the gradient shard.  Over a mesh with
 * replicas the sums of the shard group go into a `partial` first, which is then summed over the
 * replicas; where the shard group is one rank alone, the buffer itself is.
 *
 * Who writes what: masters by optimizers, initialisation and loading (which mark the unit dirty),
 * or by the user through an exported piece (marked foreign: compared when an epoch begins).  Fulls
 * by publishing only.  Gradient shards by reductions; `grad_live` says whether they hold anything,
 * so zeroing gradients touches no memory, and `grads` of which parameters: one that no rank used
 * has no gradient, and one that any rank used has one on all.  `pending_scale` is a factor that
 * clipping left to be applied by whoever reads the gradients next.  On a remote device, where the
 * norm is not known to the host, clipping leaves another one in the device's memory, and says so
 * (`clipped`).
 *
 * The structs are open to the files of csrc/engine; others use the functions.
 */
#ifndef FSDPC_ENGINE_UNIT_H
#define FSDPC_ENGINE_UNIT_H

#include "comm/comm.h"
#include "engine/layout.h"

typedef struct fsdpc_unit fsdpc_unit;
typedef struct fsdpc_root fsdpc_root;

/* Where the ranks of a unit stand; `replicate` is NULL for a mesh of one row. */
typedef struct fsdpc_mesh {
    fsdpc_comm *shard;
    fsdpc_comm *replicate;
} fsdpc_mesh;

typedef struct fsdpc_unit_options {
    const char *name; /* copied; shown in messages and traces */
    fsdpc_mesh mesh;
    fsdpc_device *device;
    fsdpc_trace *trace;
    bool cast_params; /* param_dtype is given; else each group keeps its original dtype */
    fsdpc_dtype param_dtype;
    bool cast_reduce; /* reduce_dtype is given; else the dtype of the fulls */
    fsdpc_dtype reduce_dtype;
    bool reshard_after_forward;
    int first_owner;
    bool no_alias; /* private memory for fulls, out of reach while sharded */
} fsdpc_unit_options;

typedef enum fsdpc_unit_state {
    FSDPC_UNIT_SHARDED,
    FSDPC_UNIT_GATHERING, /* posted */
    FSDPC_UNIT_FULL,
} fsdpc_unit_state;

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

enum { FSDPC_PREFETCH = 1 };      /* units gathered ahead, unless somebody says otherwise */
enum { FSDPC_MICRO_LEVELS = 32 }; /* 2^32 micro-steps */

typedef struct fsdpc_unit_group {
    const fsdpc_group *plan;
    fsdpc_dtype wire_dtype, reduce_dtype, grad_dtype;
    size_t wire_offset;   /* bytes into the root's wire */
    size_t reduce_offset; /* bytes into a reduce buffer of this unit */
    size_t grad_offset;   /* bytes into a partial, or into a level of micro-step sums */
    fsdpc_slice whole;    /* of the shard, as a reduction of partials takes it */
    unsigned char *master, *grad;
    unsigned char *full;      /* what modules read, at a fixed address; see full.h */
    void *own_block;          /* the block that holds it in no-alias mode */
    unsigned char *published; /* this rank's slices, where gathers move bytes; else NULL */
    fsdpc_work gather, reduce;
} fsdpc_unit_group;

struct fsdpc_unit {
    int id; /* order within the root; -1 before */
    char *name;
    fsdpc_layout *layout;
    fsdpc_unit_group *groups; /* layout->n_groups */
    fsdpc_mesh mesh;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_root *root;      /* NULL before the first forward */
    fsdpc_event *released; /* order.h; NULL unless its root overlaps */
    size_t reduce_bytes, wire_bytes, grad_bytes;

    /* Where gathers move bytes (slots.h): where the full lies, unless no-alias mode says. */
    int slot;             /* -1: it shares with nobody */
    fsdpc_window *window; /* what shares, or did */
    unsigned char *room;  /* of its own */

    fsdpc_unit_state state;
    bool reshard_after_forward, reshard_after_backward, no_alias;
    bool keep_grads;     /* a reduce buffer of its own (SHARD_OPTIM); set before there is a root */
    bool deterministic;  /* micro-steps are summed as a tree (micro.h); likewise */
    bool rank_dependent; /* it runs on some ranks only (sched.c); set before there is a root */
    bool stays;          /* more modules of it are to run in this forward */
    int prefetch;        /* units gathered ahead by the root that it may become the first of */
    int held;            /* unshard() calls not yet given back */
    bool dirty;          /* masters are known to differ from the wire */
    bool foreign;        /* masters may differ: somebody holds a writable piece */
    bool requires_sync;  /* gradients are reduced at the end of this backward */
    bool requires_all_reduce; /* and summed over the replicas */
    fsdpc_unit **ahead[2]; /* gathered ahead of forward [0] and backward [1]; NULL: as recorded */
    int n_ahead[2];
    bool *filled;    /* per parameter: the open reduce buffer holds a contribution */
    bool *trainable; /* per parameter; may change between steps */
    uint8_t *grads;  /* per parameter, what was reduced of it: fsdpc_grad_state */
    int n_filled;
    fsdpc_buffer *buffer;     /* being filled; NULL: none open */
    fsdpc_buffer *own_buffer; /* of units that stay open through backward */
    fsdpc_buffer *partial;    /* of the posted reduction, or holding postponed sums */
    fsdpc_buffer *own_partial;
    bool in_backward; /* between pre_backward and post_backward */
    fsdpc_reduction reduction;
    bool partial_live; /* the partial holds sums whose all-reduce was postponed */
    bool postpone;     /* the posted reduction ends in the partial */
    bool hidden;       /* what is being reduced is not to be seen yet (no_sync) */
    bool forget;       /* gradients were zeroed meanwhile: the sum is not wanted */
    bool grad_live;
    unsigned char *sums[FSDPC_MICRO_LEVELS]; /* deterministic: see micro.h */
    int heights[FSDPC_MICRO_LEVELS], n_sums;
    bool folded;
    double pending_scale;
    double *clip_factor;  /* in a remote device's memory; NULL on others */
    bool clipped;         /* clip_factor is pending too */
    double divide_factor; /* gradients are divided by it; ranks of the mesh by default */
};

fsdpc_status fsdpc_unit_create(const fsdpc_param_spec *specs, int n_specs,
                               const fsdpc_unit_options *options, fsdpc_unit **out);
void fsdpc_unit_destroy(fsdpc_unit *unit); /* not while its root lives */

/* Ranks that contribute to its gradients. */
static inline int fsdpc_mesh_ranks(const fsdpc_mesh *mesh)
{
    return mesh->shard->size * (mesh->replicate ? mesh->replicate->size : 1);
}

/* Shard groups that hold the same, each in its own memory. */
static inline bool fsdpc_mesh_is_replicated(const fsdpc_mesh *mesh)
{
    return mesh->replicate && mesh->replicate->size > 1;
}

static inline int fsdpc_unit_rank(const fsdpc_unit *unit)
{
    return unit->mesh.shard->rank;
}

/* This rank's piece of a parameter's master; marks nothing. */
void *fsdpc_unit_master(const fsdpc_unit *unit, int param, fsdpc_piece *piece_out);

/* This rank's piece of a parameter's gradient, any pending scale applied; NULL when there is none.
 */
fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, fsdpc_piece *piece_out, void **out);

/* May an optimizer or a norm use its gradient? */
static inline bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param)
{
    return unit->grad_live && unit->trainable[param] && unit->grads[param] != FSDPC_GRAD_NONE;
}

/* The whole parameter as modules read it: address fixed once the root exists, NULL before. */
void *fsdpc_unit_full(const fsdpc_unit *unit, int param);

/* Writes the own rows of `value` (the full tensor, any float dtype) into the master. */
fsdpc_status fsdpc_unit_write(fsdpc_unit *unit, int param, const void *value, fsdpc_dtype dtype);

/* Initialises the own rows as the whole tensor would be. */
fsdpc_status fsdpc_unit_init_param(fsdpc_unit *unit, int param, int kind, double a, double b,
                                   uint64_t seed, uint64_t stream);

/* Collective: every rank of the shard group gets the whole parameter (`grads` false, original
 * dtype) or its whole gradient (grad_dtype, averaged) in `out`. */
fsdpc_status fsdpc_unit_collect(fsdpc_unit *unit, int param, bool grads, void *out);
/* The same for anything that is cut as a parameter is: `mine` are this rank's rows of it. */
fsdpc_status fsdpc_unit_collect_rows(const fsdpc_unit *unit, int param, fsdpc_dtype dtype,
                                     const void *mine, void *out);

/* On every rank alike: drops gradients, also those that are not reduced yet.  Touches no memory. */
void fsdpc_unit_zero_grad(fsdpc_unit *unit);

/* Is a factor pending? */
static inline bool fsdpc_unit_is_scaled(const fsdpc_unit *unit)
{
    return unit->pending_scale != 1 || unit->clipped;
}

/* The part of it in the device's memory; NULL: none. */
static inline const double *fsdpc_unit_scale_at(const fsdpc_unit *unit)
{
    return unit->clipped ? unit->clip_factor : NULL;
}

/* Makes the gradient shards what they are said to be: micro-steps brought together, multiplied by
 * what clipping left to be applied. */
fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit);

/* An error that names parameter and unit unless the full may be read now. */
fsdpc_status fsdpc_unit_check_full(fsdpc_unit *unit, int param);

#endif
