/* The optimizer's struct, shared by optim.c and the other files optim_*.c. */
#ifndef FSDPC_ENGINE_OPTIM_INTERNAL_H
#define FSDPC_ENGINE_OPTIM_INTERNAL_H

#include "engine/cover.h"
#include "engine/state_format.h"
#include "engine/unit_internal.h"
#include "ops/flat_step.h"

typedef struct fsdpc_optim fsdpc_optim;
typedef struct fsdpc_optim_graph fsdpc_optim_graph;
typedef struct fsdpc_optim_host fsdpc_optim_host;
typedef struct fsdpc_optim_matrix fsdpc_optim_matrix;
typedef struct fsdpc_optim_factored fsdpc_optim_factored;

typedef struct param_states {
    int group; /* hyper-parameter group; -1: not in this optimizer */
    uint32_t number;
    int64_t steps;
    size_t skips[FSDPC_OPTIM_MAX_STATES]; /* see cover.h; of states that exist */
    bool stepping;                        /* part of the current or pending step */
    bool momentum; /* SGD: the momentum buffer has contents, so the next step does not copy the
                    * gradient */
    fsdpc_state_place place;
    float *factors; /* Adafactor: means by row, then by column (factors.h); NULL: not created yet */
} param_states;

typedef struct unit_states {
    fsdpc_unit *unit;
    param_states *params;
    /* [flat group * FSDPC_OPTIM_MAX_STATES + state]; NULL: not used yet. It has the bands of
     * parameters with the state; in a file, all bands, and this is the memory of its extent. */
    void **states;
    fsdpc_extent **extents;
    /* With the same indices: side arrays (state_format.h), which are never in a file. */
    float **sides;
    size_t *side_numel; /* [flat group]; 0: the group is not coded */
    /* The current or pending step. */
    bool waits;             /* the unit is still to be stepped */
    double scale;           /* the gradients' scale */
    const double *scale_at; /* a further factor in device memory; NULL: none */
} unit_states;

/* Written by optim_outer.c. */
typedef struct fsdpc_optim_outer {
    fsdpc_codec codec;
    int group;            /* the hyper-parameter group that steps */
    fsdpc_comm *comm;     /* the replicas */
    fsdpc_buffer *buffer; /* a unit's differences; NULL before the first outer step */
    unsigned char *means; /* and their means over the replicas */
} fsdpc_optim_outer;

struct fsdpc_optim {
    fsdpc_optim_kind kind;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_state_format format;
    uint64_t seed;
    uint32_t n_numbers;
    unit_states *units;
    int n_units;
    int *order; /* the order in which a step runs units: roots first, as in forward */
    fsdpc_hyper *hypers;
    int n_hypers;
    fsdpc_optim_kind *kinds; /* of the first n_kinds groups; the others have `kind` */
    int n_kinds;
    fsdpc_optim_graph *capture; /* being made; NULL: none */
    /* Device memory that captured steps read; NULL before the first step and on devices without
     * graphs. */
    fsdpc_step_scalars *scalars;
    size_t n_scalars;
    fsdpc_pending pending; /* the step, while its units point to this */
    bool goes_on;
    int next; /* the next unit to visit, in `order` */
    fsdpc_status failed;
    char reason[512];
    fsdpc_optim_host *host;         /* for steps on the CPU; NULL before the first such step */
    size_t host_chunk;              /* elements copied at a time; 0: the default */
    _Atomic int exports;            /* tensors on its states; relaxed: their owners hold a lock */
    fsdpc_optim_matrix *matrix;     /* for matrix rules; NULL before their first step */
    fsdpc_optim_factored *factored; /* for Adafactor; NULL before its first step */
    fsdpc_optim_outer *outer;       /* for outer steps; NULL for other kinds */
    fsdpc_backward_steps *backward_steps; /* NULL: steps are not inside backward */
    bool in_backward;                     /* the running step is */
};

static inline fsdpc_optim_kind fsdpc_optim_kind_of(const fsdpc_optim *optim, int group)
{
    return group < optim->n_kinds ? optim->kinds[group] : optim->kind;
}

/* Returns NULL if the group has none yet. */
static inline const fsdpc_hyper *fsdpc_optim_hyper_of(const fsdpc_optim *optim, int group)
{
    return group >= 0 && group < optim->n_hypers ? &optim->hypers[group] : NULL;
}

/* Returns whether a parameter is stepped by Adafactor. */
static inline bool fsdpc_optim_is_factored(const fsdpc_optim *optim, const unit_states *states,
                                           int param)
{
    int group = states->params[param].group;
    return group >= 0 && fsdpc_optim_kind_of(optim, group) == FSDPC_OPTIM_ADAFACTOR;
}

/* Returns the number of states with an element for each of the parameter's; 0 if its group has no
 * hyper-parameters yet. */
