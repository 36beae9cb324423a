/* Manages the contents of gradient shards, from the reductions that write them to zero_grad.
 *
 * Zeroing touches no memory: it only marks the shards as empty, and the results of reductions in
 * flight as unwanted. A pending step's parameters and scale are already fixed, so gradients may be
 * zeroed before it ends. Code that reads or writes shards advances the step first.
 */
#include "engine/grads.h"

#include <string.h>

#include "engine/fill.h"
#include "engine/grad_file.h"
#include "engine/micro.h"
#include "engine/unit_internal.h"
#include "ops/flat_ops.h"

bool fsdpc_unit_has_grad(const fsdpc_unit *unit, int param)
{
    return fsdpc_grad_exists(unit, param);
}

bool fsdpc_unit_has_grads(const fsdpc_unit *unit)
{
    return unit->grad_live;
}

bool fsdpc_unit_has_factor(const fsdpc_unit *unit)
{
    return fsdpc_unit_is_scaled(unit);
}

fsdpc_status fsdpc_unit_apply_scale(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_advance(unit));
    FSDPC_TRY(fsdpc_micro_fold(unit));
    if (!fsdpc_unit_is_scaled(unit))
        return FSDPC_OK;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    FSDPC_TRY(fsdpc_grad_file_open(unit, true));
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        FSDPC_TRY(fsdpc_flat_scale(group->grad, group->grad_dtype, group->plan->shard_numel,
                                   unit->pending_scale, fsdpc_unit_scale_at(unit), NULL, main));
    }
    fsdpc_grad_file_seal(unit);
    unit->pending_scale = 1;
    unit->clipped = false;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_grad(fsdpc_unit *unit, int param, bool write, fsdpc_local_shard *local_out,
                             void **out)
{
    if (!fsdpc_grad_exists(unit, param)) {
        *out = NULL;
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_unit_apply_scale(unit));
    FSDPC_TRY(fsdpc_grad_file_check(unit, param, write));
    *out = fsdpc_unit_grad_rows(unit, param, local_out);
    return FSDPC_OK;
}

void fsdpc_unit_zero_grad(fsdpc_unit *unit)
{
    unit->grad_live = unit->partial_live = unit->folded = false;
    memset(unit->grads, FSDPC_GRAD_NONE, (size_t)unit->layout->n_params);
    unit->micro.n = unit->n_micro = 0;
    unit->pending_scale = 1;
    unit->clipped = false;
    unit->forget = unit->reduction != FSDPC_REDUCTION_NONE;
    if (unit->root && !unit->root->model->in_backward)
        fsdpc_fill_drop(unit); /* gradients accumulated without synchronising */
}

bool fsdpc_unit_grads_rest(const fsdpc_unit *unit)
{
    return !unit->grad_live && !fsdpc_fill_is_in_shard(unit) &&
           unit->reduction == FSDPC_REDUCTION_NONE && unit->micro.n == 0 && !unit->pending;
}

static bool can_part(const fsdpc_unit *unit)
{
    return fsdpc_unit_grads_rest(unit) && !unit->grads_in_frontend && !unit->offload.gradients &&
           !unit->backward_steps && !(unit->root && unit->root->captures > 0);
}

fsdpc_status fsdpc_unit_part_grads(fsdpc_unit *unit, void **groups_out, bool *parted_out)
{
    int n_groups = unit->n_trained, n = 0;
    fsdpc_status status = FSDPC_OK;
    *parted_out = can_part(unit);
    for (; *parted_out && status == FSDPC_OK && n < n_groups; n++)
        status = fsdpc_unit_alloc_grad(unit, n, &groups_out[n]);
    for (int g = 0; g < n; g++) {
        unsigned char *fresh = groups_out[g];
        groups_out[g] = status == FSDPC_OK ? unit->groups[g].grad : NULL;
        if (status == FSDPC_OK)
            unit->groups[g].grad = fresh;
        else
            fsdpc_device_free(unit->device, fresh);
    }
    *parted_out &= status == FSDPC_OK;
    return status;
}

fsdpc_status fsdpc_unit_refuse_stepped(const fsdpc_unit *unit)
{
    return unit->backward_steps
               ? fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                            "unit '%s' is stepped inside backward, and has no gradients "
                            "to clip, unscale or assign: leave step_in_backward() out",
                            unit->name)
               : FSDPC_OK;
}

fsdpc_status fsdpc_unit_take_begin(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_refuse_stepped(unit));
    FSDPC_TRY(fsdpc_unit_advance(unit));
    FSDPC_TRY(fsdpc_fill_leave_shard(unit));
    if (!unit->grad_live)
        FSDPC_TRY(fsdpc_grad_file_open(unit, false));
    unit->grad_live = true;
    return FSDPC_OK;
}

fsdpc_status fsdpc_unit_take_write(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_apply_scale(unit));
    return fsdpc_grad_file_open(unit, true);
}

fsdpc_status fsdpc_unit_take_grad(fsdpc_unit *unit, int param, bool given)
{
    if (unit->grads[param] != FSDPC_GRAD_NEW) /* not handed out yet */
        unit->grads[param] = given ? FSDPC_GRAD_OLD : FSDPC_GRAD_NONE;
    if (given || unit->layout->params[param].group >= unit->n_trained)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_unit_take_write(unit));
    fsdpc_local_shard local;
    void *rows = fsdpc_unit_grad_rows(unit, param, &local);
    fsdpc_dtype dtype = unit->groups[unit->layout->params[param].group].grad_dtype;
    return fsdpc_device_fill(unit->device, rows, 0, local.numel * fsdpc_dtype_bytes(dtype),
                             fsdpc_device_main(unit->device));
}

fsdpc_status fsdpc_unit_give_begin(fsdpc_unit *unit, bool *any_out)
{
    *any_out = unit->grad_live && !unit->buffer; /* something was reduced, and no more will come */
    return *any_out && unit->settings.deterministic ? fsdpc_unit_apply_scale(unit) : FSDPC_OK;
}

bool fsdpc_unit_give_grad(fsdpc_unit *unit, int param)
{
    if (unit->grads[param] != FSDPC_GRAD_NEW)
        return false;
    unit->grads[param] = FSDPC_GRAD_OLD;
    return true;
}

bool fsdpc_unit_gave_all(const fsdpc_unit *unit)
{
    if (!unit->grad_live || unit->buffer || unit->reduction != FSDPC_REDUCTION_NONE ||
        unit->pending)
        return false;
    return !memchr(unit->grads, FSDPC_GRAD_NEW, (size_t)unit->layout->n_params);
}
