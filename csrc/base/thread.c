/* Creates named threads that block signals.
 *
 * The mask is set in the creating thread before pthread_create and inherited by the new thread. If
 * the new thread set the mask itself, a signal could arrive first. The caller's mask is then
 * restored.
 */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>

fsdpc_status fsdpc_thread_start(const char *name, void *(*main_fn)(void *), void *arg,
                                pthread_t *out)
{
    sigset_t blocked, before;
    sigfillset(&blocked);
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_t thread;
    int error = pthread_create(&thread, NULL, main_fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        errno = error;
        return fsdpc_fail_errno("thread '%s' could not be started; raise the limit of processes "
                                "(ulimit -u) or set FSDPC_THREADS lower",
                                name);
    }
    char short_name[16]; /* the kernel's limit, end included */
    snprintf(short_name, sizeof short_name, "%s", name);
    pthread_setname_np(thread, short_name);
    *out = thread;
    return FSDPC_OK;
}
