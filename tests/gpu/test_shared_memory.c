/* Memory of a GPU that ranks share: what it holds, what it may be used for, and that nothing stays
 * behind when it goes or could not be had.
 *
 * Ranks are threads; on the emulated device they are processes too, each with a driver of its own.
 */
#include <dirent.h>

#include "base/size.h"
#include "coll_checks.h"
#include "cuda/shared_memory.h"

#if defined(FSDPC_EMU)
#include "cuda/driver_abi.h"
#include "emu_driver.h"
#endif

enum { NUMEL = 5000, BYTES = NUMEL * 4 };

/* A rank with a GPU whose control stays its own. */
static void open_rank(gpu_rank *r, rank_context *self)
{
    *r = (gpu_rank){.self = self};
    EXPECT_OK(self, fsdpc_mem_create(&r->mem));
    EXPECT_OK(self, fsdpc_device_cuda_create(r->mem, 0, &r->device));
    EXPECT_OK(self, fsdpc_device_cuda_select(r->device));
    r->plain = (fsdpc_stream){.device = r->device, .name = "plain"};
}

static void close_rank(gpu_rank *r)
{
    fsdpc_device_destroy(r->device);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r->mem, &stats);
    EXPECT(r->self, stats.total_now_bytes == 0, "%zu bytes not given back", stats.total_now_bytes);
    fsdpc_mem_destroy(r->mem);
}

static fsdpc_status share(const gpu_rank *r, fsdpc_cuda_shared **out)
{
    return fsdpc_cuda_shared_create(r->self->comm, r->device, FSDPC_MEM_REDUCE, BYTES, "test", out);
}

static void meet(rank_context *self)
{
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
}

static void check_part(const gpu_rank *r, const fsdpc_cuda_shared *shared, int rank, int turn)
{
    size_t wrong = 0;
    unsigned char *got = fetch(r, fsdpc_cuda_shared_parts(shared)[rank], BYTES);
    for (size_t j = 0; j < NUMEL; j++)
        wrong += element_of(got, j, FSDPC_F32) != (turn < 0 ? 0 : value(rank, j, turn));
    EXPECT(r->self, wrong == 0, "part of rank %d, turn %d: %zu wrong", rank, turn, wrong);
    free(got);
}

/* What each writes all others read, and it is there as long as one of them has it. */
static void contents(rank_context *self)
{
    gpu_rank r;
    fsdpc_cuda_shared *shared;
    open_rank(&r, self);
    EXPECT_OK(self, share(&r, &shared));
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r.mem, &stats);
    EXPECT(self, stats.now_bytes[FSDPC_MEM_REDUCE] == fsdpc_round_up(BYTES, 64), "%zu bytes",
           stats.now_bytes[FSDPC_MEM_REDUCE]);
    EXPECT(self, fsdpc_cuda_shared_parts(shared)[self->rank] == fsdpc_cuda_shared_own(shared),
           "the own part is among all");
    for (int turn = -1; turn < TURNS; turn++) {
        meet(self); /* all have read */
        if (turn >= 0)
            put(&r, fsdpc_cuda_shared_own(shared), FSDPC_F32, 0, NUMEL, turn);
        EXPECT_OK(self, fsdpc_stream_sync(&r.plain));
        meet(self); /* all have written */
        for (int p = 0; p < self->size; p++)
            check_part(&r, shared, p, turn);
    }
    if (self->rank == 0)
        fsdpc_cuda_shared_destroy(shared);
    meet(self);
    if (self->rank > 0) {
        check_part(&r, shared, 0, TURNS - 1);
        fsdpc_cuda_shared_destroy(shared);
    }
    close_rank(&r);
}

/* What cannot be waited for stays mapped, as something may still use it. */
static void in_use(rank_context *self)
{
    gpu_rank r;
    fsdpc_cuda_shared *shared;
    open_rank(&r, self);
    EXPECT_OK(self, share(&r, &shared));
    put(&r, fsdpc_cuda_shared_own(shared), FSDPC_F32, 0, NUMEL, 0);
    EXPECT_OK(self, fsdpc_stream_sync(&r.plain));
    r.device->watch.wait_for = rig_no_wait;
    fsdpc_cuda_shared_destroy(shared);
    r.device->watch.wait_for = NULL;
    meet(self);
    for (int p = 0; p < self->size; p++)
        check_part(&r, shared, p, 0);
    meet(self);
    fsdpc_cuda_shared_destroy(shared);
    close_rank(&r);
}

static int count_fds(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        n++;
    closedir(folder);
    return n;
}

#if defined(FSDPC_EMU)

static bool same_counts(emu_driver_counts a, emu_driver_counts b)
{
    return a.handles == b.handles && a.ranges == b.ranges && a.mappings == b.mappings &&
           a.bytes == b.bytes && a.forbidden == b.forbidden;
}

/* "r--s" or "rw-s", as the processor has it. */
static void access_of(const void *address, char access[5])
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    snprintf(access, 5, "none");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        char found[5];
        if (sscanf(line, "%lx-%lx %4s", &begin, &end, found) == 3 && (uintptr_t)address >= begin &&
            (uintptr_t)address < end)
            snprintf(access, 5, "%s", found);
    }
    fclose(maps);
}

