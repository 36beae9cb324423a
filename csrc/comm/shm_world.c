/* Tracks which ranks are alive, and passes memory between them.
 *
 * Each rank holds a robust mutex in the life page from the moment the mutex is created. The kernel
 * marks the mutex when its holder dies, before it releases the process's memory. Releasing the
 * memory takes 62 ms per gigabyte, and only then would a pidfd or a socket report the death.
 * trylock on a live peer's mutex fails in user space, so checking is nearly free.
 *
 * However, a robust mutex belongs to a thread, and the thread that created a communicator (a
 * notebook's worker, for example) may end before its process. A successful trylock therefore shows
 * only that the thread has ended. The process is then checked through its pidfd and the exiting
 * flag in /proc/<pid>/stat, which is set before the mutex is marked. If the process is alive, the
 * peer is an orphan and is always checked this way from then on.
 *
 * Only the thread that locked the mutex can unlock it. If another thread releases the world, its
 * life page stays mapped. glibc keeps the mutex in a list of the locking thread, and unmapping it
 * would leave a dangling pointer there.
 */
#include "comm/shm_world.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/coll_math.h"
#include "comm/fork_guard.h"
#include "comm/rendezvous.h"

/* ---- Text ---- */

void fsdpc_shm_text_store(_Atomic uint64_t *words, size_t n_words, const char *text)
{
    bool ended = !text;
    for (size_t i = 0; i < n_words; i++) {
        char part[8] = {0};
        for (size_t j = 0; j < sizeof part && !ended; j++) {
            ended = text[8 * i + j] == 0;
            part[j] = text[8 * i + j];
        }
        uint64_t word;
        memcpy(&word, part, sizeof word);
        atomic_store_explicit(&words[i], word, memory_order_relaxed);
        if (ended)
            return;
    }
}

void fsdpc_shm_text_load(const _Atomic uint64_t *words, size_t n_words, char *text, size_t bytes)
{
    size_t used = 0;
    for (size_t i = 0; i < n_words; i++) {
        uint64_t word = atomic_load_explicit(&words[i], memory_order_relaxed);
        char part[8];
        memcpy(part, &word, sizeof part);
        for (size_t j = 0; j < sizeof part; j++) {
            if (!part[j] || used + 1 >= bytes) {
                text[used] = 0;
                return;
            }
            text[used++] = part[j];
        }
    }
    text[used] = 0;
}

/* ---- Create and release ---- */

static size_t life_bytes(int size)
{
    return (size_t)size * (sizeof(fsdpc_shm_life) + sizeof(fsdpc_shm_mail));
}

static fsdpc_status world_new(int rank, int size, bool threads, fsdpc_shm_world **out)
{
    fsdpc_shm_world *world = calloc(1, sizeof *world);
    int *descriptors = malloc(3 * (size_t)size * sizeof *descriptors);
    _Atomic bool *orphan = calloc((size_t)size, sizeof *orphan);
    if (!world || !descriptors || !orphan) {
        free(world);
        free(descriptors);
        free((void *)orphan);
        return fsdpc_fail_errno("no memory for a world of %d ranks", size);
    }
    for (int i = 0; i < 2 * size; i++)
        descriptors[i] = -1;
    atomic_init(&world->refs, 1);
    world->rank = rank;
    world->size = size;
    world->threads = threads;
    world->fork_count = fsdpc_fork_count();
    world->sockets = descriptors;
    world->pidfds = descriptors + size;
    world->names = descriptors + 2 * size;
    world->orphan = orphan;
    *out = world;
    return FSDPC_OK;
}

static void life_attach(fsdpc_shm_world *world, fsdpc_shm_segment *segment)
{
    world->life_segment = segment;
    world->life = (fsdpc_shm_life *)(void *)segment->writable;
    world->mail = (fsdpc_shm_mail *)(void *)(world->life + world->size);
}

static fsdpc_status life_init(fsdpc_shm_world *world)
{
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    int error = 0;
    for (int p = 0; p < world->size && !error; p++)
        error = pthread_mutex_init(&world->life[p].held, &kind);
    pthread_mutexattr_destroy(&kind);
    return error ? fsdpc_fail(FSDPC_ERR_OS, "robust mutexes are not available") : FSDPC_OK;
}

