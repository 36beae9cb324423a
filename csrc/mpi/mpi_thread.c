/* The thread that calls MPI.
 *
 * Messages. A message travels in segments of SEGMENT bytes and ends with a shorter one, which may
 * be empty. If two ranks post different sizes, some pair of segments therefore differs in size.
 * MPI sends a segment of this size immediately. For a larger segment, MPI would first ask the peer,
 * whose thread is asleep; steps over a 1 Gbit/s network then took 1.3 times as long. UCX, MPICH's
 * usual transport, asks first even for smaller segments, so we raise its threshold unless
 * UCX_RNDV_THRESH is set. At most WINDOW segments of a message are in flight. MPI preserves the
 * order of segments with the same ranks and tag. A message waits until all segments of earlier
 * messages with the same peer, tag and direction have been posted.
 *
 * Receives probe first (MPI_Improbe) and pass memory to MPI only after a segment of the expected
 * size has arrived. MPI also reports a longer segment as an error, but by then Open MPI 4.1 has
 * written past the end of the buffer.
 *
 * Sleeping. MPI makes progress only inside its calls, and offers no way to sleep until a message
 * arrives. Between two polls this thread sleeps for an eighth of the time since an operation was
 * last posted or ended. This lengthens a wait by at most an eighth and keeps long waits from
 * occupying a core. The longest sleep is 1 ms while operations are in flight and 100 ms otherwise,
 * when only an abort reason can arrive. A post wakes the thread. Completing a few segments neither
 * resets the sleep nor wakes a waiting caller. On a core that also computes, polling after each
 * segment lengthened a step over a 1 Gbit/s network from 496 ms to 570 ms. After many segments have
 * completed, the thread polls again immediately.
 *
 * News. Every process posts a receive for the abort reason, which the first process to abort
 * sends. An MPI error also becomes the reason, unless the watch (comm/host_watch.h) soon finds a
 * better one: MPI knows that a connection broke, but not why.
 *
 * Leaving. A process that will post no more operations sends a farewell to all peers with which it
 * has exchanged messages. The farewell has a separate tag and comes after all other messages. A
 * receive that has waited for a long time checks for the farewell: if it is the only message, no
 * others will come.
 */
#include "mpi/transport_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/wait.h"

enum { SEGMENT = 60 << 10, WINDOW = 64, MANY = WINDOW / 4 };

static const int64_t SHORTEST_NS = 50000, BUSY_NS = 1000000, IDLE_NS = 100000000;
static const int64_t LONG_NS = 100000000; /* until a receive checks whether its peer has left */
static const int64_t TELL_NS = 300000000; /* for the peers to receive a reason: three of their
                                           * longest sleeps */
static const int64_t GRACE_NS = 1000000000;
static const int64_t SETTLE_NS = 300000000; /* for the peers to also leave the last barrier */

void fsdpc_mpi_fail(fsdpc_mpi_transport *self, const char *reason)
{
    if (atomic_exchange(&self->failing, true))
        return;
    snprintf(self->base.poison, sizeof self->base.poison, "%s", reason);
    atomic_store_explicit(&self->base.failed, true, memory_order_release);
}

void fsdpc_mpi_wake(fsdpc_mpi_transport *self)
{
    pthread_mutex_lock(&self->waking);
    if (self->base.wake)
        self->base.wake(self->base.wake_arg);
    pthread_mutex_unlock(&self->waking);
}

static void enter(fsdpc_mpi_transport *self, enum fsdpc_mpi_phase phase)
{
    atomic_store_explicit(&self->phase, phase, memory_order_release);
    fsdpc_futex_wake(&self->phase);
}

/* Returns whether an MPI call failed; the first failure becomes the transport's abort reason. */
static bool failed(fsdpc_mpi_transport *self, int error, const char *call)
{
    if (error == MPI_SUCCESS)
        return false;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(error, text, &length);
    if (!*self->reason)
        snprintf(self->reason, sizeof self->reason, "rank %d: %s: %.160s", self->base.rank, call,
                 text);
    return true;
}

