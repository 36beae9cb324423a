/* Handles failures and the collective creation of objects for the shm files.
 *
 * A failure is reported in the control page's poison message; the first failure wins. Peers find it
 * at their next call or poll. To detect deaths, waits periodically check the life page, which takes
 * about 20 ns per peer.
 *
 * Creating an object collectively takes three steps: a barrier, passing the memory, and agreeing
 * that all ranks succeeded. The barrier's fingerprint includes the object and its size, so a
 * disagreement is detected at once. If one rank fails, every rank gets its error and the
 * communicator stays usable.
 */
#include "comm/shm_peers.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/coll_math.h"
#include "comm/fork_guard.h"

/* ---- Failures ---- */

void fsdpc_shm_pending_drop(fsdpc_shm_comm *self, fsdpc_status status)
{
    fsdpc_work *next;
    for (fsdpc_work *work = self->pending; work; work = next) {
        next = work->impl;
        work->impl = NULL;
        work->status = status;
        atomic_store_explicit(&work->state, 0, memory_order_relaxed);
    }
    self->pending = NULL;
}

/* Poisons this rank's other groups, where peers may be waiting, because a failure in one group ends
 * the run. */
static void spread(const fsdpc_shm_comm *self, int rank, fsdpc_status status, const char *text)
{
    for (fsdpc_shm_comm *group = self->world->groups; group; group = group->next_group)
        fsdpc_shm_poison_set(group->control, rank, status, text);
    fsdpc_shm_ring_bell(self->bell);
}

/* Sets the error for a poison message and names the rank that wrote it. */
static fsdpc_status poison_error(int rank, fsdpc_status status, const char *text)
{
    if (status != FSDPC_ERR_MISMATCH && status != FSDPC_ERR_PEER)
        status = FSDPC_ERR_POISONED;
    return rank < 0 ? fsdpc_fail(status, "%s", text)
                    : fsdpc_fail(status, "rank %d: %s", rank, text);
}

fsdpc_status fsdpc_shm_adopt_poison(fsdpc_shm_comm *self)
{
    int rank;
    fsdpc_status status;
    char text[sizeof self->base.poison];
    if (!fsdpc_shm_poison_get(self->control, &rank, &status, text, sizeof text))
        return FSDPC_OK;
    spread(self, rank, status, text);
    status = poison_error(rank, status, text);
    fsdpc_comm_abort_local(&self->base, status, fsdpc_last_error());
    fsdpc_shm_pending_drop(self, status);
    return status;
}

fsdpc_status fsdpc_shm_health(fsdpc_shm_comm *self)
{
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    if (__builtin_expect(self->world->fork_count != fsdpc_fork_count(), 0))
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "this process is a fork of rank %d, not the rank; communicate from the "
                          "rank itself",
                          self->base.world_rank);
    return __builtin_expect(fsdpc_shm_poisoned(self->control), 0) ? fsdpc_shm_adopt_poison(self)
                                                                  : FSDPC_OK;
}

fsdpc_status fsdpc_shm_tell(fsdpc_shm_comm *self, fsdpc_status status)
{
    fsdpc_shm_poison_set(self->control, self->base.world_rank, status, fsdpc_last_error());
    fsdpc_shm_ring_bell(self->bell);
    return status;
}

fsdpc_status fsdpc_shm_fail(fsdpc_shm_comm *self, fsdpc_status status)
{
    spread(self, self->base.world_rank, status, fsdpc_last_error());
    return fsdpc_comm_poison(&self->base, fsdpc_shm_tell(self, status));
}

void fsdpc_shm_abort(fsdpc_comm *comm, fsdpc_status status, const char *reason)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    fsdpc_comm_abort_local(comm, status, reason);
    if (self->world->fork_count == fsdpc_fork_count())
        spread(self, comm->world_rank, status, comm->poison);
    fsdpc_shm_pending_drop(self, FSDPC_ERR_POISONED);
}

/* The watch informs only the first group, and a peer may have failed in another, so a rank that waits
 * in one group checks all of its groups. */
static fsdpc_status adopt_from_groups(fsdpc_shm_comm *self)
{
    int rank;
    fsdpc_status status;
    char text[sizeof self->base.poison];
    for (const fsdpc_shm_comm *group = self->world->groups; group; group = group->next_group)
        if (fsdpc_shm_poison_get(group->control, &rank, &status, text, sizeof text)) {
            spread(self, rank, status, text);
            return fsdpc_shm_adopt_poison(self);
        }
    return FSDPC_OK;
}

