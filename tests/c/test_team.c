/* The team: every part exactly once, results visible, nested and concurrent callers, fork. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/team.h"
#include "base/wait.h"
#include "check.h"

enum { MAX_PARTS = 1000 };

typedef struct work {
    fsdpc_team *team;
    int counts[MAX_PARTS];      /* plain on purpose: the team must order them */
    _Atomic int inner;          /* parts of nested runs */
    _Atomic int started, width; /* test_parallel */
} work;

static void count_part(void *arg, size_t part)
{
    ((work *)arg)->counts[part]++;
}

static void test_every_part_once(void)
{
    for (int threads = 1; threads <= 4; threads++) {
        fsdpc_team *team;
        CHECK_OK(fsdpc_team_create(threads, &team));
        CHECK(fsdpc_team_threads(team) == threads);
        const size_t sizes[] = {0, 1, 2, 3, 7, MAX_PARTS};
        for (int turn = 0; turn < 2000; turn++) {
            size_t parts = sizes[turn % 6];
            work w = {0};
            fsdpc_team_run(team, parts, count_part, &w);
            int wrong = 0;
            for (size_t i = 0; i < MAX_PARTS; i++)
                wrong += w.counts[i] != (i < parts);
            if (wrong)
                CHECK_NOTE(wrong == 0, "%d threads, %zu parts, turn %d", threads, parts, turn);
        }
        CHECK(1);
        fsdpc_team_destroy(team);
    }
}

static void test_inline_forms(void)
{
    work w = {0};
    CHECK(fsdpc_team_threads(NULL) == 1);
    fsdpc_team_run(NULL, 5, count_part, &w);
    CHECK(w.counts[0] == 1 && w.counts[4] == 1 && w.counts[5] == 0);
    fsdpc_team_destroy(NULL);
    fsdpc_team *team;
    CHECK_FAILS(fsdpc_team_create(0, &team), FSDPC_ERR_VALUE, "0 threads");
    CHECK_FAILS(fsdpc_team_create(1 << 20, &team), FSDPC_ERR_VALUE, "4096");
}

static void count_inner(void *arg, size_t part)
{
    (void)part;
    atomic_fetch_add(&((work *)arg)->inner, 1);
}

static void run_inner(void *arg, size_t part)
{
    work *w = arg;
    (void)part;
    fsdpc_team_run(w->team, 10, count_inner, w);
}

static void test_nested(void)
{
    work w = {0};
    CHECK_OK(fsdpc_team_create(3, &w.team));
    for (int turn = 0; turn < 100; turn++)
        fsdpc_team_run(w.team, 8, run_inner, &w);
    CHECK(atomic_load(&w.inner) == 100 * 8 * 10);
    fsdpc_team_destroy(w.team);
}

/* Each part waits (with a deadline) until two parts run at once: proves that workers do work. */
static void meet_another(void *arg, size_t part)
{
    work *w = arg;
    (void)part;
    atomic_fetch_add(&w->started, 1);
    int64_t end = fsdpc_clock_ns() + 10000000000;
    while (atomic_load(&w->started) < 2 && fsdpc_clock_ns() < end)
        fsdpc_cpu_relax();
    if (atomic_load(&w->started) >= 2)
        atomic_fetch_add(&w->width, 1);
}

static void test_parallel(void)
{
    work w = {0};
    CHECK_OK(fsdpc_team_create(2, &w.team));
    fsdpc_team_run(w.team, 2, meet_another, &w);
    CHECK(atomic_load(&w.width) == 2);
    fsdpc_team_destroy(w.team);
}

typedef struct caller {
    fsdpc_team *team;
    work w;
} caller;

static void *call_many(void *arg)
{
    caller *c = arg;
    for (int turn = 0; turn < 2000; turn++)
        fsdpc_team_run(c->team, 16, count_part, &c->w);
    return NULL;
}

static void test_two_callers(void)
{
    static caller callers[2];
    fsdpc_team *team;
    CHECK_OK(fsdpc_team_create(2, &team));
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        callers[i].team = team;
        CHECK(pthread_create(&threads[i], NULL, call_many, &callers[i]) == 0);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++)
        for (int part = 0; part < 16; part++)
            CHECK(callers[i].w.counts[part] == 2000);
    fsdpc_team_destroy(team);
}

/* Runs 8 parts in a child; whether each ran once and the child ended well. */
static int child_runs(fsdpc_team *team)
{
    pid_t child = fork();
    if (child == 0) {
        work mine = {0};
        int wrong = 0;
        for (int turn = 1; turn <= 100; turn++) {
            fsdpc_team_run(team, 8, count_part, &mine);
            for (int i = 0; i < 8; i++)
                wrong += mine.counts[i] != turn;
        }
        fsdpc_team_destroy(team);
        _exit(wrong != 0);
    }
    int status = -1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void test_fork(void)
{
    fsdpc_team *team;
    work w = {0};
    CHECK_OK(fsdpc_team_create(3, &team));
    CHECK(child_runs(team)); /* the child starts workers of its own, and ends them */
    fsdpc_team_run(team, 8, count_part, &w);
    CHECK(child_runs(team)); /* the parent has workers: the child works alone */
    fsdpc_team_run(team, 8, count_part, &w);
    CHECK(w.counts[7] == 2);
    fsdpc_team_destroy(team);
}

static void test_cpu(void)
{
    CHECK(fsdpc_usable_cores() >= 1);
    fsdpc_isa best = fsdpc_isa_best(), isa;
    CHECK_OK(fsdpc_isa_parse("auto", &isa));
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (best == FSDPC_ISA_AVX512BF16 && __builtin_cpu_is("intel"))
        CHECK(isa == FSDPC_ISA_AVX512); /* slow vdpbf16ps */
    else
#endif
        CHECK(isa == best);
    CHECK_OK(fsdpc_isa_parse("portable", &isa));
    CHECK(isa == FSDPC_ISA_PORTABLE);
    for (int i = 0; i < FSDPC_ISA_COUNT; i++) {
        if (i <= (int)best)
            CHECK(fsdpc_isa_parse(fsdpc_isa_name((fsdpc_isa)i), &isa) == FSDPC_OK && (int)isa == i);
        else
            CHECK_FAILS(fsdpc_isa_parse(fsdpc_isa_name((fsdpc_isa)i), &isa), FSDPC_ERR_VALUE,
                        fsdpc_isa_name(best));
    }
    CHECK_FAILS(fsdpc_isa_parse("sse9", &isa), FSDPC_ERR_VALUE, "sse9");
    CHECK(strcmp(fsdpc_isa_name(FSDPC_ISA_COUNT), "unknown instruction set") == 0);
}

int main(void)
{
    test_every_part_once();
    test_inline_forms();
    test_nested();
    test_parallel();
    test_two_callers();
    test_fork();
    test_cpu();
    return check_report("team");
}
