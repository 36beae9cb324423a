/* Epochs of a parameter buffer, and ranks that disagree: in the notes of an epoch, and in what they
 * post. */
#include "comm_ranks.h"

enum { SLICE = 3000, EPOCHS = 60 };

static const fsdpc_epoch_note forward = {.kind = 1, .unit = 3};

/* Does `rank` change its masters before epoch e? Known to all, so that all can check. */
static bool changes(int rank, int epoch)
{
    return epoch == 1 || (epoch * 7 + rank * 3) % 5 == 0;
}

static uint32_t version(int rank, int epoch)
{
    while (!changes(rank, epoch))
        epoch--;
    return (uint32_t)(epoch * 100 + rank);
}

static void run_epoch(rank_context *self, fsdpc_param_buffer *param_buffer, int epoch)
{
    bool mine = changes(self->rank, epoch), any = false;
    for (int r = 0; r < self->size; r++)
        any = any || changes(r, epoch);
    fsdpc_epoch_note note = forward, all;
    note.bits = (mine ? FSDPC_EPOCH_CHANGED : 0) | (self->rank == 0 ? FSDPC_EPOCH_GRAD : 0);
    note.steps = (uint64_t)epoch;
    EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
    EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, "layers.3", &all));
    EXPECT(self, all.bits == (FSDPC_EPOCH_GRAD | (any ? FSDPC_EPOCH_CHANGED : 0)), "bits %u",
           all.bits);
    EXPECT(self, all.kind == 1 && all.unit == 3 && all.steps == (uint64_t)epoch, "note");
    if (any) {
        uint32_t *own = (uint32_t *)(void *)param_buffer->write + self->rank * SLICE;
        for (int j = 0; j < SLICE && mine; j++)
            own[j] = version(self->rank, epoch);
        EXPECT_OK(self, fsdpc_param_buffer_copied_in(param_buffer));
        EXPECT_OK(self, fsdpc_param_buffer_copy_in_wait(param_buffer, "layers.3"));
    }
    const uint32_t *unsharded = (const uint32_t *)(const void *)param_buffer->read;
    size_t wrong = 0;
    for (int r = 0; r < self->size; r++)
        for (int j = 0; j < SLICE; j++)
            wrong += unsharded[r * SLICE + j] != version(r, epoch);
    EXPECT(self, wrong == 0, "epoch %d: %zu elements are of another version", epoch, wrong);
}

static void epochs(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_tier *tier = NULL;
    size_t bytes = (size_t)(4 * SLICE * self->size), in_memory = 0, on_disk = 0;
    if (self->arg) {
        fsdpc_tier_config config = {.folder = self->arg, .mem = self->mem};
        EXPECT_OK(self, fsdpc_tier_open(&config, &tier));
        EXPECT_OK(self, fsdpc_param_buffer_create_in(self->comm, bytes, tier, &param_buffer));
        on_disk = fsdpc_tier_stats_of(tier).file_bytes;
    } else {
        EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, bytes, &param_buffer));
    }
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(self->mem, &stats);
    in_memory = stats.now_bytes[FSDPC_MEM_UNSHARDED];
    EXPECT(self, (tier ? on_disk : in_memory) == (self->rank == 0 ? bytes : 0),
           "the parameter buffer is counted once a host");
    EXPECT(self, (tier ? in_memory : on_disk) == 0, "and only where it is");
    EXPECT(self, (param_buffer->read == param_buffer->write) == self->threads,
           "two mappings in a process");
    for (int epoch = 1; epoch <= EPOCHS; epoch++)
        run_epoch(self, param_buffer, epoch);
    EXPECT(self, param_buffer->epoch == EPOCHS, "epoch %d", (int)param_buffer->epoch);

    /* Held by the last rank, changed by the first: all refuse, and may go on. */
    fsdpc_epoch_note note = forward, all;
    note.bits = self->rank == self->size - 1 ? FSDPC_EPOCH_HELD : 0;
    note.bits |= self->rank == 0 ? FSDPC_EPOCH_CHANGED : 0;
    EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
    EXPECT_FAILS(self, fsdpc_param_buffer_epoch_wait(param_buffer, "layers.3", &all),
                 FSDPC_ERR_STATE, "reshard()");
    EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &forward));
    EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, "layers.3", &all));
    fsdpc_param_buffer_destroy(param_buffer);
    EXPECT(self, !tier || fsdpc_tier_stats_of(tier).file_bytes == 0, "its file is gone");
    fsdpc_tier_release(tier);
}

