/* Ranks that die, leave, come late or never, and what is left behind. Ranks are processes. */
#include "comm_ranks.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "comm/shm_internal.h"
#include "comm/fork_guard.h"
#include "comm/rendezvous.h"

/* Seen by all ranks; made before they are forked. */
typedef struct blackboard {
    _Atomic int64_t killed_ns;
    _Atomic int notices;
    char notice[1024];
    int bell[2]; /* a pipe: who waits for something reads */
} blackboard;

static blackboard *board;

static void ring(void)
{
    CHECK(write(board->bell[1], "x", 1) == 1);
}

static void wait_for_ring(rank_context *self)
{
    struct pollfd ready = {.fd = board->bell[0], .events = POLLIN};
    char x;
    EXPECT(self, poll(&ready, 1, 30000) == 1 && read(board->bell[0], &x, 1) == 1, "no ring");
}

static fsdpc_status barrier(rank_context *self)
{
    return fsdpc_comm_run(self->comm, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER, .what = "fence"});
}

static void reset_board(void)
{
    atomic_store(&board->notices, 0);
    board->notice[0] = 0;
}

/* ---- Death ---- */

typedef enum phase {
    IN_USER_CODE,
    AFTER_ARRIVAL,
    AFTER_PUBLISHING,
    BEFORE_REDUCTION,
    WITH_REDUCTION_POSTED,
    BEFORE_CREATION,
    BEFORE_SPLIT,
    BEFORE_ALL_REDUCE,
    PHASES
} phase;

static void die_at(rank_context *self, phase now)
{
    if (self->rank != 1 || now != *(const phase *)self->arg)
        return;
    fsdpc_comm_locate(self->comm, "backward", "layers.3");
    atomic_store(&board->killed_ns, fsdpc_clock_ns());
    raise(SIGKILL);
}

typedef struct life {
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer, *late_buffer;
    fsdpc_comm *part;
    float shard[64];
} life;

static fsdpc_status live_until_somebody_dies(rank_context *self, life *mine)
{
    fsdpc_epoch_note note = {.bits = FSDPC_EPOCH_CHANGED}, all;
    fsdpc_slice slice = {.numel = 64};
    enum { MANY = 3000000 };
    FSDPC_TRY(fsdpc_param_buffer_create(self->comm, 8192, &mine->param_buffer));
    FSDPC_TRY(fsdpc_buffer_create(self->comm, 8192, &mine->buffer));
    fsdpc_coll reduce = {.kind = FSDPC_COLL_REDUCE_SCATTER,
                         .what = "layers.3",
                         .stream = self->stream,
                         .slices = &slice,
                         .n_slices = 1,
                         .buffer = mine->buffer,
                         .shard = mine->shard,
                         .scale = 1};
    die_at(self, IN_USER_CODE);
    FSDPC_TRY(fsdpc_param_buffer_arrive(mine->param_buffer, &note));
    die_at(self, AFTER_ARRIVAL);
    FSDPC_TRY(fsdpc_param_buffer_epoch_wait(mine->param_buffer, "root", &all));
    FSDPC_TRY(fsdpc_param_buffer_copied_in(mine->param_buffer));
    FSDPC_TRY(fsdpc_param_buffer_copy_in_wait(mine->param_buffer, "root"));
    die_at(self, AFTER_PUBLISHING);
    die_at(self, BEFORE_REDUCTION);
    fsdpc_work work = {0};
    FSDPC_TRY(fsdpc_comm_post(self->comm, &reduce, &work));
    die_at(self, WITH_REDUCTION_POSTED);
    FSDPC_TRY(fsdpc_comm_wait(&work));
    FSDPC_TRY(fsdpc_buffer_idle_wait(mine->buffer, "layers.3"));
    die_at(self, BEFORE_CREATION);
    FSDPC_TRY(fsdpc_buffer_create(self->comm, 8192, &mine->late_buffer));
    die_at(self, BEFORE_SPLIT);
    FSDPC_TRY(fsdpc_comm_split(self->comm, 0, 0, &mine->part));
    die_at(self, BEFORE_ALL_REDUCE);
    float *x = calloc(MANY, sizeof *x);
    fsdpc_status status = fsdpc_comm_run(mine->part, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                                   .send = x,
                                                                   .recv = x,
                                                                   .stream = self->stream,
                                                                   .numel = MANY});
    free(x);
    return status;
}

