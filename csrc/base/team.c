/* The threads of a team claim the parts of a run through a single atomic ticket.
 *
 * A run publishes its function in the team and then its ticket, which holds the generation in its
 * high half and the number of unclaimed parts in its low half. The caller and the workers claim
 * parts by compare-and-swap on the ticket. A worker that sleeps through a run, or wakes during a
 * later one, can therefore never claim a part of the wrong run. The caller waits only for claimed
 * parts, which `done` counts, and never for a worker that claimed none.
 *
 * Idle workers spin for a few microseconds before they sleep on a futex, because the kernels of a
 * step follow each other closely. If there are more threads than cores, idle workers sleep at once.
 * When no parts are left, the caller spins in the same way before it sleeps on `done`.
 *
 * `running` admits one run; a caller that finds it taken (a nested call, another thread) executes
 * its parts inline. A forked child has no workers. This only makes the child slower, because the
 * caller does not wait for absent workers. If the fork happens during another thread's run,
 * `running` stays set in the child, and all of the child's work runs inline. Only destroy needs to
 * know which process owns the threads.
 *
 * Note [fields of a run]. fn, arg and parts are atomics only because a late worker may read them
 * while the next run writes them. The worker uses the values only if its compare-and-swap then
 * succeeds. Success proves that the run they belong to still had unclaimed parts, so the next run
 * had not begun to write. The next run's caller first waits until `done`, which is incremented
 * after the swap, includes every part of this run.
 */
#include "base/team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"

enum { CACHE_LINE = 64, SPIN_NS = 20000, SPINS_PER_LOOK = 16, MAX_THREADS = 4096 };

struct fsdpc_team {
    /* Every part touches the first cache line; only runs and sleepers touch the second. */
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket; /* generation << 32 | parts left */
    _Atomic uint32_t done; /* parts finished in this run; futex of the caller */
    _Atomic uint32_t caller_sleeps;
    _Atomic(fsdpc_team_fn) fn; /* Note [fields of a run] */
    _Atomic(void *) arg;
    _Atomic size_t first; /* index of the run's first part */
    _Atomic uint32_t parts;

    _Alignas(CACHE_LINE) _Atomic uint32_t generation; /* futex of the workers */
    _Atomic uint32_t sleepers;
    _Atomic bool running, stop;
    int threads, started; /* started: workers that exist */
    bool tried_to_start;
    int64_t spin_ns;
    pid_t workers_pid;  /* the process that contains them */
    pthread_t *workers; /* threads - 1 */
};

/* These futexes are private: only threads of this process sleep on them, and the kernel looks them
 * up faster than the shared futexes in wait.h. */
static void sleep_on(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, uint32_t sleepers)
{
    int count = sleepers > INT_MAX ? INT_MAX : (int)sleepers;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Returns true once *word differs from `old`, or false when the time limit for spinning has
 * passed. */
static bool spin_until_changed(const fsdpc_team *team, _Atomic uint32_t *word, uint32_t old)
{
    if (team->spin_ns == 0)
        return atomic_load_explicit(word, memory_order_acquire) != old;
    int64_t begin = 0;
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            /* pairs with the release of the thread that changed the word */
            if (atomic_load_explicit(word, memory_order_acquire) != old)
                return true;
            fsdpc_cpu_relax();
        }
        int64_t now = fsdpc_clock_ns();
        if (begin == 0)
            begin = now;
        else if (now - begin > team->spin_ns)
            return false;
    }
}