typedef struct passage {
    fsdpc_shm_world *world;
    int peer;
    uint64_t tag;
    fsdpc_shm_segment *segment;
    fsdpc_status status;
    size_t bytes;
    int n_takers;
} passage;

static fsdpc_status early_idle(fsdpc_comm *comm, fsdpc_nap *nap, int64_t max_ns)
{
    (void)nap;
    fsdpc_shm_world *world = ((fsdpc_shm_early *)comm)->world;
    struct pollfd polled[FSDPC_COLL_MAX_RANKS];
    for (int p = 0; p < world->size; p++)
        polled[p] = (struct pollfd){.fd = world->sockets[p], .events = POLLIN};
    if (max_ns > 0)
        poll(polled, (nfds_t)world->size, (int)(max_ns / 1000000) + 1);
    return FSDPC_OK;
}

static const fsdpc_comm_ops early_ops = {
    .name = "shm",
    .abort = fsdpc_comm_abort_local,
    .idle = early_idle,
};

void fsdpc_shm_early_init(fsdpc_shm_early *early, fsdpc_shm_world *world,
                          const fsdpc_comm_config *config)
{
    fsdpc_comm_init(&early->comm, &early_ops, config);
    early->world = world;
}

static fsdpc_status share_life(fsdpc_shm_world *world, const fsdpc_comm_config *config)
{
    fsdpc_shm_early early;
    fsdpc_shm_early_init(&early, world, config);
    fsdpc_shm_segment *segment = NULL;
    size_t bytes = life_bytes(world->size);
    fsdpc_status status;
    if (world->rank == 0) {
        status = fsdpc_shm_segment_create("fsdpc life", bytes, true, &segment);
        if (status == FSDPC_OK)
            status = fsdpc_shm_segment_map(segment, true);
        if (status == FSDPC_OK) {
            life_attach(world, segment);
            status = life_init(world);
        }
        int others[FSDPC_COLL_MAX_RANKS] = {0};
        for (int p = 1; p < world->size; p++)
            others[p - 1] = p;
        FSDPC_KEEP_FIRST(status, fsdpc_shm_world_give(world, &early.comm, others, world->size - 1,
                                                      0, segment, status));
    } else {
        FSDPC_TRY(fsdpc_shm_world_take(world, &early.comm, 0, 0, bytes, &segment));
        status = segment ? fsdpc_shm_segment_map(segment, true)
                         : fsdpc_fail(FSDPC_ERR_PEER, "rank 0 could not create the life page; see "
                                                      "its own error");
        if (status == FSDPC_OK)
            life_attach(world, segment);
    }
    if (segment)
        fsdpc_shm_segment_close_fd(segment);
    if (status != FSDPC_OK && !world->life_segment)
        fsdpc_shm_segment_release(segment);
    return status;
}

void fsdpc_shm_world_set_names(fsdpc_shm_world *world, const fsdpc_comm_config *config)
{
    for (int p = 0; p < world->size; p++)
        world->names[p] = config->ranks ? config->ranks[p] : config->first_rank + p;
}

static int open_pidfd(int32_t pid)
{
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, pid, 0);
#else
    (void)pid;
    return -1;
#endif
}

fsdpc_status fsdpc_shm_world_create(const fsdpc_comm_config *config, fsdpc_shm_world **out)
{
    int size = config->size, rank = config->rank;
    if (size < 1 || size > FSDPC_COLL_MAX_RANKS || rank < 0 || rank >= size)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "rank %d of %d is not possible; a host has 1 to %d ranks", rank, size,
                          FSDPC_COLL_MAX_RANKS);
    fsdpc_shm_world *world = NULL;
    FSDPC_TRY(world_new(rank, size, false, &world));
    fsdpc_shm_world_set_names(world, config);
    int32_t pids[FSDPC_COLL_MAX_RANKS];
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, fsdpc_rendezvous_meet(config, world->sockets, pids), release);
    for (int p = 0; p < size; p++) {
        world->pidfds[p] = p == rank ? -1 : open_pidfd(pids[p]);
        fsdpc_fork_guard(world->pidfds[p]);
    }
    FSDPC_TRY_GOTO(status, share_life(world, config), release);
    fsdpc_shm_life *mine = &world->life[rank];
    pthread_mutex_lock(&mine->held);
    world->locker = pthread_self();
    atomic_store_explicit(&mine->pid, (int32_t)getpid(), memory_order_release);
    *out = world;
    return FSDPC_OK;

