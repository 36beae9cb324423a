/* A unit's memory on each rank, computed only from shapes.
 *
 * fsdpc_unit_create allocates the same sizes, so memory_plan() and a run agree to the byte.  Bytes
 * are counted as in fsdpc_mem: blocks rounded up to 64.
 */
#ifndef FSDPC_ENGINE_PLAN_H
#define FSDPC_ENGINE_PLAN_H

#include "comm/comm.h"
#include "engine/layout.h"
#include "tier/tier.h"

/* The communicators of a unit; `replicate` is NULL for a mesh of one row. */
typedef struct fsdpc_mesh {
    fsdpc_comm *shard;
    fsdpc_comm *replicate;
} fsdpc_mesh;

/* Which of a unit's arrays are in a file, and what fraction of each (its rear, 0 to 1); or which
 * are in a remote device's host memory. */
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
    bool cast_reduce; /* reduce_dtype is given; else the dtype of the fulls */
    fsdpc_dtype reduce_dtype;
    bool reshard_after_forward;
    fsdpc_layout_options layout;
    bool no_alias; /* private memory for fulls, inaccessible while sharded */
    fsdpc_offload offload;
} fsdpc_unit_options;

/* Returns how many ranks contribute to its gradients. */
static inline int fsdpc_mesh_ranks(const fsdpc_mesh *mesh)
{
    return mesh->shard->size * (mesh->replicate ? mesh->replicate->size : 1);
}

/* Returns whether several shard groups have the same contents, each in its own memory. */
static inline bool fsdpc_mesh_is_replicated(const fsdpc_mesh *mesh)
{
    return mesh->replicate && mesh->replicate->size > 1;
}

/* One flat group, with dtypes from the policy in `options`. */
typedef struct fsdpc_group_plan {
    fsdpc_dtype wire_dtype, reduce_dtype, grad_dtype;
    size_t wire_bytes, reduce_bytes; /* whole pages: its size in the wire and in a reduce buffer */
    size_t master_bytes, grad_bytes;
    size_t partial_bytes; /* its size in a partial */
} fsdpc_group_plan;

fsdpc_status fsdpc_plan_group(const fsdpc_group *group, const fsdpc_unit_options *options,
                              fsdpc_group_plan *out);

/* Returns whether masters can be pages of a wire: modules read them as they are, and no step
 * changes them. */
static inline bool fsdpc_plan_shares_masters(const fsdpc_group *group, fsdpc_dtype wire_dtype,
                                             const fsdpc_offload *offload)
{
    return group->frozen && wire_dtype == group->dtype && !offload->masters && !offload->params;
}

/* For CPU steps (optim_host.h): elements per chunk, and the number of chunks. */
enum { FSDPC_HOST_CHUNK = 1 << 20, FSDPC_HOST_CHUNKS = 4, FSDPC_HOST_HEAD_BYTES = 64 };

static inline bool fsdpc_offload_steps_on_host(const fsdpc_offload *offload)
{
    return offload->host && offload->masters && offload->states;
}

/* Returns the bytes that one chunk of a group occupies, a multiple of 64. */
size_t fsdpc_plan_host_bytes(const fsdpc_offload *offload, size_t numel, size_t element);

/* Number of reduce buffers (fill.h) that the units of a root share; fewer if fewer units share. */
enum { FSDPC_POOLED_BUFFERS = 2 };

typedef struct fsdpc_unit_plan {
    size_t wire_bytes, reduce_bytes, master_bytes, grad_bytes, partial_bytes;
    size_t shared_master_bytes; /* part of master_bytes: pages of a wire that ranks share */
    size_t state_bytes;         /* for one state of every parameter */
    /* Bytes in a file or in host memory instead. */
    size_t master_file_bytes, state_file_bytes, grad_file_bytes;
    size_t ring_bytes;      /* needed by a step over them; a root uses its largest unit's */
    size_t published_bytes; /* for this rank's slices, if a gather moves bytes (slots.h) */
    /* Bytes that one peer sends for this rank's sums, if a reduction brings contributions here, and
     * bytes of its partial that it sends.  Each is for the largest group. */
    size_t contribution_bytes, partial_contribution_bytes;
} fsdpc_unit_plan;

/* Plans a unit for a shard group of `ranks`.  States have `state_dtype`; those of fp64 parameters
 * are fp64. */
fsdpc_status fsdpc_plan_unit(const fsdpc_param_spec *specs, int n_specs, int ranks,
                             const fsdpc_unit_options *options, fsdpc_dtype state_dtype,
                             fsdpc_unit_plan *out);

#endif