static void a_rank_dies(rank_context *self)
{
    life mine = {0};
    fsdpc_status status = live_until_somebody_dies(self, &mine);
    double after = (double)(fsdpc_clock_ns() - atomic_load(&board->killed_ns)) * 1e-9;
    char message[1024];
    snprintf(message, sizeof message, "%s", fsdpc_last_error());
    EXPECT(self, status == FSDPC_ERR_PEER || status == FSDPC_ERR_POISONED, "phase %d: %s %s",
           *(const int *)self->arg, fsdpc_status_text(status), message);
    EXPECT(self, strstr(message, "rank 1 (pid ") && strstr(message, ") died of signal 9 ("), "%s",
           message);
    EXPECT(self, strstr(message, "in backward of 'layers.3'"), "%s", message);
    EXPECT(self, after < 3.0, "phase %d: noticed after %.3f s", *(const int *)self->arg, after);
    fsdpc_comm_destroy(mine.part);
    fsdpc_buffer_destroy(mine.buffer);
    fsdpc_buffer_destroy(mine.late_buffer);
    fsdpc_param_buffer_destroy(mine.param_buffer);
}

static void test_death(void)
{
    for (phase when = 0; when < PHASES; when++)
        for (int size = 2; size <= 4; size++)
            ranks_run_processes(size, a_rank_dies,
                                &(rank_options){.arg = &when, .dies = 2, .async = size == 3});
}

/* Rank 3 dies, which is in a group with rank 1; ranks 0 and 2 wait for each other elsewhere. */
static void death_elsewhere(rank_context *self)
{
    fsdpc_comm *part = NULL;
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank % 2, 0, &part));
    if (self->rank == 3) {
        atomic_store(&board->killed_ns, fsdpc_clock_ns());
        raise(SIGKILL);
    }
    if (self->rank == 2)
        wait_for_ring(self);
    fsdpc_status status = fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER});
    EXPECT(self, status == FSDPC_ERR_PEER || (status == FSDPC_ERR_POISONED && self->rank == 2),
           "%s", fsdpc_status_text(status));
    EXPECT(self, strstr(fsdpc_last_error(), "rank 3 (pid "), "%s", fsdpc_last_error());
    if (self->rank == 0)
        ring();
    fsdpc_comm_destroy(part);
}

/* Rank 3 dies, rank 0 reads of it and ends too, and only then do the others look: they still name
 * the rank whose death came first. */
static void the_first_death_is_named(rank_context *self)
{
    fsdpc_comm *part = NULL;
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank / 2, 0, &part));
    if (self->rank == 3)
        raise(SIGKILL);
    fsdpc_shm_world *world = fsdpc_shm_of(self->comm)->world;
    for (int ms = 0; self->rank != 0 && ms < 30000 && !fsdpc_shm_world_dead(world, 0); ms++)
        usleep(1000);
    EXPECT_FAILS(self, fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}),
                 FSDPC_ERR_PEER, "rank 3 (pid ");
    if (self->rank == 0)
        raise(SIGKILL);
    fsdpc_comm_destroy(part);
}

/* A rank that shut down in order and ended does not count as dead for those who go on without it.
 */
static void an_orderly_end(rank_context *self)
{
    fsdpc_comm *part = NULL;
    EXPECT_OK(self, fsdpc_comm_split(self->comm, self->rank < 2 ? 0 : -1, 0, &part));
    if (self->rank == 1)
        wait_for_ring(self); /* rank 0 has waited for a notice's time by then */
    if (part)
        EXPECT_OK(self, fsdpc_comm_run(part, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER}));
    fsdpc_comm_destroy(part);
}

/* ---- Leaving, aborting, deadlines ---- */