release:
    fsdpc_shm_world_release(world);
    return status;
}

fsdpc_status fsdpc_shm_world_create_threads(int size, fsdpc_shm_world **outs)
{
    if (size < 1 || size > FSDPC_COLL_MAX_RANKS)
        return fsdpc_fail(FSDPC_ERR_VALUE, "%d ranks are not possible; use 1 to %d", size,
                          FSDPC_COLL_MAX_RANKS);
    fsdpc_shm_segment *segment = NULL;
    FSDPC_TRY(fsdpc_shm_segment_create("fsdpc life", life_bytes(size), false, &segment));
    fsdpc_status status = FSDPC_OK;
    int made = 0;
    for (; made < size; made++) {
        FSDPC_TRY_GOTO(status, world_new(made, size, true, &outs[made]), release);
        life_attach(outs[made], fsdpc_shm_segment_retain(segment));
        atomic_store(&outs[made]->life[made].pid, (int32_t)getpid());
    }
release:
    while (status != FSDPC_OK && made > 0)
        fsdpc_shm_world_release(outs[--made]);
    fsdpc_shm_segment_release(segment);
    return status;
}

fsdpc_shm_world *fsdpc_shm_world_retain(fsdpc_shm_world *world)
{
    atomic_fetch_add_explicit(&world->refs, 1, memory_order_relaxed);
    return world;
}

void fsdpc_shm_world_release(fsdpc_shm_world *world)
{
    if (!world || atomic_fetch_sub_explicit(&world->refs, 1, memory_order_acq_rel) != 1)
        return;
    bool ours = world->fork_count == fsdpc_fork_count(); /* else a fork, which owns nothing here */
    for (int p = 0; ours && p < world->size; p++) {
        fsdpc_fork_close(world->sockets[p]);
        fsdpc_fork_close(world->pidfds[p]);
    }
    bool may_unmap = true;
    if (ours && !world->threads && world->life && atomic_load(&world->life[world->rank].pid)) {
        /* release, before the mutex: a peer that can lock the mutex sees this. */
        atomic_store_explicit(&world->life[world->rank].left, true, memory_order_release);
        may_unmap = pthread_equal(world->locker, pthread_self()) &&
                    pthread_mutex_unlock(&world->life[world->rank].held) == 0;
    }
    if (may_unmap)
        fsdpc_shm_segment_release(world->life_segment);
    free(world->sockets);
    free((void *)world->orphan);
    free(world);
}

/* ---- Life ---- */

enum { STAT_BYTES = 1024 };

/* Reads /proc/PID/stat of a rank's process; returns its length, or a negative errno. */
static int process_stat(const fsdpc_shm_world *world, int rank, char text[STAT_BYTES])
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", fsdpc_shm_world_pid(world, rank));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, text, STAT_BYTES - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0 ? (int)n : 0;
}

