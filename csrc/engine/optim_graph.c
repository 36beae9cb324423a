/* A slot is a block of scalars in device memory for one captured (group, step).
 *
 * A captured call refers to its slot by address. The optimizer owns the slots' memory and allocates
 * it at its first step. All of its graphs share that memory, and each writes its own slots before
 * being launched. Before a launch, the host computes the scalars of all slots as in an eager step
 * and uploads them in a single copy. During the capture, parameters with equal step counts were
 * joined into runs. Replays increase all counts together, so the runs stay valid unless the user
 * changes individual counts, which is an error.
 *
 * There is one slot per parameter, which is always enough.
 */
#include "engine/optim_graph.h"

#include <stdlib.h>
#include <string.h>

#include "ops/flat_ops.h"

typedef struct slot {
    int group;
    int64_t step; /* the step count at the capture */
    double grad_scale;
} slot;

struct fsdpc_optim_graph {
    fsdpc_optim *optim;
    slot *slots;
    size_t n_slots, capacity;
    fsdpc_step_scalars *scalars; /* the slots' scalars, on the host */
    /* Indexed by parameter, counted over all units. */
    int64_t *before; /* step counts at the beginning of the capture */
    int64_t *added;  /* steps per replay */
    size_t n_params;
    uint32_t n_numbers;
    int n_groups;
    fsdpc_hyper *hypers; /* as captured */
    int64_t *shifts;     /* per group: steps since the capture */
};

/* Returns the states of the i-th parameter, counted over all units. */
static param_states *states_of(const fsdpc_optim *optim, size_t i)
{
    for (int u = 0;; u++) {
        size_t n = (size_t)optim->units[u].unit->layout->n_params;
        if (i < n)
            return &optim->units[u].params[i];
        i -= n;
    }
}

static bool has_momentum(const fsdpc_optim *optim, const fsdpc_hyper *hyper)
{
    return fsdpc_optim_table[optim->kind].rule(hyper) == FSDPC_RULE_MOMENTUM;
}

static fsdpc_status check_units(const fsdpc_optim *optim, const fsdpc_root *root)
{
    for (int u = 0; u < optim->n_units; u++) {
        const unit_states *states = &optim->units[u];
        if (states->unit->root != root)
            return fsdpc_fail(
                FSDPC_ERR_STATE,
                "the optimizer holds unit '%s', which is no part of the model of this "
                "graph",
                states->unit->name);
        for (int p = 0; p < states->unit->layout->n_params; p++) {
            const param_states *own = &states->params[p];
            if (own->group >= 0 && states->unit->trainable[p] && !own->momentum &&
                has_momentum(optim, &optim->hypers[own->group]))
                return fsdpc_fail(
                    FSDPC_ERR_STATE,
                    "parameter '%s' has made no step with momentum, and its first one "
                    "is another: run a step without a graph first, or freeze it if no step "
                    "uses it",
                    states->unit->layout->params[p].name);
        }
    }
    return FSDPC_OK;
}

static size_t count_params(const fsdpc_optim *optim)
{
    size_t n = 0;
    for (int u = 0; u < optim->n_units; u++)
        n += (size_t)optim->units[u].unit->layout->n_params;
    return n;
}

fsdpc_status fsdpc_optim_graph_room(fsdpc_optim *optim)
{
    size_t n = count_params(optim) + 1;
    if (optim->n_scalars >= n)
        return FSDPC_OK;
    void *memory;
    FSDPC_TRY(
        fsdpc_device_alloc(optim->device, FSDPC_MEM_OTHER, n * sizeof *optim->scalars, &memory));
    fsdpc_device_free(optim->device, optim->scalars);
    optim->scalars = memory;
    optim->n_scalars = n;
    return FSDPC_OK;
}

