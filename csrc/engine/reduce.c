/* Reductions have one or two stages.
 *
 *     no replicas      buffers --reduce-scatter--> gradient shard
 *     only replicas    buffers --all-reduce--> gradient shard (which covers the whole unit)
 *     both             buffers --reduce-scatter--> partial --all-reduce--> gradient shard
 *
 * A partial is in the wide dtype, neither scaled nor rounded. The two stages together therefore
 * form the tree over all ranks (if the shard group's size is a power of two), with a single
 * rounding. If the all-reduce is postponed, the sums stay in a partial, and the next reduce-scatter
 * adds to it.
 *
 * All ranks must post reductions in the same order, across all of their groups. A GPU runs the
 * operations of several communicators in post order, and two ranks with different orders would wait
 * for each other. A first stage completes at different times on different ranks. Second stages are
 * therefore posted at fixed points in the program: before the next reduction is posted, at the end
 * of backward, and before any wait for this reduction. At these points the rank waits for the first
 * stage; at other times, polling for completed reductions posts nothing.
 *
 * On one host with pooled buffers, that costs no time. A whole unit's backward runs before the next
 * reduction is posted. If a first stage is not complete by then, some peer is a whole unit behind.
 * The next unit's first gradient would wait for this reduction's buffer anyway.
 *
 * Between hosts, waiting that long would leave the network idle and delay two units' sums until
 * after the last unit. Between hosts, however, each group's messages reach their peers
 * independently of other groups. Polling for completed reductions therefore also posts second
 * stages, oldest first, so that the replica group sees the same order on every rank.
 *
 * If the communicator orders streams, the host does not wait, and each second stage follows its
 * first immediately on a separate stream. The main stream waits instead, when it needs the sum or
 * the buffer.
 *
 * If replicas sum matrices in low rank (low_rank.h), P is summed in the stage over replicas, and Q
 * in one more. It is posted as second stages are, so no younger reduction is posted before it.
 *
 * In deterministic mode, every micro-step is reduced and its sum is stored at the level chosen by
 * micro.h; no_sync then only hides the sum.
 */
#include "engine/reduce.h"

#include <string.h>

#include "base/crc32c.h"
#include "engine/acts.h"
#include "engine/codec_error.h"
#include "engine/fill.h"
#include "engine/grad_file.h"
#include "engine/grads.h"
#include "engine/low_rank.h"
#include "engine/micro.h"
#include "engine/order.h"

static bool communicates(const fsdpc_root *root)
{
    return root->ranks > 1;
}

static void trace(const fsdpc_unit *unit, fsdpc_trace_kind kind, size_t bytes)
{
    if (communicates(unit->root))
        fsdpc_root_trace(unit, kind, bytes, true);
}

/* Gets memory for the gradient shards of a unit that is stepped inside backward. */
static fsdpc_status borrow(fsdpc_unit *unit)
{
    for (fsdpc_unit *busy = unit; unit->backward_steps && busy;) {
        FSDPC_TRY(unit->backward_steps->lend(unit->backward_steps, unit, &busy));
        if (busy)
            FSDPC_TRY(fsdpc_reduce_wait(busy));
    }
    return FSDPC_OK;
}

/* Prepares the destination of the final sums. */
static fsdpc_status begin_final(fsdpc_unit *unit)
{
    FSDPC_TRY(borrow(unit));
    if (unit->settings.deterministic)
        return fsdpc_micro_begin(unit);
    return fsdpc_grad_file_open(unit, unit->grad_live);
}

/* Sets the fields that make an operation produce final sums. */
static void make_final(const fsdpc_unit *unit, const fsdpc_unit_group *group, fsdpc_coll *op)
{
    op->shard_dtype = group->grad_dtype;
    if (unit->settings.deterministic) {
        fsdpc_micro_target(unit, group, op);
        return;
    }
    op->shard = group->grad;
    op->scale = 1.0 / unit->settings.divide_factor;
    op->round_dtype = group->reduce_dtype;
    op->accumulate = unit->grad_live;
}

static void make_partial(const fsdpc_unit *unit, const fsdpc_unit_group *group, fsdpc_coll *op)
{
    op->shard = unit->partial->data + group->grad_offset;
    op->shard_dtype = op->round_dtype = group->grad_dtype;
    op->scale = 1;
    op->accumulate = unit->partial_live;
}

/* requires_grad may change between steps, but in the same way on all ranks; a rank that does not
 * run a unit need not have seen the change. */
