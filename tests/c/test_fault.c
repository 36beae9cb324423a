/* Faults in named memory: who died of what, in one line, and who is told afterwards. */
#include "base/fault.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, HANDLED = 42 };

static struct sigaction before_late; /* what the late handler found, as faulthandler keeps it */

static const char *name_of(const void *owner, const void *address)
{
    size_t offset = (size_t)((const char *)address - (const char *)owner);
    return offset < 64 ? "weight" : offset < 128 ? "bias" : NULL;
}

static void early_handler(int signum, siginfo_t *info, void *context)
{
    (void)signum, (void)context;
    const char text[] = "early\n";
    ssize_t n = write(2, text, sizeof text - 1);
    _exit(n > 0 && info->si_addr ? HANDLED : 1);
}

static void late_handler(int signum)
{
    const char text[] = "late\n";
    ssize_t n = write(2, text, sizeof text - 1);
    (void)n;
    sigaction(signum, &before_late, NULL);
    raise(signum);
}

typedef enum deed { WRITE, READ, RAISE, WRITE_AFTER_UNWATCH, WRITE_ELSEWHERE } deed;
typedef enum others { NOBODY, EARLY, LATE } others;

static void child(deed what, others who, size_t offset)
{
    char *page =
        mmap(NULL, PAGE, what == READ ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    volatile char *elsewhere = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (who == EARLY) {
        struct sigaction early = {.sa_sigaction = early_handler, .sa_flags = SA_SIGINFO};
        sigaction(SIGSEGV, &early, NULL);
    }
    fsdpc_fault_announce(&(fsdpc_fault_range){
        .begin = page, .bytes = 256, .rank = 13, .unit = "Net.0", .owner = page, .name = name_of});
    if (who == LATE) {
        struct sigaction late = {.sa_handler = late_handler, .sa_flags = SA_NODEFER};
        sigaction(SIGSEGV, &late, &before_late);
    }
    if (what == WRITE_AFTER_UNWATCH)
        fsdpc_fault_withdraw(page, page);
    if (what == RAISE)
        raise(SIGSEGV);
    else if (what == READ)
        _exit(((volatile char *)page)[offset]);
    else if (what == WRITE_ELSEWHERE)
        elsewhere[0] = 1;
    else
        ((volatile char *)page)[offset] = 1;
    _exit(0);
}

/* What the child wrote to stderr; its end in *ending_out. */
static const char *die(deed what, others who, size_t offset, int *ending_out)
{
    static char text[65536];
    int ends[2];
    if (pipe(ends))
        return "";
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        child(what, who, offset);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t n; (n = read(ends[0], text + used, sizeof text - 1 - used)) > 0;)
        used += (size_t)n;
    text[used] = 0;
    close(ends[0]);
    waitpid(pid, ending_out, 0);
    return text;
}

static bool died(int ending)
{
#if SANITIZED /* it handles faults itself, after us: a process ends by its exit code */
    return !WIFEXITED(ending) || WEXITSTATUS(ending) != 0;
#else
    return WIFSIGNALED(ending) && WTERMSIG(ending) == SIGSEGV;
#endif
}

static int lines_of(const char *text)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, "fsdpc: rank ")); at++)
        n++;
    return n;
}

static void test_the_line(void)
{
    int ending;
    const char *text = die(WRITE, NOBODY, 65, &ending);
    CHECK(died(ending) && lines_of(text) == 1);
    CHECK_NOTE(strstr(text, "fsdpc: rank 13: something ") && strstr(text, "'bias' of unit 'Net.0'"),
               "%s", text);
#ifdef __x86_64__
    CHECK_NOTE(strstr(text, "wrote to parameter 'bias'"), "%s", text);
    text = die(READ, NOBODY, 0, &ending);
    CHECK_NOTE(strstr(text, "read parameter 'weight'"), "%s", text);
    text = die(WRITE, NOBODY, 200, &ending);
    CHECK_NOTE(strstr(text, "wrote to the padding of unit 'Net.0'"), "%s", text);
#endif
    CHECK(died(ending) && lines_of(text) == 1);
}

static void test_silence(void)
{
    int ending;
    CHECK(lines_of(die(WRITE_AFTER_UNWATCH, NOBODY, 0, &ending)) == 0 && died(ending));
    CHECK(lines_of(die(WRITE_ELSEWHERE, NOBODY, 0, &ending)) == 0 && died(ending));
    CHECK(lines_of(die(WRITE, NOBODY, 256, &ending)) == 0 && died(ending));
    CHECK(lines_of(die(RAISE, NOBODY, 0, &ending)) == 0 && died(ending));
}

static void test_chain(void)
{
    int ending;
    const char *text = die(WRITE, EARLY, 0, &ending);
    CHECK(WIFEXITED(ending) && WEXITSTATUS(ending) == HANDLED);
    CHECK_NOTE(lines_of(text) == 1 && strstr(text, "early\n") > strstr(text, "fsdpc:"), "%s", text);
#ifdef __x86_64__
    text = die(WRITE, LATE, 0, &ending); /* the address comes from the machine context */
    CHECK(died(ending));
    CHECK_NOTE(lines_of(text) == 1 && strstr(text, "late\n") < strstr(text, "fsdpc:"), "%s", text);
#endif
}

/* A full table names no more, and loses nothing. */
static void test_unsharded_table(void)
{
    static char memory[FSDPC_FAULT_RANGES + 8];
    for (size_t i = 0; i < sizeof memory; i++)
        fsdpc_fault_announce(
            &(fsdpc_fault_range){.begin = memory + i, .bytes = 1, .owner = memory});
    for (size_t i = 0; i < sizeof memory; i++)
        fsdpc_fault_withdraw(memory + i, memory);
    int ending;
    CHECK(lines_of(die(WRITE, NOBODY, 0, &ending)) == 1);
}

int main(void)
{
    test_the_line();
    test_silence();
    test_chain();
    test_unsharded_table();
    return check_report("test_fault");
}
