/* The multi-host communicator.
 *
 * The world consists of H hosts with L ranks each; rank h * L + l is local rank l of host h. Within
 * a host, everything works as in a single-host run, with a shared-memory communicator, one copy of
 * the weights, and buffers that all ranks can read. Between hosts, a transport carries bytes from
 * each local rank to the same local rank on the other hosts. Data therefore leaves each host only
 * once, divided among its ranks.
 *
 * This code uses the communicator and the transport only through their public interfaces. A wait in
 * one group also advances this rank's operations in other groups, both within the host and between
 * hosts. An arriving message rings the host's bell to wake sleeping ranks.
 *
 * A group within one host is simply a communicator on that host. Every other group contains the
 * same local ranks on several hosts: either all ranks of those hosts, or one local rank from each
 * (replicas between hosts).
 */
#include "comm/comm_hosts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/size.h"
#include "comm/coll_math.h"
#include "comm/comm_null.h"
#include "comm/fork_guard.h"
#include "comm/hosts_internal.h"
#include "comm/transport_null.h"

static const fsdpc_comm_ops hosts_ops;

/* ---- Life ---- */

static void wake(void *host)
{
    fsdpc_comm *comm = host;
    comm->ops->wake(comm);
}

/* Rings the bell of a host communicator when a message arrives. */
static void wake_host(fsdpc_hosts_world *world)
{
    fsdpc_comm *host = world->groups ? world->groups->host : NULL;
    if (world->transport->ops->set_wake)
        world->transport->ops->set_wake(world->transport, host && host->ops->wake ? wake : NULL,
                                        host);
}

static void end_watch(fsdpc_hosts_comm *self)
{
    if (self->group != 0) /* the watch belongs to the first group */
        return;
    fsdpc_host_watch_stop(self->world->watch);
    self->world->watch = NULL;
}

static void leave_world(fsdpc_hosts_comm *self)
{
    fsdpc_hosts_world *world = self->world;
    fsdpc_hosts_comm **at = &world->groups;
    while (*at && *at != self)
        at = &(*at)->next_group;
    if (*at)
        *at = self->next_group;
    wake_host(world);
    if (--world->refs > 0)
        return;
    fsdpc_transport_destroy(world->transport);
    free(world);
}

static bool forked(const fsdpc_hosts_comm *self)
{
    return self->world->fork_count != fsdpc_fork_count();
}

/* Aborts the transport; until then, it may use the memory of operations in flight. */
static void abandon(fsdpc_hosts_comm *self)
{
    if (self->pending && !self->base.poison[0])
        (void)fsdpc_hosts_progress(self); /* operations may have ended without being tested */
    if (self->pending)
        fsdpc_transport_abort(self->transport,
                              "a group was destroyed with operations in flight; wait for "
                              "them, on every rank, before dropping it");
    fsdpc_hosts_drop(self);
}

static void hosts_destroy(fsdpc_comm *comm)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    if (forked(self)) /* its threads, peers and memory belong to the parent */
        return;
    abandon(self);
    end_watch(self);
    fsdpc_hosts_ops_free(self, &self->spare);
    fsdpc_comm_destroy(self->later);
    leave_world(self);
    fsdpc_comm_destroy(self->host);
    free(self->peers);
    free(self);
}

/* Takes ownership of `host` on success; peers[h] is the transport rank of this local rank on host
 * h. */
