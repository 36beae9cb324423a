/* A communicator for the ranks of one host, over shared memory.
 *
 * Ranks meet over Unix sockets. The ranks share a life page (shm_world.c) and, in each group, a
 * control page (shm_control.h). A split creates a new control page for each new group; all groups
 * share one world. Objects have no names in a file system, and sockets stop listening after all
 * ranks have connected.
 *
 * shm_internal.h lists the other files of this communicator.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/coll_math.h"
#include "comm/fork_guard.h"
#include "comm/shm_buffer.h"
#include "comm/shm_coll.h"
#include "comm/shm_peers.h"
#include "comm/shm_param_buffer.h"
#include "comm/comm_shm.h"

enum { LONGEST_NAP_NS = 100000000 };

enum { FIRST_GROUP = 0x66736470 };

static const fsdpc_comm_ops shm_ops;

/* ---- Waiting ---- */

static fsdpc_status shm_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    if (max_ns <= 0) {
        fsdpc_shm_nap_end(self->bell, nap);
        return FSDPC_OK;
    }
    fsdpc_shm_awaited awaited = self->awaited; /* other threads' polls write it meanwhile */
    if (comm->lock)
        pthread_mutex_unlock(comm->lock);
    fsdpc_shm_nap_take(self->bell, nap, max_ns < LONGEST_NAP_NS ? max_ns : LONGEST_NAP_NS);
    if (comm->lock)
        pthread_mutex_lock(comm->lock);
    self->awaited = awaited;
    return fsdpc_shm_peers_look(self);
}

static void shm_wake(fsdpc_comm *comm)
{
    fsdpc_shm_ring_bell(fsdpc_shm_of(comm)->bell);
}

static void shm_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    size_t used = 0;
    text[0] = 0;
    for (int p = 0; p < comm->size && used + 1 < bytes; p++) {
        if (p == comm->rank || !fsdpc_shm_is_late(self, p))
            continue;
        char where[192];
        int member = self->members[p];
        fsdpc_shm_world_where(self->world, member, where, sizeof where);
        int n = snprintf(text + used, bytes - used, "%srank %d (pid %d%s%s)", used ? ", " : "",
                         fsdpc_shm_name(self, p), fsdpc_shm_world_pid(self->world, member),
                         where[0] ? ", " : "", where);
        used += n > 0 ? (size_t)n : 0;
    }
}

static void shm_locate(fsdpc_comm *comm, const char *phase, const char *unit)
{
    if (!comm->apart)
        fsdpc_shm_world_locate(fsdpc_shm_of(comm)->world, phase, unit);
}

static void shm_where(const fsdpc_comm *comm, char *text, size_t bytes)
{
    const fsdpc_shm_world *world = ((const fsdpc_shm_comm *)comm)->world;
    fsdpc_shm_world_where(world, world->rank, text, bytes);
}

static void shm_waits(fsdpc_comm *comm, const char *what)
{
    if (!comm->apart)
        fsdpc_shm_world_waits(fsdpc_shm_of(comm)->world, what);
}

/* ---- Life ---- */

static fsdpc_status comm_new(const fsdpc_comm_config *config, fsdpc_shm_world *world,
                             const int *members, uint64_t id, fsdpc_shm_comm **out)
{
    fsdpc_shm_comm *self = calloc(1, sizeof *self);
    int *copy = malloc((size_t)config->size * sizeof *copy);
    if (!self || !copy) {
        free(self);
        free(copy);
        return fsdpc_fail_errno("no memory for a communicator");
    }
    fsdpc_comm_init(&self->base, &shm_ops, config);
    memcpy(copy, members, (size_t)config->size * sizeof *copy);
    self->members = copy;
    self->world = fsdpc_shm_world_retain(world);
    self->base.world_rank = self->base.log.rank = fsdpc_shm_name(self, config->rank);
    self->id = id;
    self->inline_stream = (fsdpc_stream){.device = config->device, .name = "comm"};
    *out = self;
    return FSDPC_OK;
}

