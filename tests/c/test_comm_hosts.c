/* Several hosts: the collectives that one host has, gathers over a transport, bytes counted,
 * errors. */
#include "comm_suite.h"

#include "hosts_ranks.h"

static const struct shape {
    int hosts, local_size;
} shapes[] = {{2, 1}, {2, 2}, {4, 1}, {3, 2}, {2, 3}};

static void collectives(rank_context *self)
{
    copying_collectives(self);
    extrema_carry_nan(self);
    reductions(self);
    pipelined(self);
    run_ahead(self);
    agreements(self);
    if (ranks_of_host == 1 || ranks_of_host % 2 == 0) /* its rows and columns do not cross */
        splits(self);
}

/* ---- Epochs and gathers ---- */

enum { ROW = 3000, FEW = 77, EPOCHS = 12 };

static uint32_t value_of(int rank, int version, int j)
{
    return (uint32_t)(version * 100000 + rank * 10000 + j % 9973);
}

static void gather(rank_context *self, fsdpc_param_buffer *param_buffer, const fsdpc_slice *slices,
                   size_t n)
{
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                                             .what = "block",
                                                             .dtype = FSDPC_I32,
                                                             .epoch = param_buffer->epoch,
                                                             .param_buffer = param_buffer,
                                                             .slices = slices,
                                                             .n_slices = n}));
}

static uint64_t sent_of(const rank_context *self)
{
    return ((const host_rank *)(const void *)self)->transport->sent_bytes;
}

/* Memory of operations on their way. */
static size_t rooms_of(const rank_context *self)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(self->mem, &stats);
    return stats.now_bytes[FSDPC_MEM_OTHER];
}

/* Every third epoch changes nothing. Two bands, the second one short. */
static void epochs(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    int size = self->size, version = 0;
    const fsdpc_slice slices[] = {
        {.unsharded_offset = 0, .numel = ROW},
        {.unsharded_offset = (size_t)(ROW * size), .numel = FEW, .shard_offset = ROW},
    };
    size_t bytes = 4 * (size_t)((ROW + FEW) * size);
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, bytes, &param_buffer));
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        bool changes = epoch % 3 != 0;
        fsdpc_epoch_note note = {.kind = 1, .unit = 3, .steps = (uint64_t)epoch}, all;
        note.bits = changes && self->rank == epoch % size ? FSDPC_EPOCH_CHANGED : 0;
        version += changes;
        EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
        EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, "block", &all));
        EXPECT(self, all.bits == (changes ? FSDPC_EPOCH_CHANGED : 0), "bits %u", all.bits);
        if (changes) {
            uint32_t *own = (uint32_t *)(void *)param_buffer->write;
            for (int j = 0; j < ROW; j++)
                own[self->rank * ROW + j] = value_of(self->rank, version, j);
            for (int j = 0; j < FEW; j++)
                own[ROW * size + self->rank * FEW + j] = value_of(self->rank, version, ROW + j);
            EXPECT_OK(self, fsdpc_param_buffer_copied_in(param_buffer));
            EXPECT_OK(self, fsdpc_param_buffer_copy_in_wait(param_buffer, "block"));
        }
        uint64_t before = sent_of(self);
        size_t rooms = rooms_of(self);
        gather(self, param_buffer, slices, 2);
        EXPECT(self, rooms_of(self) == rooms, "rows went by way of %zu bytes", rooms_of(self));
        uint64_t once = sent_of(self) - before;
        gather(self, param_buffer, slices, 2); /* what was brought is there */
        EXPECT(self, sent_of(self) - before == once && (once > 0) == changes, "%d bytes, then %d",
               (int)once, (int)(sent_of(self) - before));
        const uint32_t *unsharded = (const uint32_t *)(const void *)param_buffer->read;
        size_t wrong = 0;
        for (int r = 0; r < size; r++)
            for (int j = 0; j < ROW; j++)
                wrong += unsharded[r * ROW + j] != value_of(r, version, j);
        for (int j = 0; j < FEW * size; j++)
            wrong += unsharded[ROW * size + j] != value_of(j / FEW, version, ROW + j % FEW);
        EXPECT(self, wrong == 0, "epoch %d: %zu elements are of another version", epoch, wrong);
    }
    fsdpc_param_buffer_destroy(param_buffer);
}

