/* Running a function as several ranks: as threads of this process, or as forked processes.
 *
 * Each rank gets a `rank_context` with a communicator and a CPU device. Ranks check with EXPECT
 * (CHECK's counters belong to the main thread); ranks_run adds what they counted to CHECK's. A
 * process that hangs is ended by an alarm, a thread by the communicator's deadline.
 */
#ifndef FSDPC_TESTS_COMM_RANKS_H
#define FSDPC_TESTS_COMM_RANKS_H

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "check.h"
#include "comm/comm.h"
#include "ops/flat_ops.h"

enum { RANKS_MAX = 8, RANKS_ALARM_S = 120 };

typedef struct rank_context {
    int rank, size;
    bool threads;
    fsdpc_comm *comm;
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_stream *stream; /* as options.async asks */
    const void *arg;
    int checks, failures;
} rank_context;

typedef void (*rank_fn)(rank_context *self);

typedef struct rank_options {
    double timeout_s, notice_s;
    bool async, spin;
    int dies; /* bit r: rank r is expected not to exit by itself */
    void (*notice)(void *arg, const char *text);
    const void *arg;
} rank_options;

#define EXPECT(self, condition, ...)                                                               \
    do {                                                                                           \
        (self)->checks++;                                                                          \
        if (!(condition)) {                                                                        \
            (self)->failures++;                                                                    \
            fprintf(stderr, "%s:%d: rank %d of %d (%s): EXPECT(%s) failed: ", __FILE__, __LINE__,  \
                    (self)->rank, (self)->size, (self)->threads ? "threads" : "processes",         \
                    #condition);                                                                   \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)

#define EXPECT_OK(self, expr)                                                                      \
    do {                                                                                           \
        fsdpc_status expect_status_ = (expr);                                                      \
        EXPECT(self, expect_status_ == FSDPC_OK, "%s: %s", fsdpc_status_text(expect_status_),      \
               fsdpc_last_error());                                                                \
    } while (0)

#define EXPECT_FAILS(self, expr, code, words)                                                      \
    do {                                                                                           \
        fsdpc_status expect_status_ = (expr);                                                      \
        EXPECT(self, expect_status_ == (code) && strstr(fsdpc_last_error(), (words)), "%s: %s",    \
               fsdpc_status_text(expect_status_), fsdpc_last_error());                             \
    } while (0)

static inline fsdpc_comm_config ranks_config(rank_context *self, const rank_options *options)
{
    return (fsdpc_comm_config){
        .rank = self->rank,
        .size = self->size,
        .device = self->device,
        .timeout_s = options->timeout_s > 0 ? options->timeout_s : 60,
        .notice_s = options->notice_s > 0 ? options->notice_s : 30,
        .notice = options->notice,
        .notice_arg = self,
        .spin = options->spin,
        .socket_fd = -1,
    };
}

static inline void ranks_open(rank_context *self, const rank_options *options)
{
    fsdpc_isa isa = fsdpc_isa_best();
    EXPECT_OK(self, fsdpc_mem_create(&self->mem));
    EXPECT_OK(self, fsdpc_device_cpu_create(self->mem, NULL, isa, options->async, &self->device));
    self->device->flat = fsdpc_flat_ops_cpu(isa);
    EXPECT_OK(self, fsdpc_stream_create(self->device, "test", options->async, &self->stream));
    self->arg = options->arg;
}

static inline void ranks_close(rank_context *self)
{
    fsdpc_comm_destroy(self->comm);
    fsdpc_stream_destroy(self->stream);
    fsdpc_device_destroy(self->device);
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(self->mem, &stats);
    EXPECT(self,
           stats.now_bytes[FSDPC_MEM_UNSHARDED] == 0 && stats.now_bytes[FSDPC_MEM_REDUCE] == 0,
           "memory is still counted");
    fsdpc_mem_destroy(self->mem);
}

typedef struct rank_thread {
    rank_context context;
    rank_fn fn;
    pthread_t thread;
} rank_thread;

static void *ranks_thread_main(void *arg)
{
    rank_thread *rank = arg;
    rank->fn(&rank->context);
    ranks_close(&rank->context);
    return NULL;
}

static inline void ranks_run_threads(int size, rank_fn fn, const rank_options *options)
{
    static rank_thread ranks[RANKS_MAX];
    fsdpc_comm_config configs[RANKS_MAX];
    fsdpc_comm *comms[RANKS_MAX];
    memset(ranks, 0, sizeof ranks);
    for (int r = 0; r < size; r++) {
        ranks[r].context = (rank_context){.rank = r, .size = size, .threads = true};
        ranks[r].fn = fn;
        ranks_open(&ranks[r].context, options);
        configs[r] = ranks_config(&ranks[r].context, options);
    }
    CHECK_OK(fsdpc_comm_shm_create_threads(configs, size, comms));
    for (int r = 0; r < size; r++) {
        ranks[r].context.comm = comms[r];
        CHECK(pthread_create(&ranks[r].thread, NULL, ranks_thread_main, &ranks[r]) == 0);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(ranks[r].thread, NULL);
        check_count += ranks[r].context.checks;
        check_failures += ranks[r].context.failures;
    }
}

static inline const char *ranks_address(void)
{
    static char address[64];
    static int runs;
    snprintf(address, sizeof address, "test-%d-%d", (int)getpid(), runs++);
    return address;
}

/* Where ranks wait for each other outside of what is tested: one that is still on its way into the
 * communicator when others find an error in it would hear of that there. */
static inline pthread_barrier_t *ranks_meeting(int size)
{
    pthread_barrier_t *meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t shared;
    CHECK(meeting != MAP_FAILED);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(meeting, &shared, (unsigned)size);
    return meeting;
}

static inline void ranks_process_main(int rank, int size, const char *address,
                                      pthread_barrier_t *meeting, rank_fn fn,
                                      const rank_options *options)
{
    alarm(RANKS_ALARM_S);
    rank_context self = {.rank = rank, .size = size};
    ranks_open(&self, options);
    fsdpc_comm_config config = ranks_config(&self, options);
    config.address = address;
    EXPECT_OK(&self, fsdpc_comm_shm_create(&config, &self.comm));
    pthread_barrier_wait(meeting);
    if (self.comm)
        fn(&self);
    ranks_close(&self);
    fflush(NULL);
    _exit(self.failures ? 1 : 0);
}

static inline void ranks_run_processes(int size, rank_fn fn, const rank_options *options)
{
    pid_t pids[RANKS_MAX];
    const char *address = ranks_address();
    pthread_barrier_t *meeting = ranks_meeting(size);
    fflush(NULL);
    for (int r = 0; r < size; r++) {
        pids[r] = fork();
        if (pids[r] == 0)
            ranks_process_main(r, size, address, meeting, fn, options);
    }
    for (int r = 0; r < size; r++) {
        int ended = 0;
        waitpid(pids[r], &ended, 0);
        if (options->dies >> r & 1)
            CHECK_NOTE(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL, "rank %d: %x", r, ended);
        else
            CHECK_NOTE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0, "rank %d: %x", r, ended);
    }
    munmap(meeting, sizeof *meeting);
}

static inline void ranks_run(bool threads, int size, rank_fn fn, const rank_options *options)
{
    if (threads)
        ranks_run_threads(size, fn, options);
    else
        ranks_run_processes(size, fn, options);
}

#endif
