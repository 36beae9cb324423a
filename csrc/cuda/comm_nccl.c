/* Manages the NCCL communicator's lifetime and the tasks that it delegates to its control.
 *
 * Each buffer is in one GPU's memory: NCCL moves slices between the ranks' buffers, so no rank
 * reads another rank's buffer. With several ranks, parameter buffers have no memory; gathers write
 * to the caller's memory. A parameter buffer uses the epochs of an empty parameter buffer in the
 * control; this takes only a few words of shared memory. A buffer is idle as soon as its own
 * operations are done.
 *
 * Failure. A failing rank first closes the controls, so that the peers learn the reason. It then
 * aborts all its channels at once; otherwise, kernels waiting for a peer would block their streams
 * for ever. While a peer waits for its GPU, it uses the control's waits to check for a reason and
 * for dead ranks. If it finds either, it aborts too. All groups of a rank end together.
 *
 * A kernel that waits for a dead peer never ends, and a host that only waits for the GPU would
 * never learn the reason. The first communicator of a device therefore provides the device's peer
 * check. Every sync then polls the GPU, as our own waits do, and checks for the deadline,
 * interrupts and dead peers.
 */
#include "cuda/comm_nccl.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "cuda/error.h"
#include "cuda/device_cuda.h"
#include "cuda/nccl_internal.h"

enum { GPU_NAP_NS = 50000 };  /* the GPU cannot wake the host when it finishes */
enum { LAST_NS = 800000000 }; /* how long the GPU may take to finish operations with a dead peer */

static const fsdpc_comm_ops nccl_ops;

/* ---- Failure ---- */

static void nccl_abort(fsdpc_comm *comm, fsdpc_status status, const char *reason)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    fsdpc_comm_abort_local(comm, status, reason);
    if (fsdpc_nccl_is_forked(self))
        return;
    fsdpc_comm_nccl *group = NULL;
    while ((group = fsdpc_nccl_ending(self, group))) {
        fsdpc_comm *control = group->base.control;
        fsdpc_comm_abort_local(&group->base, status, comm->poison);
        control->ops->abort(control, status, comm->poison);
    }
    fsdpc_nccl_groups_abort(self);
    while ((group = fsdpc_nccl_ending(self, group)))
        fsdpc_nccl_ops_drop(group, FSDPC_ERR_POISONED);
}

/* ---- Lifetime ---- */

static void world_release(fsdpc_nccl_world *world)
{
    if (atomic_fetch_sub(&world->refs, 1) == 1)
        free(world);
}

static fsdpc_status comm_new(const fsdpc_control_config *config, fsdpc_nccl_world *world,
                             fsdpc_comm_nccl **out)
{
    fsdpc_comm_nccl *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator");
    fsdpc_comm_init(&self->base, &nccl_ops, &config->comm);
    self->base.control = config->control;
    self->base.world_rank = self->base.log.rank = config->control->world_rank;
    self->base.carry = config->control->carry;
    self->base.carry_arg = config->control->carry_arg;
    atomic_fetch_add(&world->refs, 1);
    self->world = world;
    self->next_group = world->groups;
    world->groups = self;
    *out = self;
    return FSDPC_OK;
}

/* First finishes the work that peers need from this rank's GPU, because that work stops when the
 * process ends. */
static void nccl_leave(fsdpc_comm *comm)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    if (!fsdpc_nccl_is_forked(self) && !comm->poison[0])
        for (fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
            if (group->base.apart == comm->apart)
                fsdpc_nccl_ops_finish(group);
    fsdpc_comm_leave(self->base.control);
}

