/* A root's parameter buffer contains the unsharded parameters of all its units end to end, each
 * group on a page boundary. If gathers move bytes, the parameter buffer only defines these offsets
 * (unsharded.h). Reduce buffers are sized for the largest unit that uses them.
 */
#include "engine/root_internal.h"

#include <stdlib.h>

#include "base/size.h"
#include "engine/epoch.h"
#include "engine/fill.h"
#include "engine/low_rank.h"
#include "engine/unsharded.h"
#include "engine/order.h"

static fsdpc_status adopt_units(fsdpc_root *root, fsdpc_unit *const *units,
                                size_t *param_buffer_bytes_out)
{
    size_t param_buffer_bytes = 0;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = units[i];
        for (int g = 0; g < unit->layout->n_groups; g++)
            unit->groups[g].param_buffer_offset += param_buffer_bytes;
        FSDPC_TRY(
            fsdpc_add_size(param_buffer_bytes, unit->param_buffer_bytes, &param_buffer_bytes));
        root->units[i] = unit;
        unit->root = root;
        unit->dirty = true;
    }
    *param_buffer_bytes_out = param_buffer_bytes;
    return FSDPC_OK;
}

/* Creates the parameter buffer for all units in device memory, in host memory or on disk. It
 * contains either whole unsharded parameters or this rank's slices of them. */
static fsdpc_status create_param_buffer(fsdpc_root *root, size_t bytes)
{
    const fsdpc_unit *first = root->units[0];
    for (int i = 1; i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        if (unit->offload.params != first->offload.params)
            return fsdpc_fail(FSDPC_ERR_VALUE,
                              "units '%s' and '%s' are of one model, and one has its params on %s "
                              "and the other has not: give both one offload_policy",
                              first->name, unit->name,
                              first->offload.host || unit->offload.host ? "the host" : "a disk");
    }
    fsdpc_tier *tier = first->offload.params ? first->offload.tier : NULL;
    FSDPC_TRY(fsdpc_param_buffer_create_in(root->comm, bytes, tier, &root->param_buffer));
    root->param_buffer->pinned =
        root->param_buffer->offsets_only && first->offload.params && first->offload.host;
    return FSDPC_OK;
}

/* Returns whether unsharded parameters will be in a frontend's memory. */
static bool frontend_has_memory(const fsdpc_root *root)
{
    for (int i = 0; i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        if (!unit->frontend_memory.take || unit->no_alias || unit->offload.params ||
            unit->offload.masters)
            return false;
    }
    return root->comm->size == 1;
}

static void destroy_root(fsdpc_root *root);

/* Creates the root of units that share a mesh. */
static fsdpc_status create_root(fsdpc_model *model, fsdpc_unit *const *units, const bool *encloses,
                                int n_units, fsdpc_root **out)
{
    fsdpc_status status = FSDPC_OK;
    fsdpc_root *root = calloc(1, sizeof *root);
    if (!root)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the root of %d units", n_units);
    fsdpc_lender_init(&root->lender);
    root->model = model;
    root->n_units = n_units;
    root->comm = units[0]->mesh.shard;
    root->replicate = fsdpc_mesh_is_replicated(&units[0]->mesh) ? units[0]->mesh.replicate : NULL;
    root->reduce_comm = root->replicate && root->comm->size == 1 ? root->replicate : root->comm;
    root->ranks = fsdpc_mesh_ranks(&units[0]->mesh);
    root->device = units[0]->device;
    root->trace = units[0]->trace;
    root->units = calloc((size_t)n_units, sizeof(fsdpc_unit *));
    root->reducing = calloc((size_t)n_units, sizeof(fsdpc_unit *));
    root->equal = calloc((size_t)n_units, sizeof *root->equal);
    if (!root->units || !root->reducing || !root->equal) {
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the root of %d units", n_units);
        goto destroy;
    }
    size_t param_buffer_bytes = 0;
    FSDPC_TRY_GOTO(status, adopt_units(root, units, &param_buffer_bytes), destroy);
    bool in_frontend = frontend_has_memory(root);
    FSDPC_TRY_GOTO(status, create_param_buffer(root, in_frontend ? 0 : param_buffer_bytes),
                   destroy);
    root->param_buffer->kind_text = fsdpc_epoch_text;
    root->unsharded = in_frontend                        ? &fsdpc_unsharded_frontend
                      : units[0]->no_alias               ? &fsdpc_unsharded_private
                      : root->param_buffer->offsets_only ? &fsdpc_unsharded_slots
                      : units[0]->offload.params         ? &fsdpc_unsharded_file
                                                         : &fsdpc_unsharded_shared;
    FSDPC_TRY_GOTO(status, fsdpc_unsharded_create(root, encloses), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_fill_create_buffers(root, encloses), destroy);
    for (int i = 0; i < n_units; i++)
        FSDPC_TRY_GOTO(status, fsdpc_low_rank_create(root->units[i]), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_stream_create(root->device, "gather", true, &root->gather_stream),
                   destroy);
    FSDPC_TRY_GOTO(status, fsdpc_stream_create(root->device, "reduce", true, &root->reduce_stream),
                   destroy);
    FSDPC_TRY_GOTO(status, fsdpc_order_create(root), destroy);
    if (root->overlaps && root->replicate && root->comm->size > 1)
        FSDPC_TRY_GOTO(
            status, fsdpc_stream_create(root->device, "replicate", true, &root->replicate_stream),
            destroy);
    *out = root;
    return FSDPC_OK;

destroy:
    destroy_root(root);
    return status;
}

