/* A world of one, and what comm.c does for all: checks of operations, poison, waiting. */
#include "comm_ranks.h"

typedef struct fixture {
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_stream *stream;
    fsdpc_comm *comm;
} fixture;

static void open_fixture(fixture *f, bool async)
{
    CHECK_OK(fsdpc_mem_create(&f->mem));
    CHECK_OK(fsdpc_device_cpu_create(f->mem, NULL, fsdpc_isa_best(), async, &f->device));
    f->device->flat = fsdpc_flat_ops_cpu(fsdpc_isa_best());
    CHECK_OK(fsdpc_stream_create(f->device, "test", async, &f->stream));
    CHECK_OK(
        fsdpc_comm_self_create(&(fsdpc_comm_config){.size = 1, .device = f->device}, &f->comm));
}

static void close_fixture(fixture *f)
{
    fsdpc_comm_destroy(f->comm);
    fsdpc_stream_destroy(f->stream);
    fsdpc_device_destroy(f->device);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(f->mem, &stats);
    CHECK(stats.total_now_bytes == 0);
    fsdpc_mem_destroy(f->mem);
}

static void test_epochs(fixture *f)
{
    fsdpc_param_buffer *param_buffer;
    CHECK_OK(fsdpc_param_buffer_create(f->comm, 4096, &param_buffer));
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(f->mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_UNSHARDED] == 4096);
    fsdpc_epoch_note note = {.bits = FSDPC_EPOCH_CHANGED, .kind = 3, .unit = 2, .steps = 9}, all;
    CHECK_OK(fsdpc_param_buffer_arrive(param_buffer, &note));
    CHECK(param_buffer->epoch == 1);
    CHECK_OK(fsdpc_param_buffer_epoch_wait(param_buffer, "unit", &all));
    CHECK(all.bits == note.bits && all.kind == 3 && all.unit == 2 && all.steps == 9);
    param_buffer->write[17] = 42;
    CHECK_OK(fsdpc_param_buffer_copied_in(param_buffer));
    CHECK_OK(fsdpc_param_buffer_copy_in_wait(param_buffer, "unit"));
    CHECK(param_buffer->read[17] == 42);
    note.bits |= FSDPC_EPOCH_HELD;
    CHECK_OK(fsdpc_param_buffer_arrive(param_buffer, &note));
    CHECK_FAILS(fsdpc_param_buffer_epoch_wait(param_buffer, "unit", &all), FSDPC_ERR_STATE,
                "reshard()");
    CHECK(f->comm->poison[0] == 0);
    fsdpc_param_buffer_destroy(param_buffer);
}