static void nccl_destroy(fsdpc_comm *comm)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    fsdpc_comm_nccl **at = &self->world->groups;
    while (*at != self)
        at = &(*at)->next_group;
    *at = self->next_group;
    if (comm->device->peer_check.arg == self)
        comm->device->peer_check = (fsdpc_peer_check){0};
    if (!fsdpc_nccl_is_forked(self)) {
        if (!comm->poison[0])
            fsdpc_nccl_ops_finish(self);
        bool idle =
            comm->control && !self->in_flight && !comm->poison[0] && !comm->control->poison[0];
        fsdpc_nccl_ops_drop(self, FSDPC_ERR_STATE);
        if (idle)
            fsdpc_nccl_channels_close(self);
        else
            fsdpc_nccl_channels_abort(self);
    }
    fsdpc_comm_destroy(self->base.control); /* first: it may refer to our operations' agreements */
    if (!fsdpc_nccl_is_forked(self))
        fsdpc_nccl_ops_free(self);
    world_release(self->world);
    free(self);
}

static fsdpc_status nccl_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm), *part = NULL;
    fsdpc_control_config config;
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(fsdpc_nccl_launched(self));
    FSDPC_TRY(fsdpc_control_split(comm, color, key, &config));
    fsdpc_status status = config.control ? comm_new(&config, self->world, &part) : FSDPC_OK;
    status =
        fsdpc_control_settle(&self->base, fsdpc_comm_agree(self->base.control, status, "split"));
    if (status != FSDPC_OK) {
        if (part)
            nccl_destroy(&part->base);
        else
            fsdpc_comm_destroy(config.control);
        return status;
    }
    *out = part ? &part->base : NULL;
    return FSDPC_OK;
}

/* ---- Parameter buffers and epochs ---- */

/* While we wait for peers here, they may be waiting for operations that we have not launched. If
 * `out` is NULL, it only checks that the sizes agree. */
static fsdpc_status memory_create(fsdpc_comm_nccl *self, const char *what, fsdpc_mem_kind kind,
                                  size_t bytes, void **out)
{
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    FSDPC_TRY(fsdpc_nccl_launched(self));
    return out ? fsdpc_control_memory(&self->base, what, kind, bytes, out)
               : fsdpc_control_sizes(&self->base, what, bytes);
}

static fsdpc_status nccl_param_buffer_create(fsdpc_comm *comm, size_t bytes,
                                             fsdpc_param_buffer **out)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    fsdpc_controlled_param_buffer *param_buffer = calloc(1, sizeof *param_buffer);
    if (!param_buffer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a parameter buffer");
    void *data = NULL;
    fsdpc_status status;
    bool offsets_only = comm->size > 1;
    FSDPC_TRY_GOTO(status,
                   memory_create(self, "param_buffer_create", FSDPC_MEM_UNSHARDED, bytes,
                                 offsets_only ? NULL : &data),
                   free_param_buffer);
    FSDPC_TRY_GOTO(
        status,
        fsdpc_control_settle(
            &self->base, fsdpc_param_buffer_create(self->base.control, 0, &param_buffer->control)),
        free_data);
    FSDPC_TRY_GOTO(status, fsdpc_nccl_channel_open(self, FSDPC_NCCL_GATHERS), destroy_control);
    param_buffer->base = (fsdpc_param_buffer){
        .comm = comm, .bytes = bytes, .offsets_only = offsets_only, .read = data, .write = data};
    *out = &param_buffer->base;
    return FSDPC_OK;

destroy_control:
    fsdpc_param_buffer_destroy(param_buffer->control);
free_data:
    fsdpc_device_free(comm->device, data);
free_param_buffer:
    free(param_buffer);
    return status;
}

static void nccl_param_buffer_destroy(fsdpc_param_buffer *base)
{
    fsdpc_controlled_param_buffer *param_buffer = (fsdpc_controlled_param_buffer *)base;
    fsdpc_param_buffer_destroy(param_buffer->control);
    fsdpc_device_free(base->comm->device, base->write);
    free(param_buffer);
}

/* ---- Buffers ---- */

static fsdpc_status nccl_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    fsdpc_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a buffer");
    void *data = NULL;
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, memory_create(self, "buffer_create", FSDPC_MEM_REDUCE, bytes, &data),
                   free_buffer);
    FSDPC_TRY_GOTO(status, fsdpc_nccl_channel_open(self, FSDPC_NCCL_REDUCES), free_data);
    *buffer = (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = data};
    self->buffers++;
    *out = buffer;
    return FSDPC_OK;

