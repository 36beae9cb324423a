/* The thread that calls MPI.
 *
 * Messages.  A message travels in pieces of PIECE bytes and ends with a shorter one, which may be
 * empty.  If two ranks post different sizes, some pair of pieces therefore differs in size.  MPI
 * sends a piece of this size at once.  For a larger piece it would first ask the peer, whose thread
 * sleeps; that made steps over 1 Gbit/s take 1.3 times as long.  UCX, MPICH's usual transport,
 * would also ask for smaller pieces, so we raise its threshold unless UCX_RNDV_THRESH is set.  At
 * most WINDOW pieces of a message are in flight.  MPI keeps pieces with the same pair and tag in
 * order.  A message waits until all pieces of earlier messages with its pair, tag and direction
 * have been posted.
 *
 * Receives probe first (MPI_Improbe), and give MPI memory only for a piece that has arrived with
 * the expected size.  MPI reports a longer piece as an error too, but Open MPI 4.1 has by then
 * written past the end of the memory.
 *
 * Sleeping.  MPI progresses only inside its calls and offers no way to sleep until a message
 * arrives.  Between two polls this thread sleeps for an eighth of the time since an operation was
 * last posted or ended.  This makes a wait at most an eighth longer, and a long wait occupies no
 * core.  The longest sleep is 1 ms while operations are in flight, and 100 ms otherwise, when only
 * news can arrive.  A post wakes the thread.  A few finished pieces neither reset the sleep nor
 * wake a waiter.  On a core that also computes, polling after each piece made a step over 1 Gbit/s
 * take 570 ms instead of 496 ms.  After many pieces the thread polls again at once.
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
#include "mpi/link_mpi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/wait.h"

enum { PIECE = 60 << 10, WINDOW = 64, MANY = WINDOW / 4 };

static const int64_t SHORTEST_NS = 50000, BUSY_NS = 1000000, IDLE_NS = 100000000;
static const int64_t LONG_NS = 100000000; /* until a receive checks whether its peer has left */
static const int64_t TELL_NS = 300000000; /* for the peers to receive a reason: three of their
                                           * longest sleeps */
static const int64_t GRACE_NS = 1000000000;
static const int64_t SETTLE_NS = 300000000; /* for the peers to also leave the last barrier */

void fsdpc_mpi_fail(fsdpc_mpi_link *link, const char *reason)
{
    if (atomic_exchange(&link->failing, true))
        return;
    snprintf(link->base.poison, sizeof link->base.poison, "%s", reason);
    atomic_store_explicit(&link->base.failed, true, memory_order_release);
}

void fsdpc_mpi_wake(fsdpc_mpi_link *link)
{
    pthread_mutex_lock(&link->waking);
    if (link->base.wake)
        link->base.wake(link->base.wake_arg);
    pthread_mutex_unlock(&link->waking);
}

static void enter(fsdpc_mpi_link *link, enum fsdpc_mpi_phase phase)
{
    atomic_store_explicit(&link->phase, phase, memory_order_release);
    fsdpc_futex_wake(&link->phase);
}

/* Returns whether an MPI call failed; the first failure becomes the link's reason. */
static bool failed(fsdpc_mpi_link *link, int error, const char *call)
{
    if (error == MPI_SUCCESS)
        return false;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(error, text, &length);
    if (!*link->reason)
        snprintf(link->reason, sizeof link->reason, "rank %d: %s: %.160s", link->base.rank, call,
                 text);
    return true;
}

/* Does the same for a call about a message; the reason names the peer. */
static bool failed_with(fsdpc_mpi_link *link, int error, const char *call, const fsdpc_link_op *op)
{
    char about[64];
    snprintf(about, sizeof about, "%s %s rank %d", call, op->sends ? "to" : "from", op->peer);
    return failed(link, error, about);
}

static int class_of(int error)
{
    int class = MPI_SUCCESS;
    if (error != MPI_SUCCESS)
        MPI_Error_class(error, &class);
    return class;
}

/* ---- Starting ---- */