static fsdpc_status create(const fsdpc_comm_config *config, fsdpc_comm *host,
                           fsdpc_hosts_world *world, const int *peers, fsdpc_hosts_comm **out)
{
    fsdpc_hosts_comm *self = calloc(1, sizeof *self);
    int n_hosts = config->size / host->size;
    int *copy = malloc((size_t)n_hosts * sizeof *copy);
    if (!self || !copy) {
        free(self);
        free(copy);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator of %d hosts", n_hosts);
    }
    fsdpc_comm_init(&self->base, &hosts_ops, config);
    memcpy(copy, peers, (size_t)n_hosts * sizeof *copy);
    self->peers = copy;
    self->n_hosts = n_hosts;
    self->local_size = self->base.host_size = host->size;
    self->this_host = config->rank / host->size;
    self->local_rank = host->rank;
    self->world = world;
    self->transport = world->transport;
    self->base.world_rank = self->base.log.rank = world->transport->rank;
    fsdpc_status status = fsdpc_comm_split(host, 0, host->rank, &self->later);
    if (status != FSDPC_OK) {
        free(self->peers);
        free(self);
        return status;
    }
    self->host = host;
    self->next_group = world->groups;
    world->groups = self;
    world->refs++;
    wake_host(world);
    *out = self;
    return FSDPC_OK;
}

static fsdpc_status shape_check(const fsdpc_comm_config *config, const fsdpc_comm *host,
                                const fsdpc_transport *transport)
{
    int local_size = host->size;
    if (config->size % local_size || config->rank % local_size != host->rank ||
        transport->size != config->size || transport->rank != config->rank)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "rank %d of %d cannot be rank %d of %d on its host: every host has as "
                          "many ranks, which follow each other",
                          config->rank, config->size, host->rank, local_size);
    if (config->size > FSDPC_COLL_MAX_RANKS)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "%d ranks over several hosts; at most %d",
                          config->size, FSDPC_COLL_MAX_RANKS);
    return FSDPC_OK;
}

/* Blocks until all ranks have arrived and agree on the world. */
static fsdpc_status meet(fsdpc_comm *comm)
{
    return fsdpc_comm_run(comm,
                          &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = "create"});
}

fsdpc_status fsdpc_comm_hosts_create(const fsdpc_comm_config *config, fsdpc_comm *host,
                                     fsdpc_transport *transport, fsdpc_comm **out)
{
    fsdpc_hosts_comm *self = NULL;
    fsdpc_hosts_world *world = NULL;
    int peers[FSDPC_COLL_MAX_RANKS];
    fsdpc_status status = shape_check(config, host, transport);
    if (status == FSDPC_OK && !(world = calloc(1, sizeof *world)))
        status = fsdpc_fail_errno("no memory for a world of %d ranks", config->size);
    if (status == FSDPC_OK) {
        world->transport = transport;
        transport->timeout_s = config->timeout_s;
        transport->log = (fsdpc_log){.level = config->log.level, .rank = config->rank};
        world->fork_count = fsdpc_fork_count();
        host->carry = fsdpc_hosts_carry_on;
        host->carry_arg = world;
        for (int h = 0; h < config->size / host->size; h++)
            peers[h] = h * host->size + host->rank;
        status = create(config, host, world, peers, &self);
    }
    if (!self) {
        free(world);
        fsdpc_comm_destroy(host);
        fsdpc_transport_destroy(transport);
        return status;
    }
    status = meet(&self->base);
    if (status != FSDPC_OK)
        hosts_destroy(&self->base);
    else
        *out = &self->base;
    return status;
}

fsdpc_status fsdpc_comm_hosts_watch(fsdpc_comm *comm, const fsdpc_host_watch_config *config)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    if (!comm || comm->ops != &hosts_ops || self->group != 0 || self->local_rank != 0 ||
        self->world->watch)
        return fsdpc_fail(FSDPC_ERR_VALUE, "a watch is the first rank's of each host, and one");
    return fsdpc_host_watch_start(self->host, config, &self->world->watch);
}

size_t fsdpc_comm_hosts_staging_bytes(fsdpc_coll_kind kind, fsdpc_dtype dtype, fsdpc_codec codec,
                                      size_t buffer_bytes, size_t n_slices, int hosts,
                                      int local_size)
{
    size_t numel = buffer_bytes / fsdpc_dtype_bytes(dtype);
    fsdpc_hosts_staging_bytes staging =
        fsdpc_hosts_staging_bytes_for(kind, dtype, codec, numel, n_slices, hosts, local_size);
    return fsdpc_mem_counted(staging.here) + fsdpc_mem_counted(staging.there) +
           fsdpc_mem_counted(staging.all) + fsdpc_mem_counted(staging.codes);
}