static void peers_only_read(rank_context *self)
{
    gpu_rank r;
    fsdpc_cuda_shared *shared;
    open_rank(&r, self);
    EXPECT_OK(self, share(&r, &shared));
    for (int p = 0; p < self->size; p++) {
        char access[5];
        access_of(fsdpc_cuda_shared_parts(shared)[p], access);
        EXPECT(self, strcmp(access, p == self->rank ? "rw-s" : "r--s") == 0,
               "rank %d's part is mapped %s", p, access);
    }
    meet(self);
    fsdpc_cuda_shared_destroy(shared);
    close_rank(&r);
}

/* Every call of the driver that makes something fails once, on whichever rank makes it. */
static void no_memory(rank_context *self)
{
    enum { CALLS_OF_A_PART = 4, EXPORTS = 1, IMPORTS = 1 };
    const int calls = self->size * (CALLS_OF_A_PART + (self->size > 1 ? EXPORTS : 0)) +
                      self->size * (self->size - 1) * (CALLS_OF_A_PART - 1 + IMPORTS);
    gpu_rank r;
    fsdpc_cuda_shared *shared = NULL;
    fsdpc_status status = FSDPC_ERR_NOMEM;
    int failures = 0;
    open_rank(&r, self);
    meet(self);
    emu_driver_counts before = emu_driver_look();
    int fds = self->rank == 0 ? count_fds() : 0;
    for (; status != FSDPC_OK && failures <= calls; failures += status != FSDPC_OK) {
        meet(self);
        if (self->rank == 0)
            emu_driver_fail_after(failures);
        meet(self);
        status = share(&r, &shared);
        EXPECT(self, status == FSDPC_OK || status == FSDPC_ERR_NOMEM, "%s",
               fsdpc_status_text(status));
        meet(self);
        if (status != FSDPC_OK && self->rank == 0) /* counting takes a descriptor itself */
            EXPECT(self, same_counts(emu_driver_look(), before) && count_fds() == fds,
                   "something is left after failure %d", failures);
    }
    EXPECT(self, failures == calls, "%d of %d calls were made to fail", failures, calls);
    meet(self);
    emu_driver_fail_after(-1);
    fsdpc_cuda_shared_destroy(shared);
    meet(self);
    if (self->rank == 0)
        EXPECT(self, same_counts(emu_driver_look(), before) && count_fds() == fds,
               "something is left");
    close_rank(&r);
}

/* Ranks that may not share learn it, and go on; a fault of earlier work is not taken for that. */
static void not_permitted(rank_context *self)
{
    enum { ILLEGAL_ADDRESS = 700 };
    gpu_rank r;
    fsdpc_cuda_shared *shared;
    open_rank(&r, self);
    const int refusals[] = {FSDPC_CU_INVALID_VALUE, FSDPC_CU_INVALID_DEVICE,
                            FSDPC_CU_OPERATING_SYSTEM, FSDPC_CU_NOT_PERMITTED,
                            FSDPC_CU_NOT_SUPPORTED};
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        meet(self);
        emu_driver_fail(EMU_EXPORT, refusals[i]);
        EXPECT_FAILS(self, share(&r, &shared), FSDPC_ERR_UNSUPPORTED, "does not export memory");
    }
    meet(self);
    emu_driver_fail(EMU_EXPORT, ILLEGAL_ADDRESS);
    EXPECT_FAILS(self, share(&r, &shared), FSDPC_ERR_INTERNAL, "driver failed to export");
    meet(self);
    emu_driver_fail(EMU_EXPORT, 0);
    emu_driver_hide_windows(1);
    meet(self);
    EXPECT_FAILS(self, share(&r, &shared), FSDPC_ERR_UNSUPPORTED,
                 "has no virtual memory that can be handed over");
    meet(self);
    emu_driver_hide_windows(0);
    meet(self);
    EXPECT_OK(self, share(&r, &shared));
    fsdpc_cuda_shared_destroy(shared);
    close_rank(&r);
}

static void leaves_nothing(rank_context *self)
{
    emu_driver_counts before = emu_driver_look();
    int fds = count_fds();
    contents(self);
    EXPECT(self, same_counts(emu_driver_look(), before), "mappings or handles are left");
    EXPECT(self, count_fds() == fds, "%d descriptors are left", count_fds() - fds);
}

#endif

int main(void)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_shared_memory");
#if defined(FSDPC_EMU)
    ranks_run_processes(3, leaves_nothing, &(rank_options){0}); /* before there are threads */
#endif
    int fds = count_fds();
    for (int size = 1; size <= 4; size++)
        ranks_run_threads(size, contents, &(rank_options){0});
    ranks_run_threads(2, in_use, &(rank_options){0});
#if defined(FSDPC_EMU)
    ranks_run_threads(2, peers_only_read, &(rank_options){0});
    for (int size = 1; size <= 2; size++)
        ranks_run_threads(size, no_memory, &(rank_options){0});
    ranks_run_threads(3, not_permitted, &(rank_options){0});
    emu_driver_counts counts = emu_driver_look();
    CHECK(counts.handles == 0 && counts.ranges == 0 && counts.mappings == 0);
    CHECK_NOTE(counts.forbidden == 0, "%d calls broke the driver's rules", counts.forbidden);
    CHECK_NOTE(count_fds() == fds, "%d descriptors are left", count_fds() - fds);
#else
    (void)fds; /* the driver has some of its own */
#endif
    return check_report("test_shared_memory");
}
