/* The watch is a thread that sleeps in poll().
 *
 * It checks its host's ranks every TICK, and immediately when a rank's process ends. It must be
 * quick, because a launcher that notices the same death terminates the other ranks, including this
 * one. The peers would then learn only that this rank ended. For the same reason, it logs the
 * failure.
 *
 * It sends each peer a heartbeat (a beat) every BEAT. All messages have the same size. It skips a
 * beat while an earlier message is unacknowledged, so that the socket's buffer never fills. If a
 * message cannot be sent in full, the watch treats the connection as broken.
 *
 * The kernel detects silence: TCP_USER_TIMEOUT ends a connection if sent data is not acknowledged
 * for that long, and the beats ensure that there is always data to acknowledge.
 *
 * A connection may also close because that host's launcher terminated the rank after another
 * failure. A closed connection therefore counts as a failure only if no other cause is known after
 * GRACE.
 *
 * Only the first failure counts: the thread reports it to this host and to the peers, and treats
 * all later failures as consequences. The thread keeps running, because peers would treat a lost
 * connection as a death.
 */
#include "comm/host_watch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/thread.h"
#include "comm/fork_guard.h"

enum { TICK_MS = 200 };

static const int64_t BEAT_NS = 500000000, LATE_NS = 1800000000, GRACE_NS = 400000000;

/* The kind of a message. */
enum kind { BEAT, GOODBYE, WARNING, FAILED };

typedef struct message {
    uint32_t kind; /* in network order, like `status` */
    int32_t status;
    char text[504];
} message;

typedef struct peer {
    fsdpc_host_watch_peer who;
    int64_t heard_ns;
    bool late;         /* a warning was given */
    int64_t closed_ns; /* when its connection closed; 0: it is open */
    size_t filled;
    message in; /* may be incomplete */
} peer;

struct fsdpc_host_watch {
    fsdpc_comm *host;
    pthread_t thread;
    int stop_fd; /* an eventfd that ends the thread */
    char name[64];
    double silence_s;
    bool failed; /* the peers and this host have been told */
    char note[256];
    int64_t beat_ns;
    int n_peers;
    int n_polled;
    struct pollfd *polled; /* the peers', stop_fd, and the process ends of this host */
    peer peers[];
};

/* ---- Sending ---- */

static void drop(fsdpc_host_watch *self, peer *to)
{
    fsdpc_fork_close(to->who.fd);
    to->who.fd = -1;
    self->polled[to - self->peers].fd = -1;
}