fsdpc_hosts_messages fsdpc_comm_hosts_messages(void)
{
    return (fsdpc_hosts_messages){.note = sizeof(fsdpc_hosts_note),
                                  .header = sizeof(fsdpc_hosts_header)};
}

/* Formats a description of this rank, which other hosts can read after the rank has left. */
static void write_farewell(const fsdpc_hosts_comm *self, char *text, size_t bytes)
{
    char host[64] = "", where[192] = "";
    gethostname(host, sizeof host - 1);
    if (self->host->ops->where)
        self->host->ops->where(self->host, where, sizeof where);
    snprintf(text, bytes, "; it was pid %d on %s%s%s", (int)getpid(), host,
             where[0] ? ", last seen " : "", where);
}

/* Returns whether the reason names a rank; if so, it concerns another rank or a wait for one. */
static bool names_a_rank(const char *reason)
{
    for (const char *at = reason; (at = strstr(at, "rank"));) {
        at += at[4] == 's' ? 5 : 4;
        if (at[0] == ' ' && at[1] >= '0' && at[1] <= '9')
            return true;
    }
    return false;
}

static void hosts_abort(fsdpc_comm *comm, fsdpc_status status, const char *reason)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    char text[sizeof comm->poison], mine[FSDPC_TRANSPORT_FAREWELL] = "";
    if (reason && reason[0] && !names_a_rank(reason))
        write_farewell(self, mine, sizeof mine);
    snprintf(text, sizeof text, "%s%s", reason ? reason : "", mine);
    fsdpc_comm_abort_local(comm, status, reason);
    self->host->ops->abort(self->host, status, text);
    self->later->ops->abort(self->later, status, text);
    fsdpc_transport_abort(self->transport, text);
    fsdpc_hosts_drop(self);
}

static void hosts_leave(fsdpc_comm *comm)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    char note[128] = "";
    if (forked(self))
        return;
    end_watch(self);
    if (fsdpc_comm_look(self->host, note, sizeof note) != FSDPC_OK)
        /* Peers waiting for this rank learn what failed, not just that the rank left. */
        fsdpc_transport_abort(self->transport, fsdpc_last_error());
    fsdpc_comm_leave(self->host);
    if (self->group != 0)
        return;
    fsdpc_transport *transport = self->transport;
    if (transport->farewells)
        write_farewell(self, transport->farewells[transport->rank], FSDPC_TRANSPORT_FAREWELL);
    fsdpc_transport_leave(transport); /* a rank that leaves the first group has left them all */
}

static void hosts_set_apart(fsdpc_comm *comm)
{
    fsdpc_comm_set_apart(fsdpc_hosts_of(comm)->host);
    fsdpc_comm_set_apart(fsdpc_hosts_of(comm)->later);
}

/* ---- Waiting ---- */

static fsdpc_status hosts_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    FSDPC_TRY(fsdpc_transport_health(
        self->transport)); /* checked here because nothing may be in flight */
    return fsdpc_comm_idle(self->host, nap, max_ns);
}

/* Returns whether an operation before the i-th waits for the same peer. */
static bool is_named(const fsdpc_hosts_op *op, int i)
{
    for (int before = 0; before < i; before++)
        if (op->ops[before].transport && op->ops[before].sends == op->ops[i].sends &&
            op->ops[before].peer == op->ops[i].peer)
            return true;
    return false;
}

/* Lists the peers that this rank is waiting for. A peer may itself be waiting for another rank on
 * its host; this host cannot tell. */
