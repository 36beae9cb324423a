/* Clipping in two steps: one small collective for the norm, no pass for the scale.
 *
 * The norm costs one read of the gradient shards and an all-reduce of 70 integers; norms of single
 * parameters come from the same read and the same all-reduce, of 70 integers each.  The scale is
 * not applied here: it is a factor that the optimizer multiplies in while it reads the gradients
 * anyway.  A NaN or infinity anywhere makes the norm NaN or infinite, on all ranks alike.
 *
 * Whether a pending scale is applied first or afterwards to the sums is this rank's own choice (it
 * may have read .grad, the others not): what it gives to the all-reduce is the same.
 */
#include "engine/clip.h"

#include <stdlib.h>

#include "ops/flat_ops.h"

static fsdpc_status add_param(fsdpc_unit *unit, int param, double p, fsdpc_norm *norm)
{
    fsdpc_stream inline_stream = {.device = unit->device, .name = "inline"};
    const fsdpc_place *place = &unit->layout->params[param];
    fsdpc_piece piece;
    void *grad;
    FSDPC_TRY(fsdpc_unit_grad(unit, param, &piece, &grad));
    if (!grad || piece.numel == 0)
        return FSDPC_OK;
    return fsdpc_norm_add(norm, p, grad, unit->groups[place->group].grad_dtype, piece.numel,
                          place->leaf_numel, &inline_stream);
}

/* Adds a unit's gradients to one norm, or each to its own. */
static fsdpc_status add_unit(fsdpc_unit *unit, double p, fsdpc_norm *norms, bool each)
{
    fsdpc_status status = FSDPC_OK;
    double pending = unit->pending_scale;
    bool later = pending < 1 && fsdpc_norm_can_scale(p, pending);
    if (later)
        unit->pending_scale = 1; /* so that reading applies nothing */
    for (int i = 0; status == FSDPC_OK && i < unit->layout->n_params; i++) {
        fsdpc_norm *norm = each ? &norms[i] : norms, raw = {{{0}, 0, 0}};
        status = add_param(unit, i, p, later ? &raw : norm);
        if (later) {
            fsdpc_norm_scale(&raw, p, pending);
            fsdpc_norm_merge(norm, p, &raw);
        }
    }
    if (later)
        unit->pending_scale = pending;
    return status;
}

/* Combines the norms of the ranks of one shard group. */
static fsdpc_status reduce_norms(fsdpc_comm *comm, double p, fsdpc_norm *norms, size_t n)
{
    for (size_t i = 0; i < n; i++)
        fsdpc_norm_normalize(&norms[i], p);
    if (comm->size == 1)
        return FSDPC_OK;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .unit = -1,
                     .what = "gradient norm",
                     .dtype = FSDPC_I64,
                     .op = fsdpc_norm_red(p),
                     .send = norms,
                     .recv = norms,
                     .numel = n * FSDPC_NORM_WORDS};
    fsdpc_trace_add(comm->trace, FSDPC_TRACE_COLLECTIVE, -1, n * sizeof *norms, 0, 0);
    return fsdpc_comm_run(comm, &op);
}

/* The units of one shard group: all in one norm, or one for each parameter of these units. */
static fsdpc_status group_norms(fsdpc_unit *const *units, int n_units, fsdpc_comm *comm, double p,
                                fsdpc_norm *norms, bool each)
{
    size_t n = 0;
    for (int i = 0; i < n_units; i++) {
        if (units[i]->mesh.shard != comm)
            continue;
        FSDPC_TRY(add_unit(units[i], p, norms + n, each));
        n += each ? (size_t)units[i]->layout->n_params : 0;
    }
    return reduce_norms(comm, p, norms, each ? n : 1);
}

/* The same, one for each: `norms` is room for all; what belongs to the group goes to its place in
 * `params_out`, and all of it into the total. */
static fsdpc_status group_norms_each(fsdpc_unit *const *units, int n_units, fsdpc_comm *comm,
                                     double p, fsdpc_norm *norms, fsdpc_norm *total_io,
                                     fsdpc_norm *params_out)
{
    FSDPC_TRY(group_norms(units, n_units, comm, p, norms, true));
    for (int i = 0; i < n_units; i++) {
        for (int param = 0; param < units[i]->layout->n_params; param++, params_out++) {
            if (units[i]->mesh.shard != comm)
                continue;
            *params_out = *norms++;
            fsdpc_norm_merge(total_io, p, params_out);
        }
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_clip_norms(fsdpc_unit *const *units, int n_units, double p, fsdpc_norm *total_io,
                              fsdpc_norm *params_out)
{
    FSDPC_TRY(fsdpc_norm_check(p));
    size_t n_params = 0;
    for (int i = 0; i < n_units; i++)
        n_params += (size_t)units[i]->layout->n_params;
    for (int i = 0; i < n_units; i++) {
        fsdpc_comm *comm = units[i]->mesh.shard;
        bool seen = false;
        for (int j = 0; j < i && !seen; j++)
            seen = units[j]->mesh.shard == comm;
        if (seen)
            continue;
        if (!params_out) {
            fsdpc_norm norm = {{{0}, 0, 0}};
            FSDPC_TRY(group_norms(units, n_units, comm, p, &norm, false));
            fsdpc_norm_merge(total_io, p, &norm);
            continue;
        }
        fsdpc_norm *norms = calloc(n_params > 0 ? n_params : 1, sizeof *norms);
        if (!norms)
            return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the norms of %zu parameters",
                              n_params);
        fsdpc_status status =
            group_norms_each(units, n_units, comm, p, norms, total_io, params_out);
        free(norms);
        FSDPC_TRY(status);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_clip_norm(fsdpc_unit *const *units, int n_units, double *norm_out)
{
    fsdpc_norm norm = {{{0}, 0, 0}};
    FSDPC_TRY(fsdpc_clip_norms(units, n_units, 2, &norm, NULL));
    *norm_out = fsdpc_norm_value(&norm, 2);
    return FSDPC_OK;
}

void fsdpc_clip_scale(fsdpc_unit *const *units, int n_units, double norm, double max_norm)
{
    double scale = max_norm / (norm + 1e-6);
    if (scale < 1) /* not when the norm is NaN: the caller decides what that means */
        fsdpc_clip_multiply(units, n_units, scale);
}

void fsdpc_clip_multiply(fsdpc_unit *const *units, int n_units, double factor)
{
    for (int i = 0; i < n_units; i++) {
        if (units[i]->grad_live)
            units[i]->pending_scale *= factor;
    }
}
