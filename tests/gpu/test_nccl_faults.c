/* The NCCL communicator refused, and, over the fake, at fault: ranks that never come, give up, get
 * stuck or disagree. Whatever happens, every rank learns why and nothing holds the GPU.
 */
#include "nccl_rig.h"

static void refusals(rank_context *self)
{
    gpu_rank r;
    EXPECT_FAILS(self, rank_create(&r, self, "/nowhere/libnccl.so.2"), FSDPC_ERR_UNSUPPORTED,
                 "cannot load NCCL: /nowhere/libnccl.so.2");
    fsdpc_control_config config = {
        .comm = {.size = self->size, .rank = self->rank, .device = r.device}};
    EXPECT_FAILS(self, fsdpc_comm_nccl_create(&config, &r.comm), FSDPC_ERR_VALUE, "same ranks");
    config.control = self->comm;
    config.comm.device = self->device;
    EXPECT_FAILS(self, fsdpc_comm_nccl_create(&config, &r.comm), FSDPC_ERR_VALUE, "'cpu'");
    config.comm.device = r.device;
    config.comm.size++;
    EXPECT_FAILS(self, fsdpc_comm_nccl_create(&config, &r.comm), FSDPC_ERR_VALUE, "to begin over");
    rank_destroy(&r);
}

#if defined(FSDPC_EMU)

static fsdpc_status no_memory(fsdpc_device *device, fsdpc_mem_kind kind, size_t bytes, void **out)
{
    (void)device;
    (void)kind;
    (void)bytes;
    (void)out;
    return fsdpc_fail(FSDPC_ERR_NOMEM, "no room in the inn");
}

/* The last rank has no memory for contributions: of sums nobody has, and all go on; values are
 * given up, which the others are told. */
static void full_device(rank_context *self)
{
    static const fsdpc_slice band = {.numel = 64};
    bool guilty = self->rank == self->size - 1;
    gpu_rank r;
    fsdpc_buffer *buffer;
    void *shard;
    EXPECT_OK(self, rank_create(&r, self, library));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, 4096, &buffer));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_GRAD, 4096, &shard));
    fsdpc_coll sums = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                       .what = "layers.3",
                       .slices = &band,
                       .n_slices = 1,
                       .buffer = buffer,
                       .shard = shard,
                       .scale = 1,
                       .tree = true};
    fsdpc_coll values = {
        .kind = FSDPC_COLL_ALL_REDUCE, .what = "losses", .send = shard, .recv = shard, .numel = 64};
    const fsdpc_device_ops *ops = r.device->ops;
    fsdpc_device_ops unsharded = *ops;
    unsharded.alloc = no_memory;
    if (guilty)
        r.device->ops = &unsharded;
    EXPECT_FAILS(self, fsdpc_comm_run(r.comm, &sums), FSDPC_ERR_NOMEM, "no room in the inn");
    r.device->ops = ops;
    EXPECT_OK(self, fsdpc_comm_run(r.comm, &sums));
    if (guilty)
        r.device->ops = &unsharded;
    fsdpc_status status = fsdpc_comm_run(r.comm, &values);
    EXPECT(self, status < 0 && strstr(fsdpc_last_error(), "no room in the inn"), "%s: %s",
           fsdpc_status_text(status), fsdpc_last_error());
    r.device->ops = ops;
    fsdpc_device_free(r.device, shard);
    fsdpc_buffer_destroy(buffer);
    rank_destroy(&r);
}

static pthread_barrier_t all_here;
static const double SOON_S = 0.5;

typedef enum fault_case {
    NEVER_BEGINS,
    ABSENT, /* a rank that does not come */
    ABORTS, /* one that gives up, its operation posted but stuck */
    REMOTE_ERROR,
    DISAGREES,
    STUCK,
    STUCK_BEHIND,     /* the host, ahead of it, reads a value */
    STUCK_FAR_BEHIND, /* the host reads none, and goes on and on */
    STUCK_SELDOM,     /* it reads none, and seldom does anything */
    STUCK_CHANNELS,   /* an operation of the other channel waits for it on the GPU */
    STUCK_GROUPS,     /* one of another group does */
    FAULT_CASES,
} fault_case;