static void hosts_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    fsdpc_comm_describe(self->host, text, bytes);
    const fsdpc_hosts_op *op = self->pending;
    for (int sends = 0; sends < 2 && !text[0]; sends++) { /* a peer that does not receive is also
                                                           * late */
        size_t used = strlen(text);
        for (int i = 0; op && i < op->n_ops && used + 1 < bytes; i++) {
            if (!op->ops[i].transport || op->ops[i].sends != sends || is_named(op, i))
                continue;
            const char *other = self->host->size > 1 ? ", or a rank there that it waits for" : "";
            int n = snprintf(text + used, bytes - used, "%srank %d on another host%s",
                             used ? "; " : "", op->ops[i].peer, other);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}

static void hosts_locate(fsdpc_comm *comm, const char *phase, const char *unit)
{
    fsdpc_comm_locate(fsdpc_hosts_of(comm)->host, phase, unit);
}

static void hosts_waits(fsdpc_comm *comm, const char *what)
{
    fsdpc_comm_waits(fsdpc_hosts_of(comm)->host, what);
}

/* ---- Split ---- */

typedef struct wish {
    int64_t color, key, groups;
} wish;

/* Lists the ranks with this rank's colour, ordered by key and rank. */
static int members_of(const fsdpc_hosts_comm *self, const wish *wishes, int *members)
{
    int n = 0;
    for (int r = 0; r < self->base.size; r++) {
        if (wishes[r].color != wishes[self->base.rank].color)
            continue;
        int at = n++;
        for (; at > 0 && wishes[members[at - 1]].key > wishes[r].key; at--)
            members[at] = members[at - 1];
        members[at] = r;
    }
    return n;
}

/* Returns the number of members per host, or 0 if the members are not the same local ranks on each
 * host. */
static int local_size_of(const fsdpc_hosts_comm *self, const int *members, int n)
{
    int local_size = 0;
    while (local_size < n &&
           members[local_size] / self->local_size == members[0] / self->local_size)
        local_size++;
    for (int i = 0; i < n; i++) {
        if (n % local_size ||
            members[i] / self->local_size !=
                members[i / local_size * local_size] / self->local_size ||
            members[i] % self->local_size != members[i % local_size] % self->local_size)
            return 0;
    }
    return local_size;
}

static fsdpc_status split_over_hosts(fsdpc_hosts_comm *self, const int *members, int n,
                                     int local_size, fsdpc_comm *host, fsdpc_hosts_comm **out)
{
    fsdpc_comm_config config = fsdpc_comm_config_like(&self->base, 0, n);
    int peers[FSDPC_COLL_MAX_RANKS], local_rank = 0;
    for (int i = 0; i < n; i++) {
        if (members[i] == self->base.rank) {
            config.rank = i;
            local_rank = i % local_size;
        }
    }
    for (int h = 0; h < n / local_size; h++)
        peers[h] = self->peers[members[h * local_size + local_rank] / self->local_size];
    return create(&config, host, self->world, peers, out);
}

static fsdpc_status split_here(fsdpc_hosts_comm *self, const wish *wishes, fsdpc_comm **out)
{
    int members[FSDPC_COLL_MAX_RANKS], n = members_of(self, wishes, members);
    const wish *mine = &wishes[self->base.rank];
    int local_size = mine->color < 0 ? 1 : local_size_of(self, members, n);
    fsdpc_comm *host = NULL;
    /* The split is collective on the host, even if the host's ranks request different groups. */
    FSDPC_TRY(fsdpc_comm_split(self->host, (int)mine->color, (int)mine->key, &host));
    if (mine->color < 0)
        return FSDPC_OK;
    if (local_size == n) {
        *out = host;
        return FSDPC_OK;
    }
    fsdpc_hosts_comm *part = NULL;
    fsdpc_status status =
        local_size > 0
            ? split_over_hosts(self, members, n, local_size, host, &part)
            : fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                         "a group of %d ranks over several hosts: it must lie inside one, or "
                         "have the same ranks of each (whole hosts, or one of each)",
                         n);
    if (status != FSDPC_OK) {
        fsdpc_comm_destroy(host);
        return status;
    }
    *out = &part->base;
    return FSDPC_OK;
}

