/* Limits how far the host may run ahead of the GPU, and checks for failures meanwhile.
 *
 * A host that only orders streams and never waits would not notice a dead peer. It would enqueue
 * more and more work after an operation that never ends. After about a thousand kernels, the
 * driver blocks the host, which then cannot check for dead peers, interrupts or the deadline. A
 * post therefore waits, with all those checks, while the group has AHEAD_MAX operations in flight.
 * The driver's queue must have room for the work that a program enqueues between that many
 * operations. If the oldest operation has been running for long, a post checks once whether it can
 * still end: whether the peers are alive and the deadline has not passed.
 */
#include "cuda/nccl_internal.h"

enum { AHEAD_MAX = 16, OLD_NS = 1000000000 };

static fsdpc_status look_after_oldest(fsdpc_comm_nccl *self)
{
    int64_t now = fsdpc_clock_ns();
    if (!self->in_flight || now - self->in_flight->posted_ns < OLD_NS)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    const fsdpc_nccl_op *oldest = self->in_flight;
    if (!oldest || now - oldest->posted_ns < OLD_NS)
        return FSDPC_OK;
    fsdpc_nap nap = {0};
    fsdpc_status status = self->base.ops->idle(&self->base, &nap, 1);
    self->base.ops->idle(&self->base, &nap, 0);
    if (status == FSDPC_OK && self->in_flight == oldest &&
        (double)(now - oldest->posted_ns) > self->base.timeout_s * 1e9)
        status = fsdpc_fail(FSDPC_ERR_TIMEOUT,
                            "rank %d: %s of '%s' (unit %d) has not ended %.3g s after it was "
                            "posted, and the deadline is %.3g s (FSDPC_TIMEOUT_S)",
                            self->base.world_rank, fsdpc_coll_name(oldest->coll.kind),
                            oldest->coll.what ? oldest->coll.what : "", oldest->coll.unit,
                            (double)(now - oldest->posted_ns) * 1e-9, self->base.timeout_s);
    return status == FSDPC_OK ? FSDPC_OK : fsdpc_comm_poison(&self->base, status);
}

typedef struct room {
    fsdpc_comm_nccl *group;
    const fsdpc_nccl_op *oldest;
} room;

static fsdpc_status poll_room(void *arg)
{
    const room *r = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(r->group));
    FSDPC_TRY(fsdpc_comm_health(&r->group->base));
    return r->group->in_flight == r->oldest ? FSDPC_IN_PROGRESS : FSDPC_OK;
}

/* Waits until the host is not too far ahead of the device. */
static fsdpc_status wait_for_room(fsdpc_comm_nccl *self)
{
    int ahead = 0;
    for (const fsdpc_nccl_op *op = self->in_flight; op; op = op->next)
        ahead++;
    if (ahead < AHEAD_MAX)
        return FSDPC_OK;
    room r = {self, self->in_flight};
    self->host_waits = true;
    fsdpc_status status = fsdpc_comm_wait_for(
        &self->base, poll_room, &r, fsdpc_coll_name(r.oldest->coll.kind), r.oldest->coll.what);
    self->host_waits = false;
    return status;
}

fsdpc_status fsdpc_nccl_stay_near(fsdpc_comm_nccl *self)
{
    FSDPC_TRY(look_after_oldest(self));
    return wait_for_room(self);
}
