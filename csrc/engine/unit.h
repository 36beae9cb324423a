/* A unit: modules whose parameters are gathered, freed and reduced together.
 *
 * A unit owns its layout and this rank's private memory: masters (original dtype) and gradient
 * shards (fp32, or fp64 for fp64 parameters).  Its full lives in the wire of its root, which is
 * found at the first forward; until then a unit has masters only.
 *
 * Its gradients go into a reduce buffer and from there into the gradient shard.  Over a mesh with
 * replicas the sums of the shard group first go into a `partial`, which is then summed over the
 * replicas.  If the shard group is one rank, the buffer itself is.
 *
 * Optimizers, initialisation and loading write masters and mark the unit as written.  Users write
 * them through exported pieces; such a unit is compared with the wire when an epoch begins.  Only
 * publishing writes fulls.  Reductions write gradient shards.
 *
 * Frozen groups have masters and fulls alone.  They get gradient shards, and keep them, when a
 * parameter of one is to have a gradient for the first time.
 *
 * Zeroing gradients touches no memory: the unit notes which parameters have one.  A parameter has a
 * gradient on every rank if any rank used it, and on none otherwise.  Clipping leaves a pending
 * factor, which the next reader of the gradients applies.
 */
#ifndef FSDPC_ENGINE_UNIT_H
#define FSDPC_ENGINE_UNIT_H

#include "engine/plan.h"

typedef struct fsdpc_unit fsdpc_unit;
typedef struct fsdpc_root fsdpc_root;

typedef enum fsdpc_unit_state {
    FSDPC_UNIT_SHARDED,
    FSDPC_UNIT_GATHERING, /* posted */
    FSDPC_UNIT_FULL,
} fsdpc_unit_state;

/* Settings of users, which may change at any time unless marked. */
typedef struct fsdpc_unit_settings {
    bool reshard_after_forward, reshard_after_backward;
    bool requires_sync;       /* gradients are reduced at the end of this backward */
    bool requires_all_reduce; /* and summed over the replicas */
    double divide_factor;     /* of gradients; ranks of the mesh by default */
    int prefetch;             /* units gathered ahead by the root that it may become the first of */
    /* Before there is a root: */
    int n_modules;       /* that make it up */
    bool keep_grads;     /* its own reduce buffer (SHARD_OPTIM) */
    bool deterministic;  /* micro-steps are summed as a tree (micro.h) */
    bool rank_dependent; /* it runs on some ranks only (sched.c) */
} fsdpc_unit_settings;

enum { FSDPC_PREFETCH = 1 }; /* the default; CPU ranks of several hosts: 2 */

fsdpc_status fsdpc_unit_create(const fsdpc_param_spec *specs, int n_specs,
                               const fsdpc_unit_options *options, fsdpc_unit **out);
void fsdpc_unit_destroy(fsdpc_unit *unit); /* not while its root lives */

/* ---- What it is ---- */

const char *fsdpc_unit_name(const fsdpc_unit *unit);
fsdpc_status fsdpc_unit_rename(fsdpc_unit *unit, const char *name);
const fsdpc_layout *fsdpc_unit_layout(const fsdpc_unit *unit);
const fsdpc_mesh *fsdpc_unit_mesh(const fsdpc_unit *unit);
fsdpc_device *fsdpc_unit_device(const fsdpc_unit *unit);
fsdpc_offload fsdpc_unit_offload(const fsdpc_unit *unit);
fsdpc_root *fsdpc_unit_root(const fsdpc_unit *unit); /* NULL before the first forward */
fsdpc_unit_state fsdpc_unit_where(const fsdpc_unit *unit);
bool fsdpc_unit_in_backward(const fsdpc_unit *unit); /* its backward has begun and not ended */

/* ---- What users set ---- */

const fsdpc_unit_settings *fsdpc_unit_settings_of(const fsdpc_unit *unit);
/* An error, and nothing changed, if what is fixed by now would change. */
fsdpc_status fsdpc_unit_configure(fsdpc_unit *unit, const fsdpc_unit_settings *settings);
/* As forwards and backwards with gradients see it now.  Ranks must agree; which parameters get a
 * gradient, the front door's graph decides.  The first trainable parameter of a frozen group makes
 * memory for gradients, which is an error while the unit has some. */
fsdpc_status fsdpc_unit_set_trainable(fsdpc_unit *unit, int param, bool trainable);
/* How many flat groups have gradients: the first ones. */
int fsdpc_unit_trained_groups(const fsdpc_unit *unit);
/* Units to gather ahead when this unit runs, in forward or in backward; `units` are of its root;
 * NULL: as recorded. */
