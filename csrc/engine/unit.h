/* A unit: modules whose parameters are gathered, freed and reduced together.
 *
 * A unit owns its layout and this rank's private memory: masters (original dtype) and gradient
 * shards (fp32, or fp64 for fp64 parameters). Its unsharded parameters are in the parameter buffer
 * of its root, which the first forward creates; until then a unit has only masters.
 *
 * Its gradients are written to a reduce buffer and reduced from there into the gradient shard. On a
 * mesh with replicas, the shard group's sums first go into a `partial`, which is then summed over
 * the replicas. If the shard group has only one rank, the buffer itself is summed over the
 * replicas.
 *
 * Optimizers, initialisation and loading write to the masters and mark the unit as written. Users
 * may write to the masters through exported local shards, so each epoch begins by comparing such
 * units with the parameter buffer. Only the copy-in and gathers write unsharded parameters.
 * Reductions write gradient shards.
 *
 * Frozen groups have only masters and unsharded parameters. A group gets gradient shards when one
 * of its parameters first becomes trainable, and keeps them from then on.
 *
 * Zeroing gradients touches no memory; the unit only records which parameters have a gradient. A
 * parameter has a gradient on every rank if any rank used it, and on none otherwise. Clipping
 * leaves a pending factor, which the next reader of the gradients applies.
 */
#ifndef FSDPC_ENGINE_UNIT_H
#define FSDPC_ENGINE_UNIT_H

#include "engine/low_rank_plan.h"
#include "engine/plan.h"

typedef struct fsdpc_unit fsdpc_unit;
typedef struct fsdpc_root fsdpc_root;

typedef enum fsdpc_unit_state {
    FSDPC_UNIT_SHARDED,
    FSDPC_UNIT_GATHERING, /* posted */
    FSDPC_UNIT_UNSHARDED,
} fsdpc_unit_state;

/* User settings, which can be changed at any time unless marked otherwise. */
typedef struct fsdpc_unit_settings {
    bool reshard_after_forward, reshard_after_backward;
    bool requires_sync;       /* gradients are reduced at the end of this backward */
    bool requires_all_reduce; /* and then summed over the replicas */
    double divide_factor;     /* divides gradients; the number of ranks in the mesh by default */
    int prefetch;             /* how many units its root gathers ahead, if the unit becomes the
                               * outermost */
    /* Fixed once there is a root: */
    int n_modules;            /* how many modules belong to it */
    bool keep_grads;          /* the unit has its own reduce buffer (SHARD_OPTIM) */
    bool deterministic;       /* micro-steps are summed as a tree (micro.h) */
    bool rank_dependent;      /* it runs only on some ranks (sched.c) */
    fsdpc_codec reduce_codec; /* the form of sums between hosts */
    /* What codecs leave out (codec_error.h): */
    bool error_feedback;             /* is added to the next reduction */
    int error_every;                 /* is measured in every so many backwards; 0: never */
    double error_budget;             /* is at most this part of what is sent; 0: no limit */
    fsdpc_low_rank_options low_rank; /* how replicas sum matrices */
} fsdpc_unit_settings;

/* Whether a unit has its own memory or shares it with the other units of its root. `encloses`: it
 * is the root, or contains other units. A unit has its own buffer if it stays open while other
 * units' backwards run, or if it keeps gradients. */
static inline bool fsdpc_unit_owns_buffer(const fsdpc_unit_settings *settings, bool encloses)
{
    return encloses || settings->keep_grads || settings->rank_dependent;
}

/* Returns whether the unit's unsharded parameters have their own memory (slots.h). */
static inline bool fsdpc_unit_owns_unsharded(const fsdpc_unit_settings *settings, bool encloses)
{
    return encloses || settings->rank_dependent || !settings->reshard_after_forward;
}

enum { FSDPC_PREFETCH = 1 }; /* the default; 2 for CPU ranks on several hosts */

fsdpc_status fsdpc_unit_create(const fsdpc_param_spec *specs, int n_specs,
                               const fsdpc_unit_options *options, fsdpc_unit **out);
void fsdpc_unit_destroy(fsdpc_unit *unit); /* not while its root lives */