static char process_state(const fsdpc_shm_world *world, int rank)
{
    enum { EXITING = 4 }; /* PF_EXITING of the kernel's task flags */
    char text[STAT_BYTES];
    int n = process_stat(world, rank, text);
    if (n < 0)
        return n == -ENOENT ? 'X' : '?';
    const char *after_name = strrchr(text, ')'); /* the name may contain anything, even brackets */
    char state = 0;
    unsigned flags = 0;
    if (!after_name || sscanf(after_name, ") %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
        return n <= 0 ? 'X' : '?'; /* the process ended between open and read */
    return flags & EXITING ? 'X' : state;
}

static bool process_exiting(const fsdpc_shm_world *world, int rank)
{
    struct pollfd ended = {.fd = world->pidfds[rank], .events = POLLIN};
    if (ended.fd >= 0 && poll(&ended, 1, 0) == 1)
        return true;
    char state = process_state(world, rank);
    return state == 'Z' || state == 'X';
}

/* Returns the waitpid status of a dead rank, or 0 if it is unknown. The last field of
 * /proc/PID/stat contains the status from before the mutex is marked until the parent reaps the
 * process; after that, the pidfd provides it (Linux 6.15). */
static int wait_status(const fsdpc_shm_world *world, int rank)
{
    enum { EXIT = 8 };
    struct {
        uint64_t mask, cgroup;
        int32_t ids[11], exit_code;
    } info = {.mask = EXIT};
    char text[STAT_BYTES];
    const char *last = process_stat(world, rank, text) > 0 ? strrchr(text, ' ') : NULL;
    if (last)
        return (int)strtol(last, NULL, 10);
    int fd = world->pidfds[rank];
    return fd >= 0 && ioctl(fd, _IOWR(0xff, 11, info), &info) == 0 && info.mask & EXIT
               ? info.exit_code
               : 0;
}

void fsdpc_shm_world_ending(const fsdpc_shm_world *world, int rank, char *out, size_t bytes)
{
    int status = world->threads ? 0 : wait_status(world, rank);
    out[0] = 0;
    if (WIFSIGNALED(status))
        snprintf(out, bytes, " of signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (status != 0)
        snprintf(out, bytes, " with exit code %d", WEXITSTATUS(status));
}

bool fsdpc_shm_world_stopped(const fsdpc_shm_world *world, int rank)
{
    char state =
        world->threads || !fsdpc_shm_world_pid(world, rank) ? 0 : process_state(world, rank);
    return state == 'T' || state == 't';
}

void fsdpc_shm_world_leave(fsdpc_shm_world *world)
{
    /* release: pairs with the acquire in world_dead, no matter what else that sees of the
     * process. */
    if (!world->threads && world->life)
        atomic_store_explicit(&world->life[world->rank].left, true, memory_order_release);
}

bool fsdpc_shm_world_dead(fsdpc_shm_world *world, int rank)
{
    if (world->threads || rank == world->rank)
        return false;
    fsdpc_shm_life *life = &world->life[rank];
    if (!atomic_load_explicit(&life->pid, memory_order_acquire)) {
        struct pollfd ended = {.fd = world->pidfds[rank], .events = POLLIN};
        return ended.fd >= 0 && poll(&ended, 1, 0) == 1;
    }
    if (!atomic_load_explicit(&world->orphan[rank], memory_order_relaxed)) {
        int error = pthread_mutex_trylock(&life->held);
        if (error == EBUSY)
            return false;
        if (error == EOWNERDEAD)
            pthread_mutex_consistent(&life->held);
        if (error == 0 || error == EOWNERDEAD)
            pthread_mutex_unlock(&life->held);
        atomic_store_explicit(&world->orphan[rank], true, memory_order_relaxed);
    }
    return !atomic_load_explicit(&life->left, memory_order_acquire) && process_exiting(world, rank);
}

int32_t fsdpc_shm_world_pid(const fsdpc_shm_world *world, int rank)
{
    return atomic_load_explicit(&world->life[rank].pid, memory_order_relaxed);
}

void fsdpc_shm_world_locate(fsdpc_shm_world *world, const char *phase, const char *unit)
{
    fsdpc_shm_life *mine = &world->life[world->rank];
    fsdpc_shm_text_store(mine->phase, FSDPC_SHM_PHASE_WORDS, phase);
    fsdpc_shm_text_store(mine->unit, FSDPC_SHM_UNIT_WORDS, unit);
}

void fsdpc_shm_world_waits(fsdpc_shm_world *world, const char *what)
{
    fsdpc_shm_text_store(world->life[world->rank].wait, FSDPC_SHM_WAIT_WORDS, what);
}

void fsdpc_shm_world_where(const fsdpc_shm_world *world, int rank, char *text, size_t bytes)
{
    char phase[8 * FSDPC_SHM_PHASE_WORDS + 1], unit[8 * FSDPC_SHM_UNIT_WORDS + 1];
    char wait[8 * FSDPC_SHM_WAIT_WORDS + 1];
    fsdpc_shm_text_load(world->life[rank].wait, FSDPC_SHM_WAIT_WORDS, wait, sizeof wait);
    fsdpc_shm_text_load(world->life[rank].phase, FSDPC_SHM_PHASE_WORDS, phase, sizeof phase);
    fsdpc_shm_text_load(world->life[rank].unit, FSDPC_SHM_UNIT_WORDS, unit, sizeof unit);
    text[0] = 0;
    if (phase[0])
        snprintf(text, bytes, "in %s%s%s%s", phase, unit[0] ? " of '" : "", unit,
                 unit[0] ? "'" : "");
    size_t used = strlen(text);
    if (wait[0])
        snprintf(text + used, bytes - used, "%swaiting in %s", used ? ", " : "", wait);
}

/* ---- Memory, from rank to rank ---- */

typedef struct letter {
    uint64_t tag;
    int64_t status;
} letter;

static fsdpc_status poll_give(void *arg)
{
    passage *p = arg;
    letter message = {.tag = p->tag, .status = p->status};
    return fsdpc_socket_send(p->world->sockets[p->peer], &message, sizeof message,
                             p->segment ? p->segment->fd : -1);
}

static fsdpc_status poll_taken(void *arg)
{
    passage *p = arg;
    _Atomic int *taken = &p->world->mail[p->world->rank].taken;
    return atomic_load_explicit(taken, memory_order_acquire) == p->n_takers ? FSDPC_OK
                                                                            : FSDPC_IN_PROGRESS;
}

fsdpc_status fsdpc_shm_world_give(fsdpc_shm_world *world, fsdpc_comm *comm, const int *to, int n_to,
                                  uint64_t tag, fsdpc_shm_segment *segment, fsdpc_status status)
{
    passage p = {.world = world, .tag = tag, .status = status, .n_takers = n_to};
    p.segment = status == FSDPC_OK ? segment : NULL;
    if (!world->threads) {
        for (int i = 0; i < n_to; i++) {
            p.peer = to[i];
            FSDPC_TRY(fsdpc_comm_wait_for(comm, poll_give, &p, "handing over memory", NULL));
        }
        return FSDPC_OK;
    }
    fsdpc_shm_mail *mail = &world->mail[world->rank];
    mail->segment = p.segment;
    mail->status = status;
    for (int i = 0; i < n_to && p.segment; i++)
        fsdpc_shm_segment_retain(p.segment);
    atomic_store_explicit(&mail->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&mail->tag, tag, memory_order_release);
    return FSDPC_OK;
}

/* Processes need no acknowledgement, but a thread's mailbox may be reused only after all takers are
 * done. */
fsdpc_status fsdpc_shm_world_given(fsdpc_shm_world *world, fsdpc_comm *comm, int n_to)
{
    passage p = {.world = world, .n_takers = n_to};
    return world->threads ? fsdpc_comm_wait_for(comm, poll_taken, &p, "handing over memory", NULL)
                          : FSDPC_OK;
}

static fsdpc_status poll_take(void *arg)
{
    passage *p = arg;
    if (p->world->threads) {
        fsdpc_shm_mail *mail = &p->world->mail[p->peer];
        if (atomic_load_explicit(&mail->tag, memory_order_acquire) != p->tag)
            return FSDPC_IN_PROGRESS;
        p->segment = mail->segment;
        p->status = (fsdpc_status)mail->status;
        atomic_fetch_add_explicit(&mail->taken, 1, memory_order_release);
        return FSDPC_OK;
    }
    letter message;
    int fd = -1;
    FSDPC_TRY(fsdpc_socket_recv(p->world->sockets[p->peer], &message, sizeof message, &fd));
    p->status = (fsdpc_status)message.status;
    if (message.tag != p->tag || (fd < 0) != (p->status != FSDPC_OK)) {
        if (fd >= 0)
            close(fd);
        return fsdpc_fail(
            FSDPC_ERR_MISMATCH,
            "rank %d handed over memory of something else; create groups, parameter buffers and "
            "buffers in the same order on every rank, from one thread",
            p->peer);
    }
    if (fd < 0)
        return FSDPC_OK;
    return fsdpc_shm_segment_adopt(fd, p->bytes, &p->segment);
}

fsdpc_status fsdpc_shm_world_take(fsdpc_shm_world *world, fsdpc_comm *comm, int from, uint64_t tag,
                                  size_t bytes, fsdpc_shm_segment **out)
{
    passage p = {.world = world, .peer = from, .tag = tag, .bytes = bytes};
    FSDPC_TRY(fsdpc_comm_wait_for(comm, poll_take, &p, "taking over memory", NULL));
    *out = p.segment;
    return FSDPC_OK;
}