static fsdpc_status start_mpi(fsdpc_mpi_link *link)
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
    if (failed(link, MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", link->reason);
    link->ours = true;
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

static fsdpc_status join_world(fsdpc_mpi_link *link)
{
    int size, rank, flag, *limit;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != link->base.size)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "MPI has %d processes and this world %d ranks: start all ranks by one "
                          "mpiexec, of the MPI that fsdpc was built with",
                          size, link->base.size);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (failed(link, MPI_Comm_split(MPI_COMM_WORLD, 0, link->base.rank, &link->comm),
               "MPI_Comm_split") ||
        failed(link, MPI_Comm_dup(link->comm, &link->news), "MPI_Comm_dup"))
        return fsdpc_fail(FSDPC_ERR_OS, "%s", link->reason);
    if (link->ours)
        unlink_early();
    MPI_Comm_rank(link->comm, &rank);
    if (rank != link->base.rank)
        return fsdpc_fail(FSDPC_ERR_VALUE, "two processes of MPI are rank %d or %d", rank,
                          link->base.rank);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &flag);
    link->base.tags = flag ? (uint32_t)*limit : (1u << 15) - 1; /* the highest tag is the
                                                                 * farewell */
    return FSDPC_OK;
}

/* ---- Pieces ---- */

/* Reserves space for one more request. */
static bool grow(fsdpc_mpi_link *link)
{
    if (link->n < link->capacity)
        return true;
    size_t more = link->capacity ? 2 * link->capacity : 64;
    void *grown[] = {
        realloc(link->requests, more * sizeof *link->requests),
        realloc(link->pieces, more * sizeof *link->pieces),
        realloc(link->indices, more * sizeof *link->indices),
        realloc(link->statuses, more * sizeof *link->statuses),
    };
    link->requests = grown[0] ? grown[0] : link->requests;
    link->pieces = grown[1] ? grown[1] : link->pieces;
    link->indices = grown[2] ? grown[2] : link->indices;
    link->statuses = grown[3] ? grown[3] : link->statuses;
    if (!grown[0] || !grown[1] || !grown[2] || !grown[3]) {
        snprintf(link->reason, sizeof link->reason, "rank %d: no memory for %zu requests of MPI",
                 link->base.rank, more);
        return false;
    }
    link->capacity = more;
    return true;
}

static void post_news(fsdpc_mpi_link *link)
{
    link->pieces[0] = (fsdpc_mpi_piece){NULL, sizeof link->heard};
    failed(link,
           MPI_Irecv(link->heard, sizeof link->heard, MPI_BYTE, MPI_ANY_SOURCE, 0, link->news,
                     &link->requests[0]),
           "MPI_Irecv");
    link->n = 1;
}

static bool all_posted(const fsdpc_link_op *op)
{
    return op->moved > op->bytes / PIECE; /* pieces already posted */
}

static void add_piece(fsdpc_mpi_link *link, fsdpc_link_op *op, int bytes)
{
    link->pieces[link->n++] = (fsdpc_mpi_piece){op, bytes};
    op->moved++;
    op->request++; /* pieces in flight */
}

static bool send_piece(fsdpc_mpi_link *link, fsdpc_link_op *op, unsigned char *data, int bytes)
{
    if (failed_with(link,
                    MPI_Isend(data, bytes, MPI_BYTE, op->peer, (int)op->tag, link->comm,
                              &link->requests[link->n]),
                    "MPI_Isend", op))
        return false;
    add_piece(link, op, bytes);
    return true;
}

/* Takes a piece of the wrong size off the network.  The operation ends once its pieces in flight have;
 * later messages with its tag may not match. */
