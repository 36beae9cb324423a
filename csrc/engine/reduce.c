/* Reduce buffers and reductions.
 *
 * Gradients are written by kernels straight into an open buffer, in the unit's reduce dtype, each
 * parameter at its place of the full, so that posting a reduction is one call over the bands.  What
 * no kernel wrote (unused or frozen parameters) is zeroed first: the peers read all of it.  Padding
 * is whatever it was; it reduces into padding of the shard, which nobody reads.
 *
 * The pool.  A unit takes the pooled buffer that nobody fills and that was posted longest ago, and
 * waits for its reduction; a wait for a buffer is therefore always a wait for a posted reduction,
 * never for another unit's half-filled one.  When both are half filled the unit gets its own, for
 * good.  Ranks must choose alike, since peers read each other's buffers by their names, so the
 * choice hangs on the order of opens and posts, which is the program's, and never on which
 * reduction happens to be complete.  For the same reason buffer_create, which is collective, is
 * called by all of them together.
 */
#include "engine/reduce.h"

#include <string.h>

#include "base/size.h"

static fsdpc_status create_own_buffer(fsdpc_unit *unit)
{
    return fsdpc_buffer_create(unit->root->comm, unit->reduce_bytes, &unit->own_buffer);
}

/* The slot that nobody fills and that was posted longest ago; -1: all are half filled. */
static int choose_slot(const fsdpc_root *root)
{
    int best = -1;
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool[i] && !root->pool_filling[i] &&
            (best < 0 || root->pool_turn[i] < root->pool_turn[best]))
            best = i;
    }
    return best;
}

fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit)
{
    if (unit->buffer)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_reduce_wait(unit)); /* an earlier use of this unit in the same backward */
    fsdpc_root *root = unit->root;
    if (!unit->own_buffer) {
        int slot = choose_slot(root);
        if (slot >= 0) {
            if (root->pool_reducing[slot])
                FSDPC_TRY(fsdpc_reduce_wait(root->pool_reducing[slot]));
            FSDPC_TRY(fsdpc_buffer_idle_wait(root->pool[slot], unit->name));
            root->pool_filling[slot] = unit;
            unit->buffer = root->pool[slot];
        } else {
            FSDPC_TRY(create_own_buffer(unit));
        }
    }
    if (unit->own_buffer) {
        FSDPC_TRY(fsdpc_buffer_idle_wait(unit->own_buffer, unit->name));
        unit->buffer = unit->own_buffer;
    }
    memset(unit->filled, 0, (size_t)unit->layout->n_params * sizeof *unit->filled);
    unit->n_filled = 0;
    return FSDPC_OK;
}

/* The open buffer is filled: from here on it belongs to the reduction. */
static void close_buffer(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool_filling[i] != unit)
            continue;
        root->pool_filling[i] = NULL;
        root->pool_reducing[i] = unit;
        root->pool_turn[i] = ++root->turns;
    }
    unit->buffer = NULL;
}

static void zero_unfilled(fsdpc_unit *unit)
{
    for (int i = 0; i < unit->layout->n_params; i++) {
        if (unit->filled[i])
            continue;
        const fsdpc_place *place = &unit->layout->params[i];
        const fsdpc_unit_group *group = &unit->groups[place->group];
        size_t element = fsdpc_dtype_bytes(group->reduce_dtype);
        memset(unit->buffer->data + group->reduce_offset + place->full_offset * element, 0,
               place->numel * element);
    }
}

fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit)
{
    if (!unit->buffer)
        return FSDPC_OK;
    if (unit->n_filled < unit->layout->n_params)
        zero_unfilled(unit);
    if (unit->grad_live)
        FSDPC_TRY(fsdpc_unit_apply_scale(unit)); /* the new gradients are not clipped yet */
    fsdpc_root *root = unit->root;
    fsdpc_buffer *buffer = unit->buffer;
    size_t bytes = 0;
    close_buffer(unit);
    unit->reducing = true; /* also if a post fails: others may be in flight */
    unit->forget = false;
    root->reducing[root->n_reducing++] = unit;
    for (int g = 0; g < unit->layout->n_groups; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                         .unit = unit->id,
                         .what = unit->name,
                         .dtype = group->reduce_dtype,
                         .epoch = root->wire->epoch,
                         .stream = root->reduce_stream,
                         .slices = group->plan->bands,
                         .n_slices = group->plan->n_bands,
                         .buffer = buffer,
                         .offset = group->reduce_offset,
                         .shard = group->grad,
                         .shard_dtype = group->grad_dtype,
                         .scale = (float)(1.0 / unit->divide_factor),
                         .accumulate = unit->grad_live};
        FSDPC_TRY(fsdpc_comm_post(root->comm, &op, &group->reduce));
        bytes += group->plan->full_numel * fsdpc_dtype_bytes(group->reduce_dtype);
    }
    if (root->comm->size > 1)
        fsdpc_trace_add(unit->trace, FSDPC_TRACE_REDUCE, unit->id, bytes, root->wire->epoch, 1);
    return FSDPC_OK;
}

static void finish(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    int kept = 0;
    for (int r = 0; r < root->n_reducing; r++) {
        if (root->reducing[r] != unit)
            root->reducing[kept++] = root->reducing[r];
    }
    root->n_reducing = kept;
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (root->pool_reducing[i] == unit)
            root->pool_reducing[i] = NULL;
    }
    unit->reducing = false;
    unit->grad_live = !unit->forget;
    if (unit->root->comm->size > 1)
        fsdpc_trace_add(unit->trace, FSDPC_TRACE_REDUCE_DONE, unit->id, 0, unit->root->wire->epoch,
                        1);
}

fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit)
{
    if (!unit->reducing)
        return FSDPC_OK;
    for (int g = 0; g < unit->layout->n_groups; g++)
        FSDPC_TRY(fsdpc_comm_wait(&unit->groups[g].reduce));
    finish(unit);
    return FSDPC_OK;
}

fsdpc_status fsdpc_reduce_progress(fsdpc_root *root)
{
    for (int r = 0; r < root->n_reducing;) {
        fsdpc_unit *unit = root->reducing[r];
        bool done = true;
        for (int g = 0; g < unit->layout->n_groups; g++) {
            fsdpc_status status = fsdpc_comm_test(&unit->groups[g].reduce);
            if (status < 0)
                return status;
            done &= status == FSDPC_OK;
        }
        if (done)
            finish(unit);
        else
            r++;
    }
    return FSDPC_OK;
}

void fsdpc_reduce_drop(fsdpc_unit *unit)
{
    for (int i = 0; i < FSDPC_POOLED_BUFFERS; i++) {
        if (unit->root->pool_filling[i] == unit)
            unit->root->pool_filling[i] = NULL;
    }
    unit->buffer = NULL;
}
