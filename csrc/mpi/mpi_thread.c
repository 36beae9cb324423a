/* The thread that calls MPI.
 *
 * Messages.  A message travels in segments of PIECE bytes and ends with a shorter one, which may be
 * empty.  If two ranks post different sizes, some pair of segments therefore differs in size.  MPI
 * sends a segment of this size at once.  For a larger segment it would first ask the peer, whose thread
 * sleeps; that made steps over 1 Gbit/s take 1.3 times as long.  UCX, MPICH's usual transport,
 * would also ask for smaller segments, so we raise its threshold unless UCX_RNDV_THRESH is set.  At
 * most WINDOW segments of a message are in flight.  MPI keeps segments with the same pair and tag in
 * order.  A message waits until all segments of earlier messages with its pair, tag and direction
 * have been posted.
 *
 * Receives probe first (MPI_Improbe), and give MPI memory only for a segment that has arrived with
 * the expected size.  MPI reports a longer segment as an error too, but Open MPI 4.1 has by then
 * written past the end of the memory.
 *
 * Sleeping.  MPI progresses only inside its calls and offers no way to sleep until a message
 * arrives.  Between two polls this thread sleeps for an eighth of the time since an operation was
 * last posted or ended.  This makes a wait at most an eighth longer, and a long wait occupies no
 * core.  The longest sleep is 1 ms while operations are in flight, and 100 ms otherwise, when only
 * news can arrive.  A post wakes the thread.  A few finished segments neither reset the sleep nor
 * wake a waiter.  On a core that also computes, polling after each segment made a step over 1 Gbit/s
 * take 570 ms instead of 496 ms.  After many segments the thread polls again at once.
 *
 * News.  Every process posts a receive for the abort reason, which the first process to abort
 * sends.  An MPI error is also such a reason, unless the watch (comm/host_watch.h) soon finds a
 * better one: MPI knows that a connection broke, but not why.
 *
 * Leaving.  A process that will post no more operations sends a farewell to all peers with which it
 * has exchanged messages.  The farewell has a separate tag and comes after all other messages.  A
 * receive that has waited long checks for it: if only the farewell has arrived, no more messages
 * will come.
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

void fsdpc_mpi_fail(fsdpc_mpi_transport *transport, const char *reason)
{
    if (atomic_exchange(&transport->failing, true))
        return;
    snprintf(transport->base.poison, sizeof transport->base.poison, "%s", reason);
    atomic_store_explicit(&transport->base.failed, true, memory_order_release);
}

void fsdpc_mpi_wake(fsdpc_mpi_transport *transport)
{
    pthread_mutex_lock(&transport->waking);
    if (transport->base.wake)
        transport->base.wake(transport->base.wake_arg);
    pthread_mutex_unlock(&transport->waking);
}

static void enter(fsdpc_mpi_transport *transport, enum fsdpc_mpi_phase phase)
{
    atomic_store_explicit(&transport->phase, phase, memory_order_release);
    fsdpc_futex_wake(&transport->phase);
}

/* Returns whether an MPI call failed; the first failure becomes the transport's reason. */
static bool failed(fsdpc_mpi_transport *transport, int error, const char *call)
{
    if (error == MPI_SUCCESS)
        return false;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(error, text, &length);
    if (!*transport->reason)
        snprintf(transport->reason, sizeof transport->reason, "rank %d: %s: %.160s",
                 transport->base.rank, call, text);
    return true;
}

/* Does the same for a call about a message; the reason names the peer. */
static bool failed_with(fsdpc_mpi_transport *transport, int error, const char *call,
                        const fsdpc_transport_op *op)
{
    char about[64];
    snprintf(about, sizeof about, "%s %s rank %d", call, op->sends ? "to" : "from", op->peer);
    return failed(transport, error, about);
}

static int class_of(int error)
{
    int class = MPI_SUCCESS;
    if (error != MPI_SUCCESS)
        MPI_Error_class(error, &class);
    return class;
}

/* ---- Starting ---- */

static fsdpc_status start_mpi(fsdpc_mpi_transport *transport)
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
    if (failed(transport, MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level),
               "MPI_Init_thread"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", transport->reason);
    transport->ours = true;
    if (level < MPI_THREAD_FUNNELED)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "this MPI was built without threads: take one that has "
                          "MPI_THREAD_FUNNELED");
    return FSDPC_OK;
}

/* Removes MPICH 5's name in /dev/shm, which it keeps until MPI_Finalize; a killed rank never calls
 * that.  Once a collective has returned, all ranks have mapped the memory, and none opens it by
 * name again. */
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

