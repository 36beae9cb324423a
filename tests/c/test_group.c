/* Process groups whose ranks have several threads. Ranks are processes. */
#include "comm_ranks.h"

#include "comm/group.h"

enum { FIRST = 1, SECOND = 2 };

static fsdpc_group *group_create(rank_context *self, const char *name)
{
    fsdpc_comm_config config = ranks_config(self, &(rank_options){.timeout_s = 60});
    char address[64];
    snprintf(address, sizeof address, "%s-%d", name, (int)getppid());
    config.address = address;
    fsdpc_group *group = NULL;
    EXPECT_OK(self, fsdpc_group_create(&config, &group));
    return group;
}

static void send_byte(rank_context *self, fsdpc_group *group, uint64_t tag)
{
    unsigned char byte = (unsigned char)tag;
    fsdpc_group_work send = {0};
    EXPECT_OK(self, fsdpc_group_send(group, 1 - self->rank, tag, &byte, 1, &send));
    EXPECT_OK(self, fsdpc_group_wait(&send));
}

/* A thread that receives one byte. */
typedef struct receiver {
    rank_context context; /* its own, since EXPECT counts without a lock */
    fsdpc_group *group;
    uint64_t tag;
    pthread_t thread;
} receiver;

static void *receive_byte(void *arg)
{
    receiver *r = arg;
    unsigned char byte = 0;
    fsdpc_group_work recv = {0};
    EXPECT_OK(&r->context,
              fsdpc_group_recv(r->group, 1 - r->context.rank, r->tag, &byte, 1, &recv));
    EXPECT_OK(&r->context, fsdpc_group_wait(&recv));
    EXPECT(&r->context, byte == r->tag, "received %d", byte);
    return NULL;
}

/* Waits, without sleeping in the group, until n threads of all ranks sleep. */
static void until_sleepers(rank_context *self, const fsdpc_group *group, uint32_t n)
{
    const fsdpc_shm_comm *comm = (const fsdpc_shm_comm *)fsdpc_group_comm(group);
    int64_t deadline = fsdpc_clock_ns() + INT64_C(20000000000);
    while (atomic_load(&comm->bell->sleepers) != n && fsdpc_clock_ns() < deadline)
        sched_yield();
    EXPECT(self, atomic_load(&comm->bell->sleepers) == n, "%u threads sleep, not %u",
           atomic_load(&comm->bell->sleepers), n);
}

/* Two threads of rank 0 sleep in one group, and each is counted until its own wait ends. */
static void each_waiter_naps_by_itself(rank_context *self)
{
    fsdpc_group *group = group_create(self, "naps");
    if (self->rank == 0) {
        receiver receivers[2];
        for (int i = 0; i < 2; i++) {
            receivers[i] = (receiver){.context = *self, .group = group, .tag = FIRST + (uint64_t)i};
            EXPECT(self,
                   pthread_create(&receivers[i].thread, NULL, receive_byte, &receivers[i]) == 0,
                   "no thread");
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(receivers[i].thread, NULL);
            self->failures += receivers[i].context.failures;
        }
    } else {
        until_sleepers(self, group, 2);
        send_byte(self, group, FIRST);
        until_sleepers(self, group, 1);
        send_byte(self, group, SECOND);
        until_sleepers(self, group, 0);
    }
    fsdpc_group_destroy(group);
}

int main(void)
{
    ranks_run_processes(2, each_waiter_naps_by_itself, &(rank_options){.spin = false});
    return check_report("test_group");
}