free_data:
    fsdpc_device_free(comm->device, data);
free_buffer:
    free(buffer);
    return status;
}

static void nccl_buffer_destroy(fsdpc_buffer *buffer)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(buffer->comm);
    if (--self->buffers == 0 && !fsdpc_nccl_is_forked(self))
        fsdpc_nccl_staging_free(self);
    fsdpc_device_free(buffer->comm->device, buffer->data);
    free(buffer);
}

/* Peers never read the buffer, so it is idle once its work is done. Ordered work is enough if the
 * next writer follows the same order. */
static fsdpc_status nccl_buffer_idle(fsdpc_buffer *buffer)
{
    const fsdpc_comm_nccl *self = fsdpc_nccl_of(buffer->comm);
    for (const fsdpc_nccl_op *op = self->in_flight; op; op = op->next)
        if (op->work && fsdpc_coll_reduces(op->coll.kind) && op->coll.buffer == buffer)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "a reduction of this buffer is in flight: wait for it first");
    return fsdpc_comm_health(buffer->comm);
}

/* ---- Waiting ---- */

/* Returns whether this rank may be waiting for the GPU. */
static bool gpu_is_busy(const fsdpc_comm_nccl *self)
{
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group) {
        if (group->base.apart != self->base.apart)
            continue;
        if (group->beginning || group->host_waits)
            return true;
        for (const fsdpc_nccl_op *op = group->in_flight; op; op = op->next)
            if (op->work && op->progress != FSDPC_NCCL_DONE)
                return true;
    }
    return false;
}

/* Returns whether the GPU may be waiting for peers, rather than only doing local work. */
static bool gpu_needs_peers(const fsdpc_comm_nccl *self)
{
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (const fsdpc_nccl_op *op = group->in_flight; op; op = op->next)
            if (op->progress != FSDPC_NCCL_DONE)
                return true;
    return false;
}

/* Returns whether a wait may continue even though a peer is gone. This is the case if it does not
 * need the peer, or if all ranks have posted the operation: a rank that finishes its part first
 * also leaves first. */
static bool goes_on_alone(fsdpc_comm_nccl *self)
{
    if (!gpu_needs_peers(self))
        return self->host_waits;
    for (const fsdpc_comm_nccl *group = self->world->groups; group; group = group->next_group)
        for (const fsdpc_nccl_op *op = group->in_flight; op; op = op->next)
            if (op->agreement.comm)
                return false;
    int64_t now = fsdpc_clock_ns();
    if (self->missed_ns == 0)
        self->missed_ns = now;
    return now - self->missed_ns < LAST_NS;
}

static fsdpc_status nccl_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(comm);
    fsdpc_comm *control = self->base.control;
    if (max_ns > 0)
        FSDPC_TRY(fsdpc_nccl_carry_on(self));
    if (max_ns > GPU_NAP_NS && gpu_is_busy(self))
        max_ns = GPU_NAP_NS;
    if (control->ops->idle) {
        fsdpc_status status = control->ops->idle(control, nap, max_ns);
        if (status == FSDPC_OK || !goes_on_alone(self))
            return status;
    }
    if (max_ns > 0) /* even if peers that are no longer needed are gone */
        sched_yield();
    return FSDPC_OK;
}

typedef struct watched {
    fsdpc_comm_nccl *self;
    fsdpc_status (*poll)(void *arg);
    void *arg;
} watched;

/* If the device has finished an operation with its peers, they have agreed on it. The second
 * check, after the poll, therefore sees their agreement. */
static fsdpc_status poll_watched(void *arg)
{
    const watched *w = arg;
    fsdpc_status status = FSDPC_IN_PROGRESS;
    for (int look = 0; look < 2; look++) {
        FSDPC_TRY(fsdpc_nccl_carry_on(w->self));
        FSDPC_TRY(fsdpc_comm_health(&w->self->base));
        if (look == 0)
            status = w->poll(w->arg);
        if (status != FSDPC_OK)
            return status;
    }
    return FSDPC_OK;
}

