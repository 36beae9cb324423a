/* Collectives of the NCCL communicator, on both channels and over the control.
 *
 * On GPUs over the NCCL that the loader finds, on the emulated device over the fake.
 */
#include "coll_bits.h"

/* Nothing that was posted later has been handed to NCCL, in any group. */
static void check_turns(gpu_rank *r)
{
    const fsdpc_nccl_world *world = fsdpc_nccl_of(r->comm)->world;
    for (const fsdpc_comm_nccl *group = world->groups; group; group = group->next_group) {
        for (const fsdpc_nccl_op *it = group->in_flight; it; it = it->next) {
            bool handed = it->progress != FSDPC_NCCL_QUEUED;
            EXPECT(r->self, !it->on_gpu || !handed || it->turn <= world->turns.launched,
                   "operation %llu is with NCCL, and %llu is not", (unsigned long long)it->turn,
                   (unsigned long long)world->turns.launched);
        }
    }
}

/* Two groups in turns, each with operations that wait for its busy channel. */
static void turns_of_groups(gpu_rank *r)
{
    enum { OPS = 12, NUMEL = 64 };
    size_t n = (size_t)r->self->size * NUMEL;
    fsdpc_comm *groups[2] = {r->comm, NULL};
    fsdpc_work works[OPS];
    void *sums;
    memset(works, 0, sizeof works);
    EXPECT_OK(r->self, fsdpc_comm_split(r->comm, 0, r->self->rank, &groups[1]));
    EXPECT_OK(r->self, fsdpc_device_alloc(r->device, FSDPC_MEM_OTHER, OPS * n * 4, &sums));
    EXPECT_OK(r->self, fsdpc_device_fill(r->device, sums, 0, OPS * n * 4, NULL));
    for (int i = 0; i < OPS; i++) {
        float *at = (float *)sums + (size_t)i * n;
        fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE,
                         .unit = -1,
                         .what = "turn",
                         .dtype = FSDPC_F32,
                         .send = at,
                         .recv = at,
                         .numel = n};
        EXPECT_OK(r->self, fsdpc_comm_post(groups[i / 3 % 2], &op, &works[i]));
        check_turns(r);
    }
    for (int i = 0; i < OPS; i++)
        EXPECT_OK(r->self, fsdpc_comm_wait(&works[i]));
    const fsdpc_nccl_turns *turns = &fsdpc_nccl_of(r->comm)->world->turns;
    EXPECT(r->self, turns->posted == turns->launched, "turns are left");
    fsdpc_device_free(r->device, sums);
    fsdpc_comm_destroy(groups[1]);
}

static void everything(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create(&r, self, library));
    collectives(&r);
    bits(&r);
    turns_of_groups(&r);
    rank_destroy(&r);
}

int main(void)
{
    int most;
    if (!rig_find(&most))
        return rig_missing("test_comm_nccl");
#if defined(FSDPC_EMU)
    fake_open();
#endif
    for (int size = 1; size <= most; size++)
        ranks_run_threads(size, everything, &(rank_options){0});
#if defined(FSDPC_EMU)
    fake_check();
#endif
    return check_report("test_comm_nccl");
}
