/* Process groups: threads that share one, and messages that are dropped. Ranks are processes. */
#include "comm_ranks.h"

#include "comm/group.h"

enum { FIRST = 1, SECOND = 2, LARGE = 3 << 20 /* more than a ring has */ };

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

static void receive_one(rank_context *self, fsdpc_group *group, uint64_t tag)
{
    receiver one = {.context = *self, .group = group, .tag = tag};
    receive_byte(&one);
    self->failures = one.context.failures;
}

static size_t others(const unsigned char *data, unsigned char want)
{
    size_t n = 0;
    for (size_t i = 0; i < LARGE; i++)
        n += data[i] != want;
    return n;
}

/* Rank 0 cancels a receive before and one while its message arrives; another receives that. */
static void dropped_receives(rank_context *self)
{
    fsdpc_group *group = group_create(self, "receives");
    pthread_barrier_t *meeting = (pthread_barrier_t *)(uintptr_t)self->arg;
    unsigned char *large = calloc(2, LARGE), *again = large + LARGE;
    fsdpc_group_work work = {0}, none = {0};
    if (self->rank == 0) {
        EXPECT_OK(self, fsdpc_group_recv(group, FSDPC_P2P_ANY, FIRST, large, LARGE, &none));
        fsdpc_group_drop(&none); /* its message is never sent */
        pthread_barrier_wait(meeting);
        pthread_barrier_wait(meeting); /* rank 1 has filled the ring */
        EXPECT_OK(self, fsdpc_group_recv(group, 1, SECOND, large, LARGE, &work));
        EXPECT(self, fsdpc_group_test(&work) == FSDPC_IN_PROGRESS && large[0] == 7, "%d", large[0]);
        fsdpc_group_drop(&work);
        memset(large, 0xee, LARGE);
        pthread_barrier_wait(meeting);
        EXPECT_OK(self, fsdpc_group_recv(group, 1, SECOND, again, LARGE, &work));
        EXPECT_OK(self, fsdpc_group_wait(&work));
        receive_one(self, group, FIRST);
        EXPECT(self, others(again, 7) == 0, "%zu bytes are wrong", others(again, 7));
        EXPECT(self, others(large, 0xee) == 0, "%zu bytes were written after the drop",
               others(large, 0xee));
    } else {
        memset(large, 7, LARGE);
        pthread_barrier_wait(meeting);
        EXPECT_OK(self, fsdpc_group_send(group, 0, SECOND, large, LARGE, &work));
        pthread_barrier_wait(meeting);
        pthread_barrier_wait(meeting);
        EXPECT_OK(self, fsdpc_group_wait(&work));
        send_byte(self, group, FIRST);
    }
    fsdpc_group_destroy(group);
    free(large);
}

/* Rank 0 drops a message that it has begun to send, and one that it has not. */
static void dropped_sends(rank_context *self)
{
    fsdpc_group *group = group_create(self, "sends");
    pthread_barrier_t *meeting = (pthread_barrier_t *)(uintptr_t)self->arg;
    unsigned char *large = malloc(LARGE), byte = FIRST;
    fsdpc_group_work work = {0}, small = {0};
    memset(large, 7, LARGE);
    if (self->rank == 0) {
        EXPECT_OK(self, fsdpc_group_send(group, 1, SECOND, large, LARGE, &work));
        EXPECT_OK(self, fsdpc_group_send(group, 1, FIRST, &byte, 1, &small));
        fsdpc_group_drop(&work);
        fsdpc_group_drop(&small);
        memset(large, byte = 0xee, LARGE);
        pthread_barrier_wait(meeting);
        receive_one(self, group, SECOND);
    } else {
        memset(large, 0, LARGE);
        pthread_barrier_wait(meeting);
        EXPECT_OK(self, fsdpc_group_recv(group, 0, SECOND, large, LARGE, &work));
        EXPECT_OK(self, fsdpc_group_wait(&work));
        receive_one(self, group, FIRST);
        send_byte(self, group, SECOND);
        EXPECT(self, others(large, 7) == 0, "%zu bytes are wrong", others(large, 7));
    }
    fsdpc_group_destroy(group);
    free(large);
}

int main(void)
{
    const rank_options options = {.arg = ranks_meeting(2)};
    ranks_run_processes(2, each_waiter_naps_by_itself, &options);
    ranks_run_processes(2, dropped_receives, &options);
    ranks_run_processes(2, dropped_sends, &options);
    return check_report("test_group");
}