static fsdpc_status peer_is_gone(fsdpc_shm_comm *self, int member, bool left)
{
    FSDPC_TRY(adopt_from_groups(self)); /* the rank sent a reason before it ended */
    char where[192], ending[64], host[66] = "";
    fsdpc_shm_world_where(self->world, member, where, sizeof where);
    fsdpc_shm_world_ending(self->world, member, ending, sizeof ending);
    if (self->base.carry) { /* there are other hosts, whose ranks will read this */
        host[0] = ',';
        host[1] = ' ';
        gethostname(host + 2, sizeof host - 3);
    }
    return fsdpc_fail(
        FSDPC_ERR_PEER, "rank %d (pid %d%s) %s%s while rank %d waits for %s%s%s%s",
        self->world->names[member], fsdpc_shm_world_pid(self->world, member), host,
        left ? "left (it shut its communicator down)" : "died", left ? "" : ending,
        self->base.world_rank, left ? "it" : "others", where[0] ? "; it was last seen " : "", where,
        left ? "; do all ranks run the same number of steps?" : "; see that rank's own output");
}

fsdpc_status fsdpc_shm_look(fsdpc_comm *comm, char *note, size_t bytes)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    fsdpc_shm_world *world = self->world;
    fsdpc_status status;
    int rank, dead = 0;
    char text[8 * FSDPC_SHM_POISON_WORDS + 1], ending[64];
    while (dead < world->size && !fsdpc_shm_world_dead(world, dead))
        dead++;
    if (fsdpc_shm_poison_get(self->control, &rank, &status, text, sizeof text))
        return poison_error(rank, status, text);
    if (dead < world->size) {
        fsdpc_shm_world_where(world, dead, text, sizeof text);
        fsdpc_shm_world_ending(world, dead, ending, sizeof ending);
        return fsdpc_fail(FSDPC_ERR_PEER, "rank %d (pid %d) died%s%s%s; see that rank's own output",
                          world->names[dead], fsdpc_shm_world_pid(world, dead), ending,
                          text[0] ? "; it was last seen " : "", text);
    }
    for (int r = 0; r < world->size && !note[0]; r++)
        if (fsdpc_shm_world_stopped(world, r))
            snprintf(note, bytes, "rank %d (pid %d) is stopped", world->names[r],
                     fsdpc_shm_world_pid(world, r));
    return FSDPC_OK;
}

int fsdpc_shm_end_fd(fsdpc_comm *comm, int rank)
{
    const fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    return self->world->pidfds[self->members[rank]];
}

void fsdpc_shm_be_told(fsdpc_comm *comm, fsdpc_status status, const char *text)
{
    fsdpc_shm_poison_set(fsdpc_shm_of(comm)->control, -1, status, text);
}

bool fsdpc_shm_is_late(const fsdpc_shm_comm *self, int p)
{
    const fsdpc_shm_awaited *awaited = &self->awaited;
    const fsdpc_shm_slot *slot = &self->control->slots[p];
    const fsdpc_shm_param_buffer *param_buffer = awaited->object;
    const fsdpc_shm_buffer *buffer = awaited->object;
    switch (awaited->kind) {
    case FSDPC_SHM_AWAITS_POSTED:
        return atomic_load(&slot->posted) < awaited->target;
    case FSDPC_SHM_AWAITS_STEP:
        return atomic_load(&slot->step) < awaited->target;
    case FSDPC_SHM_AWAITS_ARRIVED:
        return atomic_load(&param_buffer->words[p].arrived) < awaited->target;
    case FSDPC_SHM_AWAITS_PUBLISHED:
        return atomic_load(&param_buffer->words[p].copied_in) < awaited->target;
    case FSDPC_SHM_AWAITS_READ:
        return atomic_load(&buffer->words[p]->read) < awaited->target;
    case FSDPC_SHM_AWAITS_RANK:
        return (uint64_t)p == awaited->target;
    case FSDPC_SHM_AWAITS_NOBODY:
        break;
    }
    return false;
}

