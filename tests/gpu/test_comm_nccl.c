/* Collectives of the NCCL communicator, on both lanes and over the control.
 *
 * On GPUs over the NCCL that the loader finds, on the emulated device over the fake.
 */
#include "coll_checks.h"

static void everything(rank_context *self)
{
    gpu_rank r;
    EXPECT_OK(self, rank_create(&r, self, library));
    collectives(&r);
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