static bool unacknowledged(const peer *to)
{
    int bytes = 0;
    return ioctl(to->who.fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

static void send_one(peer *to, enum kind kind, fsdpc_status status, const char *text)
{
    message m = {htonl(kind), (int32_t)htonl((uint32_t)status), ""};
    snprintf(m.text, sizeof m.text, "%s", text);
    if (to->who.fd >= 0 && !(kind == BEAT && unacknowledged(to)))
        (void)!send(to->who.fd, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT);
    /* To the receiver, a failed send looks like a broken connection. */
}

static void send_all(fsdpc_host_watch *self, const peer *but, enum kind kind, fsdpc_status status,
                     const char *text)
{
    for (int p = 0; p < self->n_peers; p++)
        if (&self->peers[p] != but)
            send_one(&self->peers[p], kind, status, text);
}

/* ---- Failures ---- */

static void warn(fsdpc_host_watch *self, const peer *from, const char *text)
{
    FSDPC_WARN(&self->host->log, "%s", text);
    send_all(self, from, WARNING, FSDPC_OK, text);
}

/* Reports a failure. `from` is the peer that reported it; NULL: this host, whose ranks already
 * know. */
static void fail(fsdpc_host_watch *self, const peer *from, fsdpc_status status, const char *text)
{
    if (self->failed)
        return;
    self->failed = true;
    FSDPC_WARN(&self->host->log, "%s", text);
    if (from)
        fsdpc_comm_tell(self->host, status, text);
    send_all(self, from, FAILED, status, text);
}

static void ranks_of(const peer *p, char *text, size_t bytes)
{
    int first = p->who.first_rank, last = first + p->who.n_ranks - 1;
    snprintf(text, bytes, first == last ? "rank %d" : "ranks %d to %d", first, last);
}

static void lost(fsdpc_host_watch *self, peer *from, int error)
{
    char text[256], ranks[64];
    drop(self, from);
    from->closed_ns = fsdpc_clock_ns();
    if (error != ETIMEDOUT && error != EHOSTUNREACH && error != ENETUNREACH)
        return;
    ranks_of(from, ranks, sizeof ranks);
    snprintf(text, sizeof text,
             "host %s (%s) is gone or cut off: nothing has reached it for %g s (FSDPC_WATCH)",
             from->who.host, ranks, self->silence_s);
    fail(self, from, FSDPC_ERR_PEER, text);
}

static void hear(fsdpc_host_watch *self, peer *from)
{
    fsdpc_status status = (fsdpc_status)(int32_t)ntohl((uint32_t)from->in.status);
    from->in.text[sizeof from->in.text - 1] = '\0';
    switch (ntohl(from->in.kind)) {
    case GOODBYE:
        drop(self, from);
        break;
    case WARNING:
        warn(self, from, from->in.text);
        break;
    case FAILED:
        fail(self, from, status, from->in.text);
        break;
    default:
        break;
    }
}

static void receive(fsdpc_host_watch *self, peer *from)
{
    while (from->who.fd >= 0) {
        ssize_t n = recv(from->who.fd, (char *)&from->in + from->filled,
                         sizeof from->in - from->filled, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            lost(self, from, n < 0 ? errno : 0);
            return;
        }
        from->heard_ns = fsdpc_clock_ns();
        from->filled += (size_t)n;
        if (from->filled < sizeof from->in)
            continue;
        from->filled = 0;
        hear(self, from);
    }
}

/* ---- Observing ---- */

static void look_here(fsdpc_host_watch *self)
{
    char note[sizeof self->note], text[sizeof((message *)0)->text];
    fsdpc_status status = fsdpc_comm_look(self->host, note, sizeof note);
    if (status != FSDPC_OK) {
        snprintf(text, sizeof text, "%s: %s", self->name, fsdpc_last_error());
        fail(self, NULL, status, text);
    } else if (strcmp(note, self->note) != 0) {
        memcpy(self->note, note, sizeof note);
        snprintf(text, sizeof text, "%s: %s", self->name, note[0] ? note : "all ranks go on");
        warn(self, NULL, text);
    }
}

static void look_there(fsdpc_host_watch *self, peer *p, int64_t now)
{
    char text[256];
    bool late = now - p->heard_ns > LATE_NS;
    if (p->closed_ns && now - p->closed_ns > GRACE_NS) {
        snprintf(text, sizeof text, "%s: rank %d died: the connection of its watch closed%s",
                 p->who.host, p->who.first_rank,
                 p->who.n_ranks > 1 ? "; its launcher may have ended it for another rank" : "");
        fail(self, p, FSDPC_ERR_PEER, text);
        return;
    }
    if (p->who.fd < 0 || late == p->late)
        return;
    p->late = late;
    snprintf(text, sizeof text,
             late ? "%s: rank %d has not answered for %g s: it is stopped, or "
                    "its host is overloaded or cut off"
                  : "%s: rank %d answers again",
             p->who.host, p->who.first_rank, (double)LATE_NS / 1e9);
    warn(self, p, text);
}

static void look(fsdpc_host_watch *self)
{
    int64_t now = fsdpc_clock_ns();
    if (!self->failed)
        look_here(self);
    for (int p = 0; p < self->n_peers && !self->failed; p++)
        look_there(self, &self->peers[p], now);
    if (now - self->beat_ns < BEAT_NS)
        return;
    self->beat_ns = now;
    send_all(self, NULL, BEAT, FSDPC_OK, "");
}

static void *watch_main(void *arg)
{
    fsdpc_host_watch *self = arg;
    while (!(self->polled[self->n_peers].revents & POLLIN)) {
        (void)!poll(self->polled, (nfds_t)self->n_polled, TICK_MS);
        for (int p = 0; p < self->n_peers; p++)
            if (self->polled[p].revents)
                receive(self, &self->peers[p]);
        look(self);
        for (int p = self->n_peers + 1; p < self->n_polled; p++)
            if (self->polled[p].revents)
                self->polled[p].fd = -1; /* already handled; it stays readable */
    }
    return NULL;
}

/* ---- Life ---- */

static void prepare(int fd, double silence_s)
{
    const unsigned ms = (unsigned)(silence_s * 1e3);
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fsdpc_fork_guard(fd);
}

static void destroy(fsdpc_host_watch *self)
{
    for (int p = 0; p < self->n_peers; p++)
        drop(self, &self->peers[p]);
    fsdpc_fork_close(self->stop_fd);
    free(self->polled);
    free(self);
}

fsdpc_status fsdpc_host_watch_start(fsdpc_comm *host, const fsdpc_host_watch_config *config,
                                    fsdpc_host_watch **out)
{
    size_t n = (size_t)config->n_peers, n_polled = n + 1 + (size_t)host->size;
    fsdpc_host_watch *self = calloc(1, sizeof *self + n * sizeof *self->peers);
    struct pollfd *polled = calloc(n_polled, sizeof *polled);
    if (!self || !polled) {
        free(self);
        free(polled);
        for (size_t p = 0; p < n; p++)
            close(config->peers[p].fd);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a watch over %d hosts", config->n_peers);
    }
    self->host = host;
    self->silence_s = config->silence_s;
    self->n_peers = config->n_peers;
    self->polled = polled;
    self->n_polled = (int)n_polled;
    memcpy(self->name, config->host, sizeof self->name);
    for (size_t p = 0; p < n; p++) {
        self->peers[p].who = config->peers[p];
        self->peers[p].heard_ns = fsdpc_clock_ns();
        polled[p] = (struct pollfd){.fd = config->peers[p].fd, .events = POLLIN};
        prepare(polled[p].fd, config->silence_s);
    }
    self->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    fsdpc_fork_guard(self->stop_fd);
    polled[n] = (struct pollfd){.fd = self->stop_fd, .events = POLLIN};
    for (int r = 0; r < host->size; r++)
        polled[n + 1 + (size_t)r] =
            (struct pollfd){.fd = fsdpc_comm_end_fd(host, r), .events = POLLIN};
    fsdpc_status status = self->stop_fd < 0
                              ? fsdpc_fail_errno("no event for a watch")
                              : fsdpc_thread_start("fsdpc-watch", watch_main, self, &self->thread);
    if (status != FSDPC_OK)
        destroy(self);
    else
        *out = self;
    return status;
}

void fsdpc_host_watch_stop(fsdpc_host_watch *self)
{
    if (!self)
        return;
    (void)!write(self->stop_fd, &(uint64_t){1}, sizeof(uint64_t));
    pthread_join(self->thread, NULL);
    look_here(self);
    if (!self->failed)
        send_all(self, NULL, GOODBYE, FSDPC_OK, "");
    for (int p = 0; p < self->n_peers; p++)
        shutdown(self->peers[p].who.fd, SHUT_WR); /* sent data arrives before the end */
    destroy(self);
}