static inline int fsdpc_optim_states_of(const fsdpc_optim *optim, const unit_states *states,
                                        int param)
{
    int group = states->params[param].group;
    const fsdpc_hyper *hyper = fsdpc_optim_hyper_of(optim, group);
    if (!hyper || (fsdpc_optim_is_factored(optim, states, param) &&
                   states->unit->layout->params[param].ndim >= 2))
        return 0;
    return fsdpc_optim_states(fsdpc_optim_kind_of(optim, group), hyper);
}

/* Returns whether steps read gradients: those of averages (EMA) and outer steps do not. */
static inline bool fsdpc_optim_reads_gradients(const fsdpc_optim *optim)
{
    return optim->kind != FSDPC_OPTIM_EMA && optim->kind != FSDPC_OPTIM_OUTER;
}

/* Returns whether the step exchanges parameters and averages. All groups do alike. */
static inline bool fsdpc_optim_swaps(const fsdpc_optim *optim)
{
    return optim->kind == FSDPC_OPTIM_EMA && optim->n_hypers > 0 && optim->hypers[0].swap;
}

/* Returns whether the step changes parameters. If it does not, it involves no peers. */
static inline bool fsdpc_optim_writes(const fsdpc_optim *optim)
{
    return optim->kind != FSDPC_OPTIM_EMA || fsdpc_optim_swaps(optim);
}

/* The memory of one state of a parameter at a position in the shard. */
typedef struct fsdpc_state_memory {
    fsdpc_dtype dtype; /* U8: block codes */
    void *data;        /* NULL: not created yet */
    float *maxima;
    fsdpc_extent *extent; /* of `data`; NULL: it is in memory */
} fsdpc_state_memory;

static inline bool fsdpc_optim_steps_group(const unit_states *states, int flat_group)
{
    const fsdpc_layout *layout = states->unit->layout;
    for (int p = 0; p < layout->n_params; p++)
        if (layout->params[p].group == flat_group && states->params[p].stepping)
            return true;
    return false;
}

/* Calls fn once for every shard group of the optimizer's units. */
static inline fsdpc_status fsdpc_optim_each_shard_group(const fsdpc_optim *optim,
                                                        fsdpc_status (*fn)(const fsdpc_optim *optim,
                                                                           fsdpc_comm *comm))
{
    for (int u = 0; u < optim->n_units; u++) {
        fsdpc_comm *comm = optim->units[optim->order[u]].unit->mesh.shard;
        bool seen = false;
        for (int v = 0; v < u && !seen; v++)
            seen = optim->units[optim->order[v]].unit->mesh.shard == comm;
        if (!seen)
            FSDPC_TRY(fn(optim, comm));
    }
    return FSDPC_OK;
}

/* Waits for all ranks of a shard group. Ranks that pass different hashes, because their steps
 * differ, fail here. */
static inline fsdpc_status fsdpc_optim_meet(fsdpc_comm *comm, const char *what, uint32_t hash)
{
    const fsdpc_coll op = {.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = what, .trains = hash};
    return fsdpc_comm_run(comm, &op);
}

/* ---- optim_arrays.c ---- */

/* Refuse parameters, states or places that a rule other than an element-wise one cannot step. */
fsdpc_status fsdpc_optim_check_plain(const fsdpc_optim *optim, int group, const char *name,
                                     fsdpc_dtype dtype);
fsdpc_status fsdpc_optim_check_memory(const fsdpc_optim *optim, const unit_states *states,
                                      int param);

fsdpc_status fsdpc_optim_init_states(const fsdpc_optim *optim, unit_states *states,
                                     fsdpc_unit *unit);
void fsdpc_optim_fini_states(unit_states *states);

/* Creates a parameter's states together with those of its whole flat group. */
fsdpc_status fsdpc_optim_create_states(fsdpc_optim *optim, unit_states *states, int param);

/* `at` is in the local shard of `param`; for codes, it begins a row. */
fsdpc_state_memory fsdpc_optim_locate(const fsdpc_optim *optim, const unit_states *states,
                                      int param, int state, size_t at);

/* ---- optim.c, for optim_step.c ---- */

unit_states *fsdpc_optim_unit(const fsdpc_optim *optim, const fsdpc_unit *unit); /* NULL: none */

/* Checks hyper-parameters and creates states; call before making any announcement to the peers. */
fsdpc_status fsdpc_optim_prepare(fsdpc_optim *optim);

/* Ends a pending step; call before changing anything that it uses. */
fsdpc_status fsdpc_optim_end_step(fsdpc_optim *optim);
/* optim_step.c: prepares steps inside a backward, and steps one unit. */
fsdpc_status fsdpc_optim_prepare_backward(fsdpc_optim *optim);
fsdpc_status fsdpc_optim_step_reduced(fsdpc_optim *optim, fsdpc_unit *unit);

/* Forgets a pending step that has ended or failed. */
void fsdpc_optim_close_step(fsdpc_optim *optim);

#endif
