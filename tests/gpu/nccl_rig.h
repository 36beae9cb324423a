/* What the tests of the GPUs' transport share: a rank with a GPU, and the NCCL it finds.
 *
 * Ranks are threads, each with a GPU of its own; on the emulated device all have the same one, and
 * NCCL is the fake of tests/emu, which lies beside the program.
 */
#ifndef FSDPC_TESTS_GPU_NCCL_RIG_H
#define FSDPC_TESTS_GPU_NCCL_RIG_H

#include "comm_ranks.h"
#include "cuda/comm_nccl.h"
#include "cuda/nccl_internal.h"
#include "gpu_rig.h"

#if defined(FSDPC_EMU)
#include "fake_nccl.h"
#include "open_beside.h"
#endif

static const char *library;
static int gpus;

/* A rank's GPU and its communicator; the rank's own becomes the control. */
typedef struct gpu_rank {
    rank_context *self;
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_stream *gathers, *reduces;
    fsdpc_stream plain;  /* the main stream */
    fsdpc_event *filled; /* of it */
    fsdpc_comm *comm;
} gpu_rank;

typedef fsdpc_status (*comm_create_fn)(const fsdpc_control_config *config, fsdpc_comm **out);

static inline fsdpc_status rank_create_over(comm_create_fn create, gpu_rank *r, rank_context *self,
                                            const char *path)
{
    *r = (gpu_rank){.self = self};
    EXPECT_OK(self, fsdpc_mem_create(&r->mem));
    EXPECT_OK(self, fsdpc_device_cuda_create(r->mem, self->rank % gpus, &r->device));
    EXPECT_OK(self, fsdpc_device_cuda_select(r->device));
    EXPECT_OK(self, fsdpc_stream_create(r->device, "gathers", true, &r->gathers));
    EXPECT_OK(self, fsdpc_stream_create(r->device, "reduces", true, &r->reduces));
    EXPECT_OK(self, fsdpc_event_create(r->device, &r->filled));
    r->plain = (fsdpc_stream){.device = r->device, .name = "plain"};
    fsdpc_control_config config = {.comm = {.rank = self->rank,
                                            .size = self->size,
                                            .device = r->device,
                                            .timeout_s = self->comm->timeout_s,
                                            .notice_s = self->comm->notice_s},
                                   .control = self->comm,
                                   .library_path = path};
    fsdpc_status status = create(&config, &r->comm);
    if (status == FSDPC_OK)
        self->comm = NULL; /* taken over */
    return status;
}

static inline fsdpc_status rank_create(gpu_rank *r, rank_context *self, const char *path)
{
    return rank_create_over(fsdpc_comm_nccl_create, r, self, path);
}

/* What is put on the other streams from now on comes after what the main stream holds. */
static inline void rank_mark(gpu_rank *r)
{
    EXPECT_OK(r->self, fsdpc_event_record(r->filled, &r->plain));
    EXPECT_OK(r->self, fsdpc_stream_wait(r->gathers, r->filled));
    EXPECT_OK(r->self, fsdpc_stream_wait(r->reduces, r->filled));
}

static inline void rank_destroy(gpu_rank *r)
{
    fsdpc_comm_destroy(r->comm);
    fsdpc_event_destroy(r->filled);
    fsdpc_stream_destroy(r->gathers);
    fsdpc_stream_destroy(r->reduces);
    fsdpc_device_destroy(r->device);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r->mem, &stats);
    size_t held = stats.total_now_bytes + stats.now_bytes[FSDPC_MEM_PINNED];
    EXPECT(r->self, held == 0, "%zu bytes of the GPU not given back", held);
    fsdpc_mem_destroy(r->mem);
}

#if defined(FSDPC_EMU)
static fake_nccl_break_fn break_nccl;
static fake_nccl_counts_fn count_nccl;
static fake_nccl_registered_fn look_at_memory;
static fake_nccl_hide_windows_fn hide_nccl_windows;
static fake_nccl_set_version_fn set_nccl_version;

/* The fake lies beside the program; ranks share the one GPU. */
static inline void fake_open(void)
{
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    /* The plugin would set these too, but ranks are threads here, and one sets what another reads.
     */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    setenv("NCCL_GRAPH_REGISTER", "0", 1);
    setenv("NCCL_SYM_CE_THRESHOLD", "1000", 1);
    setenv("NCCL_RAS_ENABLE", "0", 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    static char path[PATH_MAX];
    void *handle = open_beside("libnccl.so.2", path, sizeof path);
    *(void **)&break_nccl = dlsym(handle, "fake_nccl_break");
    *(void **)&count_nccl = dlsym(handle, "fake_nccl_counts");
    *(void **)&look_at_memory = dlsym(handle, "fake_nccl_registered");
    *(void **)&hide_nccl_windows = dlsym(handle, "fake_nccl_hide_windows");
    *(void **)&set_nccl_version = dlsym(handle, "fake_nccl_set_version");
    library = path;
}

static inline void fake_check(void)
{
    int open, out_of_place, forbidden;
    fake_nccl_memory known;
    count_nccl(&open, &out_of_place, &forbidden);
    look_at_memory(&known);
    CHECK_NOTE(known.windows == 0 && known.buffers == 0, "%d windows and %d buffers are left",
               known.windows, known.buffers);
    CHECK_NOTE(open == 0, "%d communicators of NCCL are left", open);
    CHECK_NOTE(forbidden == 0, "%d calls broke NCCL's rules", forbidden);
    CHECK_NOTE(out_of_place == 0, "%d scatters moved", out_of_place);
}

#endif

/* False if there is no GPU; *most_out: ranks that there are GPUs for, at most 4. */
static inline bool rig_find(int *most_out)
{
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
        return false;
#if defined(FSDPC_EMU)
    *most_out = 4;
    emu_set_delays(4321);
#else
    *most_out = gpus < 4 ? gpus : 4;
    library = getenv("FSDPC_NCCL_LIB");
#endif
    return true;
}

static inline int rig_missing(const char *name)
{
    const char *demanded = getenv("FSDPC_TEST_GPU");
    printf("%s: no GPU, nothing tested\n", name);
    return demanded && strcmp(demanded, "1") == 0;
}

#endif