/* A rank that comes late may learn one call earlier what the others found, and finds the
 * communicator closed by it then. */
static bool is_told(fsdpc_status status)
{
    return status == FSDPC_ERR_MISMATCH || status == FSDPC_ERR_POISONED;
}

/* Begins an epoch; a rank that comes late may find at once what another has found. */
static fsdpc_status begin(fsdpc_param_buffer *param_buffer, const fsdpc_epoch_note *note,
                          const char *unit)
{
    fsdpc_epoch_note all;
    fsdpc_status status = fsdpc_param_buffer_arrive(param_buffer, note);
    return status == FSDPC_OK ? fsdpc_param_buffer_epoch_wait(param_buffer, unit, &all) : status;
}

/* ---- Disagreement ---- */

static const char *const note_cases[] = {"kind", "unit", "steps"};

static const char *kind_text(uint32_t kind)
{
    return kind == 1 ? "a forward" : "a step";
}

static void notes_differ(rank_context *self)
{
    const char *which = self->arg;
    fsdpc_epoch_note note = forward;
    bool odd = self->rank == self->size - 1;
    note.kind += odd && strcmp(which, "kind") == 0;
    note.unit += odd && strcmp(which, "unit") == 0;
    note.steps += odd && strcmp(which, "steps") == 0;
    fsdpc_param_buffer *param_buffer;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 64, &param_buffer));
    fsdpc_comm_locate(self->comm, "forward", odd ? "layers.4" : "layers.3");
    param_buffer->kind_text = kind_text;
    fsdpc_status status = begin(param_buffer, &note, "layers.3");
    EXPECT(self, is_told(status), "%s: %s", which, fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "rank 0 begins one by a forward"), "%s",
           fsdpc_last_error());
    EXPECT(self, note.kind == 1 || strstr(fsdpc_last_error(), "by a step"), "%s",
           fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "in forward of 'layers.4'"), "%s", fsdpc_last_error());
    EXPECT_FAILS(self, fsdpc_param_buffer_arrive(param_buffer, &note), FSDPC_ERR_POISONED,
                 "disagree");
    fsdpc_param_buffer_destroy(param_buffer);
}

/* A late gather is done when all have posted it, with whatever they wrote before. */
static void late_gathers_meet(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    fsdpc_slice slice = {.numel = 32};
    fsdpc_coll gather = {.kind = FSDPC_COLL_GATHER,
                         .unit = 1,
                         .what = "embed",
                         .param_buffer = param_buffer,
                         .slices = &slice,
                         .n_slices = 1,
                         .after_copy_in = true};
    for (int round = 1; round < 20; round++) {
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
        for (int i = 0; self->rank > 0 && i < 200; i++)
            sched_yield();
        param_buffer->write[self->rank] = (unsigned char)round;
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &gather));
        for (int p = 0; p < self->size; p++)
            EXPECT(self, param_buffer->read[p] == round, "rank %d shows %d", p,
                   param_buffer->read[p]);
    }
    fsdpc_param_buffer_destroy(param_buffer);
}

/* Two parameter buffers, which the odd rank uses in the other order: without a look at it each
 * would wait for the other until the deadline. */