static const fsdpc_slice slice = {.numel = 64};

static fsdpc_coll reduction(const gpu_rank *r, fsdpc_buffer *buffer, void *shard, int unit)
{
    return (fsdpc_coll){.kind = FSDPC_COLL_REDUCE_SCATTER,
                        .unit = unit,
                        .what = "layers.3",
                        .slices = &slice,
                        .n_slices = 1,
                        .stream = r->reduces,
                        .buffer = buffer,
                        .shard = shard,
                        .scale = 1};
}

static fsdpc_status reduce(gpu_rank *r, fsdpc_buffer *buffer, void *shard, int unit,
                           const char *abort_reason)
{
    fsdpc_work work = {0};
    fsdpc_coll op = reduction(r, buffer, shard, unit);
    FSDPC_TRY(fsdpc_comm_post(r->comm, &op, &work));
    if (abort_reason)
        fsdpc_comm_abort(r->comm, abort_reason);
    return fsdpc_comm_wait(&work);
}

/* Without waiting for any of them, until it is told. */
static fsdpc_status reduce_ahead(gpu_rank *r, fsdpc_buffer *buffer, void *shard, int times)
{
    float value;
    for (int i = 0; i < times; i++) {
        fsdpc_work work = {0};
        fsdpc_coll op = reduction(r, buffer, shard, 3);
        FSDPC_TRY(fsdpc_comm_post(r->comm, &op, &work));
        FSDPC_TRY(fsdpc_comm_order(&work, &r->plain));
        EXPECT(r->self, !work.comm, "what was ordered may be posted again");
        EXPECT_OK(r->self, fsdpc_buffer_idle_wait(buffer, "layers.3"));
    }
    return fsdpc_device_copy(r->device, &value, shard, sizeof value, NULL);
}

/* A post finds that an operation is overdue, though nobody waits for it. */
static fsdpc_status reduce_seldom(gpu_rank *r, fsdpc_buffer *buffer, void *shard)
{
    const int64_t old_ns = 1200000000;
    fsdpc_work work = {0};
    fsdpc_coll op = reduction(r, buffer, shard, 3);
    FSDPC_TRY(fsdpc_comm_post(r->comm, &op, &work));
    FSDPC_TRY(fsdpc_comm_order(&work, &r->plain));
    for (int64_t until = fsdpc_clock_ns() + old_ns; fsdpc_clock_ns() < until;)
        sched_yield();
    return fsdpc_comm_post(r->comm, &op, &work);
}

/* Of `group`, behind the first on the GPU, on the stream of gathers; in_channel: in the other one.
 */
static fsdpc_status second(gpu_rank *r, fsdpc_comm *group, void *values, bool in_channel)
{
    return fsdpc_comm_run(
        group, &(fsdpc_coll){.kind = in_channel ? FSDPC_COLL_ALL_GATHER : FSDPC_COLL_ALL_REDUCE,
                             .unit = -1,
                             .what = "layers.4",
                             .dtype = FSDPC_I64,
                             .op = FSDPC_RED_SUM,
                             .send = values,
                             .recv = values,
                             .stream = r->gathers,
                             .numel = 4});
}

static fsdpc_status reduce_then_second(gpu_rank *r, fsdpc_buffer *buffer, void *shard,
                                       fsdpc_comm *group)
{
    fsdpc_work work = {0};
    fsdpc_coll op = reduction(r, buffer, shard, 3);
    FSDPC_TRY(fsdpc_comm_post(r->comm, &op, &work));
    FSDPC_TRY(fsdpc_comm_order(&work, r->gathers));
    int64_t begun = fsdpc_clock_ns();
    fsdpc_status status = second(r, group, (char *)shard + 1024, group == r->comm);
    EXPECT(r->self, (double)(fsdpc_clock_ns() - begun) * 1e-9 < 4, "it took %.3g s",
           (double)(fsdpc_clock_ns() - begun) * 1e-9);
    return status;
}