/* The death of any rank in the world counts, even a non-member's: the run cannot continue, and a
 * member that detected the death elsewhere may never get here. Deaths are checked first, because
 * ranks leave after a death. A departure counts only in the group that the rank left. If a
 * communicator above this one is waiting for other hosts, however, a rank that has done its part may
 * leave. */
fsdpc_status fsdpc_shm_peers_check(fsdpc_shm_comm *self)
{
    for (int w = 0; w < self->world->size; w++)
        if (fsdpc_shm_world_dead(self->world, w))
            return peer_is_gone(self, w, false);
    for (int p = 0; p < self->base.size; p++)
        if (p != self->base.rank &&
            atomic_load_explicit(&self->control->slots[p].left, memory_order_acquire) &&
            (!self->base.carry || fsdpc_shm_is_late(self, p)))
            return peer_is_gone(self, self->members[p], true);
    return adopt_from_groups(self);
}

fsdpc_status fsdpc_shm_peers_look(fsdpc_shm_comm *self)
{
    enum { EVERY_NS = 20000000 };
    int64_t now = fsdpc_clock_ns();
    if (now - self->checked_ns < EVERY_NS)
        return FSDPC_OK;
    self->checked_ns = now;
    if (fsdpc_shm_poisoned(self->control)) /* for callers that wait for something outside this
                                            * group */
        return fsdpc_shm_adopt_poison(self);
    return fsdpc_shm_peers_check(self);
}

const fsdpc_shm_param_buffer *fsdpc_shm_param_buffer_ahead(const fsdpc_shm_comm *self, int rank)
{
    for (const fsdpc_shm_param_buffer *param_buffer = self->param_buffers; param_buffer;
         param_buffer = param_buffer->next)
        if (atomic_load_explicit(&param_buffer->words[rank].arrived, memory_order_acquire) >
            param_buffer->base.epoch)
            return param_buffer;
    return NULL;
}

/* ---- Joint creation ---- */

fsdpc_status fsdpc_shm_creation_begin(fsdpc_shm_comm *self, const char *what, size_t bytes,
                                      uint64_t *tag_out)
{
    if (!self->base.device)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%s needs a device", what);
    FSDPC_TRY(fsdpc_comm_run(&self->base, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER,
                                                        .unit = -1,
                                                        .what = what,
                                                        .dtype = FSDPC_U8,
                                                        .numel = bytes}));
    self->creations++;
    *tag_out = (self->id + self->creations * UINT64_C(0x9e3779b97f4a7c15)) | 1;
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_give_all(fsdpc_shm_comm *self, uint64_t tag, fsdpc_shm_segment *segment,
                                fsdpc_status status)
{
    int others[FSDPC_COLL_MAX_RANKS] = {0}, n = 0;
    for (int p = 0; p < self->base.size; p++)
        if (p != self->base.rank)
            others[n++] = self->members[p];
    status = fsdpc_shm_world_give(self->world, &self->base, others, n, tag, segment, status);
    fsdpc_shm_ring_bell(self->bell); /* takers may sleep there, and speed does not matter here */
    return status;
}

fsdpc_status fsdpc_shm_given_all(fsdpc_shm_comm *self)
{
    self->awaited.kind = FSDPC_SHM_AWAITS_NOBODY;
    return fsdpc_shm_world_given(self->world, &self->base, self->base.size - 1);
}

fsdpc_status fsdpc_shm_take_from(fsdpc_shm_comm *self, int from, uint64_t tag, size_t bytes,
                                 fsdpc_shm_segment **out)
{
    self->awaited = (fsdpc_shm_awaited){.kind = FSDPC_SHM_AWAITS_RANK, .target = (uint64_t)from};
    FSDPC_TRY(fsdpc_shm_world_take(self->world, &self->base, self->members[from], tag, bytes, out));
    fsdpc_shm_ring_bell(self->bell);
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_share_first(fsdpc_shm_comm *self, uint64_t tag, size_t bytes,
                                   fsdpc_status status, fsdpc_shm_segment **segment)
{
    if (self->base.rank != 0)
        return fsdpc_shm_take_from(self, 0, tag, bytes, segment);
    FSDPC_KEEP_FIRST(status, fsdpc_shm_give_all(self, tag, *segment, status));
    FSDPC_KEEP_FIRST(status, fsdpc_shm_given_all(self));
    return status;
}