/* Waits for the GPU's remaining work after a failure has ended all waits for peers, because earlier
 * results may still be read. */
static fsdpc_status wait_for_rest(const fsdpc_comm_nccl *self, fsdpc_status (*poll)(void *arg),
                                  void *arg)
{
    const int64_t patience_ns = 5000000000;
    int64_t until = fsdpc_clock_ns() + patience_ns;
    fsdpc_status status = poll(arg);
    for (; status == FSDPC_IN_PROGRESS && fsdpc_clock_ns() < until; status = poll(arg))
        sched_yield();
    return status == FSDPC_IN_PROGRESS ? fsdpc_comm_health(&self->base) : status;
}

static fsdpc_status checked_wait(void *arg, fsdpc_status (*poll)(void *poll_arg), void *poll_arg)
{
    fsdpc_comm_nccl *self = arg;
    if (self->base.poison[0])
        return wait_for_rest(self, poll, poll_arg);
    watched w = {self, poll, poll_arg};
    bool outer = self->host_waits;
    self->host_waits = true;
    fsdpc_status status =
        fsdpc_comm_wait_for(&self->base, poll_watched, &w, "what the GPU was given", NULL);
    self->host_waits = outer;
    return status;
}

/* ---- The table ---- */

static const fsdpc_comm_ops nccl_ops = {
    .name = "nccl",
    .destroy = nccl_destroy,
    .split = nccl_split,
    .abort = nccl_abort,
    .leave = nccl_leave,
    .param_buffer_create = nccl_param_buffer_create,
    .param_buffer_destroy = nccl_param_buffer_destroy,
    .param_buffer_attach = fsdpc_nccl_param_buffer_attach,
    .param_buffer_detach = fsdpc_nccl_param_buffer_detach,
    .epoch_arrive = fsdpc_controlled_arrive,
    .epoch_test = fsdpc_controlled_test,
    .epoch_copied_in = fsdpc_controlled_copied_in,
    .epoch_copy_in_test = fsdpc_controlled_copy_in_test,
    .buffer_create = nccl_buffer_create,
    .buffer_destroy = nccl_buffer_destroy,
    .buffer_idle = nccl_buffer_idle,
    .splits_sums = true,
    .post = fsdpc_nccl_post,
    .test = fsdpc_nccl_test,
    .order = fsdpc_nccl_order,
    .idle = nccl_idle,
};

fsdpc_status fsdpc_comm_nccl_create(const fsdpc_control_config *config, fsdpc_comm **out)
{
    FSDPC_TRY(fsdpc_control_check(config));
    fsdpc_comm_nccl *self = NULL;
    fsdpc_nccl_world *world = calloc(1, sizeof *world);
    fsdpc_status status =
        world ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a communicator");
    if (status == FSDPC_OK) {
        atomic_init(&world->refs, 1);
        world->pid = (int)getpid();
        const fsdpc_log silent = {0}; /* only one rank reports for all */
        status =
            fsdpc_nccl_open(config->library_path, fsdpc_control_hosts(config) > 1,
                            config->comm.rank == 0 ? &config->comm.log : &silent, &world->nccl);
    }
    if (status == FSDPC_OK)
        status = comm_new(config, world, &self);
    status = fsdpc_comm_agree(config->control, status, "opening NCCL");
    if (world)
        world_release(world); /* self holds its own reference */
    if (status == FSDPC_OK) {
        fsdpc_device *device = config->comm.device;
        if (!device->peer_check.wait_for)
            device->peer_check = (fsdpc_peer_check){checked_wait, self};
        *out = &self->base;
        return FSDPC_OK;
    }
    if (self) {
        self->base.control = NULL; /* the caller keeps it */
        nccl_destroy(&self->base);
    }
    return status;
}