/* Claims and executes parts until none are left in the current run. */
static void work(fsdpc_team *team)
{
    /* acquire: pairs with the ticket's release in run_shared, which makes that run's fields
     * visible */
    uint64_t ticket = atomic_load_explicit(&team->ticket, memory_order_acquire);
    while ((uint32_t)ticket != 0) {
        fsdpc_team_fn fn = atomic_load_explicit(&team->fn, memory_order_relaxed);
        void *arg = atomic_load_explicit(&team->arg, memory_order_relaxed);
        size_t first = atomic_load_explicit(&team->first, memory_order_relaxed);
        uint32_t parts = atomic_load_explicit(&team->parts, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&team->ticket, &ticket, ticket - 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        fn(arg, first + (parts - (uint32_t)ticket));
        /* seq_cst: releases the part's results to the caller's acquire of done, and against
         * caller_sleeps: either the caller sees this count or we see it sleeping. */
        uint32_t done = atomic_fetch_add(&team->done, 1) + 1;
        if (done == parts && atomic_load(&team->caller_sleeps))
            wake(&team->done, 1);
        ticket = atomic_load_explicit(&team->ticket, memory_order_acquire);
    }
}

static void *worker_main(void *arg)
{
    fsdpc_team *team = arg;
    uint32_t seen =
        0; /* generation 0 has no work: a worker that starts late joins the current run */
    while (!atomic_load_explicit(&team->stop, memory_order_acquire)) {
        if (!spin_until_changed(team, &team->generation, seen)) {
            /* seq_cst, against run_shared: it sees us among the sleepers or we see its generation
             */
            atomic_fetch_add(&team->sleepers, 1);
            while (atomic_load(&team->generation) == seen)
                sleep_on(&team->generation, seen);
            atomic_fetch_sub(&team->sleepers, 1);
        }
        seen = atomic_load_explicit(&team->generation, memory_order_acquire);
        work(team);
    }
    return NULL;
}

static void start_workers(fsdpc_team *team)
{
    team->tried_to_start = true;
    team->workers_pid = getpid();
    while (team->started < team->threads - 1) {
        char name[32];
        snprintf(name, sizeof name, "fsdpc-team-%d", team->started + 1);
        if (fsdpc_thread_start(name, worker_main, team, &team->workers[team->started]) != FSDPC_OK)
            break; /* a smaller team gives the same results */
        team->started++;
    }
}

static void wait_for_parts(fsdpc_team *team, uint32_t parts)
{
    uint32_t done;
    while ((done = atomic_load_explicit(&team->done, memory_order_acquire)) != parts) {
        if (spin_until_changed(team, &team->done, done))
            continue;
        atomic_store(&team->caller_sleeps, 1);
        while ((done = atomic_load(&team->done)) != parts)
            sleep_on(&team->done, done);
        atomic_store(&team->caller_sleeps, 0);
    }
}

/* Performs one run of 2 to 2^32 - 1 parts; the caller holds `running`. */
static void run_shared(fsdpc_team *team, size_t first, uint32_t parts, fsdpc_team_fn fn, void *arg)
{
    if (!team->tried_to_start)
        start_workers(team);
    atomic_store_explicit(&team->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&team->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&team->first, first, memory_order_relaxed);
    atomic_store_explicit(&team->parts, parts, memory_order_relaxed);
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    uint32_t generation = atomic_load_explicit(&team->generation, memory_order_relaxed) + 1;
    atomic_store_explicit(&team->ticket, (uint64_t)generation << 32 | parts, memory_order_release);
    atomic_store(&team->generation, generation); /* seq_cst, against worker_main's sleepers */
    uint32_t sleepers = atomic_load(&team->sleepers);
    if (sleepers)
        wake(&team->generation, sleepers < parts - 1 ? sleepers : parts - 1);
    work(team);
    wait_for_parts(team, parts);
}

fsdpc_status fsdpc_team_create(int threads, fsdpc_team **out)
{
    if (threads < 1 || threads > MAX_THREADS)
        return fsdpc_fail(FSDPC_ERR_VALUE, "a team of %d threads; 1 to %d are possible", threads,
                          MAX_THREADS);
    fsdpc_team *team = aligned_alloc(CACHE_LINE, sizeof *team);
    pthread_t *workers = calloc((size_t)threads, sizeof *workers);
    if (!team || !workers) {
        free(team);
        free(workers);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a team of %d threads", threads);
    }
    *team = (fsdpc_team){.threads = threads, .workers = workers};
    team->spin_ns = threads <= fsdpc_usable_cores() ? SPIN_NS : 0;
    *out = team;
    return FSDPC_OK;
}

void fsdpc_team_destroy(fsdpc_team *team)
{
    if (!team)
        return;
    if (team->workers_pid == getpid()) { /* a forked child has no threads to join */
        atomic_store_explicit(&team->stop, true, memory_order_release);
        atomic_fetch_add(&team->generation, 1);
        wake(&team->generation, INT_MAX);
        for (int i = 0; i < team->started; i++)
            pthread_join(team->workers[i], NULL);
    }
    free(team->workers);
    free(team);
}

int fsdpc_team_threads(const fsdpc_team *team)
{
    return team ? team->threads : 1;
}

int fsdpc_team_workers(const fsdpc_team *team)
{
    return team && team->workers_pid == getpid() ? team->started : 0;
}

void fsdpc_team_run(fsdpc_team *team, size_t parts, fsdpc_team_fn fn, void *arg)
{
    bool shared = team && team->threads > 1 && parts > 1 &&
                  !atomic_exchange_explicit(&team->running, true, memory_order_acquire);
    if (!shared) {
        for (size_t part = 0; part < parts; part++)
            fn(arg, part);
        return;
    }
    for (size_t first = 0; first < parts;) {
        size_t rest = parts - first;
        uint32_t now = rest > UINT32_MAX ? UINT32_MAX : (uint32_t)rest;
        run_shared(team, first, now, fn, arg);
        first += now;
    }
    /* pairs with the acquire above: the next caller sees our writes to the plain fields */
    atomic_store_explicit(&team->running, false, memory_order_release);
}