static uint32_t hash_trainable(const fsdpc_unit *unit)
{
    if (unit->settings.rank_dependent)
        return 0;
    return fsdpc_crc32c(0, unit->trainable,
                        (size_t)unit->layout->n_params * sizeof *unit->trainable);
}

static fsdpc_status post_first(fsdpc_unit *unit, fsdpc_buffer *buffer)
{
    fsdpc_root *root = unit->root;
    bool replicas_alone = root->reduce_comm == root->replicate;
    /* Replicas have separate epochs, since one may run an evaluation by itself, but their steps
     * must agree. */
    uint64_t epoch = replicas_alone ? root->steps : root->param_buffer->epoch;
    if (!unit->partial)
        FSDPC_TRY(begin_final(unit));
    bool in_low_rank = replicas_alone && fsdpc_low_rank_begin(unit);
    size_t bytes = 0;
    int n_posted = 0;
    uint32_t trains = hash_trainable(unit);
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        const fsdpc_codec_error *error;
        FSDPC_TRY(fsdpc_reduce_error(unit, group, FSDPC_STAGE_FIRST, &error));
        fsdpc_coll op = {.kind = replicas_alone ? FSDPC_COLL_REDUCE_ALL : FSDPC_COLL_REDUCE_SCATTER,
                         .unit = unit->id,
                         .codec = fsdpc_codec_now(unit, FSDPC_CODED_REDUCE),
                         .error = error,
                         .what = unit->name,
                         .dtype = group->reduce_dtype,
                         .epoch = epoch,
                         .stream = root->reduce_stream,
                         .slices = group->plan->bands,
                         .n_slices = group->plan->n_bands,
                         .buffer = buffer,
                         .offset = group->reduce_offset,
                         .trains = trains,
                         .same_filling = n_posted > 0,
                         .tree = unit->settings.deterministic};
        if (unit->partial)
            make_partial(unit, group, &op);
        else
            make_final(unit, group, &op);
        fsdpc_low_rank_keep_exact(unit, g, &op.slices, &op.n_slices);
        bytes += in_low_rank
                     ? fsdpc_coll_bytes(&op, 1)
                     : group->plan->unsharded_numel * fsdpc_dtype_bytes(group->reduce_dtype);
        if (op.n_slices == 0)
            continue;
        FSDPC_TRY(fsdpc_comm_post(root->reduce_comm, &op, &group->reduce));
        n_posted++;
    }
    if (in_low_rank) {
        FSDPC_TRY(fsdpc_low_rank_post(unit, buffer));
        bytes += fsdpc_low_rank_first_bytes(unit);
    }
    trace(unit, FSDPC_TRACE_REDUCE, bytes);
    if (replicas_alone)
        trace(unit, FSDPC_TRACE_ALL_REDUCE, bytes);
    return FSDPC_OK;
}

static fsdpc_stream *second_stream(const fsdpc_root *root)
{
    return root->replicate_stream ? root->replicate_stream : root->reduce_stream;
}

static fsdpc_status post_second(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    FSDPC_TRY(begin_final(unit));
    unit->reduction = FSDPC_REDUCTION_REPLICATE;
    unit->partial_live = false;
    bool in_low_rank = fsdpc_low_rank_begin(unit);
    size_t bytes = 0;
    int n_posted = 0;
    uint32_t trains = hash_trainable(unit);
    for (int g = 0; g < unit->n_trained; g++) {
        fsdpc_unit_group *group = &unit->groups[g];
        const fsdpc_codec_error *error;
        FSDPC_TRY(fsdpc_reduce_error(unit, group, FSDPC_STAGE_SECOND, &error));
        fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_ALL,
                         .unit = unit->id,
                         .codec = fsdpc_codec_now(unit, FSDPC_CODED_REDUCE),
                         .error = error,
                         .what = unit->name,
                         .dtype = group->grad_dtype,
                         .epoch = root->steps,
                         .stream = second_stream(root),
                         .slices = &group->whole,
                         .n_slices = 1,
                         .buffer = unit->partial,
                         .offset = group->grad_offset,
                         .trains = trains,
                         .same_filling = n_posted > 0,
                         .tree = unit->settings.deterministic};
        make_final(unit, group, &op);
        fsdpc_low_rank_keep_exact(unit, g, &op.slices, &op.n_slices);
        bytes += fsdpc_coll_bytes(&op, 1);
        if (op.n_slices == 0)
            continue;
        FSDPC_TRY(fsdpc_comm_post(root->replicate, &op, &group->reduce));
        n_posted++;
    }
    if (in_low_rank) {
        FSDPC_TRY(fsdpc_low_rank_post(unit, unit->partial));
        bytes += fsdpc_low_rank_first_bytes(unit);
    }
    trace(unit, FSDPC_TRACE_ALL_REDUCE, in_low_rank ? bytes : unit->grad_bytes);
    return FSDPC_OK;
}