/* Like failed, but for a call about a message; the reason also names the peer. */
static bool failed_with(fsdpc_mpi_transport *self, int error, const char *call,
                        const fsdpc_transport_op *op)
{
    char about[64];
    snprintf(about, sizeof about, "%s %s rank %d", call, op->sends ? "to" : "from", op->peer);
    return failed(self, error, about);
}

static int class_of(int error)
{
    int class = MPI_SUCCESS;
    if (error != MPI_SUCCESS)
        MPI_Error_class(error, &class);
    return class;
}

/* ---- Starting ---- */

static fsdpc_status start_mpi(fsdpc_mpi_transport *self)
{
    int is, level;
    MPI_Finalized(&is);
    if (is)
        return fsdpc_fail(FSDPC_ERR_STATE, "MPI has ended in this process and starts only once: "
                                           "keep what stands on it until the process ends");
    MPI_Initialized(&is);
    if (is) {
        MPI_Query_thread(&level);
        if (level != MPI_THREAD_MULTIPLE)
            return fsdpc_fail(FSDPC_ERR_STATE,
                              "MPI was started in this process before, and not with "
                              "MPI_THREAD_MULTIPLE: start it so, or start fsdpc first");
        return FSDPC_OK;
    }
    setenv("UCX_RNDV_THRESH", "64k", 0);
    setenv("UCX_TCP_KEEPIDLE", "inf", 0); /* the watch decides how long a silence may last */
    if (failed(self, MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", self->reason);
    self->ours = true;
    if (level < MPI_THREAD_FUNNELED)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "this MPI was built without threads: take one that has "
                          "MPI_THREAD_FUNNELED");
    return FSDPC_OK;
}

/* Removes the file that MPICH 5 keeps in /dev/shm until MPI_Finalize, which a killed rank never
 * calls. After the first collective, all ranks have mapped the memory, and no rank opens the file
 * by name again. */
static void unlink_early(void)
{
    static const char SHARED[] = "/dev/shm/mpich_shm_";
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        char *path = strstr(line, SHARED);
        if (!path)
            continue;
        path[strcspn(path, " \n")] = '\0'; /* "(deleted)" may follow */
        unlink(path);                      /* unless another rank has already done so */
    }
    if (maps)
        fclose(maps);
}

static fsdpc_status join_world(fsdpc_mpi_transport *self)
{
    int size, rank, flag, *limit;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != self->base.size)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "MPI has %d processes and this world %d ranks: start all ranks by one "
                          "mpiexec, of the MPI that fsdpc was built with",
                          size, self->base.size);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (failed(self, MPI_Comm_split(MPI_COMM_WORLD, 0, self->base.rank, &self->comm),
               "MPI_Comm_split") ||
        failed(self, MPI_Comm_dup(self->comm, &self->news), "MPI_Comm_dup"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", self->reason);
    if (self->ours)
        unlink_early();
    MPI_Comm_rank(self->comm, &rank);
    if (rank != self->base.rank)
        return fsdpc_fail(FSDPC_ERR_VALUE, "two processes of MPI are rank %d or %d", rank,
                          self->base.rank);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &flag);
    self->base.tags = flag ? (uint32_t)*limit : (1u << 15) - 1; /* the highest tag is the
                                                                 * farewell */
    return FSDPC_OK;
}

/* ---- Segments ---- */

