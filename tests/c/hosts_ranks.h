/* Running a function as the ranks of several hosts: threads of this process, whose hosts share
 * memory each and whose transport is carried by a thread for each rank.
 */
#ifndef FSDPC_TESTS_HOSTS_RANKS_H
#define FSDPC_TESTS_HOSTS_RANKS_H

#include "comm/comm_hosts.h"
#include "comm/transport_relay.h"
#include "comm_ranks.h"

typedef struct host_rank {
    rank_context context;
    rank_fn fn;
    fsdpc_comm_config config;
    fsdpc_comm *host;
    fsdpc_transport *transport;
    struct host_rank *world;
    pthread_t thread, carrier;
} host_rank;

static int hosts_slow = -1; /* a rank whose messages take long */

/* Who has created its communicator waits here for the others: a rank that the machine lets wait
 * would else learn in there how `fn` failed. */
static pthread_barrier_t hosts_created;

/* What a network does: from one rank's outbox to another rank. */
static void *hosts_carry(void *arg)
{
    enum { LOOK_NS = 1000000000 };
    host_rank *self = arg;
    fsdpc_status status;
    fsdpc_message message = {0};
    while ((status = fsdpc_transport_relay_take(self->transport, LOOK_NS, &message)) >= 0) {
        if (status == FSDPC_IN_PROGRESS)
            continue;
        fsdpc_transport *to = self->world[message.peer].transport;
        if (self->context.rank == hosts_slow)
            usleep(300000);
        message.peer = self->context.rank;
        fsdpc_transport_relay_deliver(to, &message);
    }
    fsdpc_message_free(&message);
    return NULL;
}

static void *hosts_rank_main(void *arg)
{
    host_rank *self = arg;
    rank_context *context = &self->context;
    EXPECT_OK(context,
              fsdpc_comm_hosts_create(&self->config, self->host, self->transport, &context->comm));
    pthread_barrier_wait(&hosts_created);
    if (context->comm)
        self->fn(context);
    return NULL;
}

static inline void hosts_make_host(host_rank *ranks, int local_size)
{
    fsdpc_comm_config configs[RANKS_MAX];
    fsdpc_comm *comms[RANKS_MAX];
    for (int l = 0; l < local_size; l++) {
        configs[l] = ranks[l].config;
        configs[l].rank = l;
        configs[l].size = local_size;
        configs[l].first_rank = ranks[0].context.rank;
    }
    CHECK_OK(fsdpc_comm_shm_create_threads(configs, local_size, comms));
    for (int l = 0; l < local_size; l++)
        ranks[l].host = comms[l];
}

static inline void hosts_run(int hosts, int local_size, rank_fn fn, const rank_options *options)
{
    static host_rank ranks[RANKS_MAX];
    int size = hosts * local_size;
    memset(ranks, 0, sizeof ranks);
    CHECK(pthread_barrier_init(&hosts_created, NULL, (unsigned)size) == 0);
    for (int r = 0; r < size; r++) {
        ranks[r].context = (rank_context){.rank = r, .size = size, .threads = true};
        ranks[r].fn = fn;
        ranks[r].world = ranks;
        ranks_open(&ranks[r].context, options);
        ranks[r].config = ranks_config(&ranks[r].context, options);
        CHECK_OK(fsdpc_transport_relay_create(r, size, &ranks[r].transport));
        fsdpc_transport_relay_retain(ranks[r].transport); /* the carriers' share */
    }
    for (int h = 0; h < hosts; h++)
        hosts_make_host(&ranks[h * local_size], local_size);
    for (int r = 0; r < size; r++)
        CHECK(pthread_create(&ranks[r].carrier, NULL, hosts_carry, &ranks[r]) == 0 &&
              pthread_create(&ranks[r].thread, NULL, hosts_rank_main, &ranks[r]) == 0);
    for (int r = 0; r < size; r++)
        pthread_join(ranks[r].thread, NULL);
    for (int r = 0; r < size; r++)
        ranks_close(
            &ranks[r].context); /* its transport is closed, so its carrier comes to its end */
    for (int r = 0; r < size; r++)
        pthread_join(ranks[r].carrier, NULL);
    pthread_barrier_destroy(&hosts_created);
    for (int r = 0; r < size; r++) {
        fsdpc_transport_destroy(ranks[r].transport);
        check_count += ranks[r].context.checks;
        check_failures += ranks[r].context.failures;
    }
}

#endif
