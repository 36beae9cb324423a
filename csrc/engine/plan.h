/* The memory of a unit on each rank, computed from shapes alone.
 *
 * The same numbers that fsdpc_unit_create allocates by, so that memory_plan() and a run agree to
 * the byte.  Bytes are as fsdpc_mem counts them: blocks rounded up to 64.
 */
#ifndef FSDPC_ENGINE_PLAN_H
#define FSDPC_ENGINE_PLAN_H

#include "comm/comm.h"
#include "engine/layout.h"
#include "tier/tier.h"

/* Where the ranks of a unit stand; `replicate` is NULL for a mesh of one row. */
typedef struct fsdpc_mesh {
    fsdpc_comm *shard;
    fsdpc_comm *replicate;
} fsdpc_mesh;

/* Which arrays of a unit lie in a file, and how much of them (the rear part, 0 to 1); or which lie
 * in host memory beside a remote device. */
typedef struct fsdpc_offload {
    fsdpc_tier *tier; /* held by what lies in it; NULL while nothing is allocated yet: a plan's */
    bool host;        /* no file; of params, own slices, where a gather moves bytes */
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
    bool no_alias; /* private memory for fulls, out of reach while sharded */
    fsdpc_offload offload;
} fsdpc_unit_options;

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

/* One flat group; dtypes as the policy in `options` makes them. */
typedef struct fsdpc_group_plan {
    fsdpc_dtype wire_dtype, reduce_dtype, grad_dtype;
    size_t wire_bytes, reduce_bytes; /* whole pages: what it takes of wire and reduce buffer */
    size_t master_bytes, grad_bytes;
    size_t partial_bytes; /* what it takes of a partial */
} fsdpc_group_plan;

fsdpc_status fsdpc_plan_group(const fsdpc_group *group, const fsdpc_unit_options *options,
                              fsdpc_group_plan *out);

/* Whether masters can be pages of a wire: modules read what they hold, and nothing steps them. */
static inline bool fsdpc_plan_shares_masters(const fsdpc_group *group, fsdpc_dtype wire_dtype,
                                             const fsdpc_offload *offload)
{
    return group->frozen && wire_dtype == group->dtype && !offload->masters && !offload->params;
}

/* Of steps by the CPU beside a remote device (optim_host.h): elements that are brought at a time, so
 * many times. */
enum { FSDPC_HOST_CHUNK = 1 << 20, FSDPC_HOST_CHUNKS = 4, FSDPC_HOST_HEAD_BYTES = 64 };

static inline bool fsdpc_offload_steps_on_host(const fsdpc_offload *offload)
{
    return offload->host && offload->masters && offload->states;
}

/* Of one of the places for what is brought of a group; a multiple of 64. */
size_t fsdpc_plan_host_bytes(const fsdpc_offload *offload, size_t numel, size_t element);

/* Reduce buffers (fill.h) that all units of a root share, as far as so many share. */
enum { FSDPC_POOLED_BUFFERS = 2 };

typedef struct fsdpc_unit_plan {
    size_t wire_bytes, reduce_bytes, master_bytes, grad_bytes, partial_bytes;
    size_t shared_master_bytes; /* of master_bytes: pages of a wire that ranks share */
    size_t state_bytes;         /* of one state of every parameter */
    /* What lies in a file, or in memory of the host, instead. */
    size_t master_file_bytes, state_file_bytes, grad_file_bytes;
    size_t ring_bytes;      /* that a step over them needs; the largest of a root's units is made */
    size_t published_bytes; /* of own slices, where a gather moves bytes (slots.h) */
    /* Of what one peer sends to this rank's sums, where a reduction brings contributions here, and
     * of what it sends of its partial; of the largest group each. */
    size_t contribution_bytes, partial_contribution_bytes;
} fsdpc_unit_plan;

/* Over a shard group of `ranks`.  States have `state_dtype`; those of fp64 parameters are fp64. */
fsdpc_status fsdpc_plan_unit(const fsdpc_param_spec *specs, int n_specs, int ranks,
                             const fsdpc_unit_options *options, fsdpc_dtype state_dtype,
                             fsdpc_unit_plan *out);

#endif
