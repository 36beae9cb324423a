/* Runs an operation across several hosts, from posting to completion.
 *
 * Every operation is posted in program order on the host's communicator, where the host's ranks
 * compare it; data moves between ranks with the same local rank.
 *
 *     GATHER      own slices go to the other hosts, theirs into the parameter buffer; done when all
 *                 ranks of the host have received (hosts_gather.c)
 *     reductions  hosts_reduce.c
 *     values      hosts_values.c
 *     agree_only  headers cross, and nothing else
 *
 * Order. All ranks of a communicator post in the same order. An operation's first phase is posted
 * together with the operation. Later phases wait for messages, which may arrive in any order.
 * Second phases therefore use a separate communicator and are posted on it in the order of their
 * operations.
 */
#include "comm/hosts_internal.h"

#include <stdlib.h>
#include <string.h>

enum { POSTED, CROSSING, SPREADING, SHOWING }; /* phases */

static bool is_values(const fsdpc_coll *coll)
{
    return coll->kind != FSDPC_COLL_GATHER && !fsdpc_coll_reduces(coll->kind) && !coll->agree_only;
}

/* ---- Steps; FSDPC_IN_PROGRESS: not yet ---- */

static fsdpc_status post_meeting(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    fsdpc_coll meeting = {.kind = FSDPC_COLL_BARRIER, .unit = coll->unit, .what = coll->what};
    return fsdpc_comm_post(self->later, &meeting, &op->later);
}

static fsdpc_status show(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    if (op->work->op.kind == FSDPC_COLL_REDUCE_ALL)
        return fsdpc_hosts_share_sums(self, op);
    FSDPC_TRY(fsdpc_hosts_place_rows(self, op));
    return post_meeting(self, op);
}

static fsdpc_status step(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, bool has_turn)
{
    FSDPC_TRY(fsdpc_comm_test(&op->host));
    if (!op->crosses)
        return FSDPC_OK;
    if (op->work->op.agree_only)
        return fsdpc_hosts_crossed(self, op);
    if (is_values(&op->work->op))
        return has_turn ? fsdpc_hosts_values_step(self, op) : FSDPC_IN_PROGRESS;
    bool reduces = fsdpc_coll_reduces(op->work->op.kind);
    if (op->phase == POSTED) {
        if (reduces)
            FSDPC_TRY(fsdpc_hosts_cross_sums(self, op));
        op->phase = CROSSING;
    }
    if (op->phase == CROSSING) {
        FSDPC_TRY(fsdpc_hosts_crossed(self, op));
        if (reduces)
            FSDPC_TRY(fsdpc_hosts_spread_sums(self, op));
        op->phase = SPREADING;
    }
    if (op->phase == SPREADING) {
        FSDPC_TRY(fsdpc_hosts_crossed(self, op));
        if (op->needs_turn && !has_turn)
            return FSDPC_IN_PROGRESS;
        if (op->needs_turn)
            FSDPC_TRY(show(self, op));
        op->phase = SHOWING;
    }
    FSDPC_TRY(fsdpc_comm_test(&op->later));
    return reduces ? fsdpc_hosts_finish_sums(self, op) : FSDPC_OK;
}

/* ---- Post and test ---- */

static fsdpc_status post_on_host(fsdpc_hosts_comm *self, fsdpc_hosts_op *op)
{
    const fsdpc_coll *coll = &op->work->op;
    if (op->crosses && fsdpc_coll_reduces(coll->kind) && !coll->agree_only)
        return fsdpc_hosts_post_sums(self, op);
    fsdpc_coll agree = *coll;
    agree.agree_only = true;
    return fsdpc_comm_post(self->host, &agree, &op->host);
}