static fsdpc_status hosts_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    fsdpc_hosts_comm *self = fsdpc_hosts_of(comm);
    wish mine = {color, key, self->world->groups_made}, wishes[FSDPC_COLL_MAX_RANKS];
    FSDPC_TRY(fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_GATHER,
                                                 .unit = -1,
                                                 .what = "split",
                                                 .dtype = FSDPC_I64,
                                                 .send = &mine,
                                                 .recv = wishes,
                                                 .numel = sizeof mine / sizeof(int64_t)}));
    fsdpc_comm *part = NULL;
    fsdpc_status status = fsdpc_comm_agree(comm, split_here(self, wishes, &part), "split");
    if (status != FSDPC_OK) {
        fsdpc_comm_destroy(part);
        return status;
    }
    uint32_t groups = 0; /* a number that none of its ranks has used */
    for (int r = 0; r < comm->size; r++)
        groups = wishes[r].groups > groups ? (uint32_t)wishes[r].groups : groups;
    self->world->groups_made = groups + 1;
    if (part && part->ops == &hosts_ops)
        fsdpc_hosts_of(part)->group = groups + 1;
    *out = part;
    return FSDPC_OK;
}

/* ---- Worlds ---- */

static fsdpc_status over_transport(const fsdpc_comm_config *config, int hosts,
                                   fsdpc_transport *transport, fsdpc_comm **out)
{
    fsdpc_comm_config here = *config;
    fsdpc_comm *host = NULL;
    char address[96];
    here.size = config->size / hosts;
    here.rank = config->rank % here.size;
    snprintf(address, sizeof address, "%s/%d", config->address, config->rank / here.size);
    here.address = address;
    here.first_rank = config->rank - here.rank;
    fsdpc_status status = fsdpc_comm_shm_create(&here, &host);
    if (status == FSDPC_OK)
        return fsdpc_comm_hosts_create(config, host, transport, out);
    fsdpc_transport_destroy(transport);
    return status;
}

static fsdpc_status pretended(const fsdpc_comm_config *config, int hosts, fsdpc_comm **out)
{
    fsdpc_comm_config here = *config;
    fsdpc_comm *host;
    fsdpc_transport *transport;
    if (hosts == 1)
        return fsdpc_comm_null_create(config, out);
    here.size = config->size / hosts;
    here.rank = config->rank % here.size;
    FSDPC_TRY(fsdpc_comm_null_create(&here, &host));
    fsdpc_status status = fsdpc_transport_null_create(config->rank, config->size, &transport);
    if (status == FSDPC_OK)
        return fsdpc_comm_hosts_create(config, host, transport, out);
    fsdpc_comm_destroy(host);
    return status;
}

fsdpc_status fsdpc_comm_world_create(const fsdpc_comm_config *config, int hosts,
                                     fsdpc_transport *transport, fsdpc_comm **out)
{
    if (!config->address)
        return pretended(config, hosts, out);
    if (transport)
        return over_transport(config, hosts, transport, out);
    return config->size == 1 ? fsdpc_comm_self_create(config, out)
                             : fsdpc_comm_shm_create(config, out);
}

/* ---- The table ---- */

static const fsdpc_comm_ops hosts_ops = {
    .name = "hosts",
    .destroy = hosts_destroy,
    .split = hosts_split,
    .abort = hosts_abort,
    .leave = hosts_leave,
    .set_apart = hosts_set_apart,
    .param_buffer_create_in = fsdpc_hosts_param_buffer_create,
    .param_buffer_destroy = fsdpc_hosts_param_buffer_destroy,
    .epoch_arrive = fsdpc_hosts_epoch_arrive,
    .epoch_test = fsdpc_hosts_epoch_test,
    .epoch_copied_in = fsdpc_hosts_epoch_copied_in,
    .epoch_copy_in_test = fsdpc_hosts_epoch_copy_in_test,
    .buffer_create = fsdpc_hosts_buffer_create,
    .buffer_destroy = fsdpc_hosts_buffer_destroy,
    .buffer_idle = fsdpc_hosts_buffer_idle,
    .post = fsdpc_hosts_post,
    .test = fsdpc_hosts_test,
    .idle = hosts_idle,
    .describe = hosts_describe,
    .locate = hosts_locate,
    .waits = hosts_waits,
};
