/* How ranks on GPUs join: whether those that share a GPU may, and what all learn if not. */
#include "cuda/comm_cuda.h"

#include "nccl_rig.h"

static void joins(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create_over(fsdpc_cuda_comm_create, &r, self, library));
    EXPECT(self, strcmp(r.comm->ops->name, "nccl") == 0, "joined over %s", r.comm->ops->name);
    rank_destroy(&r);
}

/* The last rank cannot say where its GPU is. */
static fsdpc_status create_hidden(const fsdpc_control_config *config, fsdpc_comm **out)
{
    fsdpc_device *device = config->comm.device;
    int ordinal = device->ordinal;
    if (config->comm.rank == config->comm.size - 1)
        device->ordinal = 10000;
    fsdpc_status status = fsdpc_cuda_comm_create(config, out);
    device->ordinal = ordinal;
    return status;
}

static void hidden(rank_context *self)
{
    gpu_rank r;
    const bool last = self->rank == self->size - 1;
    EXPECT_FAILS(self, rank_create_over(create_hidden, &r, self, library), FSDPC_ERR_INTERNAL,
                 last ? "say where a device sits" : "rank 2: ");
    rank_destroy(&r);
}

#if defined(FSDPC_EMU)

/* Ranks that cannot join over this NCCL, or only some of them, go on with what they have. */
static void too_old(rank_context *self)
{
    gpu_rank r;
    EXPECT_FAILS(self, rank_create_over(fsdpc_cuda_comm_create, &r, self, library),
                 FSDPC_ERR_UNSUPPORTED, "share GPU 0000:1b:00.0, which NCCL 2.28.9 does not let");
    EXPECT_OK(self, fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    rank_destroy(&r);
}

#endif

int main(void)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_comm_cuda");
#if defined(FSDPC_EMU)
    fake_open();
    set_nccl_version(22809);
    ranks_run_threads(1, joins, &(rank_options){0}); /* shares its GPU with nobody */
    for (int size = 2; size <= most; size++)
        ranks_run_threads(size, too_old, &(rank_options){0});
    set_nccl_version(23007);
#endif
    ranks_run_threads(most, joins, &(rank_options){0});
    ranks_run_threads(3, hidden, &(rank_options){0});
#if defined(FSDPC_EMU)
    fake_check();
#endif
    return check_report("test_comm_cuda");
}