static bool has_mesh(const fsdpc_unit *unit, const fsdpc_mesh *mesh)
{
    return unit->mesh.shard == mesh->shard && unit->mesh.replicate == mesh->replicate &&
           unit->mesh.apart == mesh->apart;
}

/* Creates a root for each mesh, in the order of their first units, which all ranks share.
 * `members` and `flags` have space for all units. */
static fsdpc_status create_roots(fsdpc_model *model, const bool *encloses, fsdpc_unit **members,
                                 bool *flags)
{
    fsdpc_root **end = &model->first;
    for (int i = 0; i < model->n_units; i++) {
        if (model->units[i]->root)
            continue;
        int n = 0;
        for (int k = i; k < model->n_units; k++) {
            if (!has_mesh(model->units[k], &model->units[i]->mesh))
                continue;
            members[n] = model->units[k];
            flags[n++] = k == 0 || encloses[k];
        }
        FSDPC_TRY(create_root(model, members, flags, n, end));
        end = &(*end)->next;
    }
    return FSDPC_OK;
}

static void destroy_model(fsdpc_model *model)
{
    while (model->first) {
        fsdpc_root *next = model->first->next;
        destroy_root(model->first);
        model->first = next;
    }
    for (int i = 0; i < model->n_units; i++)
        model->units[i]->id = -1;
    free(model->exec_order.entries);
    free(model->acts.items);
    free(model->last_acts.items);
    free(model->units);
    free(model);
}

fsdpc_status fsdpc_root_create(fsdpc_unit *const *units, const bool *encloses, int n_units,
                               fsdpc_root **out)
{
    for (int i = 0; i < n_units; i++) {
        if (units[i]->root)
            return fsdpc_fail(
                FSDPC_ERR_STATE,
                "unit '%s' already belongs to the root '%s': run the outermost module "
                "first, so that all units are found together",
                units[i]->name, units[i]->root->model->units[0]->name);
    }
    size_t n = (size_t)n_units;
    fsdpc_model *model = calloc(1, sizeof *model);
    fsdpc_unit **all = calloc(n, sizeof(fsdpc_unit *)), **members = calloc(n, sizeof *members);
    bool *flags = calloc(n, sizeof *flags);
    if (!model || !all || !members || !flags) {
        free(model);
        free(all);
        free(members);
        free(flags);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a model of %d units", n_units);
    }
    *model = (fsdpc_model){.units = all,
                           .n_units = n_units,
                           .is_last_backward = true,
                           .prefetch = units[0]->settings.prefetch};
    for (int i = 0; i < n_units; i++) {
        all[i] = units[i];
        all[i]->id = i;
    }
    fsdpc_status status = create_roots(model, encloses, members, flags);
    free(members);
    free(flags);
    if (status == FSDPC_OK && model->first)
        *out = model->first;
    else
        destroy_model(model);
    return status;
}

