/* The struct of an optimizer, for optim.c, optim_step.c, optim_host.c and optim_graph.c. */
#ifndef FSDPC_ENGINE_OPTIM_INTERNAL_H
#define FSDPC_ENGINE_OPTIM_INTERNAL_H

#include "engine/unit_internal.h"
#include "ops/flat_step.h"

typedef struct fsdpc_optim fsdpc_optim;
typedef struct fsdpc_optim_graph fsdpc_optim_graph;
typedef struct fsdpc_optim_host fsdpc_optim_host;

typedef struct param_states {
    int group; /* of hyper-parameters; -1: not ours */
    uint32_t number;
    int64_t steps;
    bool stepping; /* by the step that is made, or goes on */
    bool momentum; /* SGD: the buffer holds something, the next step does not copy the gradient */
} param_states;

typedef struct unit_states {
    fsdpc_unit *unit;
    param_states *params;
    /* [flat group * FSDPC_OPTIM_MAX_STATES + state]; NULL: not used yet.  A state that lies in a
     * file is the memory of its extent. */
    void **states;
    fsdpc_extent **extents;
    /* The step that is made, or goes on. */
    bool waits;             /* to be stepped */
    double scale;           /* of the gradients */
    const double *scale_at; /* and in the device's memory; NULL: none */
} unit_states;

struct fsdpc_optim {
    fsdpc_optim_kind kind;
    fsdpc_device *device;
    fsdpc_trace *trace;
    fsdpc_dtype state_dtype;
    uint64_t seed;
    uint32_t n_numbers;
    unit_states *units;
    int n_units;
    int *order; /* of them, in which a step goes: roots first, as forward does */
    fsdpc_hyper *hypers;
    int n_hypers;
    fsdpc_optim_graph *capture; /* in the making; NULL: none */
    /* Memory of the device for what captured steps read; NULL before the first step, and where
     * there are no graphs. */
    fsdpc_step_scalars *scalars;
    size_t n_scalars;
    fsdpc_pending pending; /* the step, where units of it have this */
    bool goes_on;
    int next; /* in `order`: the unit to be looked at next */
    fsdpc_status failed;
    char reason[512];
    fsdpc_optim_host *host; /* of steps by the CPU; NULL before the first that has any */
    size_t host_chunk;      /* elements that are brought at a time; 0: the usual */
};

/* Of states of a parameter of dtype `param`. */
static inline fsdpc_dtype fsdpc_optim_state_dtype(const fsdpc_optim *optim, fsdpc_dtype param)
{
    return param == FSDPC_F64 ? FSDPC_F64 : optim->state_dtype;
}

static inline bool fsdpc_optim_steps_group(const unit_states *states, int flat_group)
{
    const fsdpc_layout *layout = states->unit->layout;
    for (int p = 0; p < layout->n_params; p++)
        if (layout->params[p].group == flat_group && states->params[p].stepping)
            return true;
    return false;
}

/* ---- optim.c ---- */

unit_states *fsdpc_optim_unit(const fsdpc_optim *optim, const fsdpc_unit *unit); /* NULL: none */

/* Before anything is announced to the peers: hyper-parameters and states are there. */
fsdpc_status fsdpc_optim_prepare(fsdpc_optim *optim);

/* ---- optim_step.c ---- */

/* A step that goes on ends; before what it uses is changed. */
fsdpc_status fsdpc_optim_end_step(fsdpc_optim *optim);
/* The same before the optimizer goes, whatever comes of it. */
void fsdpc_optim_leave_step(fsdpc_optim *optim);

#endif
