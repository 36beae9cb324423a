/* Plans the memory that a root will use on each rank, and the sizes of its messages.
 *
 * Nothing is created: no unit, communicator or device needs to exist. Each row is memory that the
 * engine will allocate. The engine uses the same functions (plan.h, slots.h, micro.h, comm_hosts.h)
 * to compute the allocation sizes. The caller adds rows up. The totals are peak sizes for steps
 * that follow the recorded schedule and keep no gradients over several backwards (no_sync).
 */
#ifndef FSDPC_ENGINE_PLAN_ROOT_H
#define FSDPC_ENGINE_PLAN_ROOT_H

#include "engine/state_format.h"
#include "engine/unit.h"

typedef struct fsdpc_plan_unit {
    const fsdpc_param_spec *specs;
    int n_specs;
    fsdpc_unit_options options;   /* dtypes, layout and offload */
    fsdpc_unit_settings settings; /* of which keep_grads, rank_dependent, reshard_after_forward */
    bool encloses;                /* it is the root, or contains other units */
} fsdpc_plan_unit;

/* The number of hosts in one stage of a reduction, and of ranks on each host. */
typedef struct fsdpc_plan_hosts {
    int hosts, local_size;
} fsdpc_plan_hosts;

typedef struct fsdpc_root_options {
    int replicate, shard;              /* the mesh */
    fsdpc_plan_hosts shards, replicas; /* where its ranks are */
    bool remote;                       /* gathers move bytes to GPUs */
    bool single;                       /* one rank, which needs no buffer that others read */
    size_t granule;                    /* of remote windows (slots.h) */
    int prefetch;
    int n_states;              /* per parameter */
    fsdpc_state_format format; /* of states */
    int micro_steps;           /* per step in deterministic mode; 0: not deterministic */
    bool apart;                /* replicas train apart (optim_outer.h), so `replicate` is 1, */
    fsdpc_codec outer_codec;   /* and their differences travel in this form */
} fsdpc_root_options;

typedef struct fsdpc_plan_row {
    const char *name; /* static */
    fsdpc_mem_kind kind;
    size_t bytes, count; /* of each, and how many */
    fsdpc_plan_kind where;
} fsdpc_plan_row;

typedef fsdpc_status (*fsdpc_plan_row_fn)(void *arg, const fsdpc_plan_row *row);

/* Calls `take` for each row, in no particular order. */
fsdpc_status fsdpc_plan_root(const fsdpc_plan_unit *units, int n_units,
                             const fsdpc_root_options *options, fsdpc_plan_row_fn take, void *arg);

#endif