static void disown_unit(fsdpc_unit *unit)
{
    fsdpc_unsharded_remove(unit);
    fsdpc_buffer_destroy(unit->own_buffer);
    fsdpc_buffer_destroy(unit->own_partial);
    fsdpc_low_rank_destroy(unit);
    unit->own_buffer = unit->buffer = unit->own_partial = unit->partial = NULL;
    unit->partial_live = false;
    unit->state = FSDPC_UNIT_SHARDED;
    unit->held = 0;
    unit->in_backward = false;
    unit->reduction = FSDPC_REDUCTION_NONE;
    unit->dirty = true;
    unit->root = NULL;
    size_t offset = 0; /* back to offsets within the unit, as set by unit_create */
    if (unit->layout->n_groups > 0)
        offset = unit->groups[0].param_buffer_offset;
    for (int g = 0; g < unit->layout->n_groups; g++)
        unit->groups[g].param_buffer_offset -= offset;
}

/* An operation in flight refers to memory that is about to be freed. On a single rank, the
 * operation finishes when its streams do. Otherwise the peers may never post it, so the
 * communicator is shut down along with the operation. */
static void abandon_work(fsdpc_work *work)
{
    fsdpc_comm *comm = work->comm;
    if (fsdpc_comm_test(work) == FSDPC_IN_PROGRESS && comm->size > 1)
        fsdpc_comm_abort(comm, "a model was destroyed while its gradients were reduced; let "
                               "backward end, on every rank, before dropping a model");
}

static void destroy_root(fsdpc_root *root)
{
    for (int i = 0; root->units && i < root->n_units && root->units[i]; i++) {
        for (int g = 0; g < root->units[i]->layout->n_groups; g++) {
            abandon_work(&root->units[i]->groups[g].gather);
            abandon_work(&root->units[i]->groups[g].reduce);
        }
        abandon_work(&root->units[i]->low_rank_work);
    }
    fsdpc_order_destroy(root);
    fsdpc_stream_destroy(root->gather_stream);
    fsdpc_stream_destroy(root->reduce_stream);
    fsdpc_stream_destroy(root->replicate_stream);
    for (int i = 0; root->units && i < root->n_units; i++) {
        if (root->units[i])
            disown_unit(root->units[i]);
    }
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        fsdpc_buffer_destroy(root->pool[i]);
        fsdpc_buffer_destroy(root->pool_partial[i]);
    }
    fsdpc_param_buffer_destroy(root->param_buffer);
    free(root->slot_users);
    free(root->reducing);
    free(root->equal);
    free(root->units);
    free(root);
}

void fsdpc_root_destroy(fsdpc_root *root)
{
    if (root)
        destroy_model(root->model);
}

const fsdpc_unit *fsdpc_root_outermost(const fsdpc_root *root)
{
    return root->model->units[0];
}

bool fsdpc_root_in_backward(const fsdpc_root *root)
{
    return root->model->in_backward;
}

int fsdpc_root_forward_depth(const fsdpc_root *root)
{
    return root->model->forward_depth;
}

int fsdpc_root_prefetch(const fsdpc_root *root)
{
    return root->model->prefetch;
}

void fsdpc_root_set_prefetch(fsdpc_root *root, int distance)
{
    root->model->prefetch = distance;
}

bool fsdpc_root_set_last_backward(fsdpc_root *root, bool last)
{
    bool before = root->model->is_last_backward;
    root->model->is_last_backward = last;
    return before;
}

fsdpc_schedule fsdpc_root_schedule(const fsdpc_root *root)
{
    const fsdpc_model *model = root->model;
    const fsdpc_acts *acts = model->acts.whole ? &model->acts : &model->last_acts;
    if (!model->exec_order.complete)
        return (fsdpc_schedule){.complete = false};
    return (fsdpc_schedule){.uses = model->exec_order.entries,
                            .n_uses = model->exec_order.length,
                            .acts = acts->items,
                            .n_acts = acts->length,
                            .complete = true};
}
