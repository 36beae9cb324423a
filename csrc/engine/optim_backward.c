/* A unit has a block of the pool from the post of its reduction (or, on a single rank, whose
 * kernels fill the shard, from its first gradient) to its step. Two blocks serve a reduction that is
 * in flight and the next one. Units that enclose others stay open on a single rank, and micro-steps
 * without synchronisation keep sums there; the pool then grows. A block whose unit is at rest is
 * free, even if its backward has failed.
 *
 * Which parameters have a gradient on any rank is agreed on at the end of backward. A unit is
 * stepped before, by what this rank has used. If another rank has used other parameters, shards
 * have been stepped differently, and agreeing fails.
 *
 * A reduction ends when a rank notices it. Errors that all ranks make are therefore found earlier,
 * when a unit's first gradient arrives, so that they stop all ranks at the same place.
 */
#include "engine/optim_backward.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "engine/fill.h"
#include "engine/grads.h"
#include "engine/optim_internal.h"
#include "engine/optim_matrix.h"
#include "engine/reduce.h"
#include "engine/root_internal.h"

typedef struct block {
    unsigned char *memory;
    size_t bytes;
    fsdpc_unit *user; /* NULL: none yet */
    uint64_t lent;    /* a number that grows */
} block;

typedef struct pooled_steps {
    fsdpc_backward_steps table;
    fsdpc_optim *optim;
    fsdpc_optim_refresh_fn refresh;
    void *arg;
    const fsdpc_model *model; /* the last one, */
    uint64_t backward;        /* and its backward, in which options were refreshed */
    block *blocks;
    int n_blocks;
    uint64_t lent;
} pooled_steps;

static pooled_steps *of(fsdpc_backward_steps *backward_steps)
{
    return (pooled_steps *)backward_steps;
}

static size_t grad_bytes(const fsdpc_unit *unit)
{
    size_t bytes = 0;
    for (int g = 0; g < unit->n_trained; g++)
        bytes += fsdpc_mem_counted(unit->groups[g].plan->shard_numel *
                                   fsdpc_dtype_bytes(unit->groups[g].grad_dtype));
    return bytes;
}

/* ---- The pool ---- */

static fsdpc_status add_block(pooled_steps *own, size_t bytes)
{
    block *grown = realloc(own->blocks, ((size_t)own->n_blocks + 1) * sizeof *grown);
    if (!grown)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
    own->blocks = grown;
    void *memory = NULL;
    FSDPC_TRY(fsdpc_device_alloc(own->optim->device, FSDPC_MEM_GRAD, bytes, &memory));
    grown[own->n_blocks++] = (block){.memory = memory, .bytes = bytes};
    return FSDPC_OK;
}

static void take_back(pooled_steps *own, fsdpc_unit *unit)
{
    for (int i = 0; i < own->n_blocks; i++)
        if (own->blocks[i].user == unit)
            own->blocks[i].user = NULL;
    for (int g = 0; g < unit->n_trained; g++)
        unit->groups[g].grad = NULL;
}

static void use(pooled_steps *own, block *taken, fsdpc_unit *unit)
{
    size_t at = 0;
    if (taken->user)
        take_back(own, taken->user);
    taken->user = unit;
    taken->lent = own->lent++;
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        group->grad = taken->memory + at;
        at += fsdpc_mem_counted(group->plan->shard_numel * fsdpc_dtype_bytes(group->grad_dtype));
    }
}

/* Takes the smallest free block, or asks to wait for the reduction that has been posted first. */
static fsdpc_status lend(fsdpc_backward_steps *backward_steps, fsdpc_unit *unit,
                         fsdpc_unit **busy_out)
{
    pooled_steps *own = of(backward_steps);
    size_t bytes = grad_bytes(unit);
    block *found = NULL, *busy = NULL;
    *busy_out = NULL;
    for (int i = 0; i < own->n_blocks; i++) {
        block *each = &own->blocks[i];
        if (each->user == unit)
            return FSDPC_OK;
        if (each->bytes < bytes)
            continue;
        if (!each->user || fsdpc_unit_grads_rest(each->user))
            found = found && found->bytes <= each->bytes ? found : each;
        else if (each->user->reduction != FSDPC_REDUCTION_NONE)
            busy = busy && busy->lent < each->lent ? busy : each;
    }
    if (!found && busy) {
        *busy_out = busy->user;
        return FSDPC_OK;
    }
    if (!found) {
        FSDPC_TRY(add_block(own, bytes));
        found = &own->blocks[own->n_blocks - 1];
    }
    use(own, found, unit);
    return FSDPC_OK;
}

