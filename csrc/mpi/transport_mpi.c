/* The caller's half of the MPI transport: posting, testing, aborting, and ending the process.
 *
 * Nothing here calls MPI except to get its version. A post pushes the operation onto a lock-free
 * list and wakes the transport's thread if it sleeps.
 *
 * Aborts. The thread informs the peers and then makes no more MPI calls. This is the only way to
 * keep MPI from writing to receive buffers, since MPI cannot cancel a matched receive. An abort
 * therefore waits until the thread has stopped. (A network adapter may still write data that a peer
 * had begun to put.)
 *
 * The end. MPI_Finalize waits for all processes, and a launcher treats a process that exits
 * without it as failed. A clean destroy therefore returns immediately while the thread continues:
 * it polls a barrier with the other processes, then calls MPI_Finalize. If the process exits with
 * status 0 meanwhile, the exit waits for the thread, as in any MPI program. It waits for as long as
 * the other processes run. Once all have reached the barrier, MPI_Finalize has a deadline. After
 * the deadline the process ends at once, with its status and a warning, because MPI's exit handlers
 * may hang too.
 *
 * MPICH over UCX flushes its connections in MPI_Finalize by sending a request to each peer to which
 * it has sent messages. After these peers have answered, it waits for the launcher and answers no
 * more requests, so any later request from a peer hangs. Each process therefore ends by sending a
 * message to every other process, so that all of them send and receive requests. It then pauses
 * briefly between the barrier and MPI_Finalize so that the other processes can leave the barrier
 * too. By then, every process that answers a request is in MPI_Finalize and has already sent its
 * own requests.
 *
 * After an abort, with operations in flight, or with a nonzero exit status, the process does not
 * wait. Launchers end a run when any process fails; Open MPI's launcher also does so when a process
 * exits without calling MPI_Finalize.
 *
 * The thread and the exit handler use the transport's memory until the process ends, so it is never
 * freed. MPI starts once per process, so this leak happens only once.
 */
#include "mpi/transport_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"

static const int64_t STOP_NS = 2000000000; /* a thread that stays in MPI longer than this is
                                            * abandoned */
static const double NO_DEADLINE = 1e9;     /* until a communicator sets one */

static uint32_t phase_of(fsdpc_mpi_transport *self)
{
    return atomic_load_explicit(&self->phase, memory_order_acquire);
}

static void wake_thread(fsdpc_mpi_transport *self)
{
    if (atomic_exchange(&self->asleep, 0) == 1)
        fsdpc_futex_wake(&self->asleep);
}

/* Waits up to max_ns for the thread to leave a phase. */
static void await_phase(fsdpc_mpi_transport *self, uint32_t left, int64_t max_ns)
{
    int64_t end = fsdpc_clock_ns() + max_ns;
    for (int64_t now; phase_of(self) == left && (now = fsdpc_clock_ns()) < end;)
        fsdpc_futex_wait(&self->phase, left, end - now);
}

static void set_wake(fsdpc_transport *base, void (*wake)(void *arg), void *arg)
{
    fsdpc_mpi_transport *self = (fsdpc_mpi_transport *)base;
    pthread_mutex_lock(&self->waking);
    base->wake = wake;
    base->wake_arg = arg;
    pthread_mutex_unlock(&self->waking);
}

static fsdpc_status mpi_post(fsdpc_transport_op *op)
{
    fsdpc_mpi_transport *self = (fsdpc_mpi_transport *)op->transport;
    FSDPC_TRY(fsdpc_transport_health(op->transport));
    op->status = FSDPC_OK;
    op->moved = 0;
    op->request = 0;
    atomic_store_explicit(&op->state, 1, memory_order_relaxed);
    op->next = atomic_load_explicit(&self->queue, memory_order_relaxed);
    /* Must come before `asleep` is read, because the thread sets `asleep` before checking the queue
     * one last time. */
    while (!atomic_compare_exchange_weak(&self->queue, &op->next, op))
        ;
    wake_thread(self);
    return FSDPC_OK;
}

static fsdpc_status mpi_test(fsdpc_transport_op *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != 0) {
        FSDPC_TRY(fsdpc_transport_health(op->transport));
        return FSDPC_IN_PROGRESS;
    }
    if (op->status == FSDPC_ERR_MISMATCH)
        return fsdpc_fail(op->status,
                          "rank %d sent a message of another size than the %zu bytes that rank %d "
                          "expects (tag %u)",
                          op->peer, op->bytes, op->transport->rank, op->tag);
    return op->status == FSDPC_ERR_PEER ? fsdpc_transport_left(op) : op->status;
}