static fsdpc_status comm_attach(fsdpc_shm_comm *self, fsdpc_shm_segment *segment,
                                const fsdpc_shm_comm *parent)
{
    self->segment = segment;
    FSDPC_TRY(fsdpc_shm_segment_map(segment, true));
    fsdpc_shm_segment_close_fd(segment);
    self->control = (fsdpc_shm_control *)(void *)segment->writable;
    self->mine = &self->control->slots[self->base.rank];
    self->bell_segment = fsdpc_shm_segment_retain(parent ? parent->bell_segment : segment);
    self->bell = parent ? parent->bell : self->control;
    self->next_group = self->world->groups;
    self->world->groups = self;
    return FSDPC_OK;
}

static void comm_detach(fsdpc_shm_comm *self)
{
    fsdpc_shm_comm **at = &self->world->groups;
    while (*at && *at != self)
        at = &(*at)->next_group;
    if (*at)
        *at = self->next_group;
}

/* The leader creates the control page and passes it to the other ranks, which use `waiter` to wait
 * for it. */
static fsdpc_status comm_join(fsdpc_shm_comm *self, fsdpc_comm *waiter,
                              const fsdpc_shm_comm *parent)
{
    fsdpc_shm_control *bell = parent ? parent->bell : NULL;
    uint64_t tag = self->id | 1;
    size_t bytes = fsdpc_shm_control_bytes(self->base.size);
    fsdpc_shm_segment *segment = NULL;
    fsdpc_status status;
    if (self->base.rank == 0) {
        status = fsdpc_shm_segment_create("fsdpc control", bytes, !self->world->threads, &segment);
        FSDPC_KEEP_FIRST(status, fsdpc_shm_world_give(self->world, waiter, self->members + 1,
                                                      self->base.size - 1, tag, segment, status));
        if (bell)
            fsdpc_shm_ring_bell(bell);
        FSDPC_KEEP_FIRST(status, fsdpc_shm_world_given(self->world, waiter, self->base.size - 1));
    } else {
        status = fsdpc_shm_world_take(self->world, waiter, self->members[0], tag, bytes, &segment);
        if (bell)
            fsdpc_shm_ring_bell(bell);
        if (status == FSDPC_OK && !segment)
            status = fsdpc_fail(FSDPC_ERR_PEER, "rank 0 of the group could not create its control "
                                                "page; see its own error");
    }
    if (status == FSDPC_OK)
        return comm_attach(self, segment, parent);
    fsdpc_shm_segment_release(segment);
    return status;
}

/* A rank that leaves the first group leaves all groups. Groups split from it may outlive the call,
 * and their peers would otherwise treat the end of the process as a death. */
static void shm_leave(fsdpc_comm *comm)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    if (!self->control || self->world->fork_count != fsdpc_fork_count())
        return;
    /* release: orders all our earlier work before it; acquire in peers_check. */
    atomic_store_explicit(&self->mine->left, 1, memory_order_release);
    if (self->id == FIRST_GROUP) {
        for (fsdpc_shm_comm *group = self->world->groups; group; group = group->next_group)
            atomic_store_explicit(&group->mine->left, 1, memory_order_release);
        fsdpc_shm_world_leave(self->world);
    }
    fsdpc_shm_ring_bell(self->bell);
}

static void shm_destroy(fsdpc_comm *comm)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    shm_leave(comm);
    comm_detach(self);
    fsdpc_shm_segment_release(self->segment);
    fsdpc_shm_segment_release(self->bell_segment);
    fsdpc_shm_world_release(self->world);
    free(self->members);
    free(self);
}