static void a_rank_leaves(rank_context *self)
{
    EXPECT_OK(self, barrier(self));
    if (self->rank == 1)
        return;
    EXPECT_FAILS(self, barrier(self), FSDPC_ERR_PEER, "left");
}

static void a_rank_aborts(rank_context *self)
{
    EXPECT_OK(self, barrier(self));
    if (self->rank == 1) {
        atomic_store(&board->killed_ns, fsdpc_clock_ns());
        fsdpc_comm_abort(self->comm, "loss is NaN in step 7");
        EXPECT_FAILS(self, barrier(self), FSDPC_ERR_POISONED, "NaN");
        return;
    }
    EXPECT_FAILS(self, barrier(self), FSDPC_ERR_POISONED, "rank 1: loss is NaN in step 7");
    EXPECT(self, fsdpc_clock_ns() - atomic_load(&board->killed_ns) < 2000000000, "late");
}

static void a_rank_is_stuck(rank_context *self)
{
    fsdpc_comm_locate(self->comm, self->rank == 1 ? "data loader" : "forward", NULL);
    if (self->rank == 1) {
        wait_for_ring(self);
        EXPECT_FAILS(self, barrier(self), FSDPC_ERR_POISONED, "rank 0: rank 0 has been waiting");
        return;
    }
    int64_t start = fsdpc_clock_ns();
    EXPECT_FAILS(self, barrier(self), FSDPC_ERR_TIMEOUT, "in data loader)");
    EXPECT(self, fsdpc_clock_ns() - start < 3000000000, "the deadline is 0.3 s");
    EXPECT(self, strstr(fsdpc_last_error(), "barrier of 'fence' for rank 1 (pid "), "%s",
           fsdpc_last_error());
    ring();
}

static void note_and_ring(void *arg, const char *text)
{
    (void)arg;
    if (atomic_fetch_add(&board->notices, 1) == 0) {
        snprintf(board->notice, sizeof board->notice, "%s", text);
        ring();
    }
}

/* The notice names who is late, and that one's arrival still completes the wait. */
static void a_rank_is_late(rank_context *self)
{
    fsdpc_comm_locate(self->comm, "forward", "layers.1");
    EXPECT_OK(self, barrier(self));
    if (self->rank == 1)
        wait_for_ring(self);
    EXPECT_OK(self, barrier(self));
    if (self->rank == 0)
        EXPECT(self, strstr(board->notice, ", in forward of 'layers.1')"), "%s", board->notice);
}

static void *create_in_thread(void *arg)
{
    rank_context *self = arg;
    rank_options options = {.notice_s = 0.3, .notice = note_and_ring};
    fsdpc_comm_config config = ranks_config(self, &options);
    config.address = self->arg;
    EXPECT_OK(self, fsdpc_comm_shm_create(&config, &self->comm));
    return NULL;
}

/* The thread that created the communicator ends; its process lives on, and peers must see that. */
static void orphan_main(int rank, const char *address)
{
    alarm(RANKS_ALARM_S);
    rank_context self = {.rank = rank, .size = 2};
    ranks_open(&self, &(rank_options){.arg = address});
    pthread_t thread;
    pthread_create(&thread, NULL, create_in_thread, &self);
    pthread_join(thread, NULL);
    if (rank == 1)
        wait_for_ring(&self); /* rank 0 has looked at us for 0.3 s by then */
    EXPECT_OK(&self, barrier(&self));
    ranks_close(&self);
    _exit(self.failures != 0);
}

static void test_orphans(void)
{
    atomic_store(&board->notices, 0);
    const char *address = ranks_address();
    pid_t pids[2];
    for (int r = 0; r < 2; r++)
        if ((pids[r] = fork()) == 0)
            orphan_main(r, address);
    for (int r = 0; r < 2; r++) {
        int ended = 0;
        waitpid(pids[r], &ended, 0);
        CHECK_NOTE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "rank %d: %x", r, ended);
    }
}

/* ---- What is left behind ---- */

static int count_descriptors(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        n++;
    closedir(folder);
    return n;
}

static int count_shared_mappings(void)
{
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        n += strstr(line, "memfd:") != NULL;
    fclose(maps);
    return n;
}