/* The last rank is at fault; what all of them learn. */
static void fault(rank_context *self)
{
    static const char *const named[] = {
        [NEVER_BEGINS] = "the beginning of NCCL of 'reductions'",
        [ABSENT] = "rank %d",
        [ABORTS] = "out of cheese",
        [REMOTE_ERROR] = "rank %d in reduce_scatter of 'layers.3' (unit 3): NCCL failed to run it",
        [STUCK] = "reduce_scatter of 'layers.3'",
        [STUCK_BEHIND] = "in what the GPU was given",
        [STUCK_FAR_BEHIND] = "s in reduce_scatter of 'layers.3'",
        [STUCK_SELDOM] = "reduce_scatter of 'layers.3' (unit 3) has not ended",
        [STUCK_CHANNELS] = "s in all_gather of 'layers.4'",
        [STUCK_GROUPS] = "s in all_reduce of 'layers.4'",
        [DISAGREES] = "rank %d posted reduce_scatter of 'layers.3' (unit 4",
    };
    fault_case which = *(const fault_case *)self->arg;
    int last = self->size - 1;
    bool guilty = self->rank == last;
    gpu_rank r;
    fsdpc_buffer *buffer = NULL;
    fsdpc_comm *group;
    void *shard;
    EXPECT_OK(self, rank_create(&r, self, library));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_GRAD, 4096, &shard));
    group = r.comm;
    if (which == STUCK_GROUPS)
        EXPECT_OK(self, fsdpc_comm_split(r.comm, 0, self->rank, &group));
    if (which == NEVER_BEGINS) {
        break_nccl(FAKE_NCCL_NEVER_BEGINS, last);
        r.comm->timeout_s = SOON_S; /* of what NCCL does; the control's is generous */
    }
    if (which == ABSENT)
        r.comm->control->timeout_s = SOON_S;
    fsdpc_status status = FSDPC_ERR_STATE;
    if (which != ABSENT || !guilty)
        status = fsdpc_buffer_create(r.comm, 4096, &buffer);
    if (which != NEVER_BEGINS && which != ABSENT) {
        EXPECT(self, status == FSDPC_OK, "%s", fsdpc_last_error());
        EXPECT_OK(self, reduce(&r, buffer, shard, 3, NULL)); /* while all is well */
        EXPECT_OK(self, reduce_ahead(&r, buffer, shard, 100));
        EXPECT_OK(self, fsdpc_device_fill(r.device, shard, 0, 4096, NULL));
        EXPECT_OK(self, second(&r, group, (char *)shard + 1024, group == r.comm));
        pthread_barrier_wait(&all_here);
        if (guilty && which != DISAGREES)
            break_nccl(which == REMOTE_ERROR ? FAKE_NCCL_REMOTE_ERROR : FAKE_NCCL_STUCK, last);
        pthread_barrier_wait(&all_here);
        if (which == STUCK || which >= STUCK_BEHIND)
            r.comm->timeout_s = group->timeout_s = SOON_S;
        if (which == STUCK_SELDOM)
            status = reduce_seldom(&r, buffer, shard);
        else if (which == STUCK_CHANNELS || which == STUCK_GROUPS)
            status = reduce_then_second(&r, buffer, shard, group);
        else if (which == STUCK_BEHIND || which == STUCK_FAR_BEHIND)
            status = reduce_ahead(&r, buffer, shard, which == STUCK_BEHIND ? 3 : 1000);
        else
            status = reduce(&r, buffer, shard, 3 + (which == DISAGREES && guilty),
                            which == ABORTS && guilty ? "out of cheese" : NULL);
    }
    if (which != ABSENT || !guilty) {
        char expected[128];
        snprintf(expected, sizeof expected, named[which], last);
        EXPECT(self, status < 0 && strstr(fsdpc_last_error(), expected), "case %d: %s: %s",
               (int)which, fsdpc_status_text(status), fsdpc_last_error());
        EXPECT(self, r.comm->poison[0], "case %d: poisoned", (int)which);
        EXPECT_FAILS(self, fsdpc_comm_run(r.comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}),
                     FSDPC_ERR_POISONED, "failed earlier");
        EXPECT_OK(self, fsdpc_stream_sync(r.reduces)); /* nothing holds the GPU any more */
        EXPECT_OK(self, fsdpc_stream_sync(r.gathers));
    }
    pthread_barrier_wait(&all_here);
    if (guilty)
        break_nccl(FAKE_NCCL_WELL, 0);
    if (group != r.comm)
        fsdpc_comm_destroy(group);
    fsdpc_buffer_destroy(buffer);
    fsdpc_device_free(r.device, shard);
    rank_destroy(&r);
}

