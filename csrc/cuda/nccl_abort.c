/* Ends NCCL communicators at once, whatever they are doing.
 *
 * ncclCommAbort tells GPU work to stop and then, even for a nonblocking communicator, waits until
 * it has stopped and no graph holds any of its operations. One communicator may wait on its stream
 * for another that waits for a dead peer, so aborting them one after the other could block at the
 * first. Graphs are therefore abandoned first. Then one NCCL group aborts all of the rank's
 * communicators, so that NCCL tells all of them to stop before it waits for any.
 *
 * A GPU may hang in work that an abort cannot stop. Gathers by copy engines are an example: they
 * wait for memory that only peers write, and are therefore disabled (nccl_env.c). The group
 * therefore runs on a separate thread, and the aborting thread waits for it for a few seconds at
 * most. After that, the streams are considered blocked for ever, and the device (device_cuda.h) and
 * the thread are lost. The thread's data is reference counted.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "cuda/device_cuda.h"
#include "cuda/graph.h"
#include "cuda/nccl_internal.h"

enum { PATIENCE_S = 4, LOOK_NS = 100000 }; /* launchers allow ranks 5 s after one has failed */

typedef struct ending {
    _Atomic int holders;
    _Atomic bool over; /* released by the thread after all of NCCL's work; acquired by the waiter */
    int ordinal;
    fsdpc_nccl nccl;
    size_t count;
    fsdpc_nccl_comm raws[];
} ending;

static void let_go(ending *it)
{
    if (atomic_fetch_sub(&it->holders, 1) == 1)
        free(it);
}

/* NCCL switches back to the GPU that the thread had selected; without a selection, it would create
 * a context on GPU 0. */
static void abort_all(const ending *it)
{
    (void)cudaSetDevice(it->ordinal);
    (void)it->nccl.ncclGroupStart();
    for (size_t i = 0; i < it->count; i++)
        (void)it->nccl.ncclCommAbort(it->raws[i]);
    (void)it->nccl.ncclGroupEnd();
}

static void *run(void *arg)
{
    ending *it = arg;
    abort_all(it);
    atomic_store_explicit(&it->over, true, memory_order_release);
    let_go(it);
    return NULL;
}

/* Returns whether all the communicators ended in time. */
static bool run_in_time(ending *it)
{
    const struct timespec pause = {0, LOOK_NS};
    int64_t until = fsdpc_clock_ns() + PATIENCE_S * (int64_t)1000000000;
    pthread_t thread;
    atomic_init(&it->holders, 2);
    if (pthread_create(&thread, NULL, run, it) != 0) {
        abort_all(it); /* better to block than not to abort */
        free(it);
        return true;
    }
    (void)pthread_detach(thread);
    bool over = false;
    while (!over && fsdpc_clock_ns() < until) {
        nanosleep(&pause, NULL);
        over = atomic_load_explicit(&it->over, memory_order_acquire);
    }
    let_go(it);
    return over;
}

/* Returns whether a failure of `self` also ends this group. */
static bool ends_with(const fsdpc_comm_nccl *self, const fsdpc_comm_nccl *group)
{
    return group == self || !group->base.apart;
}

fsdpc_comm_nccl *fsdpc_nccl_ending(const fsdpc_comm_nccl *self, const fsdpc_comm_nccl *last)
{
    fsdpc_comm_nccl *group = last ? last->next_group : self->world->groups;
    while (group && !ends_with(self, group))
        group = group->next_group;
    return group;
}

/* Removes the channel from its group. */
static void take(fsdpc_comm_nccl *group, fsdpc_nccl_channel channel, ending *into)
{
    if (group->channels[channel])
        into->raws[into->count++] = group->channels[channel];
    group->channels[channel] = NULL;
}

/* Frees our entries for NCCL's registrations if the gather channel is gone (`over`). Otherwise,
 * NCCL may still write to them, so they are kept. */
static void forget(fsdpc_comm_nccl *group, bool over)
{
    if (over)
        fsdpc_nccl_forget(group);
    else
        group->registered = NULL;
}

/* Ends the collected channels; returns false if the device is lost. */
static bool end(fsdpc_comm_nccl *self, ending *it)
{
    if (it->count == 0) {
        free(it);
        return true;
    }
    it->ordinal = self->base.device->ordinal;
    it->nccl = self->world->nccl;
    fsdpc_cuda_graphs_give_up(self->base.device);
    if (run_in_time(it))
        return true;
    FSDPC_WARN(&self->base.log,
               "NCCL did not end its operations within %d s: they hold the GPU until this process "
               "ends, which waits for it no more",
               (int)PATIENCE_S);
    fsdpc_device_cuda_lose(self->base.device);
    return false;
}

/* Allocates memory for the channels of `groups` groups. If that fails, no channel can be ended and
 * the GPU is lost. */
static ending *ending_new(fsdpc_comm_nccl *self, size_t groups)
{
    ending *made = calloc(1, sizeof *made + groups * FSDPC_NCCL_CHANNELS * sizeof *made->raws);
    if (!made)
        fsdpc_device_cuda_lose(self->base.device);
    return made;
}

void fsdpc_nccl_channel_abort(fsdpc_comm_nccl *self, fsdpc_nccl_channel channel)
{
    ending *it = ending_new(self, 1);
    if (!it)
        return;
    take(self, channel, it);
    bool over = end(self, it);
    if (channel == FSDPC_NCCL_GATHERS)
        forget(self, over);
}

void fsdpc_nccl_channels_abort(fsdpc_comm_nccl *self)
{
    ending *it = ending_new(self, 1);
    if (!it)
        return;
    take(self, FSDPC_NCCL_GATHERS, it);
    take(self, FSDPC_NCCL_REDUCES, it);
    forget(self, end(self, it));
}

void fsdpc_nccl_groups_abort(fsdpc_comm_nccl *self)
{
    fsdpc_comm_nccl *group = NULL;
    size_t groups = 0;
    while ((group = fsdpc_nccl_ending(self, group)))
        groups++;
    ending *it = ending_new(self, groups);
    if (!it)
        return;
    while ((group = fsdpc_nccl_ending(self, group))) {
        take(group, FSDPC_NCCL_GATHERS, it);
        take(group, FSDPC_NCCL_REDUCES, it);
    }
    bool over = end(self, it);
    while ((group = fsdpc_nccl_ending(self, group)))
        forget(group, over);
}