static void use_everything(rank_context *self, fsdpc_comm *comm)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer;
    fsdpc_comm *part;
    EXPECT_OK(self, fsdpc_param_buffer_create(comm, 100000, &param_buffer));
    EXPECT_OK(self, fsdpc_buffer_create(comm, 100000, &buffer));
    EXPECT_OK(self, fsdpc_comm_split(comm, self->rank % 2, 0, &part));
    EXPECT(self, count_shared_mappings() > 4, "the count sees nothing");
    fsdpc_param_buffer_destroy(param_buffer);
    fsdpc_buffer_destroy(buffer);
    fsdpc_comm_destroy(part);
}

static void leak_main(int rank, int size, const char *address)
{
    alarm(RANKS_ALARM_S);
    rank_context self = {.rank = rank, .size = size};
    ranks_open(&self, &(rank_options){0});
    int descriptors = count_descriptors(), mappings = count_shared_mappings();
    for (int cycle = 0; cycle < 3; cycle++) {
        char name[80];
        snprintf(name, sizeof name, "%s-%d", address, cycle);
        fsdpc_comm_config config = ranks_config(&self, &(rank_options){0});
        config.address = name;
        fsdpc_comm *comm = NULL;
        EXPECT_OK(&self, fsdpc_comm_shm_create(&config, &comm));
        use_everything(&self, comm);
        fsdpc_comm_destroy(comm);
        EXPECT(&self, count_descriptors() == descriptors, "cycle %d: %d descriptors, were %d",
               cycle, count_descriptors(), descriptors);
        EXPECT(&self, count_shared_mappings() == mappings, "cycle %d: %d mappings, were %d", cycle,
               count_shared_mappings(), mappings);
    }
    ranks_close(&self);
    _exit(self.failures != 0);
}

static void test_leaks(void)
{
    const char *address = ranks_address();
    pid_t pids[3];
    for (int r = 0; r < 3; r++)
        if ((pids[r] = fork()) == 0)
            leak_main(r, 3, address);
    for (int r = 0; r < 3; r++) {
        int ended = 0;
        waitpid(pids[r], &ended, 0);
        CHECK_NOTE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "rank %d: %x", r, ended);
    }
}

static void forks(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    EXPECT_OK(self, fsdpc_param_buffer_create(self->comm, 4096, &param_buffer));
    param_buffer->write[0] = 7;
    fsdpc_shm_comm *comm = fsdpc_shm_of(self->comm);
    int socket_fd = comm->world->sockets[1 - self->rank];
    pid_t child = fork();
    if (child == 0) {
        bool closed = fcntl(socket_fd, F_GETFD) < 0;
        bool refused =
            barrier(self) == FSDPC_ERR_STATE && strstr(fsdpc_last_error(), "fork of rank");
        bool reads = param_buffer->read[0] == 7;
        fsdpc_param_buffer_destroy(param_buffer);
        fsdpc_comm_destroy(self->comm);
        _exit(closed && refused && reads ? 0 : 1);
    }
    int ended = 0;
    waitpid(child, &ended, 0);
    EXPECT(self, WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "child: %x", ended);
    EXPECT_OK(self, barrier(self)); /* the child's destroy changed nothing for us */
    fsdpc_param_buffer_destroy(param_buffer);
}

static void too_large(rank_context *self)
{
    fsdpc_param_buffer *param_buffer;
    fsdpc_buffer *buffer;
    EXPECT_FAILS(self, fsdpc_param_buffer_create(self->comm, (size_t)1 << 50, &param_buffer),
                 FSDPC_ERR_NOMEM, "MiB are free");
    EXPECT_FAILS(self, fsdpc_buffer_create(self->comm, (size_t)1 << 50, &buffer), FSDPC_ERR_NOMEM,
                 "MiB are free");
    EXPECT_OK(self, barrier(self));
}

/* ---- The rendezvous ---- */

static void keep_notice(void *arg, const char *text)
{
    (void)arg;
    if (!board->notice[0])
        snprintf(board->notice, sizeof board->notice, "%s", text);
}

