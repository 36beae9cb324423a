/* What an optimizer keeps; open to optim.c and optim_graph.c alone. */
#ifndef FSDPC_ENGINE_OPTIM_STATES_H
#define FSDPC_ENGINE_OPTIM_STATES_H

#include "engine/optim.h"

typedef struct param_states {
    int group; /* of hyper-parameters; -1: not ours */
    uint32_t number;
    int64_t steps;
    bool momentum; /* SGD: the buffer holds something, the next step does not copy the gradient */
} param_states;

typedef struct unit_states {
    fsdpc_unit *unit;
    param_states *params;
    void **states; /* [flat group * FSDPC_OPTIM_MAX_STATES + state]; NULL: not used yet */
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
    fsdpc_hyper *hypers;
    int n_hypers;
    fsdpc_optim_graph *capture; /* in the making; NULL: none */
    /* Memory of the device for what captured steps read; NULL before the first step, and where
     * there are no graphs. */
    fsdpc_step_scalars *scalars;
    size_t n_scalars;
};

/* Before anything is announced to the peers: hyper-parameters and states are there. */
fsdpc_status fsdpc_optim_prepare(fsdpc_optim *optim);

/* Memory for the scalars of captured steps, on devices with graphs. */
fsdpc_status fsdpc_optim_graph_room(fsdpc_optim *optim);

/* Inside a capture: points a step's arguments to scalars in the device's memory. */
fsdpc_status fsdpc_optim_graph_take(const fsdpc_optim *optim, int group, fsdpc_step_args *args);

#endif
