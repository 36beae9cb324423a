/* The mesh of sockets.
 *
 * Every rank listens under its own name and connects to all lower ranks. If a rank is not
 * listening yet, the connection fails, and the other retries after 1, 2, 4 ... 20 ms. Both sides
 * send a hello (magic, secret, rank, size, pid); the accepting side sends its own in reply.
 * Sequenced packets keep message boundaries.
 *
 * An accepted socket remains a guest until its hello arrives, so that a silent stranger cannot
 * delay any rank. If there are too many guests, the oldest is dropped. A wrong uid is rejected
 * silently; a wrong magic or secret causes a warning. A wrong size or a duplicate rank is an error,
 * because it means a misconfigured rank of this run.
 *
 * comm.c does the waiting: the meeting acts as a communicator whose idle is ppoll and whose
 * description lists the missing ranks.
 */
#include "comm/rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "comm/coll_math.h"
#include "comm/fork_guard.h"

enum { MAX_RANKS = FSDPC_COLL_MAX_RANKS, GUESTS = 64, SECRET_BYTES = 32 };
enum { FIRST_RETRY_MS = 1, LAST_RETRY_MS = 20 };

typedef struct hello {
    char magic[8];
    char secret[SECRET_BYTES]; /* all zeros if there is none */
    int32_t rank, size, pid;
} hello;

static const char magic[8] = "fsdpc 2";

typedef struct meeting {
    fsdpc_comm comm; /* first: idle and describe cast it back */
    const char *address;
    char secret[SECRET_BYTES];
    int listening;
    int guests[GUESTS];
    int *sockets; /* by rank */
    int32_t *pids;
    bool here[MAX_RANKS]; /* the rank's hello has arrived */
    int64_t retry_at;
    int retry_ms;
    int news_fd;
} meeting;

/* ---- Sockets ---- */

static fsdpc_status name_of(const char *address, int rank, struct sockaddr_un *name,
                            socklen_t *bytes_out)
{
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fsdpc-%u-%s-%d",
                     (unsigned)geteuid(), address ? address : "", rank);
    if (!address || !address[0] || n >= (int)sizeof name->sun_path - 1)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "the run's address '%s' is empty or too long for a socket name; use at "
                          "most 80 bytes",
                          address ? address : "");
    *bytes_out = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return FSDPC_OK;
}

static fsdpc_status open_socket(int *fd_out)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fsdpc_fail_errno("a Unix socket could not be opened");
    *fd_out = fd;
    return FSDPC_OK;
}

fsdpc_status fsdpc_rendezvous_listen(const char *address, int rank, int *fd_out)
{
    struct sockaddr_un name;
    socklen_t bytes = 0;
    int fd = -1;
    FSDPC_TRY(name_of(address, rank, &name, &bytes));
    FSDPC_TRY(open_socket(&fd));
    fsdpc_status status = FSDPC_OK;
    if (bind(fd, (struct sockaddr *)&name, bytes))
        status = errno == EADDRINUSE
                     ? fsdpc_fail(FSDPC_ERR_OS,
                                  "rank %d of the run '%s' is already there; wait for the earlier "
                                  "run to end, or give this one another MASTER_PORT",
                                  rank, address)
                     : fsdpc_fail_errno("rank %d cannot take its place in run '%s'", rank, address);
    else if (listen(fd, MAX_RANKS))
        status = fsdpc_fail_errno("rank %d cannot listen in run '%s'", rank, address);
    if (status != FSDPC_OK) {
        close(fd);
        return status;
    }
    *fd_out = fd;
    return FSDPC_OK;
}

/* Returns the credentials of the process at the other end; uid and pid are -1 if the kernel does
 * not know them. */
static struct ucred peer_of(int fd)
{
    struct ucred who = {.pid = -1, .uid = (uid_t)-1};
    socklen_t bytes = sizeof who;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes);
    return who;
}

static bool same_user(int fd)
{
    return peer_of(fd).uid == geteuid();
}

fsdpc_status fsdpc_socket_send(int fd, const void *message, size_t bytes, int passed_fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)message, .iov_len = bytes};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1};
    if (passed_fd >= 0) {
        envelope.msg_control = &control;
        envelope.msg_controllen = sizeof control;
        struct cmsghdr *head = CMSG_FIRSTHDR(&envelope);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &passed_fd, sizeof(int));
    }
    ssize_t sent = sendmsg(fd, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == (ssize_t)bytes)
        return FSDPC_OK;
    if (sent < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOBUFS))
        return FSDPC_IN_PROGRESS;
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET))
        return fsdpc_fail(FSDPC_ERR_PEER, "a peer closed its socket");
    if (sent < 0 && errno == ETOOMANYREFS)
        return fsdpc_fail_errno("too many descriptors on the way to peers; raise ulimit -n");
    return fsdpc_fail_errno("sending to a peer");
}