static fsdpc_status part_create(fsdpc_shm_comm *self, const int64_t (*wishes)[2], fsdpc_comm **out)
{
    int members[FSDPC_COLL_MAX_RANKS], parents[FSDPC_COLL_MAX_RANKS], n = 0, rank = 0;
    const int64_t *mine = wishes[self->base.rank];
    for (int p = 0; p < self->base.size; p++) {
        if (wishes[p][0] != mine[0])
            continue;
        int at = n++;
        for (; at > 0 && wishes[parents[at - 1]][1] > wishes[p][1]; at--)
            parents[at] = parents[at - 1];
        parents[at] = p;
    }
    for (int i = 0; i < n; i++) {
        members[i] = self->members[parents[i]];
        rank = parents[i] == self->base.rank ? i : rank;
    }
    fsdpc_comm_config config = fsdpc_comm_config_like(&self->base, rank, n);
    uint64_t id = self->id * 31 + self->creations * 1024 + (uint64_t)members[0] + 1;
    fsdpc_shm_comm *part = NULL;
    FSDPC_TRY(comm_new(&config, self->world, members, id * UINT64_C(0x9e3779b97f4a7c15), &part));
    part->base.carry = self->base.carry;
    part->base.carry_arg = self->base.carry_arg;
    fsdpc_status status = comm_join(part, &self->base, self);
    if (status != FSDPC_OK) {
        shm_destroy(&part->base);
        return status;
    }
    *out = &part->base;
    return FSDPC_OK;
}

fsdpc_status fsdpc_shm_part(fsdpc_comm *comm, const int *members, int n, uint64_t id,
                            fsdpc_comm **out)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm), *part = NULL;
    int rank = -1, worlds[FSDPC_COLL_MAX_RANKS];
    for (int i = 0; i < n && i < FSDPC_COLL_MAX_RANKS; i++) {
        if (members[i] < 0 || members[i] >= comm->size)
            return fsdpc_fail(FSDPC_ERR_VALUE, "rank %d of a group of %d", members[i], comm->size);
        worlds[i] = self->members[members[i]];
        rank = members[i] == comm->rank ? i : rank;
    }
    if (rank < 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "rank %d makes a group without itself", comm->rank);
    FSDPC_TRY(fsdpc_shm_health(self));
    fsdpc_comm_config config = fsdpc_comm_config_like(comm, rank, n);
    FSDPC_TRY(comm_new(&config, self->world, worlds, id | 1, &part));
    part->base.carry = comm->carry;
    part->base.carry_arg = comm->carry_arg;
    part->base.lock = comm->lock;
    fsdpc_status status;
    const fsdpc_coll all_joined = {.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = "new_group"};
    FSDPC_TRY_GOTO(status, comm_join(part, comm, self), destroy);
    FSDPC_TRY_GOTO(status, fsdpc_comm_run(&part->base, &all_joined), destroy);
    *out = &part->base;
    return FSDPC_OK;

destroy:
    shm_destroy(&part->base);
    return status;
}

static fsdpc_status shm_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    fsdpc_shm_comm *self = fsdpc_shm_of(comm);
    uint64_t tag;
    FSDPC_TRY(fsdpc_shm_creation_begin(self, "split", 0, &tag));
    int64_t mine[2] = {color, key}, wishes[FSDPC_COLL_MAX_RANKS][2];
    FSDPC_TRY(fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                 .unit = -1,
                                                 .what = "split",
                                                 .dtype = FSDPC_I64,
                                                 .send = mine,
                                                 .recv = wishes,
                                                 .numel = 2}));
    fsdpc_comm *part = NULL;
    fsdpc_status status =
        color < 0 ? FSDPC_OK : part_create(self, (const int64_t(*)[2])wishes, &part);
    self->awaited.kind = FSDPC_SHM_AWAITS_NOBODY;
    status = fsdpc_comm_agree(comm, status, "split");
    if (status != FSDPC_OK) {
        fsdpc_comm_destroy(part);
        return status;
    }
    *out = part;
    return FSDPC_OK;
}

/* ---- The table ---- */