static fsdpc_status join_world(fsdpc_mpi_transport *transport)
{
    int size, rank, flag, *limit;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != transport->base.size)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "MPI has %d processes and this world %d ranks: start all ranks by one "
                          "mpiexec, of the MPI that fsdpc was built with",
                          size, transport->base.size);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (failed(transport, MPI_Comm_split(MPI_COMM_WORLD, 0, transport->base.rank, &transport->comm),
               "MPI_Comm_split") ||
        failed(transport, MPI_Comm_dup(transport->comm, &transport->news), "MPI_Comm_dup"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", transport->reason);
    if (transport->ours)
        unlink_early();
    MPI_Comm_rank(transport->comm, &rank);
    if (rank != transport->base.rank)
        return fsdpc_fail(FSDPC_ERR_VALUE, "two processes of MPI are rank %d or %d", rank,
                          transport->base.rank);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &flag);
    transport->base.tags = flag ? (uint32_t)*limit : (1u << 15) - 1; /* the highest tag is the
                                                                 * farewell */
    return FSDPC_OK;
}

/* ---- Segments ---- */

/* Reserves space for one more request. */
static bool grow(fsdpc_mpi_transport *transport)
{
    if (transport->n < transport->capacity)
        return true;
    size_t more = transport->capacity ? 2 * transport->capacity : 64;
    void *grown[] = {
        realloc(transport->requests, more * sizeof *transport->requests),
        realloc(transport->segments, more * sizeof *transport->segments),
        realloc(transport->indices, more * sizeof *transport->indices),
        realloc(transport->statuses, more * sizeof *transport->statuses),
    };
    transport->requests = grown[0] ? grown[0] : transport->requests;
    transport->segments = grown[1] ? grown[1] : transport->segments;
    transport->indices = grown[2] ? grown[2] : transport->indices;
    transport->statuses = grown[3] ? grown[3] : transport->statuses;
    if (!grown[0] || !grown[1] || !grown[2] || !grown[3]) {
        snprintf(transport->reason, sizeof transport->reason,
                 "rank %d: no memory for %zu requests of MPI", transport->base.rank, more);
        return false;
    }
    transport->capacity = more;
    return true;
}

static void post_news(fsdpc_mpi_transport *transport)
{
    transport->segments[0] = (fsdpc_mpi_segment){NULL, sizeof transport->heard};
    failed(transport,
           MPI_Irecv(transport->heard, sizeof transport->heard, MPI_BYTE, MPI_ANY_SOURCE, 0,
                     transport->news, &transport->requests[0]),
           "MPI_Irecv");
    transport->n = 1;
}

static bool all_posted(const fsdpc_transport_op *op)
{
    return op->moved > op->bytes / SEGMENT; /* segments already posted */
}

static void add_segment(fsdpc_mpi_transport *transport, fsdpc_transport_op *op, int bytes)
{
    transport->segments[transport->n++] = (fsdpc_mpi_segment){op, bytes};
    op->moved++;
    op->request++; /* segments in flight */
}

static bool send_segment(fsdpc_mpi_transport *transport, fsdpc_transport_op *op,
                         unsigned char *data, int bytes)
{
    if (failed_with(transport,
                    MPI_Isend(data, bytes, MPI_BYTE, op->peer, (int)op->tag, transport->comm,
                              &transport->requests[transport->n]),
                    "MPI_Isend", op))
        return false;
    add_segment(transport, op, bytes);
    return true;
}

/* Takes a segment of the wrong size off the network.  The operation ends once its segments in flight have;
 * later messages with its tag may not match. */
static void refuse_segment(fsdpc_mpi_transport *transport, fsdpc_transport_op *op,
                           MPI_Message *message, int bytes)
{
    void *scratch = malloc((size_t)bytes + 1);
    if (scratch)
        failed(transport, MPI_Mrecv(scratch, bytes, MPI_BYTE, message, MPI_STATUS_IGNORE),
               "MPI_Mrecv");
    free(scratch);
    op->status = FSDPC_ERR_MISMATCH;
    op->moved = op->bytes / SEGMENT + 1;
}