fsdpc_status fsdpc_unit_set_ahead(fsdpc_unit *unit, bool backward, fsdpc_unit *const *units, int n);

/* ---- Memory ---- */

/* One flat group: dtypes, elements and addresses of this rank's masters and gradient shard (NULL: it
 * has none), and of the full (NULL before there is a root). */
typedef struct fsdpc_unit_flat {
    fsdpc_dtype dtype, wire_dtype, reduce_dtype, grad_dtype;
    size_t shard_numel, full_numel, master_numel; /* masters may lie as they do in the full */
    void *master, *grad, *full;
} fsdpc_unit_flat;

fsdpc_unit_flat fsdpc_unit_flat_of(const fsdpc_unit *unit, int group);
fsdpc_unit_flat fsdpc_unit_flat_with(const fsdpc_unit *unit, int param); /* the group it is in */

/* This rank's piece of a parameter's master; marks nothing.  After check_master, or a mark. */
void *fsdpc_unit_master(const fsdpc_unit *unit, int param, fsdpc_piece *piece_out);
/* Where that begins in its flat group's masters, in elements; meaningless if the piece is empty. */
size_t fsdpc_unit_master_offset(const fsdpc_unit *unit, int param);
/* Before it is read: a step that goes on ends, and what lies in a file is as it was written. */
fsdpc_status fsdpc_unit_check_master(const fsdpc_unit *unit, int param);

/* Before masters are written; or they may be from now on, as somebody holds them: they are compared
 * with the wire when an epoch begins.  An error where a step that goes on cannot end. */
fsdpc_status fsdpc_unit_mark_written(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_mark_shared(fsdpc_unit *unit);

/* A tensor on its gradient shards or on states of its parameters was made (1), or is gone (-1); any
 * thread.  While there are any, a step leaves nothing of the unit for later. */
void fsdpc_unit_lend(fsdpc_unit *unit, int change);

/* Where its rows of the gradient lie, whatever they hold; NULL if its group has no gradients. */
void *fsdpc_unit_grad_rows(const fsdpc_unit *unit, int param, fsdpc_piece *piece_out);

/* New memory for the gradient shard of a flat group: zeros, the caller's to free. */
fsdpc_status fsdpc_unit_alloc_grad(const fsdpc_unit *unit, int group, void **out);

/* Lets gradient shards lie in memory of others, one address for each group that has one, until the
 * next call; NULL: nowhere, as long as they hold nothing.  Not those that a policy offloads.  Whoever
 * gives memory keeps it until it has called again, or until the unit has gone. */
void fsdpc_unit_place_grads(fsdpc_unit *unit, void *const *groups);

/* Memory for fulls that a front door has: take calls place_fulls with an address for each flat group,
 * which hold until give.  May run in any thread. */
typedef struct fsdpc_full_room {
    fsdpc_status (*take)(void *of);
    void (*give)(void *of);
    void *of;
} fsdpc_full_room;

/* Before there is a root: should this rank be alone, its fulls come to lie there (full_lent.c); NULL:
 * no longer, and none of them is used again. */
void fsdpc_unit_lend_fulls(fsdpc_unit *unit, const fsdpc_full_room *room);
bool fsdpc_unit_fulls_are_lent(const fsdpc_unit *unit); /* it has a root, and they do */
bool fsdpc_unit_reads_masters(const fsdpc_unit *unit);  /* and are the masters: it casts nothing */
void fsdpc_unit_place_fulls(fsdpc_unit *unit, void *const *groups);

/* Do backwards of other units come between its gradients?  False before the root exists. */
bool fsdpc_unit_stays_open(const fsdpc_unit *unit);

/* The whole parameter as modules read it; NULL before the root exists.  Its address is fixed unless
 * fulls are lent. */
void *fsdpc_unit_full(const fsdpc_unit *unit, int param);

/* Writes the own rows of `value` (the full tensor, any float dtype) into the master. */
fsdpc_status fsdpc_unit_write(fsdpc_unit *unit, int param, const void *value, fsdpc_dtype dtype);

/* Initialises the own rows as the whole tensor would be. */
fsdpc_status fsdpc_unit_init_param(fsdpc_unit *unit, int param, int kind, double a, double b,
                                   uint64_t seed, uint64_t stream);

/* An error that names parameter and unit unless the full may be read now. */
fsdpc_status fsdpc_unit_check_full(fsdpc_unit *unit, int param);

#endif