/* ---- Steps ---- */

static fsdpc_status refuse(const fsdpc_unit *unit, const char *why)
{
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "step_in_backward() of unit '%s': %s", unit->name,
                      why);
}

static fsdpc_status check_given(const unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    for (int p = 0; p < unit->layout->n_params; p++)
        if (unit->trainable[p] && states->params[p].group < 0)
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                              "step_in_backward() of unit '%s': the optimizer was not given its "
                              "parameter '%s', whose gradient would be lost",
                              unit->name, unit->layout->params[p].name);
    return FSDPC_OK;
}

static fsdpc_status open_unit(fsdpc_backward_steps *backward_steps, fsdpc_unit *unit)
{
    pooled_steps *own = of(backward_steps);
    const fsdpc_model *model = unit->root->model;
    if (unit->stepped_in == model->backwards)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "unit '%s' was stepped inside this backward, and now gets another "
                          "gradient, because it runs twice or its weights are used elsewhere: "
                          "leave step_in_backward() out",
                          unit->name);
    if (!unit->settings.requires_all_reduce)
        return refuse(unit, "it has set_requires_all_reduce(False)");
    FSDPC_TRY(check_given(fsdpc_optim_unit(own->optim, unit)));
    if (own->model == model && own->backward == model->backwards)
        return FSDPC_OK;
    FSDPC_TRY(own->refresh(own->arg));
    FSDPC_TRY(fsdpc_optim_prepare_backward(own->optim));
    own->model = model;
    own->backward = model->backwards;
    return FSDPC_OK;
}

static fsdpc_status step(fsdpc_backward_steps *backward_steps, fsdpc_unit *unit)
{
    pooled_steps *own = of(backward_steps);
    FSDPC_TRY(fsdpc_optim_step_reduced(own->optim, unit));
    take_back(own, unit);
    unit->stepped_in = unit->root->model->backwards;
    unit->grad_live = false; /* `grads` still tells which there were */
    return FSDPC_OK;
}

/* ---- Entering and leaving ---- */

#define HAS_GRADS "it has gradients: call zero_grad() first"

static fsdpc_status check_unit(const fsdpc_optim *optim, const unit_states *states)
{
    const fsdpc_unit *unit = states->unit;
    const fsdpc_offload *offload = &unit->offload;
    if (unit->backward_steps)
        return refuse(unit, "another optimizer steps it inside backward");
    if (offload->masters || offload->states || offload->gradients)
        return refuse(unit, "it is offloaded");
    if (unit->settings.deterministic)
        return refuse(unit, "deterministic mode keeps the sums of micro-steps");
    if (unit->settings.low_rank.rank > 0 && fsdpc_mesh_is_replicated(&unit->mesh))
        return refuse(unit, "PowerSGD keeps what its sums leave out");
    if (fsdpc_mesh_is_replicated(&unit->mesh) && unit->mesh.shard->size > 1)
        return refuse(unit, "its shards have replicas");
    if (unit->device->remote)
        return refuse(unit, "it is on a GPU");
    if (!fsdpc_unit_grads_rest(unit))
        return refuse(unit, HAS_GRADS);
    if (!unit->foreign && fsdpc_unit_is_shared(unit))
        return refuse(unit, "tensors on its gradients are in use: drop them first");
    FSDPC_TRY(check_given(states));
    for (int p = 0; p < unit->layout->n_params; p++) {
        int group = states->params[p].group;
        if (group >= 0 && (fsdpc_optim_steps_matrix(optim, states, p) ||
                           fsdpc_optim_is_factored(optim, states, p)))
            return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                              "step_in_backward(): %s needs all matrices at once",
                              fsdpc_optim_kind_name(fsdpc_optim_kind_of(optim, group)));
    }
    return FSDPC_OK;
}