/* ---- Properties ---- */

const char *fsdpc_unit_name(const fsdpc_unit *unit);
fsdpc_status fsdpc_unit_rename(fsdpc_unit *unit, const char *name);
const fsdpc_layout *fsdpc_unit_layout(const fsdpc_unit *unit);
const fsdpc_mesh *fsdpc_unit_mesh(const fsdpc_unit *unit);
fsdpc_device *fsdpc_unit_device(const fsdpc_unit *unit);
fsdpc_offload fsdpc_unit_offload(const fsdpc_unit *unit);
fsdpc_codec fsdpc_unit_gather_codec(const fsdpc_unit *unit);

/* What a codec leaves out of gathers or reductions; see codec_error.h. */
typedef enum fsdpc_coded { FSDPC_CODED_GATHER, FSDPC_CODED_REDUCE, FSDPC_CODED_COUNT } fsdpc_coded;

typedef struct fsdpc_coded_report {
    bool measured;
    double error;       /* relative, of all ranks */
    uint64_t backwards; /* before it was measured */
    bool exact;         /* above the budget: numbers are sent exactly */
} fsdpc_coded_report;

fsdpc_coded_report fsdpc_unit_coded_report(const fsdpc_unit *unit, fsdpc_coded which);

/* The stages of a reduction: over the shard group, or over replicas if that is one rank; and over
 * replicas. */
typedef enum fsdpc_stage { FSDPC_STAGE_FIRST, FSDPC_STAGE_SECOND, FSDPC_STAGES } fsdpc_stage;

/* Finds a flat group's residual in one stage, and its length; NULL: it has none. */
fsdpc_status fsdpc_unit_residual(fsdpc_unit *unit, int group, fsdpc_stage stage, float **out,
                                 size_t *numel_out);
/* Finds the errors and factors of sums in low rank that the next sum needs; NULL: it needs none. */
fsdpc_status fsdpc_unit_low_rank_state(fsdpc_unit *unit, float **out, size_t *numel_out);
/* Returns the address of the number of sums that were begun, which start_step counts. */
uint64_t *fsdpc_unit_low_rank_sums(fsdpc_unit *unit);
/* Returns how many bytes of its codes, or of its slices, a rank sends to a rank of each other host. */
size_t fsdpc_unit_gather_bytes(const fsdpc_unit *unit);
fsdpc_root *fsdpc_unit_root(const fsdpc_unit *unit); /* NULL before the first forward */
fsdpc_unit_state fsdpc_unit_where(const fsdpc_unit *unit);
bool fsdpc_unit_in_backward(const fsdpc_unit *unit); /* its backward has begun and not ended */

/* ---- User settings ---- */

const fsdpc_unit_settings *fsdpc_unit_settings_of(const fsdpc_unit *unit);
/* Fails and changes nothing if a setting that is already fixed would change. */
fsdpc_status fsdpc_unit_configure(fsdpc_unit *unit, const fsdpc_unit_settings *settings);
/* Takes effect in the next forward or backward with gradients. All ranks must make the same call;
 * the frontend's graph decides which parameters get a gradient. Making the first parameter of a
 * frozen group trainable allocates memory for gradients, which is an error while the unit has
 * gradients. */
fsdpc_status fsdpc_unit_set_trainable(fsdpc_unit *unit, int param, bool trainable);
/* Returns the number of flat groups with gradients; these groups come first. */
int fsdpc_unit_trained_groups(const fsdpc_unit *unit);

/* ---- Memory ---- */

/* One flat group: dtypes, sizes, and the addresses of this rank's masters, gradient shard (NULL if
 * none) and unsharded parameters (NULL before the root exists). */
typedef struct fsdpc_unit_flat {
    fsdpc_dtype dtype, param_dtype, reduce_dtype, grad_dtype;
    size_t shard_numel, unsharded_numel,
        master_numel; /* masters may be laid out like the unsharded parameters */
    void *master, *grad, *unsharded;
} fsdpc_unit_flat;

fsdpc_unit_flat fsdpc_unit_flat_of(const fsdpc_unit *unit, int group);
fsdpc_unit_flat fsdpc_unit_flat_with(const fsdpc_unit *unit, int param); /* the group of this
                                                                          * parameter */