static void orders_differ(rank_context *self)
{
    bool odd = self->rank == self->size - 1;
    fsdpc_param_buffer *param_buffers[2];
    for (int i = 0; i < 2; i++)
        EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 64, &param_buffers[i]));
    fsdpc_status status = FSDPC_OK;
    for (int i = 0; i < 3 && status == FSDPC_OK; i++) /* the same order is none, however often */
        status = begin(param_buffers[i % 2], &forward, "both");
    fsdpc_comm_locate(self->comm, "forward", odd ? "teacher" : "student");
    int64_t start = fsdpc_clock_ns();
    if (status == FSDPC_OK)
        status = begin(param_buffers[odd], &forward, "root");
    EXPECT(self, is_told(status), "%s", fsdpc_status_text(status));
    EXPECT(self, strstr(fsdpc_last_error(), "in forward of 'teacher'"), "%s", fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "in forward of 'student'"), "%s", fsdpc_last_error());
    EXPECT(self, fsdpc_clock_ns() - start < 5000000000, "not at once");
    for (int i = 0; i < 2; i++)
        fsdpc_param_buffer_destroy(param_buffers[i]);
}

enum {
    OP_UNIT,
    OP_NAME,
    OP_KIND,
    OP_BYTES,
    OP_SLICES,
    OP_EPOCH,
    OP_SCALE,
    OP_EARLIER,
    OP_AGREE_ONLY,
    OP_CASES
};

/* The odd rank posts something else; everybody learns it before any number is used. */
static void operations_differ(rank_context *self)
{
    int which = *(const int *)self->arg;
    bool odd = self->rank == self->size - 1;
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer;
    float shard[64];
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    fsdpc_status made = fsdpc_buffer_create(self->comm, 4096, &buffer);
    if (made != FSDPC_OK) { /* it woke up late in there, when the others had found the gather */
        EXPECT(self, which == OP_EARLIER && is_told(made), "%s", fsdpc_last_error());
        fsdpc_param_buffer_destroy(param_buffer);
        return;
    }
    fsdpc_slice slice = {.numel = 32};
    fsdpc_coll gather = {
        .kind = FSDPC_COLL_GATHER, .unit = 1, .what = "embed", .param_buffer = param_buffer};
    gather.slices = &slice;
    gather.n_slices = 1;
    fsdpc_coll reduce = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                         .unit = 2,
                         .what = "layers.3",
                         .slices = &slice,
                         .n_slices = 1,
                         .buffer = buffer,
                         .shard = shard,
                         .scale = 1,
                         .epoch = 9};
    gather.unit += odd && which == OP_EARLIER;
    fsdpc_status status = fsdpc_comm_run(self->comm, &gather);
    if (which != OP_EARLIER) { /* nobody errs before all are here */
        EXPECT(self, status == FSDPC_OK, "%s", fsdpc_last_error());
        /* a rank that wakes up late in here may learn already what the others found behind it */
        status = fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER});
    }
    reduce.unit += odd && (which == OP_UNIT || which == OP_AGREE_ONLY);
    reduce.agree_only = which == OP_AGREE_ONLY;
    reduce.what = odd && which == OP_NAME ? "layers.4" : "layers.3";
    slice.numel -= odd && which == OP_BYTES;
    slice.unsharded_offset += odd && which == OP_SLICES;
    reduce.epoch += odd && which == OP_EPOCH;
    reduce.scale += odd && which == OP_SCALE ? 1.0f : 0.0f;
    fsdpc_coll end = {.kind = FSDPC_COLL_BARRIER, .what = "end"};
    if (status == FSDPC_OK)
        status = fsdpc_comm_run(self->comm, odd && which == OP_KIND ? &end : &reduce);
    char expected[64];
    snprintf(expected, sizeof expected, "rank %d posted", self->size - 1);
    EXPECT(self, is_told(status), "case %d: %s %s", which, fsdpc_status_text(status),
           fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), "ranks disagree in operation"), "case %d: %s", which,
           fsdpc_last_error());
    EXPECT(self, strstr(fsdpc_last_error(), expected) || self->size > 2, "case %d: %s", which,
           fsdpc_last_error());
    const char *named = which == OP_EARLIER ? "gather of 'embed'" : "reduce_scatter of 'layers.3'";
    EXPECT(self, strstr(fsdpc_last_error(), named), "case %d: %s", which, fsdpc_last_error());
    EXPECT(self, self->comm->poison[0], "poisoned");
    fsdpc_buffer_destroy(buffer);
    fsdpc_param_buffer_destroy(param_buffer);
}