static void free_own(pooled_steps *own)
{
    for (int i = 0; i < own->n_blocks; i++)
        fsdpc_device_free(own->optim->device, own->blocks[i].memory);
    free(own->blocks);
    free(own);
}

static fsdpc_status restore_grads(fsdpc_unit *unit)
{
    unit->backward_steps = NULL;
    for (int g = 0; g < unit->n_trained; g++) {
        void *memory = NULL;
        FSDPC_TRY(fsdpc_unit_alloc_grad(unit, g, &memory));
        unit->groups[g].grad = memory;
    }
    return FSDPC_OK;
}

static fsdpc_status leave(fsdpc_backward_steps *backward_steps)
{
    fsdpc_status status = FSDPC_OK;
    pooled_steps *own = of(backward_steps);
    fsdpc_optim *optim = own->optim;
    for (int i = 0; i < optim->n_units; i++) {
        fsdpc_unit *unit = optim->units[i].unit;
        if (unit->backward_steps != backward_steps)
            continue;
        if (unit->reduction != FSDPC_REDUCTION_NONE) { /* a backward has failed */
            unit->forget = true;
            FSDPC_KEEP_FIRST(status, fsdpc_reduce_wait(unit));
        }
        FSDPC_KEEP_FIRST(status, fsdpc_fill_leave_shard(unit));
        take_back(own, unit);
        fsdpc_status restored = restore_grads(unit);
        unit->grads_away = restored != FSDPC_OK;
        FSDPC_KEEP_FIRST(status, restored);
    }
    optim->backward_steps = NULL;
    free_own(own);
    return status;
}

fsdpc_status fsdpc_optim_leave_backward(fsdpc_optim *optim)
{
    if (!optim->backward_steps)
        return FSDPC_OK;
    for (int i = 0; i < optim->n_units; i++) {
        const fsdpc_unit *unit = optim->units[i].unit;
        if (unit->backward_steps == optim->backward_steps &&
            (unit->buffer || !fsdpc_unit_grads_rest(unit)))
            return refuse(unit, HAS_GRADS);
    }
    return leave(optim->backward_steps);
}

fsdpc_status fsdpc_optim_enter_backward(fsdpc_optim *optim, fsdpc_optim_refresh_fn refresh,
                                        void *arg)
{
    if (optim->backward_steps)
        return FSDPC_OK;
    size_t largest = 0, second = 0;
    pooled_steps *own = calloc(1, sizeof *own);
    if (!own)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for an optimizer");
    *own = (pooled_steps){
        .table = {open_unit, lend, step, leave}, .optim = optim, .refresh = refresh, .arg = arg};
    fsdpc_status status = fsdpc_optim_end_step(optim);
    for (int i = 0; status == FSDPC_OK && i < optim->n_units; i++) {
        status = check_unit(optim, &optim->units[i]);
        size_t bytes = grad_bytes(optim->units[i].unit);
        second = fsdpc_max_size(second, fsdpc_min_size(largest, bytes));
        largest = fsdpc_max_size(largest, bytes);
    }
    if (status == FSDPC_OK && largest)
        status = add_block(own, largest);
    if (status == FSDPC_OK && second)
        status = add_block(own, second);
    if (status != FSDPC_OK) {
        free_own(own);
        return status;
    }
    for (int i = 0; i < optim->n_units; i++) {
        fsdpc_unit *unit = optim->units[i].unit;
        for (int g = 0; g < unit->n_trained; g++) {
            if (!unit->grads_in_frontend)
                fsdpc_unit_destroy_array(unit, unit->groups[g].grad_extent, unit->groups[g].grad);
            unit->groups[g].grad = NULL;
        }
        unit->grads_in_frontend = unit->grads_away = false;
        unit->backward_steps = &own->table;
    }
    optim->backward_steps = &own->table;
    return FSDPC_OK;
}

bool fsdpc_unit_steps_in_backward(const fsdpc_unit *unit)
{
    return unit->backward_steps != NULL;
}
