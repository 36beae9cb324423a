/* Creates NCCL's communicators without ever blocking in NCCL.
 *
 * Rank 0 generates a unique id, the control sends its 128 bytes to the other ranks, and every rank
 * calls NCCL's nonblocking init. Before waiting for the init itself, the ranks agree over the
 * control that the call succeeded, because the control can name a missing rank. From then on, the
 * init's state is polled like any operation, with the communicator's checks for the deadline,
 * interrupts and dead peers.
 *
 * Split groups start like the world, with a new unique id, so communicators are always created in
 * the same way and none depends on its parent's.
 *
 * Gathers and reductions run concurrently on one GPU, each over its own communicator. NCCL must
 * then be told that all ranks post in the same order. Otherwise, if kernels of two communicators do
 * not fit on the GPU together, they may start in different orders on two ranks and wait for each
 * other for ever. In NCCL 2.31 and newer, a config field specifies this; in older versions, an
 * environment variable does (nccl_env.c).
 *
 * Until NCCL reports that a call is done, only an abort is allowed on that channel.
 */
#include <sched.h>
#include <string.h>

#include "cuda/device_cuda.h"
#include "cuda/nccl_internal.h"

static const char *const channel_names[] = {"gathers", "reductions"};

fsdpc_status fsdpc_nccl_channel_state(const fsdpc_comm_nccl *self, fsdpc_nccl_channel channel,
                                      const char *what)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    fsdpc_nccl_result state = FSDPC_NCCL_SUCCESS;
    FSDPC_TRY(
        fsdpc_nccl_check(nccl, nccl->ncclCommGetAsyncError(self->channels[channel], &state), what));
    return state == FSDPC_NCCL_IN_PROGRESS ? FSDPC_IN_PROGRESS
                                           : fsdpc_nccl_check(nccl, state, what);
}

typedef struct beginning {
    fsdpc_comm_nccl *self;
    fsdpc_nccl_channel channel;
} beginning;

static fsdpc_status poll_beginning(void *arg)
{
    const beginning *b = arg;
    return fsdpc_nccl_channel_state(b->self, b->channel, "begin");
}

/* Distributes a new communicator's unique id from rank 0 to every rank. */
static fsdpc_status identity(fsdpc_comm_nccl *self, const char *name, fsdpc_nccl_id *id)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    fsdpc_status status = FSDPC_OK;
    memset(id, 0, sizeof *id);
    if (self->base.rank == 0)
        status = fsdpc_nccl_check(nccl, nccl->ncclGetUniqueId(id), "draw an identity");
    FSDPC_TRY(fsdpc_comm_agree(self->base.control, status, name));
    return fsdpc_comm_run(self->base.control, &(fsdpc_coll){.kind = FSDPC_COLL_BROADCAST,
                                                            .unit = -1,
                                                            .what = name,
                                                            .dtype = FSDPC_U8,
                                                            .recv = id,
                                                            .numel = sizeof *id});
}

static fsdpc_status begin(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    const char *name = channel_names[channel];
    fsdpc_nccl_id id;
    if (channel == FSDPC_NCCL_GATHERS)
        FSDPC_TRY(fsdpc_control_settle(&self->base, fsdpc_nccl_learn(self)));
    FSDPC_TRY(fsdpc_control_settle(&self->base, identity(self, name, &id)));
    FSDPC_TRY(fsdpc_device_cuda_select(self->base.device)); /* NCCL uses this thread's GPU */
    fsdpc_nccl_config config = fsdpc_nccl_nonblocking(nccl->version);
    fsdpc_nccl_result result = nccl->ncclCommInitRankConfig(
        &self->channels[channel], self->base.size, id, self->base.rank, &config);
    fsdpc_status status =
        result == FSDPC_NCCL_IN_PROGRESS ? FSDPC_OK : fsdpc_nccl_check(nccl, result, "begin");
    status = fsdpc_control_settle(&self->base, fsdpc_comm_agree(self->base.control, status, name));
    if (status != FSDPC_OK) {
        fsdpc_nccl_channels_abort(self);
        return status;
    }
    beginning b = {self, channel};
    status = fsdpc_comm_wait_for(&self->base, poll_beginning, &b, "the beginning of NCCL", name);
    return status == FSDPC_OK || self->base.poison[0] ? status
                                                      : fsdpc_comm_poison(&self->base, status);
}

fsdpc_status fsdpc_nccl_channel_open(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel)
{
    if (self->channels[channel])
        return FSDPC_OK;
    self->beginning = true;
    fsdpc_status status = begin(self, channel);
    self->beginning = false;
    if (status == FSDPC_OK)
        FSDPC_NOTE(&self->base.log, "NCCL carries %s of %d ranks", channel_names[channel],
                   self->base.size);
    return status;
}

/* Finalizing completes once the peers also finalize. */
void fsdpc_nccl_channels_close(fsdpc_comm_nccl *self)
{
    const int64_t patience_ns = 5000000000;
    const fsdpc_nccl *nccl = &self->world->nccl;
    int64_t until = fsdpc_clock_ns() + patience_ns;
    for (int channel = 0; channel < FSDPC_NCCL_CHANNELS; channel++) {
        fsdpc_nccl_comm raw = self->channels[channel];
        if (!raw)
            continue;
        fsdpc_nccl_result state = nccl->ncclCommFinalize(raw);
        while (state == FSDPC_NCCL_IN_PROGRESS && fsdpc_clock_ns() < until) {
            sched_yield();
            if (nccl->ncclCommGetAsyncError(raw, &state) != FSDPC_NCCL_SUCCESS)
                break;
        }
        if (state != FSDPC_NCCL_SUCCESS)
            break;
        (void)nccl->ncclCommDestroy(raw);
        self->channels[channel] = NULL;
    }
    fsdpc_nccl_channels_abort(self);
}