static fsdpc_status make_room(fsdpc_optim *optim, fsdpc_optim_graph *graph)
{
    size_t n = optim->n_scalars, groups = (size_t)graph->n_groups;
    graph->n_params = count_params(optim);
    graph->capacity = n;
    graph->slots = calloc(n, sizeof *graph->slots);
    graph->scalars = calloc(n, sizeof *graph->scalars);
    graph->before = calloc(n, sizeof *graph->before);
    graph->added = calloc(n, sizeof *graph->added);
    graph->hypers = calloc(groups + 1, sizeof *graph->hypers);
    graph->shifts = calloc(groups + 1, sizeof *graph->shifts);
    if (!graph->slots || !graph->scalars || !graph->before || !graph->added || !graph->hypers ||
        !graph->shifts)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the graph of an optimizer's step");
    for (size_t i = 0; i < graph->n_params; i++)
        graph->before[i] = states_of(optim, i)->steps;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_graph_create(fsdpc_optim *optim, const fsdpc_root *root,
                                      fsdpc_optim_graph **out)
{
    FSDPC_TRY(check_units(optim, root));
    fsdpc_optim_graph *graph = calloc(1, sizeof *graph);
    if (!graph)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the graph of an optimizer's step");
    graph->optim = optim;
    graph->n_numbers = optim->n_numbers;
    graph->n_groups = optim->n_hypers;
    fsdpc_status status = make_room(optim, graph);
    if (status != FSDPC_OK) {
        fsdpc_optim_graph_destroy(graph);
        return status;
    }
    optim->capture = graph;
    *out = graph;
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_graph_take(const fsdpc_optim *optim, int group, fsdpc_step_args *args)
{
    fsdpc_optim_graph *graph = optim->capture;
    if (!graph ||
        !args->copy_in) /* the step would have no parameter buffer, and the frontend counts it */
        return fsdpc_fail(
            FSDPC_ERR_STATE,
            "a parameter that no unit holds is stepped inside a captured step: a graph "
            "takes steps of sharded parameters only");
    const slot wanted = {.group = group, .step = args->step, .grad_scale = args->grad_scale};
    size_t s = 0;
    while (s < graph->n_slots &&
           (graph->slots[s].group != group || graph->slots[s].step != wanted.step ||
            graph->slots[s].grad_scale != wanted.grad_scale))
        s++;
    if (s == graph->capacity)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a captured step in which an optimizer steps more than %zu times",
                          graph->capacity);
    if (s == graph->n_slots)
        graph->slots[graph->n_slots++] = wanted;
    args->scalars = optim->scalars + s;
    return FSDPC_OK;
}

/* Copies the scalars of each group's current step to the device. */
static fsdpc_status send_scalars(fsdpc_optim_graph *graph)
{
    const fsdpc_optim *optim = graph->optim;
    fsdpc_stream *main = fsdpc_device_main(optim->device);
    for (size_t s = 0; s < graph->n_slots; s++) {
        const slot *each = &graph->slots[s];
        const fsdpc_step_args args = {.kind = optim->kind,
                                      .hyper = optim->hypers[each->group],
                                      .grad_scale = each->grad_scale,
                                      .step = each->step + graph->shifts[each->group]};
        graph->scalars[s] = fsdpc_step_prepare(&args);
    }
    return fsdpc_device_copy(optim->device, optim->scalars, graph->scalars,
                             graph->n_slots * sizeof *graph->scalars, main);
}

static fsdpc_status check_parameters(const fsdpc_optim_graph *graph)
{
    if (graph->optim->n_numbers == graph->n_numbers && graph->optim->n_hypers == graph->n_groups)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_STATE,
                      "parameters were added to the optimizer since the capture of its step began: "
                      "capture a step again");
}

fsdpc_status fsdpc_optim_capture_end(fsdpc_optim_graph *graph, bool keep)
{
    graph->optim->capture = NULL;
    for (size_t i = 0; i < graph->n_params; i++) {
        param_states *own = states_of(graph->optim, i);
        graph->added[i] = own->steps - graph->before[i];
        if (!keep)
            own->steps = graph->before[i];
    }
    if (!keep)
        return FSDPC_OK;
    FSDPC_TRY(check_parameters(graph));
    memcpy(graph->hypers, graph->optim->hypers, (size_t)graph->n_groups * sizeof *graph->hypers);
    return send_scalars(graph);
}

/* Checks that a step taken now would make the same calls as the captured one, apart from their
 * scalars. */
static fsdpc_status check_groups(const fsdpc_optim_graph *graph)
{
    const fsdpc_optim *optim = graph->optim;
    FSDPC_TRY(check_parameters(graph));
    for (int g = 0; g < graph->n_groups; g++) {
        const fsdpc_optim_row *row = &fsdpc_optim_table[optim->kind];
        if (row->rule(&optim->hypers[g]) != row->rule(&graph->hypers[g]))
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "group %d of the optimizer steps by another rule of %s than the "
                              "captured step: capture a step again",
                              g, row->name);
    }
    return FSDPC_OK;
}

/* Finds how many steps each group has taken since the capture; all of its parameters must agree. */
static fsdpc_status find_shifts(fsdpc_optim_graph *graph)
{
    fsdpc_optim *optim = graph->optim;
    for (int g = 0; g < graph->n_groups; g++)
        graph->shifts[g] = INT64_MIN; /* not known yet */
    for (size_t i = 0; i < graph->n_params; i++) {
        const param_states *own = states_of(optim, i);
        if (!graph->added[i])
            continue;
        int64_t shift = own->steps - graph->before[i], *of_group = &graph->shifts[own->group];
        bool apart = *of_group != INT64_MIN && *of_group != shift;
        if (apart || (!own->momentum && has_momentum(optim, &optim->hypers[own->group])))
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "step counts of the optimizer's group %d were set since the step was "
                              "captured (load_state_dict): capture a step again",
                              own->group);
        *of_group = shift;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_optim_graph_check(fsdpc_optim_graph *graph)
{
    FSDPC_TRY(check_groups(graph));
    return find_shifts(graph);
}

fsdpc_status fsdpc_optim_graph_advance(fsdpc_optim_graph *graph)
{
    FSDPC_TRY(send_scalars(graph));
    for (size_t i = 0; i < graph->n_params; i++)
        states_of(graph->optim, i)->steps += graph->added[i];
    return FSDPC_OK;
}

void fsdpc_optim_graph_destroy(fsdpc_optim_graph *graph)
{
    if (!graph)
        return;
    free(graph->slots);
    free(graph->scalars);
    free(graph->before);
    free(graph->added);
    free(graph->hypers);
    free(graph->shifts);
    free(graph);
}