/* Returns whether a segment had arrived. */
static bool receive_segment(fsdpc_mpi_transport *transport, fsdpc_transport_op *op,
                            unsigned char *data, int bytes)
{
    int found = 0, sent = 0;
    MPI_Message message;
    MPI_Status status;
    if (failed_with(transport,
                    MPI_Improbe(op->peer, (int)op->tag, transport->comm, &found, &message, &status),
                    "MPI_Improbe", op) ||
        !found)
        return false;
    MPI_Get_count(&status, MPI_BYTE, &sent);
    if (sent != bytes) {
        refuse_segment(transport, op, &message, sent);
        return true;
    }
    if (failed_with(transport,
                    MPI_Imrecv(data, bytes, MPI_BYTE, &message, &transport->requests[transport->n]),
                    "MPI_Imrecv", op))
        return false;
    add_segment(transport, op, bytes);
    return true;
}

/* Returns whether there may be another segment to post. */
static bool post_segment(fsdpc_mpi_transport *transport, fsdpc_transport_op *op)
{
    if (!grow(transport))
        return false;
    size_t offset = op->moved * SEGMENT, left = op->bytes - offset;
    unsigned char *data = op->bytes ? op->data + offset : NULL;
    int bytes = left < SEGMENT ? (int)left : SEGMENT;
    return op->sends ? send_segment(transport, op, data, bytes)
                     : receive_segment(transport, op, data, bytes);
}

/* Ends an operation if it has nothing in flight; from then on the caller owns its storage. */
static void end_op(fsdpc_mpi_transport *transport, fsdpc_transport_op *op)
{
    if (op->request > 0 || !all_posted(op))
        return;
    atomic_store_explicit(&op->state, 0, memory_order_release);
    transport->ended = true;
}

/* Returns whether an earlier operation in the backlog must be posted first. */
static bool follows(const fsdpc_mpi_transport *transport, const fsdpc_transport_op *op)
{
    for (const fsdpc_transport_op *other = transport->backlog; other != op; other = other->next)
        if (other->peer == op->peer && other->tag == op->tag && other->sends == op->sends)
            return true;
    return false;
}

static void post_backlog(fsdpc_mpi_transport *transport)
{
    for (fsdpc_transport_op **at = &transport->backlog; *at && !*transport->reason;) {
        fsdpc_transport_op *op = *at;
        if (!follows(transport, op))
            while (!all_posted(op) && op->request < WINDOW && post_segment(transport, op))
                ;
        if (all_posted(op)) {
            *at = op->next;
            if (op->status != FSDPC_OK) /* refused above */
                end_op(transport, op);
        } else {
            at = &op->next;
        }
    }
}

/* Takes over newly posted operations, in order; returns whether there were any. */
static bool take_queue(fsdpc_mpi_transport *transport)
{
    fsdpc_transport_op *newest = atomic_exchange(&transport->queue, NULL), *oldest = NULL, **end;
    if (!newest)
        return false;
    while (newest) {
        fsdpc_transport_op *op = newest;
        newest = op->next;
        op->next = oldest;
        oldest = op;
        transport->met[op->peer] = true;
    }
    for (end = &transport->backlog; *end; end = &(*end)->next)
        ;
    *end = oldest;
    return true;
}

static void end_segment(fsdpc_mpi_transport *transport, size_t i, int error)
{
    fsdpc_transport_op *op = transport->segments[i].op;
    if (op ? failed_with(transport, error, "MPI_Testsome", op)
           : failed(transport, error, "MPI_Irecv"))
        return;
    if (!op) {
        snprintf(transport->reason, sizeof transport->reason, "%.255s", transport->heard);
        return;
    }
    op->request--;
    end_op(transport, op);
}

/* Tests all segments once; returns how many ended. */
static int test_segments(fsdpc_mpi_transport *transport)
{
    int count = 0;
    int error = MPI_Testsome((int)transport->n, transport->requests, &count, transport->indices,
                             transport->statuses);
    bool each = class_of(error) == MPI_ERR_IN_STATUS;
    if ((!each && failed(transport, error, "MPI_Testsome")) || count == MPI_UNDEFINED || count == 0)
        return 0;
    for (int i = 0; i < count; i++) {
        end_segment(transport, (size_t)transport->indices[i],
                    each ? transport->statuses[i].MPI_ERROR : MPI_SUCCESS);
        transport->requests[transport->indices[i]] =
            MPI_REQUEST_NULL; /* a failed request may be left */
    }
    size_t kept = 0;
    for (size_t i = 0; i < transport->n; i++)
        if (transport->requests[i] != MPI_REQUEST_NULL) {
            transport->requests[kept] = transport->requests[i];
            transport->segments[kept++] = transport->segments[i];
        }
    transport->n = kept;
    return count;
}