/* Reserves space for one more request. */
static bool grow(fsdpc_mpi_transport *self)
{
    if (self->n < self->capacity)
        return true;
    size_t more = self->capacity ? 2 * self->capacity : 64;
    void *grown[] = {
        realloc(self->requests, more * sizeof *self->requests),
        realloc(self->segments, more * sizeof *self->segments),
        realloc(self->indices, more * sizeof *self->indices),
        realloc(self->statuses, more * sizeof *self->statuses),
    };
    self->requests = grown[0] ? grown[0] : self->requests;
    self->segments = grown[1] ? grown[1] : self->segments;
    self->indices = grown[2] ? grown[2] : self->indices;
    self->statuses = grown[3] ? grown[3] : self->statuses;
    if (!grown[0] || !grown[1] || !grown[2] || !grown[3]) {
        snprintf(self->reason, sizeof self->reason, "rank %d: no memory for %zu requests of MPI",
                 self->base.rank, more);
        return false;
    }
    self->capacity = more;
    return true;
}

static void post_news(fsdpc_mpi_transport *self)
{
    self->segments[0] = (fsdpc_mpi_segment){NULL, sizeof self->heard};
    failed(self,
           MPI_Irecv(self->heard, sizeof self->heard, MPI_BYTE, MPI_ANY_SOURCE, 0, self->news,
                     &self->requests[0]),
           "MPI_Irecv");
    self->n = 1;
}

static bool all_posted(const fsdpc_transport_op *op)
{
    return op->moved > op->bytes / SEGMENT; /* segments already posted */
}

static void add_segment(fsdpc_mpi_transport *self, fsdpc_transport_op *op, int bytes)
{
    self->segments[self->n++] = (fsdpc_mpi_segment){op, bytes};
    op->moved++;
    op->request++; /* segments in flight */
}

static bool send_segment(fsdpc_mpi_transport *self, fsdpc_transport_op *op, unsigned char *data,
                         int bytes)
{
    if (failed_with(self,
                    MPI_Isend(data, bytes, MPI_BYTE, op->peer, (int)op->tag, self->comm,
                              &self->requests[self->n]),
                    "MPI_Isend", op))
        return false;
    add_segment(self, op, bytes);
    return true;
}

/* Receives and discards a segment of the wrong size. The operation ends when its segments in flight
 * have completed; later messages with its tag may not match. */