static fsdpc_status post_in_low_rank(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_low_rank_post_second(unit));
    trace(unit, FSDPC_TRACE_ALL_REDUCE, fsdpc_low_rank_second_bytes(unit));
    return FSDPC_OK;
}

/* Finishes a reduction whose last stage is complete. */
static fsdpc_status finish(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    int kept = 0;
    for (int r = 0; r < root->n_reducing; r++) {
        if (root->reducing[r] != unit)
            root->reducing[kept++] = root->reducing[r];
    }
    root->n_reducing = kept;
    fsdpc_fill_released(unit);
    bool was_partial = unit->partial && unit->reduction == FSDPC_REDUCTION_SHARD;
    unit->reduction = FSDPC_REDUCTION_NONE;
    FSDPC_TRY(fsdpc_low_rank_finish(unit));
    trace(unit, FSDPC_TRACE_REDUCE_DONE, 0);
    if (unit->forget)
        return FSDPC_OK;
    if (was_partial) {
        unit->partial_live = true;
        return FSDPC_OK;
    }
    unit->grad_live |= !unit->hidden;
    if (unit->settings.deterministic)
        return fsdpc_micro_added(unit);
    fsdpc_grad_file_seal(unit);
    return unit->backward_steps && unit->grad_live
               ? unit->backward_steps->step(unit->backward_steps, unit)
               : FSDPC_OK;
}

/* Returns whether the reduction will post another operation when those in flight are complete. */
static bool awaits_next(const fsdpc_unit *unit)
{
    return (unit->reduction == FSDPC_REDUCTION_SHARD && unit->partial && !unit->postpone) ||
           fsdpc_low_rank_awaits_second(unit);
}

static fsdpc_status post_next(fsdpc_unit *unit)
{
    return fsdpc_low_rank_awaits_second(unit) ? post_in_low_rank(unit) : post_second(unit);
}

/* Waits for what was posted, then posts the next stage or finishes the reduction. */
static fsdpc_status wait_stage(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    fsdpc_stream *main = fsdpc_device_main(unit->device);
    fsdpc_stream *next = awaits_next(unit) ? second_stream(root) : main;
    for (int g = 0; g < unit->n_trained; g++)
        FSDPC_TRY(fsdpc_comm_order(&unit->groups[g].reduce, next));
    FSDPC_TRY(fsdpc_comm_wait(&unit->low_rank_work));
    return awaits_next(unit) ? post_next(unit) : finish(unit);
}

/* Posts the outstanding stages in the order of the first stages, up to those of `last`, or all of
 * them if `last` is NULL. */