static void creations_differ(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    EXPECT_FAILS(self,
                 fsdpc_param_buffer_create(self->comm, 100 + (size_t)self->rank, &param_buffer),
                 FSDPC_ERR_MISMATCH, "param_buffer_create");
}

/* ---- Abandoned epochs ---- */

/* PeerError in Python, both; a rank that comes late finds the communicator closed. */
static void expect_abandoned(rank_context *self, fsdpc_status status, const char *told)
{
    EXPECT(self, status == FSDPC_ERR_PEER || status == FSDPC_ERR_POISONED, "%s",
           fsdpc_status_text(status));
    EXPECT(self, strstr(fsdpc_last_error(), told), "%s", fsdpc_last_error());
}

static void abandoned_epoch(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 64, &param_buffer));
    fsdpc_epoch_note note = forward;
    note.bits = FSDPC_EPOCH_CHANGED;
    fsdpc_status status = begin(param_buffer, &note, "root");
    if (self->rank == 1) { /* an exception: nothing published, and on to the next */
        EXPECT_OK(self, status);
        expect_abandoned(self, begin(param_buffer, &note, "root"), "rank 1 abandoned epoch 1");
    } else {
        if (status == FSDPC_OK)
            status = fsdpc_param_buffer_copied_in(param_buffer);
        if (status == FSDPC_OK)
            status = fsdpc_param_buffer_copy_in_wait(param_buffer, "root");
        expect_abandoned(self, status, "rank 1 abandoned epoch 1");
    }
    fsdpc_param_buffer_destroy(param_buffer);
}

static void abandoned_reduction(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer;
    float shard[64];
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 64, &param_buffer));
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, 4096, &buffer));
    fsdpc_status status = begin(param_buffer, &forward, "root");
    fsdpc_slice slice = {.numel = 32};
    if (self->rank == 1) {
        EXPECT_OK(self, status);
        expect_abandoned(self, begin(param_buffer, &forward, "root"), "rank 1 abandoned");
    } else {
        fsdpc_coll reduce = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                             .what = "layers.3",
                             .slices = &slice,
                             .n_slices = 1,
                             .buffer = buffer,
                             .shard = shard,
                             .scale = 1};
        if (status == FSDPC_OK)
            status = fsdpc_comm_run(self->comm, &reduce);
        expect_abandoned(self, status, "rank 1 abandoned");
    }
    fsdpc_buffer_destroy(buffer);
    fsdpc_param_buffer_destroy(param_buffer);
}

int main(void)
{
    for (int threads = 0; threads < 2; threads++) {
        for (int size = threads ? 1 : 2; size <= 4; size++)
            ranks_run(threads, size, epochs, &(rank_options){.spin = size == 2});
        for (int size = 2; !threads && size <= 4; size++)
            ranks_run(threads, size, epochs, &(rank_options){.arg = "/var/tmp"});
        for (int size = 2; size <= 3; size++) {
            for (size_t i = 0; i < sizeof note_cases / sizeof *note_cases; i++)
                ranks_run(threads, size, notes_differ, &(rank_options){.arg = note_cases[i]});
            for (int i = 0; i < OP_CASES; i++)
                ranks_run(threads, size, operations_differ, &(rank_options){.arg = &i});
            ranks_run(threads, size, late_gathers_meet, &(rank_options){0});
            ranks_run(threads, size, orders_differ, &(rank_options){0});
            ranks_run(threads, size, creations_differ, &(rank_options){0});
            ranks_run(threads, size, abandoned_epoch, &(rank_options){0});
            ranks_run(threads, size, abandoned_reduction, &(rank_options){0});
        }
    }
    return check_report("test_comm_shm_epoch");
}