static void refuse_piece(fsdpc_mpi_link *link, fsdpc_link_op *op, MPI_Message *message, int bytes)
{
    void *scratch = malloc((size_t)bytes + 1);
    if (scratch)
        failed(link, MPI_Mrecv(scratch, bytes, MPI_BYTE, message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    free(scratch);
    op->status = FSDPC_ERR_MISMATCH;
    op->moved = op->bytes / PIECE + 1;
}

/* Returns whether a piece had arrived. */
static bool receive_piece(fsdpc_mpi_link *link, fsdpc_link_op *op, unsigned char *data, int bytes)
{
    int found = 0, sent = 0;
    MPI_Message message;
    MPI_Status status;
    if (failed_with(link,
                    MPI_Improbe(op->peer, (int)op->tag, link->comm, &found, &message, &status),
                    "MPI_Improbe", op) ||
        !found)
        return false;
    MPI_Get_count(&status, MPI_BYTE, &sent);
    if (sent != bytes) {
        refuse_piece(link, op, &message, sent);
        return true;
    }
    if (failed_with(link, MPI_Imrecv(data, bytes, MPI_BYTE, &message, &link->requests[link->n]),
                    "MPI_Imrecv", op))
        return false;
    add_piece(link, op, bytes);
    return true;
}

/* Returns whether there may be another piece to post. */
static bool post_piece(fsdpc_mpi_link *link, fsdpc_link_op *op)
{
    if (!grow(link))
        return false;
    size_t offset = op->moved * PIECE, left = op->bytes - offset;
    unsigned char *data = op->bytes ? op->data + offset : NULL;
    int bytes = left < PIECE ? (int)left : PIECE;
    return op->sends ? send_piece(link, op, data, bytes) : receive_piece(link, op, data, bytes);
}

/* Ends an operation if it has nothing in flight; from then on the caller owns its storage. */
static void end_op(fsdpc_mpi_link *link, fsdpc_link_op *op)
{
    if (op->request > 0 || !all_posted(op))
        return;
    atomic_store_explicit(&op->state, 0, memory_order_release);
    link->ended = true;
}

/* Returns whether an earlier operation in the backlog must be posted first. */
static bool follows(const fsdpc_mpi_link *link, const fsdpc_link_op *op)
{
    for (const fsdpc_link_op *other = link->backlog; other != op; other = other->next)
        if (other->peer == op->peer && other->tag == op->tag && other->sends == op->sends)
            return true;
    return false;
}

static void post_backlog(fsdpc_mpi_link *link)
{
    for (fsdpc_link_op **at = &link->backlog; *at && !*link->reason;) {
        fsdpc_link_op *op = *at;
        if (!follows(link, op))
            while (!all_posted(op) && op->request < WINDOW && post_piece(link, op))
                ;
        if (all_posted(op)) {
            *at = op->next;
            if (op->status != FSDPC_OK) /* refused above */
                end_op(link, op);
        } else {
            at = &op->next;
        }
    }
}

/* Takes over newly posted operations, in order; returns whether there were any. */
static bool take_queue(fsdpc_mpi_link *link)
{
    fsdpc_link_op *newest = atomic_exchange(&link->queue, NULL), *oldest = NULL, **end;
    if (!newest)
        return false;
    while (newest) {
        fsdpc_link_op *op = newest;
        newest = op->next;
        op->next = oldest;
        oldest = op;
        link->met[op->peer] = true;
    }
    for (end = &link->backlog; *end; end = &(*end)->next)
        ;
    *end = oldest;
    return true;
}

static void end_piece(fsdpc_mpi_link *link, size_t i, int error)
{
    fsdpc_link_op *op = link->pieces[i].op;
    if (op ? failed_with(link, error, "MPI_Testsome", op) : failed(link, error, "MPI_Irecv"))
        return;
    if (!op) {
        snprintf(link->reason, sizeof link->reason, "%.255s", link->heard);
        return;
    }
    op->request--;
    end_op(link, op);
}

/* Tests all pieces once; returns how many ended. */
static int test_pieces(fsdpc_mpi_link *link)
{
    int count = 0;
    int error = MPI_Testsome((int)link->n, link->requests, &count, link->indices, link->statuses);
    bool each = class_of(error) == MPI_ERR_IN_STATUS;
    if ((!each && failed(link, error, "MPI_Testsome")) || count == MPI_UNDEFINED || count == 0)
        return 0;
    for (int i = 0; i < count; i++) {
        end_piece(link, (size_t)link->indices[i], each ? link->statuses[i].MPI_ERROR : MPI_SUCCESS);
        link->requests[link->indices[i]] = MPI_REQUEST_NULL; /* a failed request may be left */
    }
    size_t kept = 0;
    for (size_t i = 0; i < link->n; i++)
        if (link->requests[i] != MPI_REQUEST_NULL) {
            link->requests[kept] = link->requests[i];
            link->pieces[kept++] = link->pieces[i];
        }
    link->n = kept;
    return count;
}

/* ---- Leaving ---- */

static bool idle(fsdpc_mpi_link *link)
{
    return link->n == 1 && !link->backlog && !atomic_load(&link->queue);
}

/* Sends farewells to the peers with which operations were posted, or to the others. */
static void send_goodbyes(fsdpc_mpi_link *link, bool met)
{
    const char *text = link->base.farewells[link->base.rank];
    MPI_Request request;
    for (int peer = 0; peer < link->base.size; peer++)
        if (peer != link->base.rank && link->met[peer] == met &&
            !failed(link,
                    MPI_Isend(text, FSDPC_LINK_FAREWELL, MPI_BYTE, peer, (int)link->base.tags,
                              link->comm, &request),
                    "MPI_Isend"))
            MPI_Request_free(&request);
}

static void say_goodbye(fsdpc_mpi_link *link)
{
    if (!link->left)
        send_goodbyes(link, true);
    link->left = true;
}

/* Returns whether MPI_Finalize flushes connections; see link_mpi.c. */
static bool flushes(void)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length;
    MPI_Get_library_version(version, &length);
    return strstr(version, "ch4:ucx");
}

static bool said_goodbye(fsdpc_mpi_link *link, int peer)
{
    int found = 0, tag = (int)link->base.tags;
    if (link->gone[peer])
        return true;
    if (failed(link, MPI_Iprobe(peer, tag, link->comm, &found, MPI_STATUS_IGNORE), "MPI_Iprobe") ||
        !found)
        return false;
    link->gone[peer] = true;
    return !failed(link,
                   MPI_Recv(link->base.farewells[peer], FSDPC_LINK_FAREWELL, MPI_BYTE, peer, tag,
                            link->comm, MPI_STATUS_IGNORE),
                   "MPI_Recv");
}

/* Ends receives that no peer will answer. */
static void end_orphans(fsdpc_mpi_link *link)
{
    for (fsdpc_link_op **at = &link->backlog; *at && !*link->reason;) {
        fsdpc_link_op *op = *at;
        if (op->sends || op->request > 0 || !said_goodbye(link, op->peer) || post_piece(link, op)) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        op->status = FSDPC_ERR_PEER;
        op->moved = op->bytes / PIECE + 1;
        end_op(link, op);
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
static void carry(fsdpc_mpi_link *link)
{
    int64_t last = fsdpc_clock_ns(), now = last;
    while (!*link->reason && atomic_load(&link->wanted) == FSDPC_MPI_RUN) {
        bool leaves = atomic_load(&link->leaving);
        bool happened = take_queue(link);
        post_backlog(link);
        int pieces = *link->reason ? 0 : test_pieces(link);
        if (leaves && !*link->reason && idle(link))
            say_goodbye(link);
        if (now - last > LONG_NS)
            end_orphans(link);
        if (link->ended) { /* callers wait for operations, not for pieces */
            link->ended = false;
            happened = true;
            fsdpc_mpi_wake(link);
        }
        now = fsdpc_clock_ns();
        if (happened)
            last = now;
        if (happened || pieces >= MANY)
            continue;
        atomic_store(&link->asleep, 1);
        if (!atomic_load(&link->queue) && atomic_load(&link->wanted) == FSDPC_MPI_RUN)
            fsdpc_futex_wait(&link->asleep, 1,
                             rest_ns(now - last, link->n > 1 || link->backlog ? BUSY_NS : IDLE_NS));
        atomic_store(&link->asleep, 0);
    }
}

/* Sends the reason to the peers until all have received it or time runs out.  A dead peer must not
 * keep the reason from the others. */
static void tell_peers(fsdpc_mpi_link *link)
{
    MPI_Request *requests = malloc((size_t)link->base.size * sizeof *requests);
    int left = 0, done;
    for (int peer = 0; requests && peer < link->base.size; peer++)
        if (peer != link->base.rank && MPI_Issend(link->reason, sizeof link->reason, MPI_BYTE, peer,
                                                  0, link->news, &requests[left]) == MPI_SUCCESS)
            left++;
    for (int64_t end = fsdpc_clock_ns() + TELL_NS; left > 0 && fsdpc_clock_ns() < end;) {
        for (int i = left; i-- > 0;)
            if (MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done)
                requests[i] = requests[--left];
        fsdpc_futex_wait(&link->asleep, 0, SHORTEST_NS);
    }
    free(requests);
}

/* Ends MPI together with all other processes; returns false if one of them aborted instead. */
static bool end_mpi(fsdpc_mpi_link *link)
{
    int all = 0;
    MPI_Request barrier;
    say_goodbye(link);
    if (flushes())
        send_goodbyes(link, false);
    if (failed(link, MPI_Ibarrier(link->news, &barrier), "MPI_Ibarrier"))
        return false;
    for (int64_t began = fsdpc_clock_ns(); !all;) {
        test_pieces(link);
        if (*link->reason || failed(link, MPI_Test(&barrier, &all, MPI_STATUS_IGNORE), "MPI_Test"))
            return false;
        if (!all)
            fsdpc_futex_wait(&link->asleep, 0, rest_ns(fsdpc_clock_ns() - began, IDLE_NS));
    }
    for (int peer = 0; peer < link->base.size; peer++)
        (void)said_goodbye(link, peer); /* takes it off the network */
    MPI_Cancel(&link->requests[0]);
    MPI_Wait(&link->requests[0], MPI_STATUS_IGNORE);
    MPI_Comm_free(&link->news);
    MPI_Comm_free(&link->comm);
    if (!link->ours)
        return true;
    fsdpc_futex_wait(&link->asleep, 0, SETTLE_NS);
    enter(link, FSDPC_MPI_LAST);
    return !failed(link, MPI_Finalize(), "MPI_Finalize");
}

/* After an MPI failure, gives the watch time to find out which rank died; the watch then aborts. */
static void await_watch(fsdpc_mpi_link *link)
{
    int64_t end = fsdpc_clock_ns() + GRACE_NS;
    for (int64_t now; (now = fsdpc_clock_ns()) < end;) {
        atomic_store(&link->asleep, 1);
        if (atomic_load(&link->wanted) != FSDPC_MPI_RUN)
            break;
        fsdpc_futex_wait(&link->asleep, 1, end - now);
    }
    atomic_store(&link->asleep, 0);
}

static void stop(fsdpc_mpi_link *link)
{
    if (*link->reason && !*link->heard)
        await_watch(link);
    /* News may have arrived unseen; this rank's own reason is then just as good. */
    if ((!*link->heard || !*link->reason) && atomic_load(&link->wanted) == FSDPC_MPI_ABORT)
        memcpy(link->reason, link->asked, sizeof link->asked);
    if (!*link->reason)
        snprintf(link->reason, sizeof link->reason, "rank %d left with messages under way",
                 link->base.rank);
    if (!*link->heard)
        tell_peers(link);
    fsdpc_mpi_fail(link, link->reason);
    enter(link, FSDPC_MPI_STOPPED);
    fsdpc_mpi_wake(link);
}

void *fsdpc_mpi_thread(void *arg)
{
    fsdpc_mpi_link *link = arg;
    prctl(PR_SET_TIMERSLACK, 1000); /* ns; the usual 50000 would double the shortest sleep */
    fsdpc_status status = start_mpi(link);
    if (status == FSDPC_OK)
        status = join_world(link);
    if (status == FSDPC_OK && !grow(link))
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "%s", link->reason);
    if (status != FSDPC_OK) {
        snprintf(link->reason, sizeof link->reason, "%s", fsdpc_last_error());
        link->status = status;
        enter(link, FSDPC_MPI_STOPPED);
        return NULL;
    }
    post_news(link);
    enter(link, FSDPC_MPI_RUNNING);
    carry(link);
    if (!*link->reason && atomic_load(&link->wanted) == FSDPC_MPI_END && idle(link)) {
        enter(link, FSDPC_MPI_ENDING);
        if (end_mpi(link)) {
            enter(link, FSDPC_MPI_ENDED);
            return NULL;
        }
    }
    stop(link);
    return NULL;
}
