/* The pool of reduce buffers.
 *
 * Kernels write gradients directly into an open buffer, in the unit's reduce dtype, with each
 * parameter at its offset among the unsharded parameters. A single call over the bands therefore
 * posts a reduction. Parts that no kernel wrote (unused or frozen parameters) are zeroed first,
 * because the peers read the whole buffer. Padding is not cleared; it is reduced into the shard's
 * padding, which is never read.
 *
 * A unit takes the least recently posted pooled buffer that no unit is filling, after waiting for
 * that buffer's reduction. A unit therefore waits only for posted reductions, never for another
 * unit's half-filled buffer. If both pooled buffers are half filled, the unit gets a permanent
 * buffer of its own. All ranks must make the same choice, since peers read each other's buffers by
 * name. The choice therefore depends on the order of opens and posts, which the program determines,
 * and never on which reduction happens to be complete. Creating a buffer is collective, so for the
 * same reason it happens only while no reduction is in flight.
 *
 * On a single rank the shard has the same layout as the unsharded parameters, so a reduction would
 * be a plain copy. That copy took 1 % of a LLaMA 1B step on an H200. Kernels therefore write into
 * the shard, unless it already holds gradients, or the sums are scaled, not yet synchronised, or
 * have a different dtype. A single rank therefore creates a buffer on first use, and most runs
 * never need one.
 *
 * Partials (for meshes with replicas) are paired with buffers: each pooled buffer has a pooled
 * partial, and a unit's own buffer has its own partial. A unit that postpones its all-reduce also
 * has its own partial.
 */
#include "engine/fill.h"

#include <string.h>

#include "base/size.h"

static bool has_partials(const fsdpc_root *root)
{
    return root->replicate && fsdpc_plan_has_partials(root->replicate->size, root->comm->size);
}

/* Returns whether a buffer is missing, or too small because a frozen group has become trainable. */
static bool is_too_small(const fsdpc_buffer *buffer, size_t bytes)
{
    return !buffer || buffer->bytes < bytes;
}

static fsdpc_status replace(const fsdpc_unit *unit, fsdpc_comm *comm, size_t bytes,
                            fsdpc_buffer **buffer_io)
{
    if (*buffer_io) {
        FSDPC_TRY(fsdpc_loan_move(&unit->root->lender, (*buffer_io)->data, (*buffer_io)->bytes));
        FSDPC_TRY(fsdpc_buffer_idle_wait(*buffer_io, unit->name));
    }
    fsdpc_buffer_destroy(*buffer_io);
    *buffer_io = NULL;
    return fsdpc_buffer_create(comm, bytes, buffer_io);
}

static fsdpc_status create_own(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    FSDPC_TRY(replace(unit, root->reduce_comm, unit->reduce_bytes, &unit->own_buffer));
    if (has_partials(root) && is_too_small(unit->own_partial, unit->grad_bytes))
        FSDPC_TRY(replace(unit, root->replicate, unit->grad_bytes, &unit->own_partial));
    return FSDPC_OK;
}

bool fsdpc_fill_lacks_own(const fsdpc_unit *unit)
{
    return is_too_small(unit->own_buffer, unit->reduce_bytes);
}

static fsdpc_status create_pooled(fsdpc_root *root, int i)
{
    FSDPC_TRY(fsdpc_buffer_create(root->reduce_comm, root->pooled.bytes, &root->pool[i]));
    if (!has_partials(root))
        return FSDPC_OK;
    return fsdpc_buffer_create(root->replicate, root->pooled.partial_bytes, &root->pool_partial[i]);
}

fsdpc_status fsdpc_fill_create_buffers(fsdpc_root *root, const bool *encloses)
{
    bool own = root->reduce_comm->ops->any_buffer;
    for (int i = 0; i < root->n_units; i++) {
        fsdpc_unit *unit = root->units[i];
        unit->stays_open = fsdpc_unit_owns_buffer(&unit->settings, encloses[i]);
        if (unit->reduce_bytes == 0)
            continue;
        if (!unit->stays_open)
            fsdpc_pool_plan_add(&root->pooled, unit->reduce_bytes, unit->grad_bytes);
        else if (!own)
            FSDPC_TRY(create_own(unit));
    }
    for (int i = 0; !own && i < root->pooled.n; i++)
        FSDPC_TRY(create_pooled(root, i));
    return FSDPC_OK;
}