fsdpc_status fsdpc_socket_recv(int fd, void *message, size_t bytes, int *passed_out)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = message, .iov_len = bytes};
    struct msghdr envelope = {.msg_iov = &part,
                              .msg_iovlen = 1,
                              .msg_control = &control,
                              .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &envelope, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return FSDPC_IN_PROGRESS;
    if (got < 0 && errno != ECONNRESET)
        return fsdpc_fail_errno("receiving from a peer");
    int passed = -1;
    struct cmsghdr *head = got > 0 ? CMSG_FIRSTHDR(&envelope) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        memcpy(&passed, CMSG_DATA(head), sizeof passed);
    if (got != (ssize_t)bytes || (envelope.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
        if (passed >= 0)
            close(passed);
        return fsdpc_fail(FSDPC_ERR_PEER, got <= 0 ? "a peer closed its socket"
                                                   : "a peer sent a message of another version");
    }
    *passed_out = passed;
    return FSDPC_OK;
}

/* ---- The meeting ---- */

static void close_socket(int *fd)
{
    fsdpc_fork_close(*fd);
    *fd = -1;
}

static fsdpc_status say_hello(const meeting *m, int fd)
{
    hello mine = {.rank = m->comm.rank, .size = m->comm.size, .pid = (int32_t)getpid()};
    memcpy(mine.magic, magic, sizeof magic);
    memcpy(mine.secret, m->secret, sizeof m->secret);
    fsdpc_status status = fsdpc_socket_send(fd, &mine, sizeof mine, -1);
    return status == FSDPC_IN_PROGRESS ? fsdpc_fail(FSDPC_ERR_OS, "a fresh socket is full")
                                       : status;
}

/* Returns FSDPC_OK for a valid hello, or FSDPC_ERR_TYPE for a stranger. */
static fsdpc_status hear_hello(const meeting *m, int fd, hello *out)
{
    int passed = -1;
    fsdpc_status status = fsdpc_socket_recv(fd, out, sizeof *out, &passed);
    if (status == FSDPC_IN_PROGRESS)
        return status;
    if (passed >= 0)
        close(passed);
    if (status != FSDPC_OK || memcmp(out->magic, magic, sizeof magic) != 0 ||
        memcmp(out->secret, m->secret, sizeof m->secret) != 0)
        return FSDPC_ERR_TYPE;
    if (out->size != m->comm.size || out->rank < 0 || out->rank >= m->comm.size)
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "rank %d of run '%s' was told of %d ranks, rank %d of %d; start all with "
                          "the same WORLD_SIZE",
                          m->comm.rank, m->address, m->comm.size, out->rank, out->size);
    return FSDPC_OK;
}

static void meeting_describe(fsdpc_comm *comm, char *text, size_t bytes)
{
    const meeting *m = (const meeting *)comm;
    size_t used = 0;
    for (int p = 0; p < comm->size && used + 1 < bytes; p++) {
        if (m->here[p])
            continue;
        int n = snprintf(text + used, bytes - used, "%srank %d%s", used ? ", " : "", p,
                         m->sockets[p] < 0 ? " (not started yet?)" : " (started, has not joined)");
        used += n > 0 ? (size_t)n : 0;
    }
}

static fsdpc_status left_early(meeting *m, int rank)
{
    char missing[256] = "";
    meeting_describe(&m->comm, missing, sizeof missing);
    return fsdpc_fail(
        FSDPC_ERR_PEER,
        "rank %d (pid %d) of run '%s' came and left or died before all ranks had met%s%s; "
        "see that rank's own output",
        rank, m->pids[rank], m->address, missing[0] ? ", still missing: " : "", missing);
}

/* Checks whether a rank has hung up after sending its hello. Any data that the rank has already
 * sent stays in the socket. */