static fsdpc_status post_seconds(const fsdpc_root *root, const fsdpc_unit *last)
{
    for (int r = 0; r < root->n_reducing; r++) {
        fsdpc_unit *unit = root->reducing[r];
        while (awaits_next(unit))
            FSDPC_TRY(wait_stage(unit));
        if (unit == last)
            break;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_reduce_post(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    if (!unit->buffer)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_unit_advance(unit)); /* a pending step may not have read the memory that sums go
                                          * to */
    FSDPC_TRY(fsdpc_reduce_wait(unit));  /* one reduction of a unit at a time */
    if (unit->grad_live && fsdpc_unit_is_scaled(unit))
        FSDPC_TRY(fsdpc_unit_apply_scale(unit)); /* the new gradients are not clipped yet */
    FSDPC_TRY(post_seconds(root, NULL));
    unit->fresh |= !unit->grad_live && !unit->partial_live && unit->n_sums == 0;
    unit->postpone = !unit->settings.requires_all_reduce && !unit->settings.deterministic;
    bool keep = unit->postpone || unit->partial_live;
    if (fsdpc_fill_creates_partial(unit, keep))
        FSDPC_TRY(fsdpc_reduce_wait_all(root));
    FSDPC_TRY(fsdpc_fill_partial(unit, unit->buffer, keep));
    fsdpc_buffer *buffer;
    FSDPC_TRY(fsdpc_fill_close(unit, &buffer));
    unit->reduction = FSDPC_REDUCTION_SHARD; /* even if a post fails: others may be in flight */
    unit->hidden =
        !unit->settings.requires_sync || (root->replicate && !unit->settings.requires_all_reduce);
    unit->forget = false;
    root->reducing[root->n_reducing++] = unit;
    FSDPC_TRY(fsdpc_order_filled(root));
    return post_first(unit, buffer);
}

fsdpc_status fsdpc_reduce_wait(fsdpc_unit *unit)
{
    if (unit->reduction == FSDPC_REDUCTION_NONE)
        return FSDPC_OK;
    FSDPC_TRY(post_seconds(unit->root, unit));
    while (unit->reduction != FSDPC_REDUCTION_NONE)
        FSDPC_TRY(wait_stage(unit));
    return FSDPC_OK;
}

fsdpc_status fsdpc_reduce_wait_all(fsdpc_root *root)
{
    FSDPC_TRY(post_seconds(root, NULL));
    while (root->n_reducing > 0)
        FSDPC_TRY(fsdpc_reduce_wait(root->reducing[0]));
    return FSDPC_OK;
}

fsdpc_status fsdpc_reduce_open(fsdpc_unit *unit)
{
    fsdpc_root *root = unit->root;
    if (unit->buffer)
        return FSDPC_OK;
    if (unit->grads_away)
        return fsdpc_fail(FSDPC_ERR_STATE, "gradients of unit '%s' have no memory", unit->name);
    FSDPC_TRY(fsdpc_reduce_wait(unit)); /* for an earlier use of this unit in the same backward */
    if (unit->backward_steps)
        FSDPC_TRY(unit->backward_steps->open(unit->backward_steps, unit));
    if (fsdpc_fill_suits_shard(unit)) {
        FSDPC_TRY(fsdpc_unit_advance(unit)); /* a pending step may not have read it yet */
        FSDPC_TRY(borrow(unit));
        fsdpc_fill_take_shard(unit);
        return FSDPC_OK;
    }
    int pooled = fsdpc_fill_choose(unit);
    if (pooled >= 0 && root->pool_reducing[pooled])
        FSDPC_TRY(fsdpc_reduce_wait(root->pool_reducing[pooled]));
    else if (pooled < 0 && fsdpc_fill_lacks_own(unit))
        FSDPC_TRY(fsdpc_reduce_wait_all(root));
    return fsdpc_fill_take(unit, pooled);
}

fsdpc_status fsdpc_reduce_post_rest(fsdpc_root *root)
{
    return post_seconds(root, NULL);
}

static fsdpc_status test_stage(fsdpc_unit *unit)
{
    fsdpc_status all = fsdpc_comm_test(&unit->low_rank_work);
    for (int g = 0; all >= 0 && g < unit->n_trained; g++) {
        fsdpc_status status = fsdpc_comm_test(&unit->groups[g].reduce);
        if (status < 0)
            return status;
        if (status == FSDPC_IN_PROGRESS)
            all = status;
    }
    return all;
}

static bool crosses_hosts(const fsdpc_comm *comm)
{
    return comm && comm->host_size < comm->size;
}

/* Also tests first stages that will have a second stage, because testing lets them make
 * progress. */
fsdpc_status fsdpc_reduce_progress(fsdpc_root *root)
{
    if (fsdpc_comm_orders(root->reduce_comm)) /* the device orders first stages, so no wait is
                                               * needed */
        return post_seconds(root, NULL);
    bool in_turn = crosses_hosts(root->replicate); /* no older one still waits for its second
                                                    * stage */
    for (int r = 0; r < root->n_reducing;) {
        fsdpc_unit *unit = root->reducing[r];
        fsdpc_status status = test_stage(unit);
        if (status < 0)
            return status;
        if (status == FSDPC_OK && !awaits_next(unit))
            FSDPC_TRY(finish(unit));
        else if (status == FSDPC_OK && in_turn)
            FSDPC_TRY(post_next(unit));
        in_turn &= !awaits_next(unit);
        if (r < root->n_reducing && root->reducing[r] == unit)
            r++;
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_reduce_carry_on(fsdpc_root *root)
{
    if (root->n_reducing == 0 || !(crosses_hosts(root->comm) || crosses_hosts(root->replicate)))
        return FSDPC_OK;
    return fsdpc_reduce_progress(root);
}