static fsdpc_status meet(int rank, int size, const char *address, int socket_fd)
{
    rank_context self = {.rank = rank, .size = size};
    fsdpc_comm_config config = ranks_config(
        &self, &(rank_options){.timeout_s = 0.4, .notice_s = 0.1, .notice = keep_notice});
    config.address = address;
    config.socket_fd = socket_fd;
    fsdpc_comm *comm = NULL;
    fsdpc_status status = fsdpc_comm_shm_create(&config, &comm);
    fsdpc_comm_destroy(comm);
    return status;
}

static int stranger(int listening)
{
    struct sockaddr_un name;
    socklen_t bytes = sizeof name;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(getsockname(listening, (struct sockaddr *)&name, &bytes) == 0);
    CHECK(connect(fd, (struct sockaddr *)&name, bytes) == 0);
    return fd;
}

static void test_rendezvous(void)
{
    const char *address = ranks_address();
    CHECK_FAILS(meet(0, 3, address, -1), FSDPC_ERR_TIMEOUT, "rank 1 (not started yet?), rank 2");
    CHECK_NOTE(strstr(board->notice, "rank 0 has been waiting for 0.1") != NULL, "%s",
               board->notice);
    CHECK_FAILS(meet(1, 2, address, -1), FSDPC_ERR_TIMEOUT, "rank 0 (not started yet?)");
    CHECK_FAILS(meet(3, 2, address, -1), FSDPC_ERR_VALUE, "rank 3 of 2");
    CHECK_FAILS(meet(0, 2, "", -1), FSDPC_ERR_VALUE, "address");

    /* Somebody already is rank 0 of this run. */
    int listening = -1;
    CHECK_OK(fsdpc_rendezvous_listen(address, 0, &listening));
    CHECK_FAILS(meet(0, 2, address, -1), FSDPC_ERR_OS, "MASTER_PORT");
    /* The same socket, inherited, works; other sizes and doubled ranks are errors. */
    pid_t child = fork();
    if (child == 0) {
        close(listening);
        _exit(meet(1, 3, address, -1) == FSDPC_OK);
    }
    CHECK_FAILS(meet(0, 2, address, listening), FSDPC_ERR_MISMATCH, "WORLD_SIZE");
    int ended;
    waitpid(child, &ended, 0);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);

    /* Strangers who say nothing, or something else, hold nobody up. */
    CHECK_OK(fsdpc_rendezvous_listen(address, 0, &listening));
    int silent = stranger(listening), rude = stranger(listening);
    CHECK(write(rude, "GET / HTTP/1.1", 14) == 14);
    child = fork();
    if (child == 0) {
        close(listening);
        _exit(meet(1, 2, address, -1) != FSDPC_OK);
    }
    CHECK_OK(meet(0, 2, address, listening));
    waitpid(child, &ended, 0);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    close(silent);
    close(rude);
}

int main(void)
{
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(pipe(board->bell) == 0);
    test_death();
    ranks_run_processes(4, death_elsewhere, &(rank_options){.dies = 8});
    ranks_run_processes(4, the_first_death_is_named, &(rank_options){.dies = 8 | 1});
    reset_board();
    ranks_run_processes(3, an_orderly_end,
                        &(rank_options){.notice_s = 0.3, .notice = note_and_ring});
    reset_board();
    ranks_run_processes(2, a_rank_leaves, &(rank_options){0});
    for (int size = 2; size <= 3; size++)
        ranks_run_processes(size, a_rank_aborts, &(rank_options){0});
    ranks_run_processes(2, a_rank_is_stuck, &(rank_options){.timeout_s = 0.3});
    reset_board();
    ranks_run_processes(2, a_rank_is_late,
                        &(rank_options){.notice_s = 0.2, .notice = note_and_ring});
    test_orphans();
    test_leaks();
    for (int size = 2; size <= 3; size++)
        ranks_run_processes(size, too_large, &(rank_options){0});
    ranks_run_processes(2, forks, &(rank_options){0});
    reset_board();
    test_rendezvous();
    return check_report("test_comm_shm_faults");
}