static void test_collectives(fixture *f)
{
    fsdpc_buffer *buffer;
    CHECK_OK(fsdpc_buffer_create(f->comm, 4096, &buffer));
    CHECK_OK(fsdpc_buffer_idle_wait(buffer, NULL));
    uint16_t *grads = (uint16_t *)(void *)buffer->data;
    for (int j = 0; j < 100; j++)
        grads[j] = fsdpc_f32_to_bf16((float)j);
    float shard[64];
    fsdpc_slice slices[] = {{.unsharded_offset = 10, .numel = 50, .shard_offset = 3},
                            {.unsharded_offset = 70, .numel = 5, .shard_offset = 55}};
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .stream = f->stream,
                     .dtype = FSDPC_BF16,
                     .slices = slices,
                     .n_slices = 2,
                     .buffer = buffer,
                     .shard = shard,
                     .shard_dtype = FSDPC_F32,
                     .round_dtype = FSDPC_BF16,
                     .scale = 0.5f};
    CHECK_OK(fsdpc_comm_run(f->comm, &op));
    CHECK(shard[3] == 5.0f && shard[3 + 49] == 29.5f && shard[55 + 4] == 37.0f);
    op.accumulate = true;
    fsdpc_work work = {0};
    CHECK_OK(fsdpc_comm_post(f->comm, &op, &work));
    CHECK_OK(fsdpc_comm_wait(&work));
    CHECK(shard[3] == 10.0f && work.comm == NULL);

    int64_t from[3] = {1, 2, 3}, to[3] = {0};
    fsdpc_coll sum = {
        .kind = FSDPC_COLL_ALL_REDUCE, .dtype = FSDPC_I64, .send = from, .recv = to, .numel = 3};
    CHECK_OK(fsdpc_comm_run(f->comm, &sum));
    CHECK(memcmp(from, to, sizeof to) == 0);
    memset(to, 0, sizeof to);
    sum.kind = FSDPC_COLL_ALL_GATHER;
    CHECK_OK(fsdpc_comm_run(f->comm, &sum));
    CHECK(memcmp(from, to, sizeof to) == 0);
    CHECK_OK(fsdpc_comm_run(f->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_buffer_destroy(buffer);
}

static void test_checks(fixture *f)
{
    fsdpc_buffer *buffer;
    fsdpc_param_buffer *param_buffer;
    CHECK_OK(fsdpc_buffer_create(f->comm, 400, &buffer));
    CHECK_OK(fsdpc_param_buffer_create(f->comm, 400, &param_buffer));
    fsdpc_slice slice = {.unsharded_offset = 50, .numel = 51};
    float shard[128];
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .what = "layers.3",
                     .slices = &slice,
                     .n_slices = 1,
                     .buffer = buffer,
                     .shard = shard,
                     .scale = 1};
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "layers.3");
    slice.numel = 50;
    CHECK_OK(fsdpc_comm_run(f->comm, &op));
    slice.numel = SIZE_MAX - 20;
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "memory");
    slice.numel = 1;
    op.offset = 2;
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "multiple");
    op.offset = 404;
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "beyond");
    op.offset = 0;
    op.dtype = FSDPC_I32;
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "floats");
    op.kind = FSDPC_COLL_GATHER;
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "parameter buffer");
    op.param_buffer = param_buffer;
    CHECK_OK(fsdpc_comm_run(f->comm, &op));
    op = (fsdpc_coll){.kind = FSDPC_COLL_BROADCAST, .root = 1};
    CHECK_FAILS(fsdpc_comm_run(f->comm, &op), FSDPC_ERR_VALUE, "root");
    fsdpc_buffer_destroy(buffer);
    fsdpc_param_buffer_destroy(param_buffer);
    fsdpc_comm *other = NULL;
    CHECK_FAILS(
        fsdpc_comm_self_create(&(fsdpc_comm_config){.size = 2, .device = f->device}, &other),
        FSDPC_ERR_VALUE, "shm");
}

static void test_split_and_poison(fixture *f)
{
    fsdpc_comm *part = f->comm;
    CHECK_OK(fsdpc_comm_split(f->comm, -1, 0, &part));
    CHECK(part == NULL);
    CHECK_OK(fsdpc_comm_split(f->comm, 4, 0, &part));
    CHECK(part && part != f->comm && part->size == 1 && part->rank == 0);
    fsdpc_comm_abort(part, "enough");
    fsdpc_comm_abort(part, "too late to be the reason");
    CHECK_FAILS(fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}), FSDPC_ERR_POISONED,
                "enough");
    CHECK_OK(fsdpc_comm_run(f->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_comm_destroy(part);
    fsdpc_comm_destroy(NULL);
}

static fsdpc_status never(void *arg)
{
    ++*(int *)arg;
    return FSDPC_IN_PROGRESS;
}

/* Two lines each time: who waits, and what it did before that. */
static void count_notice(void *arg, const char *text)
{
    int *notices = arg;
    bool tail = strstr(text, "rank 0 before that: forward of unit 5 in epoch 2") != NULL;
    CHECK_NOTE(tail || strstr(text, "a test of 'unit'") != NULL, "%s", text);
    *notices += tail ? 100 : 1;
}

typedef struct lines {
    int notes, debugs;
    char last[256];
} lines;

static void keep_line(void *arg, fsdpc_log_level level, const char *line)
{
    lines *seen = arg;
    seen->notes += level == FSDPC_LOG_NOTE;
    seen->debugs += level == FSDPC_LOG_DEBUG;
    snprintf(seen->last, sizeof seen->last, "%s", line);
}

/* Level 2: what is made, epochs that change, long waits; level 3: every operation too. */
static void test_log(fixture *f)
{
    lines seen = {0};
    fsdpc_comm *comm = f->comm;
    comm->log = (fsdpc_log){.level = FSDPC_LOG_NOTE, .fn = keep_line, .arg = &seen};
    for (int level = FSDPC_LOG_WARNING; level <= FSDPC_LOG_DEBUG; level++) {
        comm->log.level = (fsdpc_log_level)level;
        bool notes = level >= FSDPC_LOG_NOTE, debugs = level >= FSDPC_LOG_DEBUG;
        fsdpc_param_buffer *param_buffer;
        fsdpc_buffer *buffer;
        fsdpc_epoch_note all;
        seen = (lines){0};
        CHECK_OK(fsdpc_param_buffer_create(comm, 4096, &param_buffer));
        CHECK(seen.notes == notes &&
              (!notes || strstr(seen.last, "parameter buffer of 4096 bytes")));
        CHECK_OK(fsdpc_buffer_create(comm, 512, &buffer));
        CHECK(seen.notes == 2 * notes && (!notes || strstr(seen.last, "buffer of 512 bytes")));
        CHECK_OK(fsdpc_param_buffer_arrive(param_buffer, &(fsdpc_epoch_note){0}));
        CHECK_OK(fsdpc_param_buffer_epoch_wait(param_buffer, "a", &all));
        CHECK(seen.notes == 2 * notes && seen.debugs == debugs);
        CHECK_OK(fsdpc_param_buffer_arrive(param_buffer,
                                           &(fsdpc_epoch_note){.bits = FSDPC_EPOCH_CHANGED}));
        CHECK_OK(fsdpc_param_buffer_epoch_wait(param_buffer, "a", &all));
        CHECK(seen.notes == 3 * notes && (!notes || strstr(seen.last, "epoch 2 changes")));
        CHECK_OK(fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .what = "end"}));
        CHECK(seen.notes == 3 * notes && seen.debugs == 2 * debugs);
        CHECK(!debugs || strstr(seen.last, "posts barrier of end"));
        fsdpc_buffer_destroy(buffer);
        fsdpc_param_buffer_destroy(param_buffer);
    }
    comm->log = (fsdpc_log){0};
}