/* Held on the last host, changed on the first: all refuse, and may go on. */
static void held_and_changed(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_epoch_note note = {.kind = 1}, all;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    for (int holder = 0; holder < self->size; holder += self->size - 1) {
        note.bits = self->rank == holder ? FSDPC_EPOCH_HELD : 0;
        note.bits |= self->rank == 0 ? FSDPC_EPOCH_CHANGED : 0; /* holder 0: on one host */
        EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
        EXPECT_FAILS(self, fsdpc_param_buffer_epoch_wait(param_buffer, "block", &all),
                     FSDPC_ERR_STATE, "reshard()");
    }
    note.bits = 0;
    EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
    EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, "block", &all));
    fsdpc_param_buffer_destroy(param_buffer);
}

/* ---- A group that another thread drives ---- */

enum { TURNS = 40 };

/* The sum over ranks of numbers that change from turn to turn. */
static fsdpc_status sum_turns(fsdpc_comm *comm, int64_t first)
{
    for (int turn = 0; turn < TURNS; turn++) {
        int64_t mine[3] = {first, comm->rank, turn}, all[3];
        FSDPC_TRY(fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                     .unit = -1,
                                                     .what = "turns",
                                                     .dtype = FSDPC_I64,
                                                     .send = mine,
                                                     .recv = all,
                                                     .numel = 3}));
        int64_t n = comm->size;
        if (all[0] != n * first || all[1] != n * (n - 1) / 2 || all[2] != n * turn)
            return fsdpc_fail(FSDPC_ERR_INTERNAL, "turn %d: %lld, %lld, %lld", turn,
                              (long long)all[0], (long long)all[1], (long long)all[2]);
    }
    return FSDPC_OK;
}

typedef struct apart {
    fsdpc_comm *comm;
    fsdpc_status status;
    char text[256];
} apart;

static void *drive_apart(void *arg)
{
    apart *self = arg;
    self->status = sum_turns(self->comm, 1000);
    snprintf(self->text, sizeof self->text, "%s", fsdpc_last_error());
    return NULL;
}

/* As a save does that runs beside training. */
static void set_apart(rank_context *self)
{
    apart other = {0};
    pthread_t thread;
    EXPECT_OK(self, fsdpc_comm_split(self->comm, 0, self->rank, &other.comm));
    fsdpc_comm_set_apart(other.comm);
    EXPECT(self, pthread_create(&thread, NULL, drive_apart, &other) == 0, "no thread");
    EXPECT_OK(self, sum_turns(self->comm, 7));
    pthread_join(thread, NULL);
    EXPECT(self, other.status == FSDPC_OK, "%s", other.text);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_comm_destroy(other.comm);
}

/* ---- Codecs ---- */

enum { CODED_ROW = 96, CODED_ROWS = 3, CODED = CODED_ROW * CODED_ROWS };

/* A number that every codec keeps: the largest level of its block, or 0. */
static float coded_value(int rank, size_t i)
{
    return i % 7 ? 0 : i % 2 ? 3.0f * (float)(rank + 1) : -3.0f * (float)(rank + 1);
}

static void coded_gather(rank_context *self, fsdpc_codec codec)
{
    fsdpc_param_buffer *param_buffer;
    const size_t numel = CODED;
    const fsdpc_slice slice = {.numel = numel, .row = CODED_ROW};
    fsdpc_epoch_note note = {.kind = 1, .bits = FSDPC_EPOCH_CHANGED}, all;
    EXPECT_OK(self,
              fsdpc_param_buffer_create(self->comm, 4 * numel * (size_t)self->size, &param_buffer));
    EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
    EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, "block", &all));
    float *own = (float *)(void *)param_buffer->write + (size_t)self->rank * numel;
    for (size_t i = 0; i < numel; i++)
        own[i] = coded_value(self->rank, i);
    EXPECT_OK(self, fsdpc_param_buffer_copied_in(param_buffer));
    EXPECT_OK(self, fsdpc_param_buffer_copy_in_wait(param_buffer, "block"));
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                                             .what = "block",
                                                             .dtype = FSDPC_F32,
                                                             .codec = codec,
                                                             .epoch = param_buffer->epoch,
                                                             .param_buffer = param_buffer,
                                                             .slices = &slice,
                                                             .n_slices = 1}));
    const float *found = (const float *)(const void *)param_buffer->read;
    for (int rank = 0, wrong = 0; rank < self->size; rank++, wrong = 0) {
        for (size_t i = 0; i < numel; i++)
            wrong += found[(size_t)rank * numel + i] != coded_value(rank, i);
        EXPECT(self, wrong == 0, "%s: %d of rank %d", fsdpc_codec_name(codec), wrong, rank);
    }
    fsdpc_param_buffer_destroy(param_buffer);
}