/* What no abort ends holds the GPU, and nobody waits for it: the error is told, and all that CUDA
 * would wait for stays. */
static void clinging(rank_context *self)
{
    gpu_rank r;
    fsdpc_buffer *buffer = NULL;
    void *shard;
    float value;
    EXPECT_OK(self, rank_create(&r, self, library));
    EXPECT_OK(self, fsdpc_device_alloc(r.device, FSDPC_MEM_GRAD, 4096, &shard));
    EXPECT_OK(self, fsdpc_buffer_create(r.comm, 4096, &buffer));
    EXPECT_OK(self, reduce(&r, buffer, shard, 3, NULL));
    pthread_barrier_wait(&all_here);
    break_nccl(FAKE_NCCL_CLINGS, -1);
    pthread_barrier_wait(&all_here);
    r.comm->timeout_s = SOON_S;
    int64_t begun = fsdpc_clock_ns();
    fsdpc_coll op = reduction(&r, buffer, shard, 3);
    EXPECT_FAILS(self, fsdpc_comm_run(r.comm, &op), FSDPC_ERR_TIMEOUT, "'layers.3'");
    EXPECT_FAILS(self, fsdpc_stream_sync(r.reduces), FSDPC_ERR_STATE, "hold the GPU");
    EXPECT_OK(self, fsdpc_device_copy(r.device, &value, shard, sizeof value, NULL));
    fsdpc_buffer_destroy(buffer);
    fsdpc_device_free(r.device, shard);
    rank_destroy(&r);
    EXPECT(self, (double)(fsdpc_clock_ns() - begun) * 1e-9 < 20, "it took %.3g s",
           (double)(fsdpc_clock_ns() - begun) * 1e-9);
    pthread_barrier_wait(&all_here);
}

static void test_clinging(void)
{
    const int64_t patience_ns = 20000000000;
    int open, out_of_place, forbidden;
    pthread_barrier_init(&all_here, NULL, 2);
    ranks_run_threads(2, clinging, &(rank_options){0});
    pthread_barrier_destroy(&all_here);
    count_nccl(&open, &out_of_place, &forbidden);
    CHECK_NOTE(open == 2, "%d communicators are open", open);
    break_nccl(FAKE_NCCL_WELL, 0);
    for (int64_t until = fsdpc_clock_ns() + patience_ns; open > 0 && fsdpc_clock_ns() < until;) {
        sched_yield();
        count_nccl(&open, &out_of_place, &forbidden);
    }
}

/* A peer gives up while NCCL is opened: this rank is told why, and keeps nothing. */
static void beginning_alone(rank_context *self)
{
    gpu_rank r;
    if (self->rank == 1) {
        fsdpc_comm_abort(self->comm, "out of cheese");
        return;
    }
    fsdpc_status status = rank_create(&r, self, library);
    EXPECT(self, status < 0 && strstr(fsdpc_last_error(), "out of cheese"), "%s",
           fsdpc_last_error());
    rank_destroy(&r);
}

static void test_faults(void)
{
    for (int size = 2; size <= 3; size++)
        for (int which = 0; which < FAULT_CASES; which++) {
            fault_case arg = (fault_case)which;
            pthread_barrier_init(&all_here, NULL, (unsigned)size);
            ranks_run_threads(size, fault, &(rank_options){.arg = &arg});
            pthread_barrier_destroy(&all_here);
        }
}

#endif

int main(void)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_nccl_faults");
    ranks_run_threads(2, refusals, &(rank_options){0}); /* before any NCCL is there */
#if defined(FSDPC_EMU)
    fake_open();
    ranks_run_threads(3, full_device, &(rank_options){0});
    ranks_run_threads(2, beginning_alone, &(rank_options){0});
    test_faults();
    test_clinging();
    fake_check();
#endif
    return check_report("test_nccl_faults");
}