/* Returns the least recently posted pooled buffer that no unit is filling, or -1 if there is
 * none. */
static int choose_pooled(const fsdpc_root *root)
{
    int best = -1;
    for (int i = 0; i < root->pooled.n; i++) {
        if (!root->pool_filling[i] && (best < 0 || root->pool_turn[i] < root->pool_turn[best]))
            best = i;
    }
    return best;
}

bool fsdpc_unit_stays_open(const fsdpc_unit *unit)
{
    return unit->stays_open;
}

int fsdpc_fill_choose(const fsdpc_unit *unit)
{
    bool stays = !unit->settings.requires_sync && !unit->settings.deterministic;
    bool fits = unit->reduce_bytes <= unit->root->pooled.bytes &&
                unit->grad_bytes <= unit->root->pooled.partial_bytes;
    return unit->stays_open || unit->own_buffer || stays || !fits ? -1 : choose_pooled(unit->root);
}

static void fill_nothing(fsdpc_unit *unit)
{
    memset(unit->filled, 0, (size_t)unit->layout->n_params * sizeof *unit->filled);
    unit->n_filled = 0;
    unit->keeps = false;
}

fsdpc_status fsdpc_fill_take(fsdpc_unit *unit, int pooled)
{
    fsdpc_root *root = unit->root;
    if (pooled < 0 && fsdpc_fill_lacks_own(unit))
        FSDPC_TRY(create_own(unit));
    if (pooled >= 0 && !root->pool[pooled])
        FSDPC_TRY(create_pooled(root, pooled));
    fsdpc_buffer *buffer = pooled < 0 ? unit->own_buffer : root->pool[pooled];
    FSDPC_TRY(fsdpc_buffer_idle_wait(buffer, unit->name));
    if (pooled >= 0)
        root->pool_filling[pooled] = unit;
    unit->buffer = buffer;
    fill_nothing(unit);
    return FSDPC_OK;
}

bool fsdpc_fill_suits_shard(const fsdpc_unit *unit)
{
    const fsdpc_unit_group *group = &unit->groups[0];
    return unit->root->reduce_comm->ops->any_buffer &&
           fsdpc_plan_fits_shard(unit->n_trained, group->reduce_dtype, group->grad_dtype,
                                 &unit->offload, unit->settings.deterministic) &&
           !unit->grad_live && unit->settings.requires_sync && unit->settings.divide_factor == 1;
}

void fsdpc_fill_take_shard(fsdpc_unit *unit)
{
    unit->shard = (fsdpc_buffer){
        .comm = unit->root->reduce_comm, .bytes = unit->reduce_bytes, .data = unit->groups[0].grad};
    unit->buffer = &unit->shard;
    fill_nothing(unit);
}

fsdpc_status fsdpc_fill_leave_shard(fsdpc_unit *unit)
{
    if (!fsdpc_fill_is_in_shard(unit))
        return FSDPC_OK;
    if (fsdpc_fill_lacks_own(unit))
        FSDPC_TRY(create_own(unit));
    const fsdpc_unit_group *group = &unit->groups[0];
    FSDPC_TRY(
        fsdpc_loan_move(&unit->root->lender, unit->own_buffer->data, unit->own_buffer->bytes));
    unit->buffer = unit->own_buffer;
    return fsdpc_device_copy(unit->device, unit->buffer->data, group->grad,
                             group->plan->shard_numel * fsdpc_dtype_bytes(group->grad_dtype),
                             fsdpc_device_main(unit->device));
}

/* Returns the buffer that the unit would fill now if this rank does not use it, else NULL. Single
 * ranks have none: kernels write into the shard, whose memory users, steps and frontends share. */
static fsdpc_buffer *unused_buffer(const fsdpc_unit *unit)
{
    const fsdpc_root *root = unit->root;
    int pooled = fsdpc_fill_choose(unit);
    if (unit->buffer || fsdpc_fill_suits_shard(unit) || root->n_reducing > 0)
        return NULL;
    if (pooled >= 0)
        return root->pool[pooled];
    return fsdpc_fill_lacks_own(unit) ? NULL : unit->own_buffer;
}

/* It refuses inside backward, where buffers fill, and, after a step was captured, when replays
 * write the buffers and the host does not see it. The other ranks may not run a rank-dependent
 * unit. */