/* Sums a buffer of `dtype` into an fp32 shard. */
static fsdpc_status reduce_f32(rank_context *self, fsdpc_coll_kind kind, fsdpc_dtype dtype,
                               fsdpc_codec codec, const fsdpc_slice *slice, fsdpc_buffer *buffer,
                               float *shard)
{
    return fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = kind,
                                                    .what = "grads",
                                                    .dtype = dtype,
                                                    .codec = codec,
                                                    .slices = slice,
                                                    .n_slices = 1,
                                                    .buffer = buffer,
                                                    .shard = shard,
                                                    .shard_dtype = FSDPC_F32,
                                                    .round_dtype = FSDPC_F32,
                                                    .scale = 1});
}

static void coded_sums(rank_context *self, fsdpc_codec codec, fsdpc_coll_kind kind)
{
    fsdpc_buffer *buffer;
    bool all = kind == FSDPC_COLL_REDUCE_ALL;
    const size_t numel = CODED, whole = all ? numel : numel * (size_t)self->size;
    const fsdpc_slice slice = {.numel = numel, .row = CODED_ROW};
    float shard[CODED];
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, 4 * whole, &buffer));
    for (size_t i = 0; i < whole; i++)
        ((float *)(void *)buffer->data)[i] = coded_value(1, i);
    EXPECT_OK(self, reduce_f32(self, kind, FSDPC_F32, codec, &slice, buffer, shard));
    int wrong = 0;
    for (size_t i = 0; i < numel; i++)
        wrong += shard[i] !=
                 (float)self->size * coded_value(1, all ? i : (size_t)self->rank * numel + i);
    EXPECT(self, wrong == 0, "%s: %d sums", fsdpc_codec_name(codec), wrong);
    EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "block"));
    fsdpc_buffer_destroy(buffer);
}

static void codecs(rank_context *self)
{
    for (int codec = FSDPC_CODEC_EXACT; codec < FSDPC_CODEC_COUNT; codec++) {
        coded_gather(self, (fsdpc_codec)codec);
        coded_sums(self, (fsdpc_codec)codec, FSDPC_COLL_REDUCE_SCATTER);
        coded_sums(self, (fsdpc_codec)codec, FSDPC_COLL_REDUCE_ALL);
    }
}

/* ---- What crosses, counted ---- */

enum { COUNTED = 5000, HEADER = 112 };

static size_t part_numel(size_t numel, int i, int parts)
{
    size_t most = (numel + (size_t)parts - 1) / (size_t)parts, first = (size_t)i * most;
    return first >= numel ? 0 : first + most > numel ? numel - first : most;
}

/* Replicas: two hosts exchange a rank's part of the sums; more add a share each, and send it on. */
static void counts_of_replicas(rank_context *self)
{
    int hosts = self->size / ranks_of_host, own = self->rank / ranks_of_host;
    size_t part = part_numel(COUNTED, self->rank % ranks_of_host, ranks_of_host), numel = part;
    if (hosts > 2)
        numel = part - part_numel(part, own, hosts) +
                (size_t)(hosts - 1) * part_numel(part, own, hosts);
    fsdpc_buffer *buffer;
    float *shard = calloc(COUNTED, sizeof *shard);
    fsdpc_slice slice = {.numel = COUNTED};
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, (size_t)(4 * COUNTED), &buffer));
    for (size_t i = 0; i < COUNTED; i++)
        ((float *)(void *)buffer->data)[i] = (float)(i % 91) * (float)(self->rank + 1);
    uint64_t before = sent_of(self);
    EXPECT_OK(self, reduce_f32(self, FSDPC_COLL_REDUCE_ALL, FSDPC_F32, FSDPC_CODEC_EXACT, &slice,
                               buffer, shard));
    uint64_t sent = sent_of(self) - before, want = numel * 4 + (uint64_t)(hosts - 1) * HEADER;
    EXPECT(self, sent == want, "%llu bytes, want %llu", (unsigned long long)sent,
           (unsigned long long)want);
    int wrong = 0, ranks = self->size * (self->size + 1) / 2;
    for (size_t i = 0; i < COUNTED; i++)
        wrong += shard[i] != (float)(i % 91) * (float)ranks;
    EXPECT(self, wrong == 0, "%d sums", wrong);
    EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "block"));
    fsdpc_buffer_destroy(buffer);
    free(shard);
}