/* ---- Leaving ---- */

static bool idle(fsdpc_mpi_transport *transport)
{
    return transport->n == 1 && !transport->backlog && !atomic_load(&transport->queue);
}

/* Sends farewells to the peers with which operations were posted, or to the others. */
static void send_goodbyes(fsdpc_mpi_transport *transport, bool met)
{
    const char *text = transport->base.farewells[transport->base.rank];
    MPI_Request request;
    for (int peer = 0; peer < transport->base.size; peer++)
        if (peer != transport->base.rank && transport->met[peer] == met &&
            !failed(transport,
                    MPI_Isend(text, FSDPC_TRANSPORT_FAREWELL, MPI_BYTE, peer,
                              (int)transport->base.tags, transport->comm, &request),
                    "MPI_Isend"))
            MPI_Request_free(&request);
}

static void say_goodbye(fsdpc_mpi_transport *transport)
{
    if (!transport->left)
        send_goodbyes(transport, true);
    transport->left = true;
}

/* Returns whether MPI_Finalize flushes connections; see transport_mpi.c. */
static bool flushes(void)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length;
    MPI_Get_library_version(version, &length);
    return strstr(version, "ch4:ucx");
}

static bool said_goodbye(fsdpc_mpi_transport *transport, int peer)
{
    int found = 0, tag = (int)transport->base.tags;
    if (transport->gone[peer])
        return true;
    if (failed(transport, MPI_Iprobe(peer, tag, transport->comm, &found, MPI_STATUS_IGNORE),
               "MPI_Iprobe") ||
        !found)
        return false;
    transport->gone[peer] = true;
    return !failed(transport,
                   MPI_Recv(transport->base.farewells[peer], FSDPC_TRANSPORT_FAREWELL, MPI_BYTE,
                            peer, tag, transport->comm, MPI_STATUS_IGNORE),
                   "MPI_Recv");
}

/* Ends receives that no peer will answer. */
static void end_orphans(fsdpc_mpi_transport *transport)
{
    for (fsdpc_transport_op **at = &transport->backlog; *at && !*transport->reason;) {
        fsdpc_transport_op *op = *at;
        if (op->sends || op->request > 0 || !said_goodbye(transport, op->peer) ||
            post_segment(transport, op)) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        op->status = FSDPC_ERR_PEER;
        op->moved = op->bytes / SEGMENT + 1;
        end_op(transport, op);
    }
}

/* ---- The thread ---- */

/* Returns how long to sleep `since` ns after the last event; see the top of the file. */
static int64_t rest_ns(int64_t since, int64_t most)
{
    int64_t ns = since / 8;
    return ns < SHORTEST_NS ? SHORTEST_NS : ns > most ? most : ns;
}

/* Carries operations until `wanted` changes or there is a reason to stop. */
static void carry(fsdpc_mpi_transport *transport)
{
    int64_t last = fsdpc_clock_ns(), now = last;
    while (!*transport->reason && atomic_load(&transport->wanted) == FSDPC_MPI_RUN) {
        bool leaves = atomic_load(&transport->leaving);
        bool happened = take_queue(transport);
        post_backlog(transport);
        int segments = *transport->reason ? 0 : test_segments(transport);
        if (leaves && !*transport->reason && idle(transport))
            say_goodbye(transport);
        if (now - last > LONG_NS)
            end_orphans(transport);
        if (transport->ended) { /* callers wait for operations, not for segments */
            transport->ended = false;
            happened = true;
            fsdpc_mpi_wake(transport);
        }
        now = fsdpc_clock_ns();
        if (happened)
            last = now;
        if (happened || segments >= MANY)
            continue;
        atomic_store(&transport->asleep, 1);
        if (!atomic_load(&transport->queue) && atomic_load(&transport->wanted) == FSDPC_MPI_RUN)
            fsdpc_futex_wait(
                &transport->asleep, 1,
                rest_ns(now - last, transport->n > 1 || transport->backlog ? BUSY_NS : IDLE_NS));
        atomic_store(&transport->asleep, 0);
    }
}

/* Sends the reason to the peers until all have received it or time runs out.  A dead peer must not
 * keep the reason from the others. */