fsdpc_status fsdpc_hosts_post(fsdpc_work *work)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(work->comm);
    const fsdpc_coll *coll = &work->op;
    fsdpc_hosts_op *op, **end = &self->pending;
    if (coll->kind == FSDPC_COLL_REPLAY && !coll->agree_only)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "captured steps over several hosts");
    bool crosses = true, moves = !coll->agree_only;
    if (moves && coll->kind == FSDPC_COLL_GATHER)
        FSDPC_TRY(fsdpc_hosts_needs_rows(coll, &crosses));
    bool sums = moves && fsdpc_coll_reduces(coll->kind);
    FSDPC_TRY(fsdpc_hosts_op_take(
        self, sums ? &((fsdpc_hosts_buffer *)coll->buffer)->spare : &self->spare, &op));
    op->next = NULL;
    op->work = work;
    op->sequence = work->sequence = self->posted++;
    op->phase = POSTED;
    op->n_ops = 0;
    op->compared = false;
    op->done_numel = 0;
    op->crosses = crosses;
    op->needs_turn = crosses && moves && coll->kind != FSDPC_COLL_REDUCE_SCATTER;
    fsdpc_status status = post_on_host(self, op);
    if (status == FSDPC_OK && crosses && !is_values(coll))
        status = fsdpc_hosts_begin(self, op);
    if (status == FSDPC_OK && crosses && moves && coll->kind == FSDPC_COLL_GATHER)
        status = fsdpc_hosts_cross_rows(self, op);
    if (status != FSDPC_OK) {
        fsdpc_hosts_op_free(self, op); /* its posted work ends with the communicator */
        return fsdpc_comm_poison(&self->base, status);
    }
    while (*end)
        end = &(*end)->next;
    *end = op;
    work->impl = op;
    atomic_store_explicit(&work->state, 1, memory_order_relaxed);
    return FSDPC_OK;
}

static void end_op(fsdpc_hosts_comm *self, fsdpc_hosts_op *op, fsdpc_status status)
{
    bool coded = op->work->op.kind == FSDPC_COLL_GATHER && fsdpc_hosts_is_coded(&op->work->op);
    if (coded && status == FSDPC_OK) { /* otherwise, a transport may still use the memory */
        fsdpc_hosts_staging_free(self, &op->here);
        fsdpc_hosts_staging_free(self, &op->there);
    }
    op->work->status = status;
    atomic_store_explicit(&op->work->state, 0, memory_order_relaxed);
    op->work = NULL;
    fsdpc_hosts_op_return(op);
}

void fsdpc_hosts_drop(fsdpc_hosts_comm *self)
{
    for (fsdpc_hosts_op *op; (op = self->pending);) {
        self->pending = op->next;
        end_op(self, op, FSDPC_ERR_POISONED);
    }
}

static void break_off(fsdpc_hosts_comm *self, fsdpc_status status)
{
    self->broke = status;
    fsdpc_comm_poison(&self->base, status); /* drops operations in flight */
}

static void carry_on(fsdpc_hosts_comm *self)
{
    bool turn_taken = false;
    fsdpc_status status = fsdpc_transport_health(self->transport);
    if (status != FSDPC_OK) {
        break_off(self, status);
        return;
    }
    for (fsdpc_hosts_op **at = &self->pending, *op; (op = *at);) {
        status = step(self, op, !turn_taken);
        if (status < 0) {
            *at = op->next;
            end_op(self, op, status);
            break_off(self, status);
            return;
        }
        if (status == FSDPC_IN_PROGRESS) {
            turn_taken |= op->needs_turn;
            at = &op->next;
            continue;
        }
        *at = op->next;
        end_op(self, op, FSDPC_OK);
    }
}

void fsdpc_hosts_carry_on(void *arg)
{
    const fsdpc_hosts_world *world = arg;
    if (world->transport->ops->progress)
        world->transport->ops->progress(world->transport);
    for (fsdpc_hosts_comm *group = world->groups; group; group = group->next_group) {
        if (!group->base.poison[0] && !group->base.apart)
            carry_on(group);
    }
}

fsdpc_status fsdpc_hosts_progress(fsdpc_hosts_comm *self)
{
    if (!self->base.apart)
        fsdpc_hosts_carry_on(self->world);
    else if (!self->base.poison[0])
        carry_on(self);
    fsdpc_status status = self->broke;
    self->broke = FSDPC_OK;
    return status != FSDPC_OK ? fsdpc_fail(status, "%s", self->base.poison)
                              : fsdpc_comm_health(&self->base);
}

fsdpc_status fsdpc_hosts_test(fsdpc_work *work)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(work->comm);
    fsdpc_status status = fsdpc_hosts_progress(self);
    if (atomic_load_explicit(&work->state, memory_order_relaxed) == 0)
        return work->status;
    return status < 0 ? status : FSDPC_IN_PROGRESS;
}