static fsdpc_status watch(meeting *m, int rank)
{
    char byte;
    ssize_t got = recv(m->sockets[rank], &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    bool ended = got == 0 || (got < 0 && errno == ECONNRESET);
    return ended ? left_early(m, rank) : FSDPC_OK;
}

static fsdpc_status enter(meeting *m, int fd, const hello *peer)
{
    if (peer->rank == m->comm.rank || m->sockets[peer->rank] >= 0)
        return fsdpc_fail(FSDPC_ERR_MISMATCH,
                          "two processes (pid %d is one) say that they are rank %d of run '%s'; "
                          "give every process its own RANK",
                          peer->pid, peer->rank, m->address);
    m->sockets[peer->rank] = fd;
    m->pids[peer->rank] = peer->pid;
    m->here[peer->rank] = true;
    fsdpc_status status = say_hello(m, fd);
    return status == FSDPC_ERR_PEER ? left_early(m, peer->rank) : status;
}

static void let_in(meeting *m)
{
    for (;;) {
        int fd = accept4(m->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        if (!same_user(fd)) {
            close(fd);
            continue;
        }
        fsdpc_fork_guard(fd);
        if (m->guests[GUESTS - 1] >= 0)
            close_socket(&m->guests[0]);
        int at = 0;
        while (m->guests[at] >= 0)
            at++;
        m->guests[at] = fd;
    }
}

static fsdpc_status hear_guests(meeting *m)
{
    int kept = 0;
    for (int i = 0; i < GUESTS; i++) {
        int fd = m->guests[i];
        m->guests[i] = -1;
        if (fd < 0)
            continue;
        hello peer;
        fsdpc_status status = hear_hello(m, fd, &peer);
        if (status == FSDPC_IN_PROGRESS) {
            m->guests[kept++] = fd;
            continue;
        }
        if (status == FSDPC_OK)
            status = enter(m, fd, &peer);
        if (status == FSDPC_OK)
            continue;
        if (status == FSDPC_ERR_TYPE)
            FSDPC_WARN(&m->comm.log,
                       "process %d, which is not of this run, knocked at rank %d of run '%s' and "
                       "was turned away",
                       (int)peer_of(fd).pid, m->comm.rank, m->address);
        fsdpc_fork_close(fd);
        if (status != FSDPC_ERR_TYPE)
            return status;
    }
    return FSDPC_OK;
}

static fsdpc_status try_connect(meeting *m, int rank)
{
    struct sockaddr_un name;
    socklen_t bytes = 0;
    int fd = -1;
    FSDPC_TRY(name_of(m->address, rank, &name, &bytes));
    FSDPC_TRY(open_socket(&fd));
    fsdpc_status status = FSDPC_OK;
    if (connect(fd, (struct sockaddr *)&name, bytes)) {
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR && errno != ENOENT)
            status = fsdpc_fail_errno("rank %d cannot reach rank %d", m->comm.rank, rank);
        close(fd);
        return status;
    }
    if (!same_user(fd))
        status = fsdpc_fail(FSDPC_ERR_OS, "another user's process poses as rank %d of run '%s'",
                            rank, m->address);
    else
        status = say_hello(m, fd);
    if (status != FSDPC_OK) {
        close(fd);
        return status == FSDPC_ERR_PEER ? FSDPC_OK : status; /* the peer has left again: check once
                                                              * more */
    }
    fsdpc_fork_guard(fd);
    m->sockets[rank] = fd;
    return FSDPC_OK;
}

static fsdpc_status hear_answer(meeting *m, int rank)
{
    hello peer;
    fsdpc_status status = hear_hello(m, m->sockets[rank], &peer);
    if (status == FSDPC_IN_PROGRESS)
        return FSDPC_OK;
    if (status == FSDPC_ERR_TYPE || (status == FSDPC_OK && peer.rank != rank))
        return fsdpc_fail(FSDPC_ERR_PEER,
                          "the process that listens as rank %d of run '%s' closed the connection "
                          "or is of another run or version; see that rank's own error",
                          rank, m->address);
    FSDPC_TRY(status);
    m->pids[rank] = peer.pid;
    m->here[rank] = true;
    return FSDPC_OK;
}

/* Fails if a rank ended before it connected, because it will never arrive. Ignores a file that was
 * not written by a launcher. */
static fsdpc_status news_check(const meeting *m)
{
    char text[256];
    const size_t head = strlen(FSDPC_RENDEZVOUS_NEWS);
    ssize_t n = m->news_fd > 0 ? pread(m->news_fd, text, sizeof text - 1, 0) : 0;
    if (n <= (ssize_t)head || memcmp(text, FSDPC_RENDEZVOUS_NEWS, head) != 0)
        return FSDPC_OK;
    text[n] = 0;
    text[head + strcspn(text + head, "\n")] = 0;
    return fsdpc_fail(FSDPC_ERR_PEER,
                      "%s before all ranks had met, which rank %d waits for; see that rank's own "
                      "output",
                      text + head, m->comm.rank);
}

static fsdpc_status meeting_poll(void *arg)
{
    meeting *m = arg;
    let_in(m);
    FSDPC_TRY(hear_guests(m));
    int64_t now = fsdpc_clock_ns();
    bool ask = now >= m->retry_at, all = true;
    for (int p = 0; p < m->comm.size; p++) {
        if (m->here[p]) {
            if (p != m->comm.rank)
                FSDPC_TRY(watch(m, p));
            continue;
        }
        if (p < m->comm.rank && m->sockets[p] < 0 && ask)
            FSDPC_TRY(try_connect(m, p));
        if (p < m->comm.rank && m->sockets[p] >= 0)
            FSDPC_TRY(hear_answer(m, p));
        all = all && m->here[p];
    }
    if (ask) {
        m->retry_at = now + m->retry_ms * INT64_C(1000000);
        m->retry_ms = m->retry_ms * 2 < LAST_RETRY_MS ? m->retry_ms * 2 : LAST_RETRY_MS;
    }
    if (all)
        return FSDPC_OK;
    FSDPC_TRY(news_check(m));
    return FSDPC_IN_PROGRESS;
}

static fsdpc_status meeting_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    (void)nap;
    meeting *m = (meeting *)comm;
    struct pollfd polled[MAX_RANKS + GUESTS + 1];
    nfds_t n = 0;
    bool asking = false;
    polled[n++] = (struct pollfd){.fd = m->listening, .events = POLLIN};
    for (int i = 0; i < GUESTS; i++)
        if (m->guests[i] >= 0)
            polled[n++] = (struct pollfd){.fd = m->guests[i], .events = POLLIN};
    for (int p = 0; p < comm->size; p++) {
        if (m->sockets[p] >= 0)
            polled[n++] =
                (struct pollfd){.fd = m->sockets[p], .events = m->here[p] ? POLLRDHUP : POLLIN};
        asking = asking || (p < comm->rank && m->sockets[p] < 0);
    }
    int64_t sleep_ns = max_ns, to_retry = m->retry_at - fsdpc_clock_ns();
    if (asking && to_retry < sleep_ns)
        sleep_ns = to_retry > 0 ? to_retry : 0;
    struct timespec limit = {.tv_sec = (time_t)(sleep_ns / 1000000000),
                             .tv_nsec = (long)(sleep_ns % 1000000000)};
    if (max_ns > 0)
        ppoll(polled, n, &limit, NULL);
    return FSDPC_OK;
}

