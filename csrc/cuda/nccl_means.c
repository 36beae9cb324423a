/* What gathers over NCCL can do with the machine: what all ranks have, agreed on when NCCL's
 * communicator for them is made.
 *
 * Registering (nccl_register.c) takes calls that a NCCL may be too old for.
 *
 * Copy engines.  A GPU moves memory by engines of its own, beside its multiprocessors, and NCCL
 * leaves gathers to them from 2.28 on: where its communicator was made to, the driver is CUDA
 * 12.5's or newer, all GPUs are one host's and reach each other, and memory is a symmetric window.
 * So it is asked for where all of that holds on every rank, and all have switched it on; else NCCL
 * gathers by kernels, also where it would choose otherwise by itself (nccl_env.c).  Ranks of one
 * communicator are of one host, as its control is.
 *
 * They are not the default.  A copy waits for peers by waits of the driver's, on words that peers
 * alone write, and no NCCL can tell those of an abort: where a peer dies the GPU is held until the
 * process ends (nccl_abort.c).  And ranks number their copies on the host, a captured one when it
 * is captured, so one rank that gives up a capture would leave all with numbers that do not fit;
 * hence steps are not captured over them.
 *
 * A rank knows whether its GPU reaches another's if that one is visible to its process; where a
 * launcher shows each rank its own GPU alone, gathers do without.
 */
#include <stdlib.h>

#include "cuda/comm_nccl.h"
#include "cuda/cuda_driver.h"
#include "cuda/device_cuda.h"

enum { COPY_ENGINES_NCCL = 22800, COPY_ENGINES_DRIVER = 12050 };

typedef struct card {
    char address[32]; /* of the GPU */
    bool windows, buffers, copies;
} card;

static fsdpc_status fill(const fsdpc_comm_nccl *self, card *mine)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    bool tries = !self->fails_to_register;
    mine->windows = tries && nccl->ncclCommWindowRegister && nccl->ncclCommWindowDeregister;
    mine->buffers = tries && nccl->ncclCommRegister && nccl->ncclCommDeregister;
    mine->copies = self->world->copy_engines && mine->windows &&
                   self->base.device->window_granule > 0 && nccl->version >= COPY_ENGINES_NCCL &&
                   fsdpc_cuda_driver_version() >= COPY_ENGINES_DRIVER;
    return fsdpc_device_cuda_address(self->base.device, mine->address, sizeof mine->address);
}

/* Whether this rank's GPU reaches all others. */
static bool reaches(const fsdpc_comm_nccl *self, const card *cards)
{
    bool all = true;
    for (int r = 0; all && r < self->base.size; r++) {
        int peer = -1, can = 0;
        if (r == self->base.rank)
            continue;
        all = cudaDeviceGetByPCIBusId(&peer, cards[r].address) == cudaSuccess &&
              cudaDeviceCanAccessPeer(&can, self->base.device->ordinal, peer) == cudaSuccess && can;
    }
    (void)cudaGetLastError(); /* a GPU that is not visible */
    return all;
}

static fsdpc_status all_reach(fsdpc_comm_nccl *self, const char *what, bool mine)
{
    int64_t all = mine;
    FSDPC_TRY(fsdpc_comm_run(self->control, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                          .unit = -1,
                                                          .what = what,
                                                          .dtype = FSDPC_I64,
                                                          .op = FSDPC_RED_MIN,
                                                          .send = &all,
                                                          .recv = &all,
                                                          .numel = 1}));
    self->copies = all > 0;
    self->base.uncapturable = self->copies
                                  ? "gathers go by copy engines, which no graph can hold: unset "
                                    "FSDPC_COPY_ENGINES"
                                  : NULL;
    return FSDPC_OK;
}

fsdpc_status fsdpc_nccl_learn(fsdpc_comm_nccl *self)
{
    static const char what[] = "what gathers can do";
    int size = self->base.size;
    card mine = {0}, all = {"", true, true, size > 1};
    void *told;
    fsdpc_status status = fill(self, &mine);
    FSDPC_TRY(fsdpc_control_tell(self->control, what, status, &mine, sizeof mine, &told));
    const card *cards = told;
    for (int r = 0; r < size; r++) {
        all.windows = all.windows && cards[r].windows;
        all.buffers = all.buffers && cards[r].buffers;
        all.copies = all.copies && cards[r].copies;
    }
    status = all_reach(self, what, all.copies && reaches(self, cards));
    free(told);
    FSDPC_TRY(status);
    self->registers = all.windows   ? FSDPC_NCCL_WINDOWS
                      : all.buffers ? FSDPC_NCCL_BUFFERS
                                    : FSDPC_NCCL_NOTHING;
    return FSDPC_OK;
}
