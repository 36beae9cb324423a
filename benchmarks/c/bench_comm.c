/* What the shared-memory communicator costs: ranks are processes, times are of rank 0.
 *
 * Prints, for each operation and size, the best and the median of many runs. The baseline for the
 * copying sizes is one core's memcpy of as many bytes, measured in the same run.
 *
 *     bench_comm [ranks]
 */
#include "comm_ranks.h"

#include "base/wait.h"

enum { RUNS = 400 };

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void report(rank_context *self, const char *name, size_t bytes, int64_t *times, int n)
{
    qsort(times, (size_t)n, sizeof *times, compare);
    if (self->rank == 0)
        printf("%-22s %10zu bytes   best %10.2f us   median %10.2f us\n", name, bytes,
               (double)times[0] * 1e-3, (double)times[n / 2] * 1e-3);
}

static int runs_for(size_t bytes)
{
    return bytes >= (16 << 20) ? 20 : bytes >= (1 << 20) ? 60 : RUNS;
}

static void barrier(rank_context *self)
{
    EXPECT_OK(self,
              fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .unit = -1}));
}

static void bench_barrier(rank_context *self)
{
    int64_t times[RUNS];
    for (int n = 0; n < RUNS; n++) {
        int64_t start = fsdpc_clock_ns();
        barrier(self);
        times[n] = fsdpc_clock_ns() - start;
    }
    report(self, "barrier", 0, times, RUNS);
}

static void bench_reduce_scatter(rank_context *self, size_t bytes)
{
    int64_t times[RUNS];
    fsdpc_buffer *buffer;
    EXPECT_OK(self, fsdpc_buffer_create(self->comm, bytes, &buffer));
    memset(buffer->data, 0, bytes);
    fsdpc_slice slice = {.numel = bytes / 4 / (size_t)self->size};
    float *shard = calloc(slice.numel, sizeof *shard);
    fsdpc_coll op = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                     .what = "layers.3",
                     .slices = &slice,
                     .n_slices = 1,
                     .buffer = buffer,
                     .shard = shard,
                     .scale = 0.5f};
    int runs = runs_for(bytes);
    for (int n = 0; n < runs; n++) {
        EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, NULL));
        barrier(self);
        int64_t start = fsdpc_clock_ns();
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &op));
        times[n] = fsdpc_clock_ns() - start;
    }
    report(self, "reduce_scatter fp32", bytes, times, runs);
    fsdpc_buffer_destroy(buffer);
    free(shard);
}

static void bench_copying(rank_context *self, fsdpc_coll_kind kind, size_t bytes)
{
    int64_t times[RUNS];
    size_t recv_bytes = kind == FSDPC_COLL_ALL_GATHER ? bytes * (size_t)self->size : bytes;
    float *send = calloc(1, bytes), *recv = calloc(1, recv_bytes);
    memset(recv, 0, recv_bytes);
    fsdpc_coll op = {.kind = kind, .send = send, .recv = recv, .numel = bytes / 4};
    int runs = runs_for(bytes);
    for (int n = 0; n < runs; n++) {
        barrier(self);
        int64_t start = fsdpc_clock_ns();
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &op));
        times[n] = fsdpc_clock_ns() - start;
    }
    char name[64];
    snprintf(name, sizeof name, "%s fp32", fsdpc_coll_name(kind));
    report(self, name, bytes, times, runs);
    free(send);
    free(recv);
}

static void bench_gather(rank_context *self, size_t bytes)
{
    int64_t times[RUNS], epochs[RUNS];
    fsdpc_param_buffer *param_buffer;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, bytes, &param_buffer));
    fsdpc_slice slices[30];
    for (int i = 0; i < 30; i++)
        slices[i] = (fsdpc_slice){.numel = bytes / 4 / (size_t)self->size};
    fsdpc_coll op = {.kind = FSDPC_COLL_GATHER,
                     .what = "layers.3",
                     .param_buffer = param_buffer,
                     .slices = slices};
    op.n_slices = 30;
    for (int n = 0; n < RUNS; n++) {
        fsdpc_epoch_note note = {.kind = 1}, all;
        barrier(self);
        int64_t start = fsdpc_clock_ns();
        EXPECT_OK(self, fsdpc_param_buffer_arrive(param_buffer, &note));
        EXPECT_OK(self, fsdpc_param_buffer_epoch_wait(param_buffer, NULL, &all));
        epochs[n] = fsdpc_clock_ns() - start;
        start = fsdpc_clock_ns();
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &op));
        times[n] = fsdpc_clock_ns() - start;
    }
    report(self, "epoch, unchanged", bytes, epochs, RUNS);
    report(self, "gather, 30 slices", bytes, times, RUNS);
    fsdpc_param_buffer_destroy(param_buffer);
}

static void bench_memcpy(rank_context *self, size_t bytes)
{
    int64_t times[RUNS];
    char *from = malloc(bytes), *to = malloc(bytes);
    memset(from, 1, bytes);
    memset(to, 1, bytes);
    int runs = runs_for(bytes);
    for (int n = 0; n < runs; n++) {
        int64_t start = fsdpc_clock_ns();
        memcpy(to, from, bytes);
        __asm__ volatile("" ::"r"(to) : "memory");
        times[n] = fsdpc_clock_ns() - start;
    }
    report(self, "memcpy (baseline)", bytes, times, runs);
    free(from);
    free(to);
}

static void bench(rank_context *self)
{
    static const size_t sizes[] = {4 << 10, 1 << 20, 16 << 20, 64 << 20};
    bench_barrier(self);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        bench_memcpy(self, sizes[i]);
        bench_gather(self, sizes[i]);
        bench_reduce_scatter(self, sizes[i]);
        bench_copying(self, FSDPC_COLL_ALL_REDUCE, sizes[i]);
        bench_copying(self, FSDPC_COLL_ALL_GATHER, sizes[i]);
        bench_copying(self, FSDPC_COLL_BROADCAST, sizes[i]);
    }
}

int main(int argc, char **argv)
{
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    if (ranks < 1 || ranks > RANKS_MAX) {
        fprintf(stderr, "use 1 to %d ranks\n", RANKS_MAX);
        return 2;
    }
    ranks_run_processes(ranks, bench, &(rank_options){.spin = ranks <= fsdpc_usable_cores()});
    return check_report("bench_comm");
}