static const fsdpc_comm_ops meeting_ops = {
    .name = "rendezvous",
    .abort = fsdpc_comm_abort_local,
    .idle = meeting_idle,
    .describe = meeting_describe,
};

fsdpc_status fsdpc_rendezvous_meet(const fsdpc_comm_config *config, int *sockets_out,
                                   int32_t *pids_out)
{
    meeting m = {
        .address = config->address, .listening = config->socket_fd, .news_fd = config->news_fd};
    if (config->secret)
        memcpy(m.secret, config->secret, strnlen(config->secret, sizeof m.secret));
    m.sockets = sockets_out;
    m.pids = pids_out;
    m.retry_ms = FIRST_RETRY_MS;
    fsdpc_comm_init(&m.comm, &meeting_ops, config);
    m.comm.spin = false;
    for (int i = 0; i < GUESTS; i++)
        m.guests[i] = -1;
    for (int p = 0; p < config->size; p++)
        sockets_out[p] = -1;
    pids_out[config->rank] = (int32_t)getpid();
    m.here[config->rank] = true;

    fsdpc_status status = FSDPC_OK;
    if (m.listening <= 0) {
        m.listening = -1;
        status = fsdpc_rendezvous_listen(config->address, config->rank, &m.listening);
    }
    fsdpc_fork_guard(m.listening);
    if (status == FSDPC_OK)
        status = fsdpc_comm_wait_for(&m.comm, meeting_poll, &m, "the meeting of all ranks",
                                     config->address);
    close_socket(&m.listening);
    for (int i = 0; i < GUESTS; i++)
        close_socket(&m.guests[i]);
    for (int p = 0; status != FSDPC_OK && p < config->size; p++)
        close_socket(&sockets_out[p]);
    return status;
}
