/* The table of named ranges, and the handler that looks up a fault in it.
 *
 * A signal handler cannot receive an argument, so the table is one of the documented globals. The
 * table has a fixed size and no lock: `taken` claims an entry, which is valid while its `begin` is
 * nonzero. The handler only loads memory and calls write(2); it formats the line itself.
 *
 * Note [chain]. Python's faulthandler prints its stacks, restores the previous handler and raises
 * the signal again. If the previous handler is ours, its siginfo no longer contains the address,
 * because faulthandler raised the signal. The machine context still contains the address of the
 * thread's last fault. If our handler was installed later, it runs before faulthandler. If there
 * was no previous handler, ours restores the default action. The fault then repeats and ends the
 * process with the signal that its parent expects.
 */
#include "base/fault.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

typedef struct slot {
    _Atomic int taken;
    _Atomic uintptr_t begin; /* release after the fields below, acquire in the handler */
    fsdpc_fault_range range;
} slot;

typedef enum deed { DEED_UNKNOWN, DEED_READ, DEED_WRITE } deed;

typedef struct line {
    char text[1024];
    size_t used;
} line;

static slot slots[FSDPC_FAULT_RANGES];
static _Atomic int slots_used; /* entries from here on were never taken */
static struct sigaction previous_segv, previous_bus;
static pthread_once_t installed = PTHREAD_ONCE_INIT;

static void add_text(line *out, const char *text)
{
    while (text && *text && out->used < sizeof out->text - 1)
        out->text[out->used++] = *text++;
}

static void add_number(line *out, int number)
{
    char digits[12];
    size_t at = sizeof digits - 1;
    unsigned rest = number < 0 ? 0u - (unsigned)number : (unsigned)number;
    digits[at] = 0;
    do {
        digits[--at] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (number < 0)
        digits[--at] = '-';
    add_text(out, digits + at);
}

/* Finds the address of this thread's last fault and whether it was a read or a write; see Note
 * [chain]. */
static uintptr_t fault_of(const siginfo_t *info, const void *context, deed *deed_out)
{
    uintptr_t address = info->si_code > 0 ? (uintptr_t)info->si_addr : 0;
    *deed_out = DEED_UNKNOWN;
#if defined(__x86_64__)
    const greg_t *registers = ((const ucontext_t *)context)->uc_mcontext.gregs;
    *deed_out = registers[REG_ERR] & 2 ? DEED_WRITE : DEED_READ;
    if (info->si_code <= 0)
        address = (uintptr_t)registers[REG_CR2];
#elif defined(__aarch64__)
    if (info->si_code <= 0)
        address = (uintptr_t)((const ucontext_t *)context)->uc_mcontext.fault_address;
#else
    (void)context;
#endif
    return address;
}

static const slot *find(uintptr_t address)
{
    int used = atomic_load_explicit(&slots_used, memory_order_acquire);
    for (int i = 0; i < used; i++) {
        uintptr_t begin = atomic_load_explicit(&slots[i].begin, memory_order_acquire);
        if (begin && address >= begin && address - begin < slots[i].range.bytes)
            return &slots[i];
    }
    return NULL;
}

static void describe(const slot *found, uintptr_t address, int signum, deed how)
{
    static const char *const verbs[] = {
        [DEED_UNKNOWN] = "read or wrote", [DEED_READ] = "read", [DEED_WRITE] = "wrote to"};
    static const char *const advice[] = {
        [DEED_UNKNOWN] =
            "unsharded parameters are read-only, and exist between unshard and reshard only",
        [DEED_READ] =
            ("which is sharded: its unsharded value exists only inside the unit's forward and "
             "backward, or between unshard() and reshard()"),
        [DEED_WRITE] =
            "whose unsharded parameters are read-only: change its own rows (.local), or a copy"};
    const fsdpc_fault_range *range = &found->range;
    const char *name = range->name ? range->name(range->owner, (const void *)address) : NULL;
    line out = {.used = 0};
    add_text(&out, "fsdpc: rank ");
    add_number(&out, range->rank);
    add_text(&out, ": something ");
    add_text(&out, verbs[how]);
    add_text(&out, name ? " parameter '" : " the padding");
    add_text(&out, name);
    add_text(&out, name ? "' of unit '" : " of unit '");
    add_text(&out, range->unit);
    add_text(&out, "', ");
    add_text(&out, signum == SIGBUS ? "and the host has no memory left behind it" : advice[how]);
    out.text[out.used++] = '\n';
    ssize_t written = write(STDERR_FILENO, out.text, out.used);
    (void)written; /* an error cannot be reported here */
}

static void hand_on(int signum, siginfo_t *info, void *context)
{
    const struct sigaction *before = signum == SIGBUS ? &previous_bus : &previous_segv;
    if (before->sa_flags & SA_SIGINFO) {
        before->sa_sigaction(signum, info, context);
    } else if (before->sa_handler == SIG_IGN && info->si_code <= 0) {
        return; /* a signal that was sent; a fault cannot be ignored */
    } else if (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN) {
        signal(signum, SIG_DFL);
        if (info->si_code <= 0)
            raise(signum); /* delivered when we return, since the handler blocks the signal */
    } else {
        before->sa_handler(signum);
    }
}

static void handle(int signum, siginfo_t *info, void *context)
{
    deed how;
    uintptr_t address = fault_of(info, context, &how);
    const slot *found = address ? find(address) : NULL;
    if (found)
        describe(found, address, signum, how);
    hand_on(signum, info, context);
}

static void install(void)
{
    struct sigaction ours = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    sigaction(SIGSEGV, &ours, &previous_segv);
    sigaction(SIGBUS, &ours, &previous_bus);
}

void fsdpc_fault_announce(const fsdpc_fault_range *range)
{
    if (!range->begin || range->bytes == 0)
        return;
    pthread_once(&installed, install);
    for (int i = 0; i < FSDPC_FAULT_RANGES; i++) {
        int no = 0;
        if (!atomic_compare_exchange_strong(&slots[i].taken, &no, 1))
            continue;
        slots[i].range = *range;
        atomic_store_explicit(&slots[i].begin, (uintptr_t)range->begin, memory_order_release);
        int used = atomic_load(&slots_used);
        while (used <= i && !atomic_compare_exchange_weak(&slots_used, &used, i + 1)) {
        }
        return;
    }
}

void fsdpc_fault_withdraw(const void *begin, const void *owner)
{
    int used = atomic_load_explicit(&slots_used, memory_order_acquire);
    for (int i = 0; begin && i < used; i++) {
        /* the fields are stable while `begin` shows that the range is ours */
        if (atomic_load_explicit(&slots[i].begin, memory_order_acquire) != (uintptr_t)begin ||
            slots[i].range.owner != owner)
            continue;
        atomic_store_explicit(&slots[i].begin, 0, memory_order_release);
        atomic_store_explicit(&slots[i].taken, 0, memory_order_release);
        return;
    }
}