fsdpc_status fsdpc_fill_lend(fsdpc_unit *unit, int param, fsdpc_dtype dtype, fsdpc_loan *loan,
                             void **data_out)
{
    fsdpc_root *root = unit->root;
    const fsdpc_place *place = &unit->layout->params[param];
    if (!root || root->model->in_backward || root->captures > 0 || unit->settings.rank_dependent ||
        place->group >= unit->n_trained || unit->groups[place->group].reduce_dtype != dtype)
        return FSDPC_OK;
    fsdpc_buffer *buffer = unused_buffer(unit);
    if (!buffer)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_buffer_idle_wait(buffer, unit->name));
    *loan = (fsdpc_loan){.device = unit->device,
                         .param = place->name,
                         .unit = unit->name,
                         .data = data_out,
                         .bytes = place->numel * fsdpc_dtype_bytes(dtype)};
    (void)fsdpc_loan_begin(&root->lender, fsdpc_fill_place(unit, buffer, param), loan);
    return FSDPC_OK;
}

static fsdpc_status zero_unfilled(fsdpc_unit *unit)
{
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    for (int i = 0; i < unit->layout->n_params; i++) {
        if (unit->filled[i])
            continue;
        const fsdpc_place *place = &unit->layout->params[i];
        const fsdpc_unit_group *group = &unit->groups[place->group];
        if (place->group >= unit->n_trained)
            continue;
        FSDPC_TRY(fsdpc_device_fill(unit->device, fsdpc_fill_place(unit, unit->buffer, i), 0,
                                    place->numel * fsdpc_dtype_bytes(group->reduce_dtype), main));
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_fill_close(fsdpc_unit *unit, fsdpc_buffer **out)
{
    fsdpc_root *root = unit->root;
    FSDPC_TRY(fsdpc_loan_move(&root->lender, unit->buffer->data, unit->buffer->bytes));
    if (unit->n_filled < unit->layout->n_params)
        FSDPC_TRY(zero_unfilled(unit));
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool_filling[i] != unit)
            continue;
        root->pool_filling[i] = NULL;
        root->pool_reducing[i] = unit;
        root->pool_turn[i] = ++root->turns;
    }
    for (int i = 0; i < unit->layout->n_params; i++) {
        if (unit->filled[i])
            unit->grads[i] = FSDPC_GRAD_NEW;
    }
    *out = unit->buffer;
    unit->buffer = NULL;
    return FSDPC_OK;
}

void fsdpc_fill_released(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool_reducing[i] == unit)
            root->pool_reducing[i] = NULL;
    }
}

void fsdpc_fill_drop(fsdpc_unit *unit)
{
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (unit->root->pool_filling[i] == unit)
            unit->root->pool_filling[i] = NULL;
    }
    unit->buffer = NULL;
    unit->keeps = false;
}

void fsdpc_fill_drop_failed(fsdpc_root *root)
{
    const fsdpc_unit *lost = NULL;
    for (int i = root->n_units - 1; i >= 0; i--) {
        if (root->units[i]->keeps)
            lost = root->units[i];
        fsdpc_fill_drop(root->units[i]);
    }
    if (lost)
        FSDPC_WARN(&root->comm->log,
                   "a backward failed, so the gradients that earlier micro-steps of unit '%s' had "
                   "accumulated without synchronisation are dropped on every rank: call "
                   "zero_grad() and begin the step again",
                   lost->name);
}

bool fsdpc_fill_creates_partial(const fsdpc_unit *unit, bool keep)
{
    return keep && has_partials(unit->root) && is_too_small(unit->own_partial, unit->grad_bytes);
}

fsdpc_status fsdpc_fill_partial(fsdpc_unit *unit, const fsdpc_buffer *filled, bool keep)
{
    fsdpc_root *root = unit->root;
    unit->partial = NULL;
    if (!has_partials(root))
        return FSDPC_OK;
    if (fsdpc_fill_creates_partial(unit, keep))
        FSDPC_TRY(replace(unit, root->replicate, unit->grad_bytes, &unit->own_partial));
    bool has_own = !is_too_small(unit->own_partial, unit->grad_bytes);
    unit->partial = has_own ? unit->own_partial : NULL;
    for (int i = 0; !unit->partial && i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool[i] == filled)
            unit->partial = root->pool_partial[i];
    }
    return fsdpc_buffer_idle_wait(unit->partial, unit->name);
}