static void tell_peers(fsdpc_mpi_transport *transport)
{
    MPI_Request *requests = malloc((size_t)transport->base.size * sizeof *requests);
    int left = 0, done;
    for (int peer = 0; requests && peer < transport->base.size; peer++)
        if (peer != transport->base.rank &&
            MPI_Issend(transport->reason, sizeof transport->reason, MPI_BYTE, peer, 0,
                       transport->news, &requests[left]) == MPI_SUCCESS)
            left++;
    for (int64_t end = fsdpc_clock_ns() + TELL_NS; left > 0 && fsdpc_clock_ns() < end;) {
        for (int i = left; i-- > 0;)
            if (MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done)
                requests[i] = requests[--left];
        fsdpc_futex_wait(&transport->asleep, 0, SHORTEST_NS);
    }
    free(requests);
}

/* Ends MPI together with all other processes; returns false if one of them aborted instead. */
static bool end_mpi(fsdpc_mpi_transport *transport)
{
    int all = 0;
    MPI_Request barrier;
    say_goodbye(transport);
    if (flushes())
        send_goodbyes(transport, false);
    if (failed(transport, MPI_Ibarrier(transport->news, &barrier), "MPI_Ibarrier"))
        return false;
    for (int64_t began = fsdpc_clock_ns(); !all;) {
        test_segments(transport);
        if (*transport->reason ||
            failed(transport, MPI_Test(&barrier, &all, MPI_STATUS_IGNORE), "MPI_Test"))
            return false;
        if (!all)
            fsdpc_futex_wait(&transport->asleep, 0, rest_ns(fsdpc_clock_ns() - began, IDLE_NS));
    }
    for (int peer = 0; peer < transport->base.size; peer++)
        (void)said_goodbye(transport, peer); /* takes it off the network */
    MPI_Cancel(&transport->requests[0]);
    MPI_Wait(&transport->requests[0], MPI_STATUS_IGNORE);
    MPI_Comm_free(&transport->news);
    MPI_Comm_free(&transport->comm);
    if (!transport->ours)
        return true;
    fsdpc_futex_wait(&transport->asleep, 0, SETTLE_NS);
    enter(transport, FSDPC_MPI_LAST);
    return !failed(transport, MPI_Finalize(), "MPI_Finalize");
}

/* After an MPI failure, gives the watch time to find out which rank died; the watch then aborts. */
static void await_watch(fsdpc_mpi_transport *transport)
{
    int64_t end = fsdpc_clock_ns() + GRACE_NS;
    for (int64_t now; (now = fsdpc_clock_ns()) < end;) {
        atomic_store(&transport->asleep, 1);
        if (atomic_load(&transport->wanted) != FSDPC_MPI_RUN)
            break;
        fsdpc_futex_wait(&transport->asleep, 1, end - now);
    }
    atomic_store(&transport->asleep, 0);
}

static void stop(fsdpc_mpi_transport *transport)
{
    if (*transport->reason && !*transport->heard)
        await_watch(transport);
    /* News may have arrived unseen; this rank's own reason is then just as good. */
    if ((!*transport->heard || !*transport->reason) &&
        atomic_load(&transport->wanted) == FSDPC_MPI_ABORT)
        memcpy(transport->reason, transport->asked, sizeof transport->asked);
    if (!*transport->reason)
        snprintf(transport->reason, sizeof transport->reason,
                 "rank %d left with messages under way", transport->base.rank);
    if (!*transport->heard)
        tell_peers(transport);
    fsdpc_mpi_fail(transport, transport->reason);
    enter(transport, FSDPC_MPI_STOPPED);
    fsdpc_mpi_wake(transport);
}

void *fsdpc_mpi_thread(void *arg)
{
    fsdpc_mpi_transport *transport = arg;
    prctl(PR_SET_TIMERSLACK, 1000); /* ns; the usual 50000 would double the shortest sleep */
    fsdpc_status status = start_mpi(transport);
    if (status == FSDPC_OK)
        status = join_world(transport);
    if (status == FSDPC_OK && !grow(transport))
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "%s", transport->reason);
    if (status != FSDPC_OK) {
        snprintf(transport->reason, sizeof transport->reason, "%s", fsdpc_last_error());
        transport->status = status;
        enter(transport, FSDPC_MPI_STOPPED);
        return NULL;
    }
    post_news(transport);
    enter(transport, FSDPC_MPI_RUNNING);
    carry(transport);
    if (!*transport->reason && atomic_load(&transport->wanted) == FSDPC_MPI_END &&
        idle(transport)) {
        enter(transport, FSDPC_MPI_ENDING);
        if (end_mpi(transport)) {
            enter(transport, FSDPC_MPI_ENDED);
            return NULL;
        }
    }
    stop(transport);
    return NULL;
}