static const fsdpc_comm_ops shm_ops = {
    .name = "shm",
    .destroy = shm_destroy,
    .split = shm_split,
    .abort = fsdpc_shm_abort,
    .leave = shm_leave,
    .param_buffer_create_in = fsdpc_shm_param_buffer_create,
    .param_buffer_destroy = fsdpc_shm_param_buffer_destroy,
    .epoch_arrive = fsdpc_shm_epoch_arrive,
    .epoch_test = fsdpc_shm_epoch_test,
    .epoch_copied_in = fsdpc_shm_epoch_copied_in,
    .epoch_copy_in_test = fsdpc_shm_epoch_copy_in_test,
    .buffer_create = fsdpc_shm_buffer_create,
    .buffer_destroy = fsdpc_shm_buffer_destroy,
    .buffer_idle = fsdpc_shm_buffer_idle,
    .splits_sums = true,
    .post = fsdpc_shm_post,
    .test = fsdpc_shm_test,
    .idle = shm_idle,
    .wake = shm_wake,
    .describe = shm_describe,
    .locate = shm_locate,
    .where = shm_where,
    .waits = shm_waits,
    .look = fsdpc_shm_look,
    .tell = fsdpc_shm_be_told,
    .end_fd = fsdpc_shm_end_fd,
};

fsdpc_status fsdpc_comm_shm_create(const fsdpc_comm_config *config, fsdpc_comm **out)
{
    fsdpc_shm_world *world = NULL;
    FSDPC_TRY(fsdpc_shm_world_create(config, &world));
    int members[FSDPC_COLL_MAX_RANKS];
    for (int p = 0; p < config->size; p++)
        members[p] = p;
    fsdpc_shm_comm *self = NULL;
    fsdpc_status status = comm_new(config, world, members, FIRST_GROUP, &self);
    fsdpc_shm_world_release(world); /* the communicator holds it */
    FSDPC_TRY(status);
    fsdpc_shm_early early;
    fsdpc_shm_early_init(&early, world, config);
    FSDPC_TRY_GOTO(status, comm_join(self, &early.comm, NULL), destroy);
    /* No rank continues before all have arrived and registered in the life page. */
    FSDPC_TRY_GOTO(
        status,
        fsdpc_comm_run(&self->base,
                       &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = "create"}),
        destroy);
    *out = &self->base;
    return FSDPC_OK;

destroy:
    shm_destroy(&self->base);
    return status;
}

fsdpc_status fsdpc_comm_shm_create_threads(const fsdpc_comm_config *configs, int size,
                                           fsdpc_comm **outs)
{
    fsdpc_shm_world *worlds[FSDPC_COLL_MAX_RANKS];
    int members[FSDPC_COLL_MAX_RANKS], made = 0;
    fsdpc_shm_segment *segment = NULL;
    FSDPC_TRY(fsdpc_shm_world_create_threads(size, worlds));
    fsdpc_status status =
        fsdpc_shm_segment_create("fsdpc control", fsdpc_shm_control_bytes(size), false, &segment);
    for (; status == FSDPC_OK && made < size; made++) {
        fsdpc_comm_config config = configs[made];
        config.rank = made;
        config.size = size;
        for (int p = made; p < size; p++)
            members[p] = p;
        fsdpc_shm_comm *self = NULL;
        fsdpc_shm_world_set_names(worlds[made], &config);
        status = comm_new(&config, worlds[made], members, FIRST_GROUP, &self);
        if (status != FSDPC_OK)
            break;
        comm_attach(self, fsdpc_shm_segment_retain(segment), NULL);
        outs[made] = &self->base;
    }
    while (status != FSDPC_OK && made > 0)
        shm_destroy(outs[--made]);
    for (int p = 0; p < size; p++)
        fsdpc_shm_world_release(worlds[p]);
    fsdpc_shm_segment_release(segment);
    return status;
}