static void mpi_leave(fsdpc_transport *base)
{
    fsdpc_mpi_transport *self = (fsdpc_mpi_transport *)base;
    atomic_store(&self->leaving, true);
    wake_thread(self);
}

static void tell_thread(fsdpc_mpi_transport *self, enum fsdpc_mpi_wanted wanted)
{
    atomic_store(&self->wanted, wanted);
    wake_thread(self);
    await_phase(self, FSDPC_MPI_RUNNING, STOP_NS);
}

static void mpi_abort(fsdpc_transport *base, const char *reason)
{
    fsdpc_mpi_transport *self = (fsdpc_mpi_transport *)base;
    if (fsdpc_transport_health(base) != FSDPC_OK)
        return;
    const char *why = *reason ? reason : "aborted";
    fsdpc_transport_name_reason(base->rank, why, strlen(why), self->asked, sizeof self->asked);
    tell_thread(self, FSDPC_MPI_ABORT);
    fsdpc_mpi_fail(self, self->asked); /* if the thread could not do it */
}

static void mpi_destroy(fsdpc_transport *base)
{
    fsdpc_mpi_transport *self = (fsdpc_mpi_transport *)base;
    set_wake(base, NULL, NULL);
    tell_thread(self, FSDPC_MPI_END);
    if (phase_of(self) == FSDPC_MPI_STOPPED)
        pthread_join(self->thread, NULL);
    else
        pthread_detach(self->thread);
}

static void mpi_describe(const fsdpc_transport *base, char *text, size_t bytes)
{
    char version[128];
    fsdpc_mpi_version(version, sizeof version);
    snprintf(text, bytes, "MPI between %d processes, %s", base->size, version);
}

void fsdpc_mpi_version(char *text, size_t bytes)
{
    char whole[8192]; /* large enough for both families, since the other one's library may be
                       * loaded */
    int length;
    MPI_Get_library_version(whole, &length);
    whole[strcspn(whole, "\n")] = '\0';
    for (char *at = whole; (at = strchr(at, '\t'));)
        *at = ' ';
    snprintf(text, bytes, "%.100s", whole);
}

/* At a successful exit, waits for the thread to shut MPI down; see the top of the file. */
static void at_exit(int exit_status, void *arg)
{
    fsdpc_mpi_transport *self = arg;
    if (exit_status != 0 || getpid() != self->pid)
        return;
    while (phase_of(self) == FSDPC_MPI_ENDING)
        await_phase(self, FSDPC_MPI_ENDING, STOP_NS);
    await_phase(self, FSDPC_MPI_LAST, (int64_t)(self->base.timeout_s * 1e9));
    if (phase_of(self) != FSDPC_MPI_LAST)
        return;
    FSDPC_WARN(&self->base.log,
               "all ranks have ended, and MPI_Finalize has not returned within %g s "
               "(FSDPC_TIMEOUT_S): this process ends without it, which the launcher may call a "
               "failure",
               self->base.timeout_s);
    fflush(NULL);
    _exit(exit_status);
}

static const fsdpc_transport_ops mpi_ops = {
    .name = "mpi",
    .destroy = mpi_destroy,
    .post = mpi_post,
    .test = mpi_test,
    .abort = mpi_abort,
    .leave = mpi_leave,
    .set_wake = set_wake,
    .describe = mpi_describe,
};

fsdpc_status fsdpc_transport_mpi_create(int rank, int size, fsdpc_transport **out)
{
    fsdpc_mpi_transport *self = calloc(1, sizeof *self);
    if (!self)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a transport");
    self->base =
        (fsdpc_transport){.ops = &mpi_ops, .rank = rank, .size = size, .timeout_s = NO_DEADLINE};
    self->pid = getpid();
    self->met = calloc((size_t)size, sizeof *self->met);
    self->gone = calloc((size_t)size, sizeof *self->gone);
    self->base.farewells = calloc((size_t)size, sizeof *self->base.farewells);
    pthread_mutex_init(&self->waking, NULL);
    fsdpc_status status =
        self->met && self->gone && self->base.farewells
            ? fsdpc_thread_start("fsdpc-mpi", fsdpc_mpi_thread, self, &self->thread)
            : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a transport of %d ranks", size);
    if (status != FSDPC_OK) {
        free(self->base.farewells);
        free(self->gone);
        free(self->met);
        free(self);
        return status;
    }
    while (phase_of(self) == FSDPC_MPI_STARTING)
        await_phase(self, FSDPC_MPI_STARTING, STOP_NS);
    if (self->status != FSDPC_OK) { /* the memory is kept, since MPI may refer to it */
        pthread_join(self->thread, NULL);
        return fsdpc_fail(self->status, "%s", self->reason);
    }
    on_exit(at_exit, self);
    *out = &self->base;
    return FSDPC_OK;
}