/* Returns this rank's shard of a parameter's master without marking it as written. Call
 * check_master or mark_written first. */
void *fsdpc_unit_master(const fsdpc_unit *unit, int param, fsdpc_local_shard *local_out);
/* Returns the local shard's offset in its flat group's masters, in elements; meaningless for an
 * empty local shard. */
size_t fsdpc_unit_master_offset(const fsdpc_unit *unit, int param);
/* Call before reading the master; ends a pending step, and verifies data that is in a file. */
fsdpc_status fsdpc_unit_check_master(const fsdpc_unit *unit, int param);

/* Call mark_written before writing masters. Call mark_shared before handing out a writable local
 * shard: each epoch then compares the masters with the parameter buffer. Both fail if a pending
 * step cannot be ended. */
fsdpc_status fsdpc_unit_mark_written(fsdpc_unit *unit);
fsdpc_status fsdpc_unit_mark_shared(fsdpc_unit *unit);

/* Counts tensors that use the unit's gradient shards or states: pass 1 when one is created and -1
 * when one is released. Any thread may call it. While any such tensor exists, steps do not defer
 * the unit. */
void fsdpc_unit_export(fsdpc_unit *unit, int change);

/* Returns the address of this rank's gradient rows, which may have any contents, or NULL if the
 * group has no gradients. */
void *fsdpc_unit_grad_rows(const fsdpc_unit *unit, int param, fsdpc_local_shard *local_out);

/* Allocates zeroed memory for a flat group's gradient shard; the caller frees it. */
fsdpc_status fsdpc_unit_alloc_grad(const fsdpc_unit *unit, int group, void **out);

/* Places gradient shards in the caller's memory until the next call; `groups` contains one address
 * for each group with gradients. If `groups` is NULL, the shards have no memory while they are
 * empty. Not allowed for shards that are offloaded. The caller must keep the memory until its next
 * call or until the unit is destroyed. */
void fsdpc_unit_place_grads(fsdpc_unit *unit, void *const *groups);

/* Memory that a frontend provides for unsharded parameters. `take` calls place_unsharded with an
 * address for each flat group; the addresses are valid until `give`. Both functions may run on any
 * thread. */
typedef struct fsdpc_frontend_memory {
    fsdpc_status (*take)(void *of);
    void (*give)(void *of);
    void *of;
} fsdpc_frontend_memory;

/* Call before the root is created. If the shard group has only one rank, its unsharded parameters
 * will be in this memory (unsharded_frontend.c). NULL withdraws the memory, after which none of
 * those unsharded parameters is used again. */
void fsdpc_unit_set_frontend_memory(fsdpc_unit *unit, const fsdpc_frontend_memory *room);
bool fsdpc_unit_unsharded_in_frontend(const fsdpc_unit *unit); /* it has a root, and they are */
bool fsdpc_unit_reads_masters(const fsdpc_unit *unit); /* and its unsharded parameters are the
                                                        * masters: no cast is needed */
void fsdpc_unit_place_unsharded(fsdpc_unit *unit, void *const *groups);

/* Returns whether other units' backwards run before this unit has all of its gradients. False
 * before the root exists. */
bool fsdpc_unit_stays_open(const fsdpc_unit *unit);

/* Returns the whole parameter as modules read it, or NULL before the root exists. The address is
 * fixed unless a frontend provides the memory. */
void *fsdpc_unit_unsharded(const fsdpc_unit *unit, int param);

/* Writes this rank's rows of `value` (the whole tensor, any float dtype) into the master. */
fsdpc_status fsdpc_unit_write(fsdpc_unit *unit, int param, const void *value, fsdpc_dtype dtype);

/* Initialises this rank's rows to the values they would have if the whole tensor were
 * initialised. */
fsdpc_status fsdpc_unit_init_param(fsdpc_unit *unit, int param, int kind, double a, double b,
                                   uint64_t seed, uint64_t stream);

/* Fails, naming the parameter and the unit, unless the unit is currently unsharded. */
fsdpc_status fsdpc_unit_check_unsharded(fsdpc_unit *unit, int param);

#endif