/* In a reduction, each rank sends headers and, in fp32, the sums of the other hosts' slices; only
 * headers if another transport moves the bytes, as in a graph. */
static void counts(rank_context *self)
{
    int hosts = self->size / ranks_of_host;
    fsdpc_buffer *buffer;
    float *shard = calloc(COUNTED, sizeof *shard);
    fsdpc_slice slice = {.numel = COUNTED};
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, (size_t)(2 * COUNTED * self->size), &buffer));
    memset(buffer->data, 0, (size_t)(2 * COUNTED * self->size));
    uint64_t before = sent_of(self);
    EXPECT_OK(self, reduce_f32(self, FSDPC_COLL_REDUCE_SCATTER, FSDPC_BF16, FSDPC_CODEC_EXACT,
                               &slice, buffer, shard));
    uint64_t sent = sent_of(self) - before, want = (uint64_t)(hosts - 1) * (COUNTED * 4 + HEADER);
    EXPECT(self, sent == want, "%llu bytes, want %llu", (unsigned long long)sent,
           (unsigned long long)want);
    for (int kind = FSDPC_COLL_GATHER; kind <= FSDPC_COLL_REPLAY; kind++) {
        before = sent_of(self);
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = (fsdpc_coll_kind)kind,
                                                                 .what = "grads",
                                                                 .slices = &slice,
                                                                 .n_slices = 1,
                                                                 .agree_only = true}));
        sent = sent_of(self) - before;
        EXPECT(self, sent == (uint64_t)(hosts - 1) * HEADER, "kind %d: %d bytes", kind, (int)sent);
    }
    fsdpc_buffer_destroy(buffer);
    free(shard);
}

/* ---- Disagreement and failure ---- */

static void operations_differ_in(rank_context *self, bool agree_only)
{
    int host = self->rank / ranks_of_host;
    int64_t x = 0;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                     .what = host == 1 ? "norms" : "losses",
                     .agree_only = agree_only,
                     .dtype = FSDPC_I64,
                     .send = &x,
                     .recv = &x,
                     .numel = 1};
    fsdpc_status status = fsdpc_comm_run(self->comm, &op);
    EXPECT(self,
           status == FSDPC_ERR_MISMATCH || status == FSDPC_ERR_POISONED || status == FSDPC_ERR_PEER,
           "%s", fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "norms") && strstr(fsdpc_last_error(), "losses"), "%s",
           fsdpc_last_error());
}

static void operations_differ(rank_context *self)
{
    operations_differ_in(self, false);
}

static void agreements_differ(rank_context *self)
{
    operations_differ_in(self, true);
}

/* The last rank gives up while the others wait: they learn why, on its host and on others. */
static void one_gives_up(rank_context *self)
{
    const fsdpc_coll barrier = {.kind = FSDPC_COLL_BARRIER, .what = "end"};
    fsdpc_status status = fsdpc_comm_run(self->comm, &barrier); /* all ranks are there */
    if (self->rank == self->size - 1) {
        EXPECT_OK(self, status);
        fsdpc_comm_abort(self->comm, "out of disk");
        return;
    }
    char last[32];
    snprintf(last, sizeof last, "rank %d: out of disk", self->size - 1);
    if (status == FSDPC_OK)
        status = fsdpc_comm_run(self->comm, &barrier);
    EXPECT(self, status < 0 && strstr(fsdpc_last_error(), last), "%s", fsdpc_last_error());
    EXPECT_FAILS(self, fsdpc_comm_run(self->comm, &barrier), FSDPC_ERR_POISONED, "out of disk");
}

/* Ranks leave when they are done, while others of their host wait for a slow message. */
static void the_quick_leave(rank_context *self)
{
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_comm_leave(self->comm);
}

/* The last rank has left, and everybody else wants something of it. */
static void one_leaves_early(rank_context *self)
{
    const fsdpc_coll barrier = {.kind = FSDPC_COLL_BARRIER, .what = "end"};
    fsdpc_status status = fsdpc_comm_run(self->comm, &barrier);
    if (self->rank == self->size - 1) {
        EXPECT_OK(self, status);
        fsdpc_comm_leave(self->comm);
        return;
    }
    char left[32];
    snprintf(left, sizeof left, "rank %d", self->size - 1);
    if (status == FSDPC_OK)
        status = fsdpc_comm_run(self->comm, &barrier);
    EXPECT(self, status < 0 && strstr(fsdpc_last_error(), left), "%s", fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "left (it shut"), "%s", fsdpc_last_error());
}

