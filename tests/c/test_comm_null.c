/* The communicator that pretends: its records, and data as if all peers held the same. */
#include "comm_ranks.h"

#include "base/size.h"
#include "comm/comm_null.h"

static void check_records(const fsdpc_comm *comm, const char *expected)
{
    const fsdpc_comm_record *records;
    size_t n = fsdpc_comm_null_records(comm, &records);
    char text[1024] = "";
    for (size_t i = 0; i < n; i++) {
        size_t used = strlen(text);
        bool op = strcmp(records[i].what, "post") == 0 || strcmp(records[i].what, "done") == 0;
        snprintf(text + used, sizeof text - used, "%s%s%s%s %d;", i ? " " : "", records[i].what,
                 op ? " " : "", op ? fsdpc_coll_name(records[i].kind) : "", records[i].unit);
    }
    CHECK_NOTE(strcmp(text, expected) == 0, "records are: %s", text);
}

static void run_rank(int rank, int size)
{
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_comm *comm;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_cpu_create(mem, NULL, fsdpc_isa_best(), 0, &device));
    device->flat = fsdpc_flat_ops_cpu(fsdpc_isa_best());
    fsdpc_comm_config config = {.rank = rank, .size = size, .device = device};
    CHECK_OK(fsdpc_comm_null_create(&config, &comm));
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer;
    CHECK_OK(fsdpc_param_buffer_create(comm, 1024, &param_buffer));
    const size_t bytes = fsdpc_round_up(400 * (size_t)size, 64); /* as memory is counted */
    CHECK_OK(fsdpc_buffer_create(comm, bytes, &buffer));
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_UNSHARDED] == (rank == 0 ? 1024 : 0));
    CHECK(stats.now_bytes[FSDPC_MEM_REDUCE] == bytes);

    fsdpc_epoch_note note = {.bits = FSDPC_EPOCH_CHANGED, .unit = 5}, all;
    CHECK_OK(fsdpc_param_buffer_arrive(param_buffer, &note));
    CHECK_OK(fsdpc_param_buffer_epoch_wait(param_buffer, NULL, &all));
    CHECK(all.unit == 5 && param_buffer->epoch == 1);
    CHECK_OK(fsdpc_param_buffer_copied_in(param_buffer));
    CHECK_OK(fsdpc_param_buffer_copy_in_wait(param_buffer, NULL));

    fsdpc_slice slice = {.numel = 100};
    fsdpc_work gather = {0}, reduce = {0};
    float shard[100];
    for (int j = 0; j < 100 * size; j++)
        ((float *)(void *)buffer->data)[j] = (float)j;
    CHECK_OK(fsdpc_comm_post(comm,
                             &(fsdpc_coll){.kind = FSDPC_COLL_REDUCE_SCATTER,
                                           .unit = 2,
                                           .buffer = buffer,
                                           .slices = &slice,
                                           .n_slices = 1,
                                           .shard = shard,
                                           .scale = 1},
                             &reduce));
    slice.numel = 3;
    CHECK_OK(fsdpc_comm_post(comm,
                             &(fsdpc_coll){.kind = FSDPC_COLL_GATHER,
                                           .unit = 1,
                                           .param_buffer = param_buffer,
                                           .slices = &slice,
                                           .n_slices = 1,
                                           .epoch = 1},
                             &gather));
    CHECK_OK(fsdpc_comm_wait(&gather));
    CHECK_OK(fsdpc_comm_wait(&reduce));
    CHECK_OK(fsdpc_comm_wait(&reduce));
    CHECK(shard[7] == (float)(size * (100 * rank + 7)));
    check_records(comm,
                  "parameter buffer -1; buffer -1; arrive 5; copy_in -1; post reduce_scatter 2; "
                  "post gather 1; done gather 1; done reduce_scatter 2;");

    int64_t x = 3, many[8] = {0};
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE, .dtype = FSDPC_I64, .send = &x, .recv = &x};
    op.numel = 1;
    CHECK_OK(fsdpc_comm_run(comm, &op));
    CHECK(x == 3 * size);
    op.kind = FSDPC_COLL_ALL_GATHER;
    op.recv = many;
    CHECK_OK(fsdpc_comm_run(comm, &op));
    CHECK(many[size - 1] == 3 * size && many[size] == 0);

    fsdpc_comm *part;
    CHECK_OK(fsdpc_comm_split(comm, 0, 0, &part));
    CHECK(part->rank == rank && part->size == size);
    fsdpc_comm_abort(part, "over");
    CHECK_FAILS(fsdpc_comm_run(part, &op), FSDPC_ERR_POISONED, "over");
    check_records(part, "abort -1;");
    fsdpc_comm_destroy(part);
    fsdpc_param_buffer_destroy(param_buffer);
    fsdpc_buffer_destroy(buffer);
    fsdpc_comm_destroy(comm);
    fsdpc_device_destroy(device);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_now_bytes == 0);
    fsdpc_mem_destroy(mem);
}

/* Ranks beyond those that can be summed; operations that tests alone do not find done. */
static void test_patience(bool orders)
{
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_comm *comm;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_null_create(mem, true, &device));
    device->flat = fsdpc_flat_ops_null();
    fsdpc_comm_config config = {
        .size = 16384, .device = device, .timeout_s = 60, .lazy = true, .orders = orders};
    CHECK_OK(fsdpc_comm_null_create(&config, &comm));
    CHECK(fsdpc_comm_orders(comm) == orders);
    fsdpc_buffer *buffer;
    CHECK_OK(fsdpc_buffer_create(comm, (size_t)1 << 20, &buffer));
    float shard[1] = {7};
    fsdpc_slice slice = {.numel = 1};
    fsdpc_coll sum = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                      .buffer = buffer,
                      .slices = &slice,
                      .n_slices = 1,
                      .shard = shard,
                      .scale = 1};
    fsdpc_work first = {0}, second = {0};
    CHECK_OK(fsdpc_comm_post(comm, &sum, &first));
    CHECK_OK(fsdpc_comm_post(comm, &sum, &second));
    CHECK(fsdpc_comm_test(&first) == FSDPC_IN_PROGRESS);
    CHECK_OK(fsdpc_comm_order(&first, fsdpc_device_main(device)));
    CHECK(fsdpc_comm_test(&first) == FSDPC_OK && shard[0] == 7);
    CHECK(fsdpc_comm_test(&second) == FSDPC_IN_PROGRESS);
    CHECK_OK(fsdpc_comm_wait(&second));
    int64_t x = 3, y = 0;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE, .dtype = FSDPC_I64, .send = &x, .recv = &y};
    op.numel = 1;
    CHECK_OK(fsdpc_comm_run(comm, &op));
    CHECK(y == 3);
    fsdpc_buffer_destroy(buffer);
    fsdpc_comm_destroy(comm);
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
}

int main(void)
{
    test_patience(false);
    test_patience(true);
    run_rank(0, 1);
    run_rank(0, 4);
    run_rank(2, 4);
    run_rank(6, 7);
    return check_report("test_comm_null");
}
