/* The sizes of a unit's arrays and buffers, computed only from shapes and options.
 *
 * The engine allocates exactly these sizes, and plan_root.h adds them up for memory_plan(), so the
 * plan is exact to the byte. Bytes are counted as in fsdpc_mem, with blocks rounded up to multiples
 * of 64.
 */
#ifndef FSDPC_ENGINE_PLAN_H
#define FSDPC_ENGINE_PLAN_H

#include "base/size.h"
#include "comm/comm.h"
#include "engine/layout.h"
#include "tier/tier.h"

/* The communicators of a unit; `replicate` is NULL for a mesh of one row. */
typedef struct fsdpc_mesh {
    fsdpc_comm *shard;
    fsdpc_comm *replicate;
    bool apart; /* replicas meet only in outer steps (optim_outer.h): between them, each shard group
                 * trains as if it had no replicas */
} fsdpc_mesh;

/* Which of a unit's arrays are in a file, with the fraction (0 to 1) at the end of each that is
 * offloaded, or in a remote device's host memory. */
typedef struct fsdpc_offload {
    fsdpc_tier *tier; /* held by its extents; NULL while nothing is allocated yet, as in a plan */
    bool host;        /* no file; for params: this rank's slices, if a gather moves bytes */
    bool params, masters, states, gradients;
    double part;
} fsdpc_offload;

typedef struct fsdpc_unit_options {
    const char *name; /* copied; shown in messages and traces */
    fsdpc_mesh mesh;
    fsdpc_device *device;
    fsdpc_trace *trace;
    bool cast_params; /* param_dtype is given; else each group keeps its original dtype */
    fsdpc_dtype param_dtype;
    bool cast_reduce; /* reduce_dtype is given; else the dtype of the unsharded parameters */
    fsdpc_dtype reduce_dtype;
    bool reshard_after_forward;
    bool band_per_param; /* see fsdpc_layout_create */
    bool no_alias;       /* private memory for unsharded parameters, inaccessible while sharded */
    fsdpc_offload offload;
    fsdpc_codec gather_codec; /* the form of unsharded parameters between hosts */
} fsdpc_unit_options;

static inline fsdpc_status fsdpc_plan_check_codec(const fsdpc_device *device, const char *unit,
                                                  fsdpc_codec codec)
{
    if (codec == FSDPC_CODEC_EXACT || !device->remote)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "unit '%s' is compressed, which works on CPUs only",
                      unit);
}

/* Returns the number of ranks in the mesh. */
static inline int fsdpc_mesh_size(const fsdpc_mesh *mesh)
{
    return mesh->shard->size * (mesh->replicate ? mesh->replicate->size : 1);
}

/* Returns the number of ranks that contribute to a unit's gradients. */
static inline int fsdpc_mesh_ranks(const fsdpc_mesh *mesh)
{
    return mesh->apart ? mesh->shard->size : fsdpc_mesh_size(mesh);
}

/* Returns whether several shard groups have the same contents, each in separate memory. */
static inline bool fsdpc_mesh_is_replicated(const fsdpc_mesh *mesh)
{
    return mesh->replicate && mesh->replicate->size > 1 && !mesh->apart;
}

/* One flat group, with dtypes from the policy in `options`. */
typedef struct fsdpc_group_plan {
    fsdpc_dtype param_dtype, reduce_dtype, grad_dtype;
    size_t param_buffer_bytes,
        reduce_bytes;     /* whole pages: its size in the parameter buffer and in a reduce buffer */
    size_t partial_bytes; /* its size in a partial */
} fsdpc_group_plan;

fsdpc_status fsdpc_plan_group(const fsdpc_group *group, const fsdpc_unit_options *options,
                              fsdpc_group_plan *out);

/* Returns the size of this rank's slices of a group, in bytes. */
static inline size_t fsdpc_plan_slice_bytes(const fsdpc_group *group, fsdpc_dtype param_dtype)
{
    return fsdpc_mem_counted(group->shard_numel * fsdpc_dtype_bytes(param_dtype));
}

typedef enum fsdpc_plan_kind {
    FSDPC_PLAN_MEMORY, /* of the rank's device */
    FSDPC_PLAN_PINNED, /* of the host, next to a GPU */
    FSDPC_PLAN_FILE,
    FSDPC_PLAN_MESSAGE, /* not memory: sent to a rank of each other host */
} fsdpc_plan_kind;

/* An array as long as a shard: masters, gradients or a state. */
typedef struct fsdpc_array_plan {
    fsdpc_plan_kind where;                         /* FILE: all or part of it */
    size_t bytes;                                  /* of all elements */
    size_t memory_bytes, pinned_bytes, file_bytes; /* as they are counted */
    size_t ring_bytes;                             /* that a pass over it needs */
} fsdpc_array_plan;

/* `offloaded`: the array is of a kind that `offload` names. */
fsdpc_array_plan fsdpc_plan_array(const fsdpc_offload *offload, bool offloaded, size_t numel,
                                  fsdpc_dtype dtype);

/* Returns whether masters can be pages of a parameter buffer: modules must read them without a
 * cast, and no step may change them. */
static inline bool fsdpc_plan_shares_masters(const fsdpc_group *group, fsdpc_dtype param_dtype,
                                             const fsdpc_offload *offload, fsdpc_codec codec)
{
    return group->frozen && param_dtype == group->dtype && !offload->masters && !offload->params &&
           (codec == FSDPC_CODEC_EXACT || group->dtype == FSDPC_U8);
}

/* For CPU steps (optim_host.h): the number of elements per chunk, and the number of chunks. */
enum { FSDPC_HOST_CHUNK = 1 << 20, FSDPC_HOST_CHUNKS = 4, FSDPC_HOST_HEAD_BYTES = 64 };

static inline bool fsdpc_offload_steps_on_host(const fsdpc_offload *offload)
{
    return offload->host && offload->masters && offload->states;
}

/* Returns the size of one chunk of a group in bytes, which is a multiple of 64. */
size_t fsdpc_plan_host_bytes(const fsdpc_offload *offload, size_t numel, size_t element);

/* The maximum number of reduce buffers (fill.h) that the units of a root share. */
enum { FSDPC_POOLED_BUFFERS = 2 };

typedef struct fsdpc_pool_plan {
    int n;
    size_t bytes, partial_bytes; /* of each */
} fsdpc_pool_plan;

/* Adds a unit that takes its buffers from the pool. */
static inline void fsdpc_pool_plan_add(fsdpc_pool_plan *pool, size_t bytes, size_t partial_bytes)
{
    pool->n += pool->n < FSDPC_POOLED_BUFFERS;
    pool->bytes = fsdpc_max_size(pool->bytes, bytes);
    pool->partial_bytes = fsdpc_max_size(pool->partial_bytes, partial_bytes);
}

/* Returns whether sums pass through a partial, which happens only if reductions have two stages. */
static inline bool fsdpc_plan_has_partials(int replicate, int shard)
{
    return replicate > 1 && shard > 1;
}

/* Returns whether a single rank's kernels can fill the gradient shard directly. The dtypes are
 * those of the unit's first group. */
static inline bool fsdpc_plan_fits_shard(int n_trained, fsdpc_dtype reduce_dtype,
                                         fsdpc_dtype grad_dtype, const fsdpc_offload *offload,
                                         bool deterministic)
{
    return n_trained == 1 && reduce_dtype == grad_dtype && !offload->gradients && !deterministic;
}

#endif