/* The last rank gives up, and its own messages are slow. The others of its host hear of it on the
 * host, where they begin an epoch, and leave: other hosts learn from them what happened. */
static void those_who_heard_leave(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_epoch_note note = {.kind = 1}, all;
    char last[32];
    snprintf(last, sizeof last, "rank %d: out of disk", self->size - 1);
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    fsdpc_status status = fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER});
    if (self->rank == self->size - 1) {
        fsdpc_comm_abort(self->comm, "out of disk");
    } else {
        if (status == FSDPC_OK)
            status = fsdpc_param_buffer_arrive(param_buffer, &note);
        if (status == FSDPC_OK)
            status = fsdpc_param_buffer_epoch_wait(param_buffer, "block", &all);
        EXPECT(self, status < 0 && strstr(fsdpc_last_error(), last), "%s", fsdpc_last_error());
        fsdpc_comm_leave(self->comm);
    }
    fsdpc_param_buffer_destroy(param_buffer);
}

/* The last rank drops a group while it waits there for what the others send later. */
static void one_drops_a_group(rank_context *self)
{
    const fsdpc_coll barrier = {.kind = FSDPC_COLL_BARRIER, .what = "end"};
    enum { N = 100000 };
    fsdpc_comm *group = NULL;
    fsdpc_work work = {0};
    uint8_t *mine = calloc(1, N), *all = calloc(N, (size_t)self->size);
    fsdpc_coll values = {.kind = FSDPC_COLL_ALL_GATHER,
                         .what = "values",
                         .dtype = FSDPC_U8,
                         .send = mine,
                         .recv = all,
                         .numel = N};
    EXPECT_OK(self, fsdpc_comm_split(self->comm, 0, self->rank, &group));
    pthread_barrier_wait(&hosts_created); /* all have theirs */
    if (self->rank == self->size - 1) {
        EXPECT_OK(self, fsdpc_comm_post(group, &values, &work));
        EXPECT(self, fsdpc_comm_test(&work) == FSDPC_IN_PROGRESS, "nobody else has posted it");
        fsdpc_comm_destroy(group);
        EXPECT_FAILS(self, fsdpc_comm_run(self->comm, &barrier), FSDPC_ERR_POISONED, "dropping it");
    } else {
        fsdpc_status status = fsdpc_comm_run(self->comm, &barrier);
        if (status == FSDPC_OK) /* the last rank has come to its host's */
            status = fsdpc_comm_run(self->comm, &barrier);
        EXPECT(self, status < 0 && strstr(fsdpc_last_error(), "operations in flight"), "%s",
               fsdpc_last_error());
        fsdpc_comm_destroy(group);
    }
    free(mine);
    free(all);
}

static void crossing_groups_are_refused(rank_context *self)
{
    fsdpc_comm *part = NULL;
    int color = self->rank == 0 || self->rank == self->size - 1 ? 0 : 1;
    EXPECT_FAILS(self, fsdpc_comm_split(self->comm, color, 0, &part), FSDPC_ERR_UNSUPPORTED,
                 "whole hosts, or one of each");
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
}

int main(void)
{
    rank_options options = {.async = false};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        ranks_of_host = shapes[s].local_size;
        hosts_run(shapes[s].hosts, ranks_of_host, collectives, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, epochs, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, held_and_changed, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, set_apart, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, codecs, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, counts, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, counts_of_replicas, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, operations_differ, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, agreements_differ, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, one_gives_up, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, one_leaves_early, &options);
        hosts_run(shapes[s].hosts, ranks_of_host, one_drops_a_group, &options);
    }
    ranks_of_host = 2;
    hosts_run(2, 2, crossing_groups_are_refused, &options);
    hosts_slow = 0;
    hosts_run(2, 2, the_quick_leave, &options);
    hosts_slow = 3;
    hosts_run(2, 2, those_who_heard_leave, &options);
    hosts_slow = -1;
    hosts_run(2, 2, collectives, &(rank_options){.async = true});
    return check_report("test_comm_hosts");
}
