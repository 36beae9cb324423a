/* What ranks hand to each other: descriptors, and buffers over memory that they have already. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm_ranks.h"

enum { RANKS = 4, NUMEL = 128 };

/* A file of the rank's own, with its number in it. */
static int open_own(const rank_context *self)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    char text = (char)('a' + self->rank);
    return pwrite(fd, &text, 1, 0) == 1 ? fd : -1;
}

/* Every copy is the rank's, closed by exec, and lives when what it was copied from is closed. */
static void descriptors(rank_context *self)
{
    int fds[RANKS], own = open_own(self);
    EXPECT_OK(self, self->comm->ops->pass(self->comm, "files", own, fds));
    close(own);
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    for (int p = 0; p < self->size; p++) {
        char text = 0;
        if (p == self->rank) {
            EXPECT(self, fds[p] == -1, "its own is not copied");
            continue;
        }
        EXPECT(self, pread(fds[p], &text, 1, 0) == 1 && text == 'a' + p, "rank %d's is %c", p,
               text);
        EXPECT(self, fcntl(fds[p], F_GETFD) == FD_CLOEXEC, "exec closes it");
        close(fds[p]);
    }
}

/* One has none: all learn it, and go on. */
static void no_descriptor(rank_context *self)
{
    int fds[RANKS], own = open_own(self);
    EXPECT_FAILS(self, self->comm->ops->pass(self->comm, "files", self->rank == 1 ? -1 : own, fds),
                 FSDPC_ERR_OS, "could not be copied");
    close(own);
    descriptors(self);
}

/* Ranks that are threads reach each other's memory as it is. */
static float memory[RANKS][NUMEL * RANKS];

static void elsewhere(rank_context *self)
{
    const unsigned char *datas[RANKS];
    fsdpc_buffer *buffer;
    fsdpc_mem_stats stats;
    float shard[NUMEL];
    for (int p = 0; p < self->size; p++)
        datas[p] = (const unsigned char *)memory[p];
    EXPECT_OK(self, self->comm->ops->buffer_over(self->comm, sizeof memory[0], datas, &buffer));
    fsdpc_mem_stats_read(self->mem, &stats);
    EXPECT(self, stats.now_bytes[FSDPC_MEM_REDUCE] == 0 && !buffer->data, "it has no memory");
    for (int turn = 0; turn < 5; turn++) {
        EXPECT_OK(self, fsdpc_buffer_idle_wait(buffer, "layers.3"));
        for (int j = 0; j < NUMEL * self->size; j++)
            memory[self->rank][j] = (float)(j + turn * (self->rank + 1));
        fsdpc_slice slice = {.numel = NUMEL, .owner = -1};
        EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_REDUCE_SCATTER,
                                                                 .what = "layers.3",
                                                                 .slices = &slice,
                                                                 .n_slices = 1,
                                                                 .buffer = buffer,
                                                                 .shard = shard,
                                                                 .scale = 1}));
        int wrong = 0, turns = turn * self->size * (self->size + 1) / 2;
        for (int j = 0; j < NUMEL; j++)
            wrong += shard[j] != (float)((self->rank * NUMEL + j) * self->size + turns);
        EXPECT(self, wrong == 0, "turn %d: %d wrong", turn, wrong);
    }
    fsdpc_buffer_destroy(buffer);
}

int main(void)
{
    for (int threads = 0; threads < 2; threads++)
        for (int size = 2; size <= RANKS; size++) {
            ranks_run(threads, size, descriptors, &(rank_options){0});
            ranks_run(threads, size, no_descriptor, &(rank_options){0});
        }
    for (int size = 1; size <= RANKS; size++)
        ranks_run_threads(size, elsewhere, &(rank_options){0});
    return check_report("test_comm_shm_pass");
}
