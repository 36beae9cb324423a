/* The clock, futexes within and across processes, interrupts; threads with signals left out. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "check.h"

static const int64_t second = 1000000000;

/* Waits until *word >= goal; false after ten seconds. */
static int reach(_Atomic uint32_t *word, uint32_t goal)
{
    int64_t end = fsdpc_clock_ns() + 10 * second;
    for (;;) {
        uint32_t now = atomic_load(word);
        if (now >= goal)
            return 1;
        if (fsdpc_clock_ns() > end)
            return 0;
        fsdpc_futex_wait(word, now, second / 10);
    }
}

static void test_clock(void)
{
    int64_t a = fsdpc_clock_ns(), b = fsdpc_clock_ns();
    CHECK(a > 0 && b >= a && b - a < second);
}

static void test_returns(void)
{
    _Atomic uint32_t word = 1;
    int64_t begin = fsdpc_clock_ns();
    fsdpc_futex_wait(&word, 0, 60 * second); /* another value: at once */
    fsdpc_futex_wait(&word, 1, 0);
    fsdpc_futex_wait(&word, 1, -5);
    CHECK(fsdpc_clock_ns() - begin < 10 * second);
    begin = fsdpc_clock_ns();
    fsdpc_futex_wait(&word, 1, 2000000); /* nobody wakes: the limit ends it */
    CHECK(fsdpc_clock_ns() - begin < 10 * second);
    fsdpc_futex_wake(&word); /* nobody sleeps: harmless */
}

static void test_processes(void)
{
    /* two mappings of one memory: the words differ in address, as with a memfd's aliases */
    int fd = memfd_create("test_wait", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    _Atomic uint32_t *mine = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pid_t child = fork();
    if (child == 0) {
        _Atomic uint32_t *other = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        int fine = 1;
        for (uint32_t turn = 0; turn < 200 && fine; turn++) {
            fine = reach(other, 2 * turn + 1);
            atomic_fetch_add(other, 1);
            fsdpc_futex_wake(other);
        }
        _exit(!fine);
    }
    int fine = 1;
    for (uint32_t turn = 0; turn < 200 && fine; turn++) {
        atomic_fetch_add(mine, 1);
        fsdpc_futex_wake(mine);
        fine = reach(mine, 2 * turn + 2);
    }
    CHECK(fine);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    munmap(mine, 4096);
    close(fd);
}

static fsdpc_status refuse(void *arg)
{
    ++*(int *)arg;
    return fsdpc_fail(FSDPC_ERR_INTERRUPT, "Ctrl-C");
}

static void test_interrupt(void)
{
    int calls = 0;
    fsdpc_interrupt interrupt = {.fn = refuse, .arg = &calls}, none = {0};
    CHECK_OK(fsdpc_interrupt_check(NULL));
    CHECK_OK(fsdpc_interrupt_check(&none));
    CHECK(fsdpc_interrupt_check(&interrupt) == FSDPC_ERR_INTERRUPT && calls == 1);
}

static void *look_at_self(void *arg)
{
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    int *seen = arg;
    *seen = sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM) &&
            !sigismember(&mask, SIGSEGV) && !sigismember(&mask, SIGBUS);
    return NULL;
}

static void test_thread(void)
{
    int masked = 0;
    pthread_t thread;
    sigset_t mask;
    CHECK_OK(fsdpc_thread_start("a name of more than fifteen", look_at_self, &masked, &thread));
    pthread_join(thread, NULL);
    CHECK(masked);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    CHECK(!sigismember(&mask, SIGINT)); /* the caller's own is as before */
}

int main(void)
{
    test_clock();
    test_returns();
    test_processes();
    test_interrupt();
    test_thread();
    return check_report("wait");
}