static fsdpc_status interrupt_second(void *arg)
{
    return ++*(int *)arg == 2 ? fsdpc_fail(FSDPC_ERR_INTERRUPT, "Ctrl-C") : FSDPC_OK;
}

static void test_waiting(fixture *f)
{
    int polls = 0, notices = 0, breaths = 0;
    fsdpc_comm *part;
    CHECK_OK(fsdpc_comm_split(f->comm, 0, 0, &part));
    part->timeout_s = 0.3;
    part->notice_s = 0.1;
    part->notice = count_notice;
    part->notice_arg = &notices;
    lines seen = {0};
    part->log = (fsdpc_log){.level = FSDPC_LOG_NOTE, .fn = keep_line, .arg = &seen};
    CHECK_OK(fsdpc_trace_create(8, &part->trace));
    fsdpc_trace_add(part->trace, FSDPC_TRACE_FORWARD, 5, 0, 2, 0);
    part->interrupt = (fsdpc_interrupt){interrupt_second, &breaths};
    int64_t start = fsdpc_clock_ns();
    CHECK_FAILS(fsdpc_comm_wait_for(part, never, &polls, "a test", "unit"), FSDPC_ERR_INTERRUPT,
                "Ctrl-C");
    CHECK(part->poison[0] == 0 && notices == 101 && polls > 2);
    CHECK_NOTE(seen.notes == 1 && strstr(seen.last, "s in a test of unit"), "%s", seen.last);
    CHECK(fsdpc_clock_ns() - start < 290000000);
    CHECK_FAILS(fsdpc_comm_wait_for(part, never, &polls, "a test", "unit"), FSDPC_ERR_TIMEOUT,
                "FSDPC_TIMEOUT_S");
    CHECK(part->waited_ns >= 450000000);
    CHECK_FAILS(fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}), FSDPC_ERR_POISONED,
                "a test");
    CHECK_NOTE(notices == 302, "%d: two notices, and the tail at the deadline once more", notices);
    fsdpc_trace_destroy(part->trace);
    fsdpc_comm_destroy(part);
}

int main(void)
{
    for (int async = 0; async < 2; async++) {
        fixture f;
        open_fixture(&f, async);
        test_epochs(&f);
        test_collectives(&f);
        test_checks(&f);
        test_log(&f);
        test_split_and_poison(&f);
        test_waiting(&f);
        close_fixture(&f);
    }
    CHECK(strcmp(fsdpc_coll_name(FSDPC_COLL_GATHER), "gather") == 0);
    return check_report("test_comm_self");
}