static void refuse_segment(fsdpc_mpi_transport *self, fsdpc_transport_op *op, MPI_Message *message,
                           int bytes)
{
    void *scratch = malloc((size_t)bytes + 1);
    if (scratch)
        failed(self, MPI_Mrecv(scratch, bytes, MPI_BYTE, message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    free(scratch);
    op->status = FSDPC_ERR_MISMATCH;
    op->moved = op->bytes / SEGMENT + 1;
}

/* Returns whether a segment had arrived. */
static bool receive_segment(fsdpc_mpi_transport *self, fsdpc_transport_op *op, unsigned char *data,
                            int bytes)
{
    int found = 0, sent = 0;
    MPI_Message message;
    MPI_Status status;
    if (failed_with(self,
                    MPI_Improbe(op->peer, (int)op->tag, self->comm, &found, &message, &status),
                    "MPI_Improbe", op) ||
        !found)
        return false;
    MPI_Get_count(&status, MPI_BYTE, &sent);
    if (sent != bytes) {
        refuse_segment(self, op, &message, sent);
        return true;
    }
    if (failed_with(self, MPI_Imrecv(data, bytes, MPI_BYTE, &message, &self->requests[self->n]),
                    "MPI_Imrecv", op))
        return false;
    add_segment(self, op, bytes);
    return true;
}

/* Posts a segment, and returns whether there may be another one to post. */
static bool post_segment(fsdpc_mpi_transport *self, fsdpc_transport_op *op)
{
    if (!grow(self))
        return false;
    size_t offset = op->moved * SEGMENT, left = op->bytes - offset;
    unsigned char *data = op->bytes ? op->data + offset : NULL;
    int bytes = left < SEGMENT ? (int)left : SEGMENT;
    return op->sends ? send_segment(self, op, data, bytes) : receive_segment(self, op, data, bytes);
}

/* Ends an operation if it has nothing in flight; from then on the caller owns its storage. */
static void end_op(fsdpc_mpi_transport *self, fsdpc_transport_op *op)
{
    if (op->request > 0 || !all_posted(op))
        return;
    atomic_store_explicit(&op->state, 0, memory_order_release);
    self->ended = true;
}

/* Returns whether an earlier operation in the backlog must be posted first. */
static bool follows(const fsdpc_mpi_transport *self, const fsdpc_transport_op *op)
{
    for (const fsdpc_transport_op *other = self->backlog; other != op; other = other->next)
        if (other->peer == op->peer && other->tag == op->tag && other->sends == op->sends)
            return true;
    return false;
}

static void post_backlog(fsdpc_mpi_transport *self)
{
    for (fsdpc_transport_op **at = &self->backlog; *at && !*self->reason;) {
        fsdpc_transport_op *op = *at;
        if (!follows(self, op))
            while (!all_posted(op) && op->request < WINDOW && post_segment(self, op))
                ;
        if (all_posted(op)) {
            *at = op->next;
            if (op->status != FSDPC_OK) /* refused above */
                end_op(self, op);
        } else {
            at = &op->next;
        }
    }
}

/* Moves newly posted operations to the backlog, in order, and returns whether there were any. */
static bool take_queue(fsdpc_mpi_transport *self)
{
    fsdpc_transport_op *newest = atomic_exchange(&self->queue, NULL), *oldest = NULL, **end;
    if (!newest)
        return false;
    while (newest) {
        fsdpc_transport_op *op = newest;
        newest = op->next;
        op->next = oldest;
        oldest = op;
        self->met[op->peer] = true;
    }
    for (end = &self->backlog; *end; end = &(*end)->next)
        ;
    *end = oldest;
    return true;
}

static void end_segment(fsdpc_mpi_transport *self, size_t i, int error)
{
    fsdpc_transport_op *op = self->segments[i].op;
    if (op ? failed_with(self, error, "MPI_Testsome", op) : failed(self, error, "MPI_Irecv"))
        return;
    if (!op) {
        snprintf(self->reason, sizeof self->reason, "%.255s", self->heard);
        return;
    }
    op->request--;
    end_op(self, op);
}

/* Tests all segments once; returns how many ended. */
static int test_segments(fsdpc_mpi_transport *self)
{
    int count = 0;
    int error = MPI_Testsome((int)self->n, self->requests, &count, self->indices, self->statuses);
    bool each = class_of(error) == MPI_ERR_IN_STATUS;
    if ((!each && failed(self, error, "MPI_Testsome")) || count == MPI_UNDEFINED || count == 0)
        return 0;
    for (int i = 0; i < count; i++) {
        end_segment(self, (size_t)self->indices[i],
                    each ? self->statuses[i].MPI_ERROR : MPI_SUCCESS);
        self->requests[self->indices[i]] = MPI_REQUEST_NULL; /* a failed request may be left */
    }
    size_t kept = 0;
    for (size_t i = 0; i < self->n; i++)
        if (self->requests[i] != MPI_REQUEST_NULL) {
            self->requests[kept] = self->requests[i];
            self->segments[kept++] = self->segments[i];
        }
    self->n = kept;
    return count;
}

/* ---- Leaving ---- */

static bool idle(fsdpc_mpi_transport *self)
{
    return self->n == 1 && !self->backlog && !atomic_load(&self->queue);
}

/* Sends farewells, either to the peers with which operations were posted or to all other
 * processes. */
static void send_goodbyes(fsdpc_mpi_transport *self, bool met)
{
    const char *text = self->base.farewells[self->base.rank];
    MPI_Request request;
    for (int peer = 0; peer < self->base.size; peer++)
        if (peer != self->base.rank && self->met[peer] == met &&
            !failed(self,
                    MPI_Isend(text, FSDPC_TRANSPORT_FAREWELL, MPI_BYTE, peer, (int)self->base.tags,
                              self->comm, &request),
                    "MPI_Isend"))
            MPI_Request_free(&request);
}

static void say_goodbye(fsdpc_mpi_transport *self)
{
    if (!self->left)
        send_goodbyes(self, true);
    self->left = true;
}

/* Returns whether MPI_Finalize flushes connections; see transport_mpi.c. */
static bool flushes(void)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length;
    MPI_Get_library_version(version, &length);
    return strstr(version, "ch4:ucx");
}

static bool said_goodbye(fsdpc_mpi_transport *self, int peer)
{
    int found = 0, tag = (int)self->base.tags;
    if (self->gone[peer])
        return true;
    if (failed(self, MPI_Iprobe(peer, tag, self->comm, &found, MPI_STATUS_IGNORE), "MPI_Iprobe") ||
        !found)
        return false;
    self->gone[peer] = true;
    return !failed(self,
                   MPI_Recv(self->base.farewells[peer], FSDPC_TRANSPORT_FAREWELL, MPI_BYTE, peer,
                            tag, self->comm, MPI_STATUS_IGNORE),
                   "MPI_Recv");
}

/* Ends receives whose peer has left and will send nothing. */
static void end_orphans(fsdpc_mpi_transport *self)
{
    for (fsdpc_transport_op **at = &self->backlog; *at && !*self->reason;) {
        fsdpc_transport_op *op = *at;
        if (op->sends || op->request > 0 || !said_goodbye(self, op->peer) ||
            post_segment(self, op)) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        op->status = FSDPC_ERR_PEER;
        op->moved = op->bytes / SEGMENT + 1;
        end_op(self, op);
    }
}

/* ---- The thread ---- */

/* Returns how long to sleep `since` ns after the last event; see the top of the file. */
static int64_t rest_ns(int64_t since, int64_t most)
{
    int64_t ns = since / 8;
    return ns < SHORTEST_NS ? SHORTEST_NS : ns > most ? most : ns;
}

/* Carries out operations until `wanted` changes or there is a reason to stop. */
static void carry(fsdpc_mpi_transport *self)
{
    int64_t last = fsdpc_clock_ns(), now = last;
    while (!*self->reason && atomic_load(&self->wanted) == FSDPC_MPI_RUN) {
        bool leaves = atomic_load(&self->leaving);
        bool happened = take_queue(self);
        post_backlog(self);
        int segments = *self->reason ? 0 : test_segments(self);
        if (leaves && !*self->reason && idle(self))
            say_goodbye(self);
        if (now - last > LONG_NS)
            end_orphans(self);
        if (self->ended) { /* callers wait for operations, not for segments */
            self->ended = false;
            happened = true;
            fsdpc_mpi_wake(self);
        }
        now = fsdpc_clock_ns();
        if (happened)
            last = now;
        if (happened || segments >= MANY)
            continue;
        atomic_store(&self->asleep, 1);
        if (!atomic_load(&self->queue) && atomic_load(&self->wanted) == FSDPC_MPI_RUN)
            fsdpc_futex_wait(&self->asleep, 1,
                             rest_ns(now - last, self->n > 1 || self->backlog ? BUSY_NS : IDLE_NS));
        atomic_store(&self->asleep, 0);
    }
}

/* Sends the reason to the peers until all have received it or time runs out. A dead peer must not
 * prevent the others from receiving the reason. */
static void tell_peers(fsdpc_mpi_transport *self)
{
    MPI_Request *requests = malloc((size_t)self->base.size * sizeof *requests);
    int left = 0, done;
    for (int peer = 0; requests && peer < self->base.size; peer++)
        if (peer != self->base.rank && MPI_Issend(self->reason, sizeof self->reason, MPI_BYTE, peer,
                                                  0, self->news, &requests[left]) == MPI_SUCCESS)
            left++;
    for (int64_t end = fsdpc_clock_ns() + TELL_NS; left > 0 && fsdpc_clock_ns() < end;) {
        for (int i = left; i-- > 0;)
            if (MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done)
                requests[i] = requests[--left];
        fsdpc_futex_wait(&self->asleep, 0, SHORTEST_NS);
    }
    free(requests);
}

/* Shuts MPI down together with all other processes; returns false if one of them aborted
 * instead. */
static bool end_mpi(fsdpc_mpi_transport *self)
{
    int all = 0;
    MPI_Request barrier;
    say_goodbye(self);
    if (flushes())
        send_goodbyes(self, false);
    if (failed(self, MPI_Ibarrier(self->news, &barrier), "MPI_Ibarrier"))
        return false;
    for (int64_t began = fsdpc_clock_ns(); !all;) {
        test_segments(self);
        if (*self->reason || failed(self, MPI_Test(&barrier, &all, MPI_STATUS_IGNORE), "MPI_Test"))
            return false;
        if (!all)
            fsdpc_futex_wait(&self->asleep, 0, rest_ns(fsdpc_clock_ns() - began, IDLE_NS));
    }
    for (int peer = 0; peer < self->base.size; peer++)
        (void)said_goodbye(self, peer); /* takes it off the network */
    MPI_Cancel(&self->requests[0]);
    MPI_Wait(&self->requests[0], MPI_STATUS_IGNORE);
    MPI_Comm_free(&self->news);
    MPI_Comm_free(&self->comm);
    if (!self->ours)
        return true;
    fsdpc_futex_wait(&self->asleep, 0, SETTLE_NS);
    enter(self, FSDPC_MPI_LAST);
    return !failed(self, MPI_Finalize(), "MPI_Finalize");
}

/* After an MPI failure, gives the watch time to find out which rank died and then abort. */
static void await_watch(fsdpc_mpi_transport *self)
{
    int64_t end = fsdpc_clock_ns() + GRACE_NS;
    for (int64_t now; (now = fsdpc_clock_ns()) < end;) {
        atomic_store(&self->asleep, 1);
        if (atomic_load(&self->wanted) != FSDPC_MPI_RUN)
            break;
        fsdpc_futex_wait(&self->asleep, 1, end - now);
    }
    atomic_store(&self->asleep, 0);
}

static void stop(fsdpc_mpi_transport *self)
{
    if (*self->reason && !*self->heard)
        await_watch(self);
    /* Even if a peer's reason has arrived unnoticed, this rank's own reason is just as good. */
    if ((!*self->heard || !*self->reason) && atomic_load(&self->wanted) == FSDPC_MPI_ABORT)
        memcpy(self->reason, self->asked, sizeof self->asked);
    if (!*self->reason)
        snprintf(self->reason, sizeof self->reason, "rank %d left with messages under way",
                 self->base.rank);
    if (!*self->heard)
        tell_peers(self);
    fsdpc_mpi_fail(self, self->reason);
    enter(self, FSDPC_MPI_STOPPED);
    fsdpc_mpi_wake(self);
}

void *fsdpc_mpi_thread(void *arg)
{
    fsdpc_mpi_transport *self = arg;
    prctl(PR_SET_TIMERSLACK, 1000); /* ns; the usual 50000 would double the shortest sleep */
    fsdpc_status status = start_mpi(self);
    if (status == FSDPC_OK)
        status = join_world(self);
    if (status == FSDPC_OK && !grow(self))
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "%s", self->reason);
    if (status != FSDPC_OK) {
        snprintf(self->reason, sizeof self->reason, "%s", fsdpc_last_error());
        self->status = status;
        enter(self, FSDPC_MPI_STOPPED);
        return NULL;
    }
    post_news(self);
    enter(self, FSDPC_MPI_RUNNING);
    carry(self);
    if (!*self->reason && atomic_load(&self->wanted) == FSDPC_MPI_END && idle(self)) {
        enter(self, FSDPC_MPI_ENDING);
        if (end_mpi(self)) {
            enter(self, FSDPC_MPI_ENDED);
            return NULL;
        }
    }
    stop(self);
    return NULL;
}
